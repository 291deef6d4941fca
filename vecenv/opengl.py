"""The OpenGL backends that MuJoCo can use without a display, and a test of whether they work on this machine."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys

HEADLESS = {"egl": "EGL", "osmesa": "OSMesa"}
"""Values of MUJOCO_GL that need no display, and the system library that each one needs."""

ADVICE = (
    "Install a backend that needs no display (`apt-get install libegl1` or `libosmesa6`), or select an installed one "
    "with the environment variable MUJOCO_GL=egl, osmesa or glfw."
)

TRIAL_S = 60  # a backend that takes longer counts as hung

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
    """Returns the values of MUJOCO_GL that may work on this machine. None stands for Gymnasium's own choice."""
    if os.environ.get("MUJOCO_GL"):
        return [os.environ["MUJOCO_GL"]]
    if not sys.platform.startswith("linux") or os.environ.get("DISPLAY"):
        return [None]
    # Gymnasium would choose glfw, which imports without a display but fails to render.
    return [backend for backend, library in HEADLESS.items() if ctypes.util.find_library(library)]


def why_not(backend: str) -> str | None:
    """Returns why a backend cannot render on this machine, or None if it can.

    A separate process renders an empty scene, because a broken driver may crash.
    """
    environment = {**os.environ, "MUJOCO_GL": backend}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL], env=environment, capture_output=True, text=True, timeout=TRIAL_S
        )
    except subprocess.TimeoutExpired:
        return f"rendering took more than {TRIAL_S} s"
    if done.returncode == 0:
        return None
    library = HEADLESS.get(backend)
    if library is not None and ctypes.util.find_library(library) is None:
        return f"lib{library} is not installed"  # PyOpenGL's own error does not say so
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
