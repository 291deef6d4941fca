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
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from gymnasium import Space
from gymnasium.vector import AutoresetMode

from vecenv import tree
from vecenv.ingraph.types import Rollout, SimulatedStep, Step
from vecenv.memory import layout
from vecenv.rows.arguments import Seeds
from vecenv.tree import Path
from vecenv.vector.vector_env import PooledVectorEnv

_Function = TypeVar("_Function", bound=Callable)

# AutoGraph would rewrite the callbacks below, and they would run ten times slower.
_plain_python: Callable[[_Function], _Function] = tf.autograph.experimental.do_not_convert

_this_thread = threading.local()


def _keeping_thread_state(function: _Function) -> _Function:
    """Wraps a function so that Python keeps the thread state of each thread that calls it, which saves 60 us per step.

    Each call of one of TensorFlow's threads into Python creates a thread state (`PyGILState_Ensure`) and deletes it,
    which allocates and frees system memory. One extra `PyGILState_Ensure`, which is never released, keeps the state.
    Nothing leaks, because the threads belong to a pool and live as long as the process.
    """

    def call(*arguments):  # type: ignore[no-untyped-def]
        if not hasattr(_this_thread, "is_kept"):
            _this_thread.is_kept = True
            ctypes.pythonapi.PyGILState_Ensure()
        return function(*arguments)

    return call  # type: ignore[return-value]


def _numpy_function(
    function: Callable[..., Any], inputs: list[tf.Tensor], like: list[np.ndarray], *, stateful: bool = True
) -> list[tf.Tensor]:
    """Calls a function as `tf.numpy_function` does, but lets it go when the graphs that call it are gone.

    TensorFlow itself keeps the function, and with it the memory of the envs, as long as the process: it attaches the
    function to the default graph, which encloses all others. Here, only the enclosing graphs of `tf.function`s keep it,
    and a `tf.Graph` in which the caller builds the operation.
    """
    kept = _keeping_thread_state(function)
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    call = kept
    if graph is not None:
        weak = weakref.ref(kept)

        def call(*arguments):  # type: ignore[no-untyped-def]
            return weak()(*arguments)  # type: ignore[misc]

    with tf.init_scope():  # outside of all `tf.function`s
        in_default_graph = tf.executing_eagerly()
    while graph is not None:
        outer = getattr(graph, "outer_graph", None)
        if outer is not None or not in_default_graph:  # all but the default graph, which lives as long as the process
            graph._vecenv_functions = [*getattr(graph, "_vecenv_functions", ()), kept]
        graph = outer
    tensors = tf.numpy_function(call, inputs, [array.dtype for array in like], stateful=stateful)
    tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    return [tf.ensure_shape(tensor, array.shape) for tensor, array in zip(tensors, like, strict=True)]


def slots_for(num_steps: int, num_slabs: int = 2) -> int:
    """Returns the `num_slots` that a vector env needs to hold `num_slabs` rollouts of `num_steps` steps."""
    return num_slabs * (num_steps + 1)


class InGraphVectorEnv:
    """Lets a `tf.function` reset and step envs that write whole rollouts to memory.

    Args:
        envs: A vecenv vector env, built with `num_slots=slots_for(num_steps, num_slabs)`. Reset, step and restore it
            only through this object.
        num_steps: T, the steps of one rollout.
        timeout_s: Seconds to wait for a step or a reset before an error is raised. None waits forever, and Ctrl-C
            cannot interrupt the wait inside TensorFlow. The timeout has no effect on envs that this process steps.

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
        if not isinstance(envs, PooledVectorEnv):
            raise TypeError(
                f"envs={envs!r} is not a vector env of vecenv, whose memory rollouts read: build it with "
                "vecenv.make, vecenv.AsyncVectorEnv or vecenv.SyncVectorEnv, without vector wrappers"
            )
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
        self._slots_per_slab = slots
        self._error: BaseException | None = None
        # The slot that holds the newest observations. It is on the CPU because every operation reads it, and TensorFlow
        # would otherwise place it on an accelerator.
        with tf.device("/CPU:0"):
            self._slot = tf.Variable(0, dtype=tf.int64, trainable=False, name="slot")
        self._observation_paths = [
            (layout.OBSERVATION, *path) for path, _ in tree.leaves(envs.single_observation_space)
        ]

    @_plain_python
    def reset(self, seed: Seeds = None) -> Any:
        """Resets every env, begins a new slab, and returns the observations `[N, ...]`, as a graph operation.

        The tensors alias the slab, so they change when it is written again. `seed` is one seed per env, or one number:
        env i then gets `seed + i`.
        """

        def reset(_: int, begin: int) -> list[np.ndarray]:
            self.envs.reset_slot(begin, seed=seed, timeout=self._timeout_s)
            return self._fields(self._observation_paths, begin)

        like = self._fields(self._observation_paths)
        return self._nested(self._operation(reset, [], like, lambda slot: slot - slot % self._slots_per_slab))

    @_plain_python
    def observations(self) -> Any:
        """Returns the current observations `[N, ...]`, nested like the space, as a graph operation.

        The tensors alias the slab, so they change when it is written again.
        """

        def observations(slot: int, _: int) -> list[np.ndarray]:
            self._assert_newest(slot)
            return self._fields(self._observation_paths, slot)

        return self._nested(self._operation(observations, [], self._fields(self._observation_paths)))

    @_plain_python
    def step(self, actions: Any) -> Step:
        """Steps every env with a batch of actions in the space's dtype; returns the results, as a graph operation.

        Raises:
            RuntimeError: If all `num_steps` steps were taken since the last `rollout()`. In a `tf.function`, this is a
                tf.errors.OpError unless `raising()` surrounds the call.
        """
        observed = self._step_operation(actions, self._observation_paths, goes_on=False)
        return Step(self._nested(observed), *self._newest([layout.REWARD, layout.TERMINATED, layout.TRUNCATED]))

    @_plain_python
    def observations_copied(self) -> tuple[Any, tf.Tensor]:
        """Returns copies of the current observations `[N, ...]`, and `bool[N]`: whether each begins an episode."""
        same_step = self.envs.autoreset_mode == AutoresetMode.SAME_STEP

        def observations(slot: int, _: int) -> list[np.ndarray]:
            self._assert_newest(slot)
            flags = [layout.TERMINATED, layout.TRUNCATED, layout.EPISODE_LENGTH]
            terminated, truncated, lengths = self._fields(flags, slot)
            ended, unstepped = terminated | truncated, lengths == 0
            # A step that ends an episode returns the next episode's first observation with SAME_STEP, else its last.
            is_first = ended | unstepped if same_step else unstepped & ~ended
            return [*self._fields(self._observation_paths, slot), is_first]

        like = self._fields([*self._observation_paths, layout.TERMINATED])
        *observed, is_first = self._operation(observations, [], like, finish=_copies)
        return self._nested(observed), is_first

    @_plain_python
    def step_copied(self, actions: Any) -> tuple[SimulatedStep, Any]:
        """Steps every env; returns copies of the results, and of the observations `[N, ...]` that the actions led to.

        These successors are final observations where an episode ended. Requires SAME_STEP autoreset.
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

        Every leaf without padding aliases the memory that the workers wrote; see `vecenv.memory.layout`. With K slabs
        (`num_slabs`), the slab stays intact until `rollout()` has been called K - 1 more times. With two slabs, the
        next call already overwrites slot 0.

        Raises:
            RuntimeError: If not all `num_steps` steps were taken; see `step` for calls in a `tf.function`.
        """
        slabs = self.envs.slabs

        def rollout(last: int, begin: int) -> list[np.ndarray]:
            self._assert_newest(last)
            if (steps := last % self._slots_per_slab) != self.num_steps:
                raise RuntimeError(
                    f"a rollout has {self.num_steps} steps, but {steps} were taken: take all of them before rollout()"
                )
            # Slot 0 of the next slab is a copy of this slab's last slot.
            self.envs.move_newest(begin)
            # Owner: the caller, until the steps reach this slab again, num_slabs - 1 rollouts later.
            return [slab[last - self.num_steps : last + 1] for slab in slabs.values()]

        like = [slab[: self._slots_per_slab] for slab in slabs.values()]
        tensors = dict(zip(slabs, self._operation(rollout, [], like, self._slot_after), strict=True))

        def leaf(path: Path) -> tf.Tensor:
            shape = self.envs.arrays[path].shape[1:]
            length = int(np.prod(shape))
            # Slots are padded to multiples of 64 bytes, so the first slice is a view. Dropping the padding copies, but
            # large leaves rarely have any.
            slab = tensors[path] if path[0] == layout.OBSERVATION else tensors[path][1:]
            return tf.reshape(slab if slab.shape[1] == length else slab[:, :length], [slab.shape[0], *shape])

        return self._rollout(leaf)

    def last_rollout(self) -> Rollout:
        """Returns the previous rollout as numpy arrays with the shapes of `Rollout`: views of the same memory."""
        low = (int(self._slot) // self._slots_per_slab - 1) % self.num_slabs * self._slots_per_slab

        def leaf(path: Path) -> np.ndarray:
            first = low if path[0] == layout.OBSERVATION else low + 1
            return self.envs.arrays[path][first : low + self._slots_per_slab]

        return self._rollout(leaf)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raises the original exception of an env or a worker instead of the TensorFlow error that hides it."""
        self._error = None  # of an earlier operation
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
        return int(self._slot) % self._slots_per_slab

    def get_state(self) -> list[dict[str, Any]]:
        """Returns the state of each env, as `AsyncVectorEnv.get_state` does. Do not call it in a `tf.function`.

        The state does not include the steps of an incomplete rollout (`steps` is not 0).
        """
        return self.envs.get_state()

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores the state of each env and begins a new rollout. Do not call it in a `tf.function`."""
        begin = int(self._slot) - self.steps
        self.envs.set_state(states, slot=begin)
        self._slot.assign(begin)

    def _assert_newest(self, slot: int) -> None:
        """Raises if others have used the vector env: the envs would not be in the states that `slot` holds."""
        if self.envs.newest_slot != slot:
            raise RuntimeError(
                "the vector env was reset, stepped or restored directly, so the rollout lacks its newest observations: "
                "use only the methods of this InGraphVectorEnv, and call its reset() or set_state() to continue"
            )

    def _slot_after(self, slot: tf.Tensor) -> tf.Tensor:
        return (slot + 1) % self.envs.num_slots

    def _fields(self, paths: Sequence[Path], slot: int = 0) -> list[np.ndarray]:
        return [self.envs.arrays[path][slot] for path in paths]

    def _step_operation(
        self,
        actions: Any,
        paths: list[Path],
        finish: Callable[[list[tf.Tensor]], list[tf.Tensor]] = list,
        *,
        goes_on: bool,
    ) -> list[tf.Tensor]:
        """Steps envs as a graph operation and returns `finish(tensors)`, where `tensors` are the fields `paths`.

        With `goes_on`, the steps write one slot after another and form no rollouts.
        """
        action_paths = [path for path, _ in tree.leaves(self.envs.single_action_space)]

        def step(before: int, slot: int, *leaves: np.ndarray) -> list[np.ndarray]:
            self._assert_newest(before)
            if not goes_on and before % self._slots_per_slab == self.num_steps:
                raise RuntimeError(
                    f"all {self.num_steps} steps of this rollout have been taken: call rollout() before the next"
                )
            by_path = dict(zip(action_paths, leaves, strict=True))
            actions = tree.nest(self.envs.single_action_space, by_path.__getitem__)
            # Order: the envs write this slot before this function returns, and it returns before the tensors exist.
            self.envs.step_slot(slot, actions, timeout=self._timeout_s)
            return self._fields(paths, slot)

        leaves = []
        for path in action_paths:
            wanted = tf.as_dtype(self.envs.arrays[(layout.ACTION, *path)].dtype)
            leaf = tf.convert_to_tensor(tree.pick(actions, path))
            if leaf.dtype != wanted:  # the slab could not hold them
                raise TypeError(
                    f"{tree.name_of('actions', path)} has dtype {leaf.dtype.name}, but the action space needs "
                    f"{wanted.name}: convert it with tf.cast"
                )
            leaves.append(leaf)
        return self._operation(step, leaves, self._fields(paths), self._slot_after, finish)

    def _newest(self, paths: list[Path]) -> list[tf.Tensor]:
        """Returns fields of the slot that the last operation on the envs wrote.

        This is a stateless operation of its own, which TensorFlow prunes if its outputs, 20 us each, are unused.
        """
        # Order: the slot is read after the last operation has set it, and before the next operation sets it.
        return _numpy_function(
            lambda slot: self._fields(paths, int(slot)), [self._slot.read_value()], self._fields(paths), stateful=False
        )

    def _operation(
        self,
        function: Callable[..., list[np.ndarray]],
        inputs: list[tf.Tensor],
        like: list[np.ndarray],
        slot_after: Callable[[tf.Tensor], tf.Tensor] = lambda slot: slot,
        finish: Callable[[list[tf.Tensor]], list[tf.Tensor]] = list,
    ) -> list[tf.Tensor]:
        """Turns a function into a graph operation, the only way in which a graph uses the envs.

        Args:
            function: Called as `function(before, after, *inputs)`, with the newest slot before and after the operation.
            inputs: Tensors, which `function` receives as arrays.
            like: Arrays like those that `function` returns.
            slot_after: Computes `after` from `before`.
            finish: Computes the result from the outputs, before the next operation on the envs begins.
        """

        def run(before: np.ndarray, after: np.ndarray, *inputs: np.ndarray) -> list[np.ndarray]:
            self._error = None
            try:
                return function(int(before), int(after), *inputs)
            except BaseException as error:
                self._error = error
                raise

        # Order: TensorFlow keeps the program's order only among operations on the same variable. Every operation reads
        # the slot before it starts and writes the slot when it is done, so operations run in order.
        with tf.device("/CPU:0"):
            before = self._slot.read_value()
            after = slot_after(before)
        tensors = finish(_numpy_function(run, [before, after, *inputs], like))
        with tf.control_dependencies(tensors):
            self._slot.assign(after)
        return tensors

    def _nested(self, leaves: list[tf.Tensor]) -> Any:
        by_path = dict(zip(self._observation_paths, leaves, strict=True))
        return tree.nest(self.envs.single_observation_space, lambda path: by_path[(layout.OBSERVATION, *path)])

    def _rollout(self, leaf: Callable[[Path], Any]) -> Rollout:
        """Returns a rollout with `leaf(path)` for each field of the memory."""

        def nested(field: str, space: Space) -> Any:
            return tree.nest(space, lambda path: leaf((field, *path)))

        observed, same_step = self.envs.single_observation_space, self.envs.autoreset_mode == AutoresetMode.SAME_STEP
        return Rollout(
            observations=nested(layout.OBSERVATION, observed),
            actions=nested(layout.ACTION, self.envs.single_action_space),
            rewards=leaf(layout.REWARD),
            terminated=leaf(layout.TERMINATED),
            truncated=leaf(layout.TRUNCATED),
            final_observations=nested(layout.FINAL_OBSERVATION, observed) if same_step else None,
            episode_returns=leaf(layout.EPISODE_RETURN),
            episode_lengths=leaf(layout.EPISODE_LENGTH),
            episode_infos={key: leaf((layout.EPISODE_INFO, key)) for key in self.envs.info_keys},
        )


def _copies(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Copies tensors that alias numpy memory, which `tf.identity` would not."""
    return [tf.raw_ops.DeepCopy(x=tensor) for tensor in tensors]
