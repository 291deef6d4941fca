"""Every env that is registered with Gymnasium, as "vecenv/ID" for `gymnasium.make_vec`.

Gymnasium 1.0 dropped the hook by which an installed package could add ids unasked. So `import vecenv` adds them: a row
in Gymnasium's registry for each id that is there, and nothing else.
"""

from __future__ import annotations

import inspect
from typing import Any

import gymnasium as gym

from vecenv.async_vector_env import AsyncVectorEnv
from vecenv.make import make

NAMESPACE = "vecenv"

# Of a call of make_vec, these go to the vector env and all others to the envs.
_VECTOR_ARGUMENTS = set(inspect.signature(AsyncVectorEnv.__init__).parameters) - {"self", "env_fns", "num_workers"}


def register_envs() -> None:
    """Registers "vecenv/ID" for every id that Gymnasium knows by now and that has no such twin yet.

    Importing vecenv does so; call it for envs that are registered later. In an id that has a namespace itself, a
    dot takes the place of its slash: "vecenv/ALE.Pong-v5".
    """
    for spec in list(gym.registry.values()):
        twin = f"{NAMESPACE}/{spec.id.replace('/', '.')}"
        if spec.namespace != NAMESPACE and spec.entry_point is not None and twin not in gym.registry:
            gym.register(id=twin, vector_entry_point="vecenv.registration:make_registered", kwargs={"env_id": spec.id})


def make_registered(env_id: str, num_envs: int = 1, **arguments: Any) -> AsyncVectorEnv:
    """Returns what `gymnasium.make_vec("vecenv/ID", num_envs, ...)` gives.

    Args:
        env_id: The id without "vecenv/".
        num_envs: How many.
        **arguments: Of `vecenv.make`, of `AsyncVectorEnv`, or else of the env itself.
    """
    vector_kwargs = {name: arguments.pop(name) for name in _VECTOR_ARGUMENTS & set(arguments)}
    return make(env_id, num_envs, vector_kwargs=vector_kwargs, **arguments)
