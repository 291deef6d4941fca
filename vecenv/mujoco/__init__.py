"""Vector envs that MuJoCo steps in C++: Gymnasium's v5 tasks, and a base class for custom tasks."""

from vecenv.mujoco.classics import InvertedDoublePendulum, InvertedPendulum, Pusher, Reacher
from vecenv.mujoco.env import MujocoVectorEnv
from vecenv.mujoco.episodes import Generators
from vecenv.mujoco.humanoids import Humanoid, HumanoidStandup
from vecenv.mujoco.locomotion import Ant, HalfCheetah, Hopper, Swimmer, Walker2d
from vecenv.mujoco.physics import Model

__all__ = [
    "TASKS",
    "Ant",
    "Generators",
    "HalfCheetah",
    "Hopper",
    "Humanoid",
    "HumanoidStandup",
    "InvertedDoublePendulum",
    "InvertedPendulum",
    "Model",
    "MujocoVectorEnv",
    "Pusher",
    "Reacher",
    "Swimmer",
    "Walker2d",
]

_CLASSES: tuple[type[MujocoVectorEnv], ...] = (
    HalfCheetah, Hopper, Walker2d, Ant, Humanoid, HumanoidStandup, Swimmer, Reacher, Pusher, InvertedPendulum,
    InvertedDoublePendulum,
)  # fmt: skip

TASKS = {f"{task.__name__}-v5": task for task in _CLASSES}
"""The vector env class of each Gymnasium id."""
