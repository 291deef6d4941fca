"""Keyword arguments of an env on a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

PYTHONS = {"True": True, "False": False, "None": None}
"""Python's spellings of true, false and null. Without these, "False" would be a string, which counts as true."""

_NUMBER = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
"""Python's spellings of numbers, such as .5, 5. and +1. 007, 1_000 and nan are strings: they may be names. Infinity
and NaN are numbers, because `json.dumps` writes them."""


def from_words(words: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments from KEY=VALUE pairs and JSON objects. A later word overrides an earlier one.

    A value that is neither JSON, nor True, False or None, nor a number such as .5, is a string.

    Raises:
        ValueError: If a word is neither a pair nor a JSON object.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if word.lstrip().startswith("{"):
            found |= _json(word)
        elif equals and key.isidentifier():
            found[key] = _value(key, text)
        else:
            raise ValueError(f"{word!r} is neither KEY=VALUE nor a JSON object such as '{{\"key\": 1}}'")
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'{text!r} is not JSON ({error}): write keys and strings in double quotes, \'{{"key": "text"}}\''
        ) from error


def _value(key: str, text: str) -> Any:
    if text in PYTHONS:
        return PYTHONS[text]
    try:
        return json.loads(text)
    except ValueError as error:
        if text[:1] in ("{", "[", '"'):
            raise ValueError(f"the value of {key!r}, {text}, is not JSON ({error})") from error
        if _NUMBER.fullmatch(text):
            return float(text) if set(text) & set(".eE") else int(text)
        return text
