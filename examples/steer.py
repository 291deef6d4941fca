"""Steers a trained quadruped with the keyboard in MuJoCo's viewer. Without a display, writes a GIF.

Run it:  python -m examples.steer runs/NAME    (on macOS: mjpython -m examples.steer runs/NAME)
"""

import argparse
import os
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from vecenv.robots.quadruped import MAX_COMMAND, Quadruped

KEYS = {265: (0, 0.25), 264: (0, -0.25), 263: (2, 0.25), 262: (2, -0.25), 44: (1, 0.25), 46: (1, -0.25)}
"""The part of the command that a key of GLFW changes, and by how much: the arrows, comma and period."""


def steer(policy, **kwargs):
    """Shows the policy in MuJoCo's viewer. The arrows change the forward velocity and the yaw rate, `,` and `.` change
    the velocity to the left, and any other key stops the robot."""
    import mujoco.viewer

    envs, wanted = Quadruped(1, **{**kwargs, "randomized": False}), np.zeros(3)

    def press(key):
        part, change = KEYS.get(key, (slice(None), -wanted))
        wanted[part] = np.clip(wanted + change, -MAX_COMMAND, MAX_COMMAND)[part]
        print("forward {:+.2f} m/s, left {:+.2f} m/s, yaw {:+.2f} rad/s".format(*wanted))

    observations, _ = envs.reset(seed=0)
    data = envs.physics.batch.get_data(0)
    with mujoco.viewer.launch_passive(envs.model, data, key_callback=press) as viewer:
        viewer.cam.type, viewer.cam.trackbodyid = mujoco.mjtCamera.mjCAMERA_TRACKING, 1  # follows the trunk
        while viewer.is_running():
            start = time.monotonic()
            envs.commands[:] = wanted
            observations, *_ = envs.step(policy(observations))
            envs.physics.batch.get_data(0, data)
            viewer.sync()
            time.sleep(max(0.0, envs.dt - (time.monotonic() - start)))


def film(policy, file, seconds=10.0, **kwargs):
    """Writes a GIF of the policy following random commands."""
    from PIL import Image

    envs = Quadruped(1, **{**kwargs, "randomized": False}, render_mode="rgb_array", width=320, height=240)
    observations, _ = envs.reset(seed=0)
    frames = []
    for step in range(round(seconds / envs.dt)):
        observations, *_ = envs.step(policy(observations))
        if step % 2 == 0:
            frames.append(Image.fromarray(envs.render()[0]))
    envs.close()
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=40, loop=0)
    print(f"wrote {file}, because no display was found")


def has_display():
    """Returns whether a window can be opened: DISPLAY may name a display that does not exist."""
    import glfw

    with warnings.catch_warnings(action="ignore"):
        return sys.platform == "darwin" or bool(glfw.init())


def load(run):
    import ppo

    load.policy = ppo.load_policy(run)


def act(observations):
    return load.policy(observations)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="Run folder whose policy to show.")
    parser.add_argument("--gif", default="quadruped.gif", help="File to write where no display exists.")
    parser.add_argument("--seconds", type=float, default=10.0, help="Length of the GIF.")
    arguments = parser.parse_args()
    import ppo

    kwargs = ppo.Run.open(arguments.run).read_config().env_kwargs
    # Mesa's OpenGL may crash in a process that has loaded TensorFlow, so the policy has a process of its own.
    with ProcessPoolExecutor(1, get_context("spawn"), load, (arguments.run,)) as process:

        def policy(observations):
            return process.submit(act, observations).result()

        if has_display():
            steer(policy, **kwargs)
        else:
            os.environ.pop("DISPLAY", None)  # otherwise, MuJoCo would render with it
            film(policy, arguments.gif, arguments.seconds, **kwargs)


if __name__ == "__main__":
    main()
