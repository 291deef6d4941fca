"""Checks of the rewards, flags and infos that envs return; `vecenv.rows.observations` checks observations.

Python and numpy silently convert many wrong values: the flag "False" is true, and a reward of None becomes NaN.
"""

from __future__ import annotations

import decimal
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from vecenv.rows.other_apis import VECTOR_REWARD

NUMBERS = frozenset({float, int, bool, *(np.dtype(code).type for code in "?bhilqBHILQefdg")})
"""Exact types that are accepted as real numbers. np.timedelta64 is an np.integer, but not a real number."""
FALSE = np.False_
"""numpy's False, which is a singleton and can therefore be compared by identity."""


def number(reward: Any) -> float:
    """Returns a reward as a float, or raises TypeError if it is neither a real number nor an array that holds one."""
    if isinstance(reward, (numbers.Real, decimal.Decimal)) and not isinstance(reward, np.generic):
        scalar: Any = reward
    elif isinstance(reward, np.ndarray) and reward.size > 1:
        raise TypeError(f"is {shown(reward)}, not a real number. {VECTOR_REWARD}")
    else:
        scalar = _scalar(reward, "a real number")
    try:
        return float(scalar)
    except OverflowError:
        raise TypeError(f"is {shown(reward)}, which is too large for a float64") from None


def flag(value: Any) -> bool:
    """Returns a flag as a bool. Raises TypeError unless it is a bool, 0 or 1, or an array that holds one of these."""
    if value is True or value is False:
        return value
    scalar = _scalar(value, "a bool")
    if scalar not in (0, 1):
        raise TypeError(f"is {shown(value)}, not a bool")
    return bool(scalar)


def check_info(info: Any) -> None:
    """Raises TypeError if an info is not a dict."""
    if not isinstance(info, Mapping):
        raise TypeError(f"is {shown(info)}, not a dict")


def shown(value: Any) -> str:
    """Returns a value and its type for a message, shortened if the value is long."""
    return f"{_repr.repr(value)} ({type(value).__name__})"


_repr = reprlib.Repr()
_repr.maxother = _repr.maxstring = 80


def _scalar(value: Any, expected: str) -> Any:
    # Lists and tuples are not treated as arrays: in Python, the flag [False] is true.
    array = None if isinstance(value, (list, tuple)) or np.ma.is_masked(value) else np.asarray(value)
    if array is not None and array.size == 1 and array.dtype == object and isinstance(array.item(), (float, int)):
        return array.item()
    if array is None or array.size != 1 or array.dtype.kind not in "biuf":
        raise TypeError(f"is {shown(value)}, not {expected}")
    return array.item()
