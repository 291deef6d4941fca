"""Graph functions: how they are traced, and how they run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context  # TensorFlow offers no public way to choose an executor

_Carried = TypeVar("_Carried")
_Function: Any = type(tf.function(lambda: None))


class _GraphFunction(_Function):
    """A `tf.function` that remains a graph after a script has called `tf.config.run_functions_eagerly(True)`.

    Without graphs, rollouts would be slow, and functions would return the arrays that they are given unconverted.
    """

    _run_functions_eagerly = False


def graph_function(function: Callable[..., Any], **options: Any) -> Any:
    """Returns a `tf.function` that counts its own traces, without AutoGraph, which takes seconds.

    TensorFlow counts traces per code object, which all instances of a class share, and warns of retracing after five in
    a row. A partial has its own count. The options are other arguments of `tf.function`.
    """
    counted: Any = functools.partial(function)
    counted.__name__ = getattr(function, "__name__", "graph")  # of the graph, for profiles and error messages
    return _GraphFunction(counted, counted.__name__, autograph=False, **options)


def repeat(count: int | tf.Tensor, step: Callable[[tf.Tensor, _Carried], _Carried], carried: _Carried) -> _Carried:
    """Returns `carried`, nested tensors, after `carried = step(i, carried)` for each i below `count`."""
    # Order: steps run one at a time, because each may need what the previous step computed, assigned, or did to envs.
    return tf.while_loop(
        lambda i, _: i < count, lambda i, carried: (i + 1, step(i, carried)), (0, carried), parallel_iterations=1
    )[1]


def in_order(enabled: bool) -> AbstractContextManager[None]:
    """Returns a context in which, if enabled, graph functions run one operation at a time, on one thread.

    This is faster if operations depend on one another and take less time than passing them between threads. Functions
    must also be traced in this context, including the functions that they call. With an accelerator, the context
    changes nothing, because a thread that waits for another device would wait forever.
    """
    return context.function_executor_type("SINGLE_THREADED_EXECUTOR") if enabled and _is_alone() else nullcontext()


@functools.cache
def _is_alone() -> bool:
    """Returns whether the CPU is the only device."""
    return len(tf.config.list_logical_devices()) == 1


def straight_through(value: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Returns `value`, with the gradient of `x`. Both are finite, float32 and of one shape.

    TensorFlow keeps every graph that uses `tf.custom_gradient` in memory until the process ends.
    """
    return tf.stop_gradient(value) + (x - tf.stop_gradient(x))
