"""Applies a function to a few rows at a time, because all rows at once would need too much memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def in_chunks(function: Callable[[Any], Any], rows: Any, size: int) -> Any:
    """Returns `function(rows)`, computed for `size` rows at a time. Not for functions that XLA compiles.

    Args:
        function: Maps tensors `[B, ...]` to tensors `[B, ...]`, each row independently of the others.
        rows: One or more rows, in any nesting. Their number may be unknown while TensorFlow traces.
        size: Rows of a chunk. The last chunk may have fewer.
    """
    columns = tf.nest.flatten(rows)
    count = tf.shape(columns[0])[0]
    chunks = (count + size - 1) // size

    def chunk(k: tf.Tensor | int) -> Any:
        return function(tf.nest.map_structure(lambda column: column[k * size : (k + 1) * size], rows))

    first = chunk(0)
    parts = [
        tf.TensorArray(leaf.dtype, size=chunks, infer_shape=False, element_shape=[None, *leaf.shape[1:]]).write(0, leaf)
        for leaf in tf.nest.flatten(first)
    ]

    def step(k: tf.Tensor, *parts: tf.TensorArray) -> tuple[Any, ...]:
        leaves = tf.nest.flatten(chunk(k))
        return (k + 1, *(part.write(k, leaf) for part, leaf in zip(parts, leaves, strict=True)))

    # Order: one chunk after the other, because two at a time would need twice the memory.
    _, *parts = tf.while_loop(lambda k, *_: k < chunks, step, (1, *parts), parallel_iterations=1)
    whole = [part.concat() for part in parts]
    for leaf in whole:
        leaf.set_shape([columns[0].shape[0], *leaf.shape[1:]])
    return tf.nest.pack_sequence_as(first, whole)
