"""Vector envs that MuJoCo steps in C++: Gymnasium's v5 tasks, and a base class for custom tasks."""

from vecenv.mujoco.classics import InvertedDoublePendulum, InvertedPendulum, Pusher, Reacher
from vecenv.mujoco.env import MujocoVectorEnv
from vecenv.mujoco.humanoids import Humanoid, HumanoidStandup
from vecenv.mujoco.locomotion import Ant, HalfCheetah, Hopper, Swimmer, Walker2d

__all__ = [
    "TASKS",
    "Ant",
    "HalfCheetah",
    "Hopper",
    "Humanoid",
    "HumanoidStandup",
    "InvertedDoublePendulum",
    "InvertedPendulum",
    "MujocoVectorEnv",
    "Pusher",
    "Reacher",
    "Swimmer",
    "Walker2d",
]

TASKS: dict[str, type[MujocoVectorEnv]] = {
    "HalfCheetah-v5": HalfCheetah,
    "Hopper-v5": Hopper,
    "Walker2d-v5": Walker2d,
    "Ant-v5": Ant,
    "Humanoid-v5": Humanoid,
    "HumanoidStandup-v5": HumanoidStandup,
    "Swimmer-v5": Swimmer,
    "Reacher-v5": Reacher,
    "Pusher-v5": Pusher,
    "InvertedPendulum-v5": InvertedPendulum,
    "InvertedDoublePendulum-v5": InvertedDoublePendulum,
}
"""The vector env class of each Gymnasium id."""
