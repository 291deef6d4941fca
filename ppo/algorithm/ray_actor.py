"""The Ray actor that steps a share of the envs, with a local collector inside.

This module imports TensorFlow only in functions, so that an actor's process starts quickly and can limit TensorFlow's
threads.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import cloudpickle
import gymnasium as gym
import numpy as np

import vecenv
from ppo.runtime.startup import load_tensorflow
from ppo.versions import versions
from vecenv.errors import env_error, in_one_line

if TYPE_CHECKING:
    from ppo.algorithm.packing import Packed
    from ppo.algorithm.rollout import LocalCollector
    from ppo.model.agent import Agent

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Place(NamedTuple):
    """Where an actor runs: the id of the node, the id of the process, and the address of the node."""

    node: str
    pid: int
    address: str


@dataclass(frozen=True)
class Outline:
    """What an actor reports about its share of the envs.

    Attributes:
        spaces, members, wrappers: As of `Collector`.
        rollout_bytes: Memory of a rollout.
        versions: The versions of the packages in its process.
    """

    spaces: Mapping[str, tuple[gym.Space, gym.Space]]
    members: Mapping[str, tuple[str, ...]]
    wrappers: Sequence[Any]
    rollout_bytes: int
    versions: Mapping[str, str]


def _portable(method: _Method) -> _Method:
    """Wraps a method so that its exceptions can be unpickled where modules of this process are missing."""

    @functools.wraps(method)
    def call(self: Actor, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except Exception as error:
            try:
                pickle.loads(cloudpickle.dumps(error))
            except Exception:
                raise env_error(None, "".join(traceback.format_exception(error)), in_one_line(error)) from None
            raise

    return call  # type: ignore[return-value]


class Actor:
    """A local collector in its own process; see `Collector`. Every method except `ping` may take a long time.

    Ray may replace the process at any time. The first call then makes new envs, which begin fresh episodes.

    Args:
        pickled: A pickled pair: the settings of the run, and a function that makes the local collector.
        cores: The number of cores that this process and its workers may use.
        path: `sys.path` of the process that learns.
    """

    def __init__(self, pickled: bytes, cores: int, path: Sequence[str]):
        self._pickled, self._cores, self._path = pickled, cores, path
        self._collector: LocalCollector | None = None
        self._agents: list[Agent] = []
        self._begun = False
        self._restarts = 0  # of its workers, until the last rollout
        self._stack = ExitStack()

    def ping(self) -> Place:
        """Returns where this process runs."""
        import ray

        return Place(ray.get_runtime_context().get_node_id(), os.getpid(), ray.util.get_node_ip_address())

    @_portable
    def start(self) -> Outline:
        """Makes the envs."""
        collector = self._local()
        size = sum(array.nbytes for array in collector.envs.envs.arrays.values()) // collector.envs.num_slabs
        return Outline(collector.spaces, collector.members, collector.wrappers, size, versions())

    @_portable
    def begin(self, env_steps: int) -> None:
        self._local().begin(env_steps)
        self._begun = True

    @_portable
    def collect(self, values: Sequence[Sequence[np.ndarray]], number: int, env_steps: int) -> Packed:
        """`values` are those of all variables of each policy."""
        from ppo.algorithm.packing import packed

        collector, restarted = self._local(), not self._begun
        if restarted:
            self.begin(env_steps)
        for agent, of_agent in zip(self._agents, values, strict=True):
            for variable, value in zip(agent.variables, of_agent, strict=True):
                variable.assign(value)
        rollouts, before = collector.collect(number, env_steps), self._restarts
        self._restarts = collector.restarts
        return packed(rollouts, restarted=restarted, restarts=self._restarts - before)

    @_portable
    def get_states(self) -> list[Any]:
        if not self._begun:
            raise vecenv.NotRestorableNow("the process that stepped the envs has ended, and their states with it")
        return self._local().get_states()

    @_portable
    def set_states(self, states: Sequence[Any]) -> None:
        self._local().set_states(states)
        self._begun = True

    def close(self) -> None:
        """Closes the envs."""
        self._stack.close()

    def _local(self) -> LocalCollector:
        """Returns the local collector, which the first call makes."""
        if self._collector is None:
            os.environ["VECENV_CORES"] = str(self._cores)
            sys.path[:] = dict.fromkeys([*self._path, *sys.path])
            load_tensorflow()
            from ppo.algorithm.teams import config_of
            from ppo.model.agent import Agent

            config, make = pickle.loads(self._pickled)
            collector = self._stack.enter_context(make())
            agents = [
                Agent(config_of(config, collector.members[name]), *spaces) for name, spaces in collector.spaces.items()
            ]
            collector.use(agents)
            self._collector, self._agents = collector, agents
        return self._collector


def kill(pid: int) -> None:
    """Kills a process of this node, even a stopped one, which Ray cannot end."""
    os.kill(pid, signal.SIGKILL)
