"""Tests of exports: they act like the checkpoint for every kind of space and policy, and no partial export is left."""

import contextlib
import functools
import itertools
import json
import os
import pickle
import subprocess
import sys
import zipfile

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import ppo
import vecenv
from ppo import Run, export
from ppo.results import export as exports
from ppo.results.export import ExportError
from ppo.run.spaces import space_to_json
from ppo.run.wrappers import agreed, describe, describe_each
from tests.ppo.runs import command, untrained_run, with_reports
from vecenv.tree import leaves, nest, pick

FORMATS = ["savedmodel", "tflite", "onnx"]
ONE_FORMAT = ["onnx", *(pytest.param(format, marks=pytest.mark.slow) for format in FORMATS[:2])]
VECTOR = spaces.Box(-1, 1, (3,), np.float32)
CASES = {
    "vector to Box": (VECTOR, spaces.Box(-0.05, 0.03, (2,)), {"policy_output_gain": 1.0}),
    "tanh": (VECTOR, spaces.Box(-3, 1, (2, 2)), {"action_transform": "tanh", "activation": "elu"}),
    "float64": (
        spaces.Box(-np.finfo(np.float64).max, np.finfo(np.float64).max, (3,), np.float64),
        spaces.Box(-0.3, 0.1, (2,), np.float64),
        {"policy_output_gain": 9.0},
    ),
    "GRU": (VECTOR, spaces.Box(-2, 2, (2,)), {"recurrent": "gru", "policy_output_gain": 1.0}),
    "LSTM to Discrete": (VECTOR, spaces.Discrete(3, start=2), {"recurrent": "lstm", "policy_output_gain": 1.0}),
    "image to MultiBinary": (spaces.Box(0, 255, (48, 48, 3), np.uint8), spaces.MultiBinary(3), {}),
    "impala": (
        spaces.Box(0, 255, (48, 40, 3), np.uint8),
        spaces.Box(-1, 1, (2,)),
        {"cnn": "impala", "policy_output_gain": 1.0},
    ),
    "small image": (
        spaces.Box(0, 9, (7, 6, 3), np.uint8),
        spaces.Box(-1, 1, (2,)),
        {"cnn": "small", "policy_output_gain": 1.0},
    ),
    "Tuple": (
        spaces.Tuple((spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.MultiBinary(3))),
        spaces.Discrete(2),
        {},
    ),
    "Dict with mask": (
        spaces.Dict(
            {
                "a/b": spaces.Box(-np.inf, np.inf, (2, 2)),
                "nothing": spaces.Box(-1, 1, (0,)),
                "one": spaces.Discrete(4),
                "many": spaces.MultiDiscrete([2, 3]),
                "action_mask": spaces.MultiBinary(5),
            }
        ),
        spaces.MultiDiscrete([2, 3]),
        {"policy_output_gain": 1.0},
    ),
}


QUICK = {
    "savedmodel": ("tanh", "image to MultiBinary", "Tuple"),
    "tflite": ("float64", "GRU", "small image", "Dict with mask"),
    "onnx": ("vector to Box", "LSTM to Discrete", "Tuple", "Dict with mask"),
}


@pytest.mark.parametrize(
    ("case", "format"),
    [
        pytest.param(case, format, marks=() if case in QUICK[format] else pytest.mark.slow)
        for case in CASES
        for format in FORMATS
    ],
)
def test_an_export_acts_like_the_checkpoint(tmp_path, case, format):
    observation_space, action_space, settings = CASES[case]
    run = untrained_run(tmp_path / "runs", observation_space, action_space, minibatch_size=64, **settings)
    path, difference = export(run, tmp_path / "out", format)
    assert difference <= 1e-5
    assert [file.name for file in (tmp_path / "out").iterdir()] == [path.name] == [f"{run.path.name}.{format}"]


@pytest.mark.parametrize(("dtype", "works"), [(np.float32, True), (np.float64, False)])
def test_tensorflows_converter_alone_fails_for_float64_observations(tmp_path, dtype, works):
    """Otherwise, converting the SavedModel could replace the format. Observations of MuJoCo tasks are float64."""
    space = spaces.Box(-np.inf, np.inf, (3,), dtype)
    path, _ = export(untrained_run(tmp_path / "runs", space, spaces.Discrete(2)), tmp_path / "out", "savedmodel")
    converter = tf.lite.TFLiteConverter.from_saved_model(str(path))
    with contextlib.nullcontext() if works else pytest.raises(Exception, match="Could not translate"):
        converter.convert()


def test_inputs_and_outputs_are_named_after_the_spaces(tmp_path):
    observation_space, action_space, _ = CASES["Dict with mask"]
    run = untrained_run(tmp_path, observation_space, action_space)
    path, _ = export(run, tmp_path / "out", "savedmodel")
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    assert set(signature.structured_input_signature[1]) == {"a_b", "nothing", "one", "many", "action_mask"}
    assert set(signature.structured_outputs) == {"action"}
    keys = {"a_b": ["a/b"], "nothing": ["nothing"], "one": ["one"], "many": ["many"], "action_mask": ["action_mask"]}
    metadata = read_metadata(path)
    assert metadata == {**metadata, "inputs": keys, "outputs": {"action": []}, "state": None, "wrappers": []}
    assert metadata["action_space"] == {"type": "MultiDiscrete", "dtype": "int64", "nvec": [2, 3], "start": [0, 0]}
    members = dict(metadata["observation_space"]["spaces"])
    assert members["a/b"] == {"type": "Box", "dtype": "float32", "shape": [2, 2], "low": None, "high": None}


def test_exported_actions_are_within_bounds_and_equal_the_actions_of_load_policy(tmp_path):
    observation_space, action_space, settings = CASES["vector to Box"]
    run = untrained_run(tmp_path, observation_space, action_space, **{**settings, "policy_output_gain": 10.0})
    path, _ = export(run, tmp_path / "out", "savedmodel")
    observations = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    actions = tf.saved_model.load(str(path)).signatures["serving_default"](observation=observations)["action"].numpy()
    assert (actions == action_space.low).any() and (actions == action_space.high).any()  # some actions are clipped
    np.testing.assert_allclose(actions, ppo.load_policy(run.path)(observations), atol=1e-6)


class Motors(gym.Env):
    """Has bounds of every kind: two, one, none."""

    def __init__(self, dtype=np.float32):
        low, high = np.array([[-3, 0, -np.inf, -np.inf], [5, np.inf, 1, np.inf]], dtype)
        self.observation_space = spaces.Box(low, high, dtype=dtype)
        self.action_space = spaces.Box(np.array([-2, 0], dtype), np.array([2, 50], dtype), dtype=dtype)


def rescaled_observation(env):
    low, high = np.array([-1, 2, -np.inf, -np.inf]), np.array([1, np.inf, 7, np.inf])
    return gym.wrappers.RescaleObservation(env, low, high)


def rescaled_action(env):
    return gym.wrappers.RescaleAction(env, np.float32(-1), np.array([1.0, 3.0]))


def doubled(env):
    return gym.wrappers.TransformAction(env, lambda action: 2 * action, env.action_space)


class Noise(gym.Wrapper):
    """May change everything."""


STACKS = {
    "rescaled": ([rescaled_observation, rescaled_action], 2),
    "twice": ([rescaled_action, lambda env: gym.wrappers.TimeLimit(env, 9),
               lambda env: gym.wrappers.RescaleAction(env, -5.0, 5.0),
               lambda env: gym.wrappers.StickyAction(env, 0.1)], 2),
    "clipped": ([rescaled_action, gym.wrappers.ClipAction], 2),
    "affine inside others": ([rescaled_observation, rescaled_action, doubled, gym.wrappers.FlattenObservation], 0),
    "affine outside others": ([doubled, rescaled_action, gym.wrappers.FlattenObservation, rescaled_observation], 2),
    "unknown": ([rescaled_action, rescaled_observation, Noise], 0),
}  # fmt: skip
"""Wrappers, innermost first, and how many of them an export can include."""


QUICK_STACKS = {("rescaled", np.float32), ("affine outside others", np.float64), ("unknown", np.float32)}


@pytest.mark.parametrize("format", ONE_FORMAT)
@pytest.mark.parametrize(
    ("stack", "dtype"),
    [
        pytest.param(*case, marks=() if case in QUICK_STACKS else pytest.mark.slow)
        for case in itertools.product(STACKS, [np.float32, np.float64])
    ],
)
def test_an_export_includes_the_outermost_affine_wrappers_and_names_the_others(tmp_path, stack, dtype, format):
    env = Motors(dtype)
    for wrapper in STACKS[stack][0]:
        env = wrapper(env)
    run = untrained_run(tmp_path / "runs", env.observation_space, env.action_space, policy_output_gain=9.0)
    run.write_spaces({"": (env.observation_space, env.action_space)}, given=True, wrappers=describe(env))
    messages = []
    path, _ = export(run, tmp_path / "out", format, warn=messages.append)
    listed = read_metadata(path)["wrappers"]
    chain = [env]
    while isinstance(chain[-1], gym.Wrapper):
        chain.append(chain[-1].env)
    concerned = [one for one in chain[-2::-1] if not isinstance(one, gym.wrappers.TimeLimit)]
    assert [item["name"].rpartition(":")[2] for item in listed] == [type(one).__name__ for one in concerned]
    included = [one for one, item in zip(concerned, listed, strict=True) if item["included"]]
    assert len(included) == STACKS[stack][1]
    raw = np.array([[4.0, 0.5, -2.0, 0.3], [-3.0, 3.0, 0.9, -1.0]], dtype)
    seen = list(raw)
    for one in included:
        if isinstance(one, gym.ObservationWrapper):
            seen = list(map(one.observation, seen))
    actions = list(ppo.load_policy(run)(np.array(seen, dtype)))
    for one in reversed(included):
        if isinstance(one, gym.ActionWrapper):
            inside = one.env.action_space
            actions = [np.clip(one.action(action), inside.low, inside.high) for action in actions]
    np.testing.assert_allclose(load_export(path)(observation=raw)["action"], actions, rtol=1e-4, atol=1e-5)
    (message,) = messages
    missing = len(listed) - len(included)
    assert ("export includes" in message) == bool(included) and ("does not include" in message) == bool(missing)


def test_the_metadata_hold_the_arguments_of_wrappers_and_the_space_of_the_actions(tmp_path):
    env = rescaled_action(Motors())
    run = untrained_run(tmp_path / "runs", env.observation_space, env.action_space)
    run.write_spaces({"": (env.observation_space, env.action_space)}, given=True, wrappers=describe(env))
    path, _ = export(run, tmp_path / "out", "savedmodel", warn=lambda message: None)
    metadata = read_metadata(path)
    kwargs = {"min_action": -1.0, "max_action": [1.0, 3.0]}
    assert metadata["wrappers"] == [{"name": "RescaleAction", "kwargs": kwargs, "included": True}]
    bounds = {"low": [-2.0, 0.0], "high": [2.0, 50.0]}
    assert metadata["action_space"] == {"type": "Box", "dtype": "float32", "shape": [2], **bounds}
    assert metadata["observation_space"]["low"] == [-3.0, 0.0, None, None]


WRAPPED = ('RescaleAction:{"min_action": -1.0, "max_action": 1.0}', 'TimeLimit:{"max_episode_steps": 9}')


def test_a_run_records_the_wrappers_of_its_envs(tmp_path):
    """A policy of Pendulum whose actions are rescaled turns the motor with twice its own actions."""
    sizes = {"num_envs": 2, "num_steps": 16, "minibatch_size": 16, "total_steps": 32, "num_workers": 1, "epochs": 1}
    config = ppo.Config(env="Pendulum-v1", wrappers=WRAPPED, eval_episodes=1, policy_output_gain=9.0, **sizes)
    run = ppo.train(config, logdir=tmp_path, progress=False).path
    path, _ = export(run, tmp_path / "out", "savedmodel", warn=lambda message: None)
    with pytest.warns(UserWarning, match=r"an env with the wrappers RescaleAction: use it with `vecenv.make_single"):
        policy = ppo.load_policy(run)
    observations = np.array([[1.0, 0.0, 3.0], [0.0, 1.0, -2.0]], np.float32)
    np.testing.assert_allclose(
        load_export(path)(observation=observations)["action"], 2 * policy(observations), rtol=1e-5
    )
    assert [item["name"] for item in read_metadata(path)["wrappers"]] == ["RescaleAction"]


def test_wrappers_that_only_some_envs_have_are_named_and_not_included():
    makes = [lambda: Motors(np.float64), lambda: rescaled_observation(Motors(np.float64))]
    with vecenv.SyncVectorEnv(makes, observation_mode="different") as envs:
        found = agreed(describe_each(ppo.Config(), envs))
    assert [(one["name"], one["inside"]) for one in found] == [("RescaleObservation", {})]


class Recording(gym.Wrapper, gym.utils.RecordConstructorArgs):
    """A wrapper that takes any arguments."""

    def __init__(self, env, **kwargs):
        gym.utils.RecordConstructorArgs.__init__(self, **kwargs)
        gym.Wrapper.__init__(self, env)


def test_arguments_of_wrappers_that_json_cannot_hold_become_names_of_types():
    circular: dict = {}
    circular["again"] = circular
    number = np.longdouble(1)  # `tolist` returns it unchanged
    env = Recording(Motors(), function=np.tanh, circular=circular, number=number, keys={(0, 1): 2, "a": 3}, gap=np.nan)
    (found,) = describe(env)
    kwargs = {"function": "tanh", "circular": "<class 'dict'>", "number": str(np.longdouble), "keys": {"a": 3}}
    assert found["kwargs"] == {**kwargs, "gap": pytest.approx(np.nan, nan_ok=True)}
    with_gap = describe(Recording(Motors(), gap=np.nan))
    assert agreed([with_gap, pickle.loads(pickle.dumps(with_gap))]) == with_gap, "NaN is not a difference"


def test_wrappers_that_differ_only_in_the_spaces_inside_them_are_named_once():
    each = [
        [{"name": "RescaleObservation", "kwargs": {}, "changes": ["observations"], "inside": {"observations": space}}]
        for space in (None, space_to_json(VECTOR))
    ]
    assert agreed(each) == [{**each[0][0], "inside": {}}]


def test_vector_envs_that_are_stepped_in_one_call_have_no_wrappers():
    with vecenv.make("HalfCheetah-v5", 2, num_workers=0) as envs:
        assert describe_each(ppo.Config(), envs) == []


def test_a_run_without_a_record_of_its_wrappers_names_those_of_its_settings(tmp_path):
    run = untrained_run(tmp_path / "runs", VECTOR, spaces.Box(-1, 1, (2,)), wrappers=[*WRAPPED, "module:Wrapper"])
    messages = []
    path, _ = export(run, tmp_path / "out", "savedmodel", warn=messages.append)
    assert "does not include RescaleAction, module:Wrapper" in messages[0]
    assert [item["included"] for item in read_metadata(path)["wrappers"]] == [False, False]


def test_a_damaged_record_of_wrappers_is_an_error(tmp_path):
    run = untrained_run(tmp_path / "runs", VECTOR, spaces.Box(-1, 1, (2,)))
    run.write_spaces({"": (VECTOR, spaces.Box(-1, 1, (2,)))}, given=True, wrappers=[{"name": "RescaleAction"}])
    with pytest.raises(ppo.RunError, match=r"the wrappers in .*spaces\.json cannot be read"):
        export(run, tmp_path / "out", "savedmodel")


class Linear(tf.Module):
    """A network with one layer, whose outputs include the result of an operation on its inputs."""

    def __init__(self, num_outputs, operation):
        super().__init__()
        self.weights, self._operation = tf.Variable(tf.ones([3, num_outputs]) / 10), operation

    def __call__(self, inputs):
        outputs = inputs @ self.weights + self._operation(inputs)[:, None]
        return outputs, outputs[:, :1]


def restless_network(inputs, num_outputs, seed):
    """Acts differently in each graph."""
    graphs = itertools.count()
    return Linear(num_outputs, lambda x: 0 * x[:, 0] + next(graphs) / 100)


def determinant_network(inputs, num_outputs, seed):
    return Linear(num_outputs, lambda x: tf.linalg.det(x[:, :1, None]))


def gamma_network(inputs, num_outputs, seed):
    return Linear(num_outputs, lambda x: tf.math.lgamma(x[:, 0]))


def run_of_network(folder, network, action_space):
    run = untrained_run(folder, VECTOR, action_space, network=f"{__name__}:{network}")
    return Run.open(run, trust_modules=True)


@pytest.mark.parametrize("format", ONE_FORMAT)
def test_an_export_that_acts_differently_is_an_error_and_leaves_nothing(tmp_path, format):
    run = run_of_network(tmp_path / "runs", "restless_network", spaces.Box(-1, 1, (2,)))
    with pytest.raises(ExportError, match=r"acts differently from the checkpoint: its actions differ by 0\.0"):
        export(run, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("format", "network", "error"),
    [
        ("tflite", "determinant_network", ".*"),
        ("tflite", "gamma_network", ".*"),  # the converter succeeds, but the file cannot run
        ("onnx", "gamma_network", ".*Lgamma.*"),
    ],
)
def test_an_operation_that_a_format_lacks_is_a_one_sentence_error_and_leaves_nothing(tmp_path, format, network, error):
    run = run_of_network(tmp_path / "runs", network, spaces.Discrete(2))
    with pytest.raises(
        ExportError, match=rf"this policy cannot be exported as {format}: {error}\. Export a savedmodel"
    ):
        export(run, tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["tf2onnx", "onnxruntime"])
def test_a_missing_package_is_an_error_that_names_the_extra_and_leaves_nothing(tmp_path, monkeypatch, package):
    run = untrained_run(tmp_path / "runs", VECTOR, spaces.Discrete(2))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExportError, match=rf"{package} is missing.*\[onnx\]"):
        export(run, tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


class Odometer(gym.Env):
    """Rewards the action that equals the last bit of a large number. The critic sees another large number."""

    action_space = spaces.Discrete(2)

    def __init__(self, dtype):
        self._dtype = dtype
        number = spaces.Box(0, 2 * 10**9, (1,), dtype)
        self.observation_space = spaces.Dict(inside=number, z=number)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action):
        self._steps += 1
        reward = float(action == self._bit)  # before the next bit is drawn
        return self._observe(), reward, False, self._steps == 8, {}

    def _observe(self):
        self._bit = self.np_random.integers(2)
        numbers = np.array([[10**9 + self._bit], [10**9 - self._bit]], self._dtype)
        return {"z": numbers[0], "inside": numbers[1]}


def bit_network(inputs, num_outputs, seed):
    import keras

    keras.utils.set_random_seed(seed)
    numbers = {key: keras.Input(spec.shape[1:]) for key, spec in inputs.items()}
    hidden = keras.layers.Dense(16, activation="tanh")(keras.layers.Concatenate()(list(numbers.values())))
    return keras.Model(numbers, [keras.layers.Dense(num_outputs)(hidden), keras.layers.Dense(1)(hidden)])


def gelu_network(inputs, num_outputs, seed):
    import keras

    keras.utils.set_random_seed(seed)
    x = keras.Input(inputs.shape[1:])
    hidden = keras.layers.LayerNormalization()(keras.layers.Dense(16, activation="gelu")(x))
    return keras.Model(x, [keras.layers.Dense(num_outputs)(hidden), keras.layers.Dense(1)(hidden)])


@pytest.mark.parametrize("format", ONE_FORMAT)
def test_a_custom_network_can_be_exported(tmp_path, format):
    run = run_of_network(tmp_path / "runs", "gelu_network", spaces.Box(-1, 1, (2,)))
    assert export(run, tmp_path / "out", format)[1] <= 1e-5


@pytest.mark.slow  # tests/ppo/model/test_observations.py checks the conversion
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (np.float64, {"critic_keys": ("inside",)}),
        (np.int64, {"network": f"{__name__}:bit_network"}),
        (np.float64, {"recurrent": "gru", "recurrent_units": 8}),
    ],
    ids=["float64 and critic keys", "int64 and custom network", "float64 and GRU"],
)
def test_a_bit_on_top_of_a_large_number_reaches_every_reader_of_observations(tmp_path, dtype, settings):
    sizes = {"num_envs": 8, "num_steps": 32, "minibatch_size": 64, "epochs": 4, "num_workers": 0}
    config = ppo.Config(env="", learning_rate=1e-2, eval_episodes=4, total_steps=256 * 12, **sizes, **settings)
    make = functools.partial(Odometer, dtype)
    result = ppo.train(config, make, logdir=tmp_path / "runs", progress=False)
    np.testing.assert_array_equal(result.evaluation.returns, 8)
    resumed = ppo.resume(result.path, total_steps=256 * 14, envs=make, progress=False, trust_modules=True)
    np.testing.assert_array_equal(resumed.evaluation.returns, 8)
    run = Run.open(result.path, trust_modules=True)
    bit = np.array([[0], [1], [0], [1]])
    batch = {"z": (10**9 + bit).astype(dtype), "inside": (10**9 - bit).astype(dtype)}
    np.testing.assert_array_equal(ppo.load_policy(run)(batch), [0, 1, 0, 1])
    path, difference = export(run, tmp_path / "out", "savedmodel")
    assert difference == 0
    assert export(run, tmp_path / "out", "onnx")[1] == 0
    act = tf.saved_model.load(str(path)).signatures["serving_default"]
    inputs = {name: batch[name] for name in act.structured_input_signature[1] if name in batch}
    state = {"state": np.zeros([4, 8], np.float32)} if "recurrent" in settings else {}
    outputs = act(**{name: tf.constant(values) for name, values in (inputs | state).items()})
    np.testing.assert_array_equal(outputs["action"], [0, 1, 0, 1])
    with pytest.raises(ExportError, match=r"TFLite rounds .*z.* to float32: export a savedmodel"):
        export(run, tmp_path / "out", "tflite")


KEYS = ["state", "next_state", "self", "class", "_x", "x", "Q", "q", "é", "a b", "a/b", "a.b", "a_b", "", "1"]
KEYS += ["action", "observation"]
ODD_KEYS = spaces.Dict(
    [(key, VECTOR) for key in KEYS]
    + [("n", spaces.Dict(a=VECTOR, b=spaces.Tuple([VECTOR, spaces.Discrete(3)]))), ("n_a", VECTOR), ("n_b_0", VECTOR)]
)
"""Keys that are not identifiers, that are keywords or names of arguments, or that give the same name."""


def read_metadata(path):
    if path.suffix == ".savedmodel":
        return json.loads((path / "assets.extra" / "policy.json").read_text())
    if path.suffix == ".tflite":
        return json.loads(zipfile.ZipFile(path).read("policy.json"))
    import onnxruntime

    return json.loads(onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map["policy"])


def load_export(path):
    """Returns a function that takes and returns dicts of arrays."""
    if path.suffix == ".savedmodel":
        signature = tf.saved_model.load(str(path)).signatures["serving_default"]
        return lambda **inputs: {name: value.numpy() for name, value in signature(**inputs).items()}
    if path.suffix == ".tflite":
        from ai_edge_litert.interpreter import Interpreter

        return Interpreter(model_path=str(path)).get_signature_runner("serving_default")
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    assert all(tensor.shape[0] == "batch" for tensor in (*session.get_inputs(), *session.get_outputs()))
    names = [tensor.name for tensor in session.get_outputs()]
    return lambda **inputs: dict(zip(names, session.run(None, inputs), strict=True))


def random_leaf(space, number, rng, path):
    leaf = pick(space, path)
    return rng.integers(0, 2, [number, *leaf.shape]).astype(leaf.dtype)


@pytest.mark.parametrize("format", ONE_FORMAT)
def test_the_metadata_tells_which_keys_lead_to_each_input_and_output(tmp_path, format):
    """A loop as on a robot, which knows only the metadata, acts like the policy, with batches of any size."""
    space = ODD_KEYS
    odd = ("state", "next_state", "Q", "q", "é", "a/b", "a_b", "")
    actions = spaces.Dict([(key, spaces.Discrete(2)) for key in odd] + [("box", spaces.Box(-1, 1, (2,)))])
    settings = {"recurrent": "gru", "recurrent_units": 8, "minibatch_size": 64, "policy_output_gain": 1.0}
    run = untrained_run(tmp_path / "runs", space, actions, **settings)
    path, difference = export(run, tmp_path / "out", format)
    assert difference <= 1e-5
    metadata, act, policy = read_metadata(path), load_export(path), ppo.load_policy(run.path)
    assert len({name.lower() for name in metadata["inputs"]}) == len(leaves(space))
    assert all(name.isidentifier() and name.isascii() for name in [*metadata["inputs"], *metadata["outputs"]])
    assert {metadata["inputs"][key] == [key] for key in ("x", "a_b", "n_a", "observation")} == {True}
    memory = metadata["state"]
    for number in (1, 5):
        policy.reset()
        state = np.zeros([number, memory["size"]], np.float32)
        for seed in range(2):
            rng = np.random.default_rng(seed)
            batch = nest(space, functools.partial(random_leaf, space, number, rng))
            outputs = act(
                **{name: pick(batch, keys) for name, keys in metadata["inputs"].items()}, **{memory["input"]: state}
            )
            state = outputs[memory["output"]]
            expected = policy(batch)
            for name, keys in metadata["outputs"].items():
                np.testing.assert_allclose(outputs[name], pick(expected, keys), atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("flipped", "fine"), [(1, True), (4, False)])
def test_one_tie_broken_by_rounding_is_not_an_error_but_several_are(tmp_path, monkeypatch, flipped, fine):
    """The check compares 256 discrete actions."""
    run = untrained_run(tmp_path / "runs", VECTOR, spaces.Discrete(2), policy_output_gain=1.0)
    read, calls = exports._load_savedmodel, []

    def reading(path):
        act = read(path)

        def flipping(inputs):
            action = act(inputs)["action"].copy()
            calls.append(1)
            action[: flipped if len(calls) == 1 else 0] ^= 1
            return {"action": action}

        return flipping

    monkeypatch.setattr(exports, "_load_savedmodel", reading)
    if fine:
        assert export(run, tmp_path / "out", "savedmodel")[1] == 1 / 256
    else:
        with pytest.raises(ExportError, match="acts differently"):
            export(run, tmp_path / "out", "savedmodel")


def test_nan_and_errors_in_small_actions_are_detected(tmp_path, monkeypatch):
    run = untrained_run(tmp_path / "runs", VECTOR, spaces.Box(-1e-4, 1e-4, (2,)), policy_output_gain=1.0)
    for wrong in (lambda action, call: action * 0, lambda action, call: action / (call != 2)):
        calls = []

        def reading(path, wrong=wrong, calls=calls, read=exports._load_savedmodel):
            act = read(path)

            def acting(inputs):
                calls.append(1)
                with np.errstate(all="ignore"):
                    return {"action": wrong(act(inputs)["action"], len(calls))}

            return acting

        with monkeypatch.context() as patch, pytest.raises(ExportError, match="acts differently"):
            patch.setattr(exports, "_load_savedmodel", reading)
            export(run, tmp_path / "out", "savedmodel")


@pytest.mark.parametrize("format", FORMATS)
def test_the_command_prints_the_names_of_the_inputs_and_outputs(tmp_path, capsys, format):
    space = spaces.Dict(state=VECTOR, goal=spaces.Dict(x=VECTOR))
    run = untrained_run(tmp_path / "runs", space, spaces.Dict(hand=spaces.Discrete(2)), recurrent="gru")
    assert command("export", [run.path, "--format", format, "--outdir", tmp_path / "out"]) == 0
    memory = "next_state" if format == "onnx" else "state"
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"inputs: observation_state (key state), goal_x, state; outputs: action_hand (key hand), {memory}"
    )


def test_a_new_export_replaces_the_previous_one(tmp_path):
    run = untrained_run(tmp_path / "runs", VECTOR, spaces.Discrete(2))
    for _ in range(2):
        path, _ = export(run, tmp_path / "out", "savedmodel")
    assert len(list((tmp_path / "out").iterdir())) == 1 and (path / "saved_model.pb").is_file()


def test_an_export_runs_without_ppo_and_vecenv(tmp_path, capsys):
    run = untrained_run(tmp_path / "runs", VECTOR, spaces.Box(-1, 1, (2,)))
    for format in FORMATS:
        assert command("export", [str(run.path), "--format", format, "--outdir", str(tmp_path / "out")]) == 0
        assert "differ from the checkpoint's by at most" in capsys.readouterr().out
    code = f"""
import sys
sys.modules["ppo"] = sys.modules["vecenv"] = sys.modules["gymnasium"] = None
import numpy as np
from ai_edge_litert.interpreter import Interpreter
lite = Interpreter({str(tmp_path / "out" / (run.path.name + ".tflite"))!r}).get_signature_runner("serving_default")
a = lite(observation=np.full([1, 3], 0.5, np.float32))["action"]
import onnxruntime
session = onnxruntime.InferenceSession({str(tmp_path / "out" / (run.path.name + ".onnx"))!r})
(c,) = session.run(["action"], dict(observation=np.full([1, 3], 0.5, np.float32)))
assert "tensorflow" not in sys.modules
import tensorflow as tf
saved = tf.saved_model.load({str(tmp_path / "out" / (run.path.name + ".savedmodel"))!r}).signatures["serving_default"]
b = saved(observation=tf.fill([1, 3], 0.5))["action"].numpy()
assert a.shape == b.shape == (1, 2) and abs(a - b).max() < 1e-6 and abs(c - b).max() < 1e-6, (a, b, c)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_a_one_sentence_error(tmp_path):
    run = untrained_run(tmp_path / "runs", VECTOR, spaces.Discrete(2))
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(ExportError, match="Choose another folder"):
        export(run, tmp_path / "out", "savedmodel")


def test_an_unknown_format_is_an_error_that_names_the_formats_and_leaves_nothing(tmp_path):
    run = untrained_run(tmp_path / "runs", VECTOR, spaces.Discrete(2))
    with pytest.raises(
        ppo.ConfigError, match=r"'saved_model' is unknown: use one of \['savedmodel', 'tflite', 'onnx'\]"
    ):
        export(run, tmp_path / "out", "saved_model")
    assert not (tmp_path / "out").exists()


def test_a_file_in_place_of_the_folder_is_a_one_sentence_error(tmp_path):
    run = untrained_run(tmp_path / "runs", VECTOR, spaces.Discrete(2))
    (tmp_path / "out").write_text("")
    with pytest.raises(ExportError, match="Choose another folder"):
        export(run, tmp_path / "out", "savedmodel")


def test_the_policy_of_a_registered_env_can_be_exported(tmp_path):
    env = gym.make("CartPole-v1")
    run = untrained_run(tmp_path, env.observation_space, env.action_space, env="CartPole-v1", given=False)
    assert export(run, tmp_path / "out", "tflite")[1] <= 0.01


FULL_DISK = """
import resource, sys
from ppo.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for words in {commands!r}:
    try:
        main(words)
    except SystemExit as ended:
        print(ended.code)
        print("end of", words, file=sys.stderr)
"""


def test_a_full_disk_is_a_one_sentence_error_and_leaves_nothing(tmp_path):
    """A limit of two kilobytes per file stands in for a full disk. One process runs all commands."""
    box = gym.make("CartPole-v1").observation_space
    run = untrained_run(tmp_path / "runs", box, spaces.Discrete(2), env="CartPole-v1", given=False)
    with_reports(run, [{"env_steps": 1, "wall_s": 1.0, "return_mean": 1.0}])
    flags = [
        ["export", "--format", "savedmodel"],
        ["export", "--format", "tflite"],
        ["plot"],
        ["visualize", "--episodes", "1"],
    ]
    code = FULL_DISK.format(commands=[[*words, str(run.path), "--outdir", str(tmp_path / "out")] for words in flags])
    # A measurement of coverage could not write its data either.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split() == ["2"] * 4 and "Traceback" not in done.stderr, done.stderr
    for error in done.stderr.split("end of")[:4]:
        assert "Choose another folder" in error or "is the disk full?" in error, done.stderr
    assert not (tmp_path / "out").exists()
