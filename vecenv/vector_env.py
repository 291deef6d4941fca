"""PooledVectorEnv: a Gymnasium vector env that combines a pool of envs, a memory of slots and a result assembler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv.errors import EpisodeOver, SharedMemoryFull, StateError
from vecenv.memory import layout
from vecenv.memory.actions import ActionWriter
from vecenv.results import PartialBatch, ResultAssembler, StepResult
from vecenv.rows import info_memory
from vecenv.rows.agents import check_groups
from vecenv.rows.arguments import Seeds, per_env, seed_of_each, split_reset_mask
from vecenv.rows.batch_rows import Batched
from vecenv.rows.batch_spaces import ObservationMode, check_observation_mode, combine_spaces
from vecenv.rows.infos import add_info
from vecenv.rows.protocol import EnvDescription, StepObjects
from vecenv.spaces import Path
from vecenv.state import check_states, row_of, row_types, write_row
from vecenv.workers.pool import Pool
from vecenv.workers.protocol import ApplyCommand, CallCommand, Kind, ResetCommand, SetAttrCommand


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
        groups: Ranges of envs that threads of the caller may step concurrently, by calling `step_group`; a single
            range of all envs if there are no groups.
    """

    env_fns: Sequence[Callable[[], gym.Env]] | Batched

    def __init__(
        self,
        pool: Pool,
        *,
        num_slots: int,
        copy: bool,
        observation_mode: ObservationMode,
        autoreset_mode: AutoresetMode,
        infos: bool,
        info_keys: tuple[str, ...],
    ):
        if num_slots < 2:
            raise ValueError(f"num_slots={num_slots}, but a batch must outlive the next step: use 2 or more")
        check_observation_mode(observation_mode)
        self.num_envs = pool.ranges[-1].high
        self.num_slots = num_slots
        self.copy = copy
        self.observation_mode = observation_mode
        self.autoreset_mode = autoreset_mode
        self.info_keys = info_keys
        self.groups = pool.groups
        self._autoreset_disabled = autoreset_mode == AutoresetMode.DISABLED
        self._pool = pool
        self._slot = 0  # holds the newest batch
        self._has_batch = False  # whether the envs have been reset and `_slot` therefore holds a batch
        self._pending: str | None = None  # Gymnasium's name for the call in progress; "send" while envs are in flight
        self._in_flight = np.zeros(self.num_envs, dtype=np.bool_)  # envs between send() and recv()
        self._num_in_flight = 0
        try:
            self._set_spaces(pool.start())
            self._results = ResultAssembler(
                self.single_observation_space,
                num_envs=self.num_envs,
                autoreset_mode=autoreset_mode,
                copy=copy,
                learning_steps=info_memory.LEARNING_STEPS if infos else 0,
            )
            self._bind_memory()
        except BaseException:
            with contextlib.suppress(Exception):
                pool.close(0.0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _set_spaces(self, descriptions: Sequence[EnvDescription]) -> None:
        first, runs = descriptions[0], [run for description in descriptions for run in description.spaces]
        observed, batched, acted = combine_spaces(runs, self.observation_mode, self.num_envs, type(self).__name__)
        self.single_observation_space, self.observation_space = observed, batched
        self.single_action_space, self.action_space = acted, batch_space(acted, self.num_envs)
        self.env_action_space = runs[0].env_action_space
        for run, description in zip(self._pool.ranges, descriptions, strict=True):
            check_groups(first.metadata, description.metadata, run.low)
        self.metadata = {**first.metadata, "autoreset_mode": self.autoreset_mode}
        self._agent_fields = first.agent_fields
        self.render_mode = first.render_mode

    def _bind_memory(self) -> None:
        """Allocates the slots, and binds pool, actions and results to them."""
        rows = layout.env_fields(
            self.single_observation_space,
            self.single_action_space,
            final_observation=self.autoreset_mode == AutoresetMode.SAME_STEP,
            info_keys=self.info_keys,
            agent_fields=self._agent_fields,
        )
        plan = layout.plan(rows, num_slots=self.num_slots, num_envs=self.num_envs)
        block = self._pool.allocate(plan.size)
        self.arrays: dict[Path, np.ndarray] = block.views(plan)
        self.slabs: dict[Path, np.ndarray] = block.slabs(plan)
        self._pool.attach(block, plan)
        self._actions = ActionWriter(self.single_action_space, self.arrays)
        self._results.bind(self.arrays)

    @property
    def info_lists(self) -> bool:
        """Whether `reset` and `step` return infos as a list of one dict per env, as the env returned it. May be set.

        With SAME_STEP, the info of an env whose episode has ended has the key `final_obs`.
        """
        return self._results.info_lists

    @info_lists.setter
    def info_lists(self, value: bool) -> None:
        self._results.info_lists = value

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets every env, or the envs in `options["reset_mask"]`; returns observations and infos."""
        return self._reset_result(self.reset_slot(self._next_slot(), seed=seed, options=options))

    def step(self, actions: Any) -> StepResult:
        """Steps every env; returns observations, float64 rewards[N], bool terminated[N] and truncated[N], infos."""
        # This does not call `step_slot`, because the state must be checked once, before actions are written.
        if self._pending is not None or self._pool.broken:
            self._assert_idle("step")
        slot = (self._slot + 1) % self.num_slots
        unfit = self.put_actions(actions, slot)
        objects = self._pool.step(slot, None if unfit is None else self._split(unfit))
        self._slot, self._has_batch = slot, True
        return self._step_result(objects)

    def reset_slot(
        self, slot: int, *, seed: Seeds = None, options: dict[str, Any] | None = None, timeout: float | None = None
    ) -> StepObjects:
        """Resets the envs and writes the batch to `slot`; returns the objects that are not stored in memory.

        Args:
            slot: The slot to write to.
            seed: As in `reset`.
            options: As in `reset`.
            timeout: Maximum wait in seconds; None for no limit. It has no effect on envs that this process steps.
        """
        self._assert_idle("reset")
        objects = self._pool.reset(slot, self._reset_commands(seed, options), timeout)
        self._slot, self._has_batch = slot, True
        return objects

    def step_slot(self, slot: int, actions: Any = None, *, timeout: float | None = None) -> StepObjects:
        """Steps the envs with the actions in `slot` and writes the batch there; returns objects not stored in memory.

        Args:
            slot: The slot to read from and to write to.
            actions: The result of `put_actions`.
            timeout: Maximum wait in seconds; None for no limit. It has no effect on envs that this process steps.
        """
        if self._pending is not None or self._pool.broken:
            self._assert_idle("step")
        objects = self._pool.step(slot, None if actions is None else self._split(actions), timeout)
        self._slot, self._has_batch = slot, True
        return objects

    def step_group(self, group: int, slot: int, actions: Any = None) -> StepObjects:
        """Steps one of `groups`, as `step_slot` steps all envs. Threads may step different groups concurrently.

        Until all groups have reached the same slot, the only other method that may be called is `put_actions`.

        Raises:
            ValueError: If there is no such group, or if autoreset is disabled, because this method does not check
                whether episodes are over.
        """
        if self._pending is not None or self._pool.broken:
            self._assert_idle("step_group")
        if len(self.groups) == 1:
            raise ValueError("the envs have no groups: pass num_workers=0, num_groups=... to vecenv.AsyncVectorEnv")
        if not 0 <= group < len(self.groups) or self._autoreset_disabled:
            raise ValueError(
                f"group {group} cannot be stepped: use 0 to {len(self.groups) - 1}, with autoreset enabled "
                f"(autoreset_mode is {self.autoreset_mode})"
            )
        objects = self._pool.step_group(group, slot, actions)
        # Owner: from here on, the caller owns the group's rows of this slot.
        self._slot = slot
        return objects

    def put_actions(self, actions: Any, slot: int, env_ids: range | None = None) -> Any:
        """Checks actions for all envs, or for a range of them, and writes them to `slot`.

        Returns:
            None, or the actions if they cannot be stored in memory.

        Raises:
            ValueError: If the shape is wrong or an action is NaN; the message names the env.
            TypeError: If the dtype is of another kind, such as floats for a Discrete space.
            EpisodeOver: If autoreset is disabled and an env's episode is over.
        """
        if self._autoreset_disabled and env_ids is None:
            self._assert_not_over(range(self.num_envs))
        return self._actions.put(actions, slot, env_ids)

    def send(self, actions: Any, env_ids: Sequence[int] | np.ndarray | None = None) -> None:
        """Sends actions to some envs; `recv` returns their results, first come, first served.

        Call `reset` first. Other methods that use envs raise until `recv` has returned the results of all envs in
        flight. With `copy=False`, the envs overwrite the batch that `reset` or `step` returned last.

        Args:
            actions: A batch of M actions.
            env_ids: The M envs that the actions are for, none of which may be in flight; None for all N.

        Raises:
            AlreadyPendingCallError: If one of the envs is in flight, or if another call is pending.
            ValueError: If an id is not in `0 : N` or is repeated, or if the actions do not fit.
        """
        ids = _checked_ids(env_ids, self.num_envs)
        self._assert_open()
        if self._pending not in (None, "send"):
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
        try:
            self._pool.send_rows(self._slot, orders)
            self._in_flight[ids] = True
            self._num_in_flight += len(ids)
            self._pending = "send"
        except Exception:  # nothing was sent, or the error itself has broken the vector env
            raise
        except BaseException:  # Ctrl-C before the commands were sent and recorded
            self._pool.broken = True
            raise

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
        self._assert_open()
        in_flight = self._num_in_flight
        if in_flight == 0:
            raise NoAsyncCallError("Calling `recv` without any prior call to `send`.", "send")
        if min_envs is None:
            min_envs = in_flight
        if not 1 <= min_envs <= in_flight:
            raise ValueError(f"recv({min_envs}): {in_flight} envs are in flight, so use 1 to {in_flight}")
        ids, objects = self._pool.receive_rows(min_envs, timeout)
        try:
            self._in_flight[ids] = False
            self._num_in_flight -= len(ids)
            if self._num_in_flight == 0:
                self._pending = None
            return self._results.of_envs(self._slot, np.array(ids, dtype=np.int64), objects)
        except BaseException:  # the lost results may include the end of an episode
            self._pool.broken = True
            raise

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the method, or reads the attribute, `name` of every env.

        Results from worker processes are copies. An env in this process returns its own objects, which it may change
        later, except the frames of `render`, which are copies, too.
        """
        self._assert_idle("call")
        replies = self._pool.run(Kind.CALL, [CallCommand(name, args, kwargs)] * len(self._pool.ranges))
        return tuple(result for reply in replies for result in reply)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns the attribute `name` of every env."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets the attribute `name`. A list or tuple holds one value per env; any other value is for all envs."""
        self._assert_open()
        values = per_env(values, self.num_envs)
        self._assert_idle("set_attr")
        self._pool.run(Kind.SET_ATTR, [SetAttrCommand(name, values[run.rows]) for run in self._pool.ranges])

    def apply(self, function: Callable[[gym.Env], Any], env_ids: Sequence[int] | None = None) -> list[Any]:
        """Calls `function(env)` in the process of each env, for `env_ids` or all envs; returns the results in order."""
        ids = _checked_ids(env_ids, self.num_envs)
        self._assert_idle("apply")
        chosen = [[i for i in ids if run.low <= i < run.high] for run in self._pool.ranges]
        rows = [[i - run.low for i in envs] for run, envs in zip(self._pool.ranges, chosen, strict=True)]
        replies = self._pool.run(Kind.APPLY, [ApplyCommand(function, some) for some in rows])
        results = {
            i: result
            for envs, reply in zip(chosen, replies, strict=True)
            for i, result in zip(envs, reply, strict=True)
        }
        return [results[i] for i in ids]

    def render(self) -> tuple[Any, ...] | None:
        """Returns the result of `render()` of every env. The caller owns the frames."""
        return self.call("render")

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env, for `set_state` and `vecenv.state.save`.

        A state holds the attributes of the env and its wrappers, their random generators, what autoreset does next,
        the return and length of the episode, and the newest observation. The envs do not change.

        Raises:
            NotRestorable: If the state of an env cannot be restored exactly; the message names the attribute. The
                vector env remains usable.
        """
        return self.get_state_slot(self._slot)

    def get_state_slot(self, slot: int) -> list[dict[str, Any]]:
        """Returns the result of `get_state`, but with the observations from `slot`."""
        self._assert_idle("get_state")
        types = row_types(self.autoreset_mode.value, self.arrays, self._results.object_leaves)
        replies = self._pool.run(Kind.GET_STATE, [None] * len(self._pool.ranges))
        states = [state for reply in replies for state in reply]
        rows: list[dict[str, Any] | None] = [None] * self.num_envs
        if self._has_batch:
            where = {"slot": self._slot, "observed": slot}
            rows = [row_of(self.arrays, self._results.object_leaves, i, **where) for i in range(self.num_envs)]
        return [{"types": types, "row": row, **state} for row, state in zip(rows, states, strict=True)]

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states that `get_state` returned for a vector env that was built in the same way.

        The envs continue exactly as the saved envs did, without a `reset`: `observations` holds the newest batch. The
        number of workers may differ.

        Raises:
            ValueError: If the number of envs, their spaces or the options differ, in which case no env has changed; or
                if the envs themselves differ, in which case some may already be restored: reset or close all envs.
        """
        self.set_state_slot(self._next_slot(), states)

    def set_state_slot(self, slot: int, states: Sequence[dict[str, Any]]) -> None:
        """Restores states as `set_state` does, and writes the observations to `slot`."""
        self._assert_idle("set_state")
        leaves = self._results.object_leaves
        check_states(states, self.num_envs, row_types(self.autoreset_mode.value, self.arrays, leaves))
        self._slot, self._has_batch = slot, states[0]["row"] is not None
        for i, state in enumerate(states if self._has_batch else ()):
            # Owner: the caller, until the message with the states passes the rows of `slot` to the workers.
            write_row(self.arrays, leaves, i, slot, state["row"])
        for key in self.info_keys:  # states omit these infos, so that the keys may differ
            self.arrays[(layout.EPISODE_INFO, key)][slot] = np.nan
        self._pool.set_state(slot, states, begun=self._has_batch)

    @property
    def observations(self) -> Any:
        """The newest batch of observations: `[N, ...]`, views of the memory, nested like the space."""
        return self._results.observations(self._slot)

    @property
    def episode_returns(self) -> np.ndarray:
        """The return of each env's episode so far, and the total at its last step: float64[N], a copy."""
        return self.arrays[layout.EPISODE_RETURN][self._slot].copy()

    @property
    def episode_lengths(self) -> np.ndarray:
        """The length of each env's episode so far, and the total at its last step: int64[N], a copy."""
        return self.arrays[layout.EPISODE_LENGTH][self._slot].copy()

    @property
    def episode_infos(self) -> dict[str, np.ndarray]:
        """For each of `info_keys`, float64[N], a copy: the info's value where the newest step ended an episode.

        NaN where no episode ended, where the last step's info lacks the key, and where a restarted worker cut the
        episode off.
        """
        if not self._has_batch:
            return {key: np.full(self.num_envs, np.nan) for key in self.info_keys}
        ended = self.arrays[layout.TERMINATED][self._slot] | self.arrays[layout.TRUNCATED][self._slot]
        columns = {key: self.arrays[(layout.EPISODE_INFO, key)][self._slot] for key in self.info_keys}
        return {key: np.where(ended, column, np.nan) for key, column in columns.items()}

    def assert_usable(self) -> None:
        """Raises StateError after `close()` or a fault."""
        self._assert_open()

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
        self._pool.broken = True  # `step` then needs to check only this flag
        self._pool.close(0.0)

    def _reset_commands(self, seed: Seeds, options: dict[str, Any] | None) -> list[ResetCommand]:
        seeds = seed_of_each(seed, self.num_envs)
        options, mask = split_reset_mask(options, self.num_envs)
        return [
            ResetCommand(seeds[run.rows], options, None if mask is None else mask[run.rows])
            for run in self._pool.ranges
        ]

    def _split(self, actions: Any) -> list[Any]:
        """Splits a batch of actions that do not fit in memory into one batch per range."""
        if len(self._pool.ranges) == 1:
            return [actions]
        return [self._actions.select(actions, run.rows) for run in self._pool.ranges]

    def _next_slot(self) -> int:
        return (self._slot + 1) % self.num_slots

    def _reset_result(self, objects: StepObjects) -> tuple[Any, dict[str, Any]]:
        try:
            return self._results.after_reset(self._slot, objects)
        except BaseException:
            self._pool.broken = True
            raise

    def _step_result(self, objects: StepObjects) -> StepResult:
        try:
            result = self._results.after_step(self._slot, objects)
            if self._results.learning_steps:
                self._learn_infos(objects)
            return result
        except BaseException:  # Ctrl-C may lose a step's result, and with it the end of an episode
            self._pool.broken = True
            raise

    def _learn_infos(self, objects: StepObjects) -> None:
        """Moves infos from the pipe to memory once all envs have returned the same numeric keys in a step."""
        schema = self._results.learn_infos(objects, batched=self._pool.pickles_infos)
        if schema is None:
            return
        plan = layout.plan(info_memory.info_fields(schema), num_slots=self.num_slots, num_envs=self.num_envs)
        try:
            block = self._pool.allocate(plan.size)
        except SharedMemoryFull:  # no reason to stop a run: the pipe still works, but is slower
            return
        views = block.views(plan)
        self._pool.attach_infos(block, plan, schema)
        self._results.bind_infos(schema, views)

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        return add_info(vector_infos, env_info, env_num, self.num_envs)

    def _assert_open(self) -> None:
        if self.closed:
            raise StateError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")
        if self._pool.broken:
            raise StateError(
                f"`{type(self).__name__}` was broken by an earlier fault. Call `close()` and build a new one."
            )

    def _assert_idle(self, name: str) -> None:
        """Raises unless the method `name` may use the envs now."""
        self._assert_open()
        if self._pending is not None:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._pending}` to complete.", self._pending
            )

    def _assert_not_over(self, env_ids: Sequence[int]) -> None:
        """Raises if autoreset is disabled and an episode of these envs is over."""
        if self._autoreset_disabled and self._has_batch:
            ended = self.arrays[layout.TERMINATED][self._slot] | self.arrays[layout.TRUNCATED][self._slot]
            over = [i for i in env_ids if ended[i]]
            if over:
                raise EpisodeOver(
                    f"the episodes of envs {over} are over, and autoreset is disabled: reset them with "
                    "options={'reset_mask': ...}. No env was stepped."
                )


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
