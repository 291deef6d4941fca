"""Tests of vecenv/native.py and of make's choice of it."""

import logging
import multiprocessing
import subprocess
import sys

import gymnasium as gym
import mujoco
import numpy as np
import pytest

import vecenv
from tests.helpers import assert_same
from vecenv import native
from vecenv.mujoco import Hopper, MujocoVectorEnv


@pytest.fixture(autouse=True)
def said(caplog, monkeypatch):
    """Returns what is said, to which nothing was said before."""
    monkeypatch.setattr(sys.modules["vecenv.make"], "_told", set())
    caplog.set_level(logging.INFO, logger="vecenv")
    return lambda: [record.getMessage() for record in caplog.records]


def hosts(envs):
    """Returns whether the envs are stepped by one vector env in this process."""
    return isinstance(envs._pool._rows[0].envs[0], MujocoVectorEnv)


def test_mujoco_tasks_are_native_and_it_is_said_once(said):
    for _ in range(2):
        with vecenv.make("Hopper-v5", 3) as envs:
            assert envs.num_workers == 0 and hosts(envs) and envs.spec.id == "Hopper-v5"
    assert said() == ["Hopper-v5 is stepped in C++ by vecenv.mujoco; backend='python' gives ordinary envs"]


def test_nothing_is_said_where_nothing_is_to_be_expected(said):
    with vecenv.make("CartPole-v1", 3) as envs:
        assert envs.num_workers > 0
    assert said() == []


def test_workers_are_used_if_they_are_asked_for():
    for arguments in ({"num_workers": 2}, {"vector_kwargs": {"on_worker_death": "restart"}}):
        with vecenv.make("Hopper-v5", 4, **arguments) as envs:
            assert envs.num_workers > 0 and envs.get_attr("frame_skip") == (4,) * 4


def test_ordinary_envs_are_to_be_had():
    with vecenv.make("Hopper-v5", 2, backend="python") as envs:
        assert envs.num_workers > 0
        assert envs.apply(lambda env: type(env.unwrapped).__name__) == ["HopperEnv"] * 2


@pytest.mark.parametrize("num_workers", [None, 1])
def test_unknown_arguments_get_gymnasiums_error(num_workers, said):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'gravity' was raised from the environment"):
        vecenv.make("Hopper-v5", 2, num_workers=num_workers, gravity=3)
    assert said()[0].endswith("as ordinary envs: TypeError: got an unexpected keyword argument 'gravity'")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"wrappers": [gym.wrappers.TimeAwareObservation]}, "wrappers need single envs"),
        ({"render_mode": "rgb_array_list"}, "render_mode='rgb_array_list' needs single envs"),
    ],
)
def test_what_needs_single_envs_gets_them_and_the_reason_is_said(arguments, reason, said):
    with vecenv.make("HalfCheetah-v5", 2, **arguments) as envs:
        assert envs.num_workers > 0
    assert said() == [f"HalfCheetah-v5 is not stepped in C++ by vecenv.mujoco, but as ordinary envs: {reason}"]


def test_an_old_mujoco_is_a_reason_too(said, monkeypatch):
    monkeypatch.setitem(sys.modules, "vecenv.mujoco", None)  # as when it cannot be imported
    with vecenv.make("Hopper-v5", 2) as envs:
        assert envs.num_workers > 0
    assert "is not stepped in C++ by vecenv.mujoco, but as ordinary envs: " in said()[0]


def test_an_old_mujoco_says_what_to_install():
    code = "import sys; sys.modules['mujoco.batch'] = None; import vecenv.mujoco"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "needs mujoco 4.0 or newer, but this is" in result.stderr and "pip install -U mujoco" in result.stderr


def test_a_task_that_cannot_be_built_so_is_built_as_ordinary_envs_with_the_reason(said, monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("Batch does not take this model")

    monkeypatch.setattr("vecenv.mujoco.physics.Batch", refuse)
    with vecenv.make("Hopper-v5", 2) as envs:
        assert envs.num_workers > 0
    assert said()[0].endswith("but as ordinary envs: ValueError: Batch does not take this model")


def test_a_callback_in_python_is_a_reason_too(said):
    mujoco.set_mjcb_control(lambda model, data: None)
    try:
        with vecenv.make("Hopper-v5", 2) as envs:
            assert envs.num_workers > 0
            envs.reset(seed=0)
            envs.step(np.zeros((2, 3), np.float32))
        with pytest.raises(ValueError, match=r"mjcb_control is a Python function.*batch cannot call.*ordinary envs"):
            Hopper(2)
    finally:
        mujoco.set_mjcb_control(None)
    assert "but as ordinary envs: ValueError: mjcb_control is a Python function" in said()[0]


def test_registered_arguments_and_time_limits_hold():
    gym.register(
        id="MyHopper-v0",
        entry_point="gymnasium.envs.mujoco.hopper_v5:HopperEnv",
        max_episode_steps=7,
        kwargs={"healthy_reward": 3.0, "terminate_when_unhealthy": False},
    )
    try:
        for arguments in ({}, {"max_episode_steps": 5}, {"healthy_reward": 2.0}, {"max_episode_steps": -1}):
            with vecenv.make("MyHopper-v0", 2, **arguments) as ours:
                theirs = gym.vector.SyncVectorEnv([lambda a=arguments: gym.make("MyHopper-v0", **a)] * 2)
                assert hosts(ours)
                assert_same(ours.reset(seed=0), theirs.reset(seed=0))
                for _ in range(9):
                    actions = np.full((2, 3), 0.5, np.float32)
                    assert_same(ours.step(actions), theirs.step(actions))
    finally:
        del gym.registry["MyHopper-v0"]


def test_other_entry_points_are_none_of_its_business():
    spec = gym.spec("Hopper-v5")
    assert native.why_not(spec, {}, ()) is None
    assert native.why_not(gym.spec("Hopper-v4"), {}, ()) == ""
    spec = gym.envs.registration.EnvSpec("Mine-v5", entry_point=lambda: None)
    assert native.why_not(spec, {}, ()) == ""


def test_a_batch_of_the_graph_loop_is_that_of_ordinary_envs():
    import tensorflow as tf

    from vecenv.ingraph import InGraphVectorEnv, slots_for

    found = []
    for backend in ("auto", "python"):
        how = {"autoreset_mode": "SameStep", "num_slots": slots_for(60), "float32_observations": True}
        with vecenv.make("Hopper-v5", 4, backend=backend, vector_kwargs=how) as envs:
            graph = InGraphVectorEnv(envs, num_steps=60)

            @tf.function
            def collect(graph=graph):
                graph.reset(seed=1)
                for t in tf.range(60):
                    graph.step(tf.fill([4, 3], tf.cast(t, tf.float32) / 60))
                return graph.shaped(graph.rollout())

            rollout = collect()
            ended = (rollout.terminated | rollout.truncated).numpy()
            assert ended.any()
            finals = rollout.final_observations.numpy()[ended]
            found.append((rollout.observations.numpy(), rollout.rewards.numpy(), ended, finals))
    assert_same(found[0], found[1])


WARM_UP = """
import vecenv
from vecenv.workers import launch
vecenv.warm_up({arguments})
print(started := launch._server._process and launch._server._process.pid)
if started:
    with vecenv.make({arguments}) as envs:
        envs.reset(seed=0)
    assert launch._server._process.pid == started
"""


@pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="there is no fork server")
@pytest.mark.parametrize(
    ("arguments", "starts"),
    [
        ("'CartPole-v1'", True),
        ("'CartPole-v1', num_workers=0", False),
        ("'HalfCheetah-v5'", False),
        ("'HalfCheetah-v5', num_workers=1", True),
        ("'HalfCheetah-v5', backend='python'", True),
    ],
)
def test_warming_up_starts_the_fork_server_where_there_will_be_workers(arguments, starts):
    code = WARM_UP.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr and (done.stdout != "None\n") == starts, done
