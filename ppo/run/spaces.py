"""Spaces as JSON, so that a run's policies can be used without its envs."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import vecenv
from vecenv.tree import children


def space_to_json(space: gym.Space) -> dict[str, Any]:
    """Returns JSON values from which `space_from_json` makes an equal space, or raises UnsupportedSpace."""
    if (members := children(space)) is not None:
        if wrong := [key for key, _ in members if not isinstance(key, (str, int))]:
            raise vecenv.UnsupportedSpace(f"the keys of {space} must be strings or integers, but it has {wrong}")
        kind = "Dict" if isinstance(space, spaces.Dict) else "Tuple"
        return {"type": kind, "spaces": [[key, space_to_json(member)] for key, member in members]}
    if isinstance(space, spaces.Box):
        bounds = {"low": _plain(space.low), "high": _plain(space.high)}
        return {"type": "Box", "dtype": space.dtype.name, "shape": list(space.shape), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": space.dtype.name, "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        counts = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": "MultiDiscrete", "dtype": space.dtype.name, **counts}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "shape": list(space.shape)}
    raise vecenv.UnsupportedSpace(
        f"ppo cannot write the space {space} into a run folder: wrap the env so that it uses a Box"
    )


def outline_of(space: gym.Space, *, bounds: bool) -> dict[str, Any]:
    """Returns what `space_to_json` returns, with or without the bounds of Boxes."""

    def outline(values: dict[str, Any]) -> dict[str, Any]:
        if "spaces" in values:
            return {**values, "spaces": [(key, outline(member)) for key, member in values["spaces"]]}
        return {key: value for key, value in values.items() if bounds or key not in ("low", "high")}

    return outline(space_to_json(space))


def space_from_json(values: dict[str, Any]) -> gym.Space:
    """Returns the space that `space_to_json` described. Raises KeyError, ValueError or TypeError for other values."""
    kind = values["type"]
    if kind == "Dict":
        # As pairs, because a Dict sorts the keys of a dict, and the weights of a policy follow the order in training.
        return spaces.Dict([(key, space_from_json(member)) for key, member in values["spaces"]])
    if kind == "Tuple":
        return spaces.Tuple([space_from_json(member) for _, member in values["spaces"]])
    if kind == "Box":
        dtype, shape = np.dtype(values["dtype"]), tuple(values["shape"])
        low, high = (np.broadcast_to(np.array(values[bound], dtype), shape) for bound in ("low", "high"))
        return spaces.Box(low, high, shape, dtype)
    if kind == "Discrete":
        return spaces.Discrete(values["n"], start=values["start"], dtype=np.dtype(values["dtype"]))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(values["nvec"], np.dtype(values["dtype"]), start=values["start"])
    if kind == "MultiBinary":
        shape = values["shape"]
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    raise ValueError(f"there is no space {kind!r}")


def _plain(bound: np.ndarray) -> Any:
    """Returns a bound as one number if all its entries are equal, as for images, and as nested lists otherwise."""
    same = bound.size and (bound == bound.flat[0]).all()
    return bound.flat[0].item() if same else bound.tolist()
