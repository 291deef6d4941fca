"""Exceptions that training and run folders raise, and functions that classify and shorten errors."""

from __future__ import annotations

import vecenv


class RunError(RuntimeError):
    """A folder is not a run, or a run cannot be used. The message says why and what to do."""


class TrainingDiverged(FloatingPointError):
    """A reward, an observation, a loss or a gradient is not finite, or a discrete observation is outside its space."""


class FaultyEnv(TrainingDiverged):
    """An env returned an unusable reward or observation. Training can be resumed once the env is fixed."""


class NothingAllowed(ValueError):
    """An action mask forbids every action; the message names the env."""


def is_resumable_after(error: BaseException) -> bool:
    """Returns whether a run can usefully be resumed after this error. A diverged run would diverge again."""
    return not isinstance(error, TrainingDiverged) or isinstance(error, FaultyEnv)


def is_from_env(error: BaseException) -> bool:
    """Returns whether an env raised the error, in a worker or in this process, or returned an unusable value."""
    raised = any(note.startswith("raised by env") for note in getattr(error, "__notes__", ()))
    return raised or isinstance(error, (vecenv.EnvError, FaultyEnv))


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, without a full stop; the name of its type if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
