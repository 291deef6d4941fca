"""Tests of vecenv/vector/sync_vector_env.py: the serial vector env equals Gymnasium's SyncVectorEnv, bit for bit."""

from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

import vecenv
from tests.helpers import CountingEnv, SampledEnv, any_space_at_all, assert_same, counting_fns
from vecenv.vector.single_env import SingleEnv

MODES = [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]


def run_both(one, other, steps):
    """Resets and steps two vector envs with the same actions and asserts that they return the same."""
    assert one.observation_space == other.observation_space
    assert one.action_space == other.action_space
    assert one.metadata["autoreset_mode"] == other.metadata["autoreset_mode"]
    assert_same(one.reset(seed=5), other.reset(seed=5))
    one.action_space.seed(7)
    for _ in range(steps):
        actions = one.action_space.sample()
        assert_same(one.step(actions), other.step(actions))
    assert_same(one.reset(), other.reset())
    one.close()
    other.close()


@settings(max_examples=30, deadline=None)
@given(any_space_at_all(), any_space_at_all(), st.integers(1, 4), st.sampled_from(MODES), st.booleans())
def test_serial_equals_gymnasium_for_any_space(observation_space, action_space, num_envs, mode, info):
    fns = [lambda: SampledEnv(observation_space, action_space, info)] * num_envs
    run_both(
        vecenv.SyncVectorEnv(fns, autoreset_mode=mode), gym.vector.SyncVectorEnv(fns, autoreset_mode=mode), steps=25
    )


SLOW_IDS = [pytest.param(name, marks=pytest.mark.slow) for name in ("Hopper-v5", "HalfCheetah-v5", "Taxi-v4")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", *SLOW_IDS])
def test_serial_equals_gymnasium_over_1000_steps_with_episode_ends(env_id, mode):
    fns = [lambda: gym.make(env_id, **({"max_episode_steps": 300} if env_id == "HalfCheetah-v5" else {}))] * 3
    run_both(
        vecenv.SyncVectorEnv(fns, autoreset_mode=mode), gym.vector.SyncVectorEnv(fns, autoreset_mode=mode), steps=1000
    )


def test_an_int_in_the_first_info_does_not_truncate_the_floats_of_other_envs():
    class Informing(CountingEnv):
        infos = ({"p": 1, "nested": {"q": True}}, {"p": 0.25, "nested": {"q": 0.5}})

        def step(self, action):
            return *super().step(action)[:4], self.infos[self.index]

    with vecenv.SyncVectorEnv([lambda i=i: Informing(i) for i in range(2)]) as envs:
        envs.reset()
        *_, merged = envs.step([0, 0])
    np.testing.assert_array_equal(merged["p"], [1.0, 0.25])
    np.testing.assert_array_equal(merged["nested"]["q"], [1.0, 0.5])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_actions_of_another_dtype_have_the_same_effect_as_in_gymnasium(dtype):
    fns = [lambda: gym.make("Pendulum-v1")] * 2
    ours, theirs = vecenv.SyncVectorEnv(fns), gym.vector.SyncVectorEnv(fns)
    ours.reset(seed=1), theirs.reset(seed=1)
    for k in range(20):
        actions = np.array([[0.1 * k], [1 / 3]]).astype(dtype)
        assert_same(ours.step(actions), theirs.step(actions))


def test_copies_do_not_change_and_views_last_until_the_step_after_next():
    copied, viewed = (vecenv.SyncVectorEnv(counting_fns(2, 50), copy=copy) for copy in (True, False))
    copies, views = [], []
    copied.reset(), viewed.reset()
    for _ in range(4):
        copies.append(copied.step(np.zeros(2, np.int64))[0])
        views.append(viewed.step(np.zeros(2, np.int64))[0])
        assert views[-1][0, 2] == len(views)
        if len(views) > 1:
            assert views[-2][0, 2] == len(views) - 1  # the previous step's view is intact
    assert [copy[0, 2] for copy in copies] == [1, 2, 3, 4]
    assert np.shares_memory(views[0], views[2]) and not np.shares_memory(views[0], views[1])
    assert not any(np.shares_memory(copy, array) for copy in copies for array in copied.arrays.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_episode_returns_and_lengths_show_the_totals_at_the_last_step(mode, one_by_one):
    with vecenv.SyncVectorEnv(counting_fns(3), autoreset_mode=mode) as envs:
        envs.reset()
        seen = []
        for _ in range(8):
            if one_by_one:
                envs.send(np.zeros(3, np.int64))
                batch = envs.recv()
                ended = batch.env_ids[batch.terminated | batch.truncated]
            else:
                _, _, terminated, truncated, _ = envs.step(np.zeros(3, np.int64))
                ended = np.flatnonzero(terminated | truncated)
            for i in ended:
                seen.append((i, envs.episode_returns[i], envs.episode_lengths[i]))
        expected = {i: (sum(range(1, 4 + i % 3)), 3 + i % 3) for i in range(3)}  # rewards are 1, 2, 3, ...
        assert seen and {(i, ret, length) for i, ret, length in seen} <= {(i, *expected[i]) for i in range(3)}
        assert {i for i, *_ in seen} == {0, 1, 2}


def test_after_close_every_method_raises():
    envs = vecenv.SyncVectorEnv(counting_fns(2))
    envs.close()
    envs.close()
    for call in (envs.reset, lambda: envs.step([0, 0]), lambda: envs.call("index"), lambda: envs.set_attr("index", 1)):
        with pytest.raises(vecenv.StateError, match="after a call to `close"):
            call()


class KeysEnv(gym.Env):
    """Remembers the keys of its last action, in their order."""

    observation_space = gym.spaces.Dict([("z", gym.spaces.Box(-1, 1)), ("a", gym.spaces.Box(-1, 1))])
    action_space = gym.spaces.Dict([("z", gym.spaces.Discrete(2)), ("m", gym.spaces.Tuple([observation_space]))])
    keys = None

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        self.keys = [*action, *action["m"][0]]
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.mark.parametrize("clip_actions", [False, True])
@pytest.mark.parametrize("make", [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv])
def test_keys_have_the_order_of_the_spaces(make, clip_actions):
    """Gymnasium sorts the keys of batched spaces, but an env may join the values of its action in their order."""
    with make([KeysEnv] * 2, clip_actions=clip_actions) as envs:
        assert list(envs.reset()[0]) == ["z", "a"]
        envs.step(envs.action_space.sample())
        assert envs.get_attr("keys") == (["z", "m", "z", "a"],) * 2


@pytest.mark.parametrize("make", [vecenv.SyncVectorEnv, partial(vecenv.AsyncVectorEnv, num_workers=0)])
def test_functions_may_come_from_an_iterator_as_in_gymnasium(make):
    with make(iter(counting_fns(2))) as envs:
        assert envs.reset()[0].shape == (2, 3)


def test_a_single_env_that_presents_a_vector_env_keeps_the_order_of_keys():
    env = SingleEnv(vecenv.SyncVectorEnv([KeysEnv]))
    assert list(env.reset()[0]) == ["z", "a"]
    env.close()


class NumberEnv(gym.Env):
    """Observes numbers of types other than those of its spaces."""

    observation_space = gym.spaces.Dict({"n": gym.spaces.Discrete(9), "x": gym.spaces.Box(0, 9, (), np.float32)})
    action_space = gym.spaces.Discrete(2)

    def __init__(self, kinds):
        self.kinds, self.steps = kinds, 0

    def _observe(self):
        n, x = self.kinds
        return {"n": n(self.steps), "x": x(self.steps)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        return self._observe(), 0.0, self.steps == 2, False, {}


@pytest.mark.parametrize("kinds", [(int, np.float32), (np.int64, np.array), (np.int32, float)], ids=str)
@pytest.mark.parametrize("make", [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv])
def test_numbers_in_final_observations_have_the_types_that_the_env_returned_as_in_gymnasium(make, kinds):
    fns, how = [lambda: NumberEnv(kinds)] * 2, {"autoreset_mode": AutoresetMode.SAME_STEP}
    finals = []
    for cls in (make, gym.vector.SyncVectorEnv):
        with closing(cls(fns, **how)) as envs:
            envs.reset(seed=0)
            envs.step([0, 0])
            finals.append(envs.step([0, 0])[-1]["final_obs"][1])
    assert finals[0] == finals[1]
    assert [type(value) for value in finals[0].values()] == [type(value) for value in finals[1].values()]
