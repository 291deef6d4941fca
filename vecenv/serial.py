"""serial.py: SyncVectorEnv: EnvRows over plain arrays; the reference that tests trust."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode

from vecenv.base import RowsVectorEnv, Seeds, check_env_fns, per_env
from vecenv.infos import Infos, Schema
from vecenv.layout import Layout, Path
from vecenv.memory import Block
from vecenv.rows import EnvRows


class SyncVectorEnv(RowsVectorEnv):
    """Steps its envs one after the other in this process; a drop-in for `gymnasium.vector.SyncVectorEnv`.

    Args:
        env_fns: One function per env, each returning a new env with the same spaces.
        copy: Whether `reset` and `step` return copies of the observations. If False, they are views
            that stay intact until the step after next is taken (for `num_slots` slots: that many
            steps minus one).
        autoreset_mode: `NEXT_STEP`, `SAME_STEP` or `DISABLED`, as in Gymnasium.
        num_slots: Slots of the ring that batches are written to, 2 or more.
        clip_actions: Clip Box actions to the env's bounds; the action space becomes unbounded.
        float32_observations: Return float64 observations as float32; non-finite values raise.
        infos: Whether to return infos. If False, they are dropped where they arise.

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
        env_fns: Sequence[Callable[[], gym.Env]],
        *,
        copy: bool = True,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        num_slots: int = 2,
        clip_actions: bool = False,
        float32_observations: bool = False,
        infos: bool = True,
    ):
        self.env_fns = check_env_fns(env_fns)
        super().__init__(
            num_envs=len(self.env_fns), num_slots=num_slots, copy=copy, autoreset_mode=autoreset_mode, infos=infos
        )
        self._rows = EnvRows(
            self.env_fns,
            autoreset_mode=self.autoreset_mode,
            clip_actions=clip_actions,
            float32_observations=float32_observations,
            infos=infos,
        )
        self.envs = self._rows.envs
        self.render_mode = self.envs[0].render_mode
        self._take_spaces(self._rows.observation_space, self._rows.action_space, self.envs[0].metadata)
        plan = self._plan()
        block = Block.private(plan.size)
        self._take_memory(block, plan)
        self._rows.bind(block.views(plan))

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets every env, or those of `options["reset_mask"]`; returns observations and infos."""
        self._assert_open()
        return self._reset_result(self.reset_slot(self._next_slot(), seed=seed, options=options))

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps every env; returns observations, float64 rewards[N], bool terminated[N] and truncated[N], infos."""
        self._assert_open()
        slot = self._next_slot()
        unfit = self.put_actions(actions, slot)
        return self._step_result(self.step_slot(slot, unfit))

    def reset_slot(self, slot: int, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> Infos:
        """Resets the envs and leaves the batch in `slot`; returns the infos that are not empty, by env."""
        options, mask = self._reset_mask(options)
        infos = self._rows.reset(slot, seeds=self._seeds(seed), options=options, mask=mask)
        self._slot = slot
        return infos

    def step_slot(self, slot: int, actions: Any = None) -> Infos:
        """Steps the envs with the actions in `slot` and leaves the batch there; returns the infos, by env."""
        infos = self._rows.step(slot, actions)
        self._slot = slot
        return infos

    def _bind_infos(self, schema: Schema, plan: Layout) -> dict[Path, Any]:
        views = Block.private(plan.size).views(plan)
        self._rows.bind_infos(schema, views)
        return views

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the method, or reads the attribute, `name` of every env."""
        self._assert_open()
        return tuple(self._rows.call(name, args, kwargs))

    def set_attr(self, name: str, values: Any) -> None:
        """Sets the attribute `name`: a list or tuple gives one value for each env, anything else is for all."""
        self._assert_open()
        self._rows.set_attr(name, per_env(values, self.num_envs))

    def close_extras(self, **kwargs: Any) -> None:
        """Closes every env."""
        self._rows.close()
