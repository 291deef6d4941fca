"""The versions of the packages on which the results of a run depend."""

from __future__ import annotations

import importlib.metadata
import platform

import vecenv

PACKAGES = ("vecenv-ppo", "tensorflow", "gymnasium", "numpy", "mujoco", "cloudpickle")


def versions() -> dict[str, str]:
    """Returns the versions of Python, the platform and the main packages. That of vecenv-ppo includes its commit."""
    versions = {"python": platform.python_version(), "platform": platform.platform(), PACKAGES[0]: vecenv.__version__}
    for package in PACKAGES[1:]:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
