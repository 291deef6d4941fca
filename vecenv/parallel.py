"""parallel.py: AsyncVectorEnv: the parent's end of the protocol in `messages.py`; `worker.py` is the other.

Arrays travel through memory, control through pipes: to step N envs on W workers, W messages of five
bytes go out and W come back, whatever N and the size of an observation are.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from enum import Enum
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium import logger
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode

from vecenv.base import RowsVectorEnv, Seeds, check_env_fns, per_env
from vecenv.errors import EnvError, StateError, WorkerDied, env_error
from vecenv.infos import Infos, Schema
from vecenv.layout import Layout, Path
from vecenv.memory import Block
from vecenv.messages import Failure, Kind, Waiter, encode, receive, send
from vecenv.processes import Worker, available_cores, foreign_specs, shut_down, spread, start_workers
from vecenv.rows import different_spaces

CLOSE_GRACE_S = 5.0  # how long close() waits for envs to end by themselves before it ends them


class State(Enum):
    """What the parent waits for; the values are Gymnasium's names for it."""

    IDLE = "default"
    RESETTING = "reset"
    STEPPING = "step"
    CALLING = "call"
    BROKEN = "broken"  # after a fault: replies may be under way, so nothing but close() is legal


class AsyncVectorEnv(RowsVectorEnv):
    """Steps its envs in worker processes; a drop-in for `gymnasium.vector.AsyncVectorEnv`.

    Args:
        env_fns: One function per env, each returning a new env with the same spaces.
        num_workers: Processes to spread the envs over; None for the cores this process may use, but
            never more than there are envs. Worker w owns a contiguous run of envs.
        copy: Whether `reset` and `step` return copies of the observations. If False, they are views
            that stay intact until the step after next is sent (for `num_slots` slots: that many
            steps minus one).
        context: Start method: "forkserver", "spawn" or "fork". None for forkserver where there is
            one, else spawn; never fork, because TensorFlow's threads do not survive it.
        daemon: Whether workers are daemonic. Daemonic processes cannot start processes of their own.
        autoreset_mode: `NEXT_STEP`, `SAME_STEP` or `DISABLED`, as in Gymnasium.
        num_slots: Slots of the ring that batches are written to, 2 or more.
        clip_actions: Clip Box actions to the env's bounds; the action space becomes unbounded.
        float32_observations: Return float64 observations as float32; non-finite values raise.
        infos: Whether to return infos. If False, they are dropped where they arise.

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
        env_fns: Sequence[Callable[[], gym.Env]],
        *,
        num_workers: int | None = None,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        num_slots: int = 2,
        clip_actions: bool = False,
        float32_observations: bool = False,
        infos: bool = True,
    ):
        self.env_fns = check_env_fns(env_fns)
        super().__init__(
            num_envs=len(self.env_fns), num_slots=num_slots, copy=copy, autoreset_mode=autoreset_mode, infos=infos
        )
        bounds = spread(self.num_envs, num_workers)
        options = {
            "autoreset_mode": self.autoreset_mode,
            "clip_actions": clip_actions,
            "float32_observations": float32_observations,
            "infos": infos,
        }
        spin = len(bounds) <= available_cores()
        specs = foreign_specs()
        setups = [
            cloudpickle.dumps(({"env_fns": self.env_fns[low:high], "first_env": low, **options}, specs))
            for low, high in bounds
        ]
        self._state = State.IDLE
        self._replies: dict[int, Any] = {}
        self._workers: list[Worker] = []
        # A module function and a list, not a method: a finalizer that held `self` would keep it alive.
        # multiprocessing's own kind, because at exit it runs before multiprocessing joins all children,
        # and because it does nothing in a process that was forked from this one.
        self._finalizer = Finalize(self, shut_down, args=(self._workers, 0.0), exitpriority=10)
        try:
            start_workers(self._workers, setups, bounds, context=context, daemon=daemon, spin=spin)
            self._waiter = Waiter(
                [w.connection for w in self._workers] + [w.sentinel for w in self._workers], spin=spin
            )
            self._agree_on_spaces()
            self._share_memory()
        except BaseException:
            self._finalizer()
            raise

    @property
    def num_workers(self) -> int:
        """How many worker processes there are."""
        return len(self._workers)

    def _agree_on_spaces(self) -> None:
        about = self._collect("construction", timeout=None)
        observation_space, action_space, metadata, self.render_mode = about[0]
        for worker, (theirs_observed, theirs_acted, *_) in zip(self._workers, about, strict=True):
            for kind, ours, theirs in (
                ("observation_space", observation_space, theirs_observed),
                ("action_space", action_space, theirs_acted),
            ):
                if ours != theirs:
                    raise RuntimeError(different_spaces(kind, worker.low, theirs, 0, ours))
        self._take_spaces(observation_space, action_space, metadata)

    def _share_memory(self) -> None:
        plan = self._plan()
        with closing(Block.create(plan.size)) as block:
            self._offer(block, Kind.ATTACH, plan)
            self._take_memory(block, plan)

    def _bind_infos(self, schema: Schema, plan: Layout) -> dict[Path, Any]:
        with closing(Block.create(plan.size)) as block:
            self._offer(block, Kind.ATTACH_INFOS, schema, plan)
            return block.views(plan)

    def _offer(self, block: Block, kind: Kind, *payload: Any) -> None:
        """Has every worker attach the block and waits until they have."""
        for worker in self._workers:
            self._send(worker, encode(kind, payload=(*payload, worker.low, worker.high)))
            try:
                block.send(worker.connection, worker.process.pid)
            except OSError as error:
                raise self._died(worker, "construction") from error
        self._collect("construction", timeout=None)

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

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps every env; returns observations, float64 rewards[N], bool terminated[N] and truncated[N], infos."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Sends the actions whose outcome `step_wait` returns."""
        self._assert_idle("step_async")
        slot = self._next_slot()
        self._begin_step(slot, self.put_actions(actions, slot))

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Waits, at most `timeout` seconds, for the envs; returns what `step` returns."""
        return self._step_result(self._end(State.STEPPING, timeout))

    def reset_slot(
        self, slot: int, *, seed: Seeds = None, options: dict[str, Any] | None = None, timeout: float | None = None
    ) -> Infos:
        """Resets the envs and leaves the batch in `slot`; returns the infos that are not empty, by env."""
        self._begin_reset(slot, seed, options)
        return self._end(State.RESETTING, timeout)

    def step_slot(self, slot: int, actions: Any = None, *, timeout: float | None = None) -> Infos:
        """Steps the envs with the actions in `slot` and leaves the batch there; returns the infos, by env."""
        self._begin_step(slot, actions)
        return self._end(State.STEPPING, timeout)

    def _begin_reset(self, slot: int, seed: Seeds, options: dict[str, Any] | None) -> None:
        self._assert_idle("reset_async")
        seeds = self._seeds(seed)
        options, mask = self._reset_mask(options)
        runs = [slice(worker.low, worker.high) for worker in self._workers]
        payloads = [(seeds[rows], options, None if mask is None else mask[rows]) for rows in runs]
        self._target = slot
        self._command(State.RESETTING, [encode(Kind.RESET, slot, payload) for payload in payloads])

    def _begin_step(self, slot: int, actions: Any) -> None:
        self._assert_idle("step_async")
        self._target = slot
        if actions is None:
            messages = [encode(Kind.STEP, slot)] * len(self._workers)
        else:
            messages = [encode(Kind.STEP, slot, self._rows_of(actions, worker)) for worker in self._workers]
        self._command(State.STEPPING, messages)

    def _rows_of(self, actions: Any, worker: Worker) -> Any:
        if isinstance(actions, dict):
            return {key: self._rows_of(value, worker) for key, value in actions.items()}
        if isinstance(actions, tuple):
            return tuple(self._rows_of(value, worker) for value in actions)
        return actions[worker.low : worker.high]

    def _end(self, state: State, timeout: float | None) -> Infos:
        self._assert_waiting(state)
        infos: Infos = []
        for worker, reply in zip(self._workers, self._collect(state.value, timeout), strict=True):
            infos += [(worker.low + row, info) for row, info in reply or ()]
        self._state = State.IDLE
        # Owner: the whole of slot `_target` is the caller's from here on.
        self._slot = self._target
        return infos

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the method, or reads the attribute, `name` of every env."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Sends the call that `call_wait` answers."""
        self._assert_idle("call_async")
        if name in ("reset", "step", "close"):
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        self._command(State.CALLING, [encode(Kind.CALL, payload=(name, args, kwargs))] * len(self._workers))

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits, at most `timeout` seconds, for what `call_async` asked; returns one result per env."""
        self._assert_waiting(State.CALLING)
        results = tuple(result for reply in self._collect("call", timeout) for result in reply)
        self._state = State.IDLE
        return results

    def set_attr(self, name: str, values: Any) -> None:
        """Sets the attribute `name`: a list or tuple gives one value for each env, anything else is for all."""
        self._assert_open()
        values = per_env(values, self.num_envs)
        self._assert_idle("set_attr")
        payloads = [(name, values[worker.low : worker.high]) for worker in self._workers]
        self._command(State.CALLING, [encode(Kind.SET_ATTR, payload=payload) for payload in payloads])
        self._collect("set_attr", None)
        self._state = State.IDLE

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ends the workers: asks them, waits `timeout` seconds (None: 5), then ends them by force.

        Args:
            timeout: Seconds for the envs to finish a pending call and to close themselves.
            terminate: Do not wait at all.
        """
        grace_s = CLOSE_GRACE_S if timeout is None else timeout
        if self._state not in (State.IDLE, State.BROKEN):
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete.")
        shut_down(self._workers, 0.0 if terminate else grace_s)
        self._finalizer.cancel()

    def _assert_open(self) -> None:
        super()._assert_open()
        if self._state == State.BROKEN:
            raise StateError(
                f"`{type(self).__name__}` was broken by an earlier fault. Call `close()` and build a new one."
            )

    def _assert_idle(self, name: str) -> None:
        self._assert_open()
        if self._state != State.IDLE:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._state.value}` to complete.",
                self._state.value,
            )

    def _assert_waiting(self, state: State) -> None:
        self._assert_open()
        if self._state != state:
            raise NoAsyncCallError(
                f"Calling `{state.value}_wait` without any prior call to `{state.value}_async`.", state.value
            )

    def _command(self, state: State, messages: Sequence[bytes]) -> None:
        """Sends each worker its message; they are encoded before the first is sent, so all go or none."""
        self._state = state
        for worker, message in zip(self._workers, messages, strict=True):
            self._send(worker, message)

    def _send(self, worker: Worker, message: bytes) -> None:
        try:
            send(worker.connection, message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._died(worker, self._state.value) from error

    def _collect(self, doing: str, timeout: float | None) -> list[Any]:
        """Waits for one reply of each worker and returns the payloads, in the order of the workers.

        Raises:
            EnvError: If a reply is an error; at once, but for calls, which leave no env in between.
            WorkerDied: If a process ends, at once.
            multiprocessing.TimeoutError: If a reply is missing after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: dict[int, Any] = {}
        failure: Failure | None = None
        state, self._state = self._state, State.BROKEN  # whatever interrupts the wait, Ctrl-C included
        while len(replies) < len(self._workers):
            ready = self._waiter.ready(deadline)
            if not ready:
                raise multiprocessing.TimeoutError(self._late(doing, timeout, replies))
            # Pipes come before sentinels in the waiter, so the last words of a dead worker are read first.
            for index in sorted(ready):
                worker = self._workers[index % len(self._workers)]
                if index >= len(self._workers):
                    if worker.index not in replies:
                        raise self._died(worker, doing)
                    continue
                try:
                    kind, _, replies[index] = receive(worker.connection)
                except (EOFError, OSError) as error:
                    raise self._died(worker, doing) from error
                if kind == Kind.ERROR:
                    failed, failure = worker, replies[index]
                    if doing not in ("call", "set_attr"):
                        raise self._failed(failed, failure)
        self._state = state
        if failure is not None:
            self._state = State.IDLE  # every worker has answered, and no env was left between two states
            raise self._failed(failed, failure)
        return [replies[index] for index in range(len(self._workers))]

    def _failed(self, worker: Worker, failure: Failure) -> EnvError:
        try:
            exception_type = None if failure.exception is None else pickle.loads(failure.exception)
        except Exception:  # its module cannot be imported here
            exception_type = None
        who = f"envs {worker.low}:{worker.high}" if failure.env is None else f"env {failure.env}"
        return env_error(
            exception_type,
            f"{who} in worker {worker.index} raised during {failure.doing}:\n\n{failure.traceback}\n"
            "Mend the env (its traceback is above), then build the vector env anew.",
        )

    def _died(self, worker: Worker, doing: str) -> WorkerDied:
        self._state = State.BROKEN
        return WorkerDied(
            f"worker {worker.index} (envs {worker.low}:{worker.high}) {worker.how_it_ended()} during {doing}. "
            "Close this vector env and build a new one."
        )

    def _late(self, doing: str, timeout: float | None, replies: dict[int, Any]) -> str:
        late = [w for w in self._workers if w.index not in replies]
        who = ", ".join(f"worker {w.index} (envs {w.low}:{w.high})" for w in late)
        return (
            f"The call to `{doing}_wait` has timed out after {timeout} second(s): no answer from {who}. "
            "Close this vector env and build a new one."
        )
