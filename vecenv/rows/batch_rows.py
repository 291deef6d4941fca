"""BatchRows: a run of envs that one vector env steps in one call, with the methods of EnvRows.

The vector env resets its envs itself. This class checks the results and writes them to the rows, except observations
that the vector env has already written. It also handles episodes that were cut because their process died.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv import spaces as tree
from vecenv.errors import NotRestorable
from vecenv.memory import layout
from vecenv.rows import checks, episode_infos
from vecenv.rows.actions import clipper, unbounded
from vecenv.rows.autoreset import Episodes, cut_info
from vecenv.rows.env_rows import EnvRows
from vecenv.rows.info_memory import Infos, InfoWriter, Schema
from vecenv.rows.infos import lacks_masks, select_infos, split_infos, with_masks
from vecenv.rows.observations import FloatLeaves, as_float32
from vecenv.rows.protocol import NO_OBJECTS, EnvDescription, EnvSpaces, Rows, RowsOptions, StepObjects, combined
from vecenv.rows.seeds import SeedForm
from vecenv.spaces import Path
from vecenv.state import check_classes, has_state_methods, pack, unpack

PER_ENV_ATTRIBUTES = ("render", "np_random", "np_random_seed")
"""Attributes of a vector env that hold one value per env. All other attributes hold one value for all its envs."""
ADVICE = "If you need single envs, build them from a list of functions, or with vecenv.make(..., backend='python')."


class Batched:
    """Stands for `num_envs` env functions when one function builds many envs at once.

    Pass it to `AsyncVectorEnv` or `SyncVectorEnv` instead of a list of functions. Each worker builds one vector env
    for its run of envs, steps it in one call, and writes the results to the memory of its rows.

    The vector env must
    - accept seeds in `reset`: a list with one seed per env; or an array with one seed for each env that is reset; or
      one int for all envs of a worker, in which case results depend on the number of workers;
    - reset its envs as `metadata["autoreset_mode"]` says, with the last observations in `infos["final_obs"]` if the
      mode is `SAME_STEP`;
    - honor `options["reset_mask"]` if you use masks;
    - return infos in Gymnasium's format; an array under a key without a mask has a value for every env;
    - never write to arrays that it has returned;
    - not write to attributes of its class or module during a step if `num_groups` is larger than 1, because threads
      then step several vector envs at once.

    It may also define
    - `step_rows(ids, actions)`, which steps some of its envs and returns rows for all of them: required by `send`,
      `recv` and `on_worker_death="restart"`;
    - a keyword argument `out` of both `step(actions, out=...)` and `reset(seed=..., options=..., out=...)`: arrays
      `[n, ...]`, nested like the observation space, that the vector env fills with its observations and returns
      instead of new arrays. This saves a copy of each observation. The arrays are the memory of the rows, in the dtype
      of the returned observations: float32 instead of float64 with `float32_observations=True`;
    - `drop_infos()`, which is called once if the engine needs no infos; later infos may hold only `final_obs`;
    - `get_state()`, which returns a list of one plain state per env, and `set_state(states)`: required by the methods
      of the same name.

    `vecenv.mujoco.MujocoVectorEnv` defines all of these. A wrapper must define them itself, because Gymnasium's
    `VectorWrapper` does not forward them.

    Args:
        make: Called as `make(num_envs=n, autoreset_mode=mode)`; returns a vector env of n envs.
        num_envs: N.

    Example:
        >>> import vecenv
        >>> from vecenv.mujoco import Hopper
        >>> with vecenv.AsyncVectorEnv(vecenv.Batched(Hopper, 16), num_workers=2) as envs:  # one thread each
        ...     observations, infos = envs.reset(seed=0)
        >>> observations.shape
        (16, 11)
    """

    def __init__(self, make: Callable[..., VectorEnv], num_envs: int):
        if not callable(make):
            raise TypeError(f"make={make!r} is not a function: it must build a vector env of num_envs envs")
        if num_envs < 1:
            raise ValueError(f"num_envs={num_envs}: it must be 1 or more")
        self.make = make
        self.num_envs = num_envs

    def __len__(self) -> int:
        return self.num_envs

    def __getitem__(self, rows: slice) -> Batched:
        """Returns the `Batched` for a run of the envs."""
        return Batched(self.make, len(range(self.num_envs)[rows]))

    def build(self, autoreset_mode: AutoresetMode) -> VectorEnv:
        """Returns the vector env.

        Raises:
            TypeError: If `make` returns anything else.
            ValueError: If the vector env has another number of envs or another autoreset mode.
        """
        env: Any = self.make(num_envs=self.num_envs, autoreset_mode=autoreset_mode)
        if not isinstance(env, VectorEnv):
            raise TypeError(f"make() returned a {type(env).__name__}, but must return a gymnasium.vector.VectorEnv")
        if env.num_envs != self.num_envs:
            raise ValueError(f"make(num_envs={self.num_envs}) returned a vector env of {env.num_envs} envs")
        mode = env.metadata.get("autoreset_mode")
        if mode != autoreset_mode:
            raise ValueError(
                f"make(autoreset_mode={autoreset_mode}) returned a vector env whose metadata['autoreset_mode'] is "
                f"{mode}: pass autoreset_mode={mode} to vecenv, or return a vector env that honors the argument"
            )
        return env


def make_rows(env_fns: Sequence[Callable] | Batched, *, first_env: int, options: RowsOptions) -> Rows:
    """Builds the envs and returns their rows: `BatchRows` for a `Batched`, `EnvRows` for a list of functions."""
    if isinstance(env_fns, Batched):
        return BatchRows(env_fns, first_env=first_env, options=options)
    return EnvRows(env_fns, first_env=first_env, options=options)


class _FirstStep(NamedTuple):
    """The first observations and infos of episodes whose rows were taken over from a process that died."""

    observations: Any
    infos: list[dict[str, Any]]


class _Slot:
    """The rows of one slot."""

    def __init__(self, views: dict[Path, np.ndarray], space: gym.Space, first_env: int):
        self.views = views
        self.observations = tree.nest(space, lambda path: views[(layout.OBSERVATION, *path)])
        self.floats = FloatLeaves(views, first_env)
        self.episode_infos = episode_infos.columns(views)


class BatchRows:
    """The envs `first_env : first_env + n` of one vector env and the rows of memory that they write.

    Args:
        batched: Builds the vector env.
        first_env: Index of the first env among all envs, for messages.
        options: See `RowsOptions`.

    Attributes:
        failure: For the last exception that the vector env raised: the env index, or None for all envs, and the
            operation, such as "step".
        envs: The vector env, as the only element.
    """

    def __init__(
        self,
        batched: Batched,
        *,
        first_env: int = 0,
        options: RowsOptions = RowsOptions(),  # noqa: B008  # frozen
    ):
        self.first_env = first_env
        self.failure: tuple[int | None, str] | None = None
        self._count = len(batched)
        self._options = options
        self._keep_infos, self._check_finite = options.infos, options.finite_observations
        self._env: Any = self._guarded("construction", lambda: batched.build(options.autoreset_mode))
        self.envs: list[Any] = [self._env]
        self._seeding = SeedForm(self._env)
        env = self._env
        for space in (env.single_observation_space, env.single_action_space):
            tree.check_fixed(space, ADVICE)
        self._steps_subsets = hasattr(env, "step_rows")
        self._accepts_out = _has_parameter(env.step, "out") and _has_parameter(env.reset, "out")
        self._clip = clipper(env.single_action_space) if options.clip_actions else None
        self._observed = [path for path, _ in tree.leaves(env.single_observation_space)]
        # This checks the class, because a wrapper may forward the attribute but need the infos itself.
        if not options.infos and not options.info_keys and hasattr(type(env), "drop_infos"):
            env.drop_infos()
        self._slots: list[_Slot] = []
        self._last_slot = 0
        self._info_writer: InfoWriter | None = None
        self._adds_masks: bool | None = None  # whether infos lack masks; None until the first infos
        self._numbers = np.arange(self._count)
        self._episodes = Episodes(options.autoreset_mode, waiting=np.zeros(self._count, np.bool_))
        # Rows that were taken over and whose next episode has not begun. The takeover reset the vector env, which is
        # at the beginning of that episode and must not step these rows yet.
        self._taken_over: set[int] = set()
        self._first = _FirstStep(None, [])

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy, which must be bound to its own memory."""
        return {**self.__dict__, "_slots": [], "_info_writer": None}

    def describe(self) -> EnvDescription:
        """Returns the spaces and properties of the envs, which all have the same spaces."""
        env = self._env
        observed, acted = env.single_observation_space, env.single_action_space
        if self._options.float32_observations:
            observed = as_float32(observed)
        accepted = unbounded(acted) if self._options.clip_actions else acted
        return EnvDescription(
            [EnvSpaces(self.first_env, observed, accepted, acted)],
            dict(env.metadata),
            env.render_mode,
            steps_subsets=self._steps_subsets,
        )

    def bind(self, views: Mapping[Path, np.ndarray]) -> None:
        """Sets the memory to write: every field's `[S, n, ...]` for these rows."""
        space, num_slots = self._env.single_observation_space, len(views[layout.REWARD])
        self._slots = [
            _Slot({path: view[slot] for path, view in views.items()}, space, self.first_env)
            for slot in range(num_slots)
        ]

    def bind_infos(self, schema: Schema, views: Mapping[Path, np.ndarray]) -> None:
        """Sets the memory for infos of this schema; from now on `step` returns only infos that do not fit it."""
        self._info_writer = InfoWriter(schema, views)

    def reset(
        self,
        slot: int,
        *,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None = None,
        mask: np.ndarray | None = None,
    ) -> StepObjects:
        """Resets every env, or the envs in `mask: bool[n]`, and writes all rows of `slot`."""
        at = self._slots[slot]
        views, rows = at.views, slice(None) if mask is None else np.flatnonzero(mask)
        if mask is not None:
            for path, array in self._slots[self._last_slot].views.items():
                if path[0] != layout.ACTION:
                    views[path][~mask] = array[~mask]
            options = {**(options or {}), "reset_mask": mask}
        if self._info_writer is not None:
            self._info_writer.clear(slot)
        objects = NO_OBJECTS
        if mask is None or mask.any():
            how: dict[str, Any] = {"options": options}
            if self._accepts_out and mask is None:
                how["out"] = at.observations
            observations, infos = self._guarded("reset", lambda: self._seeding.reset(seeds, mask, **how))
            self._guarded("reset", lambda: self._check_infos(infos, "reset"))
            self._guarded("reset", lambda: self._write_observations(at, observations, rows))
            _write_begin(views, rows)
            self._taken_over.difference_update(numbers := self._numbers[rows].tolist())
            self._episodes.begin(numbers)
            objects = self._infos_of(self._masked(infos), np.ones(self._count, np.bool_) if mask is None else mask)
        self._episodes.write_totals(views)
        self._finish(slot, "reset", rows, [])
        return objects

    def step(self, slot: int, actions: Any = None, only: Sequence[int] | None = None) -> StepObjects:
        """Steps the envs as `EnvRows.step` does, but in one call for all envs or for all of `only`."""
        if only is not None or self._taken_over:
            return self._step_some(slot, actions, list(range(self._count) if only is None else only))
        at = self._slots[slot]
        actions = self._actions(at, actions, slice(None))
        if self._accepts_out:
            # Owner: the vector env, all rows of the slot, until its step returns.
            result = self._guarded("step", lambda: self._env.step(actions, out=at.observations))
        else:
            result = self._guarded("step", lambda: self._env.step(actions))
        return self._write_step(slot, result, slice(None))

    def step_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> Iterator[tuple[list[int], StepObjects]]:
        """Steps some rows in one call. Each row comes with its action, or with None if the action is stored in memory.

        Yields all rows at once, with their objects.
        """
        rows = [row for row, _ in orders]
        actions = None
        if orders[0][1] is not None:
            actions = self._nested(lambda path: np.concatenate([tree.pick(action, path) for _, action in orders]))
        yield rows, self.step(slot, actions, rows)

    def resume(self, slot: int, over: Sequence[bool]) -> None:
        """Takes over rows whose process died. Their episodes are truncated at the next step."""
        self._last_slot = slot
        self._episodes.resume(self._slots[slot].views, over)
        observations, infos = self._guarded("reset", self._env.reset)
        self._guarded("reset", lambda: self._check_infos(infos, "reset"))
        self._first = _FirstStep(observations, split_infos(self._masked(infos), self._count))
        self._taken_over = set(range(self._count))

    def _step_some(self, slot: int, actions: Any, rows: list[int]) -> StepObjects:
        """Steps some rows. For rows that were taken over, `_step_taken_over` stands in for the vector env."""
        last, stepped = self._slots[self._last_slot], [row for row in rows if row not in self._taken_over]
        taken_over = [row for row in rows if row in self._taken_over]
        objects = NO_OBJECTS
        if stepped:
            if not self._steps_subsets:
                error = NotImplementedError(
                    f"{type(self._env).__name__} steps all its envs at once: to step some of them, it needs "
                    "step_rows(ids, actions), see vecenv.Batched"
                )
                self._blame(error, None, "step")
                raise error
            if actions is not None and len(stepped) < len(rows):
                chosen, given = [rows.index(row) for row in stepped], actions
                actions = self._nested(lambda path: tree.pick(given, path)[chosen])
            given = self._actions(self._slots[slot], actions, stepped)
            # No `out`: these envs do not own the remaining rows of the slot.
            result = self._guarded("step", lambda: self._env.step_rows(stepped, given))
            objects = self._write_step(slot, result, stepped)
        if taken_over:
            infos = self._step_taken_over(slot, last, taken_over)
            objects = combined([(0, objects), (0, StepObjects(infos if self._keep_infos else [], {}))])
        return objects

    def _step_taken_over(self, slot: int, last: _Slot, rows: list[int]) -> Infos:
        """Reports the cut episodes of these rows, or begins the next ones; returns the infos."""
        at, episodes = self._slots[slot], self._episodes
        began, ended, infos = [], [], []
        if self._info_writer is not None:
            self._info_writer.clear(slot, rows)
        for row in rows:
            if cut := row in episodes.cut:
                begins = episodes.report_cut(at.views, last.views, row)
            else:
                self._guarded("step", episodes.assert_autoreset)
                begins = True
                _write_begin(at.views, row)
                began.append(row)
            if begins:
                for path in self._observed:
                    at.views[(layout.OBSERVATION, *path)][row] = tree.pick(self._first.observations, path)[row]
                episodes.waiting[row] = False
                if cut:
                    ended.append(row)
            if begins or episodes.autoreset_mode == AutoresetMode.DISABLED:
                self._taken_over.discard(row)
            reset_info = self._first.infos[row] if begins else None
            if info := cut_info(reset_info) if cut else reset_info:
                infos.append((row, info))
        episodes.count(at.views, rows, began, ended)
        self._finish(slot, "step", rows, [])
        return infos

    def _write_step(self, slot: int, result: tuple, rows: list[int] | slice) -> StepObjects:
        """Writes the result of a step into these rows; returns the infos that do not fit the memory."""
        at, episodes = self._slots[slot], self._episodes
        views = at.views
        observations, rewards, terminated, truncated, infos = result
        self._guarded("step", lambda: self._check_infos(infos, "step"))
        self._guarded("step", lambda: self._write_observations(at, observations, rows))
        views[layout.REWARD][rows] = self._column("reward", rewards, rows, checks.number, "biuf")
        terminated = views[layout.TERMINATED][rows] = self._column("terminated", terminated, rows, checks.flag, "b")
        truncated = views[layout.TRUNCATED][rows] = self._column("truncated", truncated, rows, checks.flag, "b")
        numbers, over = self._numbers[rows], terminated | truncated
        began = ended = numbers[:0]
        if episodes.autoreset_mode == AutoresetMode.SAME_STEP:
            ended = numbers[over]
            self._guarded("step", lambda: self._write_finals(at, infos, ended))
        elif episodes.autoreset_mode == AutoresetMode.NEXT_STEP:
            began = numbers[episodes.waiting[rows]]
            episodes.waiting[rows] = over
        if at.episode_infos:
            self._write_episode_infos(at, infos, numbers[over])
        episodes.count(views, rows, began, ended)
        self._finish(slot, "step", rows, ended)
        return self._write_infos(slot, infos, rows)

    def _check_infos(self, infos: Any, doing: str) -> None:
        try:
            checks.check_info(infos)
        except TypeError as error:
            raise TypeError(
                f"info of {self._who(None)} at {doing} {error}: fix what {type(self._env).__name__} returns"
            ) from None

    def _column(self, name: str, values: Any, rows: Any, check: Callable[[Any], Any], kinds: str) -> np.ndarray:
        """Returns the rewards or flags of these rows. Checks each value unless the dtype's kind is in `kinds`."""
        array = np.asarray(values)
        if array.shape != (self._count,):
            error: Exception = ValueError(
                f"{type(self._env).__name__} returned {name} of shape {array.shape} for {self._count} envs: "
                "fix its step()"
            )
            self._blame(error, None, "step")
            raise error
        if array.dtype.kind in kinds:
            return array[rows]
        checked = []
        for row, value in zip(self._numbers[rows].tolist(), array[rows], strict=True):
            try:
                checked.append(check(value))
            except TypeError as reason:
                episodes = self._episodes
                when = "reset" if episodes.waiting[row] else f"step {episodes.totals(row)[1] + 1} of its episode"
                error = TypeError(
                    f"{name} of {self._who(row)} at {when} {reason}: fix what {type(self._env).__name__} returns"
                )
                self._blame(error, row, "step")
                raise error from None
        return np.array(checked)

    def _write_observations(self, at: _Slot, observations: Any, rows: Any) -> None:
        # Owner: this process, these rows of the slot, until it replies to the command in progress.
        if observations is at.observations:
            return  # the vector env has already written them, see `out` in Batched
        for path in self._observed:
            values, column = tree.pick(observations, path), at.views[(layout.OBSERVATION, *path)]
            if np.shape(values) != column.shape:  # numpy would broadcast one row over all rows
                name = tree.name_of(layout.OBSERVATION, path)
                raise ValueError(
                    f"{type(self._env).__name__} returned {name} of shape {np.shape(values)}, but its space says "
                    f"{column.shape}: fix its reset() and step()"
                )
            column[rows] = values[rows]

    def _write_finals(self, at: _Slot, infos: dict[str, Any], ended: np.ndarray) -> None:
        if not len(ended):
            return
        finals = infos.get("final_obs")
        if finals is None:
            raise ValueError(
                f"{type(self._env).__name__} ended episodes of envs {(self.first_env + ended).tolist()} in SAME_STEP "
                "mode without infos['final_obs'], which must hold their last observations"
            )
        for path in self._observed:
            for row in ended.tolist():
                at.views[(layout.FINAL_OBSERVATION, *path)][row] = tree.pick(finals[row], path)

    def _write_episode_infos(self, at: _Slot, infos: dict[str, Any], over: np.ndarray) -> None:
        """Writes the selected infos of the rows whose episodes ended in this step."""
        source = infos.get("final_info") if self._episodes.autoreset_mode == AutoresetMode.SAME_STEP else infos
        for row in over.tolist():
            for key, column in at.episode_infos.items():
                value = episode_infos.find_in_batch(source, key, row)
                try:
                    column[row] = episode_infos.number(value)
                except TypeError as reason:
                    error = TypeError(
                        f"info {key!r} of {self._who(row)} at step {self._episodes.totals(row)[1] + 1} of its episode "
                        f"{reason}: fix what {type(self._env).__name__} returns"
                    )
                    self._blame(error, row, "step")
                    raise error from None

    def _write_infos(self, slot: int, infos: dict[str, Any], rows: Any) -> StepObjects:
        """Writes the infos of these rows to memory; returns the infos that do not fit there."""
        if not self._keep_infos:
            return NO_OBJECTS
        if self._adds_masks is not False:  # the usual case costs no call
            infos = self._masked(infos)
        unwritten = np.zeros(self._count, np.bool_)
        unwritten[rows] = True
        if self._info_writer is not None:
            self._info_writer.clear(slot, rows)
            unwritten &= ~self._info_writer.write_rows(slot, infos, unwritten)
        return self._infos_of(infos, unwritten)

    def _masked(self, infos: dict[str, Any]) -> dict[str, Any]:
        """Returns infos in Gymnasium's format. The first infos show whether the vector env returns masks."""
        if self._adds_masks is None and infos:
            self._adds_masks = lacks_masks(infos)
        return with_masks(infos, self._count) if self._adds_masks else infos

    def _infos_of(self, infos: dict[str, Any], rows: np.ndarray) -> StepObjects:
        """Returns the infos of these rows, `bool[n]`, without final observations, which are stored in memory."""
        if not self._keep_infos or not rows.any():
            return NO_OBJECTS
        part = {key: values for key, values in infos.items() if key not in ("final_obs", "_final_obs")}
        numbers = self._numbers[rows]
        if not rows.all():
            part = select_infos(part, numbers)
        return StepObjects([], {}, [(numbers, part)]) if part else NO_OBJECTS

    def _actions(self, at: _Slot, actions: Any, rows: Any) -> Any:
        # A copy, because the vector env may keep its actions beyond this step.
        if actions is None:
            actions = self._nested(lambda path: np.array(at.views[(layout.ACTION, *path)][rows]))
        return actions if self._clip is None else self._clip(actions)

    def _finish(self, slot: int, doing: str, rows: Any, ended: Any) -> None:
        """Raises if observations, or the final observations of the rows in `ended`, are not finite."""
        self._last_slot = slot
        if not self._check_finite:
            return
        fault = self._slots[slot].floats.not_finite(rows, ended)
        if fault is not None:
            self._blame(fault.error, fault.row, doing)
            raise fault.error

    def _nested(self, leaf: Callable[[Path], Any]) -> Any:
        """Builds a batch of actions, nested like their space."""
        return tree.nest(self._env.single_action_space, leaf)

    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Calls the method, or reads the attribute, `name` of the vector env.

        Returns one result per env. Frames, generators and seeds belong to single envs; other results are repeated.
        """

        def read() -> Any:
            attribute = self._attribute(name)
            return attribute(*args, **kwargs) if callable(attribute) else attribute

        result = self._guarded(f"call({name!r})", read)
        per_env = name in PER_ENV_ATTRIBUTES and isinstance(result, tuple)
        return list(result) if per_env else [result] * self._count

    def apply(self, function: Callable[[Any], Any], rows: Iterable[int]) -> list[Any]:
        """Raises TypeError unless `rows` is empty, because there is no single env to call `function` with."""
        if not list(rows):
            return []
        error = TypeError(f"{type(self._env).__name__} steps all its envs at once, so there is no single env. {ADVICE}")
        self._blame(error, None, "apply")
        raise error

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of the vector env. All values must be equal."""

        def write() -> None:
            self._attribute(name)
            if any(value is not values[0] and value != values[0] for value in values):
                raise ValueError(f"{name!r} is one attribute of {type(self._env).__name__} for all its envs. {ADVICE}")
            setattr(self._env, name, values[0])

        self._guarded(f"set_attr({name!r})", write)

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env and its row as plain values. The vector env provides the states of its envs."""
        return self._guarded("get_state", self._states)

    def _states(self) -> list[dict[str, Any]]:
        name = type(self._env).__qualname__
        if not has_state_methods(self._env):
            raise NotRestorable(
                f"{name} steps all its envs in one call, but does not define get_state() and set_state(states), which "
                "return and restore one state per env. Define both (see docs/engine.md), or build single envs."
            )
        if self._taken_over:
            raise NotRestorable(f"the process of {name} was just restarted: step all its envs before you save them")
        states = self._env.get_state()
        if not isinstance(states, (list, tuple)) or len(states) != self._count:
            raise ValueError(f"{name}.get_state() must return a list of {self._count} states, one for each env")
        return [
            {
                "begins": bool(self._episodes.waiting[i]),
                "totals": self._episodes.totals(i),
                "env": [{"class": name, "own": pack(state, f"{name}.get_state()[{i}]")}],
            }
            for i, state in enumerate(states)
        ]

    def set_state(self, slot: int, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states that `get_state` returned. The rows' data is already stored in `slot`."""
        for state in states:
            check_classes(self._env, state["env"])
        self._last_slot, self._taken_over, self._episodes.cut = slot, set(), set()
        self._guarded("set_state", lambda: self._env.set_state([unpack(state["env"][0]["own"]) for state in states]))
        for i, state in enumerate(states):
            self._episodes.waiting[i] = state["begins"]
            self._episodes.restore_totals(i, state["totals"])

    def close(self) -> None:
        """Closes the vector env."""
        self._guarded("close", self._env.close)

    def _attribute(self, name: str) -> Any:
        if not hasattr(self._env, name):
            raise AttributeError(
                f"{type(self._env).__name__}, which steps all its envs at once, has no {name!r}. {ADVICE}"
            )
        return getattr(self._env, name)

    def _guarded(self, doing: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BaseException as error:
            self._blame(error, None, doing)
            raise

    def _blame(self, error: BaseException, row: int | None, doing: str) -> None:
        self.failure = (None if row is None else self.first_env + row, doing)
        error.add_note(f"raised by {self._who(row)} during {doing}")

    def _who(self, row: int | None) -> str:
        if row is not None:
            return f"env {self.first_env + row}"
        return f"envs {self.first_env}:{self.first_env + self._count}"


def _write_begin(views: Mapping[Path, np.ndarray], rows: Any) -> None:
    """Writes the reward and flags of rows that begin an episode."""
    views[layout.REWARD][rows] = 0.0
    views[layout.TERMINATED][rows] = views[layout.TRUNCATED][rows] = False


def _has_parameter(function: Callable, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions of extension modules have no signature
        return False
