"""`python -m vecenv` prints the facts that a bug report needs; `python -m vecenv measure ENV` measures an env."""

from __future__ import annotations

import argparse
import ctypes.util
import importlib.metadata
import inspect
import multiprocessing
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Sequence

from gymnasium.error import Error as GymnasiumError

from vecenv import opengl
from vecenv.ids.named_wrapper import NamedWrapper
from vecenv.ids.specs import load_spec
from vecenv.kwargs import from_words
from vecenv.resources import available_cores
from vecenv.version import VERSION

PACKAGES = ("gymnasium", "numpy", "cloudpickle", "mujoco", "tensorflow", "tyro", "rich", "tensorboard",
            "imageio-ffmpeg", "matplotlib", "scipy", "ray", "optuna", "stable-baselines3", "pettingzoo", "dm-env",
            "ale-py", "opencv-python-headless", "onnx", "wandb", "mlflow")  # fmt: skip


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
    """Prints the report, one name and value per line, or what `measure` finds."""
    parser = argparse.ArgumentParser(
        prog="python -m vecenv", description="Print the facts a bug report needs.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="{measure}")
    words = commands.add_parser(
        "measure",
        usage="%(prog)s ENV [options]",
        allow_abbrev=False,
        help="show whether vecenv speeds up an env",
        description="Step an env with random actions: alone, in Gymnasium's SyncVectorEnv and in vecenv's vector envs.",
    )
    # Not a positional argument, which options that take several words would swallow without a helpful error.
    words.add_argument("--env", help='an id, or "module:name" of a class or function; `--env` may be omitted')
    words.add_argument("--num-envs", type=int, default=16, help="envs in each vector env (default: 16)")
    words.add_argument("--num-workers", type=int, nargs="+", help="default: 0, 2, 4, ... and the number of cores")
    words.add_argument("--seconds", type=float, default=20.0, help="longer if the env is slow (default: 20)")
    words.add_argument("--wrappers", nargs="+", default=[], help="as for `ppo train`")
    words.add_argument("--env-kwargs", nargs="+", default=[], help="KEY=VALUE pairs or a JSON object")
    chosen, rest = parser.parse_known_args(argv)
    names = [word for word in rest if not word.startswith("-")]
    if chosen.command == "measure" and chosen.env is None:
        if not names:
            words.error("ENV is missing: write it before options that take several words, or as `--env ENV`")
        chosen.env = names[0]
        rest.remove(chosen.env)
    if rest:
        (words if chosen.command else parser).error(f"unrecognized arguments: {' '.join(rest)}")
    if chosen.command == "measure":
        from vecenv.measure import check_numbers, measure

        try:
            check_numbers(chosen.num_envs, chosen.num_workers, chosen.seconds)
            load_spec(chosen.env)
            chosen.env_kwargs = from_words(chosen.env_kwargs)
            own = inspect.signature(measure).parameters.keys() - {"env_kwargs"}
            if taken := sorted(own & chosen.env_kwargs.keys()):
                words.error(
                    f"--env-kwargs sets {', '.join(taken)}, which the env would not receive: use the command's own "
                    "options, or name a function that makes the env"
                )
            for text in chosen.wrappers:
                NamedWrapper(text).load()
        except (GymnasiumError, ValueError) as error:
            words.error(str(error))
        _measure(chosen)
        return
    found = report()
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()), flush=True)


def _measure(chosen: argparse.Namespace) -> None:
    from vecenv.measure import measure

    print(f"{chosen.env}, {chosen.num_envs} envs, {available_cores()} cores", flush=True)
    measured = measure(
        chosen.env,
        num_envs=chosen.num_envs,
        num_workers=chosen.num_workers,
        seconds=chosen.seconds,
        wrappers=chosen.wrappers,
        **chosen.env_kwargs,
    )
    print(measured, flush=True)
    if measured.errors:
        sys.exit(1)


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
