"""Tests of vecenv/state/capture.py and restore.py: what is taken of an env comes back as it was, or is refused."""

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
from vecenv.state import load, save
from vecenv.state.capture import Captures
from vecenv.state.restore import Restores

WORLD = np.zeros((2, 2))
TABLE = {"rows": [1, 2]}
GRID = np.zeros(2)


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


def with_attribute(function):
    function.calls = 0
    return function


BALL, RING = Ball(), []


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


class Drawing(CountingEnv):
    """Writes into a variable of this module."""

    def __init__(self, index):
        super().__init__(index)
        self.grid = GRID

    def step(self, action):
        self.grid[0] += 1
        return super().step(action)


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
        Mood.CALM,
        Mood.WILD,
        Place(1, [2]),
        [1, (2.0, [None]), {"a": {1: "b", (1, np.int64(2)): 3}}],
        collections.deque([1, 2], maxlen=2),
        collections.OrderedDict(b=1, a=[2]),
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


def big(last=1):
    return {i: [(0.5 * i, -i, True, None), [i, last], {"a": "\U0001f600\ud800'"}] for i in range(100)}


def test_big_tables_come_back_whichever_way_they_are_taken(path):
    for as_text, value, kind in (
        (True, big(), "text"),
        (False, big(), "dict"),
        *((True, big(last), "dict") for last in (float("nan"), float("-inf"), 10**5000, np.float64(1), [[]] * 2)),
    ):
        saved = Holder(inner=None, table=value, row=value[7], deep=value[8][1])
        state = Captures(as_text=as_text).add(saved)
        assert state["layers"][0]["attributes"]["table"]["kind"] == kind
        save(path, state)
        found = Holder()
        Restores().put(found, load(path))
        np.testing.assert_equal(found.table, value)
        assert type(found.table[5][0]) is tuple and type(found.table[5][1][1]) is type(value[5][1][1])
        assert found.row is found.table[7] and found.deep is found.table[8][1] and found.table is not value
    loop = [0] * 100
    loop[3] = loop
    env = Holder()
    Restores().put(env, Captures(as_text=True).add(Holder(loop=loop)))
    assert env.loop[3] is env.loop


@pytest.mark.parametrize("part", [lambda table: table, lambda table: table[3], lambda table: table[3][1]])
def test_big_tables_that_envs_share_stay_shared(part):
    table, fresh = big(), big()

    class Sharing(CountingEnv):
        def __init__(self, index, table):
            super().__init__(index)
            self.table = table if index == 0 else part(table)

    with (
        vecenv.SyncVectorEnv([lambda i=i: Sharing(i, table) for i in range(2)]) as envs,
        vecenv.SyncVectorEnv([lambda i=i: Sharing(i, fresh) for i in range(2)]) as others,
    ):
        envs.reset(seed=0)
        table[3][1].append(5)
        others.set_state(envs.get_state())
        assert part(others.get_attr("table")[0]) is others.get_attr("table")[1]
        assert others.get_attr("table")[0] == table


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


def test_generators_of_python_go_on(path):
    saved = Holder(python=random.Random(2))
    saved.python.gauss(0, 1)
    found = through(path, saved)
    for _ in range(3):
        assert saved.python.gauss(0, 1) == found.python.gauss(0, 1)


def test_what_was_one_object_is_one_and_what_was_two_is_two(path):
    array, rng = np.arange(4.0), np.random.default_rng(0)
    saved = Holder(a=array, b=[array], rng=rng, bits=rng.bit_generator, two=np.arange(4.0))
    saved.ball = Ball(owner=saved)
    saved.loop = [saved.ball]
    saved.ball.trail = saved.loop
    fresh = np.zeros(4)
    found = through(path, saved, Holder(a=fresh, two=fresh, rng=None))
    assert found.b[0] is found.a and found.two is not found.a and found.rng.bit_generator is found.bits
    assert found.two.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found.ball.owner is found and found.loop[0] is found.ball and found.ball.trail is found.loop
    assert not fresh.any()


def test_arrays_that_overlap_are_refused():
    array = np.arange(4.0)
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.a is a numpy\.ndarray.* shares memory with Holder\.view"):
        Captures().add(Holder(a=array, view=array[1:3]))


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
    saved.mode, saved.function = saved.hard, math.cos
    fresh.mode, fresh.function = fresh.easy, math.sin
    found = through(path, saved, fresh)
    assert found.mode() == 2 and found.mode.__self__ is found and found.function is math.cos


def with_closure(start, array=None, scale=2.0):
    count, array = start, np.zeros(2) if array is None else array

    def counting(x, *, scale=scale):
        nonlocal count
        count += 1
        return count, array[0]

    return Holder(function=counting)


def test_what_a_function_refers_to_must_be_as_it_was(path):
    found = through(path, with_closure(5), with_closure(5))
    assert found.function(0) == (6, 0.0)
    for other, what in (
        (with_closure(6), "count"),
        (with_closure(5, np.ones(2)), "array"),
        (with_closure(5, scale=3.0), "scale"),
    ):
        with pytest.raises(
            vecenv.NotRestorable, match=rf"Holder\.function .* refers to {what}, which is not as it was"
        ):
            through(path, with_closure(5), other)
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.function was the function .*counting.* or none"):
        through(path, with_closure(5))


def test_what_a_function_shares_with_its_env_is_refused():
    array = np.zeros(2)
    for other in (array, array[1:]):
        env = with_closure(5, array)
        env.other = other
        with pytest.raises(vecenv.NotRestorable, match=r"array of Holder\.function"):
            Captures().add(env)


def test_a_layer_or_space_that_a_function_refers_to_stays(path):
    def make():
        env = gym.wrappers.TransformObservation(Holder(observation_space=spaces.Discrete(9)), None, None)
        space = env.observation_space
        env.func = lambda x: (space.sample(), env.env)
        return env

    saved, found = make(), make()
    saved.env.observation_space.seed(3)
    found = through(path, saved, found)
    assert [saved.func(0)[0] for _ in range(5)] == [found.func(0)[0] for _ in range(5)]
    assert found.func(0)[1] is found.env


def test_constants_from_which_an_env_starts_are_not_written_to(path):
    """A new env may hold a constant in the place of what the other has made of it since."""
    constant = np.zeros(2)
    found = through(path, Holder(world=np.ones((2, 2)), own=np.ones(2)), Holder(world=WORLD, own=constant))
    assert found.world is not WORLD and not WORLD.any() and not constant.any()


def test_variables_of_a_module_or_class_are_found_by_name_and_never_written(path):
    found = through(path, Holder(world=WORLD, tables=TABLE, common=Holder.common))
    assert found.world is WORLD and found.tables is TABLE and found.common is Holder.common
    state = Captures().add(Holder(world=WORLD, tables=TABLE))
    WORLD[0, 0], TABLE["rows"] = 2, [3]
    try:
        with pytest.raises(
            vecenv.NotRestorable, match=r"Holder\.world was the variable .*:WORLD, which is not saved, and"
        ):
            Restores().put(Holder(), state)
        assert WORLD[0, 0] == 2 and TABLE == {"rows": [3]}
    finally:
        WORLD[0, 0], TABLE["rows"] = 0, [1, 2]


@pytest.mark.parametrize("part", [lambda: TABLE["rows"], lambda: WORLD[1]])
def test_a_part_of_a_variable_beside_it_is_refused(part):
    """It would be of the variable no more."""
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.(variable|part)"):
        Captures().add(Holder(variable=TABLE if isinstance(part(), list) else WORLD, part=part()))


def test_variables_may_hold_each_other_and_objects(path):
    BALL.owner = RING
    RING[:] = [BALL]
    found = through(path, Holder(ball=BALL, ring=RING))
    assert found.ball is BALL and found.ring is RING


def test_functions_that_refer_to_themselves_are_refused():
    def f():
        return g

    def g():
        return f

    with pytest.raises(vecenv.NotRestorable, match="refers to itself"):
        Captures().add(Holder(f=f))


def test_envs_that_go_on_writing_a_variable_of_their_module_are_not_disturbed():
    def make():
        return vecenv.SyncVectorEnv([lambda: Drawing(0)])

    with make() as envs, make() as others:
        envs.reset(seed=0)
        states = envs.get_state()
        others.reset(seed=0)
        others.step([0])
        assert GRID.tolist() == [1, 0]
        with pytest.raises(vecenv.NotRestorable, match=r"Drawing\.grid was the variable .*:GRID"):
            envs.set_state(states)
        assert GRID.tolist() == [1, 0]
        GRID[:] = 0


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
    states[1]["layers"][0]["attributes"]["x"]["shared"] = True
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

    one = make(1)
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.g .* refers to x, which is not as it was"):
        through(path, Holder(f=make(1), g=make(2)), Holder(f=one, g=one))


def test_two_spaces_do_not_come_back_as_one(path):
    saved, one = Holder(a=spaces.Discrete(3, seed=1), b=spaces.Discrete(3, seed=2)), spaces.Discrete(3)
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.b was an object of its own, but a new env has the same"):
        through(path, saved, Holder(a=one, b=one))


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


class Moduleless(type):
    """Metaclass of classes without `__module__`, such as those that SWIG makes for Box2D."""

    @property
    def __module__(cls):
        raise AttributeError("__module__")


class SwigObject(metaclass=Moduleless):
    __slots__ = ("x",)


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
        (frozenset({1}), r"is a builtins\.frozenset"),
        (collections.defaultdict(list), r"is a collections\.defaultdict"),
        (functools.partial(math.pow, 2.0), r"is a functools\.partial"),
        (np.random.RandomState(1), r"RandomState"),
        (lambda x, memo=[]: memo, r"has a default, number 0, that can change"),
        (lambda x, *, memo={}: memo, r"has a default, memo, that can change"),
        ([lambda x, memo=(1, []): memo], r"has a default, number 0, that can change"),
        (with_attribute(lambda x: x), r"has attributes of its own, \['calls'\]"),
        (np.array([None]), r"has dtype object"),
        (np.zeros(2, [("a", int)]), r"has dtype \[\('a'"),
        (np.ma.zeros(2), r"MaskedArray"),
        (np.frombuffer((ctypes.c_double * 2)()), r"lies in memory of a c_double_Array_2"),
        ({Ball.move: 1, (Slotted(),): 2}, r"is a tests\.vecenv\.test_capture\.Slotted"),
        ([1, {"deep": (3, iter(""))}], r"Holder\.value\[1\]\['deep'\]\[1\] is a builtins\.str_"),
        (np.random.SeedSequence(1), r"SeedSequence"),
        (random.SystemRandom(), r"SystemRandom"),
        (SwigObject(), r"is a SwigObject, which cannot be"),
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


@pytest.mark.parametrize("env_id", ["LunarLander-v3", "BipedalWalker-v3"])
def test_box2d_envs_are_refused_with_the_reason(env_id):
    with vecenv.SyncVectorEnv([lambda: gym.make(env_id)]) as envs:
        envs.reset(seed=0)
        with pytest.raises(vecenv.NotRestorable, match=r"\.world\..* is a SwigPyObject"):
            envs.get_state()


def test_a_class_without_a_module_is_taken_as_a_class_or_refused():
    found = Holder(kind=None)
    state = Captures().add(Holder(kind=SwigObject))
    with pytest.raises(vecenv.NotRestorable, match="SwigObject"):
        Restores().put(found, state)
    assert found.kind is None
    kept = Holder(kind=SwigObject)
    Restores().put(kept, state)
    assert kept.kind is SwigObject


def test_a_state_can_call_no_function_in_the_guise_of_an_enum(tmp_path):
    state = Captures().add(Holder(mood=Mood.CALM))
    mark = tmp_path / "mark"
    state["layers"][0]["attributes"]["mood"] = {"kind": "enum", "class": "os:mkdir", "value": str(mark)}
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.mood was an enum, but os:mkdir is not an enum class"):
        Restores().put(Holder(mood=None), state)
    assert not mark.exists()


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


@pytest.mark.parametrize(
    "node",
    [
        {"kind": "name", "name": "posix:system"},
        {"kind": "name", "name": "os:system"},
        {"kind": "name", "name": "tests.vecenv.test_capture:np.save"},
        {"kind": "class", "name": "subprocess:Popen"},
        {"kind": "object", "class": "subprocess:Popen", "id": 99, "attributes": {}},
        {"kind": "method", "self": {"kind": "constant", "class": "module", "name": "posix"}, "name": "system"},
    ],
    ids=lambda node: f"{node['kind']} {node.get('name') or node['class']}",
)
def test_a_state_cannot_give_an_env_what_is_neither_its_own_nor_there_already(node):
    """A checkpoint may be somebody else's, and what an attribute is may be called later."""
    state = Captures().add(Holder(value=1))
    state["layers"][0]["attributes"]["value"] = node
    with pytest.raises(vecenv.NotRestorable, match=r"Holder\.value was"):
        Restores().put(Holder(value=1), state)
