"""Tests of vecenv/adapters/dm_env.py: time steps and specs."""

import numpy as np
import pytest
from gymnasium import spaces

import vecenv
from tests.helpers import SampledEnv, counting_fns

dm_env = pytest.importorskip("dm_env")

from dm_env import specs  # noqa: E402

from vecenv.adapters.dm_env import BatchedEnvironment  # noqa: E402

FIRST, MID, LAST = dm_env.StepType.FIRST, dm_env.StepType.MID, dm_env.StepType.LAST


@pytest.mark.parametrize("cls", [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv])
def test_step_types_are_first_mid_last_and_only_termination_has_discount_zero(cls):
    """Env 0 terminates after 3 steps, env 1 is truncated after 4."""
    with BatchedEnvironment(cls(counting_fns(2))) as env:
        assert env.batched and env.batch_size == 2
        seen = [env.reset()] + [env.step([0, 1]) for _ in range(8)]
        types = np.stack([step.step_type for step in seen], axis=1)
        assert types.dtype == np.int32
        np.testing.assert_array_equal(
            types,
            [[FIRST, MID, MID, LAST, FIRST, MID, MID, LAST, FIRST], [FIRST, MID, MID, MID, LAST, FIRST, MID, MID, MID]],
        )
        discounts = np.stack([step.discount for step in seen], axis=1)
        np.testing.assert_array_equal(discounts, [[1, 1, 1, 0, 1, 1, 1, 0, 1], [1] * 9])
        rewards = np.stack([step.reward for step in seen], axis=1)
        np.testing.assert_array_equal(rewards, [[0, 1, 2, 3, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 1, 2, 3]])
        observations = np.stack([step.observation for step in seen], axis=1)
        np.testing.assert_array_equal(observations[0, :, 2], [0, 1, 2, 3, 0, 1, 2, 3, 0])
        np.testing.assert_array_equal(observations[0, :, 1], [0, 0, 0, 0, 1, 1, 1, 1, 2])
        assert env.current_time_step() is seen[-1]


def test_a_step_before_the_first_reset_resets():
    env = BatchedEnvironment(vecenv.SyncVectorEnv(counting_fns(2)))
    np.testing.assert_array_equal(env.step([0, 0]).step_type, [FIRST, FIRST])
    again = env.reset()
    np.testing.assert_array_equal(again.observation[:, 1], [1, 1])
    np.testing.assert_array_equal(env.step([0, 0]).step_type, [MID, MID])


def test_the_seed_applies_to_the_first_reset_only():
    fns = [lambda: SampledEnv(spaces.Box(0, 1, (3,)), spaces.Discrete(2))] * 2
    one, other = (BatchedEnvironment(vecenv.SyncVectorEnv(fns), seed=5) for _ in range(2))
    np.testing.assert_array_equal(one.reset().observation, other.reset().observation)
    assert (one.reset().observation != BatchedEnvironment(vecenv.SyncVectorEnv(fns), seed=5).reset().observation).any()


def test_specs_describe_one_env_and_are_nested_like_its_space():
    space = spaces.Dict(
        {
            "box": spaces.Box(-1, 2, (2,), np.float32),
            "two": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3, start=2), spaces.MultiBinary(2)]),
            "several": spaces.MultiDiscrete([2, 5]),
        }
    )
    env = BatchedEnvironment(vecenv.SyncVectorEnv([lambda: SampledEnv(space, spaces.Box(-1, 1, (1,)))] * 2))
    observed = env.observation_spec()
    assert observed["two"][0] == specs.DiscreteArray(3, np.int64)
    assert (observed["two"][1].minimum, observed["two"][1].maximum) == (2, 4)
    np.testing.assert_array_equal(observed["several"].maximum, [1, 4])
    assert env.action_spec().shape == (1,) and env.reward_spec().shape == ()
    step = env.reset()
    for i in range(2):
        observed["box"].validate(step.observation["box"][i])
        observed["two"][1].validate(step.observation["two"][1][i])
    env.discount_spec().validate(step.discount[0])


def test_the_bounds_of_an_observation_hold_in_all_envs():
    fns = [lambda b=bound: SampledEnv(spaces.Dict(x=spaces.Box(-b, 1, (2,))), spaces.Discrete(2)) for bound in (1, 5)]
    env = BatchedEnvironment(vecenv.SyncVectorEnv(fns, observation_mode="different"))
    assert env.observation_spec()["x"].minimum.tolist() == [-5, -5]


def test_the_spec_of_a_scalar_observation_has_no_dimensions():
    env = BatchedEnvironment(vecenv.SyncVectorEnv([lambda: SampledEnv(spaces.Box(-1, 1, ()), spaces.Discrete(2))] * 2))
    assert env.observation_spec().shape == () and env.reset().observation.shape == (2,)


def test_another_autoreset_mode_is_rejected():
    with pytest.raises(ValueError, match="autoreset_mode='NextStep'"):
        BatchedEnvironment(vecenv.SyncVectorEnv(counting_fns(2), autoreset_mode="SameStep"))


def test_a_space_without_a_spec_is_rejected():
    fns = [lambda: SampledEnv(spaces.Graph(spaces.Box(0, 1, (2,)), None), spaces.Discrete(2))]
    with pytest.raises(vecenv.UnsupportedSpace, match="Graph has no spec"):
        BatchedEnvironment(vecenv.SyncVectorEnv(fns))
