"""BatchedEnvironment: a vector env as a batched `dm_env.Environment`, like TF-Agents' BatchedPyEnvironment.

An episode is FIRST, MID, ..., LAST. The step after LAST ignores its action and returns the next episode's FIRST step.
Gymnasium calls this NEXT_STEP autoreset.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.errors import UnsupportedSpace
from vecenv.tree import enclosing

try:
    import dm_env
    from dm_env import specs
except ImportError as error:
    raise ImportError("vecenv.adapters.dm_env needs the package dm_env: pip install dm_env") from error


class BatchedEnvironment(dm_env.Environment):
    """Steps N envs at once and returns `dm_env.TimeStep`s whose fields are arrays with N rows.

    `step_type` is int32[N] (0, 1, 2 for FIRST, MID, LAST), `reward` float64[N], `discount` float64[N], and
    `observation` `[N, ...]`, nested like the observation space. A FIRST row has reward 0 and discount 1, as in
    TF-Agents. A LAST row has discount 0 if the episode terminated, and 1 if it was truncated.

    Args:
        envs: A vector env with NEXT_STEP autoreset. `close` closes it, too.
        seed: Seed of the first episodes; None for a random seed.

    Raises:
        ValueError: If the vector env has another autoreset mode.
        UnsupportedSpace: If dm_env has no spec for a space.

    Example:
        >>> import vecenv
        >>> from vecenv.adapters.dm_env import BatchedEnvironment
        >>> env = BatchedEnvironment(vecenv.make("CartPole-v1", num_envs=2), seed=0)
        >>> env.reset().step_type
        array([0, 0], dtype=int32)
        >>> env.step([0, 1]).reward
        array([1., 1.])
        >>> env.action_spec()
        DiscreteArray(shape=(), dtype=int64, name=None, minimum=0, maximum=1, num_values=2)
        >>> env.close()
    """

    def __init__(self, envs: VectorEnv, *, seed: int | None = None):
        if envs.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
            raise ValueError(
                f"the vector env's autoreset_mode is {envs.metadata.get('autoreset_mode')}, but dm_env's time "
                "steps need NEXT_STEP: build it with autoreset_mode='NextStep'"
            )
        self.envs = envs
        self._observation_spec = _spec(enclosing(envs.single_observation_space, envs.observation_space))
        self._action_spec = _spec(envs.single_action_space)
        self._seed = seed
        self._last: dm_env.TimeStep | None = None

    @property
    def batched(self) -> bool:
        """True, for TF-Agents."""
        return True

    @property
    def batch_size(self) -> int:
        """N, the number of envs."""
        return self.envs.num_envs

    def reset(self) -> dm_env.TimeStep:
        """Starts an episode in every env and returns a time step whose rows are all FIRST."""
        observations, _ = self.envs.reset(seed=self._seed)
        self._seed = None
        first = np.full(self.batch_size, dm_env.StepType.FIRST, np.int32)
        return self._remember(first, np.zeros(self.batch_size), np.ones(self.batch_size), observations)

    def step(self, action: Any) -> dm_env.TimeStep:
        """Steps every env and returns the time step. Envs whose previous row was LAST start a new episode instead."""
        if self._last is None:
            return self.reset()
        begun = self._last.step_type == dm_env.StepType.LAST
        observations, rewards, terminated, truncated, _ = self.envs.step(action)
        step_type = np.full(self.batch_size, dm_env.StepType.MID, np.int32)
        step_type[terminated | truncated] = dm_env.StepType.LAST
        step_type[begun] = dm_env.StepType.FIRST
        return self._remember(step_type, rewards, np.where(terminated, 0.0, 1.0), observations)

    def current_time_step(self) -> dm_env.TimeStep:
        """Returns the latest time step. Resets the envs if there is none."""
        return self.reset() if self._last is None else self._last

    def observation_spec(self) -> Any:
        """Returns the spec of one env's observation, nested like the space."""
        return self._observation_spec

    def action_spec(self) -> Any:
        """Returns the spec of one env's action, nested like the space."""
        return self._action_spec

    def close(self) -> None:
        """Closes the vector env."""
        self.envs.close()

    def _remember(self, step_type: Any, reward: Any, discount: Any, observation: Any) -> dm_env.TimeStep:
        self._last = dm_env.TimeStep(step_type, reward, discount, observation)
        return self._last


def _spec(space: gym.Space) -> Any:
    """Returns the specs of a space, nested like the space."""
    if isinstance(space, spaces.Dict):
        return {key: _spec(child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_spec(child) for child in space.spaces)
    if isinstance(space, spaces.Box):
        return specs.BoundedArray(space.shape, space.dtype, space.low, space.high)
    if isinstance(space, spaces.Discrete) and space.start == 0:
        return specs.DiscreteArray(int(space.n), space.dtype)
    if isinstance(space, spaces.Discrete):
        return specs.BoundedArray((), space.dtype, space.start, space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return specs.BoundedArray(space.shape, space.dtype, space.start, space.start + space.nvec - 1)
    if isinstance(space, spaces.MultiBinary):
        return specs.BoundedArray(space.shape, space.dtype, 0, 1)
    raise UnsupportedSpace(f"{type(space).__name__} has no spec in dm_env: wrap the env so that it uses arrays")
