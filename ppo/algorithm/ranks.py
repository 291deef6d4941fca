"""Ranks: processes that train one policy together, each on its own share of the envs.

All ranks hold the same weights, statistics and schedules, because they begin with the same seed and change them by
the same numbers: gradients, statistics and KLs are averaged over the ranks before they are used.
"""

from __future__ import annotations

import itertools
import math
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from ppo.algorithm.normalize import Statistics
from ppo.config import Config
from ppo.graphs import graph_function

_LOSSES = (tf.errors.UnavailableError, tf.errors.FailedPreconditionError, tf.errors.DeadlineExceededError)
"""Exceptions that collective operations raise if a rank is gone, was restarted, or does not answer."""

_ALL, _RING, _PAIRS = 1 << 20, 1 << 21, 1 << 22
"""TensorFlow's group keys, outside the range of the small keys that the strategy uses.

`_ALL` and `_RING` are groups of all ranks. `_PAIRS + i` is the group of rank 0 and rank i.
"""

_SMALL = 1 << 20
"""Sums of at most this many bytes avoid TensorFlow's ring (docs/performance.md)."""

_BLOCK = 1 << 22
"""Maximum number of bytes that a rank sends at once. TensorFlow limits the blocks of all ranks together to 2 GB."""


class RankLost(ConnectionError):
    """Another rank has ended or does not answer. The message names it."""


class RanksDiffer(RuntimeError):
    """The ranks hold different weights, statistics or optimizers, so the run must not be saved."""


class Ranks:
    """This process as the only rank of a run. The subclass `Cluster` is one of several ranks.

    Attributes:
        number: The number of this rank, from 0.
        count: The number of ranks, K.
    """

    number = 0
    count = 1

    def share(self, config: Config) -> Config:
        """Returns the settings of this rank's part: N / K envs, and minibatches of B / K samples."""
        return config

    def rows(self, config: Config) -> slice:
        """Returns the envs of this rank, as a slice of all N envs."""
        return slice(0, config.num_envs)

    def mean(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the mean of `values: [...]` over the ranks, which is bit-identical on all ranks."""
        return values

    def merged(self, parts: Sequence[Statistics]) -> list[Statistics]:
        """Returns statistics of the samples of all ranks. Each rank has the same number of samples."""
        return list(parts)

    def gathered(self, values: np.ndarray) -> np.ndarray:
        """Returns the float64 arrays of all ranks, `[K, ...]`. They have the same shape on all ranks."""
        return values[None]

    def messages(self, message: bytes) -> list[bytes]:
        """Returns the messages of all ranks."""
        return [message]

    def texts(self, text: str) -> list[str]:
        """Returns the texts of all ranks."""
        return [message.decode() for message in self.messages(text.encode())]

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raises `RankLost` if the block fails because another rank is gone."""
        yield


class Cluster(Ranks):
    """One of several ranks, which `TF_CONFIG` lists. TensorFlow's collective operations connect them.

    The constructor waits for the other ranks, which should have started already. If this takes longer than two
    timeouts, SIGALRM ends the process. Create one instance per process, before any other use of TensorFlow.

    Args:
        timeout_s: Seconds after which a rank that does not answer counts as lost. At least 4.
    """

    def __init__(self, timeout_s: int = 30):
        from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
        from tensorflow.python.eager import context

        # Without this, TensorFlow uses its coordination service instead of the checks below. The service drops every
        # rank that has sent no heartbeat for 10 seconds, even if all ranks were suspended.
        context.context().configure_coordination_service(service_type="")
        # TensorFlow has no public names for these: its checks begin while the strategy is built. A peer is lost if it
        # leaves two requests unanswered. The checks are a quarter of the timeout apart.
        CollectiveAllReduceExtended._check_health_interval = timeout_s // 4
        CollectiveAllReduceExtended._check_health_timeout = timeout_s // 4
        CollectiveAllReduceExtended._check_health_retry_limit = 2
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        spec = resolver.cluster_spec()
        self._tasks = [
            (job, task, address)
            for job in ("chief", "worker")
            if job in spec.jobs
            for task, address in zip(spec.task_indices(job), spec.job_tasks(job), strict=True)
        ]
        own = (resolver.task_type, resolver.task_id)
        self.number = [(job, task) for job, task, _ in self._tasks].index(own)
        self.count = len(self._tasks)
        # TensorFlow waits with Python's lock held, so neither a thread nor an exception could end the wait.
        previous = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(2 * timeout_s)
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        (self._device,) = self._strategy.extended.worker_devices
        self._host = tf.DeviceSpec.from_string(self._device).replace(device_type="CPU", device_index=0).to_string()
        # Instance keys. They are equal on all ranks, which build the same graphs in the same order.
        self._keys = itertools.count(1)
        self._gathers: dict[tuple[Any, ...], Callable[[tf.Tensor], tf.Tensor]] = {}

    def share(self, config: Config) -> Config:
        return config.share(self.count)

    def rows(self, config: Config) -> slice:
        size = config.num_envs // self.count
        return slice(self.number * size, (self.number + 1) * size)

    def mean(self, values: tf.Tensor) -> tf.Tensor:
        return self._sum(values) / self.count

    def merged(self, parts: Sequence[Statistics]) -> list[Statistics]:
        if not parts:
            return []
        moments = [column for part in parts for column in (part.mean, part.variance)]
        flat = tf.concat([tf.reshape(column, [-1]) for column in moments], axis=0)
        split = tf.split(self._gathered(flat), [column.shape.num_elements() for column in moments], axis=1)
        of_ranks = [tf.reshape(found, [self.count, *own.shape]) for found, own in zip(split, moments, strict=True)]
        merged = []
        for part, means, variances in zip(parts, of_ranks[::2], of_ranks[1::2], strict=True):
            # Chan, Golub, LeVeque, 1979, for parts of equal size
            variance = tf.reduce_mean(variances, axis=0) + tf.math.reduce_variance(means, axis=0)
            merged.append(Statistics(part.number * self.count, tf.reduce_mean(means, axis=0), variance))
        return merged

    def gathered(self, values: np.ndarray) -> np.ndarray:
        return self._rows_of_all(values.astype(np.float64))

    def _rows_of_all(self, values: np.ndarray) -> np.ndarray:
        if not values.size:  # the collective operation would crash
            return np.zeros([self.count, *values.shape], values.dtype)
        name = (values.shape, values.dtype)
        if name not in self._gathers:
            self._gathers[name] = graph_function(self._gathered)
        with self.raising():
            return self._gathers[name](tf.constant(values)).numpy()

    def messages(self, message: bytes) -> list[bytes]:
        sizes = self.gathered(np.array(len(message))).astype(int)
        # Collectives cannot carry bytes. Blocks of 2 ** n words limit the number of graphs.
        length = max(sizes.max() / 8, 1)
        block = min(2 ** math.ceil(math.log2(length)), _BLOCK // 8)
        words = np.zeros([math.ceil(length / block), block], np.int64)
        words.reshape(-1).view(np.uint8)[: len(message)] = np.frombuffer(message, np.uint8)
        rows = np.concatenate([self._rows_of_all(part) for part in words], axis=1)
        return [row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]

    @contextmanager
    def raising(self) -> Iterator[None]:
        try:
            yield
        except _LOSSES as error:
            raise RankLost(
                f"{self._lost(error.message)} has ended or does not answer, so rank {self.number} cannot continue. "
                "Unless --restarts or a scheduler restarts all ranks, start them again, with --resume if the run has a "
                "checkpoint."
            ) from error

    def _lost(self, message: str) -> str:
        """Returns the name of the rank that an error of TensorFlow is about."""
        found = [(job, int(task)) for job, task in re.findall(r"/job:(\w+)/replica:0/task:(\d+)", message)]
        numbers = [i for i, (job, task, _) in enumerate(self._tasks) if (job, task) in found and i != self.number]
        if not numbers:
            return "another rank"
        return f"rank {numbers[0]} of {self.count} ({self._tasks[numbers[0]][2]})"

    def _gathered(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the values of all ranks, `[K, ...]`."""
        return self._exchanged(values, tf.stack, [self.count, *values.shape])

    def _sum(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the sum over all ranks. Large values use a ring."""
        if values.shape.num_elements() * values.dtype.size <= _SMALL:
            return self._exchanged(values, tf.add_n, values.shape)
        group = {"group_size": self.count, "group_key": _RING, "instance_key": next(self._keys)}
        with tf.device(self._device):
            return tf.raw_ops.CollectiveReduceV2(
                input=values, merge_op="Add", final_op="Id", ordering_token=[], **group
            )

    def _exchanged(
        self, values: tf.Tensor, combine: Callable[[list[tf.Tensor]], tf.Tensor], shape: Sequence[int]
    ) -> tf.Tensor:
        """Returns `combine([values of rank 0, ..., values of rank K - 1])`.

        For small values, the number of messages costs more than their size. Two ranks send each other one message. With
        more, rank 0 receives K - 1 messages concurrently and broadcasts the result through a tree.

        Args:
            values: This rank's values, of the same shape on all ranks.
            combine: Combines the list. Must be deterministic, because with two ranks, each calls it.
            shape: The shape of the result.
        """
        key = next(self._keys)

        def group(rank: int | None = None) -> dict[str, int]:
            """Returns the group of all ranks, or of rank 0 and the given rank."""
            size, group_key = (self.count, _ALL) if rank is None else (2, _PAIRS + rank)
            return {"group_size": size, "group_key": group_key, "instance_key": key}

        def received(shape: Sequence[int], **group: int) -> tf.Tensor:
            return tf.ensure_shape(tf.raw_ops.CollectiveBcastRecvV2(T=values.dtype, shape=shape, **group), shape)

        # Order: keys can be reused, because an operation ends only after its tensors have arrived, and before the next
        # iteration or call begins.
        with tf.device(self._host):
            if self.count == 2:
                both = tf.raw_ops.CollectiveGatherV2(input=values[None], ordering_token=[], **group())
                return combine(tf.unstack(both, num=2))
            if self.number == 0:
                others = [received(values.shape, **group(rank)) for rank in range(1, self.count)]
                return tf.raw_ops.CollectiveBcastSendV2(input=combine([values, *others]), **group())
            sent = tf.raw_ops.CollectiveBcastSendV2(input=values, **group(self.number))
            with tf.control_dependencies([sent]):  # or TensorFlow would prune it, because nothing uses its output
                return received(shape, **group())
