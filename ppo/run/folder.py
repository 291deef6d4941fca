"""Run: the folder of one training run, and all that is read from it or written to it by name."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym

from ppo.config import Config, ConfigError
from ppo.run import spaces
from ppo.run.modules import file_inside, module_of

if sys.platform != "win32":
    import fcntl

CHANGEABLE = ("total_steps", "num_workers", "backend", "report_interval", "checkpoint_interval", "eval_interval",
              "eval_episodes", "step_timeout_s", "video_interval", "histograms", "halves")  # fmt: skip
"""Settings that may differ when a run is resumed."""

PACKAGES = ("vecenv-ppo", "tensorflow", "gymnasium", "numpy", "mujoco", "cloudpickle")


IMPORTED = ("env", "network")
"""Settings that name modules to import."""


class RunError(RuntimeError):
    """A folder that is no run, or a run that cannot be used; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder.

    It holds `config.json`, `spaces.json`, `versions.json`, `metrics.jsonl`, TensorBoard events, `checkpoints/`, and at
    the end `evaluation.json`.
    All of it is plain JSON or TensorFlow's own format; nothing in it is ever unpickled. Its settings may name modules
    to import, which `read_config` refuses unless the user agrees.

    Attributes:
        path: The folder.
        trust_modules: Whether the user allows the import of every module that the settings name.
        env: The run's env, if the user named it again, which allows the import of its module.
        network: The same for the run's network.
    """

    path: Path
    trust_modules: bool = False
    env: str | None = None
    network: str | None = None

    @classmethod
    def create(cls, logdir: Path | str, name: str, config: Config) -> Run:
        """Makes a new folder `logdir/TIME-NAME`, never one that exists, and writes the config into it.

        Raises:
            RunError: If the folder cannot be written.
        """
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{''.join(c if c.isalnum() or c in '-_.' else '-' for c in name)}"
        try:
            Path(logdir).mkdir(parents=True, exist_ok=True)
            path, attempt = Path(logdir) / stem, 1
            while True:
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    attempt += 1
                    path = Path(logdir) / f"{stem}-{attempt}"
            run = cls(path)
            try:
                write_atomically(path / "versions.json", json.dumps(_versions(), indent=2) + "\n")
                run.write_config(config)
            except OSError:
                shutil.rmtree(path, ignore_errors=True)
                raise
        except OSError as error:
            raise RunError(f"cannot write a run folder into {logdir}: {error}. Choose another --logdir.") from error
        return run

    @classmethod
    def open(
        cls,
        path: Path | str,
        logdir: Path | str = ".",
        *,
        trust_modules: bool = False,
        env: str | None = None,
        network: str | None = None,
    ) -> Run:
        """Opens an existing run, given by its path or by its name in `logdir`.

        Args:
            path: The run folder.
            logdir: Another folder to look for the run in.
            trust_modules: As for `Run`, like `env` and `network`.

        Raises:
            RunError: If there is none.
        """
        candidates = [Path(path), Path(logdir) / path]
        for candidate in candidates:
            if (candidate / "config.json").is_file():
                return cls(candidate, trust_modules, env, network)
        found = next((candidate for candidate in candidates if candidate.is_dir()), None)
        reason = f"{found} holds no config.json" if found else f"there is no folder {path}"
        raise RunError(f"{reason}, so it is not a run: name a folder that `python -m ppo.train` has made")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training this run at the same time.

        Raises:
            RunError: If one does.
        """
        try:
            file = (self.path / "lock").open("a")
        except OSError as error:
            raise RunError(
                f"cannot write into {self.path}: {error}. Resume a copy of it that can be written."
            ) from error
        with file:
            try:
                if sys.platform != "win32":
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunError(f"{self.path} is being trained by another process: wait for it, or stop it") from error
            yield

    def discard_if_empty(self) -> None:
        """Removes the folder of a run that ended before it had anything to keep."""
        if not self.checkpoints.exists() and not (self.metrics.exists() and self.metrics.stat().st_size):
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """File with one line of JSON for each report."""
        return self.path / "metrics.jsonl"

    def check_exists(self) -> None:
        """Raises RunError if the folder was deleted or moved; called before a write that would recreate part of it."""
        if not (self.path / "config.json").is_file():
            raise RunError(
                f"the run folder {self.path} is gone: it was deleted or moved during training. What was "
                "learned since the last checkpoint is lost, and so are the checkpoints if they were deleted. "
                "Start a new run, or resume the folder from where it is now."
            )

    def check_begun(self) -> None:
        """Raises RunError if the run ended before its first checkpoint."""
        if not (self.path / "spaces.json").exists() or not any(self.checkpoints.glob("step_*")):
            raise RunError(
                f"{self.path} holds no checkpoint, because the run ended before its first checkpoint: there is nothing "
                "to resume. Start a new run."
            )

    def write_config(self, config: Config) -> None:
        """Writes the settings."""
        write_atomically(self.path / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")

    def check_resumable(self, config: Config) -> None:
        """Checks that the run can go on with this config.

        Raises:
            ConfigError: If it cannot; the message names the settings.
            RunError: If the run's own config cannot be read, or there is no checkpoint to go on from.
        """
        before = self.read_config(imports=())
        changed = [f.name for f in dataclasses.fields(Config) if getattr(before, f.name) != getattr(config, f.name)]
        if fixed := [name for name in changed if name not in CHANGEABLE]:
            raise ConfigError(
                f"a resumed run keeps its settings, but {', '.join(fixed)} differ. "
                f"These may change: {', '.join(CHANGEABLE)}. For anything else, start a new run."
            )
        self.check_begun()

    def write_evaluation(self, values: dict[str, Any]) -> None:
        """Writes the score of the final policy."""
        self.check_exists()
        write_atomically(self.path / "evaluation.json", json.dumps(values) + "\n")

    def write_spaces(self, observation_space: gym.Space, action_space: gym.Space, *, given: bool) -> None:
        """Writes what the policy maps to what, so that it can be used where the env is not installed.

        Args:
            observation_space: Of one observation.
            action_space: Of one action.
            given: Whether the envs were given to `ppo.train`, and are not those of `config.env`.
        """
        values = {"observation": spaces.to_json(observation_space), "action": spaces.to_json(action_space)}
        write_atomically(self.path / "spaces.json", json.dumps({**values, "envs_given": given}) + "\n")

    def check_spaces(self, observation_space: gym.Space, action_space: gym.Space, *, given: bool) -> None:
        """Checks that envs are of the kind that the run was trained on; arguments as for `write_spaces`.

        Raises:
            ConfigError: If they are not.
            RunError: If `spaces.json` cannot be read.
        """
        self.check_given(given)
        for mine, other in zip(self.read_spaces(), (observation_space, action_space), strict=True):
            if mine != other:
                raise ConfigError(f"{self.path} was trained on envs with the space {mine}, but these have {other}")

    def check_given(self, given: bool) -> None:
        """Raises ConfigError if the run needs envs that are not given, and its `config.env` is not what it saw."""
        if not given and self._read_spaces_file()["envs_given"]:
            raise ConfigError(
                f"{self.path} was trained on envs that were given to ppo.train(config, envs): give them again"
            )

    def env_name(self) -> str:
        """Returns the id of the env, or, of a run on envs that were given, what its folder is called after the time.

        Raises:
            RunError: If the run's files cannot be read.
        """
        if (self.path / "spaces.json").exists() and self._read_spaces_file()["envs_given"]:
            return f"given envs, {self.path.resolve().name.split('-', 2)[-1]}"
        return self.read_config(imports=()).env

    def read_spaces(self) -> tuple[gym.Space, gym.Space]:
        """Reads the spaces of one observation and of one action.

        Raises:
            RunError: If the file is missing or damaged.
        """
        values = self._read_spaces_file()
        return values["observation"], values["action"]

    def _read_spaces_file(self) -> dict[str, Any]:
        file = self.path / "spaces.json"
        try:
            values = json.loads(file.read_text())
            found = {name: spaces.from_json(values[name]) for name in ("observation", "action")}
            return {**found, "envs_given": values["envs_given"]}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RunError(f"{file} cannot be read: {type(error).__name__}: {error}") from error

    def read_config(self, *, imports: Sequence[str] = IMPORTED) -> Config:
        """Reads the settings; every reader of them goes through here, so forbidden imports are refused in one place.

        Args:
            imports: Which of `IMPORTED` the caller will import; empty if it only shows or compares settings.

        Raises:
            RunError: If the file is damaged or from another version; if a module that will be imported lies in the run
                folder or the log folder; or if the user has not agreed to import it.
        """
        file = self.path / "config.json"
        try:
            config = Config.from_json(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
            raise RunError(f"{file} cannot be read: {error}") from error
        for field in imports:
            self._check_module(config, field)
        return config

    def _check_module(self, config: Config, field: str) -> None:
        file, value, named = self.path / "config.json", getattr(config, field), getattr(self, field)
        if named not in (None, value):
            raise RunError(f"{self.path} was trained with {field}={value!r}, but {named!r} is named: name the same one")
        module = module_of(config, field)
        folders = [self.path, Path(os.path.abspath(self.path)).parent, self.path.resolve().parent]
        if inside := file_inside(module, folders):
            raise RunError(
                f"{file} has {field}={value!r}, whose module is {inside}. Modules in a run folder or "
                "in its parent folder are never imported. If you trust the module, move the run to a folder without it."
            )
        if module and not self.trust_modules and named is None:
            raise RunError(
                f"{file} has {field}={value!r}, and importing the module {module} runs its code. "
                f"If you trust it, name it again, as --{field} {value} on the command or {field}={value!r} in Python, "
                "or trust every module that the run names, with --trust-modules or trust_modules=True."
            )


def check_modules(config: Config, logdir: Path | str, imports: Sequence[str] = IMPORTED) -> None:
    """Raises ConfigError if a new run in `logdir` would import a module from there: no command could use the run."""
    for field in imports:
        if file := file_inside(module_of(config, field), [Path(logdir)]):
            raise ConfigError(
                f"the module of {field}={getattr(config, field)!r}, {file}, is in the log folder {logdir}, "
                "from which no command imports modules. Choose another --logdir."
            )


@contextmanager
def part_of(folder: Path) -> Iterator[Path]:
    """Gives a folder to write into, beside where the files will be moved, and removes it with all that is left there.

    Makes `folder` if it is not there; and removes it again if nothing comes of it.

    Raises:
        OSError: If it cannot be made.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
            yield Path(part)
    finally:
        if made:
            with suppress(OSError):  # as it is not empty
                folder.rmdir()


def write_atomically(file: Path, text: str) -> None:
    """Writes a file so that, whatever happens, either the old or the new content is there."""
    part = file.with_name(file.name + ".part")
    try:
        with part.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
