"""A collector on Ray: K actors step the envs, each its share, and the rollouts come back through Ray's object store.

It differs from `LocalCollector` only in where the envs are stepped. Each actor holds a local collector and draws the
noise of all envs, so the actions in an env do not depend on K, except for rounding, which differs between batch sizes.
A call of `collect` carries all that an actor needs, so Ray can replace an actor and repeat the call.
"""

from __future__ import annotations

import importlib
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gymnasium.vector.utils import batch_differing_spaces

import vecenv
from ppo.algorithm.collector import Rollouts, Spaces
from ppo.algorithm.packing import Packed, joined
from ppo.algorithm.ray_actor import Actor, Outline, Place, kill
from ppo.config import Config, ConfigError
from ppo.errors import RunError
from ppo.model.agent import Agent
from ppo.versions import PACKAGES, versions
from vecenv.tree import enclosing

POLL_S = 1.0  # seconds between two polls of actors that have not answered
FROZEN_POLLS = 20  # polls without an answer after which an actor counts as frozen and is killed
LOST_POLLS = 60  # polls without an answer after which Ray is not expected to replace an actor
CLOSE_S = 5.0  # seconds in which an actor may close its envs
DEATHS = 3  # in a row, after which an actor is not replaced again
HEAD_CHECK_S = 5.0  # seconds between two attempts to reach Ray's head
HEAD_LOST_S = 20.0  # seconds of failed attempts after which the head counts as lost


def common_spaces(shares: Sequence[Spaces]) -> Spaces:
    """Combines the spaces of each share into the spaces of all envs. Only the bounds of observations may differ.

    Raises:
        ConfigError: If anything else differs.
    """
    found = dict(shares[0])
    for k, share in enumerate(shares):
        for name, (observed, acted) in found.items():
            observed_here, acted_here = share[name]
            try:
                both = batch_differing_spaces([observed, observed_here])
                one, other = (enclosing(space, both) for space in (observed, observed_here))
                fits = one == other and acted == acted_here
            except (AssertionError, TypeError, ValueError):  # Gymnasium cannot batch them
                fits = False
            if not fits:
                raise ConfigError(
                    f"the envs of collector {k} have the spaces {observed_here} and {acted_here}, but those of "
                    f"collector 0 have {observed} and {acted}: all envs of a run need the same spaces"
                )
            found[name] = (one, acted)
    return found


class Head:
    """Watches the head of a Ray cluster: the control server (GCS) at `address`, "host:port". `clock` returns seconds.

    Ray ends this process, without saving the run, some time after it has lost the head (`ppo.cluster.LOSS_S`).
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic):
        self._address, self._clock, self._tried_s = address, clock, clock()
        self._failing_since_s: float | None = None

    def check(self) -> None:
        """Raises RunError if the head has refused all connections for `HEAD_LOST_S`. Call this often."""
        now = self._clock()
        if now - self._tried_s < HEAD_CHECK_S:
            return
        self._tried_s = now
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
        except OSError as error:
            since = self._failing_since_s = now if self._failing_since_s is None else self._failing_since_s
            if now - since >= HEAD_LOST_S:
                raise RunError(
                    f"lost the Ray cluster: its head at {self._address} does not accept connections ({error}). "
                    "Resume the run; if you started the cluster yourself, restart it first."
                ) from error
        else:
            self._failing_since_s = None


class RayCollector:
    """Collects with K actors. See `Collector` for the methods. Call `start` before any of them.

    With `on_worker_death="restart"`, Ray replaces an actor that dies, its envs begin fresh episodes, and `warn` is
    called. Otherwise, the death of an actor is an error.

    Args:
        config: The settings of the run.
        pickled: What each actor unpickles; see `Actor`.
        shares: The envs of each actor.
        cores: The number of cores that each actor reserves.
        warn: Called with a message when an actor was replaced.

    All methods that call actors raise the following; `start` also raises ConfigError if a node has other versions of
    the packages.

    Raises:
        vecenv.WorkerDied: If an actor died or does not answer.
        RunError: If the head of the cluster is gone.
        Exception: Whatever an env raised, with a note that names the collector.
    """

    def __init__(
        self,
        config: Config,
        pickled: Sequence[bytes],
        shares: Sequence[range],
        *,
        cores: int,
        warn: Callable[[str], None],
    ):
        self._ray = importlib.import_module("ray")  # optional, and it takes a second
        self._config, self._shares, self._cores, self._warn = config, shares, cores, warn
        self._restarts = config.on_worker_death == "restart"
        options: Any = {
            "num_cpus": cores,
            "max_restarts": -1 if self._restarts else 0,
            "max_task_retries": DEATHS - 1 if self._restarts else 0,
            "concurrency_groups": {"health": 1},
            "scheduling_strategy": "SPREAD",
        }
        actor = self._ray.remote(**options)(Actor)
        self._head = Head(self._ray.get_runtime_context().gcs_address)
        self._actors = [actor.remote(one, cores, sys.path) for one in pickled]
        self._pings = [self._ping(actor) for actor in self._actors]
        self._silent = [0] * len(shares)  # polls since the last answer to a ping
        self._places: list[Place | None] = [None] * len(shares)
        self._acting: Sequence[Agent] = ()
        self.steps = self.restarts = 0

    def start(self) -> None:
        """Makes the envs of all actors, and sets the attributes that describe them."""
        outlines: list[Outline] = self._all("start", ())
        self._places = self._ray.get(self._pings)
        self.members, expected = outlines[0].members, versions()
        self.wrappers: Sequence[Any] = [wrappers for outline in outlines for wrappers in outline.wrappers]
        for k, outline in enumerate(outlines):
            names = [name for name in ("python", *PACKAGES) if outline.versions[name] != expected[name]]
            if names:
                named = ", ".join(f"{name} {outline.versions[name]} instead of {expected[name]}" for name in names)
                raise ConfigError(f"{self._name(k)} has {named}: install the same versions on all nodes")
        self.spaces = common_spaces([outline.spaces for outline in outlines])
        # Three copies: the rollout as received, the concatenated arrays, and the tensors.
        self.held_bytes = 3 * sum(outline.rollout_bytes for outline in outlines)

    def use(self, actors: Sequence[Agent]) -> None:
        self._acting = actors

    def begin(self, env_steps: int) -> None:
        self._all("begin", (env_steps,))

    def collect(self, number: int, env_steps: int) -> Rollouts:
        values = self._ray.put([[variable.numpy() for variable in actor.variables] for actor in self._acting])
        self.steps = 0
        parts: list[Packed] = self._all("collect", (values, number, env_steps), counted=True)
        for k, part in enumerate(parts):
            self.restarts += part.restarts + part.restarted
            if part.restarted:
                self._warn(f"{self._name(k)} died and was replaced: its envs began fresh episodes")
        return joined(parts)

    def get_states(self) -> list[Any]:
        return [state for states in self._all("get_states", ()) for state in states]

    def set_states(self, states: Sequence[Any]) -> None:
        parts = [states[share.start : share.stop] for share in self._shares]
        self._wait(
            {actor.set_states.remote(part): k for k, (actor, part) in enumerate(zip(self._actors, parts, strict=True))}
        )

    def close(self) -> None:
        """Closes the envs of all actors and ends the actors."""
        with suppress(Exception):  # they may be dead, or the cluster gone
            closing = [actor.close.remote() for actor in self._actors]
            _, silent = self._ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
            for ref in silent:
                self._kill(closing.index(ref))
        for actor in self._actors:
            with suppress(Exception):
                self._ray.kill(actor)

    def _all(self, method: str, arguments: tuple[Any, ...], *, counted: bool = False) -> list[Any]:
        """Calls a method of all actors and returns the results; with `counted`, the results count as `steps`."""
        refs = {getattr(actor, method).remote(*arguments): k for k, actor in enumerate(self._actors)}
        return self._wait(refs, counted=counted)

    def _wait(self, pending: Mapping[Any, int], *, counted: bool = False) -> list[Any]:
        """Returns the results of calls in the order of the actors. An error ends the wait at once."""
        pending, found = dict(pending), {}
        self._silent = [0] * len(self._shares)
        while pending:
            self._head.check()
            done, _ = self._ray.wait(list(pending), timeout=POLL_S)
            for ref in done:
                k = pending.pop(ref)
                found[k] = self._result(ref, k)
                self.steps += counted * len(self._shares[k]) * self._config.num_steps
            if not done:
                self._check_health(pending.values())
        return [found[k] for k in sorted(found)]

    def _result(self, ref: Any, k: int) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            return self._ray.get(ref)
        except RayTaskError as error:
            cause: Exception = error.cause
            cause.add_note(f"This happened in {self._name(k)}, whose env 0 is env {self._shares[k].start} of the run.")
            raise cause from None
        except RayError as error:
            times = f" {DEATHS} times in a row" if self._restarts else ""
            reason = " ".join(str(error).split())
            raise vecenv.WorkerDied(f"{self._name(k)} died{times}. Ray says: {reason}") from None

    def _check_health(self, pending: Iterable[int]) -> None:
        """Kills frozen actors so that Ray replaces them, or raises `WorkerDied` if Ray does not replace actors.

        It counts polls instead of seconds, because this process may have been suspended.
        """
        from ray.exceptions import RayError

        for k in pending:
            if self._ray.wait([self._pings[k]], timeout=0)[0]:
                with suppress(RayError):  # the pending call fails with the same error
                    self._places[k], self._silent[k] = self._ray.get(self._pings[k]), 0
                self._pings[k] = self._ping(self._actors[k])
                continue
            self._silent[k] += 1
            silence = f"has not answered for {self._silent[k] * POLL_S:g} s"
            if self._silent[k] == FROZEN_POLLS and self._places[k] is not None:
                if not self._restarts:
                    raise vecenv.WorkerDied(f"{self._name(k)} {silence}: its process is frozen, or its node is gone.")
                self._kill(k)
            if self._silent[k] == LOST_POLLS:
                raise vecenv.WorkerDied(
                    f"{self._name(k)} {silence}. Ray has no node with {self._cores} free cores for it (`ray status`), "
                    "or it cannot start there: add nodes, or use fewer collectors."
                )

    def _ping(self, actor: Any) -> Any:
        return actor.ping.options(concurrency_group="health").remote()

    def _kill(self, k: int) -> None:
        """Kills the process of an actor where it was last seen."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if (place := self._places[k]) is not None:
            there = NodeAffinitySchedulingStrategy(place.node, soft=False)
            self._ray.remote(num_cpus=0, scheduling_strategy=there)(kill).remote(place.pid)

    def _name(self, k: int) -> str:
        share, place = self._shares[k], self._places[k]
        where = "" if place is None else f", process {place.pid} on node {place.address}"
        return f"collector {k} of {len(self._shares)} (envs {share.start}:{share.stop}{where})"
