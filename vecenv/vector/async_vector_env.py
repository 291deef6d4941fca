"""AsyncVectorEnv: steps its envs in worker processes, with `step_async`, `step_wait` and timeouts.

Arrays travel through memory, control through pipes. A step on W workers sends W messages of nine bytes and receives W
replies, regardless of the number of envs and the size of their observations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import logger
from gymnasium.error import NoAsyncCallError
from gymnasium.vector import AutoresetMode

from vecenv import tree
from vecenv.resources import available_cores
from vecenv.rows.arguments import Seeds, autoreset_mode_of, check_functions, check_info_keys
from vecenv.rows.batched import Batched
from vecenv.rows.messages import RowsOptions
from vecenv.vector.results import StepResult
from vecenv.vector.vector_env import FAILED_GRACE_S, ObservationMode, PooledVectorEnv, State
from vecenv.workers.local_pool import LocalPool
from vecenv.workers.pool import Pool, spread
from vecenv.workers.process_pool import ProcessPool
from vecenv.workers.protocol import CALL, RESET, STEP, CallCommand

CLOSE_GRACE_S = 5.0  # how long close() waits for workers to exit before it kills them


class AsyncVectorEnv(PooledVectorEnv):
    """Steps its envs in worker processes; a drop-in replacement for `gymnasium.vector.AsyncVectorEnv`.

    Whatever the number of workers, each env has its own copies of all that its function captures, and of the options,
    attributes and arguments that it is given. The envs of one process share modules, globals and class attributes.

    Args:
        env_fns: One function per env, each returning a new env with the same spaces; or a `Batched`, with which
            each worker steps all its envs in one call.
        shared_memory: Whether the memory is in `/dev/shm`. If False, or if `/dev/shm` has no room, it is an anonymous
            file. None behaves like True, except that True raises Gymnasium's ValueError for a custom space.
        copy: Whether `reset` and `step` return copies of the observations. If False, they return views, which
            stay intact for the next `num_slots - 1` steps. `send` overwrites the newest view.
        context: Start method: "forkserver" (also for None), "spawn" or "fork", which TensorFlow's threads do not
            survive.
        daemon: The flag `daemon` of the worker processes. Envs may start processes, whatever its value.
        worker: Not supported; the error says what to use instead.
        observation_mode: "same": all observation spaces are equal. "different": their bounds may differ, but not their
            shapes and dtypes. A pair of spaces: the batched and the single observation space to use.
        autoreset_mode: `NEXT_STEP`, `SAME_STEP` or `DISABLED`, as in Gymnasium.
        max_concurrency: Upper limit on the number of workers, and thus on the number of envs stepped at the same time.
        num_workers: Number of processes. None: one per core that this process may use, but at most one per env.
            Each worker owns a contiguous range of envs. With 0, `step_wait` steps the envs in this process: debuggers
            work inside envs, timeouts have no effect, and envs share objects that cannot be pickled.
        num_slots: Number of slots in the ring buffer of batches, 2 or more.
        clip_actions: Clip Box actions to the bounds that all envs share; the action space becomes unbounded.
        float32_observations: Return float64 observations as float32; non-finite values raise.
        finite_observations: Raise if an observation is not finite.
        infos: Whether to return infos. If False, infos are discarded as soon as an env returns them.
        info_keys: Infos whose values `episode_infos` returns for each episode, even with `infos=False`: "KEY" for the
            value at the last step, "KEY:sum" or "KEY:mean" for the sum or the mean over the steps that have the key
            ("KEY:last" for a key that itself ends in ":sum" or ":mean").
            "outer/inner" is the key `inner` of the dict under `outer`. Values must be real numbers or bools.
        on_worker_death: "raise", or "restart": a worker that dies is restarted, its envs are built again, and their
            episodes are truncated with the last complete observation and `infos["worker_restarted"]`. Attributes set
            with `set_attr` are lost. A call that restarts a worker may exceed its timeout.
        start_timeout_s: Seconds to wait for the envs to be constructed; None to wait forever.
        worker_init: Called without arguments in each worker before it builds its envs, also after a restart, for
            example to configure modules as in this process. Pickled together with the env functions. Not called
            without workers.

    Raises:
        EnvError: If an env raises in a worker; the message holds the worker's traceback. With `num_workers=0`, the
            env's own exception propagates.
        WorkerDied: If a worker process ends unexpectedly.
        StateError: If a method is called after `close()` or after a fault.

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
        num_slots: int = 2,
        clip_actions: bool = False,
        float32_observations: bool = False,
        finite_observations: bool = False,
        infos: bool = True,
        info_keys: Sequence[str] = (),
        on_worker_death: Literal["raise", "restart"] = "raise",
        start_timeout_s: float | None = 600.0,
        worker_init: Callable[[], object] | None = None,
    ):
        _check_gymnasium_arguments(shared_memory, worker, max_concurrency)
        if on_worker_death not in ("raise", "restart"):
            raise ValueError(f"on_worker_death={on_worker_death!r}: use 'raise' or 'restart'")
        if worker_init is not None and not callable(worker_init):
            raise TypeError(f"worker_init={worker_init!r} is not a function: pass a function without arguments")
        for name, value, default in (("on_worker_death", on_worker_death, "raise"), ("context", context, None)):
            if num_workers == 0 and value != default:
                raise ValueError(f"{name}={value!r} needs worker processes, but num_workers=0 starts none")
        self.env_fns = env_fns if isinstance(env_fns, Batched) else check_functions(env_fns)
        self.shared_memory = shared_memory is None or shared_memory
        self.context, self.daemon, self.worker, self.max_concurrency = context, daemon, None, max_concurrency
        self.on_worker_death = on_worker_death
        options = RowsOptions(
            autoreset_mode_of(autoreset_mode),
            clip_actions=clip_actions,
            float32_observations=float32_observations,
            finite_observations=finite_observations,
            infos=infos,
            info_keys=check_info_keys(info_keys),
        )
        if num_workers is None:
            num_workers = min(available_cores(), len(self.env_fns))
        pool: Pool
        if num_workers == 0:
            pool = LocalPool(self.env_fns, replace(options, own_copies=True))
        else:
            pool = ProcessPool(
                self.env_fns,
                spread(len(self.env_fns), num_workers, max_concurrency),
                options,
                context=context,
                daemon=daemon,
                shared_memory=self.shared_memory,
                restart=on_worker_death == "restart",
                start_timeout_s=start_timeout_s,
                worker_init=worker_init,
            )
        super().__init__(pool, options, num_slots=num_slots, copy=copy, observation_mode=observation_mode)
        if shared_memory is True:
            try:
                tree.check_gymnasium_spaces(self.single_observation_space)
            except BaseException:
                pool.close(FAILED_GRACE_S)
                raise

    @property
    def num_workers(self) -> int:
        """The number of worker processes."""
        return len(self.processes)

    @property
    def processes(self) -> list[BaseProcess]:
        """The worker processes."""
        return self._pool.processes

    def reset_async(self, seed: Seeds = None, options: dict[str, Any] | None = None) -> None:
        """Begins the reset whose results `reset_wait` returns."""
        self._assert_idle("reset")
        self._begin_reset(self._next_slot(), seed, options)

    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Waits at most `timeout` seconds for the envs; returns observations and infos.

        Raises:
            multiprocessing.TimeoutError: If a worker has not replied in time. The vector env can then only be closed.
        """
        self._assert_pending(State.RESET)
        return self._finish_batch(RESET, self._results.after_reset, timeout)

    def step_async(self, actions: Any) -> None:
        """Begins the step whose results `step_wait` returns."""
        self._begin_step(actions, self._next_slot())

    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Waits at most `timeout` seconds for the envs; returns the result of `step`. Raises what `reset_wait` does."""
        self._assert_pending(State.STEP)
        return self._finish_batch(STEP, self._results.after_step, timeout)

    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Begins the call whose results `call_wait` returns."""
        self._assert_idle("call")
        if name in ("reset", "step", "close"):
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        self._begin(CALL, 0, [CallCommand(name, args, kwargs)] * len(self._pool.ranges), State.CALL)

    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Waits at most `timeout` seconds for the call that `call_async` began; returns one result per env.

        Raises what `reset_wait` does.
        """
        self._assert_pending(State.CALL)
        results = tuple(result for reply in self._finish(CALL, timeout) for result in reply)
        self._state = State.IDLE
        return results

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the method, or reads the attribute, `name` of every env."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    def close_extras(  # type: ignore[override]  # Gymnasium's AsyncVectorEnv has these arguments
        self, timeout: float | None = None, terminate: bool = False
    ) -> None:
        """Asks the workers to exit, waits up to `timeout` seconds (None: 5), then kills them.

        With `terminate`, kills them at once.
        """
        if self._state is State.FORKED:
            return
        if self._state not in (State.IDLE, State.BROKEN, State.CLOSED):  # CLOSED: an interrupt has ended a `close`
            logger.warn(f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete.")
        self._state = State.CLOSED
        self._pool.close(0.0 if terminate else CLOSE_GRACE_S if timeout is None else timeout)

    def _assert_idle(self, name: str) -> None:
        # Gymnasium's messages name the method that begins the call.
        super()._assert_idle(f"{name}_async" if name in ("reset", "step", "call") else name)

    def _assert_pending(self, call: State) -> None:
        """Raises unless `call` is pending."""
        if self._state is not call:
            self._assert_open()
            raise NoAsyncCallError(
                f"Calling `{call.value}_wait` without any prior call to `{call.value}_async`.", call.value
            )


def _check_gymnasium_arguments(shared_memory: Any, worker: Any, max_concurrency: Any) -> None:
    """Raises if an argument of Gymnasium's AsyncVectorEnv has a value that vecenv does not support."""
    if not isinstance(shared_memory, bool | np.bool_ | None):
        raise TypeError(
            f"shared_memory={shared_memory!r} is not True, False or None. As in Gymnasium, it is the second "
            "argument; pass num_workers by name: AsyncVectorEnv(env_fns, num_workers=4)"
        )
    if worker is not None:
        raise ValueError(
            "worker= is not supported: a worker of vecenv steps many envs, which a worker function written for "
            "Gymnasium cannot do. To change what an env does, wrap it in env_fns; to change what happens at the end of "
            "an episode, use autoreset_mode; to step many envs in one call, pass a vecenv.Batched."
        )
    if max_concurrency is not None:
        if not isinstance(max_concurrency, (int, np.integer)):
            raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
        if max_concurrency < 1:
            raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
