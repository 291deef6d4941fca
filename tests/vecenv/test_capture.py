"""Tests of vecenv/capture.py and restore.py: what is taken of an env comes back as one and the same, or is refused."""

import collections
import ctypes
import enum
import functools
import itertools
import logging
import math
import random
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import vecenv
from tests.helpers import CountingEnv
from vecenv.capture import Captures
from vecenv.restore import Restores
from vecenv.state import load, save

WORLD = np.zeros((2, 2))
TABLE = {"rows": [1, 2]}


class Mood(enum.Enum):
    CALM = (1, 2)
    WILD = "wild"


class Place(NamedTuple):
    x: int
    y: list


@dataclass
class Ball:
    speed: float = 1.0
    trail: list = field(default_factory=list)
    owner: object = None

    def move(self):
        self.trail.append(self.speed)


class Slotted:
    __slots__ = ("x",)


class Holder(gym.Env):
    """Has the attributes that a test gives it."""

    common = np.zeros(3)

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def easy(self):
        return 1

    def hard(self):
        return 2


def through(path, saved, fresh=None):
    """Returns an env with the state of another, by way of a file."""
    fresh = Holder() if fresh is None else fresh
    state = Captures().add(saved)
    save(path, state)
    Restores().put(fresh, load(path))
    return fresh


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**127),
        -0.0,
        float("inf"),
        "ü\0",
        b"\xff",
        1 - 2j,
        np.float32(0.1),
        np.str_("a\0"),
        np.uint8(7),
        np.dtype(">f4"),
        range(3, 9, 2),
        frozenset({(1, 2)}),
        frozenset({1, 2, 3}),
        Mood.CALM,
        Mood.WILD,
        Place(1, [2]),
        [1, (2.0, [None]), {"a": {1: "b", (1, np.int64(2)): 3}}],
        collections.deque([1, 2], maxlen=2),
        collections.OrderedDict(b=1, a=[2]),
        collections.defaultdict(list, {"a": [1]}),
        Ball(2.0, [1.0]),
        math.sin,
        np.maximum,
        Ball,
        gym,
        logging.getLogger("some"),
        np.array(["ab", "c"]),
        np.array([], np.int8),
        np.array("2020-01-01", "M8[D]"),
    ],
    ids=repr,
)
def test_values_come_back_in_type_and_content(value, path):
    found = through(path, Holder(value=value), Holder(gone=1))
    assert vars(found).keys() == {"value"}
    assert type(found.value) is type(value)
    np.testing.assert_equal(found.value, value)
    if isinstance(value, (dict, collections.deque)):
        assert list(found.value) == list(value) and getattr(found.value, "maxlen", 0) == getattr(value, "maxlen", 0)
        assert getattr(found.value, "default_factory", 0) == getattr(value, "default_factory", 0)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::-3],
        np.broadcast_to(np.arange(3.0), (2, 3)),
        np.arange(6, dtype=">i2").reshape(2, 3)[:, 1],
    ],
)
def test_arrays_keep_the_order_in_memory_on_which_sums_depend(array, path):
    found = through(path, Holder(value=array)).value
    np.testing.assert_array_equal(found, array)
    assert (found.dtype, found.strides, found.flags.writeable) == (array.dtype, array.strides, array.flags.writeable)


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_generators_go_on_and_so_do_those_that_they_spawn(name, path):
    saved = Holder(one=np.random.Generator(getattr(np.random, name)(5)))
    saved.one.spawn(2), saved.one.random(3), saved.one.integers(9, dtype=np.int32)
    found = through(path, saved)
    for _ in range(2):
        draws = [(g.random(), g.integers(9, dtype=np.int32), g.spawn(1)[0].random()) for g in (saved.one, found.one)]
        assert draws[0] == draws[1]


def test_older_generators_go_on(path):
    saved = Holder(numpy=np.random.RandomState(1), python=random.Random(2))
    saved.numpy.normal(), saved.python.gauss(0, 1)
    found = through(path, saved)
    for _ in range(3):
        assert saved.numpy.normal() == found.numpy.normal() and saved.python.gauss(0, 1) == found.python.gauss(0, 1)


def test_what_was_one_object_is_one_and_what_was_two_is_two(path):
    array, rng = np.arange(4.0), np.random.default_rng(0)
    saved = Holder(a=array, b=[array], view=array[1:3], rng=rng, bits=rng.bit_generator, two=np.arange(4.0))
    saved.ball = Ball(owner=saved)
    saved.loop = [saved.ball]
    saved.ball.trail = saved.loop
    fresh = np.zeros(4)
    found = through(path, saved, Holder(a=fresh, two=fresh, rng=None))
    assert found.b[0] is found.a and found.two is not found.a and found.rng.bit_generator is found.bits
    found.view[0] = 77.0
    assert found.a.tolist() == [0.0, 77.0, 2.0, 3.0] and found.two.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found.ball.owner is found and found.loop[0] is found.ball and found.ball.trail is found.loop
    assert array[1] == 1.0 and not fresh.any()


def test_layers_share_and_refer_to_each_other(path):
    class Outer(gym.Wrapper):
        def __init__(self, env):
            super().__init__(env)
            self.base, self.buffer, self.bound = env.unwrapped, env.unwrapped.buffer, env.unwrapped.hard

    saved, fresh = (Outer(Holder(buffer=np.full(2, x))) for x in (1.0, 0.0))
    found = through(path, saved, fresh)
    assert found.buffer is found.env.buffer and found.base is found.env and found.buffer.tolist() == [1.0, 1.0]
    assert found.bound.__self__ is found.env


def test_methods_and_functions_that_change_are_state(path):
    saved, fresh = Holder(), Holder()
    saved.mode, saved.function, saved.part = saved.hard, math.cos, functools.partial(math.pow, 2.0)
    fresh.mode, fresh.function = fresh.easy, math.sin
    found = through(path, saved, fresh)
    assert found.mode() == 2 and found.mode.__self__ is found and found.function is math.cos and found.part(3) == 8.0


def with_closure(start):
    count, array = start, np.zeros(2)

    def counting():
        nonlocal count
        count += 1
        array[0] += 1
        return count, array[0]

    return Holder(function=counting, array=array)


def test_what_a_function_closes_over_is_state(path):
    saved = with_closure(5)
    saved.function()
    found = through(path, saved, with_closure(0))
    assert found.function() == saved.function() == (7, 2.0)
    assert found.array[0] == 2.0
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.function was the function .*counting.* or none"):
        through(path, with_closure(5))


def test_constants_from_which_an_env_starts_are_not_written_to(path):
    """A new env may hold a constant in the place of what the other has made of it since."""
    constant = np.zeros(2)
    found = through(path, Holder(world=np.ones((2, 2)), own=np.ones(2)), Holder(world=WORLD, own=constant))
    assert found.world is not WORLD and not WORLD.any() and not constant.any()


def test_constants_of_a_module_or_class_stay_the_same_object(path):
    rows = TABLE["rows"]
    found = through(path, Holder(world=WORLD, tables=TABLE, table=rows, common=Holder.common))
    assert found.world is WORLD and found.tables is TABLE and found.common is Holder.common
    assert found.tables["rows"] is found.table is rows == [1, 2]


def test_what_envs_share_stays_shared():
    shared = [1, {"a": np.zeros(1)}]
    captures = Captures()
    states = [captures.add(Holder(x=shared, y=i)) for i in range(2)]
    shared[0] = 9
    fresh = [0, {"a": np.ones(1)}]
    envs, restores = [Holder(x=fresh) for _ in range(2)], Restores()
    for env, state in zip(envs, states, strict=True):
        restores.put(env, state)
    assert envs[0].x is envs[1].x is fresh and fresh[0] == 1 and fresh[1]["a"] == [0.0] and envs[1].y == 1
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.x was shared with another env"):
        Restores().put(Holder(), states[0])
    states[1] = Captures().add(Holder(x=[2, {"a": np.zeros(1)}]))
    states[1]["layers"][0]["attributes"]["x"]["shared"] = ""
    restores = Restores()
    restores.put(envs[0], states[0])
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.x is shared by several envs here"):
        restores.put(envs[1], states[1])


def test_a_generator_that_envs_share_is_set_in_place_with_its_seed():
    shared, fresh = np.random.default_rng(1), np.random.default_rng(2)
    captures = Captures()
    states = [captures.add(Holder(rng=shared)) for _ in range(2)]
    envs, restores = [Holder(rng=fresh) for _ in range(2)], Restores()
    for env, state in zip(envs, states, strict=True):
        restores.put(env, state)
    assert envs[0].rng is envs[1].rng is fresh
    assert fresh.random() == shared.random() and fresh.spawn(1)[0].random() == shared.spawn(1)[0].random()


def test_two_functions_do_not_come_back_as_one(path):
    def make(x):
        return lambda: x

    one = make(0)
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.g was an object of its own, but a new env has the same"):
        through(path, Holder(f=make(1), g=make(2)), Holder(f=one, g=one))


def test_rows_of_one_array_are_each_envs_own_but_parts_that_overlap_are_refused():
    """An env that keeps its action keeps a row of the batch of actions."""
    batch = np.arange(6.0).reshape(3, 2)
    captures = Captures()
    states = [captures.add(Holder(action=row)) for row in batch]
    captures.check()
    env = Holder()
    Restores().put(env, states[1])
    assert env.action.tolist() == [2.0, 3.0]
    captures = Captures()
    for low in (0, 1):
        captures.add(Holder(part=batch[low : low + 2]))
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.part .* other envs .* copy of its own"):
        captures.check()


def test_generators_of_spaces_go_on_wherever_the_space_is(path):
    def make():
        return Holder(action_space=spaces.Dict(a=spaces.Discrete(99), b=spaces.Tuple([spaces.Box(0, 1)])))

    saved = make()
    saved.action_space.seed(3)
    found = through(path, saved, make())
    assert str(found.action_space.sample()) == str(saved.action_space.sample())
    with pytest.raises(vecenv.NotRestorable, match=r"action_space was Dict.*has none there"):
        through(path, saved)
    with pytest.raises(vecenv.NotRestorable, match=r"action_space was Discrete\(3\), but a new env has Discrete\(2\)"):
        through(path, Holder(action_space=spaces.Discrete(3)), Holder(action_space=spaces.Discrete(2)))


class Opaque(Holder):
    """Takes its own state, and has a part that others refer to."""

    def __init__(self):
        super().__init__(buffer=np.zeros(3))

    def get_state(self):
        return self.buffer

    def set_state(self, state):
        self.buffer[:] = state


@pytest.mark.parametrize("part", [lambda b: b, lambda b: b[1:]])
def test_a_part_of_an_env_that_takes_its_own_state_is_refused_in_a_wrapper(part):
    wrapper = gym.Wrapper(Opaque())
    wrapper.part = part(wrapper.env.buffer)
    with pytest.raises(vecenv.NotRestorable, match=r"Wrapper\.part .*get_state\(\)"):
        Captures().add(wrapper)


class Old(Holder):
    """As MujocoEnv: `set_state` is something else."""

    def set_state(self, qpos, qvel):
        raise AssertionError

    def get_state(self):
        raise AssertionError


def test_methods_with_other_arguments_are_not_the_protocol(path):
    assert through(path, Old(a=1), Old()).a == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (iter([1]), r"is a builtins\.list_iterator"),
        ((x for x in [1]), r"is a builtins\.generator"),
        (itertools.count(), r"is a itertools\.count"),
        (threading.Lock(), r"is a _thread\.lock"),
        (ctypes.c_int(3), r"is a ctypes\.c_int"),
        (Slotted(), r"is a tests\.vecenv\.test_capture\.Slotted"),
        (memoryview(b"a"), r"is a builtins\.memoryview"),
        ({1, 2}, r"is a builtins\.set"),
        (bytearray(b"a"), r"is a builtins\.bytearray"),
        (frozenset({"a", "b"}), r"another order by another process"),
        (np.array([None]), r"has dtype object"),
        (np.zeros(2, [("a", int)]), r"has dtype \[\('a'"),
        (np.ma.zeros(2), r"MaskedArray"),
        (np.frombuffer((ctypes.c_double * 2)()), r"lies in memory of a c_double_Array_2"),
        (collections.defaultdict(lambda: 1), r"makes values by a function of its own"),
        ({Ball.move: 1, (Slotted(),): 2}, r"is a tests\.vecenv\.test_capture\.Slotted"),
        ([1, {"deep": (3, iter(""))}], r"Holder\.value\[1\]\['deep'\]\[1\] is a builtins\.str_"),
        (np.random.SeedSequence(1), r"SeedSequence"),
        (random.SystemRandom(), r"SystemRandom"),
        (type("Local", (), {})(), r"a class that nobody can find by its name, Local"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_not_come_back_exactly_is_refused_by_name(value, message):
    with pytest.raises(vecenv.NotRestorable, match=message) as raised:
        Captures().add(Holder(value=value))
    assert "Holder.value" in str(raised.value) and "Define get_state() and set_state(state) on Holder" in str(
        raised.value
    )


def test_what_envs_have_beside_their_attributes_is_refused():
    class Slots(gym.Env):
        __slots__ = ("x",)

    with pytest.raises(vecenv.NotRestorable, match=r"Slots is a .* it has slots"):
        Captures().add(Slots())
    loop: list = []
    loop.append((loop,))
    assert Captures().add(Holder(value=loop))
    value = (loop2 := [],)
    loop2.append(value)
    with pytest.raises(vecenv.NotRestorable, match="contains itself"):
        Captures().add(Holder(value=value))


def test_gymnasiums_mujoco_envs_are_refused_with_the_reason():
    with vecenv.SyncVectorEnv([lambda: gym.make("Hopper-v5")]) as envs:
        envs.reset(seed=0)
        with pytest.raises(vecenv.NotRestorable, match=r"HopperEnv\.model is a mujoco\..*MjModel"):
            envs.get_state()


def test_taking_a_state_changes_nothing():
    env = CountingEnv(0)
    env.reset(seed=1)
    before = {name: id(value) for name, value in vars(env).items()}, env.np_random.bit_generator.state
    Captures().add(env)
    assert before == ({name: id(value) for name, value in vars(env).items()}, env.np_random.bit_generator.state)


def test_a_state_can_be_put_back_again_and_again(path):
    env = Holder(items=[np.zeros(2)], rng=np.random.default_rng(0))
    state = Captures().add(env)
    for _ in range(2):
        found = Holder()
        Restores().put(found, state)
        assert found.items[0].tolist() == [0.0, 0.0] and found.rng.random() == np.random.default_rng(0).random()
        found.items[0] += 1
