"""BatchRows: a run of envs that one vector env steps in one call; for the engine the same as EnvRows.

What a vector env returns is copied into the rows here. When an episode begins and ends is its business; what
stands here of that is only how episodes of a process that died are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv import spaces as tree
from vecenv.errors import NotRestorable
from vecenv.memory import layout
from vecenv.rows import checks as results
from vecenv.rows.autoreset import EpisodeTotals
from vecenv.rows.batched import Batched
from vecenv.rows.conversion import as_float32, clipper, float_leaves, not_finite, unbounded
from vecenv.rows.env_rows import EnvRows, cut_info
from vecenv.rows.info_memory import InfoWriter, Schema
from vecenv.rows.infos import select_infos, split_infos
from vecenv.rows.protocol import NO_OBJECTS, EnvDescription, EnvSpaces, Rows, RowsOptions, StepObjects, combined
from vecenv.spaces import Path
from vecenv.state import check_classes, has_state_methods, pack, unpack

Views = dict[Path, np.ndarray]


def make_rows(env_fns: Sequence[Callable] | Batched, *, first_env: int, options: RowsOptions) -> Rows:
    """Builds the envs and returns their rows: `BatchRows` for a `Batched`, `EnvRows` for a list of functions."""
    if isinstance(env_fns, Batched):
        return BatchRows(env_fns, first_env=first_env, options=options)
    return EnvRows(env_fns, first_env=first_env, options=options)


class BatchRows:
    """The envs `first_env : first_env + n` and the rows of memory that they write. See `EnvRows` for the arguments.

    Attributes:
        failure: `(None, "reset" or "step" or ...)` of the last exception that the vector env raised, or with the
            env's index, if it is known.
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
        self.autoreset_mode = options.autoreset_mode
        self.failure: tuple[int | None, str] | None = None
        self._count = len(batched)
        self._env = env = self._guarded("construction", lambda: batched.build(options.autoreset_mode))
        self.envs: list[Any] = [env]
        self._steps_subsets = hasattr(env, "step_rows")
        for space in (env.single_observation_space, env.single_action_space):
            tree.check_fixed(space, "Build the envs one by one instead, from a list of functions.")
        self._float32 = options.float32_observations
        self._clip = clipper(env.single_action_space) if options.clip_actions else None
        self._observed = [path for path, _ in tree.leaves(env.single_observation_space)]
        self._infos = options.infos
        if not options.infos and hasattr(type(env), "leave_infos_away"):  # not a wrapper's, which may read them
            env.leave_infos_away()
        self._slots: list[Views] = []
        self._floats: list[list[list[tuple[str, np.ndarray]]]] = []  # observations, final ones, of each slot
        self._last_slot = 0
        self._info_rows: InfoWriter | None = None
        self._numbers = np.arange(self._count)
        self._begins = np.zeros(self._count, np.bool_)  # NEXT_STEP: rows whose next step begins an episode
        self._totals = EpisodeTotals(self._count)
        # Rows that a new process took over, and that its vector env must not step yet: whether to tell first that
        # their episode was cut, and the observations and infos with which they begin.
        self._cut: dict[int, bool] = {}
        self._first: tuple[Any, list[dict[str, Any]]] = (None, [])

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy needs, which must then be bound to memory of its own."""
        return {**self.__dict__, "_slots": [], "_floats": [], "_info_rows": None}

    def describe(self) -> EnvDescription:
        """Returns the spaces and properties of the envs, which have the same spaces."""
        observed, acted = self._env.single_observation_space, self._env.single_action_space
        observed = as_float32(observed) if self._float32 else observed
        spaces = [EnvSpaces(self.first_env, observed, unbounded(acted) if self._clip else acted, acted)]
        return EnvDescription(spaces, dict(self._env.metadata), self._env.render_mode, self._steps_subsets)

    def bind(self, views: Mapping[Path, np.ndarray]) -> None:
        """Takes the memory to write: every field's `[S, n, ...]` for these rows."""
        num_slots = len(views[layout.REWARD])
        self._slots = [{path: view[slot] for path, view in views.items()} for slot in range(num_slots)]
        kinds = (layout.OBSERVATION, layout.FINAL_OBSERVATION)
        self._floats = [[float_leaves(at, kind) for kind in kinds] for at in self._slots]

    def bind_infos(self, schema: Schema, views: Mapping[Path, np.ndarray]) -> None:
        """Takes the memory for infos of this schema; from now on `step` returns only others."""
        self._info_rows = InfoWriter(schema, views)

    def reset(
        self,
        slot: int,
        *,
        seeds: Sequence[int | None],
        options: dict[str, Any] | None = None,
        mask: np.ndarray | None = None,
    ) -> StepObjects:
        """Resets the envs (of `mask: bool[n]` only, if given) and writes all rows of `slot`."""
        at, rows = self._slots[slot], slice(None) if mask is None else np.flatnonzero(mask)
        if mask is not None:
            for path, array in self._slots[self._last_slot].items():
                if path[0] != layout.ACTION:
                    at[path][~mask] = array[~mask]
            options = {**(options or {}), "reset_mask": mask}
        if self._info_rows is not None:
            self._info_rows.clear(slot)
        objects = NO_OBJECTS
        if mask is None or mask.any():
            seed = None if all(seed is None for seed in seeds) else list(seeds)
            observations, merged = self._guarded("reset", lambda: self._env.reset(seed=seed, options=options))
            self._guarded("reset", lambda: self._check_infos(merged, "reset"))
            self._guarded("reset", lambda: self._write(at, layout.OBSERVATION, observations, rows))
            at[layout.REWARD][rows], at[layout.TERMINATED][rows], at[layout.TRUNCATED][rows] = 0.0, False, False
            self._begins[rows] = False
            self._cut = {} if mask is None else {row: cut for row, cut in self._cut.items() if not mask[row]}
            self._totals.begin(rows)
            objects = self._of_rows(merged, np.ones(self._count, np.bool_) if mask is None else mask)
        self._totals.write(at)
        self._finish(slot, "reset", rows, [])
        return objects

    def step(self, slot: int, actions: Any = None, only: Sequence[int] | None = None) -> StepObjects:
        """Steps the envs as `EnvRows.step` does, but all of them, or all of `only`, in one call."""
        if only is not None or self._cut:
            return self._step_some(slot, actions, list(range(self._count) if only is None else only))
        actions = self._actions(self._slots[slot], actions, slice(None))
        return self._take(slot, self._guarded("step", lambda: self._env.step(actions)), slice(None))

    def step_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> Iterator[tuple[list[int], StepObjects]]:
        """Steps some rows together, and yields them together.

        Args:
            slot: Where to read and to write.
            orders: Rows, each with its action if none of theirs lies in memory, and else with None.
        """
        rows = [row for row, _ in orders]
        actions = None
        if orders[0][1] is not None:
            actions = self._nested(lambda path: np.concatenate([tree.pick(a, path) for _, a in orders]))
        yield rows, self.step(slot, actions, rows)

    def resume(self, slot: int, over: Sequence[bool]) -> None:
        """Takes the place of rows whose process died: their episodes are cut at the next step."""
        self._last_slot = slot
        self._totals.resume(self._slots[slot])
        observations, merged = self._guarded("reset", self._env.reset)
        self._guarded("reset", lambda: self._check_infos(merged, "reset"))
        self._first = observations, split_infos(merged, self._count)
        self._cut = {row: not is_over for row, is_over in enumerate(over)}
        self._begins[:] = False

    def _step_some(self, slot: int, actions: Any, rows: list[int]) -> StepObjects:
        """Steps some rows; and after a restart those that are to be cut or to begin without the vector env."""
        last, stepped = self._slots[self._last_slot], [row for row in rows if row not in self._cut]
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
            result = self._guarded("step", lambda: self._env.step_rows(stepped, given))
            objects = self._take(slot, result, stepped)
        taken_over = [row for row in rows if row in self._cut]
        infos = [(row, self._take_over(slot, last, row)) for row in taken_over]
        self._finish(slot, "step", taken_over, [])
        return combined([(0, objects), (0, StepObjects([(i, info) for i, info in infos if self._infos and info], {}))])

    def _take_over(self, slot: int, last: Views, row: int) -> dict[str, Any]:
        """Writes a row that the process before this one left: its episode is cut, or the next one begins."""
        at, (observations, infos) = self._slots[slot], self._first
        same_step = self.autoreset_mode == AutoresetMode.SAME_STEP
        cut = self._cut.pop(row)
        if self._info_rows is not None:
            self._info_rows.clear(slot, [row])
        at[layout.REWARD][row], at[layout.TERMINATED][row], at[layout.TRUNCATED][row] = 0.0, False, cut
        for path in self._observed:
            before, first = last[(layout.OBSERVATION, *path)][row].copy(), tree.pick(observations, path)[row]
            if cut and same_step:
                at[(layout.FINAL_OBSERVATION, *path)][row] = before
            at[(layout.OBSERVATION, *path)][row] = before if cut and not same_step else first
        if cut:
            self._totals.not_stepped(row)
        self._totals.count(at, [row], [] if cut else [row], [row] if cut and same_step else [])
        if not cut:
            return infos[row]
        if self.autoreset_mode == AutoresetMode.NEXT_STEP:
            self._cut[row] = False  # it begins with the next step
        return cut_info(infos[row] if same_step else None)

    def _take(self, slot: int, result: tuple, rows: Any) -> StepObjects:
        """Writes what a step of these rows returned."""
        at = self._slots[slot]
        observations, rewards, terminated, truncated, merged = result
        self._guarded("step", lambda: self._check_infos(merged, "step"))
        self._guarded("step", lambda: self._write(at, layout.OBSERVATION, observations, rows))
        at[layout.REWARD][rows] = self._column("reward", rewards, rows, results.number, "biuf")
        terminated = at[layout.TERMINATED][rows] = self._column("terminated", terminated, rows, results.flag, "b")
        truncated = at[layout.TRUNCATED][rows] = self._column("truncated", truncated, rows, results.flag, "b")
        numbers, over = self._numbers[rows], terminated | truncated
        ended = started = numbers[:0]
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            ended = numbers[over]
            self._guarded("step", lambda: self._write_finals(at, merged, ended))
        elif self.autoreset_mode == AutoresetMode.NEXT_STEP:
            started = numbers[self._begins[rows]]
            self._begins[rows] = over
        self._totals.count(at, rows, started, ended)
        self._finish(slot, "step", rows, ended)
        return self._extras(slot, merged, rows)

    def _check_infos(self, merged: Any, doing: str) -> None:
        try:
            results.check_info(merged)
        except TypeError as error:
            raise TypeError(
                f"info of {self._who(None)} at {doing} {error}: fix what {type(self._env).__name__} returns"
            ) from None

    def _column(self, name: str, values: Any, rows: Any, check: Callable[[Any], Any], kinds: str) -> np.ndarray:
        """Returns the rewards or flags of these rows. If the dtype is of another kind, each value is checked."""
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
                when = "reset" if self._begins[row] else f"step {self._totals.of(row)[1] + 1} of its episode"
                error = TypeError(
                    f"{name} of {self._who(row)} at {when} {reason}: fix what {type(self._env).__name__} returns"
                )
                self._blame(error, row, "step")
                raise error from None
        return np.array(checked)

    def _write(self, at: Views, field: str, batch: Any, rows: Any) -> None:
        # Owner: this process, these rows of the slot, until the step or reset that it serves is answered.
        for path in self._observed:
            values, column = tree.pick(batch, path), at[(field, *path)]
            if np.shape(values) != column.shape:  # numpy would stretch one row over all of them
                name = tree.name_of(field, path)
                raise ValueError(
                    f"{type(self._env).__name__} returned {name} of shape {np.shape(values)}, but its space says "
                    f"{column.shape}: fix its reset() and step()"
                )
            column[rows] = values[rows]

    def _write_finals(self, at: Views, merged: dict[str, Any], ended: np.ndarray) -> None:
        if not len(ended):
            return
        finals = merged.get("final_obs")
        if finals is None:
            raise ValueError(
                f"{type(self._env).__name__} ended episodes of envs {(self.first_env + ended).tolist()} in SAME_STEP "
                "mode without infos['final_obs'], which must hold their last observations"
            )
        for path in self._observed:
            for row in ended.tolist():
                at[(layout.FINAL_OBSERVATION, *path)][row] = tree.pick(finals[row], path)

    def _extras(self, slot: int, merged: dict[str, Any], rows: Any) -> StepObjects:
        if not self._infos:
            return NO_OBJECTS
        rest = np.zeros(self._count, np.bool_)
        rest[rows] = True
        if self._info_rows is not None:
            self._info_rows.clear(slot, rows)
            rest &= ~self._info_rows.write_rows(slot, merged, rest)
        return self._of_rows(merged, rest)

    def _of_rows(self, merged: dict[str, Any], rows: np.ndarray) -> StepObjects:
        """Returns the infos of these rows, `bool[n]`, without final observations, which lie in memory."""
        if not self._infos or not rows.any():
            return NO_OBJECTS
        part = {key: values for key, values in merged.items() if key not in ("final_obs", "_final_obs")}
        numbers = self._numbers[rows]
        if not rows.all():
            part = select_infos(part, numbers)
        return StepObjects([], {}, [(numbers, part)]) if part else NO_OBJECTS

    def _actions(self, at: Views, actions: Any, rows: Any) -> Any:
        # A copy, because the vector env may keep its actions beyond this step.
        if actions is None:
            actions = self._nested(lambda path: np.array(at[(layout.ACTION, *path)][rows]))
        return actions if self._clip is None else self._clip(actions)

    def _finish(self, slot: int, doing: str, rows: Any, ended: Any) -> None:
        """Raises if observations, or the final ones of the rows that `ended`, are not finite as float32."""
        self._last_slot = slot
        if self._float32:
            observed, finals = self._floats[slot]
            fault = not_finite([(observed, rows), (finals, ended)], self.first_env)
            if fault is not None:
                self._blame(fault[1], fault[0], doing)
                raise fault[1]

    def _nested(self, leaf: Callable[[Path], Any]) -> Any:
        """Builds a batch of actions, nested as their space is."""
        return tree.nest(self._env.single_action_space, leaf)

    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Calls the method, or reads the attribute, `name` of the vector env: the same result for each of its envs.

        But for frames and generators, of which it has one for each.
        """

        def read() -> Any:
            attribute = self._attribute(name)
            return attribute(*args, **kwargs) if callable(attribute) else attribute

        result = self._guarded(f"call({name!r})", read)
        return list(result) if name in OF_EACH and isinstance(result, tuple) else [result] * self._count

    def apply(self, function: Callable[[Any], Any], rows: Iterable[int]) -> list[Any]:
        """Raises, if there are rows: there is no single env to call `function` with."""
        if not list(rows):
            return []
        error = TypeError(f"{type(self._env).__name__} steps all its envs at once, so there is no single env. {ADVICE}")
        self._blame(error, None, "apply")
        raise error

    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets an attribute of the vector env, which must be the same for all envs."""

        def write() -> None:
            self._attribute(name)
            if any(value is not values[0] and value != values[0] for value in values):
                raise ValueError(f"{name!r} is one attribute of {type(self._env).__name__} for all its envs. {ADVICE}")
            setattr(self._env, name, values[0])

        self._guarded(f"set_attr({name!r})", write)

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env and its row, as plain values; the vector env returns the states of its envs."""
        return self._guarded("get_state", self._states)

    def _states(self) -> list[dict[str, Any]]:
        name = type(self._env).__qualname__
        if not has_state_methods(self._env):
            raise NotRestorable(
                f"{name}, which steps all its envs in one call, does not define get_state(), which returns a list of "
                "one state per env, and set_state(states). Define both, see docs/engine.md, or build single envs."
            )
        if self._cut:
            raise NotRestorable(f"the process of {name} was just restarted: step all its envs before you save them")
        states = self._env.get_state()
        if not isinstance(states, (list, tuple)) or len(states) != self._count:
            raise ValueError(f"{name}.get_state() must return a list of {self._count} states, one for each env")
        return [
            {
                "begins": bool(self._begins[i]),
                "totals": self._totals.of(i),
                "env": [{"class": name, "own": pack(state, f"{name}.get_state()[{i}]")}],
            }
            for i, state in enumerate(states)
        ]

    def set_state(self, slot: int, states: Sequence[dict[str, Any]]) -> None:
        """Restores what `get_state` returned; the rows' data is stored in `slot`."""
        for state in states:
            check_classes(self._env, state["env"])
        self._last_slot, self._cut = slot, {}
        self._guarded("set_state", lambda: self._env.set_state([unpack(state["env"][0]["own"]) for state in states]))
        for i, state in enumerate(states):
            self._begins[i] = state["begins"]
            self._totals.put(i, state["totals"])

    def close(self) -> None:
        """Closes the vector env."""
        self._guarded("close", self._env.close)

    def _attribute(self, name: str) -> Any:
        if not hasattr(self._env, name):
            raise AttributeError(f"{type(self._env).__name__}, which steps all its envs, has no {name!r}. {ADVICE}")
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


OF_EACH = ("render", "np_random", "np_random_seed")  # what a vector env has for each of its envs
ADVICE = "Where single envs are wanted, build them from a list of functions, or by vecenv.make(..., backend='python')."
