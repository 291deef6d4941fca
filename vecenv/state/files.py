"""Files of env states: JSON text, and the bytes of arrays. Reading one runs no code."""

from __future__ import annotations

import io
import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from vecenv.state.plain import ARRAY_KINDS, kind_of

_FORMAT = 3
_ARRAY = "numpy.ndarray"  # the key that stands for an array; no packed value has such a key


def save(path: str | os.PathLike, states: Any) -> None:
    """Writes the states that a vector env's `get_state()` returned to a .npz file, atomically replacing any old file.

    Raises:
        TypeError: If `states` contain a value that no `get_state()` returns.
    """
    content = dumps(states)
    draft = Path(f"{os.fspath(path)}.{secrets.token_hex(8)}.part")  # a name that nobody can guess, so it is not a link
    try:
        with draft.open("xb") as file:
            file.write(content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def dumps(states: Any) -> bytes:
    """Returns the content of the file that `save` writes: JSON text, and the bytes of the arrays."""
    data = io.BytesIO()

    def array(value: Any) -> dict[str, Any]:
        if type(value) is not np.ndarray or value.dtype.kind not in ARRAY_KINDS:
            raise TypeError(f"states hold a {kind_of(value)}, which cannot be saved. Pass what get_state() returned.")
        place = [value.dtype.str, value.shape, "F" if value.flags.fnc else "C", data.tell()]
        data.write(value.tobytes("A"))
        return {_ARRAY: place}

    text = json.dumps({"format": _FORMAT, "states": states}, default=array).encode()
    file = io.BytesIO()
    np.savez_compressed(file, tree=np.frombuffer(text, np.uint8), data=np.frombuffer(data.getbuffer(), np.uint8))
    return file.getvalue()


def load(path: str | os.PathLike) -> Any:
    """Returns the states that `save` wrote, as `loads` does.

    Raises:
        OSError: If the file cannot be opened.
        ValueError: If the file is damaged, or of another kind or version.
    """
    return loads(Path(path).read_bytes(), name=os.fspath(path))


def loads(content: bytes, *, name: str = "the content") -> Any:
    """Returns the states that were passed to `dumps`, and runs no code from `content`.

    Raises:
        ValueError: If the content is damaged, or of another kind or version. The message calls it `name`.
    """

    def decode(node: dict[str, Any]) -> Any:
        if node.keys() != {_ARRAY}:
            return node
        dtype, shape, order, offset = node[_ARRAY]
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(data, np.dtype(dtype), count, offset).reshape(shape, order=order).copy(order)

    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            text, data = file["tree"].tobytes(), file["data"].tobytes()
        found = json.loads(text, object_hook=decode)
        if found["format"] != _FORMAT:
            raise ValueError(f"its format is {found['format']}, but this version reads {_FORMAT}")
        return found["states"]
    except Exception as error:  # damaged content can raise any exception
        raise ValueError(
            f"{name} holds no env states that this version of vecenv can read ({type(error).__name__}: {error}). "
            "Pass a complete file that was written by vecenv.state.save."
        ) from error
