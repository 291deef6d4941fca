"""SyncVectorEnv: steps its envs in this process. Tests compare every other backend with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gymnasium as gym
from gymnasium.vector import AutoresetMode

from vecenv.rows.arguments import autoreset_mode_of, check_functions, check_info_keys
from vecenv.rows.batched import Batched
from vecenv.rows.messages import RowsOptions
from vecenv.vector.vector_env import ObservationMode, PooledVectorEnv
from vecenv.workers.local_pool import LocalPool


class SyncVectorEnv(PooledVectorEnv):
    """Steps its envs one by one in this process; a drop-in replacement for `gymnasium.vector.SyncVectorEnv`.

    It takes the arguments of `AsyncVectorEnv`, except those that concern workers. Exceptions raised by envs propagate
    unchanged, except StopIteration, which becomes an `EnvError`. As in Gymnasium, the envs share what their functions
    capture, and options and other arguments, with each other and with the caller.

    Attributes:
        envs: The envs; for a `Batched`, its vector env as the only element.

    Example:
        >>> import gymnasium as gym
        >>> import vecenv
        >>> envs = vecenv.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 3)
        >>> observations, infos = envs.reset(seed=42)
        >>> observations.shape
        (3, 4)
        >>> observations, rewards, terminated, truncated, infos = envs.step([0, 1, 1])
        >>> rewards
        array([1., 1., 1.])
        >>> envs.close()
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env]] | Batched,
        copy: bool = True,
        observation_mode: ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        num_slots: int = 2,
        clip_actions: bool = False,
        float32_observations: bool = False,
        finite_observations: bool = False,
        infos: bool = True,
        info_keys: Sequence[str] = (),
    ):
        self.env_fns = env_fns if isinstance(env_fns, Batched) else check_functions(env_fns)
        options = RowsOptions(
            autoreset_mode_of(autoreset_mode),
            clip_actions=clip_actions,
            float32_observations=float32_observations,
            finite_observations=finite_observations,
            infos=infos,
            info_keys=check_info_keys(info_keys),
        )
        pool = LocalPool(self.env_fns, options)
        super().__init__(pool, options, num_slots=num_slots, copy=copy, observation_mode=observation_mode)
        self.envs = pool.envs
