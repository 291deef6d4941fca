"""Lets threads that another library made keep what Python knows of them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable)
_here = threading.local()


def staying(function: _Function) -> _Function:
    """Returns the same function, after which the thread that called it remains known to Python.

    A thread that Python did not make is known to it only as long as it runs Python code: TensorFlow's are made known
    by each call (`PyGILState_Ensure`), and forgotten after it. That takes memory from the system and gives it back,
    which stops all cores for a moment: 60 us for each step of the envs. One more call of the same function, which is
    never taken back, keeps it. Threads of a pool live as long as the process.
    """

    def call(*arguments):  # type: ignore[no-untyped-def]
        if not hasattr(_here, "stays"):
            _here.stays = True
            ctypes.pythonapi.PyGILState_Ensure()
        return function(*arguments)

    return call  # type: ignore[return-value]
