"""regions.py: Region: where in memory arrays lie, which of them overlap, and how to make them anew in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        address: Of its first element.
        node: What stands for it, to be filled in.
    """

    array: np.ndarray
    where: str
    low: int
    high: int
    address: int
    node: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, array: np.ndarray, where: str, node: dict[str, Any] | None = None) -> Region:
        """Returns where an array lies."""
        address = array.__array_interface__["data"][0]
        below, above = _span(array.shape, array.strides, array.itemsize)
        return cls(array, where, address - below, address + above, address, {} if node is None else node)


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


def made(node: dict[str, Any], memories: dict[int, np.ndarray]) -> np.ndarray:
    """Returns a new array; `memories` holds the bytes of those that share theirs."""
    data = node["data"]
    strides = data.strides if node["strides"] is None else tuple(node["strides"])
    if "memory" in node:
        offset, memory = node["offset"], memories.setdefault(node["memory"], np.zeros(node["size"], np.uint8))
    else:
        below, above = _span(data.shape, strides, data.itemsize)
        offset, memory = below, np.zeros(below + above, np.uint8)
    if "memory" in node or strides != data.strides:
        array = np.ndarray(data.shape, data.dtype, memory, offset, strides)
        array[...] = data
    else:
        array = np.array(data, order="C", copy=True)
    array.flags.writeable = node["writeable"]
    return array
