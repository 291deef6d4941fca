"""Export of a trained policy to a file that runs without this package. Each export is compared with its checkpoint."""

from __future__ import annotations

import functools
import itertools
import json
import keyword
import logging
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf
from gymnasium import spaces

from ppo.config import ConfigError
from ppo.errors import RunError, first_line
from ppo.model.agent import Agent
from ppo.policies.policy import Policy, load_agent
from ppo.run.checkpoint import LATEST
from ppo.run.files import is_pattern, part_of, readable
from ppo.run.folder import Run
from ppo.run.spaces import space_to_json
from ppo.run.wrappers import Affine, Wrapper, affine_maps, wrappers_of
from ppo.runtime.graphs import graph_function
from vecenv.tree import leaves, nest, pick

Format = Literal["savedmodel", "tflite", "onnx"]
TOLERANCE = 1e-4  # of continuous actions, relative to their size
MAX_FLIPPED = 0.01  # of discrete actions, because rounding can decide between equally likely actions

SIGNATURE = "serving_default"
METADATA = "policy.json"  # in assets.extra/ of a SavedModel, and in the ZIP archive at the end of a TFLite file
RESERVED = ("self", "state", "next_state")  # "self" is an argument of TensorFlow's and LiteRT's signatures
NUM_TRIALS, NUM_STEPS = 64, 4  # observations per step, and consecutive steps, in the comparison

Arrays = dict[str, np.ndarray]
Act = Callable[[Arrays], Arrays]


class ExportError(RunError):
    """A policy cannot be exported, or its export acts differently from the checkpoint."""


class _Served(tf.Module):
    """The deterministic policy, with its normalizers, as one function of named tensors.

    Inputs are the leaves of an observation that the policy reads, `[B, ...]`. A recurrent policy has the additional
    input "state", `float32[B, S]`, which is zero at the start of an episode. Outputs are the leaves of the action,
    within their bounds, and, for a recurrent policy, the next state. See `_names`.

    The outermost wrappers of the env are included as long as they are affine: observations and actions are then those
    of the env inside these wrappers.

    Attributes:
        observations, actions: Space of one observation and of one action.
        observation_maps, action_maps: What the included wrappers do, in the order of their effects.
        paths, action_paths: Path of each leaf, by the name of its input or output.
        next_state: Name of the output with the next state. ONNX does not allow an output to have an input's name.
        rounded: Names of the inputs that are rounded to float32 before they are normalized.
        metadata: JSON with the names, the spaces and the wrappers; see `export`.
    """

    def __init__(self, agent: Agent, format: Format, wrappers: Sequence[Wrapper]):
        super().__init__(name="policy")
        self.agent, self.observations, self.actions = agent, agent.observations.space, agent.action_space
        of_observations = affine_maps(wrappers, "observations", self.observations)
        of_actions = affine_maps(wrappers, "actions", self.actions)
        self.observation_maps = [affine for _, affine in of_observations]
        self.action_maps = [affine for _, affine in of_actions]
        self._included = [wrapper for wrapper, _ in (*of_observations, *of_actions)]
        if of_observations:
            self.observations = of_observations[0][0].inside["observations"]
        if of_actions:
            self.actions = self.action_maps[-1].space
        read = [path for path, _ in leaves(self.observations) if path not in agent.observations.critic_paths]
        self.action_paths = _names([path for path, _ in leaves(self.actions)], "action", prefixed=True)
        self.paths = _names(read, "observation", taken={*RESERVED, *self.action_paths})
        self.next_state = "next_state" if format == "onnx" else "state"
        # TFLite has no float64 arithmetic, so TensorFlow's converter fails for a policy that subtracts a float64 mean.
        self._number = np.dtype(np.float32) if format == "tflite" else None
        shifted = [path for path, _ in agent.observations.shifted if format == "tflite"]
        self.rounded = [name for name, path in self.paths.items() if path in shifted]
        inputs = {name: pick(self.observations, path) for name, path in self.paths.items()}
        specs = [tf.TensorSpec([None, *space.shape], space.dtype, name=name) for name, space in inputs.items()]
        if agent.state_size:
            specs.append(tf.TensorSpec([None, agent.state_size], tf.float32, name="state"))
        self.serve = graph_function(self._serve, input_signature=specs)
        memory = {"input": "state", "output": self.next_state, "size": agent.state_size} if agent.state_size else None
        metadata = {
            "inputs": dict(self.paths),
            "outputs": dict(self.action_paths),
            "state": memory,
            "observation_space": space_to_json(self.observations),
            "action_space": space_to_json(self.actions),
            "wrappers": [
                {"name": wrapper.name, "kwargs": dict(wrapper.kwargs), "included": self.includes(wrapper)}
                for wrapper in wrappers
            ],
        }
        self.metadata = json.dumps(_without_infinity(metadata), allow_nan=False)

    def includes(self, wrapper: Wrapper) -> bool:
        """Returns whether this wrapper is included."""
        return any(wrapper is included for included in self._included)

    def _serve(self, *inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        by_path = {
            path: tf.cast(values, tf.float32) if name in self.rounded else values
            for (name, path), values in zip(self.paths.items(), inputs, strict=False)
        }
        batch = tf.shape(inputs[0])[0]
        state = inputs[-1] if self.agent.state_size else tf.zeros([batch, 0])

        def read(path: tuple) -> tf.Tensor:
            if path not in by_path:
                unread = pick(self.observations, path)
                return tf.zeros([batch, *unread.shape], unread.dtype)
            return functools.reduce(self._mapped, self.observation_maps, by_path[path])

        actions, state = self.agent.mode(nest(self.agent.observations.space, read), state)
        outputs = {name: pick(actions, path) for name, path in self.action_paths.items()}
        for name, path in self.action_paths.items():
            if np.issubdtype((space := pick(self.agent.action_space, path)).dtype, np.floating):
                values = self._clipped(outputs[name], space)
                for affine in self.action_maps:
                    values = self._clipped(self._mapped(values, affine), affine.space)
                outputs[name] = tf.cast(values, pick(self.actions, path).dtype)
        return {**outputs, **({self.next_state: state} if self.agent.state_size else {})}

    def _mapped(self, values: tf.Tensor, affine: Affine) -> tf.Tensor:
        dtype = self._number or affine.space.dtype
        return tf.cast(values, dtype) * affine.scale.astype(dtype) + affine.offset.astype(dtype)

    def _clipped(self, values: tf.Tensor, space: spaces.Box) -> tf.Tensor:
        values = tf.cast(values, self._number or space.dtype)
        return tf.clip_by_value(values, *_inside(space, values.dtype.as_numpy_dtype))


def _without_infinity(values: Any) -> Any:
    """Returns JSON values with null for infinite numbers, which JSON lacks: bounds that do not exist."""
    if isinstance(values, dict):
        return {key: _without_infinity(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_without_infinity(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _inside(space: spaces.Box, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bounds of a Box in a dtype, rounded inward."""
    with np.errstate(over="ignore"):
        low, high = space.low.astype(dtype), space.high.astype(dtype)
    low = np.where(low < space.low, np.nextafter(low, dtype(np.inf)), low)
    high = np.where(high > space.high, np.nextafter(high, dtype(-np.inf)), high)
    return low, np.maximum(low, high)  # there may be no number between equal bounds


def _names(
    paths: Collection[tuple], root: str, *, prefixed: bool = False, taken: Collection[str] = ()
) -> dict[str, tuple]:
    """Returns the leaves of a space by names that every format, and Python as a keyword argument, accepts.

    A name is the leaf's keys joined by "_", as an ASCII identifier. It begins with `root`, the name of a leaf without
    keys, if it would otherwise be unusable, or if `prefixed`. Names differ in more than case, also from those that are
    `taken`; a number at the end ensures this.
    """
    used = {name.lower() for name in taken}

    def usable(name: str) -> bool:
        valid = name.isascii() and name.isidentifier() and name[0] != "_" and not keyword.iskeyword(name)
        return valid and name.lower() not in used

    joined = {path: "_".join(map(str, path)) for path in paths}
    names: dict[tuple, str] = {}
    for path in sorted(paths, key=lambda path: (not usable(joined[path]), len(path))):  # a usable key keeps its name
        text = re.sub(r"\W", "_", joined[path], flags=re.ASCII)
        if prefixed or not usable(text):
            text = "_".join(filter(None, [root, text]))
        numbered = (f"{text}_{number}" for number in itertools.count(2))
        names[path] = next(filter(usable, itertools.chain([text], numbered)))
        used.add(names[path].lower())
    return {names[path]: path for path in paths}


def export(
    run: Run | PathLike[str] | str, folder: Path | str, format: Format, *, checkpoint: str | int = LATEST,
    group: str | None = None, trust_modules: bool = False, warn: Callable[[str], None] = print,
) -> tuple[Path, float]:  # fmt: skip
    """Exports the policy of a run's checkpoint, and compares the two on random observations.

    The export includes the outermost wrappers of the run's envs as long as they are Gymnasium's RescaleAction,
    ClipAction or RescaleObservation: its observations and actions are then the ones inside these wrappers.

    Inputs have the dtypes of the env's observations. TFLite rounds float64 numbers to float32 before normalization, so
    the comparison fails if the policy depends on the lost digits.

    The export contains JSON with the names of its inputs and outputs: "inputs" and "outputs" map each name to the list
    of keys that lead to its leaf, and "state" has the "input", the "output" and the "size" of a recurrent policy's
    memory, or is null. "observation_space" and "action_space" describe one observation and one action, with null for
    bounds that do not exist. "wrappers" lists the wrappers of the training envs that change observations or actions,
    innermost first: the "name", the "kwargs", and whether the export has "included" the wrapper. It is
    `assets.extra/policy.json` in a SavedModel, `policy.json` in a TFLite file opened as a ZIP archive, and the metadata
    property `policy` of an ONNX model.

    Args:
        run: As for `load_policy`.
        folder: Folder for the export, created if necessary. An earlier export of the run and format is replaced.
        format: "savedmodel", a folder for TensorFlow; "tflite", a file for LiteRT; or "onnx", a file for ONNX Runtime.
        checkpoint: As for `load_policy`.
        group: As for `load_policy`.
        trust_modules: As for `load_policy`.
        warn: Called with a message for each damaged checkpoint, about the wrappers of the run's envs, and if TensorFlow
            cannot load from the file's path.

    Returns:
        The file or folder, and the largest difference between two actions or, for discrete actions, the fraction of
        actions that differ.

    Raises:
        RunError: If the run has no checkpoint that can be read, or names a network that may not be imported.
        ExportError: If the policy cannot be written in this format, or its export acts differently.
        ConfigError: If the format is unknown.
    """
    if format not in get_args(Format):
        raise ConfigError(f"format {format!r} is unknown: use one of {list(get_args(Format))}")
    run, folder = Run.open(run, trust_modules=trust_modules), Path(folder)
    agent = load_agent(run, warn, checkpoint=checkpoint, team=group)
    wrappers = wrappers_of(run)
    served = _Served(agent, format, wrappers)
    if wrappers:
        warn(_about_wrappers(run, served, wrappers))
    suffix = "" if group is None else "-" + group.replace("%", "%25").replace("/", "%2F")
    target = folder / f"{run.path.resolve().name}{suffix}.{format}"
    try:
        with part_of(folder) as part, readable(part) as plain:
            written, act = _write(served, plain / "savedmodel", format)
            difference = _difference(Policy(agent), served, act)
            if target.is_dir():
                shutil.rmtree(target)
            os.replace(written, target)
    except ExportError:
        raise
    except (OSError, tf.errors.OpError) as error:
        raise ExportError(f"cannot write {target}: {error}. Choose another folder (--outdir).") from error
    except Exception as error:  # the types of converters' and runtimes' errors are private
        remedy = "" if format == "savedmodel" else " Export a savedmodel instead."
        raise ExportError(f"this policy cannot be exported as {format}: {first_line(error)}.{remedy}") from error
    if format == "savedmodel" and is_pattern(target):
        warn(f"TensorFlow cannot load from {target}, because it takes brackets and backslashes for a pattern: move it")
    return target, difference


def names_in(path: Path) -> str:
    """Returns the names of the inputs and outputs of an export, each with its keys in the space if these differ."""
    if path.suffix == ".savedmodel":
        text: str | bytes = (path / "assets.extra" / METADATA).read_text()
    elif path.suffix == ".tflite":
        with zipfile.ZipFile(path) as archive:
            text = archive.read(METADATA)
    else:
        import onnx

        text = {entry.key: entry.value for entry in onnx.load(path).metadata_props}["policy"]
    metadata = json.loads(text)

    def named(paths: dict[str, list], memory: str) -> str:
        keys = {name: "_".join(map(str, path)) for name, path in paths.items()}
        names = [name if key in ("", name) else f"{name} (key {key})" for name, key in keys.items()]
        return ", ".join([*names, *([metadata["state"][memory]] if metadata["state"] else [])])

    return f"inputs: {named(metadata['inputs'], 'input')}; outputs: {named(metadata['outputs'], 'output')}"


def _about_wrappers(run: Run, served: _Served, wrappers: Sequence[Wrapper]) -> str:
    """Returns which wrappers the export includes, and which the user must apply."""
    included = [wrapper.name for wrapper in wrappers if served.includes(wrapper)]
    missing = [wrapper.name for wrapper in wrappers if not served.includes(wrapper)]
    told = [f"the envs of {run.path} have wrappers."]
    if included:
        told.append(f"The export includes {', '.join(included)}: its inputs and outputs are those of the env inside.")
    if missing:
        told.append(
            f"The export does not include {', '.join(missing)}: apply their effects to its inputs and outputs. An "
            "export can include Gymnasium's RescaleAction, ClipAction and RescaleObservation, if all envs have them "
            "and it includes the wrappers outside them."
        )
    return " ".join(told)


def _write(served: _Served, saved: Path, format: Format) -> tuple[Path, Act]:
    """Writes the policy and loads it. Returns its path and the loaded policy."""
    if format == "onnx":
        file = saved.with_suffix(".onnx")
        file.write_bytes(_onnx(served))
        return file, _load_onnx(file)
    tf.saved_model.save(served, str(saved), signatures={SIGNATURE: served.serve})
    if format == "savedmodel":
        (saved / "assets.extra").mkdir()
        (saved / "assets.extra" / METADATA).write_text(served.metadata)
        return saved, _load_savedmodel(saved)
    file = saved.with_suffix(".tflite")
    file.write_bytes(tf.lite.TFLiteConverter.from_saved_model(str(saved)).convert())
    with zipfile.ZipFile(file, "a") as archive:  # TFLite's convention for files that belong to a model
        archive.writestr(METADATA, served.metadata)
    return file, _load_tflite(file)


def _onnx(served: _Served) -> bytes:
    """Returns the policy as an ONNX model."""
    try:
        import onnx
        import onnxruntime  # noqa: F401 - for the comparison
        import tf2onnx
    except ImportError as error:
        raise ExportError(
            f"{error.name} is missing, but ONNX exports need it: `pip install 'vecenv-ppo[onnx]'`"
        ) from error
    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)  # ONNX Runtime's error names an unknown operation, too
    model, _ = tf2onnx.convert.from_function(
        served.serve, served.serve.input_signature, custom_op_handlers={"Erfc": (_erfc, [])}
    )
    for tensor in (*model.graph.input, *model.graph.output):
        tensor.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(model, {"policy": served.metadata})
    return model.SerializeToString()


def _erfc(graph: Any, node: Any, name: str, args: list) -> None:
    """Replaces erfc(x), which tf2onnx does not know, with 1 - erf(x). TensorFlow's GELU contains it."""
    node.type = "Erf"
    one = graph.make_const(f"{name}/one", np.ones([], np.float32)).output[0]
    graph.insert_new_node_on_output("Sub", node.output[0], f"{name}/complement", [one, node.output[0]])


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


def _load_onnx(file: Path) -> Act:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def _difference(policy: Policy, served: _Served, act: Act) -> float:
    """Returns the difference between the actions of the export and of the checkpoint on random observations.

    Raises ExportError if it is too large.
    """
    wanted: list[Any] = []
    found: list[Arrays] = []
    state = served.agent.initial_state(NUM_TRIALS)
    for step in range(NUM_STEPS):  # consecutive steps, to include a recurrent policy's memory
        batch = _random_observations(served, seed=step)
        raw = functools.reduce(lambda values, affine: affine.undo(values), reversed(served.observation_maps), batch)
        inputs = {name: pick(raw, path) for name, path in served.paths.items()}
        found.append(act({**inputs, **({"state": state} if served.agent.state_size else {})}))
        state = found[-1].get(served.next_state, state)
        seen = functools.reduce(lambda values, affine: affine(values), served.observation_maps, raw)
        taken = functools.reduce(lambda values, affine: affine.clipped(values), served.action_maps, policy(seen))
        wanted.append(taken)
    differences = []
    for name, path in served.action_paths.items():
        before = np.concatenate([pick(actions, path) for actions in wanted])
        after = np.concatenate([actions[name] for actions in found])
        if before.shape != after.shape or before.dtype != after.dtype:
            raise ExportError(f"the export returns {after.dtype}{after.shape} instead of {before.dtype}{before.shape}")
        if np.issubdtype(before.dtype, np.floating):
            difference, most = np.abs(before - after).max(), TOLERANCE * max(np.ptp(before), np.abs(before).max())
        else:
            difference, most = (before != after).mean(), MAX_FLIPPED
        if not difference <= most:  # this form also rejects NaN
            names = ", ".join(served.rounded)
            hint = f" TFLite rounds {names} to float32: export a savedmodel instead." if names else ""
            raise ExportError(
                f"the export acts differently from the checkpoint: its actions differ by {difference:.2g}.{hint}"
            )
        differences.append(float(difference))
    return max(differences)


def _random_observations(served: _Served, seed: int) -> Any:
    """Returns a batch of random observations whose masks allow at least one action in each group.

    Numbers that float32 would round have the mean and the standard deviation of the observations in training.
    """
    agent = served.agent
    space = agent.observations.space
    rng = np.random.default_rng(seed)

    def sampled(path: tuple) -> np.ndarray:
        leaf = pick(space, path)
        if leaf.dtype == np.float64:  # Gymnasium cannot sample from a range whose length overflows
            low, high = (np.where(np.isfinite(x), np.clip(x, -1e300, 1e300), x) for x in (leaf.low, leaf.high))
            leaf = spaces.Box(low, high, dtype=np.float64)
        leaf.seed(int(rng.integers(2**31)))
        return np.stack([leaf.sample() for _ in range(NUM_TRIALS)])

    batch = nest(space, sampled)
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
