"""Importing TensorFlow quietly, with thread counts that suit ppo."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import vecenv
from ppo.runtime import compilation_cache


def load_tensorflow() -> None:
    """Imports TensorFlow without its messages, unless the import fails.

    Does not change environment variables that are already set. If TensorFlow is already imported, its settings stay as
    they are.
    """
    if "tensorflow" in sys.modules:
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # One thread for each chain of an update. More would only pass operations between them. With a single thread, an env
    # that calls a graph function in this process would wait forever for the thread that steps it.
    os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")
    # TensorFlow's default ignores the CPU quota of a container.
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(vecenv.available_cores()))
    # TensorFlow writes messages about its build and about missing GPUs to the stderr descriptor, before it reads any
    # setting.
    with tempfile.TemporaryFile() as notes:
        if sys.stderr is not None:
            sys.stderr.flush()
        try:
            stderr = os.dup(2)
        except OSError:  # the process has no stderr
            stderr = os.open(os.devnull, os.O_WRONLY)
        os.dup2(notes.fileno(), 2)
        collected = gc.isenabled()
        gc.disable()  # saves a quarter of the time: imported objects stay alive, so scanning them frees nothing
        try:
            with compilation_cache.in_memory():
                with _without_keras():
                    import tensorflow as tf
                tf.zeros([])  # finds the devices
            compilation_cache.load()
        except Exception:
            notes.seek(0)
            os.write(stderr, notes.read())
            raise
        finally:
            if collected:
                gc.enable()
            os.dup2(stderr, 2)
            os.close(stderr)


def call_with_tensorflow(module: str, name: str, *arguments: Any) -> Any:
    """Loads TensorFlow, and calls a function of a module that imports it. Pickles of policies call this function."""
    load_tensorflow()
    return getattr(importlib.import_module(module), name)(*arguments)


@contextmanager
def _without_keras() -> Iterator[None]:
    """Makes `import tensorflow` skip Keras, a quarter of the import time. `tf.keras` imports it when it is first used.

    At its end, TensorFlow calls `import_module` for Keras's optimizers, and ignores an ImportError.
    """
    import_module = importlib.import_module

    def refuse(name: str, package: str | None = None) -> ModuleType:
        if name == "keras.src.optimizers" and name not in sys.modules:
            raise ImportError(f"{name} is imported later, if it is used")
        return import_module(name, package)

    importlib.import_module = refuse
    try:
        yield
    finally:
        importlib.import_module = import_module
