"""Recognizes envs of other APIs, and names the wrapper that turns them into Gymnasium envs.

Objects are recognized by their methods and by the names of their modules, because the packages that define them may not
be installed.
"""

from __future__ import annotations

import inspect
import re
import traceback
from typing import Any

import gymnasium as gym

_MAKES_NO_ENV = "Each function must return one gymnasium.Env."

VECTOR_REWARD = (
    "For several rewards per step, return their weighted sum, for example with "
    "mo_gymnasium.wrappers.LinearReward(env, weight=...)"
)
"""What to do about a reward that is an array."""

_OLD_API = (
    "Gymnasium calls reset(seed=..., options=...) and expects (observation, info). From step(action), it expects "
    "(observation, reward, terminated, truncated, info). Change the env, or wrap one that is still a gym.Env in "
    "shimmy.GymV21CompatibilityV0(env=...) (pip install shimmy gym)."
)
_OF_OLD_API = re.compile(
    r"(not enough|too many) values to unpack \(expected 5|cannot unpack non-iterable|"
    r"reset\(\) (got an unexpected keyword argument '(seed|options)'|takes )"
)
"""Matches the messages of errors that an env with the API of Gym before 0.26 causes in its caller."""


def check_env(env: Any) -> None:
    """Raises TypeError, which says what to do, if an object is not an env, or is an env of another API.

    An env need not inherit from `gymnasium.Env`.
    """
    if not isinstance(env, gym.Env) and (advice := _advice(env)) is not None:
        raise TypeError(advice)


def takes_options(layer: Any) -> bool:
    """Returns whether the `reset` of an env or a wrapper accepts `options`.

    Gymnasium's vector envs pass them to the first reset, but SB3's only if they were set, so envs written for SB3 may
    not accept them.
    """
    try:
        parameters = inspect.signature(layer.reset).parameters.values()
    except (AttributeError, TypeError, ValueError):  # not a function that Python defines
        return True
    return any(parameter.name == "options" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def reset_result(env: Any, returned: Any) -> tuple[Any, Any]:
    """Returns the observation and the info that `reset` returned. Raises TypeError if it returned anything else."""
    # An array of two numbers could be unpacked, too.
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return returned[0], returned[1]
    raise TypeError(f"{_name(env)}.reset() returned a value of type {type(returned).__name__}. {_OLD_API}")


def advice_on(error: BaseException) -> str | None:
    """Returns what to do about an error that a method of the old API causes in its caller, or None for other errors."""
    if not isinstance(error, TypeError | ValueError) or not _OF_OLD_API.search(str(error)):
        return None
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_code.co_name == "env_data_reuse_passive_checker":  # a wrapper has called `reset` again after it raised
        return "To call `reset` again after it has raised, make the env with disable_env_checker=True."
    if frame.f_globals.get("__name__", "").partition(".")[0] not in ("vecenv", "gymnasium"):
        return None  # the same error in the env's own code has another cause
    if "'options'" in str(error):
        return "Gymnasium calls reset(seed=..., options=...): add the argument options=None to this `reset`."
    return _OLD_API


def _advice(env: Any) -> str | None:
    """Returns what an object is and how to turn it into an env, or None if it may be an env."""
    name = _name(env)
    if env is None:
        return f"the function returned None instead of an env: is its return statement missing? {_MAKES_NO_ENV}"
    if isinstance(env, type):
        return f"the function returned the class {env.__qualname__} instead of an env: call the class. {_MAKES_NO_ENV}"
    if isinstance(env, gym.vector.VectorEnv) or _has(env, "num_envs", "step_wait"):
        number = getattr(env, "num_envs", None)
        return (
            f"{name} is a vector env of {number} envs, not one env: pass functions that each return one of its envs, "
            "or vecenv.Batched(make, num_envs) to let vecenv step a gymnasium.vector.VectorEnv."
        )
    if _is_from("pettingzoo", env) or _has(env, "possible_agents"):
        return (
            f"{name} is a PettingZoo env with several agents: pass env_fns to "
            "vecenv.adapters.pettingzoo.ParallelVectorEnv, or train with `ppo train --env pettingzoo:MODULE:FUNCTION`."
        )
    if _is_from("gym", env):
        return (
            f"{name} is an env of OpenAI Gym, not of Gymnasium: wrap it in shimmy.GymV26CompatibilityV0(env=...), or "
            "in shimmy.GymV21CompatibilityV0(env=...) if its reset() accepts no seed (pip install shimmy)."
        )
    if _has(env, "observation_spec", "action_spec"):
        return (
            f"{name} is a dm_env.Environment, not a gymnasium.Env: wrap it in shimmy.DmControlCompatibilityV0(env) "
            "(pip install 'shimmy[dm-control]')."
        )
    missing = [attribute for attribute in ("observation_space", "action_space") if not _has(env, attribute)]
    if missing:
        return f"{name} is not an env, because it has no {' and no '.join(missing)}. {_MAKES_NO_ENV}"
    return None


def _name(env: Any) -> str:
    """Returns the name of the class of an env, without its wrappers."""
    return type(getattr(env, "unwrapped", env)).__qualname__


def _has(env: Any, *names: str) -> bool:
    return all(hasattr(env, name) for name in names)


def _is_from(package: str, env: Any) -> bool:
    """Returns whether a base class of an env is defined in a package."""
    return any(base.__module__.partition(".")[0] == package for base in type(env).__mro__)
