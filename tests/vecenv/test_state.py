"""Tests of get_state and set_state, and of vecenv/state: who goes on from a file does what who went on did."""

import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.vector import AutoresetMode, VectorEnv
from hypothesis import given
from hypothesis import strategies as st

import vecenv
from tests.helpers import Colour, CountingEnv, SampledEnv, assert_same, counting_fns
from vecenv.mujoco import TASKS, Hopper, Humanoid
from vecenv.state import load, save

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


def advance(envs, generator, steps):
    """Takes random steps, with resets where autoreset is disabled; returns all that it was given."""
    seen = []
    for _ in range(steps):
        actions = (
            [envs.single_action_space.sample() for _ in range(envs.num_envs)] if generator is None else generator()
        )
        result = envs.step(actions)
        over = result[2] | result[3]
        seen += [result, envs.episode_returns, envs.episode_lengths]
        if envs.autoreset_mode == AutoresetMode.DISABLED and over.any():
            seen.append(envs.reset(options={"reset_mask": over}))
    return seen


def actor(envs, seed):
    """Returns a function that draws actions of these spaces, the same for the same seed."""
    space = envs.action_space
    space.seed(seed)
    return space.sample


def check_goes_on(make, path, before=150, after=200, resume=None):
    """Asserts that an interrupted course is the course of envs that nobody saved."""
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
        resumed.reset(seed=8)  # and once more, over envs that are in use
        advance(resumed, actor(resumed, 2), 7)
        resumed.set_state(load(path))
        assert_same(tuple(expected[2:]), tuple(advance(resumed, actor(resumed, 1), after)))


assert len(IDS) >= 12, IDS


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasiums_classic_and_toy_envs_go_on_exactly(env_id, tmp_path):
    def fn():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gym.make(env_id)

    check_goes_on(lambda: vecenv.AsyncVectorEnv([fn] * 2, num_workers=1), tmp_path / "states")


WRAPPERS = {
    "NormalizeObservation": wrappers.NormalizeObservation,
    "NormalizeReward": wrappers.NormalizeReward,
    "FrameStackObservation": lambda env: wrappers.FrameStackObservation(env, 3),
    "DelayObservation": lambda env: wrappers.DelayObservation(env, 2),
    "StickyAction": lambda env: wrappers.StickyAction(env, 0.5),
    "RescaleAction": lambda env: wrappers.RescaleAction(env, np.float32(-1), np.float32(1)),
    "TransformReward": lambda env: wrappers.TransformReward(env, lambda reward: reward * 2),
    "TimeAwareObservation": wrappers.TimeAwareObservation,
    "FlattenObservation": wrappers.FlattenObservation,
    "DtypeObservation": lambda env: wrappers.DtypeObservation(env, np.float16),
    "MaxAndSkipObservation": wrappers.MaxAndSkipObservation,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_gymnasiums_wrappers_go_on_exactly(name, tmp_path):
    fns = [lambda: WRAPPERS[name](gym.make("Pendulum-v1", max_episode_steps=30))] * 2
    check_goes_on(lambda: vecenv.SyncVectorEnv(fns, autoreset_mode="SameStep"), tmp_path / "states", 50, 70)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize(("kind", "options"), ROWS)
def test_every_vector_env_goes_on_exactly_in_every_mode(kind, options, mode, tmp_path):
    fns = [lambda: gym.make("CartPole-v1")] * 3
    check_goes_on(lambda: kind(fns, autoreset_mode=mode, **options), tmp_path / "states", 60, 60)


def test_the_number_of_workers_may_differ(tmp_path):
    def make(num_workers):
        return vecenv.AsyncVectorEnv(
            [lambda: gym.make("Blackjack-v1")] * 5, num_workers=num_workers, autoreset_mode="SameStep"
        )

    check_goes_on(lambda: make(2), tmp_path / "states", 20, 50, resume=lambda: make(3))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("make", [lambda: counting_fns(3), lambda: vecenv.Batched(Short, 3)], ids=["envs", "batched"])
def test_any_moment_of_an_episode_will_do(make, mode):
    """Also that at which an episode is over and the next one has not begun, or a single env's has not."""
    with vecenv.SyncVectorEnv(make(), autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        draw = actor(envs, 0)
        for _ in range(9):
            with vecenv.SyncVectorEnv(make(), autoreset_mode=mode) as others:
                others.set_state(envs.get_state())
                for actions in [draw() for _ in range(7)]:
                    assert_same(*(tuple(advance(e, lambda actions=actions: actions, 1)) for e in (envs, others)))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_simulations_go_on_bit_for_bit(name, mode, tmp_path):
    batched = vecenv.Batched(lambda **arguments: TASKS[name](**arguments, max_episode_steps=25), 3)
    check_goes_on(lambda: vecenv.SyncVectorEnv(batched, autoreset_mode=mode), tmp_path / "states", 37, 40)


def test_simulations_go_on_in_other_workers(tmp_path):
    def make(num_workers):
        return vecenv.AsyncVectorEnv(vecenv.Batched(TASKS["Ant-v5"], 5), num_workers=num_workers)

    check_goes_on(lambda: make(2), tmp_path / "states", 30, 60, resume=lambda: make(1))


class Short(Hopper):
    """Episodes of five steps."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs, max_episode_steps=5)


class Varied(Hopper):
    """Its torso has another mass, and its goal another place, in each episode."""

    saved = ("goals",)

    def __init__(self, num_envs=1, **kwargs):
        self.goals = np.zeros(num_envs)
        super().__init__(num_envs, max_episode_steps=20, **kwargs)
        self.masses = self.physics.expand("body_mass")

    def randomize(self, env, rng):
        self.masses[env, 1] = rng.uniform(2, 5)
        self.goals[env] = rng.uniform()

    def outcome(self, before, actions):
        rewards, terminated, infos = super().outcome(before, actions)
        return rewards + self.goals, terminated, {**infos, "goal": self.goals.copy()}


def test_randomized_models_and_saved_attributes_of_tasks_go_on(tmp_path):
    check_goes_on(lambda: vecenv.SyncVectorEnv(vecenv.Batched(Varied, 3)), tmp_path / "states", 33, 60)


def test_a_field_of_the_model_that_new_envs_had_not_varied_is_varied_for_the_task_too():
    """Humanoid's reward is of the centre of mass, so of the masses."""
    envs, others = Humanoid(2), Humanoid(2)
    envs.reset(seed=0)
    envs.physics.expand("body_mass")[:, 1:] *= np.linspace(0.5, 2.0, 13)
    others.set_state(envs.get_state())
    assert others.physics.varied.keys() == envs.physics.varied.keys()
    action = np.full((2, 17), 0.2, np.float32)
    assert_same(others.step(action), envs.step(action))


def test_a_field_of_the_model_that_only_the_new_envs_have_varied_is_as_the_model_has_it():
    envs, others = Hopper(2), Hopper(2)
    envs.reset(seed=0)
    others.reset(seed=0)
    for name in ("body_mass", "opt.gravity"):
        others.physics.expand(name)[:] *= 3
    others.physics.batch.set_const()
    others.set_state(envs.get_state())
    for _ in range(3):
        assert_same(*(e.step(np.full((2, 3), 0.2, np.float32)) for e in (others, envs)))


@pytest.mark.parametrize("name", TASKS)
def test_a_restored_simulation_looks_as_before_without_a_step(name):
    envs, others = TASKS[name](2), TASKS[name](2)
    envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(4):
        envs.step(envs.action_space.sample())
    others.set_state(envs.get_state())
    assert_same(others.observe(), envs.observe())


def test_an_attribute_of_a_task_that_changed_is_named():
    class Curriculum(Hopper):
        level = 0

        def initial_state(self, rng):
            self.level += 1
            return super().initial_state(rng)

    envs = vecenv.AsyncVectorEnv(vecenv.Batched(Curriculum, 2), num_workers=0)
    envs.reset(seed=0)
    with pytest.raises(vecenv.NotRestorable, match=r"Curriculum\.level has changed.*Curriculum\.saved"):
        envs.get_state()
    envs.step(np.zeros((2, 3), np.float32))


class ObjectLeaves(SampledEnv):
    """Observes what has no fixed shape."""

    def __init__(self):
        observed = spaces.Dict({"text": spaces.Text(5), "graph": spaces.Graph(spaces.Discrete(3), None)})
        super().__init__(spaces.Dict({**observed.spaces, "list": spaces.Sequence(spaces.Discrete(3))}), Colour(), True)


def test_observations_without_fixed_shape_and_generators_of_spaces_go_on(tmp_path):
    check_goes_on(lambda: vecenv.AsyncVectorEnv([ObjectLeaves] * 3, num_workers=2), tmp_path / "states", 20, 30)


def test_states_of_envs_that_were_never_reset_are_restored_as_such():
    with vecenv.SyncVectorEnv(counting_fns(2)) as envs, vecenv.SyncVectorEnv(counting_fns(2)) as others:
        states = envs.get_state()
        others.reset(seed=0)
        others.set_state(states)
        assert others.get_attr("episode") == (-1, -1)
        assert_same(others.reset(seed=1), envs.reset(seed=1))


SCRIPT = """
import enum, sys
from dataclasses import dataclass
import gymnasium as gym, numpy as np, vecenv

class Mood(enum.Enum):
    CALM, WILD = 1, 2

@dataclass
class Ball:
    x: float

class Env(gym.Env):
    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (), np.float64), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ball, self.mood = Ball(self.np_random.random()), Mood.CALM
        return np.float64(self.ball.x), {}

    def step(self, action):
        self.ball.x += self.np_random.random()
        self.mood = Mood.WILD if self.mood is Mood.CALM else Mood.CALM
        return np.float64(self.ball.x), float(self.mood.value), self.ball.x > 5, False, {}

with vecenv.AsyncVectorEnv([Env] * 3, num_workers=2) as envs:
    if sys.argv[2] == "save":
        envs.reset(seed=0)
        envs.step([0] * 3)
        vecenv.state.save(sys.argv[1], envs.get_state())
    else:
        envs.set_state(vecenv.state.load(sys.argv[1]))
    print([[part.tolist() for part in envs.step([0] * 3)[:4]] for _ in range(30)])
"""


def test_classes_of_a_script_are_found_again_when_it_is_run_again(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "states")]
    saved, loaded = (subprocess.run([*words, w], capture_output=True, text=True, timeout=60) for w in ("save", "load"))
    assert saved.stdout == loaded.stdout != "", saved.stderr + loaded.stderr


class Secret(gym.Env):
    """Has a state that nobody sees, and the means to hand it out."""

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
        return {"count": self._count, "by": ("tuple", {1, *()} and [1.5])}

    def set_state(self, state):
        assert state["by"] == ("tuple", [1.5])
        self._count = state["count"]
        self._hidden = iter(range(self._count + 1, 1000))


def test_an_env_may_take_and_set_its_own_state_and_its_generator_is_kept_for_it(tmp_path):
    fns = [lambda: gym.wrappers.TimeLimit(Secret(), 5)] * 3
    check_goes_on(lambda: vecenv.AsyncVectorEnv(fns, num_workers=2), tmp_path / "states", 9, 40)


class Together(gym.vector.SyncVectorEnv):
    """Gymnasium's own, with the protocol of a batch."""

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
def test_a_batch_of_envs_takes_its_own_state_or_is_refused(cls, tmp_path):
    batched = vecenv.Batched(lambda **arguments: make_together(cls, **arguments), 4)
    if cls is Together:
        check_goes_on(lambda: vecenv.AsyncVectorEnv(batched, num_workers=2), tmp_path / "states", 13, 30)
        return
    with vecenv.AsyncVectorEnv(batched, num_workers=2) as envs:
        envs.reset(seed=0)
        with pytest.raises(vecenv.NotRestorable, match=r"SyncVectorEnv.*has no get_state\(\).*define both"):
            envs.get_state()
        envs.step(np.zeros((4, 1), np.float32))


def test_a_wrapper_of_a_batch_does_not_pass_for_it():
    """What it has of its own, such as statistics, would be lost."""

    class Wrapped(gym.vector.VectorWrapper):
        get_state = None

    def make(num_envs, autoreset_mode):
        return Wrapped(Hopper(num_envs, autoreset_mode=autoreset_mode))

    with (
        vecenv.SyncVectorEnv(vecenv.Batched(make, 2)) as envs,
        pytest.raises(vecenv.NotRestorable, match="Wrapped"),
    ):
        envs.get_state()


def test_parts_of_one_array_that_overlap_are_refused_by_the_vector_env():
    whole = np.zeros(9)

    class Parts(CountingEnv):
        def __init__(self, index):
            super().__init__(index)
            self.part = whole[index : index + 3]

    with (
        vecenv.SyncVectorEnv([lambda i=i: Parts(i) for i in range(2)]) as envs,
        pytest.raises(vecenv.NotRestorable, match=r"Parts\.part of one env is memory of which other envs"),
    ):
        envs.get_state()


class WithFile(CountingEnv):
    """Env 2 has an open file."""

    def __init__(self, index):
        super().__init__(index)
        self.log = {"files": [open(__file__)] if index == 2 else []}  # noqa: SIM115

    def close(self):
        for file in self.log["files"]:
            file.close()


@pytest.mark.parametrize(("kind", "options"), ROWS)
def test_what_cannot_be_restored_is_named_with_its_env_and_the_envs_go_on(kind, options):
    with kind([lambda i=i: WithFile(i) for i in range(3)], **options) as envs:
        envs.reset(seed=0)
        with pytest.raises(vecenv.NotRestorable) as raised:
            envs.get_state()
        text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
        assert "WithFile.log['files'][0] is a _io.TextIOWrapper" in text and "env 2" in text
        assert "get_state() and set_state(state) on WithFile" in text
        assert envs.step([0, 0, 0])[1].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}])
def test_states_are_taken_between_steps_only(options):
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


def test_episodes_that_a_dead_worker_cut_are_cut_after_a_restore_too():
    def make():
        return vecenv.AsyncVectorEnv(counting_fns(4, 9), num_workers=2, on_worker_death="restart")

    with make() as envs, make() as resumed:
        envs.reset(seed=0)
        envs.step([0] * 4)
        envs.processes[1].kill()
        envs.processes[1].join()
        with pytest.warns(UserWarning, match="started again"):
            states = envs.get_state()
        resumed.set_state(states)
        assert [state["cut"] for state in states] == [False, False, True, True]
        expected = advance(envs, lambda: [0] * 4, 12)
        assert expected[0][3].tolist() == [False, False, True, True]
        assert_same(tuple(expected), tuple(advance(resumed, lambda: [0] * 4, 12)))


def states_of(make):
    with make() as envs:
        envs.reset(seed=0)
        return envs.get_state()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[:2], r"a list of 3 states, one for each env, and got 2 states"),
        (lambda s: {}, r"a list of 3 states.*and got a dict"),
        (lambda s: [s[0], {"env": 1}, s[2]], r"state of env 1 is not what get_state\(\) returned: it lacks \['auto"),
        (lambda s: [s[0], 5, s[2]], r"state of env 1.*it is a int"),
        (lambda s: [{**s[0], "format": 99}, *s[1:]], r"env 0 has format 99"),
        (lambda s: [s[0], s[1], {**s[2], "row": None}], r"of envs 0 and 2 only one had been reset"),
        (
            lambda s: states_of(lambda: vecenv.SyncVectorEnv(counting_fns(3), float32_observations=True)),
            r"env 0 has observation float32\[3\], but this vector env float64\[3\]",
        ),
        (
            lambda s: states_of(lambda: vecenv.SyncVectorEnv([lambda: gym.make("Blackjack-v1")] * 3)),
            r"env 0 has \[.*'observation\[0\]'.*the observation spaces differ",
        ),
        (
            lambda s: states_of(lambda: vecenv.SyncVectorEnv(counting_fns(3), autoreset_mode="SameStep")),
            r"autoreset_mode='SameStep', but this vector env was built with 'NextStep'",
        ),
    ],
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(change, message):
    with vecenv.SyncVectorEnv(counting_fns(3)) as envs:
        envs.reset(seed=0)
        envs.step([0] * 3)
        states, observed = envs.get_state(), envs.observations.copy()
        with pytest.raises(ValueError, match=message):
            envs.set_state(change(states))
        assert_same(envs.observations, observed)
        assert envs.step([0] * 3)[1].tolist() == [2.0] * 3


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2}])
def test_states_of_other_envs_with_the_same_spaces_are_refused(options):
    states = states_of(lambda: vecenv.SyncVectorEnv([lambda: gym.wrappers.TimeLimit(CountingEnv(0), 5)] * 2))
    with vecenv.AsyncVectorEnv(counting_fns(2), **options) as envs:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match="of a TimeLimit of CountingEnv, but this env is a CountingEnv"):
            envs.set_state(states)
        envs.reset(seed=0)
        assert envs.step([0, 0])[1].tolist() == [1.0, 1.0]
    single = {"simulation": {}}
    with vecenv.SyncVectorEnv(vecenv.Batched(Hopper, 2)) as envs:
        envs.reset(seed=0)
        mixed = [{**state, "kind": "env", "env": single} for state in envs.get_state()]
        with pytest.raises(ValueError, match=r"kind 'env', but these are 'batched'"):
            envs.set_state(mixed)


plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(min_value=2**200, max_value=2**201),
        st.floats(),
        st.text(st.characters(codec=None, exclude_categories=())),
        st.binary(),
        st.complex_numbers(),
        st.sampled_from(
            [np.float32(0.1), np.int8(-3), np.str_("a\0"), np.bool_(True), np.datetime64("2020-01-01", "D")]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.one_of(st.text(), st.integers()), inner)
    ),
)
arrays = st.builds(
    lambda dtype, shape, seed: np.frombuffer(
        np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype
    ).reshape(shape),
    st.sampled_from(["u1", "<i2", ">i4", "u8", "f2", ">f8", "f8", "c16", "S3", "M8[s]"]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)


def exactly(value):
    """Returns something that is equal for values that are the same in type and bits."""
    if isinstance(value, (list, tuple)):
        return type(value), [exactly(item) for item in value]
    if isinstance(value, dict):
        return dict, [(exactly(key), exactly(item)) for key, item in value.items()]
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.str_):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    is_number = isinstance(value, (float, complex))
    return type(value), np.array(value).tobytes() if is_number else value


@given(value=st.one_of(plain, st.lists(st.one_of(plain, arrays))))
def test_plain_values_come_back_from_a_file_as_they_were(value, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "plain"
    save(path, value)
    assert exactly(load(path)) == exactly(value)


def test_equal_texts_and_arrays_are_stored_once(tmp_path):
    text, numbers = np.random.default_rng(0).bytes(100_000).hex(), np.random.default_rng(1).random(2000)
    value = [(text[:-1] + "x", numbers + 0, numbers.reshape(40, 50).astype(">f8")) for _ in range(50)]
    save(tmp_path / "states", value)
    assert (tmp_path / "states").stat().st_size < 300_000
    found = load(tmp_path / "states")
    assert exactly(found) == exactly(value)
    found[0][1][:] = 0
    assert exactly(found[1:]) == exactly(value[1:])


def test_the_states_of_many_envs_with_a_big_table_are_small(tmp_path):
    with vecenv.SyncVectorEnv([lambda: gym.make("Taxi-v4")] * 8) as envs:
        envs.reset(seed=0)
        states = envs.get_state()
    for num_envs in (1, 8):
        save(tmp_path / f"{num_envs}", states[:num_envs])
    one, eight = ((tmp_path / f"{num_envs}").stat().st_size for num_envs in (1, 8))
    assert eight < 2 * one < 200_000


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array([None]), [1, (2, {"a": lambda: 0})]])
def test_only_plain_values_are_saved_and_the_file_of_before_stays(value, tmp_path):
    save(tmp_path / "states", "before")
    with pytest.raises(TypeError, match=r"states.* cannot be saved"):
        save(tmp_path / "states", value)
    assert load(tmp_path / "states") == "before" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("spoil", [lambda b: b[: len(b) // 2], lambda b: b"x" + b[1:], lambda b: b"", lambda b: b"{}"])
def test_a_file_that_is_no_file_of_states_is_refused(spoil, tmp_path):
    path = tmp_path / "states"
    save(path, [1, np.arange(1000)])
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match="holds no states of envs"):
        load(path)


def test_a_batch_is_a_vector_env_with_states_of_each_env():
    envs = Hopper(3)
    assert isinstance(envs, VectorEnv)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="one state for each of 3 envs, and got 2"):
        envs.set_state(envs.get_state()[:2])
