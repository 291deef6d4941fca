"""Tests of composite actions in training, in policies and in exports. test_distributions.py tests their mathematics."""

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import ppo
import vecenv
from ppo import Config, ConfigError, export
from ppo.model.agent import Agent
from tests.ppo.runs import untrained_run

VECTOR = spaces.Box(-1, 1, (3,))
ACTIONS = spaces.Dict(
    aim=spaces.Box(-0.05, 0.03, (2,)),
    door=spaces.Tuple([spaces.Discrete(3, start=-1), spaces.Box(4, 6, (2,), np.int32)]),
)


class Doors(gym.Env):
    """Lasts one step. Each door has its own bonus and target: reward = bonus - (aim - target)^2.

    The best action is door 1 with its target, 0.5. Its reward is 1. The best aim for a door chosen at random is 0.03,
    where the reward is at most 0.78.
    """

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Dict(aim=spaces.Box(-1, 1, (1,)), door=spaces.Discrete(3))
    TARGETS, BONUSES = (-0.6, 0.5, 0.2), (0.0, 1.0, 0.7)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        door = action["door"]
        reward = self.BONUSES[door] - (action["aim"].item() - self.TARGETS[door]) ** 2
        return np.zeros(1, np.float32), reward, True, False, {}


def policy_of(tmp_path, **settings):
    return ppo.load_policy(untrained_run(tmp_path, VECTOR, ACTIONS, policy_output_gain=3.0, **settings).path)


def test_a_loaded_policy_returns_actions_of_the_space_for_one_observation_and_for_a_batch(tmp_path):
    policy = policy_of(tmp_path)
    observations = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    batch = policy(observations)
    assert vecenv.tree.nest(ACTIONS, lambda path: None) == tf.nest.map_structure(lambda leaf: None, batch)
    assert (batch["aim"] == ACTIONS["aim"].high).any()  # some actions are clipped
    for i, observation in enumerate(observations):
        action = policy(observation)
        assert ACTIONS.contains(action), action
        np.testing.assert_allclose(action["aim"], batch["aim"][i], atol=1e-5)
        assert action["door"][0] == batch["door"][0][i] and (action["door"][1] == batch["door"][1][i]).all()


def test_sampled_actions_are_in_the_space_and_have_a_log_prob(tmp_path):
    policy = policy_of(tmp_path)
    policy.seed(0)
    observation = np.ones(3, np.float32)
    for _ in range(10):
        action = policy(observation, deterministic=False)
        assert ACTIONS.contains(action) and np.isfinite(policy.log_prob(observation, action))
    many = policy(np.tile(observation, [200, 1]), deterministic=False)
    assert {len(np.unique(many["door"][0])), len(np.unique(many["door"][1]))} == {3}
    doors = [{**action, "door": (door, action["door"][1])} for door in (-1, 0, 1)]
    over_doors = [policy.log_prob(observation, of_door) for of_door in doors]
    over_integers = [
        policy.log_prob(observation, {**action, "door": (action["door"][0], np.array([i, j], np.int32))})
        for i in (4, 5, 6)
        for j in (4, 5, 6)
    ]
    # A sum over the values of a discrete leaf removes its factor, so only the density of the box remains.
    of_box = np.exp(over_doors).sum() * np.exp(over_integers).sum() / np.exp(policy.log_prob(observation, action))
    outputs = policy._agent.step(observation[None], np.zeros([1, 0], np.float32)).outputs
    mean, log_std = outputs[0, -4:-2], outputs[0, -2:]
    z = ((action["aim"] + 0.01) / 0.04 - mean) / np.exp(log_std)
    density = np.exp(-0.5 * z**2) / np.exp(log_std) / 0.04 / np.sqrt(2 * np.pi)
    assert of_box == pytest.approx(np.prod(density), rel=1e-4)


@pytest.mark.parametrize("wrong", [{"aim": np.zeros(2, np.float32)}, 3, {"aim": np.zeros(2), "door": (7, [4, 4])}])
def test_the_log_prob_of_what_is_not_an_action_is_an_error(tmp_path, wrong):
    with pytest.raises(ValueError, match="is not an action in Dict"):
        policy_of(tmp_path).log_prob(np.ones(3, np.float32), wrong)


@pytest.mark.parametrize("format", ["savedmodel", "tflite", "onnx"])
def test_an_export_has_an_output_for_each_leaf_and_an_input_for_each_key_of_the_policy(tmp_path, format):
    space = spaces.Dict(seen=VECTOR, secret=VECTOR)
    settings = {"critic_keys": ("secret",), "recurrent": "gru", "minibatch_size": 64, "policy_output_gain": 3.0}
    run = untrained_run(tmp_path / "runs", space, ACTIONS, **settings)
    path, difference = export(run, tmp_path, format)
    assert difference <= 1e-5
    if format == "tflite":
        from ai_edge_litert.interpreter import Interpreter

        signature = Interpreter(model_path=str(path)).get_signature_runner("serving_default")
        names = set(signature.get_input_details()), set(signature.get_output_details())
    elif format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        names = {tensor.name for tensor in session.get_inputs()}, {tensor.name for tensor in session.get_outputs()}
    else:
        signature = tf.saved_model.load(str(path)).signatures["serving_default"]
        names = set(signature.structured_input_signature[1]), set(signature.structured_outputs)
    state = "next_state" if format == "onnx" else "state"  # ONNX forbids an output with the name of an input
    assert names == ({"seen", "state"}, {"action_aim", "action_door_0", "action_door_1", state})


def test_the_mask_of_a_composite_action_covers_its_discrete_leaves():
    mask = spaces.MultiBinary(9)
    agent = Agent(Config(), spaces.Dict(x=VECTOR, action_mask=mask), ACTIONS)
    allowed = np.zeros([4, 9], np.int8)
    allowed[:, [2, 4, 8]] = 1  # door 1, then the integers 5 and 6
    observations = {"x": np.zeros([4, 3], np.float32), "action_mask": allowed}
    actions, _ = agent.sample(observations, agent.initial_state(4), tf.constant([0, 1]))
    np.testing.assert_array_equal(actions["door"][0], [1] * 4)
    np.testing.assert_array_equal(actions["door"][1], [[5, 6]] * 4)
    assert len(np.unique(actions["aim"])) == 8
    allowed[3, 8] = 0
    with pytest.raises(ppo.NothingAllowed, match="env 3 forbade every action"):
        agent.act(observations, agent.initial_state(4))


def test_a_vector_env_that_does_not_clip_a_leaf_of_its_actions_is_refused(tmp_path):
    config = Config(env="given", num_envs=2, minibatch_size=64, total_steps=64)
    options = {**ppo.vector_options(config), "clip_actions": False}
    with (
        vecenv.SyncVectorEnv([Doors] * 2, **options) as envs,
        pytest.raises(ConfigError, match="does not clip actions"),
    ):
        ppo.train(config, envs=envs, logdir=tmp_path)


def test_a_given_vector_env_with_integer_actions_needs_no_clipping():
    class Integers(Doors):
        action_space = spaces.Box(0, 3, (2,), np.int64)

    config = Config(env="given", num_envs=2, minibatch_size=64, total_steps=64)
    with (
        vecenv.SyncVectorEnv([Integers] * 2, **ppo.vector_options(config)) as envs,
        ppo.envs.training_envs(config, envs) as given,
    ):
        assert given is envs


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_reaches_an_optimum_that_needs_the_box_and_the_discrete_leaf(tmp_path, seed):
    config = Config(
        env="given",
        seed=seed,
        total_steps=32_768,
        num_workers=0,
        num_steps=16,
        minibatch_size=256,
        gamma=0.0,
        learning_rate=3e-3,
        policy_layers=(16,),
        value_layers=(16,),
    )
    result = ppo.train(config, envs=Doors, logdir=tmp_path)
    assert result.evaluation.returns.min() > 0.99
    action = ppo.load_policy(result.path)(np.zeros(1, np.float32))
    assert action["door"] == 1 and action["aim"] == pytest.approx(0.5, abs=0.03)
