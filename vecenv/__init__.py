"""vecenv: a shared-memory vectorized environment engine, and a drop-in Gymnasium vector env.

Letters in the shapes of docstrings: N envs, W workers, T steps of a rollout, S slots of memory,
B samples of a minibatch. Time comes first: `float32[T, N]`.
"""

from vecenv import state
from vecenv.async_vector_env import AsyncVectorEnv
from vecenv.errors import (
    EnvError,
    MessageTooLarge,
    NotRestorable,
    SharedMemoryFull,
    StateError,
    UnsupportedSpace,
    VecEnvError,
    WorkerDied,
)
from vecenv.make import make, warm_up
from vecenv.memory.block import available_memory
from vecenv.partial import PartialBatch
from vecenv.registration import register_envs
from vecenv.rows.batched import Batched
from vecenv.sync_vector_env import SyncVectorEnv
from vecenv.workers.processes import available_cores

__all__ = [
    "AsyncVectorEnv",
    "Batched",
    "EnvError",
    "MessageTooLarge",
    "NotRestorable",
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
    "make",
    "register_envs",
    "state",
    "warm_up",
]

__version__ = "0.2.0"

register_envs()  # the one thing that the import does: see registration.py
