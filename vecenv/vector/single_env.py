"""SingleEnv: a vector env with one env, presented as a single env."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from vecenv.tree import nest, pick


class SingleEnv(gym.Env):
    """Presents a vector env that has one env, `vector_env`, as a single env. Infos are empty."""

    def __init__(self, envs: VectorEnv):
        self.vector_env, self.metadata, self.render_mode = envs, envs.metadata, envs.render_mode
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, _ = self.vector_env.reset(seed=seed, options=options)
        return self._first(observations), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        actions = concatenate(self.action_space, [action], create_empty_array(self.action_space, 1))  # type: ignore[arg-type]
        observations, rewards, terminated, truncated, _ = self.vector_env.step(actions)
        return self._first(observations), float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> Any:
        frames = self.vector_env.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        self.vector_env.close()

    def _first(self, observations: Any) -> Any:
        return nest(self.observation_space, lambda path: pick(observations, path)[0])
