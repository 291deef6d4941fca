"""mujoco: vector envs whose simulations are stepped in C++ by MuJoCo's own batch, and Gymnasium's v5 tasks as such."""

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

TASKS: dict[str, tuple[type[MujocoVectorEnv], int]] = {
    "HalfCheetah-v5": (HalfCheetah, 1000),
    "Hopper-v5": (Hopper, 1000),
    "Walker2d-v5": (Walker2d, 1000),
    "Ant-v5": (Ant, 1000),
    "Humanoid-v5": (Humanoid, 1000),
    "HumanoidStandup-v5": (HumanoidStandup, 1000),
    "Swimmer-v5": (Swimmer, 1000),
    "Reacher-v5": (Reacher, 50),
    "Pusher-v5": (Pusher, 100),
    "InvertedPendulum-v5": (InvertedPendulum, 1000),
    "InvertedDoublePendulum-v5": (InvertedDoublePendulum, 1000),
}
"""Gymnasium's ids, each with its class and the steps after which an episode is truncated."""
