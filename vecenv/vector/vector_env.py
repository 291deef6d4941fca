"""PooledVectorEnv: a Gymnasium vector env that combines a pool of envs, a memory of slots and a result assembler."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, Self, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import Space
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv import tree
from vecenv.errors import EpisodeOver, StateError, UnsupportedSpace
from vecenv.memory import layout
from vecenv.memory.block import out_of_memory
from vecenv.rows.arguments import Seeds, check_equal, per_env, seed_of_each, split_reset_mask
from vecenv.rows.batched import Batched
from vecenv.rows.messages import NO_OBJECTS, EnvDescription, EnvSpaces, ResetCommand, RowsOptions, StepObjects, combined
from vecenv.tree import Path
from vecenv.vector.actions import ActionWriter
from vecenv.vector.results import PartialBatch, ResultAssembler, StepResult, check_states
from vecenv.workers.pool import CommandFailed, NotSent, Pool, RowsLate
from vecenv.workers.protocol import (
    APPLY,
    CALL,
    GET_STATE,
    RESET,
    SET_ATTR,
    SET_STATE,
    STEP,
    ApplyCommand,
    BatchCommandType,
    CallCommand,
    P,
    R,
    RowsCommandType,
    SetAttrCommand,
)

FAILED_GRACE_S = 2.0  # how long the envs that were built may take to close when the construction fails

ObservationMode = Literal["same", "different"] | tuple[Space, Space]

Result = TypeVar("Result")


class State(Enum):
    """What a vector env is doing. Only `PooledVectorEnv` and its subclasses change it.

    The values of pending calls are Gymnasium's names for them.
    """

    IDLE = "idle"
    RESET = "reset"
    STEP = "step"
    CALL = "call"
    IN_FLIGHT = "send"
    """Some envs are between `send` and `recv`."""
    BROKEN = "broken"
    """Envs may be in an unknown state, or replies may be pending that will never be read. Only `close` is legal."""
    CLOSED = "closed"
    FORKED = "forked"
    """This process is a fork of the one that built the envs, and cannot use their workers or threads."""


# Looking up members of an Enum takes 50 ns, which matters in each step of cheap envs.
_IDLE, _STEP, _BROKEN = State.IDLE, State.STEP, State.BROKEN


_not_forkable: weakref.WeakSet[PooledVectorEnv] = weakref.WeakSet()


def _mark_all() -> None:
    """Marks inherited vector envs in a forked process, so that `step` need not check the process id."""
    for envs in list(_not_forkable):
        envs._state = State.FORKED


os.register_at_fork(after_in_child=_mark_all)


class PooledVectorEnv(VectorEnv):
    """A Gymnasium vector env whose batches are stored in one block of memory with `num_slots` slots.

    `AsyncVectorEnv` and `SyncVectorEnv` document the arguments.

    Attributes:
        env_fns: The functions that build the envs, or a `Batched`.
        arrays: The memory itself: every field's `dtype[S, N, *shape]`, by path (see `vecenv.memory.layout`). A slot
            belongs to the envs during a call that writes to it, and to the caller otherwise.
        slabs: The same memory as contiguous `dtype[S, padded slot length]`, for code that aliases it.
        num_slots: S, the number of slots in the ring buffer that `step` writes to.
        env_action_space: The action space of one env, with the bounds that `clip_actions` applies.
        info_keys: The keys of `episode_infos`.
        steps_subsets: Whether `send` can step some of the envs: True, unless a `Batched` lacks `step_rows`.
    """

    env_fns: Sequence[Callable[[], gym.Env]] | Batched

    def __init__(
        self, pool: Pool, options: RowsOptions, *, num_slots: int, copy: bool, observation_mode: ObservationMode
    ):
        if num_slots < 2:
            raise ValueError(f"num_slots={num_slots}, but a batch must outlive the next step: use 2 or more")
        check_observation_mode(observation_mode)
        self.num_envs = pool.ranges[-1].high
        self.num_slots = num_slots
        self.copy = copy
        self.observation_mode = observation_mode
        self.autoreset_mode = options.autoreset_mode
        self.info_keys = options.info_keys
        self._autoreset_disabled = options.autoreset_mode == AutoresetMode.DISABLED
        self._pool = pool
        self._slot = 0  # holds the newest batch
        self._has_batch = False  # whether the envs have been reset and `_slot` therefore holds a batch
        self._state = _IDLE
        self._in_flight = np.zeros(self.num_envs, dtype=np.bool_)  # envs between send() and recv()
        self._pending_slot = 0  # of the step or reset in progress
        try:
            descriptions = pool.start()
            try:
                self._set_spaces(descriptions)
                self._bind_memory()
            except MemoryError as error:
                raise out_of_memory(error) from error
        except BaseException:
            with contextlib.suppress(Exception):
                pool.close(FAILED_GRACE_S)
            raise
        # A fork has no threads, and shares the workers, but gets its own copies of single envs in this process.
        if pool.processes or isinstance(self.env_fns, Batched):
            _not_forkable.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because it shares memory with its envs: build another "
            "one, and pass the states of the envs to it with get_state() and set_state()"
        )

    def _set_spaces(self, descriptions: Sequence[EnvDescription]) -> None:
        first, spaces = descriptions[0], [env for description in descriptions for env in description.spaces]
        self.single_observation_space, self.observation_space, self.single_action_space = combine_spaces(
            spaces, self.observation_mode, type(self).__name__
        )
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.env_action_space = spaces[0].env_action_space
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = first.render_mode
        self.steps_subsets = all(description.steps_subsets for description in descriptions)

    def _bind_memory(self) -> None:
        """Allocates the slots, and binds rows, actions and results to them."""
        rows = layout.env_fields(
            self.single_observation_space,
            self.single_action_space,
            final_observation=self.autoreset_mode == AutoresetMode.SAME_STEP,
            info_keys=self.info_keys,
        )
        plan = layout.plan(rows, num_slots=self.num_slots, num_envs=self.num_envs)
        block = self._pool.share(plan)
        self.arrays: dict[Path, np.ndarray] = block.views(plan)
        self.slabs: dict[Path, np.ndarray] = block.slabs(plan)
        self._actions = ActionWriter(self.single_action_space, self.arrays)
        self._results = ResultAssembler(
            self.single_observation_space, self.arrays, autoreset_mode=self.autoreset_mode, copy=self.copy
        )

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets every env, or the envs in `options["reset_mask"]`; returns observations and infos.

        Args:
            seed: One seed, or None, for each env. An int s gives env i the seed s + i.
            options: Passed to the envs, except `reset_mask`: bool[N], of which at least one is True.
        """
        self._assert_idle("reset")
        self._begin_reset(self._next_slot(), seed, options)
        return self._finish_batch(RESET, self._results.after_reset, None)

    def step(self, actions: Any) -> StepResult:
        """Steps every env; returns observations, float64 rewards[N], bool terminated[N] and truncated[N], infos.

        Raises:
            ValueError: If actions have another shape or are NaN.
            TypeError: If the dtype of the actions is of another kind, such as floats for a Discrete space.
            gymnasium.error.ResetNeeded: If an env's episode is over and autoreset is disabled.
        """
        self._begin_step(actions, self._next_slot())
        return self._finish_batch(STEP, self._results.after_step, None)

    def _begin_reset(self, slot: int, seed: Seeds, options: dict[str, Any] | None) -> None:
        seeds = seed_of_each(seed, self.num_envs)
        options, mask = split_reset_mask(options, self.num_envs)
        if mask is not None:
            # Owner: the caller, until the command passes the rows of `slot` to the workers.
            self._copy_newest(slot, ~mask)
        commands = [
            ResetCommand(seeds[run.rows], options, None if mask is None else mask[run.rows])
            for run in self._pool.ranges
        ]
        self._begin(RESET, slot, commands, State.RESET)

    def _begin_step(self, actions: Any, slot: int) -> None:
        if self._state is not _IDLE:
            self._assert_idle("step")
        if self._autoreset_disabled:
            self._assert_not_over(range(self.num_envs))
        unfit = self._actions.put(actions, slot)
        self._begin(STEP, slot, None if unfit is None else self._split(unfit), _STEP)

    def _finish_batch(
        self, command: BatchCommandType, assemble: Callable[[int, StepObjects], Result], timeout: float | None
    ) -> Result:
        """Waits for the step or the reset in progress; returns what `assemble` makes of its batch."""
        replies = self._finish(command, timeout)
        slot = self._slot = self._pending_slot
        self._has_batch = True
        if not any(replies):  # most steps of most envs
            objects = NO_OBJECTS
        elif len(replies) == 1:
            objects = replies[0] or NO_OBJECTS
        else:
            objects = combined(part for part in replies if part)
        if objects.cut:
            self._mark_cut(slot, objects.cut)
        try:
            result = assemble(slot, objects)
        except MemoryError as error:
            raise out_of_memory(error) from error
        self._state = _IDLE
        return result

    @property
    def worker_restarts(self) -> int:
        """How often a dead worker was replaced (`on_worker_death="restart"`)."""
        return self._pool.restarts

    def _mark_cut(self, slot: int, envs: Sequence[int]) -> None:
        """Called when a step reports that the episodes of these envs were cut, before its results are read."""

    def _begin(self, command: RowsCommandType[P, R], slot: int, payloads: Sequence[P] | None, state: State) -> None:
        """Sends a command. If it cannot be encoded, no env receives it, and the newest batch stays the newest."""
        self._state = _BROKEN  # an interrupt may leave half a message in a pipe
        try:
            self._pool.begin(command, slot, payloads)
        except NotSent as error:
            self._state = _IDLE
            raise error.args[0] from None
        self._state, self._pending_slot = state, slot

    def _finish(self, command: RowsCommandType[P, R], timeout: float | None) -> list[R]:
        """Waits for the command in progress; returns one reply per range. If it raises nothing, the caller sets IDLE.

        Until then, the state is BROKEN, because an interrupt would leave replies unread or lose their results.
        """
        self._state = _BROKEN
        try:
            return self._pool.finish(command, timeout)
        except CommandFailed as failed:
            (error,) = failed.args
        self._state = _IDLE
        raise error  # out here, so that it keeps its own cause and context

    def _run(self, command: RowsCommandType[P, R], payloads: Sequence[P] | None) -> list[R]:
        """Runs a command; returns one reply per range."""
        self._begin(command, 0, payloads, State.CALL)
        replies = self._finish(command, None)
        self._state = _IDLE
        return replies

    def send(self, actions: Any, env_ids: Sequence[int] | np.ndarray | None = None) -> None:
        """Sends actions to some envs; `recv` returns their results, first come, first served.

        Other methods that use envs raise until `recv` has returned the results of all envs in flight. With
        `copy=False`, the envs overwrite the batch that `reset` or `step` returned last.

        Args:
            actions: A batch of M actions.
            env_ids: The M envs that the actions are for, none of which may be in flight; None for all N.

        Raises:
            AlreadyPendingCallError: If one of the envs is in flight, or if another call is pending.
            ValueError: If an id is not in `0 : N` or is repeated.
            ValueError, TypeError, gymnasium.error.ResetNeeded: As in `step`.
        """
        ids = _checked_ids(env_ids, self.num_envs)
        if self._state is not State.IN_FLIGHT:
            self._assert_idle("send")
        if self._in_flight[ids].any():
            busy = [int(i) for i in ids if self._in_flight[i]]
            raise AlreadyPendingCallError(
                f"Calling `send` for envs {busy} while they are in flight: `recv` their results first.", "send"
            )
        self._assert_not_over(ids)
        # All rows stay in the slot of the last reset or step: each row has one owner at any time.
        unfit = self._actions.put(actions, self._slot, ids)
        orders = [(i, None if unfit is None else self._actions.select(unfit, [k])) for k, i in enumerate(ids)]
        # Owner: the env's worker, which owns the env's row of slot `_slot` until recv() returns the env's results.
        before, self._state = self._state, _BROKEN  # an interrupt may leave half a message in a pipe
        try:
            self._pool.send_rows(self._slot, orders)
        except NotSent as error:
            self._state = before
            raise error.args[0] from None
        self._in_flight[ids] = True
        self._state = State.IN_FLIGHT

    def recv(self, min_envs: int | None = None, timeout: float | None = None) -> PartialBatch:
        """Waits until `min_envs` of the envs in flight are done, and returns the results of all envs that are done.

        Args:
            min_envs: 1 to the number of envs in flight; None to wait for all of them.
            timeout: Maximum wait in seconds; None for no limit. After a timeout, `recv` may be called again.

        Raises:
            NoAsyncCallError: If no env is in flight.
            ValueError: If fewer than `min_envs` envs are in flight.
            multiprocessing.TimeoutError: If fewer than `min_envs` envs are done before the timeout.
        """
        if self._state is not State.IN_FLIGHT:
            self._assert_open()
            raise NoAsyncCallError("Calling `recv` without any prior call to `send`.", "send")
        in_flight = int(np.count_nonzero(self._in_flight))
        if min_envs is None:
            min_envs = in_flight
        if not 1 <= min_envs <= in_flight:
            raise ValueError(f"recv({min_envs}): {in_flight} envs are in flight, so use 1 to {in_flight}")
        self._state = _BROKEN  # lost results may include the end of an episode
        try:
            ids, objects = self._pool.receive_rows(min_envs, timeout)
        except RowsLate:
            self._state = State.IN_FLIGHT
            raise
        self._in_flight[ids] = False
        if objects.cut:
            self._mark_cut(self._slot, objects.cut)
        batch = self._results.after_recv(self._slot, np.array(ids, dtype=np.int64), objects)
        self._state = State.IN_FLIGHT if len(ids) < in_flight else _IDLE
        return batch

    def reset_slot(self, slot: int, *, seed: Seeds = None, timeout: float | None = None) -> None:
        """Resets all envs as `reset` does and writes the batch to `slot`. Infos are discarded.

        Waits at most `timeout` seconds for worker processes.
        """
        self._assert_idle("reset")
        self._begin_reset(slot, seed, None)
        self._finish_batch(RESET, _discard, timeout)

    def step_slot(self, slot: int, actions: Any, *, timeout: float | None = None) -> None:
        """Steps the envs as `step` does and writes the batch to `slot`. Infos are discarded.

        Waits at most `timeout` seconds for worker processes.
        """
        self._begin_step(actions, slot)
        self._finish_batch(STEP, _discard, timeout)

    def move_newest(self, slot: int) -> None:
        """Copies the newest batch to another slot, which then holds the newest batch."""
        self._assert_idle("move_newest")
        # Owner: the caller, all rows of both slots, until the next step or reset.
        self._copy_newest(slot, slice(None))
        self._slot = slot

    def _copy_newest(self, slot: int, rows: Any) -> None:
        """Copies rows of the newest batch, without actions and final observations, which no later step reads."""
        for path, array in self.arrays.items():
            if path[0] not in (layout.ACTION, layout.FINAL_OBSERVATION):
                array[slot, rows] = array[self._slot, rows]

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the method, or reads the attribute, `name` of every env.

        Results from worker processes are copies. An env in this process returns its own objects, which it may change
        later. Only the frames of `render` are always copies.
        """
        self._assert_idle("call")
        replies = self._run(CALL, [CallCommand(name, args, kwargs)] * len(self._pool.ranges))
        return tuple(result for reply in replies for result in reply)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns the attribute `name` of every env."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets the attribute `name`. A list or tuple holds one value per env; any other value is for all envs.

        With a `Batched`, all values must be equal, and otherwise raise ValueError.
        """
        self._assert_open()
        values = per_env(values, self.num_envs)
        if isinstance(self.env_fns, Batched):  # here, because a worker sees only the values of its own envs
            check_equal(name, values)
        self._assert_idle("set_attr")
        self._run(SET_ATTR, [SetAttrCommand(name, values[run.rows]) for run in self._pool.ranges])

    def apply(self, function: Callable[[gym.Env], Any], env_ids: Sequence[int] | None = None) -> list[Any]:
        """Calls `function(env)` in the process of each env, for `env_ids` or all envs; returns the results in order.

        Raises TypeError for a `Batched`, which has no single envs. Results from workers are copies.
        """
        ids = _checked_ids(env_ids, self.num_envs)
        self._assert_idle("apply")
        rows = [[i - run.low for i in ids if run.low <= i < run.high] for run in self._pool.ranges]
        replies = self._run(APPLY, [ApplyCommand(function, some) for some in rows])
        results: dict[int, Any] = {}
        for run, some, reply in zip(self._pool.ranges, rows, replies, strict=True):
            results.update((run.low + row, result) for row, result in zip(some, reply, strict=True))
        return [results[i] for i in ids]

    def render(self) -> tuple[Any, ...] | None:
        """Returns the result of `render()` of every env. The caller owns the frames."""
        return self.call("render")

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env, for `set_state` and `vecenv.state.save`. The envs do not change.

        A state holds the states of the env and its wrappers, the env's random generator, what autoreset does next, the
        totals of the episode, and the newest observation.

        Raises:
            NotRestorable: If an env or wrapper does not define its state; the message names its class. The vector env
                remains usable.
        """
        self._assert_idle("get_state")
        replies = self._run(GET_STATE, None)
        states = [state for reply in replies for state in reply]
        rows: list[dict[str, Any] | None] = [None] * self.num_envs
        if self._has_batch:
            rows = [self._results.row(i, self._slot) for i in range(self.num_envs)]
        types = [*self._results.row_types]
        return [{"types": types, "row": row, **state} for row, state in zip(rows, states, strict=True)]

    def set_state(self, states: Sequence[dict[str, Any]], *, slot: int | None = None) -> None:
        """Restores the states that `get_state` returned for a vector env that was built in the same way.

        The envs continue exactly as the saved envs did, without a `reset`. The number of workers may differ. The
        observations are written to `slot` (None: the next one).

        Raises:
            ValueError: If the number of envs, their spaces or the options differ, in which case no env has changed; or
                if the envs themselves differ, in which case some may already be restored: reset or close all envs.
        """
        self._assert_idle("set_state")
        slot = self._next_slot() if slot is None else slot
        check_states(states, self.num_envs, self._results.row_types)
        has_batch = states[0]["row"] is not None
        self._begin(SET_STATE, slot, [states[run.rows] for run in self._pool.ranges], State.CALL)
        self._finish(SET_STATE, None)  # the newest batch stays if an env rejects its state
        for i, state in enumerate(states if has_batch else ()):
            # Owner: the caller, all rows of `slot`, because the envs have been restored.
            self._results.restore_row(i, slot, state["row"])
        for key in self.info_keys:  # states omit these infos, so that the keys may differ
            self.arrays[(layout.EPISODE_INFO, key)][slot] = np.nan
        self._slot, self._has_batch = slot, has_batch
        self._state = _IDLE

    @property
    def observations(self) -> Any:
        """The newest batch of observations: `[N, ...]`, views of the memory, nested like the space."""
        return self._results.observations(self._slot)

    @property
    def episode_returns(self) -> np.ndarray:
        """Each env's return in its episode so far, or in the one that has just ended: float64[N], a copy."""
        return self.arrays[layout.EPISODE_RETURN][self._slot].copy()

    @property
    def episode_lengths(self) -> np.ndarray:
        """The length of each env's episode so far, or of the one that has just ended: int64[N], a copy."""
        return self.arrays[layout.EPISODE_LENGTH][self._slot].copy()

    @property
    def episode_infos(self) -> dict[str, np.ndarray]:
        """For each of `info_keys`, float64[N], a copy: the info's value where the newest step ended an episode.

        NaN elsewhere, where no info has the key, where a restarted worker cut the episode off, and for a sum or a mean
        that `set_state` continues from a state without it.
        """
        return self._infos_where(self.arrays[layout.TERMINATED][self._slot] | self.arrays[layout.TRUNCATED][self._slot])

    @property
    def infos_so_far(self) -> dict[str, np.ndarray]:
        """For each of `info_keys`, float64[N], a copy: the value as if each episode had ended with the newest step.

        NaN for an env that has not been stepped since a reset, and as in `episode_infos`.
        """
        return self._infos_where(self.arrays[layout.EPISODE_LENGTH][self._slot] > 0)

    def _infos_where(self, known: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the newest values of infos, float64[N]; NaN except where they are `known`, and without a batch."""
        columns = {key: self.arrays[(layout.EPISODE_INFO, key)][self._slot] for key in self.info_keys}
        return {key: np.where(known & self._has_batch, column, np.nan) for key, column in columns.items()}

    @property
    def newest_slot(self) -> int:
        """The slot that holds the newest batch."""
        return self._slot

    # Like Gymnasium's own vector envs, this returns tuples, although the base class is annotated otherwise.
    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each env's generator."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Each env's generator; a copy if the env is in a worker process."""
        return self.get_attr("np_random")

    def close_extras(self, **kwargs: Any) -> None:
        """Closes every env."""
        if self._state is State.FORKED:
            return
        self._state = State.CLOSED
        self._pool.close(0.0)

    def _split(self, actions: Any) -> list[Any]:
        """Splits a batch of actions that do not fit in memory into one batch per range."""
        if len(self._pool.ranges) == 1:
            return [actions]
        return [self._actions.select(actions, run.rows) for run in self._pool.ranges]

    def _next_slot(self) -> int:
        return (self._slot + 1) % self.num_slots

    def _assert_open(self) -> None:
        if self._state is State.CLOSED:
            raise StateError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if self._state is State.FORKED:
            raise StateError(
                f"this `{type(self).__name__}` belongs to another process, of which this process ({os.getpid()}) is a "
                "fork. Build another vector env in this process."
            )
        if self._state is _BROKEN:
            raise StateError(
                f"`{type(self).__name__}` was broken by an earlier fault or interrupt, or another thread is using it "
                "now. After a fault, call `close()` and build a new one. Only one thread may use it at a time."
            )

    def _assert_idle(self, name: str) -> None:
        """Raises unless the method `name` may use the envs now."""
        self._assert_open()
        if self._state is not _IDLE:
            pending = self._state.value
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{pending}` to complete.", pending
            )

    def _assert_not_over(self, env_ids: Sequence[int]) -> None:
        """Raises if autoreset is disabled and an episode of these envs is over."""
        if self._autoreset_disabled and self._has_batch:
            ended = self.arrays[layout.TERMINATED][self._slot] | self.arrays[layout.TRUNCATED][self._slot]
            if not np.count_nonzero(ended):  # most steps
                return
            if over := [i for i in env_ids if ended[i]]:
                raise EpisodeOver(
                    f"the episodes of envs {over} are over, and autoreset is disabled: reset them with "
                    "options={'reset_mask': ...}. No env was stepped."
                )


def _discard(slot: int, objects: StepObjects) -> None:
    """Assembles nothing: the results of `step_slot` and `reset_slot` are read from memory."""


def _checked_ids(env_ids: Sequence[int] | np.ndarray | None, num_envs: int) -> Sequence[int]:
    """Returns the ids of envs as a sequence of ints, or raises ValueError; None stands for all envs."""
    if env_ids is None:
        return range(num_envs)
    ids = np.asarray(env_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) == 0:
        raise ValueError(f"env_ids must be a non-empty sequence of env indices, but got {env_ids!r}")
    if ids.min() < 0 or ids.max() >= num_envs:
        raise ValueError(f"env_ids={ids.tolist()} is out of range: use ids from 0 to {num_envs - 1}")
    if len(np.unique(ids)) != len(ids):
        raise ValueError(f"env_ids={ids.tolist()} repeats an id: name each env once")
    return ids.tolist()


def check_observation_mode(mode: Any) -> None:
    """Raises if `mode` is neither "same", "different" nor a pair of spaces."""
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
    elif not isinstance(mode, str) or mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode}"
        )


def combine_spaces(spaces: Sequence[EnvSpaces], mode: ObservationMode, name: str) -> tuple[Space, Space, Space]:
    """Returns the single observation space, the observation space and the single action space of a vector env.

    `AsyncVectorEnv` describes the modes; a pair of spaces may be in either order. Messages call the vector env `name`.

    Raises:
        UnsupportedSpace: If the spaces are incompatible; the message names the first env whose space differs.
    """
    first = previous = spaces[0]
    single, batched = first.observation_space, None
    if not isinstance(mode, str):
        # Gymnasium documents (single, batched), but its code reads (batched, single). Only one of the two can have the
        # shape of an env's observations, so either order is accepted.
        batched, single = mode if _equivalent(first.observation_space, mode[1]) else mode[::-1]
    for env, found in enumerate(spaces):
        if env and found is previous:  # as most envs of a worker
            continue
        previous = found
        differs = f"The first env that differs is env {env}: {found.observation_space} instead of {single}."
        if mode == "same" and found.observation_space != single:
            raise UnsupportedSpace(
                f"The envs of {name} have different observation spaces, but observation_mode='same'. {differs} If "
                "they differ only in their bounds, and this is intentional, use observation_mode='different'."
            )
        if mode != "same" and not _equivalent(found.observation_space, single):
            raise UnsupportedSpace(
                f"The envs of {name} have observation spaces that do not share a common shape and dtype. {differs} "
                "Wrap the envs so that all return observations of the same shapes and dtypes."
            )
        if found.env_action_space != first.env_action_space:
            raise UnsupportedSpace(
                f"Some environments have an action space different from `{first.env_action_space}`. In order to batch "
                "actions, the action spaces from all environments must be equal. "
                f"The first env that differs is env {env}: {found.env_action_space}. Wrap the envs so that all accept "
                "the same actions; gymnasium.wrappers.RescaleAction gives Boxes the same bounds."
            )
    if batched is None:
        batched = tree.batched_space([env.observation_space for env in spaces])
    return single, batched, first.action_space


def _equivalent(one: Space, other: Space) -> bool:
    try:
        return is_space_dtype_shape_equiv(one, other)
    except NotImplementedError:  # a custom space
        return one == other
