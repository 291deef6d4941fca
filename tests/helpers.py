"""Envs and spaces that the tests share."""

from __future__ import annotations

import copy
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class _Strategies:
    """Imports Hypothesis when it is needed. Workers import this module, and Hypothesis doubles the time that takes."""

    def __getattr__(self, name: str) -> Any:
        from hypothesis import strategies

        return getattr(strategies, name)


st = _Strategies()


class CountingEnv(gym.Env):
    """Observes (index, episode, step), returns the step number as its reward, and ends after `length` steps.

    Envs with an even index terminate; envs with an odd index are truncated.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, index: int, length: int = 3):
        self.index, self.length = index, length
        self.episode, self.steps = -1, 0
        self._observation = np.zeros(3)  # one reused buffer: keeping it without a copy fails a test

    def _observe(self) -> np.ndarray:
        self._observation[:] = self.index, self.episode, self.steps
        return self._observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._observe(), {"started": self.episode}

    def step(self, action):
        self.steps += 1
        over = self.steps >= self.length
        info = {"steps": self.steps, "share": self.steps / self.length}
        return self._observe(), float(self.steps), over and self.index % 2 == 0, over and self.index % 2 == 1, info

    def get_state(self):
        return self.episode, self.steps

    def set_state(self, state):
        self.episode, self.steps = state


class SampledEnv(gym.Env):
    """Samples observations and ends at random. The reward is the action's sum plus noise.

    The seed determines all of it.
    """

    def __init__(self, observation_space: gym.Space, action_space: gym.Space, info: bool = False):
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self._info = info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample(), {"begun": True} if self._info else {}

    def step(self, action):
        assert self.action_space.contains(action), action
        draw = self.np_random.random()
        weight = sum(float(np.sum(leaf)) for leaf in _flat(action) if isinstance(leaf, (int, np.ndarray, np.number)))
        info = {"draw": draw, "weight": np.float32(weight)} if self._info else {}
        return self.observation_space.sample(), draw + weight, draw < 0.1, 0.1 <= draw < 0.2, info


class FaultyEnv(CountingEnv):
    """Env 2 fails in the given way at its second step, or during the call that `when` names."""

    def __init__(self, index: int, fault: str, when: str = "step"):
        super().__init__(index, length=100)
        self._fault, self._when = fault, when
        self._maybe_fail("construction")

    def reset(self, **kwargs):
        self._maybe_fail("reset")
        return super().reset(**kwargs)

    def step(self, action):
        if self.steps == 1:
            self._maybe_fail("step")
        return super().step(action)

    def close(self):
        self._maybe_fail("close")

    def _maybe_fail(self, now: str) -> None:
        if now != self._when or self.index != 2:
            return
        if self._fault == "raise":
            raise ValueError("the motor is on fire")
        if self._fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "os._exit":
            os._exit(3)
        if self._fault == "sys.exit":
            raise SystemExit(4)
        if self._fault == "hang":
            signal.pause()


def counting_fns(num_envs: int, length: int = 3) -> list:
    """Returns functions that make CountingEnvs; their episodes have different lengths."""
    return [lambda i=i: CountingEnv(i, length + i % 3) for i in range(num_envs)]


def box_spaces() -> st.SearchStrategy[spaces.Box]:
    """Draws Boxes of many dtypes and of up to three dimensions."""
    dtypes = ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]
    shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
    return st.builds(lambda dtype, shape: spaces.Box(0, 100, shape, np.dtype(dtype)), st.sampled_from(dtypes), shapes)


def leaf_spaces() -> st.SearchStrategy[gym.Space]:
    """Draws spaces with a fixed shape and without subspaces."""
    return st.one_of(
        box_spaces(),
        st.builds(spaces.Discrete, st.integers(1, 5), start=st.integers(-3, 3)),
        st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        st.builds(spaces.MultiBinary, st.integers(1, 4)),
    )


class Color(gym.Space):
    """A custom space: the name of a color."""

    names = ("red", "green", "blue")

    def sample(self, mask=None, probability=None):
        return self.names[int(self.np_random.integers(3))]

    def contains(self, x):
        return x in self.names

    def __eq__(self, other):
        return isinstance(other, Color)


def loose_spaces() -> st.SearchStrategy[gym.Space]:
    """Draws spaces without a fixed shape."""
    box, discrete = spaces.Box(0, 1, (2,)), spaces.Discrete(3)
    return st.sampled_from(
        [
            spaces.Text(6),
            spaces.Sequence(discrete),
            spaces.Sequence(box, stack=True),
            spaces.Graph(box, discrete),
            spaces.OneOf([discrete, box]),
            Color(),
        ]
    )


def any_space_at_all() -> st.SearchStrategy[gym.Space]:
    """Draws spaces with and without fixed shapes, possibly nested in Dicts and Tuples."""
    return nested(st.one_of(leaf_spaces(), loose_spaces()))


def any_space() -> st.SearchStrategy[gym.Space]:
    """Draws spaces with fixed shapes, possibly nested in Dicts and Tuples."""
    return nested(leaf_spaces())


def nested(leaves: st.SearchStrategy[gym.Space]) -> st.SearchStrategy[gym.Space]:
    """Draws the given spaces, possibly nested in Dicts and Tuples."""
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        ),
        max_leaves=4,
    )


def assert_same(left: Any, right: Any) -> None:
    """Asserts that two nested results are equal bit for bit: types of containers, dtypes, shapes, values."""
    if isinstance(left, dict):
        assert isinstance(right, dict) and set(left) == set(right), (set(left), set(right))
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, tuple):
        assert isinstance(right, tuple) and type(left) is type(right) and len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, np.ndarray) and left.dtype == object:
        assert isinstance(right, np.ndarray) and right.dtype == object and left.shape == right.shape
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, np.ndarray):
        if left.ndim == 0:  # Box.sample() returns a scalar for some dtypes and an array for others
            right = np.asarray(right)
        assert isinstance(right, np.ndarray) and left.dtype == right.dtype, (left.dtype, getattr(right, "dtype", None))
        assert left.shape == right.shape, (left.shape, right.shape)
        np.testing.assert_array_equal(left, right)
    else:
        assert left == right or (left is None and right is None), (left, right)


def _flat(value: Any) -> list:
    if isinstance(value, dict):
        return [leaf for child in value.values() for leaf in _flat(child)]
    if isinstance(value, tuple):
        return [leaf for child in value for leaf in _flat(child)]
    return [value]


class Module(str):
    """The name of a module that `importable` wrote."""

    folder: Path

    def pids(self) -> list[int]:
        """Returns the ids of the processes that imported the module.

        The module's source must append the id of its process to a file `pids` in the same folder.
        """
        path = self.folder / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []


@contextmanager
def importable(source: str, folder: Path, test: str) -> Iterator[Module]:
    """Writes a module with this source, named after the test, and yields its name. `folder` must be in sys.path.

    No process has imported the module yet. Afterwards, forgets the module and all ids registered in the meantime.
    """
    name, ids = Module(f"module_{abs(hash(test))}"), set(gym.registry)
    name.folder = folder
    (folder / f"{name}.py").write_text(source)
    try:
        yield name
    finally:
        sys.modules.pop(name, None)
        for env_id in gym.registry.keys() - ids:
            del gym.registry[env_id]


def subclasses_of(kind: type) -> Iterator[type]:
    """Yields the named subclasses of a class. The class of an EnvError that is also another exception has no name."""
    for child in type.__subclasses__(kind):
        if getattr(sys.modules.get(child.__module__), child.__name__, None) is child:
            yield child
        yield from subclasses_of(child)


def wait_for_end(pids: Iterable[int]) -> None:
    """Waits until all of the processes have ended, and kills them if the test times out."""
    try:
        for pid in pids:
            while process_exists(pid):
                time.sleep(0.005)  # leaves the core to the process that ends
    except BaseException:
        for pid in filter(process_exists, pids):
            os.kill(pid, signal.SIGKILL)
        raise


@contextmanager
def before_each_message(act: Callable[[bytes], object]) -> Iterator[None]:
    """Calls a function with each message right before it is sent to a worker."""
    from unittest import mock  # imports asyncio, which takes longer than starting a worker that imports this module

    from vecenv.workers import pipes

    put = pipes.Channel.put

    def act_and_put(channel: Any, message: bytes) -> bool:
        act(message)
        return put(channel, message)

    with mock.patch.object(pipes.Channel, "put", act_and_put):
        yield


@contextmanager
def limited_file_sizes(limit: int) -> Iterator[None]:
    """Limits the size of each file to `limit` bytes until the end of the block. Stands in for a full disk.

    A fork server that starts in the block would keep the limit, so start the workers before.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def process_exists(pid: int) -> bool:
    """Returns whether a process is running. A zombie is not."""
    return _state(pid) not in (None, "Z")


def stop_process(pid: int) -> None:
    """Sends SIGSTOP to a process and waits until it has stopped, because signals are delivered asynchronously."""
    os.kill(pid, signal.SIGSTOP)
    while (state := _state(pid)) != "T":
        assert state not in (None, "Z"), f"process {pid} has ended"
        os.sched_yield()


def _state(pid: int) -> str | None:
    """Returns the state of a process as a letter (R, S, T, Z, ...), or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
