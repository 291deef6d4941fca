"""Rows: the contract of a contiguous run of envs, and what `EnvRows` and `BatchRows` have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv import tree
from vecenv.errors import EnvError
from vecenv.memory import layout
from vecenv.resources import tightest_limit
from vecenv.rows import episode_infos
from vecenv.rows.action_spaces import unbounded
from vecenv.rows.autoreset import BEGINS, EVERY, STEPS, Columns, Episodes
from vecenv.rows.messages import EnvDescription, EnvSpaces, ResetCommand, RowsOptions, StepObjects
from vecenv.rows.observations import Exact, as_float32
from vecenv.tree import Path


class Slot:
    """The rows of one slot, with everything that a step needs looked up once."""

    def __init__(self, views: dict[Path, np.ndarray], observation_space: gym.Space, action_space: gym.Space):
        self.views = views
        self.terminated, self.truncated = views[layout.TERMINATED], views[layout.TRUNCATED]
        self._action_space, self._only_action = action_space, views.get((layout.ACTION,))
        self.columns = Columns(views[layout.REWARD], views[layout.EPISODE_RETURN], views[layout.EPISODE_LENGTH])
        infos = {str(path[1]): column for path, column in views.items() if path[0] == layout.EPISODE_INFO}
        parsed = [(*episode_infos.parse(name), column) for name, column in infos.items()]
        self.last_infos = [(key, column) for key, kind, column in parsed if kind == "last"]
        self.summed_infos = [item for item in parsed if item[1] != "last"]
        exact = {path for path, leaf in tree.leaves(observation_space) if isinstance(leaf, Exact)}
        self.floats = {
            field: [
                (tree.name_of(field, path[1:]), array)
                for path, array in views.items()
                if path[0] == field and array.dtype.kind == "f" and path[1:] not in exact
            ]
            for field in (layout.OBSERVATION, layout.FINAL_OBSERVATION)
        }

    def copy_actions(self, index: Any) -> Any:
        """Returns a batch of copies of the actions in these rows: an env may keep its action beyond this step."""
        if self._only_action is not None:
            return self._only_action.copy() if index is EVERY else np.array(self._only_action[index])
        return tree.nest(self._action_space, lambda path: np.array(self.views[(layout.ACTION, *path)][index]))


class Rows(ABC):
    """A contiguous run of envs and the rows of memory that they write: `EnvRows` or `BatchRows`.

    `build` the envs, `bind` the rows to memory that has a field for each leaf of their spaces, then reset and step.

    Attributes:
        first_env: Index of the first env among all envs of the vector env.
        failure: For the last exception that an env raised: the env index, or None for all envs, and the operation,
            such as "step".
        envs: The envs that have been built, or for `BatchRows` the vector env as the only element.
    """

    envs: list[Any]
    _slots: list[Any]
    _returns = "the env's reset() and step() return"

    def __init__(self, first_env: int, options: RowsOptions, next_step: list[int] | np.ndarray):
        self.first_env = first_env
        self.envs = []
        self.failure: tuple[int | None, str] | None = None
        self._options = options
        self._keep_infos = options.infos
        self._same_step = options.autoreset_mode == AutoresetMode.SAME_STEP
        self._checks_finite = options.finite_observations or options.float32_observations
        self._count = len(next_step)
        self._episodes = Episodes(next_step, options.info_keys)
        self._faulty: int | None = None  # the row whose result a check has just rejected

    @abstractmethod
    def build(self) -> EnvDescription:
        """Builds the envs and returns their spaces and properties. After an error, `close` closes those that exist."""

    def bind(self, views: Mapping[Path, np.ndarray]) -> None:
        """Sets the memory to write: every field's `[S, n, ...]` for these rows."""
        num_slots = len(views[layout.REWARD])
        self._slots = [self._slot_of({path: view[slot] for path, view in views.items()}) for slot in range(num_slots)]

    @abstractmethod
    def reset(self, slot: int, command: ResetCommand) -> StepObjects:
        """Resets every env, or the envs in the mask of the command, and writes their rows of `slot`."""

    @abstractmethod
    def step(self, slot: int, actions: Any = None) -> StepObjects:
        """Steps all rows with these actions or those in `slot`, and writes the rows there."""

    @abstractmethod
    def step_rows(self, slot: int, orders: Sequence[tuple[int, Any]]) -> Iterator[tuple[list[int], StepObjects]]:
        """Steps rows, each with its action, or None if the action is stored in memory; yields rows as they finish."""

    @abstractmethod
    def call(self, name: str, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Calls the method, or reads the attribute, `name` of every env; returns one result per env."""

    @abstractmethod
    def apply(self, function: Callable[[Any], Any], rows: Iterable[int]) -> list[Any]:
        """Calls `function(env)` for the envs of these rows."""

    @abstractmethod
    def set_attr(self, name: str, values: Sequence[Any]) -> None:
        """Sets the attribute `name` of each env to its value."""

    @abstractmethod
    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env, its wrappers and its row, as plain values."""

    @abstractmethod
    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the states that `get_state` returned. The caller then writes the rows' data to memory."""

    @abstractmethod
    def close(self) -> None:
        """Closes every env that was built, then raises the first exception that one of them raised."""

    @abstractmethod
    def _slot_of(self, views: dict[Path, np.ndarray]) -> Slot:
        """Returns the rows of one slot."""

    def _spaces(self, observation_space: gym.Space, action_space: gym.Space) -> EnvSpaces:
        """Returns the spaces of an env as the options convert them."""
        observed = as_float32(observation_space) if self._options.float32_observations else observation_space
        accepted = unbounded(action_space) if self._options.clip_actions else action_space
        return EnvSpaces(observed, accepted, action_space)

    def _state_of_row(self, row: int, env: Any) -> dict[str, Any]:
        """Returns the state of a row whose env has the state `env`."""
        begins, totals = bool(self._episodes.next_step[row]), self._episodes.totals(row)
        return {"begins": begins, "totals": totals, "infos": self._episodes.info_totals(row), "env": env}

    def _restore_rows(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores what `_state_of_row` returned, except the states of the envs."""
        for row, state in enumerate(states):
            self._episodes.next_step[row] = BEGINS if state["begins"] else STEPS
            self._episodes.restore_totals(row, state["totals"], state["infos"])

    def _info_number(self, key: str, value: Any, row: int, when: str | None = None) -> float:
        """Returns the value of an info as a float, or raises an error that names the env and the step."""
        return self._checked(f"info {key!r}", value, episode_infos.number, row, when)

    def _checked(
        self, name: str, value: Any, check: Callable[..., Any], row: int | None, when: str | None = None, *more: Any
    ) -> Any:
        """Returns `check(value, *more)`, or raises its error with the env (None: all envs) and the step added."""
        try:
            return check(value, *more)
        except TypeError as error:
            self._faulty = row
            if when is None and row is not None:
                begins = self._episodes.next_step[row]
                when = "reset" if begins else f"step {self._episodes.totals(row)[1] + 1} of its episode"
            raise TypeError(f"{name} of {self._who(row)} at {when} {error}. Fix what {self._returns}.") from None

    def _check_finite(self, at: Slot, rows: Any, ended: Any) -> None:
        """Raises if observations, or the final observations of the rows in `ended`, are not finite."""
        for field, checked in ((layout.OBSERVATION, rows), (layout.FINAL_OBSERVATION, ended)):
            for name, column in at.floats[field] if isinstance(checked, slice) or len(checked) else ():
                finite = np.isfinite(column[checked])
                if not finite.all():
                    first = np.argmin(finite.reshape(len(finite), -1).all(axis=1))
                    row = self._faulty = int(np.arange(len(column))[checked][first])
                    raise ValueError(
                        f"{name} of {self._who(row)} is not finite: {column[row]!r}. "
                        "Fix the env, or clip what it returns, before training on it."
                    )

    def _guarded(self, row: int | None, doing: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Returns `action(*arguments)`. An exception is blamed on the env of this row (None: on all envs)."""
        try:
            return action(*arguments)
        except BaseException as error:
            self._blame(error, row, doing)
            raise

    def _blame(self, error: BaseException, row: int | None, doing: str) -> None:
        if self._faulty is not None:
            row, self._faulty = self._faulty, None
        elif row is None:  # otherwise, the error may come from a vector env inside the env of this row
            row = getattr(error, "vecenv_row", None)
        self.failure = (None if row is None else self.first_env + row, doing)
        who = f"raised by {self._who(row)} during {doing}"
        if isinstance(error, (StopIteration, StopAsyncIteration)):  # it would end a generator or a loop of the caller
            end = EnvError(
                f"{who}: {type(error).__name__}, because an iterator in the env ended. Restart it, or end the episode."
            )
            raise end from error
        error.add_note(who)
        if isinstance(error, MemoryError):
            error.add_note(tightest_limit())

    def _who(self, row: int | None) -> str:
        if row is not None:
            return f"env {self.first_env + row}"
        return f"envs {self.first_env}:{self.first_env + self._count}"
