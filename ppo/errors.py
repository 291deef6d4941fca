"""Exceptions for everything that can go wrong in a run, and an error's message in one line."""

from __future__ import annotations

import vecenv


class RunError(RuntimeError):
    """A folder is not a run, or a run cannot be used. The message says why and what to do."""


class TrainingDiverged(FloatingPointError):
    """A reward, an observation, a loss or a gradient is not finite, or a discrete observation is outside its space."""


class NothingAllowed(ValueError):
    """An action mask forbids every action; the message names the env."""


def sentence_of(error: Exception) -> str:
    """Returns the message of an error as one line. For an `EnvError`, this is the last line of its traceback."""
    if not isinstance(error, vecenv.VecEnvError):
        return f"{type(error).__name__}: {error}"
    return str(error).split("\nraised by env")[0].strip().splitlines()[-1]
