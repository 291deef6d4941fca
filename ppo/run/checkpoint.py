"""Atomic checkpoints: TensorFlow variables, progress as JSON, and the states of the envs."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf

import vecenv
from ppo.algorithm.teams import Team
from ppo.errors import RunError, first_line
from ppo.model.agent import Agent
from ppo.model.normalize import RunningMoments
from ppo.run.files import readable, sync
from vecenv.tree import leaves, name_of, nest, pick

ENV_STATES = "envs.npz"
ACTIONS = "actions.npz"
KEEP = 3  # checkpoints, because an older one is restored if the newest is damaged
LATEST, BEST = "latest", "best"
OLD = "old_"  # prefix of a checkpoint that is being replaced, which counts if the process was killed meanwhile

NUM_ROWS = 16
RELATIVE, FLIPPED = 1e-3, 0.1
"""Limits of the error of continuous actions, relative to their size, and of the fraction of discrete actions that
differ. Rounding errors are far below both limits, and a policy that mixes up its inputs is far above."""

Recorded = dict[str, np.ndarray]  # batches of leaves by team, field and path, as JSON


class Checkpoints:
    """Saves trackable objects, given by name, to `folder/step_000000000123/` and `folder/best/`, and restores them.

    A checkpoint is written under a temporary name and renamed once it is complete and on disk. A folder named `step_*`
    or `best` is therefore always a complete checkpoint, even if the process that wrote it was killed. The first save
    creates `folder` if its parent exists.
    """

    def __init__(self, folder: Path, **objects: tf.Module):
        self._folder = folder
        self._state = tf.train.Checkpoint(**objects)

    def save(
        self, step: int, progress: dict[str, Any], env_states: bytes | None = None, actions: Recorded | None = None, *,
        best: bool = False,
    ) -> Path:  # fmt: skip
        """Writes a checkpoint, removes all but the newest `KEEP`, and returns the new checkpoint's folder.

        If it cannot be written, for example to a full disk, raises RunError and leaves older checkpoints unchanged.

        Args:
            step: Env-steps so far, which are part of the checkpoint's name.
            progress: JSON values to store with the tensors.
            env_states: States of the envs, as `vecenv.state.dumps` returns them, if any.
            actions: Actions of the policy; see `recorded_actions`, if any.
            best: Whether to replace the checkpoint `best` instead of adding one.
        """
        final = self._folder / (BEST if best else f"step_{step:012d}")
        part = self._folder / f"part_{secrets.token_hex(8)}"  # a name that nobody can guess, so it is not a link
        try:
            for stale in self._folder.glob("part_*"):  # of a process that was killed
                shutil.rmtree(stale, ignore_errors=True)
            self._folder.mkdir(exist_ok=True)  # without parents: a deleted run folder must not be recreated
            part.mkdir()
            self._state.write(str(part / "state"))
            (part / "progress.json").write_text(json.dumps(progress))
            if env_states is not None:
                (part / ENV_STATES).write_bytes(env_states)
            if actions:
                np.savez_compressed(part / ACTIONS, allow_pickle=False, **actions)
            for file in part.iterdir():
                sync(file)
            replaced = self._folder / f"{OLD}{final.name}"
            if final.exists():  # an earlier best, or a checkpoint that is damaged or lacks the states of the envs
                shutil.rmtree(replaced, ignore_errors=True)
                os.rename(final, replaced)
            os.rename(part, final)
            sync(self._folder)
            for old in self._folder.glob(f"{OLD}*"):
                if (self._folder / old.name.removeprefix(OLD)).exists():
                    shutil.rmtree(old, ignore_errors=True)
        except (OSError, tf.errors.OpError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise RunError(f"cannot write checkpoint {final}: {error}. Older checkpoints are unchanged.") from error
        for old in list_checkpoints(self._folder)[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def restore(
        self, which: str | int = LATEST, *, warn: Callable[[str], None], partial: bool = False,
        check: Callable[[Path], None] = lambda path: None,
    ) -> dict[str, Any]:  # fmt: skip
        """Restores a checkpoint, by default the newest valid one, and returns its progress.

        The result also holds the name of the checkpoint's folder, as "checkpoint", and "env_states" if there are any.

        Args:
            which: As for `chosen`. Raises RunError if there is none that is valid.
            warn: Called with a message about each damaged checkpoint.
            partial: Whether to skip the states of the envs, and objects that this instance does not have.
            check: Called with the folder of each restored checkpoint. Raises ValueError if it is damaged.
        """
        found = chosen(self._folder, which)
        for path in reversed(found):
            try:
                progress = json.loads((path / "progress.json").read_text())
                with readable(path) as plain:
                    status = self._state.read(str(plain / "state"))
                status.expect_partial()  # suppresses warnings: the assertions below report mismatches
                status.assert_existing_objects_matched()
                if not partial:
                    status.assert_consumed()
                    progress |= _env_states(path)
                check(path)
                return {**progress, "checkpoint": path.name}
            except (OSError, ValueError, TypeError, LookupError, AssertionError, tf.errors.OpError) as error:
                warn(
                    f"cannot restore checkpoint {path}: it is damaged, or from other settings or another version of "
                    f"ppo: {first_line(error)}"
                )
        if which != LATEST:
            raise RunError(f"the checkpoint {which} in {self._folder} cannot be read: choose another one")
        best = f" The checkpoint {BEST!r} may still be intact: `ppo evaluate RUN --checkpoint {BEST}`."
        raise RunError(
            f"no checkpoint in {self._folder} can be restored: all {len(found)} are damaged, or from other settings or "
            "another version of ppo. Nothing was changed. Restore the folder from a backup, use the version in "
            f"versions.json, or start a new run.{best if (self._folder / BEST).is_dir() else ''}"
        )


def module_name(module: str, team: str) -> str:
    """Returns the name of a team's module in checkpoints. The team of an env with one agent is ""."""
    return f"{module}_{team}" if team else module


def modules_in_checkpoints(teams: Iterable[Team]) -> dict[str, tf.Module]:
    """Returns the agents and learners of teams, by their names in checkpoints.

    Actors are not saved, because they are the agents or copies of them.
    """
    modules: dict[str, tf.Module] = {}
    for team in teams:
        modules |= {module_name("agent", team.name): team.agent, module_name("learner", team.name): team.learner}
    return modules


def only_reward_moments(moments: RunningMoments) -> tf.train.Checkpoint:
    """Returns a stand-in for a learner that restores only `moments`, the statistics of its reward normalizer."""
    return tf.train.Checkpoint(rewards=tf.train.Checkpoint(moments=moments))


def _env_states(path: Path) -> dict[str, Any]:
    """Returns the env states of a checkpoint, if any, or the error raised when reading them.

    Training can go on without them.
    """
    try:
        return {"env_states": vecenv.state.load(path / ENV_STATES)} if (path / ENV_STATES).exists() else {}
    except Exception as error:  # a damaged file can raise any exception
        return {"env_states": error}


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, oldest first."""
    found = {path.name.removeprefix(OLD): path for name in (f"{OLD}step_*", "step_*") for path in folder.glob(name)}
    return [path for _, path in sorted(found.items()) if path.is_dir()]


def chosen(folder: Path, which: str | int) -> list[Path]:
    """Returns checkpoints, of which the last valid one counts, or raises RunError if there are none.

    `which` is "latest" for all of them, oldest first; "best" for the checkpoint with the highest mean return in an
    evaluation; or the number of env-steps of a checkpoint.
    """
    found = list_checkpoints(folder)
    if which == LATEST and found:
        return found
    if which == LATEST:
        raise RunError(f"{folder} holds no checkpoint: the run ended before its first one. Start a new run.")
    named = {path.name.rpartition("_")[2].lstrip("0") or "0": path for path in found}
    for best in (folder / f"{OLD}{BEST}", folder / BEST):
        if best.is_dir():
            named[BEST] = best
    if str(which) not in named:
        raise RunError(
            f"{folder} holds no checkpoint {which}: choose one of {', '.join([LATEST, *named])}. The first evaluation "
            f"of a run saves {BEST}, and the {KEEP} newest of the others are kept."
        )
    return [named[str(which)]]


def number_in(folder: Path, which: str | int, *keys: str) -> float | None:
    """Returns a finite number in the progress of a checkpoint, or None if there is none. `which` is as for `chosen`."""
    try:
        value = json.loads((chosen(folder, which)[-1] / "progress.json").read_text())
        for key in keys:
            value = value[key]
        number = float(value)
    except (OSError, ValueError, TypeError, LookupError, RunError):
        return None
    return number if math.isfinite(number) else None


def recorded_actions(agents: Mapping[str, Agent], observed: Mapping[str, Any]) -> Recorded:
    """Returns some observations of each team's last rollout, `[T + 1, N, ...]`, with the most likely actions.

    They are stored with each checkpoint. A loaded policy is built from the files of a run folder. If it does not repeat
    these actions, one of the files, or the code that reads them, is wrong.
    """
    recorded: Recorded = {}
    for team, observations in observed.items():
        agent, space = agents[team], agents[team].observations.space
        rows = _some_rows(observations, space)
        if not all(np.isfinite(pick(rows, path)).all() for path, _ in leaves(space)):
            return {}  # these observations have ended the run
        actions, _ = agent.act(rows, agent.initial_state(NUM_ROWS), checked=False)
        for field, of_field, values in (("observation", space, rows), ("action", agent.action_space, actions)):
            recorded |= {_name(team, field, path): np.asarray(pick(values, path)) for path, _ in leaves(of_field)}
    return recorded


def check_actions(folder: Path, agent: Agent, team: str) -> None:
    """Raises ValueError unless the policy loaded from a checkpoint takes the actions that were recorded with it."""
    file = folder / ACTIONS
    if not file.exists():  # training did not record any
        return

    def read(field: str, space: gym.Space) -> Any:
        return nest(space, lambda path: recorded[_name(team, field, path)])

    try:
        with np.load(file, allow_pickle=False) as recorded:
            observations, actions = read("observation", agent.observations.space), read("action", agent.action_space)
    except Exception as error:  # a damaged file can raise any exception
        raise ValueError(f"{file.name} cannot be read: {error}") from error
    found, _ = agent.act(observations, agent.initial_state(NUM_ROWS), checked=False)
    for path, space in leaves(agent.action_space):
        before, after = pick(actions, path), pick(found, path)
        if np.issubdtype(space.dtype, np.floating):
            difference, most = np.abs(before - after).max(), 1e-5 + RELATIVE * np.abs(before).max()
        else:
            difference, most = (before != after).mean(), FLIPPED
        if not difference <= most:  # this form also rejects NaN
            leaf = name_of("action", path)
            raise ValueError(
                f"the loaded policy acts differently from the policy in training: {leaf} differs by {difference:.2g}. "
                "Restore the files of the run, and use the network and the version that trained it."
            )


def _some_rows(observations: Any, space: gym.Space) -> Any:
    """Returns `[NUM_ROWS, ...]`, spread over the observations of a rollout, `[T + 1, N, ...]`."""

    def leaf(path: tuple) -> np.ndarray:
        values = pick(observations, path)
        num_states, num_envs = values.shape[:2]
        return values[divmod(np.linspace(0, num_states * num_envs - 1, NUM_ROWS).astype(int), num_envs)]

    return nest(space, leaf)


def _name(team: str, field: str, path: tuple) -> str:
    return json.dumps([team, field, *path])
