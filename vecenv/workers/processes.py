"""Starting the worker processes of a vector env, and reliably shutting all of them down."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec

from vecenv.by_value import identify_classes, identity_of
from vecenv.errors import SharedMemoryFull, VecEnvError, WorkerDied
from vecenv.rows.batched import Batched
from vecenv.rows.messages import RowsOptions
from vecenv.workers import launch
from vecenv.workers import worker as worker_module
from vecenv.workers.launch import check_not_daemonic, start_method
from vecenv.workers.logs import log_settings
from vecenv.workers.messenger import END_S, BadMessage, DeadlinePassed, Messenger, WorkerGone, WorkerHandle, sentinel_of
from vecenv.workers.pickling import Importable, dumps, dumps_with_classes, picklable
from vecenv.workers.pipes import BadFrame, Channel, Deadline
from vecenv.workers.pool import EnvRange
from vecenv.workers.protocol import ERROR, Build, Kind, Message, StartCommand, decode, encode

REMEDY = (
    "Create it inside the function, so that each env has its own, or move what uses it to a module, which workers "
    "import. num_workers=0 and context='fork' do not pickle functions; with either, envs can share "
    "multiprocessing objects, such as a Value."
)


def foreign_specs() -> list[EnvSpec]:
    """Returns the registered env specs that are not from Gymnasium or vecenv. Workers may need them.

    A spec that cannot be pickled is replaced by one whose env raises VecEnvError when it is made.
    """
    specs = []
    for spec in gym.registry.values():
        ours = isinstance(spec.vector_entry_point, str) and spec.vector_entry_point.startswith("vecenv.")
        if ours or (isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.envs")):
            continue
        specs.append(spec)
    return specs if picklable(specs) else [spec if picklable(spec) else _refusing(spec) for spec in specs]


def _refusing(spec: EnvSpec) -> EnvSpec:
    """Returns a spec to send instead of one that cannot be pickled. Making its env raises an error that says why."""
    try:
        dumps(spec, REMEDY, {f"the spec of {spec.id!r}": spec})
    except TypeError as error:
        return EnvSpec(spec.id, partial(_refuse, str(error)))
    return spec


def _refuse(message: str, **_: Any) -> gym.Env:
    raise VecEnvError(message)


_last_seed = (0, 0)  # the entropy of the last global seed, and how many seeds before it had the same


def _next_global_seed() -> list[int]:
    """Returns a seed for a worker's global generators, derived from the state of this process's generators.

    Envs that use these generators are reproducible if this process has seeded them. Successive workers get different
    seeds, which are repeated only after this process has set its generators back to an earlier state.
    """
    global _last_seed
    state = pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))
    entropy = int.from_bytes(hashlib.blake2b(state).digest())
    before, count = _last_seed
    _last_seed = (entropy, count + 1 if entropy == before else 0)
    return np.random.SeedSequence(_last_seed).generate_state(8).tolist()


class WorkerStarter:
    """Starts the workers of one vector env, and holds what each of them builds."""

    def __init__(
        self,
        env_fns: Sequence[Callable] | Batched,
        ranges: Sequence[EnvRange],
        options: RowsOptions,
        worker_init: Callable[[], object] | None,
        *,
        context: str | None,
        daemon: bool,
        spin: bool,
    ):
        check_not_daemonic()
        self._method, self._daemon, self._spin = start_method(context), daemon, spin
        # What each worker builds: pickled, or as objects that a fork inherits. The data of its closures may be large.
        self._pickled: dict[int, bytes] = {}
        self._inherited: dict[int, Build] = {}
        # The classes in the pickles, kept while workers run, because replies refer to them by identity.
        self._classes: dict[int, list[type]] = {}
        forks = self._method == "fork"
        specs, logs = ([], None) if forks else (foreign_specs(), log_settings())
        if forks:
            identify_classes(Importable())
        for run in ranges:
            how = replace(options, own_copies=run.high - run.low > 1)  # the envs of a worker share this pickle
            build = Build(logs, specs, worker_init, env_fns[run.rows], run.low, how)
            if forks:
                self._inherited[run.index] = build
            else:
                # One pickle, so that objects that both use, such as globals of a script, stay the same objects.
                index, parts = run.index, _parts(env_fns, run, worker_init)
                self._pickled[index], self._classes[index] = dumps_with_classes(build, REMEDY, parts)

    def start(self, run: EnvRange, others: Sequence[WorkerHandle]) -> WorkerHandle:
        """Starts the process of one worker, which then waits for START; `others` are the existing workers.

        Raises WorkerDied if the process ends before it has started.
        """
        ours, theirs = multiprocessing.Pipe(duplex=True)
        channel = Channel(ours)
        # A fork copies the parent's ends of all pipes. With forkserver and spawn, a worker receives only its own end.
        inherited = [*(worker.channel for worker in others), channel] if self._method == "fork" else []
        arguments = (theirs, inherited, self._spin, self._inherited.get(run.index))
        try:
            name = f"vecenv-worker-{run.index}"
            process = launch.start_process(self._method, worker_module.run, arguments, name=name, daemon=self._daemon)
        except BaseException as error:
            channel.close()
            if not isinstance(error, (OSError, EOFError)):
                raise
            raise WorkerDied(
                f"worker {run.index} (envs {run.low}:{run.high}) ended during startup ({type(error).__name__}: "
                f"{error}). It was killed from outside, or the system cannot create another process or file, or lacks "
                "the memory: lower num_workers, or raise the limits that `ulimit -u`, `ulimit -n` and `ulimit -v` show."
            ) from error
        finally:
            theirs.close()
        return WorkerHandle(run.index, run.low, run.high, process, channel, sentinel_of(process))

    def start_frame(self, index: int, next_step: list[int] | None = None, *, again: bool) -> bytes:
        """Returns the frame of START for one worker. Without `again`, forgets the pickle; see `StartCommand`."""
        pickled = self._pickled.get(index) if again else self._pickled.pop(index, None)
        classes = frozenset(name for cls in self._classes.get(index, ()) if (name := identity_of(cls)))
        seed = _next_global_seed()
        return encode(Kind.START, payload=StartCommand(launch.environment(), seed, pickled, classes, next_step))


def _parts(env_fns: Sequence[Callable] | Batched, run: EnvRange, worker_init: Any) -> dict[str, Any]:
    """Returns the functions that a worker receives, by name."""
    if isinstance(env_fns, Batched):
        return {"env_fns": env_fns, "worker_init": worker_init}
    return {
        **{f"env_fns[{run.low + i}]": env_fn for i, env_fn in enumerate(env_fns[run.rows])},
        "worker_init": worker_init,
    }


def shut_down(workers: list[WorkerHandle], grace_s: float) -> None:
    """Asks every worker to exit, and kills the workers that still run after `grace_s` seconds (0: at once).

    Never blocks forever. Dead workers may be in the list, which is empty afterwards.
    """
    errors: list[str] = []
    grace = Deadline(grace_s)
    if grace_s > 0:
        _ask_to_close(workers, grace, errors)
    alive = _running_after(workers, grace)
    for worker in alive:
        worker.kill()
    _running_after(alive, Deadline(END_S))
    while workers:
        worker = workers.pop()
        with contextlib.suppress(OSError, EOFError, BadFrame, SharedMemoryFull):  # the end of the pipe, half a message
            while message := worker.channel.take():
                _note_error(worker, message, errors)
        worker.release()
    for error in errors:
        logger.warn(error)


def _ask_to_close(workers: Sequence[WorkerHandle], deadline: Deadline, errors: list[str]) -> None:
    """Sends CLOSE and reads messages until all pipes are closed; adds a warning for each env whose close() raised."""
    messenger = Messenger(workers, spin=False)
    open_pipes = {worker.index for worker in workers}

    def forget(worker: WorkerHandle) -> None:
        messenger.forget(worker)
        open_pipes.discard(worker.index)

    messenger.send([(worker, encode(Kind.CLOSE)) for worker in workers])
    while open_pipes and deadline.slice():
        try:
            # Stale replies are read too: a worker that blocks on writing one would never read CLOSE.
            for worker, message in messenger.messages(deadline):
                _note_error(worker, message, errors)
        except WorkerGone as gone:
            forget(gone.worker)
        except BadMessage as error:  # the worker may be blocked, because the pipe is full and no longer read
            forget(error.worker)
            error.worker.channel.close()
        except (DeadlinePassed, SharedMemoryFull):
            break


def _note_error(worker: WorkerHandle, message: Message, errors: list[str]) -> None:
    """Adds a warning if a message reports that an env's close() has raised."""
    kind, _, payload = message
    if kind == ERROR:
        with contextlib.suppress(Exception):  # a reply that cannot be unpickled here
            reply = decode(payload)
            if reply.doing == "close":
                errors.append(f"worker {worker.index}: an env raised in close():\n{reply.traceback}")


def _running_after(workers: Sequence[WorkerHandle], deadline: Deadline) -> list[WorkerHandle]:
    """Waits for the workers to end; returns those that still run when the deadline has passed."""
    running = list(workers)
    while running:
        left = deadline.slice()
        ended = wait([worker.sentinel for worker in running], timeout=left)
        running = [worker for worker in running if worker.sentinel not in ended]
        if not left:
            break
    return running
