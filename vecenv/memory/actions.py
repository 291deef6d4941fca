"""Checks a batch of actions and puts it into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from vecenv import spaces as tree
from vecenv.memory import layout
from vecenv.spaces import Path


class ActionWriter:
    """Checks batches of actions of one space.

    Args:
        space: The action space of one env.
    """

    def __init__(self, space: Space):
        self._space = space
        # Ready made, because this is done at each step: path, name, dtype or None for a loose leaf, shape.
        self._parts = [
            (
                path,
                tree.name_of("actions", path),
                np.dtype(leaf.dtype) if tree.is_fixed(leaf) else None,
                tuple(leaf.shape or ()),
            )
            for path, leaf in tree.leaves(space)
        ]
        self._all_fixed = all(dtype is not None for _, _, dtype, _ in self._parts)

    def put(self, actions: Any, arrays: Mapping[Path, np.ndarray], slot: int, env_ids: Sequence[int]) -> Any:
        """Checks a batch of actions and writes it into a slot.

        Args:
            actions: One action for each of `env_ids`, batched and nested as Gymnasium's batched space is.
            arrays: Every field's `dtype[S, N, *shape]`.
            slot: Where to write.
            env_ids: The envs that the actions are for; a range, such as `range(N)` for all, has no gaps.

        Returns:
            None; or the actions, if they do not fit the memory (their dtype is another than the space's,
            or the space has a leaf without fixed shape) and must reach the envs as they are in another way.

        Raises:
            ValueError: If the shape is wrong or an action is NaN; the message names the env.
            TypeError: If the dtype is of another kind, such as floats for a Discrete space.
        """
        count = len(env_ids)
        batches: dict[Path, Any] = {}
        fits = self._all_fixed
        for path, name, dtype, shape in self._parts:
            batch = _pick(actions, path, name) if path else actions
            if dtype is None:
                if len(batch) != count:
                    raise ValueError(f"{name} has {len(batch)} elements, but {count} envs are to be stepped")
                batches[path] = batch
                continue
            batch = batches[path] = np.asarray(batch)
            if batch.shape != (count, *shape):
                if batch.ndim == 0:
                    raise TypeError(f"{name} is {batch}, but {count} envs need an action each: a sequence of {count}")
                raise ValueError(
                    f"{name} has shape {batch.shape}, but {count} envs with action space {self._space} "
                    f"need {(count, *shape)}"
                )
            if batch.dtype is not dtype and batch.dtype != dtype:
                if not np.can_cast(batch.dtype, dtype, "same_kind"):
                    raise TypeError(f"{name} has dtype {batch.dtype}, but the action space needs {dtype}: convert it")
                fits = False
            if batch.dtype.kind == "f" and np.isnan(batch).any():
                first = int(np.argmax(np.isnan(batch).reshape(count, -1).any(axis=1)))
                raise ValueError(
                    f"{name} for env {env_ids[first]} is NaN: {batch[first]}. The policy has most likely diverged; "
                    "no env was stepped."
                )
        if not fits:
            return tree.nest(self._space, batches.__getitem__)
        for path, batch in batches.items():
            array = arrays[(layout.ACTION, *path)][slot]
            array[slice(env_ids.start, env_ids.stop) if isinstance(env_ids, range) else env_ids] = batch
        return None

    def of_rows(self, actions: Any, rows: Any) -> Any:
        """Returns the part of a batch of actions that a slice, or a list of positions, chooses."""

        def part(path: Path) -> Any:
            batch = tree.pick(actions, path)
            if isinstance(rows, slice) or isinstance(batch, np.ndarray):
                return batch[rows]
            return [batch[row] for row in rows]

        return tree.nest(self._space, part)


def _pick(actions: Any, path: Path, name: str) -> Any:
    try:
        return tree.pick(actions, path)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{name} is missing: actions must be nested as the action space is") from error
