"""Tests of vecenv/registration.py: "vecenv/ID" for gymnasium.make_vec."""

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import CountingEnv, assert_same


def test_make_vec_gives_the_parallel_env_and_passes_arguments_on():
    envs = gym.make_vec("vecenv/Pendulum-v1", num_envs=3, num_workers=2, autoreset_mode="SameStep", g=9.0)
    theirs = gym.make_vec("Pendulum-v1", num_envs=3, vectorization_mode="sync", g=9.0)
    try:
        assert isinstance(envs, vecenv.AsyncVectorEnv) and envs.num_workers == 2
        assert envs.autoreset_mode == AutoresetMode.SAME_STEP
        assert envs.spec.id == "vecenv/Pendulum-v1" and repr(envs) == "AsyncVectorEnv(vecenv/Pendulum-v1, num_envs=3)"
        assert_same(envs.reset(seed=3), theirs.reset(seed=3))
        actions = np.full((3, 1), 0.5, np.float32)
        assert_same(envs.step(actions), theirs.step(actions))
    finally:
        envs.close()


def test_max_episode_steps_reaches_the_env():
    envs = gym.make_vec("vecenv/Pendulum-v1", num_envs=2, max_episode_steps=3)
    envs.reset(seed=1)
    ends = [envs.step(np.zeros((2, 1), np.float32))[3].all() for _ in range(3)]
    envs.close()
    assert ends == [False, False, True]


def test_every_id_has_its_twin_in_a_new_process():
    code = (
        "import gymnasium as gym, vecenv\n"
        "ids = [spec.id for spec in gym.registry.values() if spec.namespace != 'vecenv' and spec.entry_point]\n"
        "missing = [i for i in ids if 'vecenv/' + i.replace('/', '.') not in gym.registry]\n"
        "assert len(ids) > 40 and not missing, missing\n"
        "envs = gym.make_vec('vecenv/CartPole-v1', num_envs=8)\n"
        "assert envs.reset(seed=0)[0].shape == (8, 4)\n"
        "envs.close()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_ids_that_are_registered_later_get_theirs_when_asked():
    gym.register("ours/Late-v0", entry_point=lambda **kwargs: CountingEnv(0))
    try:
        vecenv.register_envs()
        vecenv.register_envs()
        envs = gym.make_vec("vecenv/ours.Late-v0", num_envs=2)
        assert envs.reset()[0].shape == (2, 3)
        envs.close()
    finally:
        del gym.registry["ours/Late-v0"], gym.registry["vecenv/ours.Late-v0"]


def test_a_wrong_id_is_gymnasiums_error():
    with pytest.raises(gym.error.NameNotFound, match="CartPole"):
        gym.make_vec("vecenv/CartPolle-v1", num_envs=2)
