"""LocalPool: steps the rows of all envs in this process, in the calling thread."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from gymnasium import logger
from gymnasium.error import ResetNeeded

from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.rows.batch_rows import BatchRows, make_rows
from vecenv.rows.batched import Batched
from vecenv.rows.copies import copiers
from vecenv.rows.messages import EnvDescription, RowsOptions, StepObjects, combined
from vecenv.workers.pool import CommandFailed, EnvRange, NotSent, Pool
from vecenv.workers.protocol import CALL, RESET, SET_ATTR, SET_STATE, STEP, P, R, RowsCommandType


class LocalPool(Pool):
    """A pool without worker processes.

    Exceptions raised by envs propagate unchanged, with a note that names the env. `finish` and `receive_rows` carry out
    the commands themselves, so timeouts have no effect.
    """

    def __init__(self, env_fns: Sequence[Callable] | Batched, options: RowsOptions):
        self.ranges = [EnvRange(0, 0, len(env_fns))]
        self.processes = []
        self._env_fns, self._options = env_fns, replace(options, here=True)
        self._rows: Any = None  # `Rows` once started
        self._has_reset = False  # whether an env may be in the middle of an episode
        self._pending: tuple[int, Any] = (0, None)  # the slot and the payload of the command that was begun
        self._sent: deque[tuple[int, list[tuple[int, Any]]]] = deque()  # slots and orders that are not yet stepped

    @property
    def envs(self) -> list[Any]:
        """The envs, or the vector env that a `Batched` has built."""
        return self._rows.envs

    def start(self) -> list[EnvDescription]:
        self._rows = make_rows(self._env_fns, 0, self._options)
        return [self._rows.build()]

    def share(self, layout: Layout) -> Block:
        block = Block.private(layout.size)
        self._rows.bind(block.views(layout))
        return block

    def begin(self, command: RowsCommandType[P, R], slot: int = 0, payloads: Sequence[P] | None = None) -> None:
        payload: Any = None
        if payloads is not None:
            payload = payloads[0]
            if command is STEP:
                payload = _copy(payload)
            elif self._options.own_copies and command in (RESET, CALL, SET_ATTR):
                # Owner: the arguments belong to the caller again, as after they have been sent to workers.
                payload = copiers([payload])[0]()
        self._pending = slot, payload

    def finish(self, command: RowsCommandType[P, R], timeout: float | None = None) -> list[R]:
        (slot, payload), rows = self._pending, self._rows
        try:
            if command is STEP:
                return [rows.step(slot, payload)]
            self._has_reset = self._has_reset or command in (RESET, SET_STATE)
            return [command.carry_out(rows, slot, payload)]
        except Exception as error:
            # A `Batched` raises ResetNeeded before it steps any env.
            too_early = isinstance(error, ResetNeeded) and (isinstance(rows, BatchRows) or not self._has_reset)
            if command.between_steps or too_early:
                raise CommandFailed(error) from None
            raise

    def send_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> None:
        self._sent.append((slot, list(orders if orders[0][1] is None else _copy(orders))))

    def receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        ids: list[int] = []
        parts: list[StepObjects] = []
        while len(ids) < min_envs:
            slot, orders = self._sent[0]
            # `step_rows` steps lazily, so the rows that it has not yielded are not stepped.
            rows, objects = next(iter(self._rows.step_rows(slot, orders)))
            del orders[: len(rows)]
            if not orders:
                self._sent.popleft()
            ids += rows
            parts.append(objects)
        return ids, combined(parts)

    def close(self, grace_s: float = 0.0) -> None:
        if self._rows is not None:
            try:
                self._rows.close()
            except Exception as error:  # as with workers, what the envs have done is not lost
                logger.warn(f"an env raised in close():\n{''.join(traceback.format_exception(error))}")
            # Order: after closing the envs. If Ctrl-C interrupts an env's close(), the next call closes the other envs.
            self._rows = None


def _copy(actions: Any) -> Any:
    # Owner: actions that are not in memory belong to the caller again when the command has been stored.
    try:
        return deepcopy(actions)
    except Exception as error:
        raise NotSent(error) from None
