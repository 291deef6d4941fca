"""Region: where in memory arrays lie, and which of them overlap; and arrays as nodes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Region:
    """The bytes `low:high` that an array uses.

    Attributes:
        array: Which.
        where: Its name, for messages.
        low: Address of its first byte.
        high: Of the byte after the last.
    """

    array: np.ndarray
    where: str
    low: int
    high: int

    @classmethod
    def of(cls, array: np.ndarray, where: str) -> Region:
        """Returns where an array lies."""
        address = array.__array_interface__["data"][0]
        below, above = _span(array.shape, array.strides, array.itemsize)
        return cls(array, where, address - below, address + above)


def _span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Returns how many bytes before its first element, and from there on, an array uses."""
    if 0 in shape:
        return 0, 0
    steps = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    return -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + itemsize


def overlapping(regions: Sequence[Region]) -> list[list[Region]]:
    """Returns the regions in groups that have no byte in common, as small as possible."""
    groups: list[list[Region]] = []
    end = -1
    for region in sorted(regions, key=lambda region: (region.low, region.high)):
        if groups and region.low < end and region.high > region.low:
            groups[-1].append(region)
        else:
            groups.append([region])
        end = max(end, region.high)
    return groups


def hidden_memory(array: np.ndarray) -> str | None:
    """Returns the type of the object that an array's memory belongs to, if others may write there unseen."""
    base = array.base
    while type(base) is np.ndarray:
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return None if base is None or isinstance(base, (bytes, bytearray)) else f"a {type(base).__qualname__}"


def copy_of(array: np.ndarray) -> dict[str, Any]:
    """Returns the parts of a node from which `made` makes an equal array."""
    data = np.array(array, order="C", copy=True)
    strides = None if data.strides == array.strides else array.strides
    return {"data": data, "strides": strides, "writeable": bool(array.flags.writeable)}


def made(node: dict[str, Any]) -> np.ndarray:
    """Returns a new array, in the same order in memory, on which sums depend."""
    data = node["data"]
    array = np.array(data, order="C", copy=True)
    if node["strides"] is not None:
        strides = tuple(node["strides"])
        below, above = _span(data.shape, strides, data.itemsize)
        array = np.ndarray(data.shape, data.dtype, np.zeros(below + above, np.uint8), below, strides)
        array[...] = data
    array.flags.writeable = node["writeable"]
    return array
