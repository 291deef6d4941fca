"""Atomic checkpoints: network, normalisers, optimizer, and how far the run has come."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import vecenv
from ppo.run.folder import RunError

ENV_STATES = "envs.npz"
KEEP = 3  # checkpoints; the older ones are there in case the newest is damaged


class Checkpoints:
    """Saves and restores trackable objects in `folder/step_000000123/`.

    A checkpoint is written under another name and renamed when it is complete and on disk, so a
    folder `step_*` is a whole checkpoint whatever happened to the process that wrote it.

    Args:
        folder: Where they are stored; created if its parent exists.
        **objects: What to save, by name: `tf.Module`s.
    """

    def __init__(self, folder: Path, **objects: tf.Module):
        self._folder = folder
        self._state = tf.train.Checkpoint(**objects)

    def save(self, step: int, progress: dict[str, Any], env_states: Any = None) -> Path:
        """Writes a checkpoint and removes all but the newest few.

        Args:
            step: Env-steps so far; names the checkpoint.
            progress: Plain values for JSON, kept beside the tensors.
            env_states: What `get_state` of the envs returned, if their state can be put back.

        Raises:
            RunError: If it cannot be written, such as on a full disk; older checkpoints stay as they are.
        """
        final = self._folder / f"step_{step:012d}"
        part = self._folder / f"part_{step:012d}"
        try:
            for left in self._folder.glob("part_*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            self._folder.mkdir(exist_ok=True)  # without parents: a deleted run folder must not be recreated
            part.mkdir()
            self._state.write(str(part / "state"))
            (part / "progress.json").write_text(json.dumps(progress))
            if env_states is not None:
                vecenv.state.save(part / ENV_STATES, env_states)
            for file in part.iterdir():
                _sync(file)
            if final.exists():  # damaged, or of less than there is now
                shutil.rmtree(final)
            os.rename(part, final)
            _sync(self._folder)
        except (OSError, tf.errors.OpError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise RunError(f"cannot write checkpoint {final}: {error}. Older checkpoints are as they were.") from error
        for old in list_checkpoints(self._folder)[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def restore_newest(
        self, *, warn: Callable[[str], None], keys: Sequence[str] = (), partial: bool = False
    ) -> dict[str, Any]:
        """Restores the newest checkpoint that is whole and returns its progress, and "env_states" if it has some.

        Args:
            warn: Told about each checkpoint that is damaged.
            keys: What the progress must hold.
            partial: Whether the checkpoint may hold more than is restored here.

        Raises:
            RunError: If there is none.
        """
        found = list_checkpoints(self._folder)
        if not found:
            raise RunError(f"{self._folder} holds no checkpoint: the run ended before its first one. Start a new run.")
        for path in reversed(found):
            try:
                progress = json.loads((path / "progress.json").read_text())
                status = self._state.read(str(path / "state"))
                status.expect_partial()  # or it would list what did not fit once more, as warnings
                status.assert_existing_objects_matched()
                if not partial:
                    status.assert_consumed()
                if not partial:
                    progress |= _env_states(path)
                return {**progress, **{key: progress[key] for key in keys}}
            except (OSError, ValueError, TypeError, LookupError, AssertionError, tf.errors.OpError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                warn(f"checkpoint {path} is damaged or does not fit: {reason}")
        raise RunError(
            f"no checkpoint in {self._folder} can be read: all {len(found)} are damaged or do not fit the config. "
            "Nothing was changed. Restore the folder from a copy, or train anew."
        )


def _env_states(path: Path) -> dict[str, Any]:
    """Returns the states of the envs, if a checkpoint has some; without them the learner still goes on."""
    try:
        return {"env_states": vecenv.state.load(path / ENV_STATES)} if (path / ENV_STATES).exists() else {}
    except Exception as error:  # a damaged file can raise anything
        return {"why_fresh": str(error)}


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step_*") if path.is_dir())


def _sync(path: Path) -> None:
    """Waits until a file or a folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
