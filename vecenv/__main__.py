"""`python -m vecenv` prints the facts about the machine that a bug report needs."""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.metadata
import multiprocessing
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Sequence

from vecenv import opengl
from vecenv.resources import available_cores
from vecenv.version import VERSION

PACKAGES = ("gymnasium", "numpy", "cloudpickle", "mujoco", "tensorflow", "tyro", "rich", "tensorboard",
            "imageio-ffmpeg", "matplotlib", "scipy", "optuna", "stable-baselines3", "dm-env")  # fmt: skip


def report() -> dict[str, str]:
    """Returns versions, cores, start methods, free shared memory and working OpenGL backends, by name.

    This takes seconds, because a separate process tests each OpenGL backend.
    """
    return {
        "python": f"{platform.python_version()}, {sys.implementation.name}"
        + (", free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""),
        "platform": platform.platform(),
        "vecenv-ppo": VERSION,
        **{package: _version(package) for package in PACKAGES},
        "cores": f"{os.cpu_count()}, of which this process may use {available_cores()}",
        "start methods": ", ".join(multiprocessing.get_all_start_methods()),
        "shared memory": _shared_memory(),
        **{f"OpenGL, {name}": _opengl(name, library) for name, library in opengl.HEADLESS.items()},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report, one name and value per line."""
    argparse.ArgumentParser(prog="python -m vecenv", description="Print the facts a bug report needs.").parse_args(argv)
    found = report()
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()), flush=True)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _shared_memory() -> str:
    if not os.path.isdir("/dev/shm"):
        return "there is no /dev/shm"
    usage = shutil.disk_usage("/dev/shm")
    return f"{usage.free / 2**20:,.0f} of {usage.total / 2**20:,.0f} MiB free in /dev/shm"


def _opengl(name: str, library: str) -> str:
    if ctypes.util.find_library(library) is None:
        return f"lib{library} is not installed"
    if _version("mujoco") == "not installed":
        return f"lib{library} is installed, but cannot be tested without mujoco"
    reason = opengl.why_not(name)
    return "works" if reason is None else f"does not work: {reason}"


if __name__ == "__main__":
    main()
