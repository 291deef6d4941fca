"""Robots: MuJoCo tasks of this project, written with the public names of `vecenv.mujoco` alone.

Importing `vecenv.robots` registers the id `Quadruped-v0`.
"""

from vecenv.robots.quadruped import Quadruped

__all__ = ["Quadruped"]
