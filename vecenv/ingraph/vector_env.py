"""InGraphVectorEnv: reset and step as TensorFlow graph operations on shared memory.

The envs own a rollout slab: slots `[T + 1, N, ...]`. Slot 0 holds the first observations. Step t reads its actions from
slot t + 1, and the workers write its results to slot t + 1 as well. When a rollout is done, the slab is the batch:
`observation[:-1]` are the states, `action[1:]` the actions taken in them, and `reward[1:]`, `terminated[1:]` and
`truncated[1:]` their results. Only the observation that begins the next rollout is copied to another slab, with the
flags that say whether it begins an episode.

TensorFlow aliases numpy memory that is contiguous and starts at a multiple of 64 bytes. The tensors returned here ARE
the slab: they change when the slab is written again. With two slabs, the next call of `rollout()` is the first to
write to it again.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from gymnasium.vector import AutoresetMode

from vecenv import spaces as tree
from vecenv.errors import StateError
from vecenv.ingraph.types import MEMBERS, Rollout, SimulatedStep, Step, rollout_of
from vecenv.memory import layout
from vecenv.rows.arguments import Seeds
from vecenv.spaces import Path
from vecenv.vector_env import PooledVectorEnv

_Function = TypeVar("_Function", bound=Callable)

# AutoGraph would rewrite the callbacks below, and they would run ten times slower.
_plain_python: Callable[[_Function], _Function] = tf.autograph.experimental.do_not_convert

_this_thread = threading.local()


def _keeping_thread_state(function: _Function) -> _Function:
    """Wraps a function so that Python keeps the thread state of each thread that calls it.

    TensorFlow's threads are unknown to Python. Each call into Python creates a thread state (`PyGILState_Ensure`) and
    deletes it at the end. This allocates and frees system memory, which briefly stops all cores and costs 60 us per
    step. One extra `PyGILState_Ensure`, which is never released, keeps the state. Nothing leaks, because the threads
    belong to a pool and live as long as the process.
    """

    def call(*arguments):  # type: ignore[no-untyped-def]
        if not hasattr(_this_thread, "is_kept"):
            _this_thread.is_kept = True
            ctypes.pythonapi.PyGILState_Ensure()
        return function(*arguments)

    return call  # type: ignore[return-value]


def slots_for(num_steps: int, num_slabs: int = 2) -> int:
    """Returns the `num_slots` that a vector env needs to hold `num_slabs` rollouts of `num_steps` steps."""
    return num_slabs * (num_steps + 1)


class _Group:
    """A range of envs that is stepped independently, and its progress.

    Args:
        rows: The envs.
        num_slots: Number of slots in the memory.
    """

    def __init__(self, rows: range, num_slots: int):
        self.ids, self.rows = rows, slice(rows.start, rows.stop)
        self.steps = 0  # taken in this slab
        # The slot that each recent turn wrote: entry `turn % num_slots`.
        self.slots_written = [0] * num_slots
        # Counts the operations on this group. It is on the CPU because every operation reads it, and TensorFlow would
        # otherwise place it on an accelerator.
        with tf.device("/CPU:0"):
            self.turn = tf.Variable(0, dtype=tf.int64, trainable=False, name="turn")


class InGraphVectorEnv:
    """Lets a `tf.function` reset and step envs that write whole rollouts to memory.

    Args:
        envs: A vecenv vector env, built with `num_slots=slots_for(num_steps, num_slabs)`.
        num_steps: T, the steps of one rollout.
        timeout_s: Seconds to wait for a step or a reset before an error is raised. None waits forever, and Ctrl-C
            cannot interrupt the wait inside TensorFlow. The timeout has no effect on envs that this process steps.

    Attributes:
        groups: Ranges of envs that a graph may step concurrently, see `vecenv.AsyncVectorEnv.groups`.

    Example:
        >>> import gymnasium as gym
        >>> import tensorflow as tf
        >>> import vecenv
        >>> from vecenv.ingraph import InGraphVectorEnv, slots_for
        >>> fns = [lambda: gym.make("CartPole-v1")] * 4
        >>> envs = InGraphVectorEnv(vecenv.SyncVectorEnv(fns, num_slots=slots_for(8)), num_steps=8)
        >>> @tf.function
        ... def total_reward():
        ...     envs.reset(seed=1)
        ...     total = tf.zeros([4], tf.float64)
        ...     for _ in tf.range(8):
        ...         total += envs.step(tf.ones([4], tf.int64)).rewards
        ...     return total
        >>> total_reward().numpy()
        array([8., 8., 8., 8.])
    """

    def __init__(self, envs: PooledVectorEnv, *, num_steps: int, timeout_s: float | None = None):
        slots = num_steps + 1
        if num_steps < 1 or envs.num_slots % slots or envs.num_slots < 2 * slots:
            raise ValueError(
                f"envs have num_slots={envs.num_slots}, but rollouts of num_steps={num_steps} need a multiple of "
                f"{slots}, at least {2 * slots}: build them with num_slots=slots_for({num_steps})"
            )
        for space in (envs.single_observation_space, envs.single_action_space):
            tree.check_fixed(space, "TensorFlow reads only shared memory: wrap the env so that it returns arrays.")
        self.envs = envs
        self.num_envs = envs.num_envs
        self.num_steps = num_steps
        self.num_slabs = envs.num_slots // slots
        self._timeout_s = timeout_s
        self.groups = envs.groups
        self._groups = [_Group(rows, envs.num_slots) for rows in self.groups]
        self._slab = 0
        self._error: BaseException | None = None
        self._observation_paths = [
            (layout.OBSERVATION, *path) for path, _ in tree.leaves(envs.single_observation_space)
        ]

    @_plain_python
    def reset(self, seed: Seeds = None) -> Any:
        """Resets every env, begins a new slab, and returns the observations `[N, ...]`, as a graph operation.

        Args:
            seed: One seed per env, or one number: env i then gets `seed + i`.
        """

        def reset() -> list[np.ndarray]:
            self._begin_slab()
            self.envs.reset_slot(self._slot(), seed=seed, timeout=self._timeout_s)
            return self._outputs(self._observation_paths)

        return self._nested(self._operation(reset, [], self._like(self._observation_paths)))

    @_plain_python
    def observations(self, group: int | None = None) -> Any:
        """Returns the current observations of all envs, or of a group, as a graph operation."""
        paths = self._observation_paths

        def observations() -> list[np.ndarray]:
            return self._outputs(paths, group)

        return self._nested(self._operation(observations, [], self._like(paths, group), group=group))

    @_plain_python
    def step(self, actions: Any, group: int | None = None) -> Step:
        """Steps every env, or the envs of a group, and returns the results, as a graph operation.

        TensorFlow steps groups concurrently if each has its own loop in the graph, as in ppo/algorithm/rollout.py.

        Args:
            actions: A batch of `single_action_space`, in its dtype.
            group: Index of one of `groups`; None to step all envs.

        Raises:
            RuntimeError: If all `num_steps` steps have been taken since the last call to `rollout()`.
        """
        observed = self._step_operation(actions, self._observation_paths, group=group, goes_on=False)
        outcome = self._written_by_last([layout.REWARD, layout.TERMINATED, layout.TRUNCATED], group)
        return Step(self._nested(observed), *outcome)

    @_plain_python
    def observations_copied(self) -> tuple[Any, tf.Tensor]:
        """Returns copies of the current observations `[N, ...]`, and `bool[N]`: whether each begins an episode."""

        def observations() -> list[np.ndarray]:
            terminated, truncated, lengths = self._outputs([layout.TERMINATED, layout.TRUNCATED, layout.EPISODE_LENGTH])
            return [*self._outputs(self._observation_paths), terminated | truncated | (lengths == 0)]

        like = self._like([*self._observation_paths, layout.TERMINATED])
        *observed, is_first = self._operation(observations, [], like, _copies)
        return self._nested(observed), is_first

    @_plain_python
    def step_copied(self, actions: Any) -> tuple[SimulatedStep, Any]:
        """Steps every env as `step` does and returns copies of the results. Requires SAME_STEP autoreset.

        Returns:
            The step, and the observations `[N, ...]` that the actions led to: final observations where an episode
            ended.
        """
        observed = self._observation_paths
        finals = [(layout.FINAL_OBSERVATION, *path[1:]) for path in observed]
        members = [layout.REWARD, layout.TERMINATED, layout.TRUNCATED, layout.EPISODE_RETURN, layout.EPISODE_LENGTH]

        def copied(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            observations, final, rest = tensors[: len(observed)], tensors[len(observed) : -5], tensors[-5:]
            ended = tf.logical_or(rest[1], rest[2])
            # Select takes whole rows. `tf.where` would broadcast the flags, which is ten times slower for images.
            rows = [tf.raw_ops.Select(condition=ended, x=x, y=y) for x, y in zip(final, observations, strict=True)]
            return [*rows, *_copies(observations), *_copies(rest)]

        tensors = self._step_operation(actions, [*observed, *finals, *members], copied, goes_on=True)
        led_to, observations, rest = tensors[: len(observed)], tensors[len(observed) : -5], tensors[-5:]
        return SimulatedStep(self._nested(observations), *rest), self._nested(led_to)

    @_plain_python
    def rollout(self) -> Rollout:
        """Returns the finished slab and begins the next one, as a graph operation.

        Returns:
            The slab itself: every leaf aliases the memory that the workers wrote. With K slabs (`num_slabs`), the slab
            stays intact until `rollout()` has been called K - 1 more times. With two slabs, the next call already
            overwrites slot 0 with the first observations of another rollout.

        Raises:
            RuntimeError: If not all `num_steps` steps were taken.
        """
        slabs = self.envs.slabs

        def rollout() -> list[np.ndarray]:
            for steps in {group.steps for group in self._groups} - {self.num_steps}:
                raise RuntimeError(
                    f"a rollout has {self.num_steps} steps, but {steps} were taken: take all of them before rollout()"
                )
            low = self._slab * (self.num_steps + 1)
            self._advance()
            # Owner: the caller, until _advance() reaches this slab again, num_slabs - 1 rollouts later.
            return [slab[low : low + self.num_steps + 1] for slab in slabs.values()]

        tensors = self._operation(rollout, [], {path: slab[: self.num_steps + 1] for path, slab in slabs.items()})
        return self._rollout(dict(zip(slabs, tensors, strict=True)).__getitem__)

    def shaped(self, rollout: Rollout) -> Rollout:
        """Returns the slabs of a rollout in the shapes that `Rollout` documents.

        TensorFlow aliases only contiguous memory, so slabs include the padding that aligns their slots. Call this
        inside a compiled function, where dropping the padding costs nothing.
        """

        def leaf(path: Path, slab: tf.Tensor) -> tf.Tensor:
            shape = self.envs.arrays[path].shape[1:]
            length = int(np.prod(shape))
            slab = slab if path[0] == layout.OBSERVATION else slab[1:]
            return tf.reshape(slab if slab.shape[1] == length else slab[:, :length], [slab.shape[0], *shape])

        return self._rollout(lambda path: leaf(path, self._leaf_of(rollout, path)))

    def last_rollout(self) -> Rollout:
        """Returns the previous rollout as numpy arrays with the shapes of `Rollout`: views of the same memory."""
        low = (self._slab - 1) % self.num_slabs * (self.num_steps + 1)

        def leaf(path: Path) -> np.ndarray:
            first = low if path[0] == layout.OBSERVATION else low + 1
            return self.envs.arrays[path][first : low + self.num_steps + 1]

        return self._rollout(leaf)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raises the original exception of an env or a worker instead of the TensorFlow error that hides it."""
        try:
            yield
        except tf.errors.OpError:
            error, self._error = self._error, None
            if error is None:
                raise
            raise error from None

    @property
    def steps(self) -> int:
        """The number of steps taken in the current rollout."""
        return max(group.steps for group in self._groups)

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env, as `PooledVectorEnv.get_state` does. Do not call it in a `tf.function`.

        The envs do not change. With `simulate`, call this between any two steps. With rollouts, call it right after
        `rollout()`: the state does not include the steps of an incomplete rollout (`steps` is not 0).
        """
        return self.envs.get_state_slot(self._slot())

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the state of each env and begins a new rollout. Do not call it in a `tf.function`.

        See `PooledVectorEnv.set_state`.
        """
        self._begin_slab()
        self.envs.set_state_slot(self._slot(), states)

    def _chosen(self, group: int | None) -> list[_Group]:
        """Returns one group, or all groups for None."""
        return self._groups if group is None else [self._groups[group]]

    def _slot(self, group: int | None = None) -> int:
        if group is None and len({one.steps for one in self._groups}) > 1:
            raise RuntimeError(
                "one group of the envs has taken more steps than another: step the groups that are behind"
            )
        return self._slab * (self.num_steps + 1) + self._chosen(group)[0].steps

    def _begin_slab(self) -> None:
        for group in self._groups:
            group.steps = 0

    def _advance(self) -> None:
        """Begins the next slab. Its slot 0 is a copy of this slab's last slot, without actions and rewards."""
        last = self._slot()
        self._slab = (self._slab + 1) % self.num_slabs
        self._begin_slab()
        for path in [*self._observation_paths, layout.TERMINATED, layout.TRUNCATED, layout.EPISODE_LENGTH]:
            self.envs.arrays[path][self._slot()] = self.envs.arrays[path][last]

    def _outputs(self, paths: list[Path], group: int | None = None) -> list[np.ndarray]:
        slot = self._slot(group)
        if group is None:
            return [self.envs.arrays[path][slot] for path in paths]
        return [self.envs.arrays[path][slot, self._groups[group].rows] for path in paths]

    def _step_operation(
        self,
        actions: Any,
        paths: list[Path],
        finish: Callable[[list[tf.Tensor]], list[tf.Tensor]] = list,
        group: int | None = None,
        *,
        goes_on: bool,
    ) -> list[tf.Tensor]:
        """Steps envs as a graph operation and returns `finish(tensors)`, where `tensors` are the fields `paths`.

        With `goes_on`, a step after the end of a rollout begins the next rollout, without a call to `rollout()`.
        """
        action_paths = [path for path, _ in tree.leaves(self.envs.single_action_space)]

        def step(*leaves: np.ndarray) -> list[np.ndarray]:
            slot = self._slot(group) + 1
            if groups[0].steps == self.num_steps:
                if not goes_on:
                    raise RuntimeError(
                        f"all {self.num_steps} steps of this rollout have been taken: call rollout() before the next"
                    )
                self._advance()
                slot = self._slot(group) + 1
            by_path = dict(zip(action_paths, leaves, strict=True))
            actions = tree.nest(self.envs.single_action_space, by_path.__getitem__)
            if group is None:
                self.envs.step_slot(slot, self.envs.put_actions(actions, slot), timeout=self._timeout_s)
            else:
                self.envs.step_group(group, slot, self.envs.put_actions(actions, slot, groups[0].ids))
            # Order: the envs write this slot before this function returns, and it returns before the tensors exist.
            for one in groups:
                one.steps += 1
            return self._outputs(paths, group)

        groups, leaves = self._chosen(group), [tree.pick(actions, path) for path in action_paths]
        return self._operation(step, leaves, self._like(paths, group), finish, group)

    def _written_by_last(self, paths: list[Path], group: int | None = None) -> list[tf.Tensor]:
        """Returns fields of the slot that the last operation on the envs wrote, in a separate operation.

        The operation is stateless, so TensorFlow prunes it if its outputs are unused. Each output of a Python function
        costs 20 us.
        """

        # Order: `turn` is read after the last operation has written it, and before the next operation writes it.
        def written(turn: int) -> list[np.ndarray]:
            slot, rows = one.slots_written[turn % len(one.slots_written)], slice(None) if group is None else one.rows
            return [self.envs.arrays[path][slot, rows] for path in paths]

        one, arrays = self._chosen(group)[0], self._like(paths, group).values()
        tensors = tf.numpy_function(
            _keeping_thread_state(written), [one.turn.read_value()], [a.dtype for a in arrays], stateful=False
        )
        return [tf.ensure_shape(t, array.shape) for t, array in zip(tensors, arrays, strict=True)]

    def _operation(
        self,
        function: Callable,
        inputs: list[tf.Tensor],
        outputs: Mapping[Path, np.ndarray],
        finish: Callable[[list[tf.Tensor]], list[tf.Tensor]] = list,
        group: int | None = None,
    ) -> list[tf.Tensor]:
        """Turns `function` into a graph operation whose outputs have the dtypes and shapes of `outputs`.

        `finish` computes its tensors from these outputs before the next operation on the envs, or on the group, begins.
        """

        def run(*arguments: Any) -> list[np.ndarray]:
            try:
                results = function(*arguments[len(groups) :])
            except BaseException as error:
                # After a fault in one group, the other groups raise StateError, which must not hide the fault.
                if self._error is None or not isinstance(error, StateError):
                    self._error = error
                raise
            for one, turn in zip(groups, arguments, strict=False):
                one.slots_written[(turn + 1) % len(one.slots_written)] = self._slot(group)
            return results

        # Order: TensorFlow keeps the program's order only among operations on the same variable. Every operation on
        # a group reads its `turn` before it starts and writes it when it is done, so operations run in order.
        groups, dtypes = self._chosen(group), [array.dtype for array in outputs.values()]
        turns = [one.turn.read_value() for one in groups]
        tensors = tf.numpy_function(_keeping_thread_state(run), [*turns, *inputs], dtypes)
        tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
        tensors = finish([tf.ensure_shape(t, array.shape) for t, array in zip(tensors, outputs.values(), strict=True)])
        with tf.control_dependencies(tensors):
            for one in groups:
                one.turn.assign_add(1)
        return tensors

    def _like(self, paths: list[Path], group: int | None = None) -> dict[Path, np.ndarray]:
        rows = slice(None) if group is None else self._groups[group].rows
        return {path: self.envs.arrays[path][0, rows] for path in paths}

    def _nested(self, leaves: list[tf.Tensor]) -> Any:
        by_path = dict(zip(self._observation_paths, leaves, strict=True))
        return tree.nest(self.envs.single_observation_space, lambda path: by_path[(layout.OBSERVATION, *path)])

    def _rollout(self, leaf: Callable[[Path], Any]) -> Rollout:
        observed, acted = self.envs.single_observation_space, self.envs.single_action_space
        finals = self.envs.autoreset_mode == AutoresetMode.SAME_STEP
        return rollout_of(leaf, observed, acted, finals=finals, info_keys=self.envs.info_keys)

    def _leaf_of(self, rollout: Rollout, path: Path) -> tf.Tensor:
        return tree.pick(getattr(rollout, MEMBERS[path[0]]), path[1:])


def _copies(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Copies tensors that alias numpy memory, which `tf.identity` would not."""
    return [tf.raw_ops.DeepCopy(x=tensor) for tensor in tensors]
