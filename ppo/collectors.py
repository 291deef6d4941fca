"""Making the collector of a run: in this process, or on Ray."""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

import vecenv
from ppo.algorithm.collector import Collector
from ppo.algorithm.ray_collector import RayCollector
from ppo.algorithm.rollout import LocalCollector
from ppo.algorithm.teams import config_of
from ppo.cluster import cluster
from ppo.config import Config, ConfigError
from ppo.envs import Envs, EnvSource, check_settings, has_action_masks, spaces_of, training_envs
from ppo.footprint import check_mappings, check_memory
from ppo.model.distributions import for_space
from ppo.model.observations import check_readable, image_warnings
from ppo.run.folder import Run
from ppo.run.wrappers import agreed, describe_each
from vecenv.wrappers import ACTION_MASK

if TYPE_CHECKING:
    from ppo.envs import VectorEnvs


@dataclass(frozen=True)
class OnRay:
    """Collectors on Ray.

    Attributes:
        collectors: Number of collectors, K. Each steps an equal share of the envs.
        address: Address of the Ray cluster. None: the cluster in RAY_ADDRESS or, without one, Ray on this machine.
    """

    collectors: int
    address: str | None = None

    def shares(self, config: Config) -> list[range]:
        """Returns the envs of each collector.

        Raises:
            ConfigError: If the shares cannot be equal.
        """
        count, num_envs = self.collectors, config.num_envs
        if count < 1:
            raise ConfigError(f"collectors={count} is out of range: it must be 1 or more")
        if num_envs % count:
            nearest = max(1, round(num_envs / count)) * count
            raise ConfigError(
                f"{count} collectors cannot have equal shares of num_envs={num_envs}: set num_envs to a multiple of "
                f"{count}, such as {nearest}"
            )
        size = num_envs // count
        return [range(k * size, (k + 1) * size) for k in range(count)]


@contextmanager
def collector_for(
    config: Config, source: EnvSource, evaluated: EnvSource, on_ray: OnRay | None, warn: Callable[[str], None]
) -> Iterator[Collector]:
    """Makes the training envs with a collector, checks that there is enough memory, and closes both at the end.

    `source` and `evaluated` are as for `ppo.envs.training_envs`. Calls `warn` with messages about the cluster and about
    restarts.

    Raises:
        ConfigError: If the envs or the cluster do not match the settings, or training would need too much memory.
    """
    with _made(config, source, evaluated, on_ray, warn) as collector:
        check_mappings(len(collector.members))
        for name, members in collector.members.items():
            check_memory(config_of(config, members), collector.spaces[name], held_bytes=collector.held_bytes)
        yield collector


def check_envs(
    collector: Collector, config: Config, run: Run, *, given: bool, resume: bool, origin: Run | None,
    warn: Callable[[str], None],
) -> None:  # fmt: skip
    """Checks that the envs of a run fit its policies, and writes their spaces to the folder of a new run.

    `given` says whether the envs were passed to `ppo.train` instead of being made from `config.env`. Calls `warn` with
    a message for each image that no CNN reads. Raises ConfigError if the policies are for other spaces.
    `ppo.trainer.run_training` explains the other arguments.
    """
    spaces = collector.spaces
    if resume:
        run.check_spaces(spaces)
    else:
        if config.network is None:
            for observed, _ in spaces.values():
                for message in image_warnings(observed, config.cnn):
                    warn(message)
        run.write_spaces(spaces, given=given, wrappers=agreed(collector.wrappers))
    if origin is not None:
        origin.check_spaces(spaces)


@contextmanager
def _made(
    config: Config, source: EnvSource, evaluated: EnvSource, on_ray: OnRay | None, warn: Callable[[str], None]
) -> Iterator[Collector]:
    """Makes and closes the collector of `collector_for`."""
    if on_ray is None:
        with training_envs(config, source, evaluated) as envs:
            yield _local(config, envs)
        return
    if isinstance(source, gym.vector.VectorEnv):
        raise ConfigError(
            "collectors on Ray make their own envs: pass functions that make envs instead of a vector env"
        )
    check_settings(config, source, evaluated)
    shares = on_ray.shares(config)
    make = functools.partial(local_share, config, source, vecenv.foreign_specs(), _in_main(config))
    remedy, parts = "Create it inside the function that makes the env.", {"envs": source}
    pickled = [vecenv.pickle_for_workers((config, functools.partial(make, share)), remedy, parts) for share in shares]
    with cluster(on_ray.address, len(shares), warn) as cores:
        collector = RayCollector(config, pickled, shares, cores=cores, warn=warn)
        try:
            collector.start()
            yield collector
        finally:
            collector.close()


@contextmanager
def local_share(
    config: Config, source: EnvSource, specs: Sequence[EnvSpec], in_main: Mapping[str, Any], share: range
) -> Iterator[LocalCollector]:
    """Makes the collector of a share of the envs, in the process of a Ray actor.

    Args:
        config: The settings of the run.
        source: As for `ppo.envs.training_envs`.
        specs: Specs of registered envs, which the process of the actor may not know.
        in_main: What the settings name in the `__main__` of the process that learns, by name.
        share: The numbers of these envs in the run.
    """
    for spec in specs:
        gym.registry.setdefault(spec.id, spec)
    vars(sys.modules["__main__"]).update(in_main)
    with training_envs(config, source, share=share) as envs:
        yield _local(config, envs, first_env=share.start)


def _in_main(config: Config) -> dict[str, Any]:
    """Returns what the settings name in `__main__`, such as "__main__:Env"."""
    names = re.findall(r"\b__main__:(\w+)", " ".join([config.env, config.network or "", *config.wrappers]))
    main = vars(sys.modules["__main__"])
    return {name: main[name] for name in names if name in main}


def _local(config: Config, envs: VectorEnvs, *, first_env: int = 0) -> LocalCollector:
    spaces = spaces_of(config, envs)
    for observed, acted in spaces.values():  # before the engine's errors, which name neither the entry nor a wrapper
        check_readable(observed)
        for_space(acted, transform=config.action_transform)
    if isinstance(envs, Envs) and not isinstance(envs.env_fns, vecenv.Batched):
        observed, _ = spaces[""]
        if ACTION_MASK not in getattr(observed, "spaces", ()) and any(envs.apply(has_action_masks)):
            warnings.warn(
                "the envs have a method action_masks(), which ppo never calls, so all actions are allowed: return the "
                'mask in the observation, a Dict, under the key "action_mask" (docs/ppo.md#spaces)',
                stacklevel=2,
            )
    return LocalCollector(config, envs, spaces, wrappers=describe_each(config, envs), first_env=first_env)
