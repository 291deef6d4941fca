"""The states of single envs, layer by layer: of wrappers, and of the env that they wrap."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from vecenv.errors import NotRestorable
from vecenv.state.plain import pack, unpack

_KNOWN_MODULES = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.toy_text.",
    "gymnasium.wrappers.",
    "vecenv.wrappers",
)
# Known classes, and their attributes that change from step to step, except windows and images.
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "AcrobotEnv": ("state",),
    "CartPoleEnv": ("state", "steps_beyond_terminated"),
    "Continuous_MountainCarEnv": ("state",),
    "MountainCarEnv": ("state",),
    "PendulumEnv": ("state", "last_u"),
    "BlackjackEnv": ("dealer", "player", "dealer_top_card_suit", "dealer_top_card_value_str"),
    "CliffWalkingEnv": ("s", "lastaction"),
    "FrozenLakeEnv": ("s", "lastaction"),
    "TaxiEnv": ("s", "lastaction", "fickle_step", "taxi_orientation"),
    "DelayObservation": ("observation_queue",),
    "FrameStackObservation": ("obs_queue",),
    "MaxAndSkipObservation": ("_obs_buffer",),
    "OrderEnforcing": ("_has_reset",),
    "PassiveEnvChecker": ("checked_reset", "checked_step", "checked_data_reuse", "_previous_data"),
    "RepeatAction": (),
    "StickyAction": ("last_action", "is_sticky_actions", "num_repeats", "repeats_taken"),
    "TimeAwareObservation": ("timesteps",),
    "TimeLimit": ("_elapsed_steps",),
    "IgnoreKeys": (),
    "ActionMaskObservation": ("_mask",),
}

REBUILD = "Build the envs as they were built when the states were saved."


def state_of(env: Any) -> list[dict[str, Any]]:
    """Returns the state of an env: one dict per layer, the outermost wrapper first.

    Raises:
        NotRestorable: If a layer neither defines its state nor is known here, or if its state is not plain.
    """
    *wrappers, inner = layers_of(env)
    random = [inner._np_random, inner._np_random_seed] if isinstance(inner, gym.Env) else [None, None]
    states = [{"class": type(layer).__qualname__, "state": _state_of_layer(layer)} for layer in (*wrappers, inner)]
    states[-1]["random"] = pack(random, f"{type(inner).__qualname__}.np_random")
    return states


def _state_of_layer(layer: Any) -> Any:
    name, attributes = type(layer).__qualname__, _attributes_of(type(layer))
    if has_state_methods(layer):
        return pack(layer.get_state(), f"{name}.get_state()")
    if attributes is None:
        raise unknown_state(layer)
    return pack({key: value for key, value in vars(layer).items() if key in attributes}, name)


def restore(env: Any, states: Sequence[dict[str, Any]]) -> None:
    """Restores the state that `state_of` returned for an env of the same classes; otherwise raises ValueError."""
    check_classes(env, states)
    layers = layers_of(env)
    inner = layers[-1]
    generator, seed = unpack(states[-1]["random"])
    start = generator and generator.bit_generator.state
    if isinstance(inner, gym.Env):  # set_state() may pass the generator to other objects
        inner._np_random, inner._np_random_seed = generator, seed
    for layer, part in reversed([*zip(layers, states, strict=True)]):
        state = unpack(part["state"])
        if has_state_methods(layer):
            layer.set_state(state)
        else:
            vars(layer).update(state)
    if isinstance(inner, gym.Env):  # set_state() may have reset the env, or drawn numbers
        inner._np_random, inner._np_random_seed = generator, seed
    if generator is not None:
        generator.bit_generator.state = start


def check_classes(env: Any, state: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError if a state belongs to an env of another class or with other wrappers."""
    saved, here = [str(part["class"]) for part in state], [type(layer).__qualname__ for layer in layers_of(env)]
    if saved != here:
        raise ValueError(f"the state belongs to {' > '.join(saved)}, but this env is {' > '.join(here)}. {REBUILD}")


def has_state_methods(layer: Any) -> bool:
    """Returns whether the class of an env or wrapper defines `get_state()` and `set_state(state)`."""
    cls = type(layer)  # not the instance, which may forward attributes of the env that it wraps
    try:
        inspect.signature(cls.get_state).bind(layer)
        inspect.signature(cls.set_state).bind(layer, None)  # MujocoEnv.set_state(qpos, qvel) is unrelated
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def unknown_state(layer: Any) -> NotRestorable:
    """Returns the error for an env or wrapper whose state is unknown."""
    name = type(layer).__qualname__
    return NotRestorable(
        f"{name} does not define get_state() and set_state(state), so its state cannot be restored exactly. Define "
        f"both on {name} (see docs/engine.md)."
    )


def layers_of(env: Any) -> list[Any]:
    """Returns the wrappers of an env, the outermost first, and the env itself."""
    return [env, *layers_of(env.env)] if isinstance(env, gym.Wrapper) else [env]


def _attributes_of(cls: type) -> tuple[str, ...] | None:
    """Returns the names of the attributes that are the state of a known class; None for any other class."""
    if not cls.__module__.startswith(_KNOWN_MODULES):
        return None
    if cls.__module__.startswith("gymnasium.wrappers.transform_") and not cls.__name__.startswith("Transform"):
        return ()  # the functions that these wrappers define themselves have no state
    return _ATTRIBUTES.get(cls.__name__)
