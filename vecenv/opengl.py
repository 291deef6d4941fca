"""Which OpenGL MuJoCo draws with where there is no display, and whether it works here."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys

HEADLESS = {"egl": "EGL", "osmesa": "OSMesa"}
"""Values of MUJOCO_GL that need no display, and the system's library that each needs."""

ADVICE = (
    "Install one that needs no display, `apt-get install libegl1` or `libosmesa6`, or choose one that is there by the "
    "environment variable MUJOCO_GL=egl, osmesa or glfw."
)

TRIAL_S = 60  # after which a driver counts as hung

_TRIAL = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco/>")
data = mujoco.MjData(model)
with mujoco.Renderer(model, 32, 32) as renderer:
    mujoco.mj_forward(model, data)
    renderer.update_scene(data)
    renderer.render()
"""


def backends() -> list[str | None]:
    """Returns the values of MUJOCO_GL that are worth a try; None for what Gymnasium takes by itself."""
    if os.environ.get("MUJOCO_GL"):
        return [os.environ["MUJOCO_GL"]]
    if not sys.platform.startswith("linux") or os.environ.get("DISPLAY"):
        return [None]
    # Without a display Gymnasium's first choice, glfw, can be imported all the same, and fails later.
    return [backend for backend, library in HEADLESS.items() if ctypes.util.find_library(library)]


def why_not(backend: str) -> str | None:
    """Draws an empty world, in a process of its own that may crash; returns why not, None if it could."""
    environment = {**os.environ, "MUJOCO_GL": backend}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL], env=environment, capture_output=True, text=True, timeout=TRIAL_S
        )
    except subprocess.TimeoutExpired:
        return f"it has not drawn after {TRIAL_S} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
