"""vecenv's exceptions, which derive from Gymnasium's where Gymnasium has a matching one.

Every message has three parts: what happened, where (worker, envs, command), and what to do.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from vecenv import by_value


class VecEnvError(RuntimeError):
    """Base class of the errors that are specific to vectorized envs."""


class EnvError(VecEnvError):
    """An env raised an exception inside a worker; the message holds the worker's traceback.

    The exception is also an instance of the env's own exception type wherever Python allows it, so `except ValueError`
    written for a single env keeps working. StopIteration would end the caller's loop, so it becomes a plain EnvError.

    Attributes:
        cause: The env's exception in one line, without the traceback; empty if it is unknown.
    """

    cause = ""


class UnsupportedSpace(VecEnvError, ValueError):
    """A space that cannot be stored in memory, that differs between envs, or that a policy does not support."""


class NotRestorable(VecEnvError):
    """The state of an env cannot be saved and restored exactly; the message names the class and says what to do."""


class NotRestorableNow(NotRestorable):
    """The states of the envs cannot be saved before their next step, because a process that held some of them died."""


class RenderingFailed(VecEnvError):
    """Rendering failed, because no OpenGL backend works on this machine."""


class WorkerDied(VecEnvError):
    """A worker process ended unexpectedly, because of a signal, a crash, or `os._exit`."""


class MessageTooLarge(VecEnvError, ValueError):
    """A message exceeded 2 GiB and was not sent."""


class SharedMemoryFull(VecEnvError, MemoryError):
    """The system does not have the memory that the envs need.

    Attributes:
        needed_bytes: Size of the requested block; None if it is unknown.
        available_bytes: Memory that was available; None if it is unknown.
        limit: What is too small for the block, such as "the shared memory in /dev/shm"; None if it is unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
        limit: str | None = None,
    ):
        super().__init__(message)
        self.needed_bytes, self.available_bytes, self.limit = needed_bytes, available_bytes, limit


class StateError(ClosedEnvironmentError):
    """The vector env was closed, or an earlier fault broke it. Only `close()` is legal."""


class OtherForm(VecEnvError):
    """Tells `vecenv.make` to build single envs instead of a vector env, or the reverse. Not a failure.

    A worker sends it to the parent as an object, so it must consist of plain values and specs.
    """


class EpisodeOver(ResetNeeded, AssertionError):
    """An env with autoreset mode `DISABLED` was stepped after its episode ended. An AssertionError, as in Gymnasium."""


def in_one_line(error: BaseException) -> str:
    """Returns the first line of an error's message, after the name of its type unless the error is vecenv's own.

    A line that ends with a colon or an opening bracket is followed by the next one. For an `EnvError`, the result is
    that of the env's exception.
    """
    if isinstance(error, EnvError) and error.cause:
        return error.cause
    name = type(error).__name__
    try:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    except Exception:  # an env's exception may be unable to print itself
        lines = []
    if not lines:
        return name
    line = " ".join(lines[: 2 if lines[0].endswith((":", "(", "[", "{")) else 1])
    return line if isinstance(error, VecEnvError) else f"{name}: {line}"


def env_error(exception_type: type[BaseException] | None, message: str, cause: str = "") -> EnvError:
    """Returns an `EnvError` that is also of the type that the env raised, if the two can be combined.

    The type is None if it could not be pickled. The message includes the traceback.
    """
    error = _combined(exception_type, message)
    error.cause = cause
    return error


def _combined(exception_type: type[BaseException] | None, message: str) -> EnvError:
    # Only an Exception may be mixed in: an EnvError that is a SystemExit would end the parent.
    if exception_type is None or not issubclass(exception_type, Exception):
        return EnvError(message)

    def reduce(error: EnvError) -> tuple[Any, ...]:
        """Pickles the parts of the error, because its class exists only in this process."""
        pickled = None
        with contextlib.suppress(Exception):  # a class that cannot be pickled
            pickled = by_value.dumps(exception_type)
        return _unpickled, (pickled, str(error)), error.__dict__  # which holds the notes

    # An env may hold a vector env, whose EnvError it raises.
    bases = (exception_type,) if issubclass(exception_type, EnvError) else (EnvError, exception_type)
    try:
        # The exception type's own __init__ and __str__ may need arguments that the worker did not send.
        own = {"__init__": Exception.__init__, "__str__": Exception.__str__, "__reduce__": reduce}
        error = type("EnvError", bases, own)(message)
    except TypeError:  # two exception types whose C layouts differ cannot share a subclass
        return EnvError(message)
    error.__class__.__module__ = EnvError.__module__
    return error


def _unpickled(exception_type: bytes | None, message: str) -> EnvError:
    found = None
    with contextlib.suppress(Exception):  # its module cannot be imported here
        found = None if exception_type is None else pickle.loads(exception_type)
    return env_error(found, message)
