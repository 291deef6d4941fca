"""Graph functions that belong to one object, traced without warnings however many objects have the same method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def graph_function(function: Callable[..., Any], *, autograph: bool = False, **options: Any) -> Any:
    """Returns `tf.function(function, **options)` with its own count of traces.

    TensorFlow counts the traces of a function's code, over all objects if it is a method, and warns of retracing after
    five in a row. It counts each partial separately.

    Args:
        function: What the graph computes.
        autograph: Whether AutoGraph translates the source, which takes seconds. Only code with `if` and `for` over
            tensors needs it.
        options: Other arguments of `tf.function`.
    """
    return tf.function(functools.partial(function), autograph=autograph, **options)


def graph_method(**options: Any) -> Callable[[Callable[..., Any]], functools.cached_property[Any]]:
    """Returns a decorator that makes a method of each object a `graph_function` of its own, with these options."""

    def decorated(method: Callable[..., Any]) -> functools.cached_property[Any]:
        made = functools.cached_property(lambda own: graph_function(functools.partial(method, own), **options))
        made.__doc__ = method.__doc__
        return made

    return decorated
