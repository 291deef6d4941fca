"""`Kwargs`: the keyword arguments of an env as a setting, and their form on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np


class Kwargs(dict[str, Any]):
    """Keyword arguments that JSON can represent, as an immutable, hashable dict.

    Values are stored as JSON returns them: a tuple becomes a list, and a NumPy number a Python number.

    Raises:
        ValueError: If a key is not a string, or JSON cannot represent a value. The message names the key.
    """

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()):
        given = dict(values)
        for key, value in given.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is not a string")
            try:
                given[key] = json.loads(json.dumps(value, default=_python_number))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"JSON cannot represent the value of {key!r}, {value!r} ({error}): use numbers, strings, lists and "
                    "dicts"
                ) from error
        super().__init__(given)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))  # of the keys alone, because equal values such as 1 and 1.0 need equal hashes

    def __reduce__(self) -> tuple[Any, ...]:
        return Kwargs, (dict(self),)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("settings cannot be changed: make a new Config with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse  # type: ignore[assignment]


def to_words(kwargs: Mapping[str, Any]) -> list[str]:
    """Returns words that `vecenv.kwargs.from_words` parses into equal arguments."""
    return [json.dumps(kwargs)] if kwargs else []


def _python_number(value: Any) -> Any:
    """Returns a NumPy number as a Python number. Raises TypeError for any other value."""
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0 and value.dtype.kind in "biuf":
        return value.item()
    raise TypeError(f"{type(value).__name__} has no form in JSON")
