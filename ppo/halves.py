"""Whether envs are stepped in two halves, each with a loop of its own in the graph."""

from __future__ import annotations

import os

import vecenv
from ppo.config import Config

FASTER = ("Ant-v5", "Humanoid-v5", "HumanoidStandup-v5")
"""Tasks that were measured to be faster so, see docs/performance.md: their steps are long, with much to do besides."""

NEEDED_THREADS = 2  # of TensorFlow, for two loops at a time


def wants_halves(config: Config) -> bool:
    """Returns whether a run is to have halves, as far as its settings say."""
    if config.halves is not None:
        return config.halves
    here = config.backend == "auto" and config.num_workers is None and not config.overlap
    return here and config.env in FASTER and config.num_envs >= 2 and vecenv.available_cores() >= 2


def num_loops() -> int:
    """Returns how many loops of a graph TensorFlow runs at the same time."""
    import tensorflow as tf

    given = os.environ.get("TF_NUM_INTEROP_THREADS", "")
    number = tf.config.threading.get_inter_op_parallelism_threads() or (int(given) if given.isdecimal() else 0)
    return number or vecenv.available_cores()
