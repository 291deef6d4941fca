"""What can go wrong, as types; subclasses of Gymnasium's where one exists.

Every message has three parts: what happened, where (worker, envs, command), what to do next.
"""

from __future__ import annotations

from gymnasium.error import ClosedEnvironmentError, ResetNeeded


class VecEnvError(RuntimeError):
    """Base of the faults that only a vectorized env can have."""


class EnvError(VecEnvError):
    """An env raised an exception inside a worker; the message holds the worker's traceback.

    What `AsyncVectorEnv` raises is also an instance of the env's own exception type wherever
    Python allows it, so `except ValueError` written for a single env keeps working.
    """


class UnsupportedSpace(VecEnvError, ValueError):
    """A space that cannot be laid out in memory, or that a policy cannot act in or see."""


class NotRestorable(VecEnvError):
    """The state of an env cannot be saved and restored exactly; the message names the attribute and what to do."""


class RenderingFailed(VecEnvError):
    """No frame could be drawn: there is no OpenGL that works without a display, or none at all."""


class WorkerDied(VecEnvError):
    """A worker process ended without being asked to: a signal, a crash, `os._exit`."""


class MessageTooLarge(VecEnvError, ValueError):
    """A message for a pipe exceeds 2 GiB; it was not sent.

    Attributes:
        env: Index of the env that the data came from; None if unknown, or if the caller passed the data.
    """

    env: int | None = None


class SharedMemoryFull(VecEnvError, MemoryError):
    """The system has no room for the memory that the envs need.

    Attributes:
        needed_bytes: Size of the requested block; None if unknown.
        available_bytes: Memory that was available; None if unknown.
    """

    def __init__(self, message: str, *, needed_bytes: int | None = None, available_bytes: int | None = None):
        super().__init__(message)
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


class StateError(ClosedEnvironmentError):
    """The vector env was closed, or broken by an earlier fault: only `close()` is legal."""


class EpisodeOver(ResetNeeded, AssertionError):
    """With autoreset `DISABLED`, an env whose episode is over was stepped (an assertion in Gymnasium)."""


def env_error(exception_type: type[BaseException] | None, message: str) -> EnvError:
    """Returns an `EnvError` that is also an `exception_type`, where the two can be combined.

    Args:
        exception_type: What the env raised, or None if its type could not travel.
        message: The whole text, traceback included.
    """
    # Only an Exception may be mixed in: an EnvError that is a SystemExit would end the parent.
    if exception_type is None or not issubclass(exception_type, Exception):
        return EnvError(message)
    try:
        # The env's own __init__ and __str__ may want arguments that did not travel.
        mixed = type(
            "EnvError",
            (EnvError, exception_type),
            {"__init__": Exception.__init__, "__str__": Exception.__str__},
        )
        error = mixed(message)
    except TypeError:  # two exception types whose C layouts differ cannot share a subclass
        return EnvError(message)
    error.__class__.__module__ = EnvError.__module__
    return error
