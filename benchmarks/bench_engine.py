"""How many env-steps per second does a vector env take without learning?

Unit: env-steps per second of all envs together, as the median of the rounds of each turn. The rivals take three turns,
so that a change in the machine's speed affects all of them, each in a process of its own.
Not measured: creation and the policy.

Every vector env is first checked to return the same observations as Gymnasium's SyncVectorEnv.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import vecenv
from benchmarks.conftest import need
from benchmarks.processes import Iteration, in_a_process

INSTALL_SB3 = "pip install torch==2.13.0 stable-baselines3"
INSTALL_TIANSHOU = "pip install torch==2.13.0 tianshou"
INSTALL_PUFFERLIB = (
    "PufferLib 3.0 requires gymnasium<=0.29.1: add its unpacked source distribution to PYTHONPATH, and run "
    "pip install gym==0.23 psutil"
)


class FreeEnv(gym.Env):
    """Does nothing: every step returns the same arrays."""

    action_space = gym.spaces.Box(-1, 1, (6,), np.float32)

    def __init__(self, shape: tuple[int, ...], dtype: type):
        self.observation_space = gym.spaces.Box(0, 1 if dtype is np.float32 else 255, shape, dtype)
        self._observation = np.ones(shape, dtype)

    def reset(self, *, seed=None, options=None):
        return self._observation, {}

    def step(self, action):
        return self._observation, 0.0, False, False, {}


ENVS = {
    "free float32[17]": functools.partial(FreeEnv, (17,), np.float32),
    "free uint8[84,84,4]": functools.partial(FreeEnv, (84, 84, 4), np.uint8),
    "CartPole-v1": functools.partial(gym.make, "CartPole-v1"),
    "HalfCheetah-v5": functools.partial(gym.make, "HalfCheetah-v5"),
}
CASES = [
    *((env, num_envs) for env in ("free float32[17]", "free uint8[84,84,4]") for num_envs in (2, 16, 64)),
    *((env, num_envs) for env in ("CartPole-v1", "HalfCheetah-v5") for num_envs in (2, 4, 8, 16, 64)),
]
"""Also numbers of envs with which Gymnasium's AsyncVectorEnv, which has one process per env, is at its fastest."""

RIVALS = {
    "vecenv Async": lambda fns: vecenv.AsyncVectorEnv(fns),
    "vecenv Async copy=False": lambda fns: vecenv.AsyncVectorEnv(fns, copy=False),
    "vecenv Sync": lambda fns: vecenv.SyncVectorEnv(fns),
    "gymnasium Async": lambda fns: gym.vector.AsyncVectorEnv(fns),
    "gymnasium Sync": lambda fns: gym.vector.SyncVectorEnv(fns),
    "SB3 Subproc": lambda fns: _sb3(fns),
    "tianshou Shmem": lambda fns: _Tianshou(fns),
    "PufferLib Serial": lambda fns: _puffer(fns, "Serial"),
    "PufferLib, 1 worker": lambda fns: _puffer(fns, "Multiprocessing", num_workers=1),
}


def _sb3(fns: list) -> Any:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return SubprocVecEnv(fns, start_method="fork")  # the fastest to create; the workers run the same loop


class _Tianshou:
    """tianshou's ShmemVectorEnv, whose caller must reset envs whose episode has ended."""

    def __init__(self, fns: list):
        from tianshou.env import ShmemVectorEnv

        self._envs = ShmemVectorEnv(fns)
        self.reset, self.close = self._envs.reset, self._envs.close

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        observations, rewards, terminated, truncated, infos = self._envs.step(actions)
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            observations[ended], _ = self._envs.reset(ended)
        return observations, rewards, terminated, truncated, infos


def _puffer(fns: list, backend: str, **backend_kwargs: int) -> Any:
    """Returns PufferLib's vector env with this backend.

    The processes of `Multiprocessing` spin while they wait. On two cores, two workers are slower than one, and one is
    slower than `Serial`.
    """
    import pufferlib.vector

    return pufferlib.vector.make(
        [functools.partial(_puffer_env, fn) for fn in fns],
        env_args=[[]] * len(fns),
        env_kwargs=[{}] * len(fns),
        backend=getattr(pufferlib.vector, backend),
        num_envs=len(fns),
        **backend_kwargs,
    )


def _puffer_env(fn: Callable[[], gym.Env], buf: dict | None = None, seed: int = 0) -> Any:
    """Makes an env that writes into PufferLib's memory. PufferLib passes the last two arguments."""
    from pufferlib.emulation import GymnasiumPufferEnv

    return GymnasiumPufferEnv(env_creator=fn, buf=buf)


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize(("env", "num_envs"), CASES)
def test_engine(measure, benchmark, env, num_envs, turn, rival):
    if rival == "SB3 Subproc":
        need("stable_baselines3", INSTALL_SB3)
    if rival == "tianshou Shmem":
        need("tianshou", INSTALL_TIANSHOU)
    if rival.startswith("PufferLib"):
        need("pufferlib", INSTALL_PUFFERLIB)
    benchmark.group = f"{env}, {num_envs} envs"
    steps = 20 if "Async" in rival and "vecenv" not in rival else 200 if env.startswith("free") else 50
    iterate, close = in_a_process(stepping, rival=rival, env=env, num_envs=num_envs, steps=steps)
    try:
        measure(
            iterate,
            rounds=15,
            iterations=1,
            env_steps=num_envs * steps,
            env=env,
            num_envs=num_envs,
            rival=rival,
            turn=turn,
        )
    finally:
        close()


def stepping(rival: str, env: str, num_envs: int, steps: int) -> Iteration:
    """Returns functions that take `steps` steps of a vector env, which has been checked, and that close it."""
    envs = RIVALS[rival]([ENVS[env]] * num_envs)
    reference = gym.vector.SyncVectorEnv([ENVS[env]] * num_envs)
    reference.action_space.seed(0)
    batches = itertools.cycle([reference.action_space.sample() for _ in range(16)])
    _check(envs, reference, batches, rival)

    def iterate() -> None:
        for batch in itertools.islice(batches, steps):
            envs.step(batch)

    return iterate, envs.close


def _check(envs: Any, reference: gym.vector.VectorEnv, batches: Iterator, rival: str) -> None:
    """Asserts that the first observations equal those of the reference."""
    # tianshou seeds all envs with the same number.
    expected, _ = reference.reset(seed=[1] * reference.num_envs if rival == "tianshou Shmem" else 1)
    if rival == "SB3 Subproc":
        envs.seed(1)
        observations = envs.reset()
    else:
        observations, _ = envs.reset(seed=1)
    np.testing.assert_array_equal(observations, expected)
    for batch in itertools.islice(batches, 3):
        np.testing.assert_array_equal(envs.step(batch)[0], reference.step(batch)[0])
    reference.close()
