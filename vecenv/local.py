"""local.py: LocalPool: what WorkerPool is, without any worker process: its one worker is the process of the caller."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from gymnasium.error import ResetNeeded

from vecenv.batch_rows import BatchRows, rows_of
from vecenv.extras import NOTHING
from vecenv.memory import Block
from vecenv.messages import Kind
from vecenv.pool import CALLS, OnAnswer, Revive
from vecenv.processes import Share

Message = tuple[Kind, int, Any]
"""Kind, slot, payload: here nothing is encoded, and nothing is copied."""


class LocalPool:
    """Steps the rows of all envs here, when the answers are asked for.

    Args:
        setup: Arguments of `rows_of`.
        num_envs: N.

    Attributes:
        workers: The share of this process: all envs.
        broken: Whether an env raised in the midst of a step: then only `close` is legal.
    """

    def __init__(self, setup: Mapping[str, Any], num_envs: int):
        self.workers = [Share(0, 0, num_envs)]
        self.broken = False
        self._setup = setup
        self._rows: Any = None
        self._told: Message = (Kind.CLOSE, 0, None)
        self._under_way: deque[Any] = deque()  # iterators over rows that are to be stepped

    @staticmethod
    def message(kind: Kind, slot: int = 0, payload: Any = None) -> Message:
        """Returns a message as `tell` takes it."""
        return kind, slot, payload

    @staticmethod
    def block(size: int, *, shared_memory: bool) -> Block:
        """Allocates memory for `share`, which nobody else need see."""
        return Block.private(size)

    def start(self) -> list[Any]:
        """Builds the envs and returns what they say of themselves."""
        self._rows = rows_of(**self._setup)
        return [(self._rows.spaces(), self._rows.metadata, self._rows.render_mode, self._rows.partial)]

    def share(self, block: Block, kind: Kind, *payload: Any, doing: str, revive: Revive | None) -> None:
        """Binds the rows to the block."""
        *schema, plan = payload
        bind: Callable[..., None] = self._rows.bind if kind == Kind.ATTACH else self._rows.bind_infos
        bind(*schema, block.views(plan))

    def tell(self, messages: Sequence[Message], doing: str, revive: Revive | None) -> None:
        """Takes the message of the one worker."""
        kind, slot, payload = messages[0]
        # Owner: actions that do not lie in memory are the caller's again when this returns, so they are copied.
        self._told = kind, slot, deepcopy(payload) if kind == Kind.STEP else payload

    def answers(self, doing: str, timeout: float | None, revive: Revive | None) -> list[Any]:
        """Does what was told and returns the answer; what an env raises passes through, and a timeout has no effect."""
        self.broken = doing not in CALLS
        try:
            answer = self._done(*self._told)
        except ResetNeeded:
            self.broken = not isinstance(self._rows, BatchRows)  # which raises it before it steps any env
            raise
        self.broken = False
        return [None if answer is NOTHING else answer]

    def _done(self, kind: Kind, slot: int, payload: Any) -> Any:
        rows = self._rows
        if kind == Kind.STEP:
            return rows.step(slot, payload)
        if kind == Kind.RESET:
            seeds, options, mask = payload
            return rows.reset(slot, seeds=seeds, options=options, mask=mask)
        if kind == Kind.GET_STATE:
            return rows.get_state()
        if kind == Kind.SET_STATE:
            return rows.set_state(slot, payload)
        return {Kind.CALL: rows.call, Kind.APPLY: rows.apply, Kind.SET_ATTR: rows.set_attr}[kind](*payload)

    def tell_rows(self, worker: Share, message: Message, revive: Revive, on_answer: OnAnswer) -> None:
        """Takes rows that are to be stepped."""
        _, slot, orders = message
        self._under_way.append(self._rows.step_rows(slot, orders))

    def some_answers(self, deadline: float | None, revive: Revive, on_answer: OnAnswer) -> bool:
        """Steps the next row under way and hands its answer on; returns False if the deadline has passed."""
        if deadline is not None and time.monotonic() >= deadline:
            return False
        self.broken = True
        while self._under_way:
            for rows, extras in self._under_way[0]:
                on_answer(self.workers[0], rows, None if extras is NOTHING else extras)
                self.broken = False
                return True
            self._under_way.popleft()
        raise AssertionError("asked for an answer that nobody owes")

    def close(self, grace_s: float) -> None:
        """Closes the envs."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()
