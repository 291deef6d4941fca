"""Send and recv: batches of some of the envs, first come, first served.

While envs are under way all rows stay in the slot of the last `reset` or `step`: each row has one owner at
any time, so rows need no slots to take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode

from vecenv import spaces as tree
from vecenv.memory import layout
from vecenv.rows.infos import select_infos
from vecenv.rows.protocol import StepObjects
from vecenv.spaces import Path
from vecenv.vector_env import PooledVectorEnv


class PartialBatch(NamedTuple):
    """What M of the N envs returned, in the order in which they were done. All arrays are the caller's.

    Attributes:
        observations: `[M, ...]`, nested as the observation space is.
        rewards: `float64[M]`.
        terminated: `bool[M]`.
        truncated: `bool[M]`.
        infos: As `step` returns them (merged), but with arrays of length M.
        env_ids: `int64[M]`: which envs these are.
    """

    observations: Any
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    infos: dict[str, Any]
    env_ids: np.ndarray


class PartialVectorEnv(PooledVectorEnv):
    """A vector env that can also step some of its envs while others are under way."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self._in_flight = np.zeros(self.num_envs, dtype=np.bool_)  # envs between send() and recv()
        self._num_in_flight = 0

    def send(self, actions: Any, env_ids: Sequence[int] | np.ndarray | None = None) -> None:
        """Sends some envs their actions; `recv` returns what follows, of the first to be done first.

        Call `reset` before. Until `recv` has returned all envs, the other methods that use envs raise. The envs write
        over the batch that `reset` or `step` returned last, if that is a view (`copy=False`).

        Args:
            actions: A batch of M actions.
            env_ids: The M envs that they are for, none of which may be under way; None for all N.

        Raises:
            AlreadyPendingCallError: If one of the envs is under way, or another call is.
            ValueError: If an id is not in `0 : N` or comes twice, or the actions do not fit.
        """
        ids = self._env_ids(env_ids)
        self._assert_may_send()
        if self._in_flight[ids].any():
            busy = [int(i) for i in ids if self._in_flight[i]]
            raise AlreadyPendingCallError(
                f"Calling `send` for envs {busy} while they are under way: `recv` their results first.", "send"
            )
        self._assert_not_over(ids)
        unfit = self._action_writer.put(actions, self.arrays, self._slot, ids)
        # Owner: an env's row of slot `_slot` is its worker's from here until recv() returns that env.
        try:
            self._send_rows(ids, unfit)
            self._in_flight[ids] = True
            self._num_in_flight += len(ids)
        except Exception:  # nothing was sent, or the error itself has broken the vector env
            raise
        except BaseException:  # Ctrl-C between the two
            self._break()
            raise

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> PartialBatch:
        """Waits until `min_envs` of the envs under way are done, and returns all that are.

        Args:
            min_envs: 1 to the number of envs under way; None for all of these.
            timeout: Seconds to wait at most. After a timeout, `recv` may be called again.

        Raises:
            NoAsyncCallError: If no env is under way.
            ValueError: If fewer than `min_envs` are.
            multiprocessing.TimeoutError: If they are not done in time.
        """
        self._assert_open()
        under_way = self._num_in_flight
        if under_way == 0:
            raise NoAsyncCallError("Calling `recv` without any prior call to `send`.", "send")
        if min_envs is None:
            min_envs = under_way
        if not 1 <= min_envs <= under_way:
            raise ValueError(f"recv({min_envs}): {under_way} envs are under way, so use 1 to {under_way}")
        ids, objects = self._receive_rows(min_envs, timeout)
        try:
            self._in_flight[ids] = False
            self._num_in_flight -= len(ids)
            return self._partial_batch(np.array(ids, dtype=np.int64), objects)
        except BaseException:  # the results are lost, and with them perhaps the end of an episode
            self._break()
            raise

    def _assert_idle(self, name: str) -> None:
        """Raises if the vector env is closed or envs are under way."""
        self._assert_open()
        if self._num_in_flight:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `send` to complete.", "send"
            )

    def _env_ids(self, env_ids: Sequence[int] | np.ndarray | None) -> Sequence[int]:
        if env_ids is None:
            return range(self.num_envs)
        ids = np.asarray(env_ids)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) == 0:
            raise ValueError(f"env_ids must be a sequence of numbers of envs, one or more, got {env_ids!r}")
        if ids.min() < 0 or ids.max() >= self.num_envs:
            raise ValueError(f"env_ids={ids.tolist()}: there are envs 0 to {self.num_envs - 1}")
        if len(np.unique(ids)) != len(ids):
            raise ValueError(f"env_ids={ids.tolist()}: an env can take one action at a time")
        return ids.tolist()

    def _assert_may_send(self) -> None:
        """Raises if `send` may not be called now."""
        self._assert_open()

    def _send_rows(self, env_ids: Sequence[int], unfit: Any) -> None:
        """Begins to step these envs, with the actions in memory or those that did not fit there."""
        raise NotImplementedError

    def _receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        """Waits for envs under way; returns those that are done, and their objects."""
        raise NotImplementedError

    def _partial_batch(self, ids: np.ndarray, objects: StepObjects) -> PartialBatch:
        # Owner: these rows are the parent's again, and copied out; others are being written meanwhile.
        def rows(path: Path) -> np.ndarray:
            return self.arrays[path][self._slot, ids]

        def leaf(path: Path) -> Any:
            field = (layout.OBSERVATION, *path)
            return rows(field) if field in self.arrays else tuple(self._loose[field][i] for i in ids)

        terminated, truncated = rows(layout.TERMINATED), rows(layout.TRUNCATED)
        self._absorb(objects.leaves)
        merged = self._merge(objects)
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            self._add_final_observations(merged, ids[terminated | truncated])
        observations = tree.nest(self.single_observation_space, leaf)
        return PartialBatch(observations, rows(layout.REWARD), terminated, truncated, select_infos(merged, ids), ids)
