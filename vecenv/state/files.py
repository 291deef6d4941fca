"""Save and load: the states of envs in a file, exactly, and read without running any code.

The file is a compressed .npz with two arrays of bytes: "tree", JSON text, and "data", the bytes of all arrays. JSON has
None, bool, str, and numbers that it can hold; all else is an object of one key that says what it is. Long texts and
arrays that are equal are stored once.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FILE_FORMAT = 1
ARRAY_KINDS = "biufcSUMm"
_SMALL = 2**63
_LONG = 1000  # characters or bytes from which on it is worth a look whether there are equal ones


def save(path: str | os.PathLike, states: Any) -> None:
    """Writes what `get_state()` of a vector env returned; a file that was there is replaced in one go.

    Args:
        path: Of the file.
        states: Made of None, bool, int, float, complex, str, bytes, list, tuple, dict, and numpy arrays and scalars of
            numbers, text or times. All are read as they were written: ints of any size, NaN bit for bit, dtypes.

    Raises:
        TypeError: If there is anything else in it; the message says where.
    """
    writer = _Writer()
    encoded = writer.encode(states, "states")
    tree = json.dumps({"format": FILE_FORMAT, "states": encoded, "texts": list(writer.texts)}, allow_nan=False).encode()
    path = Path(path)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(draft, "wb") as file:
            data = b"".join(writer.parts)
            np.savez_compressed(file, tree=np.frombuffer(tree, np.uint8), data=np.frombuffer(data, np.uint8))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def load(path: str | os.PathLike) -> Any:
    """Reads what `save` wrote.

    Raises:
        ValueError: If the file is of another kind, or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            tree, data = json.loads(file["tree"].tobytes()), file["data"].tobytes()
        if tree["format"] != FILE_FORMAT:
            raise ValueError(f"its format is {tree['format']}, but this vecenv reads {FILE_FORMAT}")
        return _Reader(tree.get("texts", []), data).decode(tree["states"])
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(
            f"{path} holds no states of envs that this vecenv can read ({type(error).__name__}: {error}): give a file "
            "that vecenv.state.save wrote, whole"
        ) from error


class _Writer:
    """Turns values into JSON; the bytes of arrays come into `parts`, long texts into `texts`, with their numbers."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.texts: dict[str, int] = {}
        self._size = 0
        self._places: dict[bytes, int] = {}  # of long parts

    def encode(self, value: Any, where: str) -> Any:
        cls = type(value)
        if value is None or cls is bool:
            return value
        if cls is int:
            return value if -_SMALL <= value < _SMALL else {"int": hex(value)}
        if cls is float:
            return value if np.isfinite(value) else {"float": struct.pack("<d", value).hex()}
        if cls is str:
            return self._text(value)
        if cls is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if cls is complex:
            return {"complex": [self.encode(part, where) for part in (value.real, value.imag)]}
        if cls in (list, tuple):
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return items if cls is list else {"tuple": items}
        if cls is dict:
            return {"dict": [[self.encode(k, where), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        if cls is np.str_ or cls is np.bytes_:  # an array would lose zeros at their end
            return {cls.__name__: self.encode(str.__str__(value) if cls is np.str_ else bytes(value), where)}
        if (cls is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in ARRAY_KINDS:
            place = [value.dtype.str, list(value.shape), self._place_of(value.tobytes())]
            return {"array" if cls is np.ndarray else "scalar": place}
        what = f"{cls.__module__}.{cls.__qualname__}" + (f" of {value.dtype}" if cls is np.ndarray else "")
        raise TypeError(f"{where} is a {what}, which cannot be saved: give what get_state() returned, or plain values")

    def _text(self, value: str) -> Any:
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"text": [ord(c) for c in value]}
        return value if len(value) < _LONG else {"long": self.texts.setdefault(value, len(self.texts))}

    def _place_of(self, data: bytes) -> int:
        """Returns where these bytes are, or are to be."""
        place = self._places.get(data, self._size)
        if place == self._size:
            self.parts.append(data)
            self._size += len(data)
            if len(data) >= _LONG:
                self._places[data] = place
        return place


class _Reader:
    """Turns JSON into values again."""

    def __init__(self, texts: list[str], data: bytes):
        self._texts, self._data = texts, data

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "int":
            return int(content, 16)
        if kind == "float":
            return struct.unpack("<d", bytes.fromhex(content))[0]
        if kind == "text":
            return "".join(map(chr, content))
        if kind == "long":
            return self._texts[content]
        if kind == "bytes":
            return base64.b64decode(content)
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind in ("array", "scalar"):
            dtype, shape, offset = content
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(self._data, np.dtype(dtype), count, offset).reshape(shape).copy()
            return array if kind == "array" else array[()]
        return _MADE_OF_PARTS[kind](self.decode(content))


_MADE_OF_PARTS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "complex": lambda parts: complex(*parts),
    "str_": np.str_,
    "bytes_": np.bytes_,
}
