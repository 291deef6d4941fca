"""SyncVectorEnv: EnvRows over plain arrays; the reference that tests trust."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.memory.block import Block
from vecenv.memory.layout import Layout
from vecenv.partial import PartialVectorEnv
from vecenv.rows.arguments import Seeds, check_env_fns, per_env, seed_of_each, split_reset_mask
from vecenv.rows.batch_rows import Batched, BatchRows, make_rows
from vecenv.rows.batch_spaces import ObservationMode
from vecenv.rows.info_memory import LEARNING_STEPS, Schema
from vecenv.rows.protocol import RowsOptions, StepObjects, combined
from vecenv.spaces import Path


class SyncVectorEnv(PartialVectorEnv):
    """Steps its envs one after the other in this process; a drop-in for `gymnasium.vector.SyncVectorEnv`.

    Args:
        env_fns: One function per env, each returning a new env with the same spaces; or a `Batched`.
        copy: Whether `reset` and `step` return copies of the observations. If False, they are views
            that stay intact until the step after next is taken (for `num_slots` slots: that many
            steps minus one).
        observation_mode: "same": all observation spaces are equal. "different": their bounds differ, their
            shapes and dtypes do not. Or a pair of spaces: the batched and the single one.
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
        env_fns: Sequence[Callable[[], gym.Env]] | Batched,
        copy: bool = True,
        observation_mode: ObservationMode = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        *,
        num_slots: int = 2,
        clip_actions: bool = False,
        float32_observations: bool = False,
        infos: bool = True,
    ):
        self.env_fns = check_env_fns(env_fns)
        super().__init__(
            num_envs=len(self.env_fns),
            num_slots=num_slots,
            copy=copy,
            observation_mode=observation_mode,
            autoreset_mode=autoreset_mode,
            infos=infos,
        )
        options = RowsOptions(self.autoreset_mode, clip_actions, float32_observations, infos)
        self._rows = make_rows(self.env_fns, first_env=0, options=options)
        self.envs = self._rows.envs
        self._fault = False
        self._learns_parts = False
        # Of each send: the envs to step, each with its action if that is not in memory.
        self._sent: deque[list[tuple[int, Any]]] = deque()
        about = self._rows.describe()
        self._take_spaces(about.spaces, about.metadata, about.render_mode)
        self._bind()

    def _bind(self) -> None:
        plan = self._plan()
        block = Block.private(plan.size)
        self._take_memory(block, plan)
        self._rows.bind(block.views(plan))

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy needs: `copy.deepcopy` gives a vector env that goes on from here by itself."""
        contents = {path: array.copy() for path, array in self.arrays.items()}
        forgotten: dict[str, Any] = {
            "slabs": {},
            "_info_views": None,
            "_learning_steps": LEARNING_STEPS if self.infos else 0,
        }
        return {**self.__dict__, "arrays": contents, **forgotten}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        contents = self.arrays
        self._bind()
        for path, array in contents.items():
            self.arrays[path][...] = array

    def reset(self, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets every env, or those of `options["reset_mask"]`; returns observations and infos."""
        return self._reset_result(self.reset_slot(self._next_slot(), seed=seed, options=options))

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Steps every env; returns observations, float64 rewards[N], bool terminated[N] and truncated[N], infos."""
        self._assert_idle("step")
        slot = self._next_slot()
        unfit = self.put_actions(actions, slot)
        return self._step_result(self.step_slot(slot, unfit))

    def reset_slot(self, slot: int, *, seed: Seeds = None, options: dict[str, Any] | None = None) -> StepObjects:
        """Resets the envs and leaves the batch in `slot`; returns what does not lie there."""
        self._assert_idle("reset")
        options, mask = split_reset_mask(options, self.num_envs)
        seeds = seed_of_each(seed, self.num_envs)
        self._fault = True  # until all rows are written
        objects = self._rows.reset(slot, seeds=seeds, options=options, mask=mask)
        self._fault = False
        self._slot = slot
        self._begun = True
        return objects

    def step_slot(self, slot: int, actions: Any = None) -> StepObjects:
        """Steps the envs with the actions in `slot` and leaves the batch there; returns what does not lie there."""
        self._assert_idle("step")
        self._fault = True  # until all rows are written
        try:
            objects = self._rows.step(slot, actions)
        except ResetNeeded:
            self._fault = not isinstance(self._rows, BatchRows)  # which raises it before it steps any env
            raise
        self._fault = False
        self._slot = slot
        return objects

    def _send_rows(self, env_ids: Sequence[int], unfit: Any) -> None:
        unfit = deepcopy(unfit)  # the caller may go on writing into it
        orders = [
            (i, None if unfit is None else self._action_writer.of_rows(unfit, slice(k, k + 1)))
            for k, i in enumerate(env_ids)
        ]
        self._sent.append(orders)

    def _receive_rows(self, min_envs: int, timeout: float | None) -> tuple[list[int], StepObjects]:
        ids: list[int] = []
        parts = []
        try:
            while len(ids) < min_envs:
                orders = self._sent.popleft()  # what was sent together is stepped together
                now, later = orders[: min_envs - len(ids)], orders[min_envs - len(ids) :]
                if later:
                    self._sent.appendleft(later)
                for rows, objects in self._rows.step_rows(self._slot, now):
                    parts.append((0, objects))
                    ids += rows
        except BaseException:
            self._fault = True
            raise
        return ids, combined(parts)

    @property
    def _broken(self) -> bool:
        return self._fault

    def _break(self) -> None:
        self._fault = True

    def _bind_infos(self, schema: Schema, plan: Layout) -> dict[Path, Any]:
        views = Block.private(plan.size).views(plan)
        self._rows.bind_infos(schema, views)
        return views

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls the method, or reads the attribute, `name` of every env."""
        self._assert_idle("call")
        return tuple(self._rows.call(name, args, kwargs))

    def apply(self, function: Callable[[gym.Env], Any], env_ids: Sequence[int] | None = None) -> list[Any]:
        """Calls `function(env)` for these envs, or for all, and returns the results in their order."""
        self._assert_idle("apply")
        return self._rows.apply(function, self._env_ids(env_ids))

    def set_attr(self, name: str, values: Any) -> None:
        """Sets the attribute `name`: a list or tuple gives one value for each env, anything else is for all."""
        self._assert_idle("set_attr")
        self._rows.set_attr(name, per_env(values, self.num_envs))

    def _get_states(self) -> list[dict[str, Any]]:
        return self._rows.get_state()

    def _set_states(self, slot: int, states: Sequence[dict[str, Any]]) -> None:
        self._rows.set_state(slot, states)

    def close_extras(self, **kwargs: Any) -> None:
        """Closes every env."""
        self._rows.close()
