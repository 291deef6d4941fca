"""Tests of ids that other packages register with a vector_entry_point: vecenv.make uses it where it can."""

import re
import traceback

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

import vecenv
from tests.helpers import CountingEnv, assert_same
from vecenv.testing import check_vector_env


class DrawingVectorEnv(VectorEnv):
    """Observes random numbers from one generator per env and ends episodes at random. Knows nothing of vecenv.

    Its final observations cover all envs, and it does not support the autoreset mode Disabled.
    """

    def __init__(self, num_envs, *, size=2, max_episode_steps=5, autoreset_mode=AutoresetMode.NEXT_STEP):
        if AutoresetMode(autoreset_mode) == AutoresetMode.DISABLED:
            raise ValueError("Invalid autoreset_mode: Disabled")
        self.num_envs, self.limit, self.mode = num_envs, max_episode_steps, AutoresetMode(autoreset_mode)
        self.metadata = {"autoreset_mode": self.mode}
        self.single_observation_space = spaces.Box(0, 1, (size,), np.float64)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generators, self.steps = [np.random.default_rng() for _ in range(num_envs)], np.zeros(num_envs, int)
        self.observations, self.ended = np.zeros((num_envs, size)), np.zeros(num_envs, bool)

    def checked_seeds(self, seed, rows):
        if not isinstance(seed, list) or len(seed) != self.num_envs:
            raise gym.error.Error("seeds must be a list")
        return [seed[row] for row in rows]

    def reset(self, *, seed=None, options=None):
        rows = np.flatnonzero((options or {}).get("reset_mask", np.ones(self.num_envs, bool)))
        if seed is not None:
            for row, number in zip(rows, self.checked_seeds(seed, rows), strict=True):
                self.generators[row] = np.random.default_rng(number)
        self.begin(rows)
        return self.observations.copy(), self.infos()

    def begin(self, rows):
        self.draw(rows)
        self.steps[rows], self.ended[rows] = 0, False

    def draw(self, rows):
        for row in rows:
            self.observations[row] = self.generators[row].random(self.observations.shape[1])

    def infos(self):
        return {"steps": self.steps.copy(), "_steps": np.ones(self.num_envs, bool)}

    def step(self, actions):
        begins = self.ended.copy()
        stepped = ~begins
        self.steps[stepped] += 1
        self.draw(np.flatnonzero(stepped))
        self.begin(np.flatnonzero(begins))
        rewards = np.where(stepped, self.observations[:, 0] + actions, 0.0)
        terminated = stepped & (self.observations[:, 0] < 0.1)
        truncated = stepped & ~terminated & (self.steps >= self.limit)
        self.ended = terminated | truncated
        infos = {}
        if self.mode == AutoresetMode.SAME_STEP and self.ended.any():
            infos["final_obs"] = self.observations.copy()
            self.begin(np.flatnonzero(self.ended))
        return self.observations.copy(), rewards, terminated, truncated, {**self.infos(), **infos}


class MasklessVectorEnv(DrawingVectorEnv):
    def infos(self):
        return {"steps": self.steps.copy()}


class NoModeVectorEnv(DrawingVectorEnv):
    """Has no argument autoreset_mode; its mode is NextStep."""

    def __init__(self, num_envs, max_episode_steps=5):
        super().__init__(num_envs, max_episode_steps=max_episode_steps)


class SingleEnv(CountingEnv):
    def __init__(self, size=2, colors=0, render_mode=None):
        super().__init__(0)
        self.render_mode = render_mode


@pytest.fixture
def register():
    """Returns a function that registers "Both-v0", with a single env and a vector env, until the test ends."""

    def register(vector_entry_point=DrawingVectorEnv, entry_point=SingleEnv, **arguments):
        gym.register("Both-v0", entry_point, vector_entry_point=vector_entry_point, max_episode_steps=9, **arguments)

    yield register
    gym.registry.pop("Both-v0", None)
    gym.registry.pop("vecenv/Both-v0", None)


def is_single(envs):
    return envs.single_observation_space.shape == CountingEnv.observation_space.shape


@pytest.mark.parametrize("num_workers", [None, 2])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_results_are_those_of_make_vec_whatever_the_number_of_workers(register, mode, num_workers):
    register(kwargs={"size": 4})
    theirs = gym.make_vec("Both-v0", 6, autoreset_mode=mode)
    seeds = list(range(5, 11))
    with vecenv.make("Both-v0", 6, num_workers, vector_kwargs={"autoreset_mode": mode}) as ours:
        assert ours.num_workers == (num_workers or 0) and ours.spec.id == "Both-v0"
        assert_same(ours.reset(seed=5)[0], theirs.reset(seed=seeds)[0])
        num_ended = 0
        for step in range(60):
            actions = np.arange(6) % 3
            *mine, infos = ours.step(actions)
            *expected, expected_infos = theirs.step(actions)
            assert_same(tuple(mine), tuple(expected))
            assert_same(infos["steps"], expected_infos["steps"])
            assert infos["_steps"].all()
            for env in np.flatnonzero(mine[2] | mine[3]) if mode == "SameStep" else ():
                assert_same(infos["final_obs"][env], expected_infos["final_obs"][env])
            num_ended += (mine[2] | mine[3]).sum()
            if step == 30:
                mask = np.array([True, False, True, True, False, False])
                some = list(range(7, 13))
                mine = ours.reset(seed=7, options={"reset_mask": mask})[0]
                assert_same(mine, theirs.reset(seed=some, options={"reset_mask": mask})[0])
        assert num_ended > 20


def test_a_vector_env_of_another_package_passes_the_conformance_suite(register):
    register()
    assert len(check_vector_env(lambda: vecenv.make("Both-v0", 3))) == 15


def test_the_vector_form_is_announced_once_because_the_spaces_may_differ(register, logged):
    register()
    for _ in range(2):
        with vecenv.make("Both-v0", 2) as envs:
            assert not is_single(envs) and envs.num_workers == 0
    (entry,) = logged()
    assert entry[0] == "WARNING" and entry[1].startswith("Both-v0 is built from its vector_entry_point; ")
    assert "backend='python'" in entry[1]


def test_the_vecenv_id_for_make_vec_builds_the_vector_form_too(register):
    register()
    vecenv.register_envs()
    envs = gym.make_vec("vecenv/Both-v0", num_envs=2)
    assert isinstance(envs, vecenv.AsyncVectorEnv) and not is_single(envs)
    envs.close()


@pytest.mark.parametrize(
    ("arguments", "entries"),
    [
        ({"backend": "python"}, []),
        (
            {"wrappers": [gym.wrappers.TimeAwareObservation, lambda env: env.env]},
            [("INFO", "wrappers need single envs")],
        ),
        ({"colors": 3}, [("WARNING", "got an unexpected keyword argument 'colors'")]),
        ({"render_mode": "rgb_array"}, [("WARNING", "got an unexpected keyword argument 'render_mode'")]),
        ({"vector_kwargs": {"autoreset_mode": "Disabled"}}, [("WARNING", "ValueError: Invalid autoreset_mode: Disab")]),
        (
            {"vector_kwargs": {"on_worker_death": "restart"}},
            [("WARNING", "needs step_rows(ids, actions), which Drawi")],
        ),
    ],
)
def test_arguments_that_need_single_envs_select_them_and_the_reason_is_logged(register, arguments, entries, logged):
    register()
    with vecenv.make("Both-v0", 2, **arguments) as envs:
        assert is_single(envs) and envs.num_workers > 0
        envs.reset(seed=0)
    assert len(logged()) == len(entries)
    for (level, message), (expected, reason) in zip(logged(), entries, strict=True):
        assert level == expected and reason in message and "is not built from its vector_entry_point" in message


@pytest.mark.parametrize("num_workers", [None, 2])
def test_the_whole_error_of_a_vector_env_is_a_reason_in_workers_too(register, num_workers, logged):
    def refuse(num_envs, **_):
        raise ValueError("there is no license\nAsk for one.")

    register(refuse)
    with vecenv.make("Both-v0", 2, num_workers) as envs:
        assert is_single(envs)
    assert logged()[0][1].endswith(": ValueError: there is no license\nAsk for one.")


def test_a_vector_env_without_the_argument_autoreset_mode_is_used_if_it_has_the_mode(register, logged):
    register(NoModeVectorEnv)
    with vecenv.make("Both-v0", 2) as envs:
        assert not is_single(envs)
    with vecenv.make("Both-v0", 2, vector_kwargs={"autoreset_mode": "SameStep"}) as envs:
        assert is_single(envs)
    assert logged()[1][1].endswith("NoModeVectorEnv does not support autoreset_mode='SameStep'")


def test_a_vector_env_of_an_id_without_single_envs_raises_its_own_errors(register):
    register(NoModeVectorEnv, entry_point=None)
    with vecenv.make("Both-v0", 2) as envs:
        envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"is AutoresetMode\.NEXT_STEP: pass autoreset_mode=AutoresetMode\.NEXT_STEP"):
        vecenv.make("Both-v0", 2, vector_kwargs={"autoreset_mode": "SameStep"})
    with pytest.raises(TypeError, match="unexpected keyword argument 'colors'"):
        vecenv.make("Both-v0", 2, colors=3)


@pytest.mark.parametrize("num_workers", [None, 2])
def test_infos_without_masks_are_an_error_that_names_the_key(register, num_workers):
    """Without a mask, the infos of several workers could not be combined."""
    register(MasklessVectorEnv)
    with (
        vecenv.make("Both-v0", 2, num_workers) as envs,
        pytest.raises(TypeError, match=r"info of envs .* at reset has the key 'steps' without a mask '_steps'"),
    ):
        envs.reset(seed=0)


def test_gymnasiums_own_ids_are_single_envs_because_their_vector_forms_share_a_generator(logged):
    """With the same seed, the vector form begins differently from single envs, each of which gets its own seed."""
    with vecenv.make("CartPole-v1", 3) as ours:
        single = ours.reset(seed=1)[0]
    theirs = gym.make_vec("CartPole-v1", 3, vectorization_mode="sync")
    assert_same(single, theirs.reset(seed=1)[0])
    assert (gym.make_vec("CartPole-v1", 3).reset(seed=1)[0][1:] != single[1:]).all() and logged() == []


class Misnamed(DrawingVectorEnv):
    def __init__(self, n, **kwargs):
        super().__init__(n, **kwargs)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_arguments_that_a_vector_env_does_not_take_are_in_the_error(register, num_workers):
    register(Misnamed, entry_point=None)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'n'") as caught:
        vecenv.make("Both-v0", 3, num_workers)
    told = "".join(traceback.format_exception(caught.value))
    assert re.search(r"vecenv passed num_envs, max_episode_steps, autoreset_mode\.", told)


class Adds(DrawingVectorEnv):
    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs + "1", **kwargs)


def test_a_type_error_of_the_constructor_itself_says_nothing_about_the_arguments(register):
    register(Adds, entry_point=None)
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        vecenv.make("Both-v0", 3, 0)
    assert "vecenv passed" not in "".join(traceback.format_exception(caught.value)).split("TypeError: unsupported")[-1]
