"""Tests of vecenv/mujoco: every task is Gymnasium's, bit for bit."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import assert_same
from vecenv.mujoco import TASKS, HalfCheetah, Hopper, MujocoVectorEnv
from vecenv.testing import check_vector_env

weights = st.floats(0.01, 3, allow_nan=False)
noise = {"reset_noise_scale": st.floats(0, 0.2)}
runner = {
    **noise,
    "forward_reward_weight": weights,
    "ctrl_cost_weight": weights,
    "exclude_current_positions_from_observation": st.booleans(),
    "frame_skip": st.integers(1, 5),
}
healthy = {**runner, "healthy_reward": weights, "terminate_when_unhealthy": st.booleans()}
human = {
    **noise,
    "ctrl_cost_weight": weights,
    "exclude_current_positions_from_observation": st.booleans(),
    "include_cinert_in_observation": st.booleans(),
    "include_cvel_in_observation": st.booleans(),
    "include_qfrc_actuator_in_observation": st.booleans(),
    "include_cfrc_ext_in_observation": st.booleans(),
}
ranges = st.tuples(st.floats(-1, 0.5), st.floats(0.6, 2))

KWARGS = {
    "HalfCheetah-v5": runner,
    "Swimmer-v5": runner,
    "Hopper-v5": {**healthy, "healthy_z_range": ranges, "healthy_angle_range": ranges, "healthy_state_range": ranges},
    "Walker2d-v5": {**healthy, "healthy_z_range": ranges, "healthy_angle_range": ranges},
    "Ant-v5": {
        **healthy,
        "contact_cost_weight": weights,
        "main_body": st.sampled_from([1, 2, "torso"]),
        "healthy_z_range": ranges,
        "contact_force_range": ranges,
        "include_cfrc_ext_in_observation": st.booleans(),
    },
    "Humanoid-v5": {
        **human,
        "forward_reward_weight": weights,
        "contact_cost_weight": st.floats(1e-8, 1e-5),
        "contact_cost_range": st.tuples(st.floats(0, 1), st.floats(1, 9)),
        "healthy_reward": weights,
        "terminate_when_unhealthy": st.booleans(),
        "healthy_z_range": ranges,
    },
    "HumanoidStandup-v5": {
        **human,
        "uph_cost_weight": weights,
        "impact_cost_weight": st.floats(1e-8, 1e-5),
        "impact_cost_range": st.tuples(st.floats(0, 1), st.floats(1, 9)),
    },
    "Reacher-v5": {"reward_dist_weight": weights, "reward_control_weight": weights, "frame_skip": st.integers(1, 4)},
    "Pusher-v5": {"reward_near_weight": weights, "reward_dist_weight": weights, "reward_control_weight": weights},
    "InvertedPendulum-v5": noise,
    "InvertedDoublePendulum-v5": {**noise, "healthy_reward": weights},
}


def assert_same_as_gymnasium(env_id, num_envs, steps, mode, limit, **kwargs):
    """Asserts that resets and steps return the same, with episode ends."""
    cls = TASKS[env_id]
    fns = [lambda: gym.make(env_id, max_episode_steps=limit, **kwargs)] * num_envs
    theirs = gym.vector.SyncVectorEnv(fns, autoreset_mode=mode)
    ours = cls(num_envs, max_episode_steps=limit, autoreset_mode=mode, **kwargs)
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    assert {**ours.metadata} == {**theirs.metadata}
    assert_same(ours.reset(seed=11), theirs.reset(seed=11))
    theirs.action_space.seed(5)
    ends = 0
    for _ in range(steps):
        actions = theirs.action_space.sample()
        result = ours.step(actions)
        assert_same(result, theirs.step(actions))
        ended = result[2] | result[3]
        ends += ended.sum()
        if mode == AutoresetMode.DISABLED and ended.any():
            seeds = list(range(100, 100 + num_envs))
            again = (ours.reset(seed=seeds, options={"reset_mask": ended}), None)
            assert_same(again[0], theirs.reset(seed=seeds, options={"reset_mask": ended}))
    assert ends > 0
    assert_same(ours.reset(), theirs.reset())  # each generator goes on from where it was
    ours.close(), theirs.close()


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("env_id", TASKS)
def test_every_task_is_gymnasiums_bit_for_bit(env_id, mode):
    assert_same_as_gymnasium(
        env_id, num_envs=5, steps=130, mode=mode, limit=min(60, gym.spec(env_id).max_episode_steps)
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("env_id", TASKS)
def test_every_task_is_gymnasiums_over_1500_steps_of_64_envs(env_id):
    mode = AutoresetMode.SAME_STEP
    assert_same_as_gymnasium(env_id, num_envs=64, steps=1500, mode=mode, limit=gym.spec(env_id).max_episode_steps)


@pytest.mark.parametrize("env_id", TASKS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_task_is_gymnasiums_with_other_arguments(env_id, data):
    kwargs = data.draw(st.fixed_dictionaries({}, optional=KWARGS[env_id]))
    mode = data.draw(st.sampled_from([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]))
    assert_same_as_gymnasium(env_id, num_envs=3, steps=50, mode=mode, limit=20, **kwargs)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_rules_for_vector_envs_hold(mode):
    check_vector_env(lambda: Hopper(3, max_episode_steps=50, autoreset_mode=mode))


def test_as_many_threads_as_wanted_give_the_same():
    results = []
    for num_threads in (1, 2, 5):
        envs = HalfCheetah(7, num_threads=num_threads)
        envs.reset(seed=1)
        envs.action_space.seed(2)
        results.append([envs.step(envs.action_space.sample())[:2] for _ in range(40)])
    assert_same(results[0][-1], results[1][-1])
    assert_same(results[0][-1], results[2][-1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda envs: envs.step(np.zeros((2, 6))), ValueError, r"shape \(2, 6\), but these envs need \(3, 6\)"),
        (lambda envs: envs.step(np.full((3, 6), np.nan)), ValueError, "action for env 0 is NaN"),
        (lambda envs: envs.reset(seed=[1, 2]), ValueError, "must match num_envs=3"),
        (lambda envs: envs.render(), ValueError, "render_mode='rgb_array'"),
        (lambda envs: (envs.close(), envs.step(np.zeros((3, 6)))), gym.error.ClosedEnvironmentError, "after a call"),
    ],
)
def test_wrong_calls_say_what_is_wrong(call, error, message):
    envs = HalfCheetah(3)
    envs.reset(seed=1)
    with pytest.raises(error, match=message):
        call(envs)


def test_a_step_before_the_first_reset_is_gymnasiums_error():
    with pytest.raises(gym.error.ResetNeeded, match="before calling"):
        HalfCheetah(2).step(np.zeros((2, 6)))


def test_unknown_arguments_and_numbers_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'gravity'"):
        HalfCheetah(2, gravity=3)
    with pytest.raises(ValueError, match="num_envs=0"):
        HalfCheetah(0)
    with pytest.raises(OSError, match="does not exist"):
        HalfCheetah(2, xml_file="no_such_model.xml")


PENDULUM = """
<mujoco><option timestep="0.02"/><worldbody><body pos="0 0 1"><joint name="hinge" type="hinge" axis="0 1 0"/>
<geom type="capsule" fromto="0 0 0 0 0 -0.5" size="0.03"/></body></worldbody>
<actuator><motor joint="hinge" ctrlrange="-1 1"/></actuator></mujoco>
"""


class Pendulum(MujocoVectorEnv):
    """A robot of one's own: to swing it up is paid."""

    def initial_state(self, rng):
        return rng.uniform(-0.1, 0.1, self.model.nq), np.zeros(self.model.nv)

    def observe(self):
        angle = self.data.qpos.copy()
        return np.concatenate([np.cos(angle), np.sin(angle), self.data.qvel], axis=1)

    def outcome(self, before, actions):
        height = -np.cos(self.data.qpos[:, 0])
        return height, np.zeros(self.num_envs, np.bool_), {"height": height}


def test_a_model_of_ones_own_is_a_short_class(tmp_path):
    model = tmp_path / "pendulum.xml"
    model.write_text(PENDULUM)
    envs = Pendulum(4, xml_file=str(model), frame_skip=2, max_episode_steps=20)
    observations, _ = envs.reset(seed=0)
    assert observations.shape == (4, 3) and envs.dt == 0.04
    for step in range(20):
        _, rewards, _, truncated, infos = envs.step(np.ones((4, 1), np.float32))
        np.testing.assert_array_equal(infos["height"], rewards)
        assert truncated.all() == (step == 19)
    check_vector_env(lambda: Pendulum(3, xml_file=str(model), frame_skip=2, max_episode_steps=20))
