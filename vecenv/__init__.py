"""A shared-memory vectorized environment engine and drop-in Gymnasium vector env.

Shapes in docstrings use these letters: N envs, W workers, T rollout steps, S memory slots, and B minibatch samples.
Time comes first: `float32[T, N]`.
"""

import os
from typing import TYPE_CHECKING

if os.name != "posix":  # before the imports that need POSIX
    raise ImportError(
        "vecenv runs on Linux and macOS, but not on Windows itself: use the Windows Subsystem for Linux (WSL), see "
        "https://learn.microsoft.com/windows/wsl/install"
    )

from vecenv import state
from vecenv.errors import (
    EnvError,
    MessageTooLarge,
    NotRestorable,
    NotRestorableNow,
    SharedMemoryFull,
    StateError,
    UnsupportedSpace,
    VecEnvError,
    WorkerDied,
)
from vecenv.ids.named_wrapper import NamedWrapper
from vecenv.make import make, make_single, register_envs, warm_up
from vecenv.resources import available_cores, available_memory
from vecenv.rows.batched import Batched
from vecenv.vector.async_vector_env import AsyncVectorEnv
from vecenv.vector.results import PartialBatch
from vecenv.vector.sync_vector_env import SyncVectorEnv
from vecenv.workers.pickling import dumps as pickle_for_workers
from vecenv.workers.processes import foreign_specs

__all__ = [
    "AsyncVectorEnv",
    "Batched",
    "EnvError",
    "MessageTooLarge",
    "NamedWrapper",
    "NotRestorable",
    "NotRestorableNow",
    "PartialBatch",
    "SharedMemoryFull",
    "StateError",
    "SyncVectorEnv",
    "UnsupportedSpace",
    "VecEnvError",
    "WorkerDied",
    "__version__",
    "available_cores",
    "available_memory",
    "foreign_specs",
    "make",
    "make_single",
    "pickle_for_workers",
    "register_envs",
    "state",
    "warm_up",
]

register_envs()  # the only effect of the import on Gymnasium

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Returns `__version__` on first use, because it asks git in a clone."""
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from vecenv.version import VERSION

        globals()[name] = VERSION
        return VERSION
