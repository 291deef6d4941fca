"""Export of a trained policy to a file that runs without this package. Each export is compared with its checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import tensorflow as tf

from ppo.graphs import graph_function
from ppo.model.agent import Agent
from ppo.results.policy import Policy, load_agent
from ppo.run.checkpoint import LATEST
from ppo.run.folder import Run, RunError, is_pattern, part_of, readable
from vecenv.spaces import leaves, nest, pick

Format = Literal["savedmodel", "tflite"]
TOLERANCE = 1e-4  # of continuous actions, relative to their size
MAX_FLIPPED = 0.01  # of discrete actions, because rounding can decide between equally likely actions

SIGNATURE = "serving_default"
NUM_TRIALS, NUM_STEPS = 64, 4  # observations per step, and consecutive steps, in the comparison

Arrays = dict[str, np.ndarray]
Act = Callable[[Arrays], Arrays]


class ExportError(RunError):
    """A policy cannot be exported, or its export acts differently from the checkpoint."""


class _Served(tf.Module):
    """The deterministic policy, with its normalizers, as one function of named tensors.

    Inputs are the leaves of an observation that the policy reads, `[B, ...]`, by their `input_name`. A recurrent policy
    has the additional input "state", `float32[B, S]`, which is zero at the start of an episode. Outputs are the leaves
    of the action, within their bounds, by their `output_name` and, for a recurrent policy, the next "state".

    Args:
        agent: The policy.
        observation_space: Space of one observation.
        action_space: Space of one action.
        in_float32: Whether to round all numbers to float32 before they are normalized.

    Attributes:
        rounded: Names of the inputs that `in_float32` rounds.
    """

    def __init__(self, agent: Agent, observation_space: gym.Space, action_space: gym.Space, *, in_float32: bool):
        super().__init__(name="policy")
        self.agent, self.observations, self.actions = agent, observation_space, action_space
        critics = agent.observations.critic_paths
        read = [(path, space) for path, space in leaves(observation_space) if path not in critics]
        self.paths = {input_name(path): path for path, _ in read}
        self.action_paths = {output_name(path): path for path, _ in leaves(action_space)}
        if len(self.paths) < len(read) or "state" in self.paths:
            raise ExportError(
                f"the keys of {observation_space} give two inputs the same name, or use the name 'state': rename a key"
            )
        if len(self.action_paths) < len(leaves(action_space)):
            raise ExportError(f"the keys of {action_space} give two outputs the same name: rename a key")
        specs = [
            tf.TensorSpec([None, *(space.shape or ())], space.dtype, name=input_name(path)) for path, space in read
        ]
        shifted = [path for path, _ in agent.observations.shifted if in_float32]
        self.rounded = [name for name, path in self.paths.items() if path in shifted]
        if agent.state_size:
            specs.append(tf.TensorSpec([None, agent.state_size], tf.float32, name="state"))
        self.serve = graph_function(self._serve, input_signature=specs)

    def _serve(self, *inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        by_path = dict(zip(self.paths.values(), inputs, strict=False))
        batch = tf.shape(inputs[0])[0]
        state = inputs[-1] if self.agent.state_size else tf.zeros([batch, 0])

        def read(path: tuple) -> tf.Tensor:
            if path in by_path:
                values = by_path[path]
                return tf.cast(values, tf.float32) if input_name(path) in self.rounded else values
            unread = pick(self.observations, path)
            return tf.zeros([batch, *unread.shape], unread.dtype)

        actions, state = self.agent.mode(nest(self.observations, read), state)
        outputs = {name: self._bounded(actions, path) for name, path in self.action_paths.items()}
        return {**outputs, **({"state": state} if self.agent.state_size else {})}

    def _bounded(self, actions: Any, path: tuple) -> tf.Tensor:
        action, space = pick(actions, path), pick(self.actions, path)
        if np.issubdtype(space.dtype, np.floating):
            return tf.clip_by_value(action, space.low, space.high)
        return action


def input_name(path: tuple) -> str:
    """Returns the name of the input for an observation leaf: its keys joined by "_", as an ASCII identifier.

    If the space is not nested, the name is "observation".
    """
    text = _identifier(path)
    return text if text.isidentifier() else "_".join(filter(None, ["observation", text]))


def output_name(path: tuple) -> str:
    """Returns the name of the output for an action leaf: "action", followed by its keys, joined by "_"."""
    return "_".join(filter(None, ["action", _identifier(path)]))


def _identifier(path: tuple) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in "_".join(map(str, path)))


def export(
    run: Run | Path | str,
    folder: Path | str,
    format: Format,
    *,
    checkpoint: str | int = LATEST,
    group: str | None = None,
    warn: Callable[[str], None] = print,
) -> tuple[Path, float]:
    """Exports the policy of a run's checkpoint, and compares the two on random observations.

    Inputs have the dtypes of the env's observations. TFLite cannot subtract float64 numbers, so it rounds them to
    float32 first. If the policy depends on the lost digits, the comparison fails.

    Args:
        run: A run folder that `ppo.train` made. `Run.open(path, trust_modules=True)` allows the import of its network.
        folder: Folder for the export; created if it does not exist. An earlier export of the same run and format is
            replaced.
        format: "savedmodel", a folder for TensorFlow; or "tflite", a file for LiteRT.
        checkpoint: As for `load_policy`.
        group: The group of agents whose policy to export; None if the run has one policy.
        warn: Called with a message for each damaged checkpoint, and if TensorFlow cannot load from the path of the
            export.

    Returns:
        The file or folder, and the largest difference between two actions or, for discrete actions, the fraction of
        actions that differ.

    Raises:
        RunError: If the run has no checkpoint that can be read.
        ExportError: If the policy cannot be written in this format, or its export acts differently.
    """
    run, folder = Run.open(run), Path(folder)
    agent = load_agent(run, warn, checkpoint=checkpoint, team=group)
    observations, actions = run.read_spaces()[run.team(group)]
    served = _Served(agent, observations, actions, in_float32=format == "tflite")
    suffix = "" if group is None else "-" + group.replace("%", "%25").replace("/", "%2F")
    target = folder / f"{run.path.resolve().name}{suffix}.{format}"
    try:
        with part_of(folder) as part, readable(part) as plain:
            written, act = _write(served, plain / "savedmodel", format)
            try:
                difference = _difference(Policy(agent, observations, actions), served, act)
            except ExportError as error:
                if not served.rounded:
                    raise
                raise ExportError(
                    f"{error} TFLite rounds {', '.join(served.rounded)} to float32: export a savedmodel instead."
                ) from error
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(written, target)
    except (OSError, tf.errors.OpError) as error:
        raise ExportError(f"cannot write {target}: {error}. Choose another folder (--outdir).") from error
    if format == "savedmodel" and is_pattern(target):
        warn(f"TensorFlow cannot load from {target}, because it takes brackets and backslashes for a pattern: move it")
    return target, difference


def _write(served: _Served, saved: Path, format: Format) -> tuple[Path, Act]:
    """Writes the policy and loads it. Returns its path and the loaded policy."""
    try:
        tf.saved_model.save(served, str(saved), signatures={SIGNATURE: served.serve})
        if format == "savedmodel":
            return saved, _load_savedmodel(saved)
        file = saved.with_suffix(".tflite")
        file.write_bytes(tf.lite.TFLiteConverter.from_saved_model(str(saved)).convert())
        return file, _load_tflite(file)
    except (OSError, tf.errors.OpError):
        raise
    except Exception as error:  # the converters raise private types
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        remedy = " Export a savedmodel instead." if format == "tflite" else ""
        raise ExportError(f"this policy cannot be exported as {format}: {reason}.{remedy}") from error


def _load_savedmodel(path: Path) -> Act:
    signature = tf.saved_model.load(str(path)).signatures[SIGNATURE]

    def act(inputs: Arrays) -> Arrays:
        outputs = signature(**{name: tf.constant(values) for name, values in inputs.items()})
        return {name: values.numpy() for name, values in outputs.items()}

    return act


def _load_tflite(file: Path) -> Act:
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        Interpreter = tf.lite.Interpreter
    signature = Interpreter(model_path=str(file)).get_signature_runner(SIGNATURE)
    return lambda inputs: signature(**inputs)


def _difference(policy: Policy, served: _Served, act: Act) -> float:
    """Returns the difference between the actions of the export and of the checkpoint on random observations.

    Raises:
        ExportError: If the difference is too large.
    """
    agent = served.agent
    wanted: dict[str, list[np.ndarray]] = {name: [] for name in served.action_paths}
    found: dict[str, list[np.ndarray]] = {name: [] for name in served.action_paths}
    state = agent.initial_state(NUM_TRIALS)
    for step in range(NUM_STEPS):  # consecutive steps, to include a recurrent policy's memory
        batch = _random_observations(served, seed=step)
        inputs = {name: pick(batch, path) for name, path in served.paths.items()}
        outputs = act({**inputs, **({"state": state} if agent.state_size else {})})
        state = outputs.get("state", state)
        actions = policy(batch)
        for name, path in served.action_paths.items():
            wanted[name].append(pick(actions, path))
            found[name].append(outputs[name])
    return max(
        _leaf_difference(pick(served.actions, path), np.concatenate(wanted[name]), np.concatenate(found[name]))
        for name, path in served.action_paths.items()
    )


def _leaf_difference(space: gym.Space, before: np.ndarray, after: np.ndarray) -> float:
    """Returns the difference between two batches of one leaf of the actions; raises ExportError if it is too large."""
    if before.shape != after.shape or before.dtype != after.dtype:
        raise ExportError(f"the export returns {after.dtype}{after.shape} instead of {before.dtype}{before.shape}")
    if np.issubdtype(space.dtype, np.floating):
        difference, most = np.abs(before - after).max(), TOLERANCE * max(np.ptp(before), np.abs(before).max())
    else:
        difference, most = (before != after).mean(), MAX_FLIPPED
    if not difference <= most:  # this form also rejects NaN
        raise ExportError(f"the export acts differently from the checkpoint: its actions differ by {difference:.2g}.")
    return float(difference)


def _random_observations(served: _Served, seed: int) -> Any:
    """Returns a batch of random observations whose masks allow at least one action in each group.

    Numbers that float32 would round have the mean and the standard deviation of the observations in training.
    """
    space, agent = served.observations, served.agent
    space.seed(seed)
    samples = [space.sample() for _ in range(NUM_TRIALS)]
    batch = nest(space, lambda path: np.stack([pick(sample, path) for sample in samples]))
    rng = np.random.default_rng(seed)
    for path, moments in agent.observations.shifted:
        values = pick(batch, path)
        drawn = rng.normal(moments.mean, np.sqrt(moments.variance), [NUM_TRIALS, *moments.mean.shape])
        values[...] = (drawn if values.dtype.kind == "f" else drawn.round()).reshape(values.shape)
    if agent.observations.has_mask:
        mask, nothing = agent.observations.mask(batch), np.zeros(NUM_TRIALS, np.bool_)
        for group in agent.distribution.mask_groups:
            nothing |= ~mask[:, group].any(axis=-1)
        for path in agent.observations.mask_paths:
            pick(batch, path)[nothing] = 1
    return batch
