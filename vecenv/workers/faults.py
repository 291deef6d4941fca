"""The errors that a pool of worker processes raises: what happened, which worker and envs, and what to do."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import sys
from collections.abc import Iterable
from typing import Any

from gymnasium.error import Error as GymnasiumError

from vecenv.errors import NotRestorable, SharedMemoryFull, VecEnvError, WorkerDied, env_error, in_one_line
from vecenv.workers.messenger import BadMessage, WorkerHandle
from vecenv.workers.protocol import ErrorReply, decode

_TO_FIX = {"construction": "the env or its arguments", "worker_init": "worker_init"}
"""What may be wrong if a vector env cannot be built."""


def decoded(worker: WorkerHandle, payload: bytes | bytearray | None) -> Any:
    """Returns the payload of a worker's message, or raises VecEnvError if it cannot be unpickled."""
    try:
        return decode(payload)
    except Exception as error:
        raise VecEnvError(
            f"{worker} sent data that cannot be unpickled: {in_one_line(error)}. Infos and results of "
            "calls must be of classes that this process can import: return plain data instead."
        ) from error


def worker_died(worker: WorkerHandle, doing: str, *, restarts: bool) -> WorkerDied:
    """Returns the error for a worker that is gone. With `restarts`, it gives no advice."""
    advice = "" if restarts else " This vector env can now only be closed."
    return WorkerDied(f"{worker} {worker.how_it_ended()} during {doing}.{advice}")


def pipe_garbled(message: BadMessage, doing: str) -> VecEnvError:
    """Returns the error for a message that is no reply."""
    return VecEnvError(
        f"{message.worker} sent {message.what} during {doing}. Something else writes to the worker's pipe, for "
        "example an env that still writes to a file descriptor that it has closed. Fix the env. This "
        "vector env can now only be closed."
    )


def timed_out(workers: Iterable[WorkerHandle], doing: str, timeout: float | None) -> multiprocessing.TimeoutError:
    """Returns the error for workers that have not replied in time."""
    who = ", ".join(str(worker) for worker in workers)
    if doing == "construction":
        return multiprocessing.TimeoutError(
            f"The construction of the envs has timed out after {timeout} second(s): no answer from {who}. "
            "If they need longer, increase start_timeout_s."
        )
    return multiprocessing.TimeoutError(
        f"The call to `{doing}_wait` has timed out after {timeout} second(s): no answer from {who}. "
        "If the envs need longer, increase the timeout. This vector env can now only be closed."
    )


def worker_failed(worker: WorkerHandle, reply: ErrorReply, *, broken: bool = True) -> VecEnvError:
    """Returns the error for an exception in a worker. `broken` says whether it broke the vector env."""
    if reply.other_form is not None:
        return reply.other_form
    try:
        exception_type = None if reply.exception is None else pickle.loads(reply.exception)
    except Exception:  # its module cannot be imported here
        exception_type = None
    who = f"envs {worker.low}:{worker.high}" if reply.env is None else f"env {reply.env}"
    if reply.refusal is not None:  # no fault of the env, and nothing is broken
        full = exception_type is not None and issubclass(exception_type, SharedMemoryFull)
        error_type = SharedMemoryFull if full else NotRestorable
        return error_type(f"{who} in worker {worker.index}: {reply.refusal}")
    # If `load_spec` raised it, the name is wrong, not the env.
    wrong_name = re.search(r"in load_spec\n.*\ngymnasium\.error\.\w+: (.*)$", reply.traceback, re.MULTILINE)
    if wrong_name and exception_type is not None and issubclass(exception_type, GymnasiumError):
        return env_error(exception_type, wrong_name[1])
    broken = broken and reply.doing not in _TO_FIX  # the constructor closes a vector env that it could not build
    advice = f"Fix {_TO_FIX.get(reply.doing, 'the env' if broken else 'the env or the call')} (the traceback is above)"
    lost = re.findall(r"^ModuleNotFoundError: No module named '(.+)'$", reply.traceback, re.MULTILINE)
    if lost and lost[-1] in sys.modules:
        file = getattr(sys.modules[lost[-1]], "__file__", "no file")
        advice = (
            f"This process has loaded the module {lost[-1]!r} (from {file}), but its workers cannot import it: put "
            "its folder on sys.path and give it the name of its file"
        )
    advice += ". This vector env can now only be closed." if broken else "."
    return env_error(
        exception_type,
        f"{who} in worker {worker.index} raised during {reply.doing}:\n\n{reply.traceback}\n{advice}",
        reply.cause,
    )
