"""Tests of vecenv/mujoco: every task equals Gymnasium's version, bit for bit."""

import copy
import ctypes
import threading
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import vecenv
from tests.helpers import assert_same
from vecenv.mujoco import TASKS, HalfCheetah, Hopper, MujocoVectorEnv
from vecenv.mujoco.task_checks import TaskChecks
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


def assert_same_as_gymnasium(env_id, num_envs, steps, mode, limit, *, in_workers=True, **kwargs):
    """Asserts that resets and steps equal Gymnasium's, however the envs are built. At least one episode must end."""
    fns = [lambda: gym.make(env_id, max_episode_steps=limit, **kwargs)] * num_envs
    theirs = gym.vector.SyncVectorEnv(fns, autoreset_mode=mode)
    how = {"max_episode_steps": limit, "vector_kwargs": {"autoreset_mode": mode}, **kwargs}
    every = [
        TASKS[env_id](num_envs, max_episode_steps=limit, autoreset_mode=mode, **kwargs),
        vecenv.make(env_id, num_envs, **how),
    ]
    if in_workers:
        every.append(vecenv.make(env_id, num_envs, num_workers=2, **how))
    for ours in every:
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
        assert {**ours.metadata} == {**theirs.metadata}

    def assert_same_reset(**arguments):
        expected = theirs.reset(**copy.deepcopy(arguments))  # Gymnasium removes the mask from the caller's options
        for ours in every:
            assert_same(ours.reset(**arguments), expected)

    assert_same_reset(seed=11)
    theirs.action_space.seed(5)
    ends = 0
    for _ in range(steps):
        actions = theirs.action_space.sample()
        expected = theirs.step(actions)
        for ours in every:
            assert_same(ours.step(actions), expected)
        ended = expected[2] | expected[3]
        ends += ended.sum()
        if mode == AutoresetMode.DISABLED and ended.any():
            assert_same_reset(seed=list(range(100, 100 + num_envs)), options={"reset_mask": ended})
    assert ends > 0
    assert_same_reset()  # without seeds, so the generators' states must be equal
    for envs in (theirs, *every):
        envs.close()


@pytest.mark.parametrize(
    ("env_id", "mode"),
    [
        pytest.param(
            env_id, mode, marks=() if mode == AutoresetMode.NEXT_STEP or env_id == "Hopper-v5" else pytest.mark.slow
        )
        for env_id in TASKS
        for mode in AutoresetMode
    ],
)
def test_every_task_equals_gymnasiums_bit_for_bit(env_id, mode):
    limit = min(40, gym.spec(env_id).max_episode_steps)
    # The slow tests start workers for every task. They take longer to start than the steps.
    assert_same_as_gymnasium(env_id, num_envs=5, steps=90, mode=mode, limit=limit, in_workers=env_id == "Hopper-v5")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("env_id", TASKS)
def test_every_task_equals_gymnasiums_over_1500_steps_of_64_envs(env_id):
    mode, limit = AutoresetMode.SAME_STEP, gym.spec(env_id).max_episode_steps
    assert_same_as_gymnasium(env_id, num_envs=64, steps=1500, mode=mode, limit=limit)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("env_id", TASKS)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(data=st.data())
def test_every_task_equals_gymnasiums_with_other_arguments_over_1500_steps_of_16_envs(env_id, data):
    kwargs = data.draw(st.fixed_dictionaries(KWARGS[env_id]))
    limit = gym.spec(env_id).max_episode_steps
    assert_same_as_gymnasium(env_id, num_envs=16, steps=1500, mode=AutoresetMode.NEXT_STEP, limit=limit, **kwargs)


@pytest.mark.parametrize("env_id", TASKS)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_task_equals_gymnasiums_with_other_arguments(env_id, data):
    kwargs = data.draw(st.fixed_dictionaries({}, optional=KWARGS[env_id]))
    mode = data.draw(st.sampled_from([AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]))
    in_workers = env_id == "Hopper-v5"
    assert_same_as_gymnasium(env_id, num_envs=3, steps=50, mode=mode, limit=20, in_workers=in_workers, **kwargs)


def test_contact_pairs_are_listed_for_the_four_tasks_that_gain_from_them_but_not_for_subclasses():
    listed = {name for name, task in TASKS.items() if task(1).model.npair}
    assert listed == {"HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5"}
    assert not type("Mine", (HalfCheetah,), {})(1).model.npair


def test_other_threads_can_always_call_the_clock_while_envs_step():
    """MuJoCo reads the pointer to its clock more than once and calls it, so it must never be NULL, even briefly."""
    (library,) = Path(mujoco.__file__).parent.glob("libmujoco*[0-9]*")
    clock = ctypes.c_void_p.in_dll(ctypes.CDLL(str(library)), "mjcb_time")
    before, seen, stepped, done = clock.value, set(), [], threading.Event()
    envs = HalfCheetah(16)
    envs.reset(seed=0)

    def watch():
        while not done.is_set():
            seen.add(clock.value)

    def step():
        data = mujoco.MjData(envs.model)
        while not done.is_set():
            mujoco.mj_step(envs.model, data, 10)
        stepped.append(np.isfinite(data.qpos).all() and all(np.isfinite(timer.duration) for timer in data.timer))

    threads = [threading.Thread(target=watch), threading.Thread(target=step), threading.Thread(target=step)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        envs.step(np.zeros((16, 6)))
    done.set()
    for thread in threads:
        thread.join()
    assert None not in seen and seen != {before} and stepped == [True, True]
    assert clock.value == before


class Heavier(Hopper):
    """Hoppers whose torsos have 1 to N times the mass."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        masses = self.physics.expand("body_mass")
        masses[:, 1] *= 1 + np.arange(num_envs)
        self.physics.batch.set_const()


def test_envs_with_varied_parameters_equal_envs_with_separate_models():
    envs = Heavier(3)
    observations, _ = envs.reset(seed=0)
    actions = np.full((3, 3), 0.3, np.float32)
    for i in range(3):
        single = gym.make("Hopper-v5").unwrapped
        single.model.body_mass[1] *= 1 + i
        mujoco.mj_setConst(single.model, mujoco.MjData(single.model))
        np.testing.assert_array_equal(single.reset(seed=i)[0], observations[i])
        if i == 0:
            results = [envs.step(actions)[0] for _ in range(10)]
        np.testing.assert_array_equal([single.step(actions[i])[0] for _ in range(10)], [r[i] for r in results])
    assert not np.array_equal(results[-1][0], results[-1][2])


def test_a_field_that_would_have_no_effect_cannot_be_expanded():
    with pytest.raises(ValueError, match=r"geom_friction has no effect.*subclass"):
        Hopper(2).physics.expand("geom_friction")
    Heavier(2).physics.expand("geom_friction")


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_rules_for_vector_envs_hold(mode):
    check_vector_env(lambda: Hopper(3, max_episode_steps=50, autoreset_mode=mode))


@pytest.mark.parametrize(
    "mode",
    [
        AutoresetMode.SAME_STEP,
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED)),
    ],
)
@pytest.mark.parametrize("num_workers", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_the_rules_for_vector_envs_hold_for_those_that_make_returns(mode, num_workers):
    how = {"num_workers": num_workers, "vector_kwargs": {"autoreset_mode": mode}}
    check_vector_env(lambda: vecenv.make("Hopper-v5", 3, **how))


def test_the_number_of_threads_does_not_change_results():
    results = []
    for num_threads in (1, 2, 5):
        envs = HalfCheetah(7, num_threads=num_threads)
        envs.reset(seed=1)
        envs.action_space.seed(2)
        results.append(tuple(envs.step(envs.action_space.sample())[:2] for _ in range(40)))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda envs: envs.step(np.zeros((2, 6))), ValueError, r"shape \(2, 6\), but these envs need \(3, 6\)"),
        (lambda envs: envs.step(np.full((3, 6), np.nan)), ValueError, "action for env 0 of this HalfCheetah is NaN"),
        (lambda envs: envs.reset(seed=[1, 2]), ValueError, "must match num_envs=3"),
        (lambda envs: envs.render(), ValueError, "render_mode='rgb_array'"),
        (lambda envs: (envs.close(), envs.step(np.zeros((3, 6)))), gym.error.ClosedEnvironmentError, "after a call"),
    ],
)
def test_the_errors_for_wrong_calls_say_what_is_wrong(call, error, message):
    envs = HalfCheetah(3)
    envs.reset(seed=1)
    with pytest.raises(error, match=message):
        call(envs)


def test_a_step_before_the_first_reset_raises_gymnasiums_error():
    with pytest.raises(gym.error.ResetNeeded, match="before calling"):
        HalfCheetah(2).step(np.zeros((2, 6)))


def test_unknown_arguments_and_invalid_numbers_are_rejected():
    with pytest.raises(TypeError, match="unexpected keyword argument 'gravity'"):
        HalfCheetah(2, gravity=3)
    with pytest.raises(ValueError, match="num_envs=0"):
        HalfCheetah(0)
    with pytest.raises(OSError, match="Gymnasium has no model"):
        HalfCheetah(2, xml_file="no_such_model.xml")


PENDULUM = """
<mujoco><option timestep="0.02"/><worldbody><body pos="0 0 1"><joint name="hinge" type="hinge" axis="0 1 0"/>
<geom type="capsule" fromto="0 0 0 0 0 -0.5" size="0.03"/></body></worldbody>
<actuator><motor joint="hinge" ctrlrange="-1 1"/></actuator></mujoco>
"""


class Pendulum(MujocoVectorEnv):
    """A custom robot with a reward for swinging up."""

    def begin(self, ids, rngs):
        self.data.qpos[ids] = rngs.uniform(-0.1, 0.1, self.model.nq)

    def observe(self):
        angle = self.data.qpos.copy()
        return np.concatenate([np.cos(angle), np.sin(angle), self.data.qvel], axis=1)

    def outcome(self, before, actions):
        height = -np.cos(self.data.qpos[:, 0])
        return height, np.zeros(self.num_envs, np.bool_), {"height": height}


def test_a_custom_task_needs_only_a_short_class(tmp_path):
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


def test_without_infos_only_final_observations_are_returned_and_nothing_else_changes():
    both = [Hopper(4, autoreset_mode=AutoresetMode.SAME_STEP, max_episode_steps=3) for _ in range(2)]
    silent = both[1]
    silent.drop_infos()
    assert_same(both[0].reset(seed=0)[0], silent.reset(seed=0)[0])
    assert silent.reset(seed=0)[1] == {}
    both[0].reset(seed=0)
    for _ in range(4):
        *expected, infos = both[0].step(np.zeros((4, 3), np.float32))
        *got, few = silent.step(np.zeros((4, 3), np.float32))
        assert_same(tuple(expected), tuple(got))
        for name in ("final_obs", "_final_obs"):
            assert (name in few) == (name in infos)
        assert not set(few) - {"final_obs", "_final_obs", "final_info", "_final_info"} and not few.get("final_info")
        if "final_obs" in infos:
            assert_same(np.stack(infos["final_obs"].tolist()), np.stack(few["final_obs"].tolist()))


def test_an_engine_without_infos_does_not_compute_them(monkeypatch):
    def refuse(self, *_):
        raise AssertionError("infos were computed")

    with vecenv.AsyncVectorEnv(vecenv.Batched(Heavier, 2), num_workers=0, infos=False) as envs:
        envs.reset(seed=0)
        monkeypatch.setattr(TaskChecks, "infos", refuse)
        envs.step(np.zeros((2, 3), np.float32))
    with (
        vecenv.AsyncVectorEnv(vecenv.Batched(Heavier, 2), num_workers=0) as envs,
        pytest.raises(AssertionError, match="were computed"),
    ):
        envs.reset(seed=0)
        envs.step(np.zeros((2, 3), np.float32))


class PaidByInfos(Hopper):
    def step(self, actions):
        observations, _, terminated, truncated, infos = super().step(actions)
        return observations, infos["x_position"], terminated, truncated, infos


class Wrapped(gym.vector.VectorWrapper):
    def step(self, actions):
        observations, _, terminated, truncated, infos = self.env.step(actions)
        return observations, infos["x_position"], terminated, truncated, infos


@pytest.mark.parametrize("make", [PaidByInfos, lambda **how: Wrapped(Hopper(**how))])
def test_a_subclass_or_wrapper_that_reads_infos_receives_them(make):
    with vecenv.AsyncVectorEnv(vecenv.Batched(make, 2), num_workers=0, infos=False) as envs:
        envs.reset(seed=0)
        assert envs.step(np.ones((2, 3), np.float32))[1].all()


class Reusing(Hopper):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls, self.everyone = np.zeros(self.num_envs), np.ones(self.num_envs, np.bool_)

    def step(self, actions, *, out=None):
        *results, infos = super().step(actions, out=out)
        self.calls += 1
        return *results, {**infos, "calls": self.calls, "_calls": self.everyone}


@pytest.mark.parametrize("task", [Hopper, Reusing])
def test_infos_stay_as_they_are_even_if_a_subclass_reuses_its_arrays(task):
    with vecenv.AsyncVectorEnv(vecenv.Batched(task, 2), num_workers=0) as envs:
        envs.reset(seed=0)
        steps = [envs.step(np.ones((2, 3), np.float32))[4] for _ in range(4)]
        assert all(infos["_x_position"].all() for infos in steps)
        assert len({float(infos["x_position"][0]) for infos in steps}) == 4
        if task is Reusing:
            assert [infos["calls"].tolist() for infos in steps] == [[1, 1], [2, 2], [3, 3], [4, 4]]


@pytest.mark.parametrize("env_id", TASKS)
def test_what_a_task_of_gymnasium_returns_is_new_writable_and_of_the_right_type(env_id):
    envs = TASKS[env_id](3)
    envs.reset(seed=0)
    actions = np.full((3, *envs.single_action_space.shape), 0.1, np.float32)
    envs.step(actions)
    rewards, terminated, infos = envs.outcome(envs.before_step(), actions)
    assert (rewards.dtype, terminated.dtype) == (np.float64, np.bool_)
    kept = [envs.physics.batch.state, envs.cfrc_ext, actions, *envs.physics.batch.derived.values()]
    for array in (rewards, terminated, *infos.values(), *envs.reset_infos().values()):
        assert len(array) == 3 and array.flags.writeable
        assert not any(np.shares_memory(array, other) for other in kept)
        kept.append(array)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_observations_written_into_out_equal_the_returned_observations(mode, dtype):
    both = [Hopper(4, autoreset_mode=mode, max_episode_steps=3) for _ in range(2)]
    out = np.empty((4, 11), dtype)
    expected, given = both[0].reset(seed=0)[0], both[1].reset(seed=0, out=out)[0]
    assert given is out
    assert_same(given, expected.astype(dtype))
    for _ in range(3 if mode == AutoresetMode.DISABLED else 8):
        *expected, infos = both[0].step(np.full((4, 3), 0.3, np.float32))
        *results, filled = both[1].step(np.full((4, 3), 0.3, np.float32), out=out)
        assert results[0] is out
        assert_same(tuple(results), (expected[0].astype(dtype), *expected[1:]))
        assert filled.keys() == infos.keys()
        for final, wanted in zip(filled.get("final_obs", ()), infos.get("final_obs", ()), strict=True):
            assert_same(final, wanted.astype(dtype))
        out[:] = np.nan  # `out` belongs to the caller again, so later results must not depend on it
