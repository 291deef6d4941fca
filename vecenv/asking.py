"""AskingVectorEnv: what the workers of a parallel vector env are asked between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from vecenv.partial import PartialVectorEnv
from vecenv.rows.arguments import per_env
from vecenv.workers.local_pool import LocalPool
from vecenv.workers.pool import WorkerPool
from vecenv.workers.protocol import Kind


class AskingVectorEnv(PartialVectorEnv):
    """A vector env over a pool of workers, each of which has some of the envs."""

    _pool: WorkerPool | LocalPool

    def _ask(self, doing: str, messages: Sequence[Any]) -> list[Any]:
        """Sends each worker its message and returns their answers."""
        raise NotImplementedError

    def apply(self, function: Callable[[gym.Env], Any], env_ids: Sequence[int] | None = None) -> list[Any]:
        """Calls `function(env)` for these envs, or for all, in their workers; returns the results in their order."""
        ids = self._env_ids(env_ids)
        self._assert_idle("apply")
        at = [[i for i in ids if worker.low <= i < worker.high] for worker in self._pool.workers]
        payloads = [(function, [i - w.low for i in ours]) for w, ours in zip(self._pool.workers, at, strict=True)]
        replies = self._ask("apply", [self._pool.message(Kind.APPLY, payload=payload) for payload in payloads])
        results = {
            i: result for ours, reply in zip(at, replies, strict=True) for i, result in zip(ours, reply, strict=True)
        }
        return [results[i] for i in ids]

    def set_attr(self, name: str, values: Any) -> None:
        """Sets the attribute `name`: a list or tuple gives one value for each env, anything else is for all."""
        self._assert_open()
        values = per_env(values, self.num_envs)
        self._assert_idle("set_attr")
        payloads = [(name, values[worker.low : worker.high]) for worker in self._pool.workers]
        self._ask("set_attr", [self._pool.message(Kind.SET_ATTR, payload=payload) for payload in payloads])

    def _get_states(self) -> list[dict[str, Any]]:
        messages = [self._pool.message(Kind.GET_STATE)] * len(self._pool.workers)
        return [state for states in self._ask("get_state", messages) for state in states]

    def _set_states(self, slot: int, states: Sequence[dict[str, Any]]) -> None:
        runs = [states[worker.low : worker.high] for worker in self._pool.workers]
        self._ask("set_state", [self._pool.message(Kind.SET_STATE, slot, run) for run in runs])
