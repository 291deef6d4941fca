"""Which rank this process is, the checks that all ranks agree, and the run folder of each rank."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ppo.config import Config, ConfigError
from ppo.run.folder import Run, versions

if TYPE_CHECKING:
    from ppo.algorithm.ranks import Ranks

TF_CONFIG = "TF_CONFIG"
COPIES = "PPO_COPIES"  # variable with the folder in which `copy_folder` creates folders; the launcher removes it
TIMEOUT_S = 30.0  # after which a silent rank is lost; see `Cluster`
START_S = 300.0  # that a rank waits for the other ranks to start
SLURM_PORTS = range(16384, 32768)  # of rank 0 in Slurm jobs; below the ports that Linux gives to outgoing connections


def number_of_ranks() -> int:
    """Returns the number of ranks that the variable `TF_CONFIG` lists, or 1. Raises ConfigError if it is unusable."""
    return max(1, len(_addresses()[0]))


def is_first_rank() -> bool:
    """Returns whether this process is rank 0, which evaluates, reports and saves."""
    addresses, number = _addresses()
    return len(addresses) < 2 or number == 0


def _addresses() -> tuple[list[str], int]:
    """Returns the addresses of all ranks and the number of this one."""
    text = os.environ.get(TF_CONFIG, "")
    if not text:
        return [], 0
    try:
        values = json.loads(text)
        cluster, task = values.get("cluster", {}), values.get("task", {})
        if unknown := sorted(cluster.keys() - {"chief", "worker", "evaluator"}):
            raise ValueError(f"PPO has no use for the jobs {unknown} of the cluster: remove them")
        tasks = [(job, index) for job in ("chief", "worker") for index, _ in enumerate(cluster.get(job, ()))]
        addresses = [str(cluster[job][index]) for job, index in tasks]
        own = (str(task.get("type")), int(task.get("index", -1)))
        if len(tasks) > 1 and own not in tasks:
            raise ValueError(f"the task of this process, {task}, is not in the cluster {cluster}")
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{TF_CONFIG}={text!r} is unusable: {error}") from error
    return addresses, tasks.index(own) if len(tasks) > 1 else 0


def use_slurm() -> None:
    """Sets `TF_CONFIG` to a cluster of all tasks of this Slurm job step. Rank r is the task with SLURM_PROCID = r.

    Only the address of rank 0 is needed. Its host is the first one of the job step, because Slurm distributes the tasks
    over the hosts in blocks by default. Raises ConfigError if this process is not a task of a Slurm job step.
    """
    try:
        first = re.match(r"([^,[]|\[[^]]*\])+", os.environ["SLURM_STEP_NODELIST"])  # such as "node[07-09,12]"
        if first is None:
            raise ValueError("SLURM_STEP_NODELIST names no host")
        host = re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0])
        # Jobs on one host must not share a port.
        port = SLURM_PORTS.start + int(os.environ["SLURM_JOB_ID"]) % len(SLURM_PORTS)
        others = [f"task {i} of the job step" for i in range(1, int(os.environ["SLURM_STEP_NUM_TASKS"]))]
        task = {"type": "worker", "index": int(os.environ["SLURM_PROCID"])}
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"--ranks slurm needs the environment of a Slurm job step, but a variable is unusable: {error!r}. Start "
            "the command with srun (see docs/cluster.md)."
        ) from error
    os.environ[TF_CONFIG] = json.dumps({"cluster": {"worker": [f"{host}:{port}", *others]}, "task": task})


@contextmanager
def connected() -> Iterator[Ranks]:
    """Connects to the other ranks that `TF_CONFIG` lists, and yields the ranks of this run.

    Raises ConnectionError if another rank has not started within `START_S` seconds.
    """
    from ppo.algorithm.ranks import Cluster, Ranks

    addresses, number = _addresses()
    if len(addresses) < 2:
        yield Ranks()
        return
    others = ", ".join(addresses)
    print(f"rank {number} of {len(addresses)} waits up to {START_S:g} s for {others}", file=sys.stderr, flush=True)
    with closing(Cluster(addresses, number, start_s=START_S, timeout_s=TIMEOUT_S)) as cluster:
        yield cluster


def check_same(ranks: Ranks, config: Config) -> None:
    """Raises ConfigError on every rank unless all have the same settings and versions."""
    own = {**versions(), **dataclasses.asdict(config)}
    facts = [json.loads(text) for text in ranks.texts(json.dumps(own))]
    for number, other in enumerate(facts):
        if different := [name for name in facts[0] if other.get(name) != facts[0][name]]:
            named = "; ".join(f"{name} is {facts[0][name]} and {other.get(name)}" for name in different)
            raise ConfigError(f"ranks 0 and {number} differ: {named}. Start all ranks with the same command.")


def copy_folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a temporary folder for this rank's copy of the run. Only rank 0 keeps its run folder."""
    return tempfile.TemporaryDirectory(prefix="rank-", dir=os.environ.get(COPIES))


@contextmanager
def folder_of(ranks: Ranks, run: Run, *, resume: bool) -> Iterator[Run]:
    """Yields the run folder for rank 0. The other ranks resume a temporary copy, which is then removed."""
    if ranks.number == 0 or not resume:
        yield run
        return
    with copy_folder() as folder:
        copy = Path(folder) / run.path.name
        shutil.copytree(run.path, copy, symlinks=True)
        yield dataclasses.replace(run, path=copy)
