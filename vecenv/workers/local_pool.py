"""LocalPool: what WorkerPool is, without any worker process: its workers are groups of this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from gymnasium.error import ResetNeeded

from vecenv.memory.block import Block
from vecenv.rows.batch_rows import Batched, BatchRows, make_rows
from vecenv.rows.protocol import NO_OBJECTS, Rows, RowsOptions, StepObjects
from vecenv.workers.pool import CALLS, OnAnswer, Revive
from vecenv.workers.processes import EnvRange, spread
from vecenv.workers.protocol import Kind

Message = tuple[Kind, int, Any]
"""Kind, slot, payload: here nothing is encoded, and nothing is copied."""


class LocalPool:
    """Steps the rows of all envs here, when the answers are asked for.

    Args:
        env_fns: Of all envs, as `make_rows` takes them.
        num_groups: Runs into which they are split.
        options: Further arguments of `make_rows`.

    Raises:
        ValueError: If there are too few envs for the groups.

    Attributes:
        workers: The groups, which are stepped one after the other; or by threads of the caller, see `step_group`.
        broken: Whether an env raised in the midst of a step: then only `close` is legal.
    """

    def __init__(self, env_fns: Sequence[Callable] | Batched, num_groups: int, options: RowsOptions):
        if not 1 <= num_groups <= len(env_fns):
            raise ValueError(f"num_groups={num_groups} for {len(env_fns)} envs: a group needs at least one env")
        bounds = spread(len(env_fns), num_groups)
        self.workers = [EnvRange(index, low, high) for index, (low, high) in enumerate(bounds)]
        self.broken = False
        self._env_fns, self._options = env_fns, options
        self._rows: list[Rows] = []
        self._told: list[Message] = []
        self._under_way: deque[tuple[EnvRange, Any]] = deque()  # iterators over rows that are to be stepped

    @staticmethod
    def message(kind: Kind, slot: int = 0, payload: Any = None) -> Message:
        """Returns a message as `tell` takes it."""
        return kind, slot, payload

    @staticmethod
    def block(size: int, *, shared_memory: bool) -> Block:
        """Allocates memory for `attach`, which nobody else need see."""
        return Block.private(size)

    def start(self) -> list[Any]:
        """Builds the envs and returns what those of each group say of themselves."""
        for group in self.workers:
            env_fns = self._env_fns[group.low : group.high]
            self._rows.append(make_rows(env_fns, first_env=group.low, options=self._options))
        return [rows.describe() for rows in self._rows]

    def attach(
        self, block: Block, kind: Kind, *payload: Any, doing: str, timeout: float | None, revive: Revive | None
    ) -> None:
        """Binds the rows to the block."""
        *schema, plan = payload
        for group, rows in zip(self.workers, self._rows, strict=True):
            bind: Callable[..., None] = rows.bind if kind == Kind.ATTACH else rows.bind_infos
            bind(*schema, block.views(plan, group.low, group.high))

    def tell(self, messages: Sequence[Message], doing: str, revive: Revive | None) -> None:
        """Takes the message of each group."""
        # Owner: actions that do not lie in memory are the caller's again when this returns, so they are copied.
        self._told = [
            (kind, slot, deepcopy(payload) if kind == Kind.STEP else payload) for kind, slot, payload in messages
        ]

    def answers(self, doing: str, timeout: float | None, revive: Revive | None) -> list[Any]:
        """Does what was told and returns the answers; what an env raises passes through. A timeout has no effect."""
        self.broken = doing not in CALLS
        answers: list[Any] = []
        try:
            for rows, message in zip(self._rows, self._told, strict=True):
                answers.append(self._done(rows, *message))
        except ResetNeeded:
            self.broken = bool(answers) or not isinstance(rows, BatchRows)  # which raises it before it steps any env
            raise
        self.broken = False
        return [None if answer is NO_OBJECTS else answer for answer in answers]

    def step_group(self, group: int, slot: int, actions: Any) -> StepObjects:
        """Steps the envs of one group; a thread may do so for each of them at the same time."""
        rows = self._rows[group]
        try:
            return rows.step(slot, actions)
        except BaseException as error:
            if not (isinstance(error, ResetNeeded) and isinstance(rows, BatchRows)):  # which steps no env then
                self.broken = True
            raise

    def _done(self, rows: Any, kind: Kind, slot: int, payload: Any) -> Any:
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

    def tell_rows(self, worker: EnvRange, message: Message, revive: Revive, on_answer: OnAnswer) -> None:
        """Takes rows that are to be stepped."""
        _, slot, orders = message
        self._under_way.append((worker, self._rows[worker.index].step_rows(slot, orders)))

    def some_answers(self, deadline: float | None, revive: Revive, on_answer: OnAnswer) -> bool:
        """Steps the next row under way and hands its answer on; returns False if the deadline has passed."""
        if deadline is not None and time.monotonic() >= deadline:
            return False
        self.broken = True
        while self._under_way:
            worker, stepped = self._under_way[0]
            for rows, objects in stepped:
                on_answer(worker, rows, None if objects is NO_OBJECTS else objects)
                self.broken = False
                return True
            self._under_way.popleft()
        raise AssertionError("asked for an answer that nobody owes")

    def close(self, grace_s: float) -> None:
        """Closes the envs."""
        first: Exception | None = None
        while self._rows:
            try:
                self._rows.pop(0).close()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
