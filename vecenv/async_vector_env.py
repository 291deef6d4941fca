"""AsyncVectorEnv: Gymnasium's interface over a pool of workers, and what may be called when.

Arrays travel through memory, control through pipes: to step N envs on W workers, W messages of nine
bytes go out and W come back, whatever N and the size of an observation are.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import logger
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode

from vecenv import spaces as tree
from vecenv.asking import AskingVectorEnv
from vecenv.errors import StateError
from vecenv.memory import layout
from vecenv.memory.layout import Layout
from vecenv.rows.arguments import (
    Seeds,
    check_env_fns,
    check_gymnasium_arguments,
    check_worker_arguments,
    seed_of_each,
    split_reset_mask,
)
from vecenv.rows.batch_rows import Batched
from vecenv.rows.batch_spaces import ObservationMode
from vecenv.rows.info_memory import Schema
from vecenv.rows.protocol import NO_OBJECTS, RowsOptions, StepObjects, combined
from vecenv.spaces import Path
from vecenv.workers.in_flight import RowsInFlight
from vecenv.workers.local_pool import LocalPool
from vecenv.workers.pool import WorkerPool, pickled_setups
from vecenv.workers.processes import EnvRange, Worker, spread
from vecenv.workers.protocol import Kind

CLOSE_GRACE_S = 5.0  # how long close() waits for envs to end by themselves before it ends them


_alive: weakref.WeakSet[AsyncVectorEnv] = weakref.WeakSet()


def _break_all() -> None:
    """Breaks inherited vector envs in a forked process, so that `step` need not check the process id."""
    for envs in list(_alive):
        if hasattr(envs, "_pool"):
            envs._break()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_break_all)


class State(Enum):
    """What the parent waits for; the values are Gymnasium's names for it."""

    IDLE = "default"
    RESETTING = "reset"
    STEPPING = "step"
    CALLING = "call"


class AsyncVectorEnv(AskingVectorEnv):
    """Steps its envs in worker processes; a drop-in for `gymnasium.vector.AsyncVectorEnv`.

    Args:
        env_fns: One function per env, each returning a new env with the same spaces; or a `Batched`, of which
            each worker steps all its envs in one call.
        shared_memory: Whether the memory between the processes is the system's shared memory, `/dev/shm`.
            If False, it is an anonymous file, for containers whose `/dev/shm` is small. None
            for the same as True, but True insists: with a space of your own it is Gymnasium's ValueError.
        copy: Whether `reset` and `step` return copies of the observations. If False, they are views
            that stay intact until the step after next is sent (for `num_slots` slots: that many
            steps minus one), but for `send`, which writes over the last one.
        context: Start method: "forkserver", "spawn" or "fork". None for forkserver where there is
            one, else spawn; never fork, because TensorFlow's threads do not survive it.
        daemon: Whether workers are daemonic. Daemonic processes cannot start processes of their own.
        worker: Not supported; the error says what to use instead.
        observation_mode: "same": all observation spaces are equal. "different": their bounds differ, their
            shapes and dtypes do not. Or a pair of spaces: the batched and the single one.
        autoreset_mode: `NEXT_STEP`, `SAME_STEP` or `DISABLED`, as in Gymnasium.
        max_concurrency: At most this many envs are stepped or reset at a time: an upper limit on workers.
        num_workers: Processes to spread the envs over; None for the cores this process may use, but
            never more than there are envs. Worker w owns a contiguous run of envs. With 0 this process steps
            them itself, in `step_wait`: a debugger works in envs, and a timeout does not.
        num_groups: With `num_workers=0`: runs of envs that threads of yours may step at once, by `step_group`.
        num_slots: Slots of the ring that batches are written to, 2 or more.
        clip_actions: Clip Box actions to the env's bounds; the action space becomes unbounded.
        float32_observations: Return float64 observations as float32; non-finite values raise.
        infos: Whether to return infos. If False, they are dropped where they arise.
        on_worker_death: "raise", or "restart": a worker that dies is started again, its envs are built
            anew, and their episodes are truncated with the last good observation. What `set_attr` and the
            like changed in them is lost. `infos["worker_restarted"]` marks them. A call that does this may
            take longer than its timeout.
        start_timeout_s: Seconds for the envs to be constructed; None to wait without end.

    Raises:
        EnvError: If an env raises; the worker's traceback is in the message.
        WorkerDied: If a worker process ends by itself.
        StateError: If something is called after `close()` or after a fault.

    Example:
        >>> import gymnasium as gym
        >>> import vecenv
        >>> envs = vecenv.AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3, num_workers=2)
        >>> observations, infos = envs.reset(seed=42)
        >>> observations, rewards, terminated, truncated, infos = envs.step([0, 1, 1])
        >>> rewards
        array([1., 1., 1.])
        >>> envs.close()
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]] | Batched,
        shared_memory: bool | None = None,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: None = None,
        observation_mode: ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: int | None = None,
        num_groups: int = 1,
        num_slots: int = 2,
        clip_actions: bool = False,
        float32_observations: bool = False,
        infos: bool = True,
        on_worker_death: Literal["raise", "restart"] = "raise",
        start_timeout_s: float | None = 600.0,
    ):
        check_gymnasium_arguments(shared_memory, worker, max_concurrency)
        check_worker_arguments(num_workers, num_groups, on_worker_death=on_worker_death, context=context)
        self.env_fns = check_env_fns(env_fns)
        super().__init__(
            num_envs=len(self.env_fns),
            num_slots=num_slots,
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
            infos=infos,
        )
        self.shared_memory = shared_memory is None or shared_memory
        self.context, self.daemon, self.worker, self.max_concurrency = context, daemon, None, max_concurrency
        self._state = State.IDLE
        self._deadline: float | None = None  # of the step or reset that is being waited for
        self._messages: Sequence[Any] = ()  # what the workers were told last
        options = RowsOptions(self.autoreset_mode, clip_actions, float32_observations, infos)
        _alive.add(self)
        self._pool: WorkerPool | LocalPool
        if num_workers == 0:
            self._pool = LocalPool(self.env_fns, num_groups, options)
        else:
            bounds = spread(self.num_envs, num_workers, max_concurrency)
            self._pool = WorkerPool(
                pickled_setups(self.env_fns, bounds, options),
                bounds,
                context=context,
                daemon=daemon,
                restart=on_worker_death == "restart",
                start_timeout_s=start_timeout_s,
            )
        try:
            self._agree_and_share(
                only_gymnasium_spaces=shared_memory is True,
                restart=on_worker_death == "restart",
                start_timeout_s=start_timeout_s,
            )
        except BaseException:
            self._pool.close(0.0)
            raise

    @property
    def num_workers(self) -> int:
        """How many worker processes there are."""
        return len(self.processes)

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes."""
        return [worker.process for worker in self._pool.workers if isinstance(worker, Worker)]

    def _agree_and_share(self, *, only_gymnasium_spaces: bool, restart: bool, start_timeout_s: float | None) -> None:
        abouts = self._pool.start()
        self._learns_parts = isinstance(self._pool, WorkerPool)
        if restart and not all(about.steps_subsets for about in abouts):
            raise ValueError(
                "on_worker_death='restart' needs a vector env that can step some of its envs: step_rows, see Batched"
            )
        first = abouts[0]
        self._take_spaces([run for about in abouts for run in about.spaces], first.metadata, first.render_mode)
        if only_gymnasium_spaces:
            tree.check_gymnasium_spaces(self.single_observation_space)
        plan = self._plan()
        block = self._pool.block(plan.size, shared_memory=self.shared_memory)
        self._take_memory(block, plan)
        self._pool.attach(block, Kind.ATTACH, plan, doing="construction", timeout=start_timeout_s, revive=None)
        self._rows_in_flight = RowsInFlight(self._pool, self._action_writer, self.arrays, keep=restart)

    def _bind_infos(self, schema: Schema, plan: Layout) -> dict[Path, Any]:
        block = self._pool.block(plan.size, shared_memory=self.shared_memory)
        views = block.views(plan)
        # A worker that is started again attaches all blocks anyhow; it is left with an answer to give.
        nothing = self._pool.message(Kind.APPLY, payload=(None, []))
        self._pool.attach(
            block,
            Kind.ATTACH_INFOS,
            schema,
            plan,
            doing="step",
            timeout=None if self._deadline is None else max(0.0, self._deadline - time.monotonic()),
            revive=lambda worker: (self._resume(worker), nothing),
        )
        return views

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets every env, or those of `options["reset_mask"]`; returns observations and infos."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    def reset_async(self, seed: Seeds = None, options: dict[str, Any] | None = None) -> None:
        """Sends the reset that `reset_wait` answers."""
        self._begin_reset(self._next_slot(), seed, options)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits, at most `timeout` seconds, for the envs; returns observations and infos."""
        return self._reset_result(self._end(State.RESETTING, timeout))

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Steps every env; returns observations, float64 rewards[N], bool terminated[N] and truncated[N], infos."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Sends the actions whose outcome `step_wait` returns."""
        self._assert_idle("step_async")
        slot = self._next_slot()
        self._begin_step(slot, self.put_actions(actions, slot))

    def step_wait(self, timeout: float | None = None) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Waits, at most `timeout` seconds, for the envs; returns what `step` returns."""
        return self._step_result(self._end(State.STEPPING, timeout))

    def reset_slot(
        self, slot: int, *, seed: Seeds = None, options: dict[str, Any] | None = None, timeout: float | None = None
    ) -> StepObjects:
        """Resets the envs and leaves the batch in `slot`; returns what does not lie there."""
        self._begin_reset(slot, seed, options)
        return self._end(State.RESETTING, timeout)

    def step_slot(self, slot: int, actions: Any = None, *, timeout: float | None = None) -> StepObjects:
        """Steps the envs with the actions in `slot` and leaves the batch there; returns what does not lie there."""
        self._assert_idle("step_async")
        self._begin_step(slot, actions)
        return self._end(State.STEPPING, timeout)

    @property
    def groups(self) -> list[range]:
        """Runs of envs that threads of the caller may step at once, by `step_group`; one if none may."""
        local = isinstance(self._pool, LocalPool)
        return [range(group.low, group.high) for group in self._pool.workers] if local else super().groups

    def step_group(self, group: int, slot: int, actions: Any = None) -> StepObjects:
        """Does for one of `groups` what `step_slot` does for all; until all are in one slot, all else is illegal."""
        if not isinstance(self._pool, LocalPool):
            return super().step_group(group, slot, actions)
        self._assert_idle("step_group")
        if group not in range(len(self.groups)) or self.autoreset_mode == AutoresetMode.DISABLED:
            raise ValueError(f"group {group} of {len(self.groups)} cannot be stepped, autoreset={self.autoreset_mode}")
        objects = self._pool.step_group(group, slot, actions)
        # Owner: the group's rows of this slot are the caller's from here on.
        self._slot = slot
        return objects

    def _begin_reset(self, slot: int, seed: Seeds, options: dict[str, Any] | None) -> None:
        self._assert_idle("reset_async")
        seeds = seed_of_each(seed, self.num_envs)
        options, mask = split_reset_mask(options, self.num_envs)
        runs = [slice(worker.low, worker.high) for worker in self._pool.workers]
        payloads = [(seeds[rows], options, None if mask is None else mask[rows]) for rows in runs]
        self._target = slot
        self._command(State.RESETTING, [self._pool.message(Kind.RESET, slot, payload) for payload in payloads])

    def _begin_step(self, slot: int, actions: Any) -> None:
        self._target = slot
        if actions is None:
            messages = [self._pool.message(Kind.STEP, slot)] * len(self._pool.workers)
        else:
            messages = [
                self._pool.message(
                    Kind.STEP, slot, self._action_writer.of_rows(actions, slice(worker.low, worker.high))
                )
                for worker in self._pool.workers
            ]
        self._command(State.STEPPING, messages)

    def _end(self, state: State, timeout: float | None) -> StepObjects:
        self._assert_waiting(state)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        try:
            answers = self._pool.answers(state.value, timeout, self._revive)
        finally:
            if not self._pool.broken:
                self._state = State.IDLE
        objects, workers = NO_OBJECTS, self._pool.workers
        if len(workers) == 1:
            objects = answers[0] or NO_OBJECTS
        elif any(answers):
            objects = combined(
                (w.low, objects) for w, objects in zip(workers, answers, strict=True) if objects is not None
            )
        # Owner: the whole of slot `_target` is the caller's from here on.
        self._slot = self._target
        self._begun = True
        return objects

    def _revive(self, worker: EnvRange) -> tuple[Any, Any]:
        """Returns what a worker that was started again during a step, a reset or a call must be told."""
        return self._resume(worker), self._messages[worker.index]

    def _resume(self, worker: EnvRange) -> Any:
        if not self._begun:
            return None
        rows = slice(worker.low, worker.high)
        ended = self.arrays[layout.TERMINATED][self._slot, rows] | self.arrays[layout.TRUNCATED][self._slot, rows]
        over = ended & (self.autoreset_mode != AutoresetMode.SAME_STEP)
        return self._pool.message(Kind.RESUME, self._slot, over.tolist())

    def _assert_may_send(self) -> None:
        self._assert_open()
        if self._state != State.IDLE:
            self._assert_idle("send")

    def _send_rows(self, env_ids: Sequence[int], unfit: Any) -> None:
        self._rows_in_flight.send(self._slot, env_ids, unfit, self._resume)

    def _receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        return self._rows_in_flight.receive(min_envs, timeout, self._resume)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the method, or reads the attribute, `name` of every env."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Sends the call that `call_wait` answers."""
        self._assert_idle("call_async")
        if name in ("reset", "step", "close"):
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        self._command(
            State.CALLING, [self._pool.message(Kind.CALL, payload=(name, args, kwargs))] * len(self._pool.workers)
        )

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits, at most `timeout` seconds, for what `call_async` asked; returns one result per env."""
        self._assert_waiting(State.CALLING)
        self._state = State.IDLE
        return tuple(result for reply in self._pool.answers("call", timeout, self._revive) for result in reply)

    def _ask(self, doing: str, messages: Sequence[Any]) -> list[Any]:
        self._command(State.CALLING, messages)
        self._state = State.IDLE
        return self._pool.answers(doing, None, self._revive)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the workers: asks them, waits `timeout` seconds (None: 5), then ends them by force.

        Args:
            timeout: Seconds for the envs to finish a pending call and to close themselves.
            terminate: Do not wait at all.
        """
        if self._is_foreign():
            return  # workers, pipes and memory belong to the parent
        grace_s = CLOSE_GRACE_S if timeout is None else timeout
        pending = self._state.value if self._state != State.IDLE else "send" if self._num_in_flight else None
        if pending and not self._pool.broken:
            logger.warn(f"Calling `close` while waiting for a pending call to `{pending}` to complete.")
        self._pool.close(0.0 if terminate else grace_s)

    @property
    def _broken(self) -> bool:
        return self._pool.broken

    def _break(self) -> None:
        self._pool.broken = True

    def _is_foreign(self) -> bool:
        return os.getpid() != self._creator

    def _assert_open(self) -> None:
        if self._is_foreign():
            raise StateError(
                f"this `{type(self).__name__}` belongs to process {self._creator}, of which this process "
                f"({os.getpid()}) is a fork. Build another vector env in this process."
            )
        super()._assert_open()

    def _assert_idle(self, name: str) -> None:
        if self._state is State.IDLE and not (self._num_in_flight or self._pool.broken or self.closed):
            return
        super()._assert_idle(name)
        if self._state != State.IDLE:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._state.value}` to complete.",
                self._state.value,
            )

    def _assert_waiting(self, state: State) -> None:
        if self._state is state and not (self._pool.broken or self.closed):
            return
        self._assert_open()
        if self._state != state:
            raise NoAsyncCallError(
                f"Calling `{state.value}_wait` without any prior call to `{state.value}_async`.", state.value
            )

    def _command(self, state: State, messages: Sequence[Any]) -> None:
        """Sends each worker its message; they are encoded before the first is sent, so all go or none."""
        self._state = state
        self._messages = messages
        self._pool.tell(messages, state.value, self._revive)
