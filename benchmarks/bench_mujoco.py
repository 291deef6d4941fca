"""How fast do vecenv.mujoco, EnvPool and Gymnasium step MuJoCo tasks, compared with the physics alone?

Unit: env-steps per second of all envs together, as the median of the rounds of each turn. The rivals take three turns,
each in a process of its own.
All rivals take the same random float32 actions, return observations in their own dtype, and have infos enabled. Each
rival uses one thread or worker process per core, except Gymnasium, which uses one process per env.
Not measured: creation and the policy.

"physics alone" only calls `mujoco.batch.Batch.step` with the states and actions of a recorded vecenv run and the same
number of threads. It starts from Gymnasium's model and then skips, one after the other, the computations that vecenv
skips because they change no result (see `vecenv.mujoco.physics`). These rivals measure internals of vecenv.mujoco, so
they use names that are not public. "EnvPool async" calls send and recv with batches of half the envs while the other
half is stepped. "twice the envs" doubles the number of envs, so that a batch has N envs. EnvPool resets envs
differently and has its own copy of MuJoCo.

Each vecenv rival is first checked to return the same values as Gymnasium's SyncVectorEnv, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import vecenv
from benchmarks.conftest import need
from benchmarks.processes import Iteration, in_a_process
from vecenv import available_cores

TASKS = {"HalfCheetah-v5": 60_000, "Hopper-v5": 30_000, "Walker2d-v5": 20_000, "Ant-v5": 10_000, "Humanoid-v5": 8_000}
"""Tasks with their approximate env-steps per second, which set the number of steps in a round of 0.2 s."""

CHECKED_STEPS = 40
Round = Callable[[], None]


def random_actions(env_id: str, num_envs: int, num_steps: int) -> np.ndarray:
    """Returns float32[T, N, A]."""
    space = gym.make(env_id).action_space
    size = (num_steps, num_envs, *space.shape)
    return np.random.default_rng(0).uniform(space.low, space.high, size).astype(np.float32)


def vecenv_here(env_id: str, num_envs: int, actions: np.ndarray) -> Iterator[Round]:
    """Yields a function that steps the envs of `vecenv.make` with its default arguments."""
    with vecenv.make(env_id, num_envs) as envs:
        yield from _lockstep(envs, env_id, actions)


def vecenv_workers(env_id: str, num_envs: int, actions: np.ndarray) -> Iterator[Round]:
    """Yields a function that steps the same envs in worker processes."""
    with vecenv.make(env_id, num_envs, num_workers=available_cores()) as envs:
        yield from _lockstep(envs, env_id, actions)


def gymnasium_async(env_id: str, num_envs: int, actions: np.ndarray) -> Iterator[Round]:
    """Yields a function that steps Gymnasium's AsyncVectorEnv, with one process per env."""
    envs = gym.vector.AsyncVectorEnv([lambda: gym.make(env_id)] * num_envs)
    yield from _lockstep(envs, env_id, actions)
    envs.close()


def _lockstep(envs: Any, env_id: str, actions: np.ndarray) -> Iterator[Round]:
    _check(envs, env_id, actions)

    def steps() -> None:
        for batch in actions:
            envs.step(batch)

    yield steps


def _check(envs: Any, env_id: str, actions: np.ndarray, step: Callable[[np.ndarray], tuple] | None = None) -> None:
    """Asserts that the first steps equal those of Gymnasium's SyncVectorEnv."""
    reference = gym.vector.SyncVectorEnv([lambda: gym.make(env_id)] * envs.num_envs)
    np.testing.assert_array_equal(envs.reset(seed=0)[0], reference.reset(seed=0)[0])
    for batch in actions[:CHECKED_STEPS]:
        for ours, theirs in zip((step or envs.step)(batch)[:4], reference.step(batch)[:4], strict=True):
            np.testing.assert_array_equal(ours, theirs)
    reference.close()


def vecenv_partial(env_id: str, num_envs: int, actions: np.ndarray) -> Iterator[Round]:
    """Yields a function that receives half of vecenv's envs at a time; on two cores, the envs of one worker."""
    with vecenv.make(env_id, num_envs, num_workers=available_cores()) as envs:
        _check(envs, env_id, actions, lambda batch: (envs.send(batch), _in_order(envs.recv()))[1])
        envs.reset(seed=0)
        envs.send(actions[0])
        surplus = 0  # steps that the last round took beyond its target

        def steps() -> None:
            nonlocal surplus
            done, t = surplus, 0
            while done < actions.shape[0] * num_envs:
                ids = envs.recv(num_envs // 2).env_ids
                envs.send(actions[t][ids], ids)
                done, t = done + len(ids), (t + 1) % len(actions)
            surplus = done - actions.shape[0] * num_envs

        yield steps
        envs.recv()


def _in_order(batch: vecenv.PartialBatch) -> tuple[np.ndarray, ...]:
    order = np.argsort(batch.env_ids)
    return tuple(values[order] for values in batch[:4])


def envpool_sync(env_id: str, num_envs: int, actions: np.ndarray) -> Iterator[Round]:
    """Yields a function that steps all EnvPool envs in one call."""
    envs = _envpool(env_id, num_envs=num_envs)
    envs.reset()

    def steps() -> None:
        for batch in actions:
            envs.step(batch)

    yield steps
    envs.close()


def envpool_async(env_id: str, num_envs: int, actions: np.ndarray, times: int = 1) -> Iterator[Round]:
    """Yields a function that sends to and receives from one half of `times * num_envs` EnvPool envs at a time."""
    batch_size = num_envs * times // 2
    envs = _envpool(env_id, num_envs=num_envs * times, batch_size=batch_size)
    envs.async_reset()
    calls = len(actions) * num_envs // batch_size

    def steps() -> None:
        for t in range(calls):
            ids = envs.recv()[4]["env_id"]
            envs.send(actions[t % len(actions), :batch_size], ids)

    yield steps
    envs.close()


def _envpool(env_id: str, **sizes: int) -> Any:
    import envpool

    return envpool.make(env_id, env_type="gymnasium", num_threads=available_cores(), seed=1, **sizes)


SKIPPED = ("clock", "islands", "search for contacts")
"""Computations that vecenv skips."""


def physics(env_id: str, num_envs: int, actions: np.ndarray, num_skipped: int) -> Iterator[Round]:
    """Yields a function that repeats the physics of a vecenv run, without the first `num_skipped` of SKIPPED."""
    import mujoco
    from gymnasium.envs.mujoco.mujoco_env import expand_model_path
    from mujoco.batch import Batch

    from vecenv.mujoco import TASKS as CLASSES
    from vecenv.mujoco.physics import untimed, without_islands

    envs = CLASSES[env_id](num_envs, num_threads=available_cores())
    recorded = list(_record(envs, actions))
    model = envs.model
    if num_skipped < len(SKIPPED):
        model = mujoco.MjModel.from_xml_path(expand_model_path(gym.make(env_id).unwrapped.fullpath))
    if num_skipped == 2:
        without_islands(model)
    batch = Batch(model, num_envs, nthread=available_cores(), persistent=envs.physics.batch.persistent)
    for field in envs.fields:
        batch.bind(field)

    def steps() -> None:
        with untimed() if num_skipped else contextlib.nullcontext():
            for state, ids in recorded:
                batch.state[...] = state
                batch.step(ids, nstep=envs.frame_skip)

    yield steps


def _record(envs: Any, actions: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields each step's initial states, and the ids of the simulations that vecenv steps.

    The first `len(actions)` steps are a warm-up and are not yielded.
    """
    envs.reset(seed=0)
    ended = np.zeros(envs.num_envs, bool)
    for t, batch in enumerate(np.concatenate([actions, actions])):
        if t >= len(actions):
            envs.data.ctrl[...] = batch
            yield envs.physics.batch.state.copy(), np.flatnonzero(~ended) if ended.any() else None
        _, _, terminated, truncated, _ = envs.step(batch)
        ended = terminated | truncated


RIVALS: dict[str, Callable[..., Iterator[Round]]] = {
    "vecenv.make": vecenv_here,
    "vecenv.make, workers": vecenv_workers,
    "vecenv send/recv, workers": vecenv_partial,
    "EnvPool": envpool_sync,
    "EnvPool async": envpool_async,
    "EnvPool async, twice the envs": functools.partial(envpool_async, times=2),
    "gymnasium Async": gymnasium_async,
    "physics alone": functools.partial(physics, num_skipped=0),
    "physics alone, no clock": functools.partial(physics, num_skipped=1),
    "physics alone, no clock, no islands": functools.partial(physics, num_skipped=2),
    "physics alone, as vecenv steps it": functools.partial(physics, num_skipped=3),
}


@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("num_envs", [8, 64, 512])
@pytest.mark.parametrize("env_id", TASKS)
def test_mujoco(measure, benchmark, env_id, num_envs, turn, rival):
    if "EnvPool" in rival:
        need("envpool", "pip install envpool")
    if rival == "gymnasium Async" and num_envs > 64:
        pytest.skip("Gymnasium would start hundreds of processes")
    benchmark.group = f"{env_id}, {num_envs} envs"
    num_steps = max(8, TASKS[env_id] // 5 // num_envs)
    iterate, close = in_a_process(stepping, rival=rival, env_id=env_id, num_envs=num_envs, num_steps=num_steps)
    try:
        measure(iterate, rounds=5, iterations=1, env_steps=num_steps * num_envs, rival=rival, num_envs=num_envs)
    finally:
        close()


def stepping(rival: str, env_id: str, num_envs: int, num_steps: int) -> Iteration:
    """Returns functions that take `num_steps` steps of a rival's envs, and that close them."""
    running = RIVALS[rival](env_id, num_envs, random_actions(env_id, num_envs, num_steps))
    return next(running), lambda: next(running, None)
