"""Checks batches of actions and writes them to memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from vecenv import tree
from vecenv.memory import layout
from vecenv.tree import Path


class ActionWriter:
    """Checks batches of actions, and writes them to memory. `space` is the action space of one env.

    Attributes:
        same_kind: Whether numbers of another kind are an error, such as floats for a Box of integers. Otherwise, they
            reach the envs as they are, unless the space is Discrete or MultiDiscrete.
    """

    def __init__(self, space: Space, arrays: Mapping[Path, np.ndarray]):
        self._space = space
        self._num_envs = arrays[layout.REWARD].shape[1]
        self.same_kind = True
        choices = (spaces.Discrete, spaces.MultiDiscrete)
        self._choices = {path for path, leaf in tree.leaves(space) if isinstance(leaf, choices)}
        # Looked up once, because every step needs them: path, name, memory or None for an object leaf, dtype, shape.
        self._leaves = [
            (
                path,
                tree.name_of("actions", path),
                arrays[(layout.ACTION, *path)] if tree.is_fixed(leaf) else None,
                np.dtype(leaf.dtype) if tree.is_fixed(leaf) else None,
                tuple(leaf.shape or ()),
            )
            for path, leaf in tree.leaves(space)
        ]
        self._all_fixed = all(array is not None for _, _, array, _, _ in self._leaves)

    def put(self, actions: Any, slot: int, env_ids: Sequence[int] | None = None) -> Any:
        """Checks a batch of actions for `env_ids`, or all envs, and writes it to a slot.

        Returns:
            None if the actions were written. Otherwise the actions, which the caller must pass to the envs in another
            way, because their dtype is not the space's, or because the space has a leaf without a fixed shape.

        Raises:
            ValueError: If the shape is wrong, or an action is NaN, in which case the message names the env.
            TypeError: If a scalar is passed, or the dtype is of another kind, such as floats for a Discrete space.
        """
        count = self._num_envs if env_ids is None else len(env_ids)
        checked: list[Any] = []
        fits = self._all_fixed
        for path, name, _, dtype, shape in self._leaves:
            batch = _pick(actions, path, name) if path else actions
            if dtype is None:
                if len(batch) != count:
                    raise ValueError(f"{name} has {len(batch)} elements, but {count} envs need one action each")
                checked.append(batch)
                continue
            batch = np.asarray(batch)
            checked.append(batch)
            if batch.shape != (count, *shape):
                if batch.ndim == 0:
                    raise TypeError(f"{name} is {batch}, but {count} envs need one action each: pass a sequence")
                raise ValueError(
                    f"{name} has shape {batch.shape}, but {count} envs with action space {self._space} "
                    f"need {(count, *shape)}"
                )
            if batch.dtype is not dtype and batch.dtype != dtype:
                refused = self.same_kind or path in self._choices or batch.dtype.kind not in "biuf"
                if refused and not np.can_cast(batch.dtype, dtype, "same_kind"):
                    raise TypeError(f"{name} has dtype {batch.dtype}, but the action space needs {dtype}: convert it")
                fits = False
            if batch.dtype.kind == "f" and np.count_nonzero(np.isnan(batch)):
                first = int(np.argmax(np.isnan(batch).reshape(count, -1).any(axis=1)))
                env = first if env_ids is None else env_ids[first]
                raise ValueError(
                    f"NaN in {name} for env {env}: {batch[first]}. No env was stepped. The policy has most likely "
                    "diverged."
                )
        if not fits:
            batches = {path: batch for (path, *_), batch in zip(self._leaves, checked, strict=True)}
            return tree.nest(self._space, batches.__getitem__)
        for (_, _, array, _, _), batch in zip(self._leaves, checked, strict=True):
            assert array is not None  # all leaves are fixed
            if env_ids is None:
                array[slot] = batch
            else:
                rows = slice(env_ids.start, env_ids.stop) if isinstance(env_ids, range) else env_ids
                array[slot, rows] = batch
        return None

    def select(self, actions: Any, rows: slice | list[int]) -> Any:
        """Returns the actions at the positions `rows` of a batch."""

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
        raise ValueError(f"{name} is missing: actions must be nested like the action space") from error
