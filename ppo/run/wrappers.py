"""The wrappers of a run's envs, which training records. Exports list them, and include the outermost affine ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import vecenv
from ppo.config import Config
from ppo.errors import RunError
from ppo.run.folder import Run
from ppo.run.spaces import space_from_json, space_to_json

Part = Literal["observations", "actions"]

GYMNASIUM = "gymnasium.wrappers"
RESCALING = {"observations": ("RescaleObservation",), "actions": ("RescaleAction", "ClipAction")}
"""Gymnasium's wrappers whose effect follows from the spaces inside and outside them."""

REPEATING = ("RepeatAction", "StickyAction")
"""Gymnasium's wrappers that repeat actions without changing them."""


@dataclass(frozen=True)
class Wrapper:
    """A wrapper that concerns observations or actions.

    Attributes:
        name: Its name as in the setting `wrappers`: "Wrapper" for one of Gymnasium's, else "module:Wrapper".
        kwargs: Its arguments, as JSON values.
        changes: What it changes; empty if it only repeats actions.
        inside: For each part that it changes, the space of the env inside it, if training could record this space.
    """

    name: str
    kwargs: Mapping[str, Any]
    changes: tuple[Part, ...]
    inside: Mapping[Part, gym.Space]


@dataclass(frozen=True)
class Affine:
    """The map `values * scale + offset` from one Box to another one, `space`. Both arrays are float64."""

    scale: np.ndarray
    offset: np.ndarray
    space: spaces.Box

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Returns the results for a batch, in the dtype of the space."""
        return (values * self.scale + self.offset).astype(self.space.dtype)

    def clipped(self, values: np.ndarray) -> np.ndarray:
        """Returns the results for a batch, within the bounds of the space."""
        return np.clip(self(values), self.space.low, self.space.high)

    def undo(self, results: np.ndarray) -> np.ndarray:
        """Returns values with these results, in the dtype of the space."""
        return ((results - self.offset) / self.scale).astype(self.space.dtype)


def describe(env: Any) -> list[dict[str, Any]]:
    """Returns the wrappers of an env that concern observations or actions, innermost first, as JSON values.

    Runs in the process of the env.
    """
    found = []
    for wrapper, inner in itertools.pairwise(vecenv.state.layers_of(env)):
        kind = type(wrapper)
        module = kind.__module__
        name = kind.__name__ if module.startswith(GYMNASIUM) else f"{module}:{kind.__name__}"
        if (changes := _changes(name, kind)) is not None:
            inside = {part: _described(getattr(inner, f"{part.removesuffix('s')}_space")) for part in changes}
            kwargs = {key: _json(value) for key, value in getattr(wrapper, "_saved_kwargs", {}).items()}
            found.append({"name": name, "kwargs": kwargs, "changes": changes, "inside": inside})
    return found[::-1]


def describe_each(config: Config, envs: Any) -> list[list[dict[str, Any]]]:
    """Returns the result of `describe` for each env; an empty list for several agents or an env that steps all rows."""
    if config.is_multi_agent or isinstance(envs.env_fns, vecenv.Batched):
        return []
    return envs.apply(describe)


def agreed(each: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the wrappers of each env as one list.

    If the envs have different wrappers, the list has every wrapper of any env, without the spaces inside them.
    """
    if len({json.dumps(found) for found in each}) <= 1:  # NaN in arguments does not equal itself
        return each[0] if each else []
    unordered = [{**wrapper, "inside": {}} for found in each for wrapper in found]
    return list({json.dumps(wrapper): wrapper for wrapper in unordered}.values())


def wrappers_of(run: Run) -> list[Wrapper]:
    """Returns the wrappers of a run's envs that concern observations or actions, innermost first.

    Raises RunError if the record of the wrappers is damaged.
    """
    recorded = run.read_wrappers()
    if recorded is None:
        return named_wrappers(run.read_config())
    try:
        return [_from_json(values) for values in recorded]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(
            f"the wrappers in {run.path / 'spaces.json'} cannot be read ({type(error).__name__}: {error}). Restore a "
            "backup, or start a new run."
        ) from error


def named_wrappers(config: Config) -> list[Wrapper]:
    """Returns the wrappers that settings name and that concern observations or actions. Imports no module."""
    named = [vecenv.NamedWrapper(text) for text in config.wrappers]
    names = [one.name if one.module == GYMNASIUM else f"{one.module}:{one.name}" for one in named]
    found = [(name, one.kwargs, _changes(name)) for name, one in zip(names, named, strict=True)]
    return [Wrapper(name, kwargs, changes, {}) for name, kwargs, changes in found if changes is not None]


def affine_maps(wrappers: Sequence[Wrapper], part: Part, outside: gym.Space) -> list[tuple[Wrapper, Affine]]:
    """Returns the outermost wrappers whose effect on a part is affine, with their maps, in the order of their effects.

    These are maps of actions into the env, outermost wrapper first, or of the env's observations, innermost first. A
    wrapper inside one that is not affine is not part of the result, even if it is affine itself. `outside` is the space
    of the part outside all wrappers, which are given innermost first.
    """
    maps: list[tuple[Wrapper, Affine]] = []
    for wrapper in reversed(wrappers):
        if part not in wrapper.changes:
            continue
        inside = wrapper.inside.get(part)
        if wrapper.name not in RESCALING[part] or not (_is_float_box(inside) and _is_float_box(outside)):
            break
        source, target = (inside, outside) if part == "observations" else (outside, inside)
        affine = _between(source, target)  # type: ignore[arg-type]
        if affine is None:
            break
        maps.append((wrapper, affine))
        outside = inside  # type: ignore[assignment]
    return maps[::-1] if part == "observations" else maps


def _between(source: spaces.Box, target: spaces.Box) -> Affine | None:
    """Returns the map from the bounds of one Box to the bounds of another, or None if a range has no length.

    A component with one finite bound is shifted. A component without bounds, or with bounds in one space only, stays.
    """
    if source.shape != target.shape:
        return None
    bounds = [np.asarray(bound, np.float64) for bound in (source.low, source.high, target.low, target.high)]
    low, high, new_low, new_high = bounds
    lows, highs = np.isfinite(low) & np.isfinite(new_low), np.isfinite(high) & np.isfinite(new_high)
    both = lows & highs
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # in components that are not chosen
        scale = np.where(both, (new_high - new_low) / (high - low), 1.0)
        offset = np.where(lows, new_low - low * scale, np.where(highs, new_high - high, 0.0))
    if not (np.isfinite(scale).all() and np.isfinite(offset).all() and (scale > 0).all()):
        return None
    return Affine(scale, offset, target)


def _changes(name: str, kind: type | None = None) -> tuple[Part, ...] | None:
    """Returns what a wrapper with this name, and this class if it is known, can change: both if nothing is known.

    Returns None if it concerns neither observations nor actions.
    """
    module = name.rpartition(":")[0]
    if not module:  # one of Gymnasium's, whose names say it
        if name in REPEATING:
            return ()
        if name.endswith("Action"):
            return ("actions",)
        return ("observations",) if name.endswith("Observation") or name == "AtariPreprocessing" else None
    if kind is not None and issubclass(kind, gym.RewardWrapper):
        return None
    if kind is not None and issubclass(kind, gym.ActionWrapper):
        return ("actions",)
    if module == "vecenv.wrappers" or (kind is not None and issubclass(kind, gym.ObservationWrapper)):
        return ("observations",)
    return ("observations", "actions")


def _is_float_box(space: Any) -> bool:
    return isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)


def _described(space: gym.Space) -> dict[str, Any] | None:
    try:
        return space_to_json(space)
    except vecenv.UnsupportedSpace:
        return None


def _json(value: Any) -> Any:
    """Returns an argument as JSON values, or the name of its type if JSON cannot hold it, such as a circular dict."""
    try:
        return json.loads(json.dumps(value, default=_plain, skipkeys=True))
    except Exception:  # an argument may be of any class
        return str(type(value))


def _plain(value: Any) -> Any:
    return (
        value.tolist() if isinstance(value, np.ndarray | np.generic) else getattr(value, "__name__", str(type(value)))
    )


def _from_json(values: Mapping[str, Any]) -> Wrapper:
    inside = {part: space_from_json(space) for part, space in values["inside"].items() if space is not None}
    return Wrapper(str(values["name"]), dict(values["kwargs"]), tuple(values["changes"]), inside)
