"""Every artifact of a run acts as the policy did in the run's own final evaluation.

The spaces are nested, their keys are not sorted, and the networks cannot tell leaves of equal shape apart: a policy
that reads or writes its leaves in another order than in training loads without an error, but acts differently.
"""

import functools
import itertools
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from gymnasium import spaces

import ppo
from ppo import Config, Run, RunError, evaluate_run, export, record_run
from tests.ppo.envs import Recorder
from vecenv.tree import leaves, nest, pick

PAIR = spaces.Dict([("z", spaces.Box(-1, 1, (3,))), ("a", spaces.Box(-1, 1, (3,)))])
EVERY_LEAF = spaces.Dict(
    [
        ("z", spaces.Box(-1, 1, (3,))),
        (
            "m",
            spaces.Tuple(
                [
                    spaces.Dict([("z", spaces.Discrete(3, start=1)), ("bits", spaces.MultiBinary(3))]),
                    spaces.MultiDiscrete([2, 3]),
                    spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
                ]
            ),
        ),
        ("image", spaces.Box(0, 9, (7, 6, 3), np.uint8)),
        ("bytes", spaces.Box(0, 255, (3,), np.uint8)),
        ("a", spaces.Box(-9, 9, (3,), np.int16)),
    ]
)
EVERY_ACTION = spaces.Dict(
    [
        ("z", spaces.Box(-1, 1, (2,))),
        (
            "m",
            spaces.Tuple(
                [
                    spaces.Dict([("z", spaces.Discrete(3, start=-1)), ("a", spaces.Discrete(3, start=5))]),
                    spaces.MultiDiscrete([3, 2]),
                    spaces.MultiBinary(2),
                ]
            ),
        ),
        ("a", spaces.Box(-2, 3, (2,))),
    ]
)
RUNS = {
    "every leaf": (EVERY_LEAF, EVERY_ACTION, {"cnn": "small"}),
    "mask, critic keys, GRU": (
        spaces.Dict([("z", PAIR), ("y", PAIR), ("action_mask", spaces.MultiBinary(5)), ("a", PAIR["z"])]),
        spaces.MultiDiscrete([2, 3]),
        {"recurrent": "gru", "critic_keys": ("y", "z/a")},
    ),
    "bounded actions": (PAIR, spaces.Box(-0.5, 0.7, (2,)), {}),
}


class Trained:
    """A finished run, with the observations and the actions of its final evaluation."""

    def __init__(self, folder, observation_space, action_space, settings):
        self.make = functools.partial(Recorder, observation_space, action_space)
        config = Config(
            env="given", total_steps=64, num_envs=4, num_workers=0, num_steps=8, minibatch_size=32, epochs=2,
            policy_layers=(8,), value_layers=(8,), recurrent_units=8, policy_output_gain=2.0, learning_rate=0.01,
            eval_episodes=1, **settings,
        )  # fmt: skip
        self.result = ppo.train(config, envs=self.make, logdir=folder)
        self.run, self.action_space = Run(self.result.path), action_space
        self.steps = self.newest_steps()
        self.paths = [path for path, _ in leaves(observation_space)]
        assert len({str(action) for _, action in self.steps}) > 3, "the policy ignores the observations"

    def newest_steps(self):
        """Returns the first episode of the env that was made last."""
        return Recorder.made[-1].episodes[0]

    def check_actions(self, actions, steps=None):
        """Compares actions with those of the final evaluation, or of other steps."""
        for (_, wanted), found in zip(steps or self.steps, actions, strict=True):
            for path, leaf in leaves(self.action_space):
                assert np.shape(pick(found, path)) == leaf.shape
                np.testing.assert_allclose(pick(found, path), pick(wanted, path), rtol=0, atol=1e-5, err_msg=str(path))

    def observations(self, steps=None):
        """Returns what the networks saw in each step, one array for each leaf by path."""
        return [{path: np.asarray(pick(seen, path)) for path in self.paths} for seen, _ in steps or self.steps]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a function that trains a run of `RUNS` once."""

    @functools.cache
    def train(name):
        return Trained(tmp_path_factory.mktemp("runs"), *RUNS[name])

    yield train
    Recorder.made.clear()


@pytest.mark.parametrize("name", RUNS)
def test_a_loaded_policy(trained, name):
    run = trained(name)
    policy = ppo.load_policy(run.run)
    run.check_actions([policy(nest(policy.observation_space, seen.get)) for seen in run.observations()])


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("every leaf", "onnx"),
        ("mask, critic keys, GRU", "tflite"),
        ("bounded actions", "savedmodel"),
        *(
            pytest.param(name, format, marks=pytest.mark.slow)
            for name, format in itertools.product(RUNS, ("savedmodel", "tflite", "onnx"))
        ),
    ],
)
def test_an_export(trained, tmp_path, name, format):
    run = trained(name)
    file, _ = export(run.run, tmp_path, format)
    if format == "savedmodel":
        model = tf.saved_model.load(str(file))
        act, inputs = (
            model.signatures["serving_default"],
            model.signatures["serving_default"].structured_input_signature[1],
        )
    elif format == "onnx":
        session = onnxruntime.InferenceSession(file)
        outputs_of = [tensor.name for tensor in session.get_outputs()]
        inputs = [tensor.name for tensor in session.get_inputs()]

        def act(**given):
            return dict(zip(outputs_of, session.run(None, given), strict=True))
    else:
        from ai_edge_litert.interpreter import Interpreter

        act = Interpreter(model_path=str(file)).get_signature_runner("serving_default")
        inputs = act.get_input_details()
    actions, state = [], np.zeros([1, 8], np.float32)
    for seen in run.observations():
        arrays = {"_".join(map(str, path)): np.asarray(value)[None] for path, value in seen.items()}
        given = {name: array for name, array in {**arrays, "state": state}.items() if name in inputs}
        outputs = act(**given)
        state = outputs.get("next_state" if format == "onnx" else "state", state)
        by_path = {path: outputs["_".join(["action", *map(str, path)])][0] for path, _ in leaves(run.action_space)}
        actions.append(nest(run.action_space, by_path.get))
    run.check_actions(actions)


@pytest.mark.parametrize("name", RUNS)
def test_an_evaluation(trained, name):
    run = trained(name)
    evaluation = evaluate_run(run.run, 1, seed=0, envs=run.make)
    run.check_actions([action for _, action in run.newest_steps()])
    np.testing.assert_allclose(evaluation.returns, run.result.evaluation.returns, rtol=1e-5)


def test_an_evaluation_in_an_env_whose_keys_have_another_order(trained):
    run = trained("mask, critic keys, GRU")
    space = spaces.Dict(list(run.make().observation_space.items())[::-1])
    evaluate_run(run.run, 1, envs=functools.partial(Recorder, space, run.action_space))
    steps, policy = run.newest_steps(), ppo.load_policy(run.run)
    actions = [policy(nest(policy.observation_space, seen.get)) for seen in run.observations(steps)]
    run.check_actions(actions, steps)


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,)), spaces.Dict(z=spaces.Box(-1, 1, (4,)))])
def test_an_evaluation_in_an_env_with_other_leaves_is_an_error(trained, space):
    run = trained("bounded actions")
    with pytest.raises(ppo.ConfigError, match="the policy was trained on Dict"):
        evaluate_run(run.run, 1, envs=functools.partial(Recorder, space, run.action_space))


def test_a_video(trained, tmp_path):
    """The env plays in another process, so only its rewards show its actions."""
    run = trained("every leaf")
    _, evaluation = record_run(run.run, tmp_path, 1, seed=0, envs=run.make)
    np.testing.assert_allclose(evaluation.returns, run.result.evaluation.returns, rtol=1e-5)


def test_a_resumed_run(trained):
    run = trained("every leaf")
    ppo.resume(run.run.path, envs=run.make)
    run.check_actions([action for _, action in run.newest_steps()])


READERS = {
    "load_policy": lambda run, folder, make: ppo.load_policy(run),
    "export": lambda run, folder, make: export(run, folder, "savedmodel", warn=warnings.warn),
    "visualize": lambda run, folder, make: record_run(run, folder, 1, envs=make, warn=warnings.warn),
}


@pytest.mark.parametrize("part", ["observation", "action"])
@pytest.mark.parametrize("reader", READERS)
def test_a_policy_that_does_not_act_as_in_training_is_refused(trained, tmp_path, reader, part):
    run = trained("every leaf")
    copy = Run(Path(shutil.copytree(run.run.path, tmp_path / "copy")))
    values = json.loads((copy.path / "spaces.json").read_text())
    values[part]["spaces"].reverse()
    (copy.path / "spaces.json").write_text(json.dumps(values))
    with pytest.warns(UserWarning, match="acts differently from the policy in training"), pytest.raises(RunError):
        READERS[reader](copy, tmp_path / "out", run.make)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_an_earlier_version_has_no_recorded_actions_and_a_damaged_file_is_refused(trained, tmp_path):
    run = trained("bounded actions")
    copy = shutil.copytree(run.run.path, tmp_path / "copy")
    (actions,) = copy.glob("checkpoints/step_*/actions.npz")
    actions.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=r"actions\.npz cannot be read"), pytest.raises(RunError):
        ppo.load_policy(copy)
    actions.unlink()
    policy = ppo.load_policy(copy)
    run.check_actions([policy(nest(policy.observation_space, seen.get)) for seen in run.observations()])
