"""base.py: RowsVectorEnv: what serial and parallel share: slots, checks of actions, Gymnasium's return values.

A subclass moves rows; this class owns the memory seen from the caller's side, and chooses slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, Self

import gymnasium as gym
import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vecenv import infos as info_memory
from vecenv import layout
from vecenv.errors import StateError
from vecenv.infos import Infos, Schema
from vecenv.layout import Layout, Path
from vecenv.memory import Block

Seeds = int | Sequence[int | None] | None


class RowsVectorEnv(VectorEnv):
    """A Gymnasium vector env whose batches lie in one block of `num_slots` slots.

    Attributes:
        arrays: Every field's `dtype[S, N, *shape]`, named by path (see `vecenv.layout`): the memory
            itself. Slot `s` belongs to the envs from the call of a step into it to its return, and
            to the caller otherwise.
        slabs: The same memory as contiguous `dtype[S, padded row length]`, for code that aliases it.
        num_slots: S. `step` writes into one slot after the other, round and round.
    """

    def __init__(self, *, num_envs: int, num_slots: int, copy: bool, autoreset_mode: str | AutoresetMode, infos: bool):
        if num_slots < 2:
            raise ValueError(f"num_slots={num_slots}, but a batch must outlive the next step: use 2 or more")
        self.num_envs = num_envs
        self.num_slots = num_slots
        self.copy = copy
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.infos = infos
        self.arrays: dict[Path, np.ndarray] = {}
        self.slabs: dict[Path, np.ndarray] = {}
        self._slot = 0
        self._info_views: dict[Path, np.ndarray] | None = None
        self._learning_steps = info_memory.LEARNING_STEPS if infos else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take_spaces(self, observation_space: Space, action_space: Space, metadata: Mapping[str, Any]) -> None:
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)
        self.metadata = {**metadata, "autoreset_mode": self.autoreset_mode}
        self._discrete_observations = {
            path for path, leaf in layout.leaves(observation_space) if isinstance(leaf, spaces.Discrete)
        }
        self._action_leaves = [
            (path, np.dtype(leaf.dtype), (self.num_envs, *(leaf.shape or ())))
            for path, leaf in layout.leaves(action_space)
        ]

    def _plan(self) -> Layout:
        rows = layout.env_fields(
            self.single_observation_space,
            self.single_action_space,
            final_observation=self.autoreset_mode == AutoresetMode.SAME_STEP,
        )
        return layout.plan(rows, num_slots=self.num_slots, num_envs=self.num_envs)

    def _take_memory(self, block: Block, plan: Layout) -> None:
        self.arrays = block.views(plan)
        self.slabs = block.slabs(plan)

    @property
    def episode_returns(self) -> np.ndarray:
        """Sum of rewards of each env's episode so far, at its last step the total: float64[N], a copy."""
        return self.arrays[layout.EPISODE_RETURN][self._slot].copy()

    @property
    def episode_lengths(self) -> np.ndarray:
        """Steps of each env's episode so far, at its last step the total: int64[N], a copy."""
        return self.arrays[layout.EPISODE_LENGTH][self._slot].copy()

    @property
    def np_random_seed(self) -> tuple[int, ...]:
        """The seed of each env's generator."""
        return self.get_attr("np_random_seed")

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:
        """Each env's generator (of a parallel vector env: a copy)."""
        return self.get_attr("np_random")

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Returns the attribute `name` of every env."""
        return self.call(name)

    def render(self) -> tuple[Any, ...] | None:
        """Returns what `render()` of every env gives."""
        return self.call("render")

    def observations(self, slot: int, name: str = layout.OBSERVATION) -> Any:
        """Returns the batch of observations in `slot`: views of the memory, nested as the space is."""
        return layout.nest(self.single_observation_space, lambda path: self.arrays[(name, *path)][slot])

    def _assert_open(self) -> None:
        if self.closed:
            raise StateError(f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.")

    def _seeds(self, seed: Seeds) -> list[int | None]:
        """Returns one seed per env: as given, or `seed + i`."""
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={self.num_envs} but got "
                f"length={len(seed)}."
            )
        return list(seed)

    def _reset_mask(self, options: dict[str, Any] | None) -> tuple[dict[str, Any] | None, np.ndarray | None]:
        """Splits `options` into those of the envs and the mask of envs to reset; changes nothing in it."""
        if options is None or "reset_mask" not in options:
            return options, None
        mask = options["reset_mask"]
        if not isinstance(mask, np.ndarray):
            raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
        if mask.shape != (self.num_envs,):
            raise ValueError(f"`options['reset_mask']` must have shape `({self.num_envs},)`, got {mask.shape}")
        if mask.dtype != np.bool_:
            raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
        if not mask.any():
            raise ValueError(
                "`options['reset_mask']` must contain a boolean array with at least one True value, "
                f"got reset_mask={mask}"
            )
        return {key: value for key, value in options.items() if key != "reset_mask"}, mask

    def put_actions(self, actions: Any, slot: int) -> Any:
        """Checks a batch of actions and writes it into `slot`.

        Returns:
            None; or the actions as arrays, if their dtype is another than the space's: such actions
            reach the envs as they are, as in Gymnasium, and do not fit the memory.

        Raises:
            ValueError: If the shape is wrong or an action is NaN; the message names the env.
            TypeError: If the dtype is of another kind, such as floats for a Discrete space.
        """
        batches = {}
        fits = True
        for path, dtype, shape in self._action_leaves:
            name = "".join(["actions", *(f"[{key!r}]" for key in path)])
            batch = batches[path] = np.asarray(_pick_action(actions, path, name))
            if batch.shape != shape:
                raise ValueError(
                    f"{name} has shape {batch.shape}, but {self.num_envs} envs with action space "
                    f"{self.single_action_space} need {shape}"
                )
            if batch.dtype is not dtype and batch.dtype != dtype:
                if not np.can_cast(batch.dtype, dtype, "same_kind"):
                    raise TypeError(f"{name} has dtype {batch.dtype}, but the action space needs {dtype}: convert it")
                fits = False
            if batch.dtype.kind == "f" and np.isnan(batch).any():
                env = int(np.argmax(np.isnan(batch).reshape(self.num_envs, -1).any(axis=1)))
                raise ValueError(
                    f"{name} for env {env} is NaN: {batch[env]}. The policy has most likely diverged; "
                    "no env was stepped."
                )
        if not fits:
            return layout.nest(self.single_action_space, batches.__getitem__)
        for path, batch in batches.items():
            self.arrays[(layout.ACTION, *path)][slot] = batch
        return None

    def _next_slot(self) -> int:
        return (self._slot + 1) % self.num_slots

    def _reset_result(self, infos: Infos) -> tuple[Any, dict[str, Any]]:
        return self._returned_observations(), self._merge(infos)

    def _step_result(self, infos: Infos) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        slot = self._slot
        terminated = self.arrays[layout.TERMINATED][slot].copy()
        truncated = self.arrays[layout.TRUNCATED][slot].copy()
        merged = self._merge(infos)
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            self._add_final_observations(merged, np.flatnonzero(terminated | truncated))
        if self._learning_steps:
            self._learn_infos(infos)
        return self._returned_observations(), self.arrays[layout.REWARD][slot].copy(), terminated, truncated, merged

    def _returned_observations(self) -> Any:
        # Owner: with copy=False the caller may read slot s until its turn comes again, num_slots steps later.
        name, slot, arrays = layout.OBSERVATION, self._slot, self.arrays
        if self.copy:
            return layout.nest(self.single_observation_space, lambda path: arrays[(name, *path)][slot].copy())
        return self.observations(slot)

    def _add_final_observations(self, merged: dict[str, Any], ended: np.ndarray) -> None:
        if len(ended) == 0:
            return
        finals = np.full(self.num_envs, fill_value=None, dtype=object)
        for i in ended:
            finals[i] = layout.nest(
                self.single_observation_space,
                lambda path, i=i: self._final_leaf(path, i),
            )
        merged["final_obs"] = finals
        merged["_final_obs"] = np.isin(np.arange(self.num_envs), ended)

    def _final_leaf(self, path: Path, i: int) -> Any:
        column = self.arrays[(layout.FINAL_OBSERVATION, *path)][self._slot]
        # An array even if it has no dimension; but of a Discrete space a number, as the env returned.
        return column[i] if path in self._discrete_observations else column[i, ...].copy()

    def _merge(self, infos: Infos) -> dict[str, Any]:
        merged = {} if self._info_views is None else info_memory.merged(self._info_views, self._slot)
        for i, info in infos:
            merged = self._add_info(merged, info, i)
        return merged

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        """Merges an env's info as Gymnasium does, but an int that comes first does not truncate later floats."""
        for key, value in env_info.items():
            column = vector_infos.get(key)
            if isinstance(column, np.ndarray) and column.dtype != object and isinstance(value, Number):
                vector_infos[key] = column.astype(np.promote_types(column.dtype, np.dtype(type(value))), copy=False)
        return super()._add_info(vector_infos, env_info, env_num)

    def _learn_infos(self, infos: Infos) -> None:
        """Gives infos a memory of their own once all envs have shown the same numeric keys in a step."""
        self._learning_steps -= 1
        schema = info_memory.learn(infos, self.num_envs)
        if schema is not None:
            self._learning_steps = 0
            plan = layout.plan(info_memory.fields(schema), num_slots=self.num_slots, num_envs=self.num_envs)
            self._info_views = self._bind_infos(schema, plan)
            self._info_views[info_memory.PRESENT][:] = False

    def _bind_infos(self, schema: Schema, plan: Layout) -> dict[Path, np.ndarray]:
        """Lets the rows write infos of this schema into a new block; returns the views of all rows."""
        raise NotImplementedError


def _pick_action(actions: Any, path: Path, name: str) -> Any:
    try:
        return layout.pick(actions, path)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{name} is missing: actions must be nested as the action space is") from error


def check_env_fns(env_fns: Sequence[Callable[[], gym.Env]]) -> list[Callable[[], gym.Env]]:
    """Returns the functions as a list, or raises if there are none or one cannot be called."""
    env_fns = list(env_fns)
    if not env_fns:
        raise ValueError("env_fns is empty: num_envs must be 1 or more")
    for i, env_fn in enumerate(env_fns):
        if not callable(env_fn):
            raise TypeError(
                f"env_fns[{i}] is {env_fn!r}, which is not a function: write `lambda: {type(env_fn).__name__}(...)`"
            )
    return env_fns


def per_env(values: Any, num_envs: int) -> list[Any]:
    """Returns one value for each env, as Gymnasium's `set_attr` reads its argument."""
    if not isinstance(values, (list, tuple)):
        return [values] * num_envs
    if len(values) != num_envs:
        raise ValueError(
            "Values must be a list or tuple with length equal to the number of environments. "
            f"Got `{len(values)}` values for {num_envs} environments."
        )
    return list(values)
