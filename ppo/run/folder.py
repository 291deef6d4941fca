"""`Run`: the folder of one training run, and the files in it."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym

from ppo.config import RESUMABLE, SETTINGS, Config, ConfigError
from ppo.run import spaces
from vecenv.spaces import leaves

if sys.platform != "win32":
    import fcntl

PACKAGES = ("vecenv-ppo", "tensorflow", "gymnasium", "numpy", "mujoco", "cloudpickle")
"""Packages whose versions `versions.json` records."""


class RunError(RuntimeError):
    """A folder is not a run, or a run cannot be used. The message says why and what to do."""


Spaces = tuple[gym.Space, gym.Space]
"""The space of one observation and the space of one action."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder.

    It holds `config.json`, `spaces.json`, `versions.json`, `metrics.jsonl`, TensorBoard events, `checkpoints/` and,
    after training, `evaluation.json`. A run started with `init_from` also has `origin.json`. All files are plain
    JSON or in TensorFlow's formats. No file is ever unpickled. The settings may name modules to import, see
    `ppo.run.modules`.

    Attributes:
        path: The folder.
        trust_modules: Whether the user allows the import of the modules that the settings name.
    """

    path: Path
    trust_modules: bool = False

    @classmethod
    def create(cls, logdir: Path | str, name: str, config: Config) -> Run:
        """Creates a new folder `logdir/TIME-NAME` that holds the config. Never reuses an existing folder.

        Raises:
            RunError: If the folder cannot be written.
        """
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{''.join(c if c.isalnum() or c in '-_.' else '-' for c in name)}"
        try:
            folder = Path(logdir).absolute()  # envs and callbacks may change the current folder
            folder.mkdir(parents=True, exist_ok=True)
            path, attempt = folder / stem, 1
            while True:
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    attempt += 1
                    path = folder / f"{stem}-{attempt}"
            run = cls(path)
            try:
                write_atomically(path / "versions.json", json.dumps(versions(), indent=2) + "\n")
                run.write_config(config)
            except OSError:
                shutil.rmtree(path, ignore_errors=True)
                raise
        except OSError as error:
            raise RunError(f"cannot write a run folder into {logdir}: {error}. Choose another --logdir.") from error
        return run

    @classmethod
    def open(cls, path: Run | Path | str, logdir: Path | str = ".", *, trust_modules: bool = False) -> Run:
        """Opens an existing run.

        Args:
            path: The run folder, its name in `logdir`, or an open `Run`.
            logdir: Folder of run folders.
            trust_modules: See `Run`. An open run that is trusted stays trusted.

        Raises:
            RunError: If there is no such run.
        """
        if isinstance(path, Run):
            return dataclasses.replace(path, trust_modules=trust_modules or path.trust_modules)
        candidates = [Path(path), Path(logdir) / path]
        for candidate in candidates:
            if (candidate / "config.json").is_file():
                return cls(candidate.absolute(), trust_modules)
        found = next((candidate for candidate in candidates if candidate.is_dir()), None)
        reason = f"{found} holds no config.json" if found else f"there is no folder {path}"
        raise RunError(f"{reason}, so it is not a run: name a run folder that `ppo train` printed")

    @contextmanager
    def locked(self, warn: Callable[[str], None] = warnings.warn) -> Iterator[None]:
        """Prevents other processes from training this run at the same time, if the file system has locks.

        Args:
            warn: Called with a message if the file system has no locks.

        Raises:
            RunError: If another process is training it, or the folder cannot be written.
        """
        try:
            file = open(self.path / "lock", "a")  # noqa: SIM115  closed below
        except OSError as error:
            raise RunError(f"cannot write into {self.path}: {error}. Resume a writable copy of it.") from error
        with file:
            try:
                if sys.platform != "win32":
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Local file systems and NFS return EWOULDBLOCK; some CIFS clients return EACCES.
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    message = f"{self.path} is being trained by another process: wait for it, or stop it"
                    raise RunError(message) from error
                warn(
                    f"the file system of {self.path} cannot lock files ({error}), so nothing prevents another process "
                    "from training this run at the same time"
                )
            yield

    def discard_if_empty(self) -> None:
        """Removes the folder if it holds neither a checkpoint nor a report."""
        if not self.checkpoints.exists() and not (self.metrics.exists() and self.metrics.stat().st_size):
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """File with one line of JSON per report."""
        return self.path / "metrics.jsonl"

    def check_exists(self) -> None:
        """Raises RunError if the folder was deleted or moved. Call this before a write that would recreate it."""
        if not (self.path / "config.json").is_file():
            raise RunError(
                f"the run folder {self.path} is gone: it was deleted or moved during training. "
                "Everything since the last checkpoint is lost. If the folder was moved, resume it from its new "
                "location; otherwise start a new run."
            )

    def check_begun(self) -> None:
        """Raises RunError if the run ended before its first checkpoint."""
        # The first evaluation may precede the first periodic checkpoint.
        found = any(path.name.startswith(("step_", "best")) for path in self.checkpoints.glob("*"))
        if not found or not (self.path / "spaces.json").exists():
            raise RunError(
                f"{self.path} holds no checkpoint, because the run ended before its first checkpoint: there is nothing "
                "to load. Start a new run."
            )

    def write_config(self, config: Config) -> None:
        """Writes the settings."""
        write_atomically(self.path / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")

    def check_resumable(self, config: Config) -> None:
        """Checks that the run can be resumed with a config.

        Raises:
            ConfigError: If the config changes a setting that a resumed run must keep. The message names it.
            RunError: If the run's config cannot be read, there is no checkpoint, or writing could leave the folder.
        """
        self._check_files()
        before = self.read_config()
        changed = [name for name in SETTINGS if getattr(before, name) != getattr(config, name)]
        if fixed := [name for name in changed if name not in RESUMABLE]:
            raise ConfigError(
                f"a resumed run keeps its settings, but {', '.join(fixed)} would change. "
                f"These may change: {', '.join(RESUMABLE)}. To change another setting, start a new run."
            )
        self.check_begun()

    def _check_files(self) -> None:
        """Raises RunError if the folder holds anything but files and folders, because a write must not leave it.

        The folder may come from a stranger. The folder itself may be a link, because the user named it.
        """
        root = self.path.resolve()
        paths = [Path(folder, name) for folder, folders, files in os.walk(root) for name in (*folders, *files)]
        kinds = [(path, stat.S_IFMT(path.lstat().st_mode)) for path in paths]
        if bad := sorted(
            str(path.relative_to(root)) for path, kind in kinds if kind not in (stat.S_IFREG, stat.S_IFDIR)
        ):
            raise RunError(
                f"{self.path} cannot be resumed, because training writes into it and it holds links or devices: "
                f"{', '.join(bad)}. If you trust the run, replace each link with what it points to."
            )

    def write_evaluation(self, values: dict[str, Any]) -> None:
        """Writes the score of the final policy."""
        self.check_exists()
        write_atomically(self.path / "evaluation.json", json.dumps(values) + "\n")

    def stopped_at(self, env_steps: int) -> str | None:
        """Returns why a callback stopped the run after so many env-steps, or None if none did."""
        try:
            values = json.loads((self.path / "evaluation.json").read_text())
            return values["stopped"] if values["env_steps"] == env_steps else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def write_spaces(self, teams: Mapping[str, Spaces], *, given: bool) -> None:
        """Writes the spaces, so that the policies can be used without the env.

        Args:
            teams: The spaces of one observation and of one action, for each team. The team of an env with one agent is
                "".
            given: Whether the envs were passed to `ppo.train` instead of being made from `config.env`.
        """
        of_teams = {
            name: {"observation": spaces.to_json(observed), "action": spaces.to_json(acted)}
            for name, (observed, acted) in teams.items()
        }
        values = of_teams.get("", {"teams": of_teams})
        write_atomically(self.path / "spaces.json", json.dumps({**values, "envs_given": given}) + "\n")

    def check_spaces(self, teams: Mapping[str, Spaces]) -> None:
        """Raises ConfigError if envs have other spaces or teams than those that the run was trained on.

        Raises:
            RunError: If `spaces.json` cannot be read.
        """
        before = self.read_spaces()
        if before.keys() != teams.keys():
            raise ConfigError(
                f"{self.path} was trained with the groups of agents {list(before)}, but these envs have {list(teams)}"
            )
        for name, now in teams.items():
            for trained, other in zip(before[name], now, strict=True):
                # MultiBinary(3) and MultiBinary([3]) are not equal, but their JSON is.
                if trained != other and spaces.to_json(trained) != spaces.to_json(other):
                    raise ConfigError(
                        f"{self.path} was trained on envs with the space {trained}, but these envs have {other}"
                    )
                # Spaces whose keys differ only in their order are equal, but the weights follow the order.
                orders = [[path for path, _ in leaves(space)] for space in (trained, other)]
                if orders[0] != orders[1]:
                    raise ConfigError(
                        f"{self.path} was trained on envs whose space has the keys {orders[0]}, but these envs have "
                        f"them in the order {orders[1]}: use the order from training"
                    )

    def check_given(self, given: bool) -> None:
        """Raises ConfigError if the run was trained on envs passed to `ppo.train`, and none are passed now."""
        if not given and self._read_spaces()[1]:
            raise ConfigError(f"{self.path} was trained on envs passed to ppo.train(config, envs): pass them again")

    def env_name(self) -> str:
        """Returns the id of the env, or, for envs passed to `ppo.train`, the name of the run folder without its time.

        Raises:
            RunError: If the run's files cannot be read.
        """
        if (self.path / "spaces.json").exists() and self._read_spaces()[1]:
            return f"given envs, {self.path.resolve().name.split('-', 2)[-1]}"
        return self.read_config().env

    def team(self, name: str | None = None) -> str:
        """Returns the name of the only team, or checks the name of one of several.

        Raises:
            RunError: If `spaces.json` cannot be read, there is no such team, or there are several and `name` is None.
        """
        teams = list(self.read_spaces())
        if name is None and len(teams) == 1:
            return teams[0]
        if name not in teams:
            raise RunError(f"{self.path} has the policies {teams}: choose one of them with group=... or --group")
        return name

    def read_spaces(self) -> dict[str, Spaces]:
        """Returns the spaces of one observation and of one action of each team; of "" if the env has one agent.

        Raises:
            RunError: If the file is missing or damaged.
        """
        return self._read_spaces()[0]

    def _read_spaces(self) -> tuple[dict[str, Spaces], bool]:
        """Returns the spaces of each team, and whether the envs were passed to `ppo.train`."""
        file = self.path / "spaces.json"
        try:
            values = json.loads(file.read_text())
            teams = {
                name: (spaces.from_json(one["observation"]), spaces.from_json(one["action"]))
                for name, one in values.get("teams", {"": values}).items()
            }
            return teams, values["envs_given"]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(
                f"{file} cannot be read ({type(error).__name__}: {error}). Restore a backup, or start a new run."
            ) from error

    def read_config(self) -> Config:
        """Returns the settings. To import the modules that they name, use `ppo.run.modules.config_to_load`.

        Raises:
            RunError: If the file is damaged or from another version. The message says which version wrote it.
        """
        file = self.path / "config.json"
        try:
            return Config.from_json(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
            try:
                version = json.loads((self.path / "versions.json").read_text())[PACKAGES[0]]
            except (OSError, ValueError, TypeError, LookupError):
                version = "of an unknown version"
            raise RunError(
                f"{file} cannot be read: {error}. {PACKAGES[0]} {version} wrote it, and this is {PACKAGES[0]} "
                f"{versions()[PACKAGES[0]]}."
            ) from error


@contextmanager
def part_of(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder inside `folder`, from which complete files can be moved to `folder`.

    Creates `folder` if it does not exist, and removes it if it is still empty at the end.

    Raises:
        OSError: If a folder cannot be created.
    """
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
            yield Path(part)
    finally:
        if created:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def is_pattern(path: Path) -> bool:
    """Returns whether TensorFlow cannot read from a path, because it takes brackets and backslashes for a pattern.

    It can write there. `*`, `?` and all other characters are harmless, because such a pattern matches its own text.
    """
    return any(character in str(path) for character in ("[", "\\" if os.sep == "/" else "["))


@contextmanager
def readable(folder: Path) -> Iterator[Path]:
    """Yields a path from which TensorFlow can read a folder: the folder itself, or a temporary link to it."""
    if not is_pattern(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        link = Path(temporary) / "link"
        link.symlink_to(folder.absolute(), target_is_directory=True)
        yield link


def write_atomically(file: Path, text: str) -> None:
    """Writes a file atomically: it always holds either the complete old or the complete new content.

    Replaces a link instead of following it.
    """
    part = file.with_name(f".part-{secrets.token_hex(8)}")  # nobody can have put a link there
    try:
        with part.open("x") as stream:
            stream.write(text)
            stream.flush()
            sync(stream.fileno())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def sync(descriptor: int) -> None:
    """Waits until a file or a folder is on disk, if its file system can do so."""
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network and shared file systems cannot sync, most often folders
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def versions() -> dict[str, str]:
    """Returns the versions of Python, the platform and the main packages."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
