"""The version of this copy of the packages, which names its commit unless it is a release.

- "0.3.0": the release, that is, the commit with the tag v0.3.0.
- "0.3.0+g1a2b3c4d5e": commit 1a2b3c4d5e. Files that git tracks have changed since if ".dirty" follows.
- "0.3.0+unknown": a copy whose commit is not known, such as a clone on a machine without git.

In a clone, editable installs included, this module asks git. A wheel or an sdist keeps the version that it was built
with. setup.cfg reads VERSION from this file alone, so it imports only the standard library.
"""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import Distribution
from pathlib import Path

RELEASE = "0.3.0"
"""The newest release, as in CHANGELOG.md, or the one that is being prepared."""


def version_of(root: Path) -> str:
    """Returns the version of the copy in `root`, the folder that contains the packages."""
    if (root / ".git").exists():  # in `root` itself: site-packages may be inside another project's clone
        return _of_clone(root)
    for built in Distribution.discover(name="vecenv-ppo", path=[str(root)]):
        if built.version.partition("+")[0] == RELEASE:
            return built.version
    return f"{RELEASE}+unknown"


def _of_clone(root: Path) -> str:
    words = ["git", "describe", "--tags", f"--match=v{RELEASE}", "--long", "--always", "--abbrev=10", "--dirty"]
    # A git hook sets variables that name another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"  # writes nothing
    try:
        done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return f"{RELEASE}+unknown"
    described = done.stdout.strip()  # "v0.3.0-STEPS-gCOMMIT" or, without this tag, "COMMIT"
    commit = described.removesuffix("-dirty")
    dirty = ".dirty" if commit != described else ""
    if commit.startswith(f"v{RELEASE}-0-") and not dirty:
        return RELEASE
    return f"{RELEASE}+g{commit.rpartition('-')[2].removeprefix('g')}{dirty}"


VERSION = version_of(Path(__file__).resolve().parents[1])
