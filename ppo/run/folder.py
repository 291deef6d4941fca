"""`Run`: the folder of one training run, and the files in it."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import itertools
import json
import os
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import gymnasium as gym

from ppo.config import RESUMABLE, SETTINGS, Config, ConfigError
from ppo.errors import RunError
from ppo.run.files import write_atomically
from ppo.run.spaces import outline_of, space_from_json, space_to_json
from ppo.versions import PACKAGES, versions

SpacePair = tuple[gym.Space, gym.Space]  # the space of one observation and the space of one action


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder, at `path`, whose files docs/ppo.md lists: JSON, NumPy archives, and files in TensorFlow's formats.

    No file is ever unpickled. `trust_modules` says whether the user allows the import of the modules that the settings
    name (`ppo.run.modules`).
    """

    path: Path
    trust_modules: bool = False

    @classmethod
    def create(cls, logdir: Path | str, name: str, config: Config) -> Run:
        """Creates a new folder `logdir/TIME-NAME` with the settings. Raises RunError if it cannot be written."""
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{''.join(c if c.isalnum() or c in '-_.' else '-' for c in name)}"
        try:
            folder = Path(logdir).absolute()  # envs and callbacks may change the current folder
            folder.mkdir(parents=True, exist_ok=True)
            for attempt in itertools.count(1):
                path = folder / (stem if attempt == 1 else f"{stem}-{attempt}")
                with suppress(FileExistsError):
                    path.mkdir()
                    break
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
    def open(cls, path: Run | PathLike[str] | str, logdir: Path | str = "runs", *, trust_modules: bool = False) -> Run:
        """Opens a run folder, given its path or its name in `logdir`. An open run that is trusted stays trusted.

        Every function and command that reads a run begins here. Raises RunError if there is no such run, or if its
        folder holds anything but files and folders.
        """
        if isinstance(path, Run):
            path._check_files()
            return dataclasses.replace(path, trust_modules=trust_modules or path.trust_modules)
        candidates = [Path(path), Path(logdir) / path]
        for candidate in candidates:
            if (candidate / "config.json").is_file():
                run = cls(candidate.absolute(), trust_modules)
                run._check_files()
                return run
        found = next((candidate for candidate in candidates if candidate.is_dir()), None)
        names = " or ".join(dict.fromkeys(map(str, candidates)))
        reason = f"{found} holds no config.json" if found else f"there is no folder {names}"
        raise RunError(
            f"{reason}, so it is not a run: pass a run folder that `ppo train` printed, or its name in the folder runs"
        )

    @contextmanager
    def locked(self, warn: Callable[[str], None] = warnings.warn) -> Iterator[None]:
        """Prevents other processes from training this run at the same time, or warns if the file system has no locks.

        Raises RunError if another process is training it, or the folder cannot be written.
        """
        try:
            file = open(self.path / "lock", "a")  # noqa: SIM115  closed below
        except OSError as error:
            raise RunError(f"cannot write into {self.path}: {error}. Resume a writable copy of it.") from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Local file systems and NFS return EWOULDBLOCK; some CIFS clients return EACCES.
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise RunError(
                        f"{self.path} is being trained by another process: wait for it, or stop it"
                    ) from error
                warn(f"the file system of {self.path} cannot lock files ({error}): let only one process train this run")
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

    @property
    def exists(self) -> bool:
        """Whether config.json is still there, as far as is known: the folder has neither been deleted nor moved."""
        try:
            return (self.path / "config.json").is_file()
        except OSError:  # such as a file server that does not answer
            return True

    def check_exists(self) -> None:
        """Raises RunError if the folder was deleted or moved. Call this before a write that would recreate it."""
        if not self.exists:
            raise RunError(
                f"the run folder {self.path} is gone: it was deleted or moved during training. If it was moved, resume "
                "it from its new location, where its last checkpoint is, if there is one; otherwise start a new run."
            )

    def check_begun(self) -> None:
        """Raises RunError if the run ended before its first checkpoint."""
        # The first evaluation may precede the first periodic checkpoint.
        found = any(path.name.startswith(("step_", "best", "old_")) for path in self.checkpoints.glob("*"))
        if not found:
            raise RunError(
                f"{self.path} holds nothing to load: the run ended before its first checkpoint. Start a new run. Lower "
                "checkpoint_interval (--checkpoint-interval) to save earlier."
            )

    def write_config(self, config: Config) -> None:
        """Writes the settings."""
        write_atomically(self.path / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")

    def check_resumable(self, config: Config) -> None:
        """Raises ConfigError if a config changes a setting that a resumed run must keep.

        Raises RunError if the run cannot be read or has no checkpoint.
        """
        before = self.read_config()
        changed = [name for name in SETTINGS if getattr(before, name) != getattr(config, name)]
        if fixed := [name for name in changed if name not in RESUMABLE]:
            raise ConfigError(
                f"a resumed run keeps its settings, but {', '.join(fixed)} would change. "
                f"These may change: {', '.join(RESUMABLE)}. To change another setting, start a new run; "
                "init_from=RUN (--init-from RUN) begins with this run's networks, if settings and spaces match."
            )
        self.check_begun()

    def _check_files(self) -> None:
        """Raises RunError if the folder holds anything but files and folders.

        The folder may come from a stranger. A link could make a read or a write leave it, and a read from a pipe never
        ends. The folder itself may be a link, because the user named it.
        """
        root, bad = self.path.resolve(), []
        for folder, folders, files in os.walk(root):
            for path in (Path(folder, name) for name in (*folders, *files)):
                with suppress(FileNotFoundError):  # training has just replaced an old checkpoint
                    if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                        bad.append(str(path.relative_to(root)))
        if bad:
            raise RunError(
                f"{self.path} is not used, because it holds links or devices: {', '.join(sorted(bad))}. If you trust "
                "the run, replace each link with what it points to, and remove pipes, sockets and devices."
            )

    def write_evaluation(self, values: dict[str, Any]) -> None:
        """Writes the score of the final policy."""
        self.check_exists()
        write_atomically(self.path / "evaluation.json", json.dumps(values) + "\n")

    def write_spaces(
        self, teams: Mapping[str, SpacePair], *, given: bool, wrappers: list[dict[str, Any]] | None = None
    ) -> None:
        """Writes the spaces of each team, so that policies can be used without the env. The team of one agent is "".

        `given` says whether the envs were passed to `ppo.train` instead of being made from `config.env`. `wrappers` is
        the result of `ppo.run.wrappers.agreed`.
        """
        of_teams = {
            name: {"observation": space_to_json(observed), "action": space_to_json(acted)}
            for name, (observed, acted) in teams.items()
        }
        values = of_teams.get("", {"teams": of_teams})
        write_atomically(
            self.path / "spaces.json", json.dumps({**values, "envs_given": given, "wrappers": wrappers}) + "\n"
        )

    def check_spaces(self, teams: Mapping[str, SpacePair]) -> None:
        """Raises ConfigError if envs have other spaces or teams than those that the run was trained on.

        The bounds of observations may differ.
        """
        before = self.read_spaces()
        if before.keys() != teams.keys():
            raise ConfigError(
                f"{self.path} was trained with the groups of agents {list(before)}, but these envs have {list(teams)}: "
                "pass envs with the same groups"
            )
        for name, now in teams.items():
            for trained, other, observed in zip(before[name], now, (True, False), strict=True):
                # Not `!=`, which ignores the order of keys, although the weights follow it.
                if outline_of(trained, bounds=not observed) != outline_of(other, bounds=not observed):
                    raise ConfigError(
                        f"{self.path} was trained on envs with the space {trained}, but these envs have {other}: pass "
                        "envs with the same space, and with its keys in the same order"
                    )

    def check_given(self, given: bool) -> None:
        """Raises ConfigError if the run was trained on envs passed to `ppo.train`, and none are passed now."""
        if not given and self._read_spaces()[1]["envs_given"]:
            raise ConfigError(
                f"{self.path} was trained on envs passed to ppo.train(config, envs), which no command can make. Pass "
                "them again in Python: `ppo.resume(run, envs=...)`, `ppo.evaluate_run(run, episodes, envs=...)` or "
                "`ppo.record_run(run, folder, episodes, envs=...)`. The commands work with runs whose env has a name: "
                "Config(env='module:function')."
            )

    def team(self, name: str | None = None) -> str:
        """Returns the name of the only team, or the given name. Raises RunError if it names none of several teams."""
        teams = list(self.read_spaces())
        if name is None and len(teams) == 1:
            return teams[0]
        if name not in teams:
            raise RunError(f"{self.path} has the policies {teams}: choose one of them with group=... or --group")
        return name

    def read_spaces(self) -> dict[str, SpacePair]:
        """Returns the spaces of each team. Raises RunError if the file is missing or damaged."""
        return self._read_spaces()[0]

    def read_wrappers(self) -> list[dict[str, Any]] | None:
        """Returns the `wrappers` that `write_spaces` wrote."""
        return self._read_spaces()[1]["wrappers"]

    def _read_spaces(self) -> tuple[dict[str, SpacePair], dict[str, Any]]:
        """Returns the spaces of each team, and the remaining values of the file."""
        file = self.path / "spaces.json"
        try:
            values = json.loads(file.read_text())
            teams = {
                name: (space_from_json(one["observation"]), space_from_json(one["action"]))
                for name, one in values.get("teams", {"": values}).items()
            }
            return teams, {"envs_given": values["envs_given"], "wrappers": values.get("wrappers")}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"{file} cannot be read ({reason}). Restore a backup, or start a new run.") from error

    def read_config(self) -> Config:
        """Returns the settings. To import the modules that they name, use `ppo.run.modules.config_to_load`.

        Raises RunError if the file is damaged or from another version, which the message names.
        """
        file = self.path / "config.json"
        try:
            return Config.from_json(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
            written, this = self._versions().get(PACKAGES[0], "of an unknown version"), versions()[PACKAGES[0]]
            raise RunError(
                f"{file} cannot be read: {error}. {PACKAGES[0]} {written} wrote it, and this is {PACKAGES[0]} {this}: "
                f"{'' if written == this else 'use that version, '}restore a backup, or start a new run."
            ) from error

    def changed_versions(self) -> list[str]:
        """Returns "NAME OLD (now NEW)" for each package whose version has changed since the run began."""
        then, now = self._versions(), versions()
        return [f"{name} {then[name]} (now {now[name]})" for name in PACKAGES if then.get(name, now[name]) != now[name]]

    def _versions(self) -> dict[str, str]:
        """Returns the versions with which the run began; none if the file is damaged."""
        try:
            return dict(json.loads((self.path / "versions.json").read_text()))
        except (OSError, ValueError, TypeError):
            return {}
