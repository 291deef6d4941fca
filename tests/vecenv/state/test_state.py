"""Tests of get_state and set_state, and of vecenv/state/: restored envs continue exactly like the saved envs."""

import collections
import ctypes
import enum
import functools
import itertools
import math
import random
import re
import threading
import warnings

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.envs.mujoco.mujoco_env import expand_model_path
from gymnasium.vector import AutoresetMode, VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import vecenv
from tests.helpers import Color, CountingEnv, SampledEnv, assert_same, counting_fns
from vecenv.mujoco import TASKS, Hopper, Humanoid
from vecenv.state import load, save
from vecenv.state.envs import restore, state_of
from vecenv.wrappers import IgnoreKeys

ROWS = [
    (vecenv.SyncVectorEnv, {}),
    (vecenv.AsyncVectorEnv, {"num_workers": 0}),
    (vecenv.AsyncVectorEnv, {"num_workers": 2}),
]
IDS = [
    spec.id
    for spec in gym.registry.values()
    if str(spec.entry_point).startswith(("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text."))
]


def advance(envs, sample, steps):
    """Takes random steps, with resets if autoreset is disabled; returns all results."""
    seen = []
    for _ in range(steps):
        result = envs.step(sample())
        over = result[2] | result[3]
        seen += [result, envs.episode_returns, envs.episode_lengths]
        if envs.autoreset_mode == AutoresetMode.DISABLED and over.any():
            seen.append(envs.reset(options={"reset_mask": over}))
    return seen


def actor(envs, seed):
    """Returns a function that samples actions, the same for the same seed."""
    space = envs.action_space
    space.seed(seed)
    return space.sample


def check_continues(make, path, before=150, after=200, resume=None):
    """Asserts that saved envs and restored envs return the same as envs that were never saved."""
    with make() as whole, make() as saved:
        for envs in (whole, saved):
            envs.reset(seed=3)
            advance(envs, actor(envs, 0), before)
        save(path, saved.get_state())
        expected = [whole.observations, whole.episode_returns, *advance(whole, actor(whole, 1), after)]
        assert_same(tuple(expected[2:]), tuple(advance(saved, actor(saved, 1), after)))
    with (resume or make)() as resumed:
        resumed.set_state(load(path))
        found = [resumed.observations, resumed.episode_returns, *advance(resumed, actor(resumed, 1), after)]
        assert_same(tuple(expected), tuple(found))
        resumed.reset(seed=8)  # a second time, into envs that have moved on
        advance(resumed, actor(resumed, 2), 7)
        resumed.set_state(load(path))
        assert_same(tuple(expected[2:]), tuple(advance(resumed, actor(resumed, 1), after)))


QUICK = ("CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Blackjack-v1")
assert len(IDS) >= 12 and set(QUICK) <= set(IDS), IDS


@pytest.mark.parametrize(
    "env_id", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in IDS]
)
def test_gymnasiums_classic_control_and_toy_text_envs_continue_exactly(env_id, tmp_path):
    def fn():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gym.make(env_id)

    check_continues(lambda: vecenv.SyncVectorEnv([fn] * 2), tmp_path / "states")


WRAPPERS = {
    "FrameStackObservation": lambda env: wrappers.FrameStackObservation(env, 3),
    "DelayObservation": lambda env: wrappers.DelayObservation(env, 2),
    "StickyAction": lambda env: wrappers.StickyAction(env, 0.5),
    "RescaleAction": lambda env: wrappers.RescaleAction(env, np.float32(-1), np.float32(1)),
    "ClipReward": lambda env: wrappers.ClipReward(env, -5, -1),
    "TimeAwareObservation": wrappers.TimeAwareObservation,
    "FlattenObservation": wrappers.FlattenObservation,
    "DtypeObservation": lambda env: wrappers.DtypeObservation(env, np.float16),
    "MaxAndSkipObservation": wrappers.MaxAndSkipObservation,
    "RepeatAction": lambda env: wrappers.RepeatAction(env, 2),
    "IgnoreKeys": lambda env: IgnoreKeys(wrappers.TimeAwareObservation(env, flatten=False), ["time"]),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_continue_exactly(name, tmp_path):
    fns = [lambda: WRAPPERS[name](gym.make("Pendulum-v1", max_episode_steps=30))] * 2
    check_continues(lambda: vecenv.SyncVectorEnv(fns, autoreset_mode="SameStep"), tmp_path / "states", 50, 70)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize(("kind", "options"), ROWS)
def test_every_vector_env_continues_exactly_in_every_mode(kind, options, mode, tmp_path):
    fns = [lambda: gym.make("CartPole-v1")] * 3
    check_continues(lambda: kind(fns, autoreset_mode=mode, **options), tmp_path / "states", 60, 60)


def test_the_number_of_workers_may_differ_after_a_restore(tmp_path):
    def make(num_workers):
        return vecenv.AsyncVectorEnv(
            [lambda: gym.make("Blackjack-v1")] * 5, num_workers=num_workers, autoreset_mode="SameStep"
        )

    check_continues(lambda: make(2), tmp_path / "states", 20, 50, resume=lambda: make(3))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("make", [lambda: counting_fns(3), lambda: vecenv.Batched(Short, 3)], ids=["envs", "batched"])
def test_states_may_be_saved_at_any_step_of_an_episode(make, mode):
    """This includes the moment between the last step of an episode and the reset that follows."""
    with vecenv.SyncVectorEnv(make(), autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        draw = actor(envs, 0)
        for _ in range(9):
            with vecenv.SyncVectorEnv(make(), autoreset_mode=mode) as others:
                others.set_state(envs.get_state())
                for actions in [draw() for _ in range(7)]:
                    assert_same(*(tuple(advance(e, lambda actions=actions: actions, 1)) for e in (envs, others)))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(
            name, mode, marks=() if name == "Hopper-v5" or mode == AutoresetMode.SAME_STEP else pytest.mark.slow
        )
        for name in TASKS
        for mode in AutoresetMode
    ],
)
def test_native_mujoco_tasks_continue_bit_for_bit(name, mode, tmp_path):
    batched = vecenv.Batched(lambda **arguments: TASKS[name](**arguments, max_episode_steps=25), 3)
    check_continues(lambda: vecenv.SyncVectorEnv(batched, autoreset_mode=mode), tmp_path / "states", 37, 40)


def test_native_mujoco_tasks_continue_with_another_number_of_workers(tmp_path):
    def make(num_workers):
        return vecenv.AsyncVectorEnv(vecenv.Batched(TASKS["Ant-v5"], 5), num_workers=num_workers)

    check_continues(lambda: make(2), tmp_path / "states", 30, 60, resume=lambda: make(1))


class Short(Hopper):
    """Truncates episodes after five steps."""

    saved = ()

    def __init__(self, **kwargs):
        super().__init__(**kwargs, max_episode_steps=5)


class Varied(Hopper):
    """Draws the torso's mass and a goal for each episode."""

    saved = ("goals",)

    def __init__(self, num_envs=1, **kwargs):
        self.goals = np.zeros(num_envs)
        super().__init__(num_envs, max_episode_steps=20, **kwargs)
        self.masses = self.physics.expand("body_mass")

    def begin(self, ids, rngs):
        super().begin(ids, rngs)
        self.masses[ids, 1] = rngs.uniform(2, 5)
        self.goals[ids] = rngs.uniform()

    def outcome(self, before, actions):
        rewards, terminated, infos = super().outcome(before, actions)
        return rewards + self.goals, terminated, {**infos, "goal": self.goals.copy()}


def test_randomized_models_and_saved_attributes_of_tasks_continue(tmp_path):
    check_continues(lambda: vecenv.SyncVectorEnv(vecenv.Batched(Varied, 3)), tmp_path / "states", 33, 60)


def test_a_model_field_that_only_the_saved_envs_vary_is_expanded():
    """Humanoid's reward depends on the center of mass, and thus on the masses."""
    envs, others = Humanoid(2), Humanoid(2)
    envs.reset(seed=0)
    envs.physics.expand("body_mass")[:, 1:] *= np.linspace(0.5, 2.0, 13)
    others.set_state(envs.get_state())
    assert others.physics.varied.keys() == envs.physics.varied.keys()
    action = np.full((2, 17), 0.2, np.float32)
    assert_same(others.step(action), envs.step(action))


def test_a_model_field_that_only_the_new_envs_vary_gets_the_models_value():
    envs, others = Hopper(2), Hopper(2)
    envs.reset(seed=0)
    others.reset(seed=0)
    for name in ("body_mass", "opt.gravity"):
        others.physics.expand(name)[:] *= 3
    others.physics.batch.set_const()
    others.set_state(envs.get_state())
    for _ in range(3):
        assert_same(*(e.step(np.full((2, 3), 0.2, np.float32)) for e in (others, envs)))


def test_a_state_of_another_model_is_rejected_and_changes_nothing():
    """The shapes are equal, so nothing else would tell that the robot has become heavier."""
    spec = mujoco.MjSpec.from_file(expand_model_path("hopper.xml"))
    (saved,) = Hopper(1, xml_file=spec).get_state()
    assert Hopper(1, xml_file=spec.compile()).set_state([saved]) is None  # the same model
    spec.geoms[1].density *= 1.001
    envs = Hopper(2, xml_file=spec)
    envs.reset(seed=0)
    before = envs.get_state()
    with pytest.raises(vecenv.NotRestorable, match="the state belongs to another model"):
        envs.set_state([before[1], saved])
    for now, then in zip(envs.get_state(), before, strict=True):
        assert_same(now["state"], then["state"])


@pytest.mark.parametrize("name", TASKS)
def test_a_restored_task_can_be_observed_before_a_step(name):
    envs, others = TASKS[name](2), TASKS[name](2)
    envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(4):
        envs.step(envs.action_space.sample())
    others.set_state(envs.get_state())
    assert_same(others.observe(), envs.observe())


def test_the_state_of_a_task_that_does_not_declare_it_is_not_saved():
    """A task that inherits the declaration may have more state than its base class."""

    class Curriculum(Varied):
        level = 0

    envs = vecenv.AsyncVectorEnv(vecenv.Batched(Curriculum, 2), num_workers=0)
    envs.reset(seed=0)
    with pytest.raises(vecenv.NotRestorable, match=r"Curriculum does not declare `saved`.*Set the class attribute"):
        envs.get_state()
    envs.step(np.zeros((2, 3), np.float32))


class ObjectLeaves(SampledEnv):
    """Returns observations without a fixed shape."""

    def __init__(self):
        observed = spaces.Dict({"text": spaces.Text(5), "choice": spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1)])})
        super().__init__(spaces.Dict({**observed.spaces, "list": spaces.Sequence(spaces.Discrete(3))}), Color(), True)

    def step(self, action):
        self.observation_space.seed(int(self.np_random.integers(2**31)))  # so that the space has no state
        return super().step(action)

    def get_state(self):
        return None

    def set_state(self, state):
        pass


def test_observations_without_a_fixed_shape_continue(tmp_path):
    check_continues(lambda: vecenv.AsyncVectorEnv([ObjectLeaves] * 3, num_workers=2), tmp_path / "states", 20, 30)


def test_envs_that_were_never_reset_are_restored_as_never_reset():
    with vecenv.SyncVectorEnv(counting_fns(2)) as envs, vecenv.SyncVectorEnv(counting_fns(2)) as others:
        states = envs.get_state()
        others.reset(seed=0)
        others.set_state(states)
        assert others.get_attr("episode") == (-1, -1)
        assert_same(others.reset(seed=1), envs.reset(seed=1))


class Secret(gym.Env):
    """Holds an iterator, which cannot be saved, and defines methods that save and restore its position."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (), np.float64), spaces.Discrete(2)

    def __init__(self):
        self._hidden = iter(range(1000))
        self._count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.float64(self.np_random.random()), {}

    def step(self, action):
        self._count = next(self._hidden)
        return np.float64(self._count + self.np_random.random()), 0.0, self._count % 7 == 6, False, {}

    def get_state(self):
        return {"count": self._count, "by": ("tuple", [1.5])}

    def set_state(self, state):
        assert state["by"] == ("tuple", [1.5])
        self._count = state["count"]
        self._hidden = iter(range(self._count + 1, 1000))


def test_an_env_may_define_its_state_and_its_generator_is_saved_with_it(tmp_path):
    fns = [lambda: gym.wrappers.TimeLimit(Secret(), 5)] * 3
    check_continues(lambda: vecenv.AsyncVectorEnv(fns, num_workers=2), tmp_path / "states", 9, 40)


class Together(gym.vector.SyncVectorEnv):
    """Gymnasium's SyncVectorEnv with `get_state` and `set_state`."""

    def get_state(self):
        return [
            {"state": env.unwrapped.state, "steps": env._elapsed_steps, "random": env.unwrapped.np_random, "over": over}
            for env, over in zip(self.envs, self._autoreset_envs.tolist(), strict=True)
        ]

    def set_state(self, states):
        self.reset()
        for i, (env, state) in enumerate(zip(self.envs, states, strict=True)):
            env.unwrapped.state, env._elapsed_steps = state["state"], state["steps"]
            env.unwrapped.np_random, self._autoreset_envs[i] = state["random"], state["over"]


def make_together(cls, num_envs, autoreset_mode):
    fns = [lambda: gym.make("Pendulum-v1", max_episode_steps=9)] * num_envs
    return cls(fns, autoreset_mode=autoreset_mode)


@pytest.mark.parametrize("cls", [Together, gym.vector.SyncVectorEnv])
def test_a_batch_can_be_saved_only_if_it_defines_get_state_and_set_state(cls, tmp_path):
    batched = vecenv.Batched(lambda **arguments: make_together(cls, **arguments), 4)
    if cls is Together:
        check_continues(lambda: vecenv.AsyncVectorEnv(batched, num_workers=2), tmp_path / "states", 13, 30)
        return
    with vecenv.AsyncVectorEnv(batched, num_workers=2) as envs:
        envs.reset(seed=0)
        with pytest.raises(vecenv.NotRestorable, match=r"SyncVectorEnv.*does not define get_state\(\).*Define both"):
            envs.get_state()
        envs.step(np.zeros((4, 1), np.float32))


def test_a_wrapper_does_not_inherit_the_state_methods_of_its_batch():
    """Otherwise the wrapper's own state, such as statistics, would be lost."""

    class Wrapped(gym.vector.VectorWrapper):
        get_state = None

    def make(num_envs, autoreset_mode):
        return Wrapped(Hopper(num_envs, autoreset_mode=autoreset_mode))

    with (
        vecenv.SyncVectorEnv(vecenv.Batched(make, 2)) as envs,
        pytest.raises(vecenv.NotRestorable, match="Wrapped"),
    ):
        envs.get_state()


class Plain(gym.Env):
    """Defines neither `get_state` nor `set_state`."""

    observation_space, action_space = spaces.Box(0, 9, (), np.float64), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.float64(0), {}

    def step(self, action):
        return np.float64(1), 1.0, False, False, {}


class Stateless(Plain):
    """Defines that it has no state."""

    def get_state(self):
        return None

    def set_state(self, state):
        pass


class Refusing(CountingEnv):
    def get_state(self):
        raise vecenv.NotRestorable


def test_a_refusal_without_a_message_names_the_env_and_the_error():
    with vecenv.AsyncVectorEnv([lambda: CountingEnv(0), lambda: Refusing(0)], num_workers=2) as envs:
        envs.reset()
        with pytest.raises(vecenv.NotRestorable, match=r"^env 1 in worker 1: NotRestorable$"):
            envs.get_state()


@pytest.mark.parametrize(("kind", "options"), ROWS)
def test_an_env_without_state_methods_is_named_with_its_index_and_the_envs_continue(kind, options):
    fns = [lambda cls=cls: gym.wrappers.TimeLimit(cls(), 5) for cls in (Stateless, Stateless, Plain)]
    with kind(fns, **options) as envs:
        envs.reset(seed=0)
        with pytest.raises(vecenv.NotRestorable) as raised:
            envs.get_state()
        text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
        assert "Plain does not define get_state() and set_state(state)" in text and "env 2" in text
        assert "Define both on Plain" in text
        assert envs.step([0, 0, 0])[1].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}])
def test_states_can_be_saved_and_restored_only_between_steps(options):
    envs = vecenv.AsyncVectorEnv(counting_fns(3), **options)
    envs.reset(seed=0)
    states = envs.get_state()
    envs.step_async([0] * 3)
    for call in (envs.get_state, lambda: envs.set_state(states)):
        with pytest.raises(gym.error.AlreadyPendingCallError, match="pending call to `step`"):
            call()
    envs.step_wait()
    envs.send([0], [1])
    with pytest.raises(gym.error.AlreadyPendingCallError, match="pending call to `send`"):
        envs.get_state()
    envs.recv()
    envs.close()
    for call in (envs.get_state, lambda: envs.set_state(states)):
        with pytest.raises(vecenv.StateError, match="after a call to `close"):
            call()


def test_states_after_a_worker_death_can_be_saved_once_a_step_has_reported_the_cut_episodes():
    def make():
        return vecenv.AsyncVectorEnv(counting_fns(4, 9), num_workers=2, on_worker_death="restart")

    with make() as envs, make() as resumed:
        envs.reset(seed=0)
        envs.step([0] * 4)
        envs.processes[1].kill()
        envs.processes[1].join()
        with (
            pytest.warns(UserWarning, match="restarted"),
            pytest.raises(vecenv.NotRestorableNow, match="was just restarted"),
        ):
            envs.get_state()
        assert envs.step([0] * 4)[3].tolist() == [False, False, True, True]
        resumed.set_state(envs.get_state())
        expected = advance(envs, lambda: [0] * 4, 12)
        assert_same(tuple(expected), tuple(advance(resumed, lambda: [0] * 4, 12)))


def states_of(make):
    with make() as envs:
        envs.reset(seed=0)
        return envs.get_state()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:2], r"a list of 3 states, one per env, but got 2 states"),
        (lambda s: {}, r"a list of 3 states.*but got a dict"),
        (lambda s: [s[0], {"env": 1}, s[2]], r"state of env 1 was not returned by get_state\(\)"),
        (lambda s: [s[0], 5, s[2]], r"state of env 1 was not returned"),
        (lambda s: [s[0], s[1], {k: v for k, v in s[2].items() if k != "begins"}], "state of env 2 was not returned"),
        (lambda s: [s[0], s[1], {**s[2], "row": None}], r"only one of envs 0 and 2 had been reset"),
        (
            lambda s: states_of(lambda: vecenv.SyncVectorEnv(counting_fns(3), float32_observations=True)),
            r"env 0 has \['observation float32\[3\]'\]; the vector env has \['observation float64\[3\]'\]",
        ),
        (
            lambda s: states_of(lambda: vecenv.SyncVectorEnv([lambda: gym.make("Blackjack-v1")] * 3)),
            r"env 0 has \['observation\[0\] int64\[\]'.*the vector env has \['observation float64\[3\]'\]",
        ),
        (
            lambda s: states_of(lambda: vecenv.SyncVectorEnv(counting_fns(3), autoreset_mode="SameStep")),
            r"env 0 has \['autoreset_mode SameStep'\]; the vector env has \['autoreset_mode NextStep'\]",
        ),
    ],
)
def test_states_that_do_not_fit_are_rejected_and_change_nothing(change, message):
    with vecenv.SyncVectorEnv(counting_fns(3)) as envs:
        envs.reset(seed=0)
        envs.step([0] * 3)
        states, observed = envs.get_state(), envs.observations.copy()
        with pytest.raises(ValueError, match=message):
            envs.set_state(change(states))
        assert_same(envs.observations, observed)
        assert envs.step([0] * 3)[1].tolist() == [2.0] * 3


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}])
def test_states_of_other_envs_with_the_same_spaces_are_rejected(options):
    states = states_of(lambda: vecenv.SyncVectorEnv([lambda: gym.wrappers.TimeLimit(CountingEnv(0), 5)] * 2))
    with vecenv.AsyncVectorEnv(counting_fns(2), **options) as envs:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="belongs to TimeLimit > CountingEnv, but this env is CountingEnv"):
            envs.set_state(states)
        envs.reset(seed=0)
        assert envs.step([0, 0])[1].tolist() == [1.0, 1.0]
    with vecenv.SyncVectorEnv(vecenv.Batched(Hopper, 2)) as envs:
        envs.reset(seed=0)
        mixed = [{**state, "env": states[0]["env"]} for state in envs.get_state()]
        with pytest.raises(ValueError, match="belongs to TimeLimit > CountingEnv, but this env is Hopper"):
            envs.set_state(mixed)


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1}])
def test_rejected_states_change_no_observation_and_no_env_of_the_same_rows(options):
    class Talking(CountingEnv):
        observation_space = spaces.Dict({"text": spaces.Text(9), "step": spaces.Discrete(9)})

        def _observe(self):
            return {"text": f"step {self.steps}", "step": self.steps}

    with vecenv.AsyncVectorEnv([lambda i=i: Talking(i, 9) for i in range(2)], **options) as envs:
        envs.reset()
        states = envs.get_state()
        states[1]["env"][0]["class"] = "OtherEnv"
        envs.step([0, 0])
        for slot in (None, envs.newest_slot):
            with pytest.raises(ValueError, match="belongs to OtherEnv"):
                envs.set_state(states, slot=slot)
            assert envs.observations["text"] == ("step 1",) * 2
            assert envs.observations["step"].tolist() == [1, 1]
        assert envs.step([0, 0])[1].tolist() == [2.0, 2.0]


# Plain values: what get_state may return.


class Holder(gym.Env):
    """Holds a value, which is its state."""

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)

    def __init__(self, value=None):
        self.value = value

    def get_state(self):
        return self.value

    def set_state(self, state):
        self.value = state


def through(path, saved, fresh=None):
    """Saves an env's state to a file, restores it into `fresh` and returns `fresh`."""
    fresh = Holder() if fresh is None else fresh
    save(path, state_of(saved))
    restore(fresh, load(path))
    return fresh


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state"


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**200, max_value=2**201),
    st.floats(allow_nan=False),
    st.just(float("nan")),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([np.float32(0.1), np.int8(-3), np.str_("a"), np.bool_(True), np.datetime64("2020-01-01", "D")]),
)
plain = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.lists(inner).map(lambda items: collections.deque(items, maxlen=9)),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text())), inner),
    ),
)
arrays = st.builds(
    lambda dtype, shape, order, seed: np.array(
        np.frombuffer(np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(
            shape
        ),
        order=order,
    ),
    st.sampled_from(["u1", "<i2", ">i4", "u8", "f2", ">f8", "f8", "c16", "S3", "M8[s]"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from("CF"),
    st.integers(0, 99),
)


def exactly(value):
    """Returns a key that is equal for two values only if their types, bits and memory orders are equal."""
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), getattr(value, "maxlen", None), [exactly(item) for item in value]
    if isinstance(value, dict):
        return dict, [(exactly(key), exactly(item)) for key, item in value.items()]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.flags.fnc, value.tobytes()
    if isinstance(value, np.generic):
        return type(value), value.dtype.str, value.tobytes()
    return type(value), np.array(value).tobytes() if isinstance(value, (float, complex)) else value


@settings(max_examples=50)
@given(value=st.one_of(plain, st.lists(st.one_of(plain, arrays))))
def test_plain_values_survive_a_round_trip_through_a_file(value, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "plain"
    assert exactly(through(path, Holder(value)).value) == exactly(value)


@pytest.mark.parametrize("name", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_generators_and_the_generators_that_they_spawn_continue(name, path):
    one = np.random.Generator(getattr(np.random, name)(5))
    one.spawn(2), one.random(3), one.integers(9, dtype=np.int32)
    other = through(path, Holder(one)).value
    for _ in range(2):
        draws = [(g.random(), g.integers(9, dtype=np.int32), g.spawn(1)[0].random()) for g in (one, other)]
        assert draws[0] == draws[1]


def test_configuration_is_not_restored(path):
    """A state therefore fits an env with another render mode, for example."""
    saved = gym.make("CartPole-v1", render_mode="rgb_array")
    saved.reset(seed=0)
    found = through(path, saved, gym.make("CartPole-v1"))
    assert found.render_mode is None and found.unwrapped.render_mode is None
    assert found.unwrapped.state.tolist() == saved.unwrapped.state.tolist()


def test_a_state_does_not_change_with_the_env():
    env = Holder([np.zeros(2)])
    state = state_of(env)
    env.value[0] += 1
    restore(env, state)
    assert env.value[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("env_id", IDS)
def test_a_restored_env_of_gymnasium_renders_the_same_frame(env_id, path):
    pytest.importorskip("pygame")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved, fresh = (gym.make(env_id, render_mode="rgb_array") for _ in range(2))
    saved.reset(seed=0), fresh.reset(seed=1)
    saved.action_space.seed(0)
    for _ in range(5):
        saved.step(saved.action_space.sample())
    found = through(path, saved, fresh)
    np.testing.assert_array_equal(found.render(), saved.render())
    for env in (saved, fresh):
        env.close()


def test_get_state_changes_nothing(path):
    env = CountingEnv(0)
    env.reset(seed=1)
    before = {name: id(value) for name, value in vars(env).items()}, env.np_random.bit_generator.state
    state_of(env)
    assert before == ({name: id(value) for name, value in vars(env).items()}, env.np_random.bit_generator.state)


def test_a_state_can_be_restored_again_and_again():
    state = state_of(Holder({"items": [np.zeros(2)], "rng": np.random.default_rng(0)}))
    for _ in range(2):
        found = Holder()
        restore(found, state)
        assert found.value["items"][0].tolist() == [0.0, 0.0]
        assert found.value["rng"].random() == np.random.default_rng(0).random()
        found.value["items"][0] += 1


# Values that cannot be restored.


class Moduleless(type):
    """Metaclass of classes without `__module__`, such as SWIG's classes for Box2D."""

    @property
    def __module__(cls):
        raise AttributeError("__module__")


class SwigObject(metaclass=Moduleless):
    __slots__ = ("x",)


class Mood(enum.Enum):
    CALM = 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (iter([1]), "is a list_iterator"),
        ((x for x in [1]), "is a generator"),
        (itertools.count(), "is a count"),
        (threading.Lock(), "is a lock"),
        (ctypes.c_int(3), "is a c_int"),
        (memoryview(b"a"), "is a memoryview"),
        ({1, 2}, "is a set"),
        (bytearray(b"a"), "is a bytearray"),
        (frozenset({1}), "is a frozenset"),
        (collections.defaultdict(list), "is a defaultdict"),
        (collections.OrderedDict(a=1), "is a OrderedDict"),
        (functools.partial(math.pow, 2.0), "is a partial"),
        (random.Random(1), "is a Random"),
        (np.random.RandomState(1), "is a RandomState"),
        (np.random.SeedSequence(1), "is a SeedSequence"),
        (np.random.PCG64(1), "is a PCG64"),
        (lambda x: x, "is a function"),
        (np.maximum, "is a ufunc"),
        (Holder, "is a type"),
        (gym, "is a module"),
        (Mood.CALM, "is a Mood"),
        (SwigObject(), "is a SwigObject"),
        (Holder(), "is a Holder"),
        (spaces.GraphInstance(np.zeros(1), None, None), "is a GraphInstance"),
        (np.array([None]), "is a ndarray of object"),
        (np.zeros(2, [("a", int)]), r"is a ndarray of \[\('a'"),
        (np.ma.zeros(2), "is a MaskedArray"),
        ([1, {"deep": (3, iter(""))}], r"get_state\(\)\[1\]\['deep'\]\[1\] is a str_"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_not_plain_is_rejected_by_name(value, message):
    with pytest.raises(vecenv.NotRestorable, match=message) as raised:
        state_of(Holder(value))
    assert "Holder.get_state()" in str(raised.value) and "Return such values" in str(raised.value)


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (gym.Wrapper, "Wrapper"),
        (wrappers.NormalizeReward, "NormalizeReward"),
        # A function that the user passes may have state. The functions that Gymnasium's wrappers define have none.
        (lambda env: wrappers.TransformReward(env, lambda reward: reward), "TransformReward"),
    ],
)
def test_a_wrapper_whose_state_is_unknown_is_named(wrap, name):
    with pytest.raises(vecenv.NotRestorable, match=rf"{name} does not define get_state.*Define both on {name}"):
        state_of(wrap(Holder()))


def test_a_subclass_of_a_known_class_must_define_its_state():
    class Windy(type(gym.make("CartPole-v1").unwrapped)):
        pass

    with pytest.raises(vecenv.NotRestorable, match=r"Windy does not define get_state"):
        state_of(Windy())


class Opaque(Holder):
    """Draws a number in `set_state` and passes its generator to another object there."""

    def __init__(self):
        super().__init__(iter([1]))

    def get_state(self):
        return {"hidden": True}

    def set_state(self, state):
        self.np_random.random()
        self.helper = [self.np_random]


def test_the_generator_of_an_env_that_defines_set_state_is_restored_before_and_after_the_call(path):
    saved = Opaque()
    saved.np_random.random()
    found = through(path, saved, Opaque())
    assert found.np_random.random() == saved.np_random.random() and found.helper[0] is found.np_random


def test_a_set_state_that_resets_the_env_does_not_change_its_generator(path):
    class Resets(Holder):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.np_random.integers(2), {}

        def set_state(self, state):
            self.reset(seed=3)

    saved = Resets()
    saved.reset(seed=1)
    found = through(path, saved, Resets())
    assert found.np_random.random() == saved.np_random.random() and found.np_random_seed == 1


class Old(Plain):
    """Defines an unrelated `set_state`, as MujocoEnv does."""

    def set_state(self, qpos, qvel):
        raise AssertionError

    def get_state(self):
        raise AssertionError


def test_methods_with_other_signatures_do_not_count():
    with pytest.raises(vecenv.NotRestorable, match="Old does not define get_state"):
        state_of(Old())


@pytest.mark.parametrize("env_id", ["Hopper-v5", "LunarLander-v3", "BipedalWalker-v3"])
def test_gymnasiums_mujoco_and_box2d_envs_are_rejected_by_name(env_id):
    if env_id != "Hopper-v5":
        pytest.importorskip("Box2D")
    with vecenv.SyncVectorEnv([lambda: gym.make(env_id)]) as envs:
        envs.reset(seed=0)
        name = type(envs.envs[0].unwrapped).__name__
        with pytest.raises(vecenv.NotRestorable, match=re.escape(f"{name} does not define get_state()")):
            envs.get_state()


# Files.


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array([None]), np.zeros(1, [("a", object)]), [1, {"a": len}]])
def test_a_value_that_is_not_a_state_is_not_saved_and_the_previous_file_stays(value, tmp_path):
    save(tmp_path / "states", "before")
    with pytest.raises(TypeError, match="cannot be saved"):
        save(tmp_path / "states", value)
    assert load(tmp_path / "states") == "before" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("spoil", [lambda b: b[: len(b) // 2], lambda b: b"x" + b[1:], lambda b: b"", lambda b: b"{}"])
def test_a_damaged_file_is_rejected(spoil, path):
    save(path, [1, np.arange(1000)])
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match="holds no env states"):
        load(path)


def test_a_file_of_another_format_is_rejected(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(vecenv.state.files, "_FORMAT", 99)
        save(path, [1])
    with pytest.raises(ValueError, match=r"its format is 99, but this version reads \d"):
        load(path)


@pytest.mark.parametrize(
    "node",
    [
        {"numpy.ndarray": ["O", [1], "C", 0]},
        {"numpy.ndarray": [[["a", "O"]], [1], "C", 0]},
        {"Generator": ["RandomState", {"dict": []}, {"dict": []}]},
        {"Generator": ["__import__", "os", {"dict": []}]},
        {"object": ["subprocess:Popen", ["touch"]]},
    ],
    ids=str,
)
def test_a_file_cannot_name_code_or_objects(node, path):
    """A checkpoint may come from an untrusted source. Loading it builds only the supported kinds of plain values."""
    state = state_of(Holder(1))
    state[0]["state"] = node
    save(path, state)
    env = Holder(1)
    with pytest.raises((ValueError, KeyError)):
        restore(env, load(path))
    assert env.value == 1


def test_a_native_task_is_a_vector_env_and_takes_one_state_per_env():
    envs = Hopper(3)
    assert isinstance(envs, VectorEnv)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="one state for each of 3 envs, but got 2"):
        envs.set_state(envs.get_state()[:2])
