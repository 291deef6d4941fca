"""Tests of `critic_keys`: observation keys that the value function reads and the policy does not."""

from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import ppo
from ppo import Config, ConfigError
from ppo.model.agent import Agent
from tests.ppo.runs import parsed, untrained_run

SPACE = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (36, 36, 1), np.uint8),
        "seen": spaces.Box(-1, 1, (3,)),
        "state": spaces.Dict(mass=spaces.Box(0, 9, (2,)), kind=spaces.Discrete(4)),
    }
)
BOX = spaces.Box(-1, 1, (2,))


class Recall(gym.Env):
    """Shows a sign in the first step only. Each later action that repeats it is rewarded.

    The env adds the same random number to every reward of an episode. The key "hidden" holds the sign and this number.

    Attributes:
        hits: Whether each action of this process was rewarded.
    """

    action_space = spaces.Discrete(2)
    LENGTH = 8
    hits: ClassVar[list[bool]] = []

    def __init__(self, shows_hidden: bool = True):
        self.observation_space = spaces.Dict(sign=spaces.Box(-1, 1, (1,)))
        if shows_hidden:
            self.observation_space["hidden"] = spaces.Box(-9, 9, (2,))
        self._shows_hidden = shows_hidden

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        self._sign, self._luck = self.np_random.choice([-1, 1]), self.np_random.uniform(-3, 3)
        return self._observe(), {}

    def step(self, action):
        hit = 2 * action - 1 == self._sign
        if self._steps:
            self.hits.append(hit)
        reward = self._luck + (hit if self._steps else 0)
        self._steps += 1
        return self._observe(), reward, self._steps == self.LENGTH, False, {}

    def _observe(self):
        observation = {"sign": np.array([0 if self._steps else self._sign], np.float32)}
        if self._shows_hidden:
            observation["hidden"] = np.array([self._sign, self._luck], np.float32)
        return observation


def batch_of(space, seed, count=5):
    space.seed(seed)
    return gym.vector.utils.concatenate(
        space, [space.sample() for _ in range(count)], gym.vector.utils.create_empty_array(space, count)
    )


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
@pytest.mark.parametrize(("keys", "names"), [(("state",), {"state/mass", "state/kind"}), (("camera",), {"camera"})])
def test_the_policy_ignores_the_critic_keys_and_the_value_function_reads_them(keys, names, recurrent):
    config = Config(critic_keys=keys, recurrent=recurrent, minibatch_size=64, policy_output_gain=1.0)
    agent = Agent(config, SPACE, BOX)
    assert agent.observations.critic == names
    one, other = batch_of(SPACE, 0), batch_of(SPACE, 1)
    state = np.ones([5, agent.state_size], np.float32)
    with_other_secret = {**one, **{key: other[key] for key in keys}}
    before, after = agent.step(one, state), agent.step(with_other_secret, state)
    np.testing.assert_array_equal(before.outputs, after.outputs)
    np.testing.assert_array_equal(before.memory, after.memory)
    assert (before.values != after.values).numpy().all()
    seen = next(key for key in SPACE if key not in keys)
    assert (agent.step({**one, seen: other[seen]}, state).outputs != before.outputs).numpy().any()


def test_a_nested_critic_key_leaves_its_sibling_keys_to_the_policy():
    agent = Agent(Config(critic_keys=("state/mass", "seen")), SPACE, BOX)
    assert agent.observations.critic == {"state/mass", "seen"}


def test_critic_keys_are_normalized_like_other_observations():
    agent = Agent(Config(critic_keys=("state",)), SPACE, BOX)
    batch = batch_of(SPACE, 0, count=1000)
    agent.observations.merge(agent.observations.statistics(agent.observations.raw(batch)))
    inputs = agent.observations.inputs(batch)["state/mass"]
    np.testing.assert_allclose(np.mean(inputs, axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(np.std(inputs, axis=0), 1, atol=1e-3)


@pytest.mark.parametrize(
    ("space", "keys", "message"),
    [
        (SPACE, ("goal",), r"names \['goal'\], .* its keys are camera, seen, state, state/mass, state/kind"),
        (SPACE, ("camera", "seen", "state"), "leaves nothing for the policy"),
        (BOX, ("goal",), "it has no keys"),
        (spaces.Dict(x=BOX, action_mask=spaces.MultiBinary(2)), ("action_mask",), "its keys are x$"),
    ],
)
def test_a_wrong_key_is_an_error_that_names_the_keys(space, keys, message):
    with pytest.raises(ConfigError, match=message):
        Agent(Config(critic_keys=keys), space, spaces.Discrete(2))


def test_critic_keys_need_the_built_in_networks():
    with pytest.raises(ConfigError, match="cannot be combined with"):
        Config(critic_keys=("state",), network="module:function")


def test_critic_keys_are_a_list_on_the_command_line():
    config = parsed("--critic-keys", "state/mass", "camera")
    assert config.critic_keys == ("state/mass", "camera")


def test_a_loaded_policy_accepts_observations_without_the_critic_keys(tmp_path):
    run = untrained_run(tmp_path, SPACE, BOX, critic_keys=("camera", "state"), policy_output_gain=1.0)
    policy = ppo.load_policy(run.path)
    batch = batch_of(SPACE, 0)
    actions = policy(batch)
    np.testing.assert_array_equal(policy({"seen": batch["seen"]}), actions)
    np.testing.assert_allclose(policy({"seen": batch["seen"][2]}), actions[2], rtol=1e-5)


def test_only_the_values_of_a_loaded_policy_need_the_critic_keys(tmp_path):
    run = untrained_run(tmp_path, SPACE, BOX, critic_keys=("camera", "state"), policy_output_gain=1.0)
    policy, batch = ppo.load_policy(run.path), batch_of(SPACE, 0)
    log_probs = policy.log_prob(batch, np.zeros([5, 2], np.float32))
    np.testing.assert_array_equal(policy.log_prob({"seen": batch["seen"]}, np.zeros([5, 2], np.float32)), log_probs)
    values = policy.value(batch)
    assert (policy.value({**batch, "state": batch_of(SPACE, 1)["state"]}) != values).all()
    with pytest.raises(ValueError, match=r"observations\['camera'\] is missing"):
        policy.value({"seen": batch["seen"]})
    with pytest.raises(ValueError, match=r"observations\['seen'\] is missing"):
        policy({})


def test_a_run_with_critic_keys_trains_and_is_evaluated(tmp_path):
    config = Config(
        env="given",
        num_envs=4,
        num_steps=16,
        minibatch_size=64,
        num_workers=0,
        total_steps=128,
        critic_keys=("hidden",),
    )
    run = ppo.train(config, envs=Recall, logdir=tmp_path).path
    critic = ppo.policies.policy.load_agent(ppo.run.folder.Run.open(run), print).observations.leaves["hidden"]
    assert critic.normalizer.moments.count.numpy() == 3 * 64  # the first rollout only initializes the normalizers
    assert ppo.load_policy(run)({"sign": np.ones(1, np.float32)}) in (0, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_critic_that_sees_the_hidden_state_learns_a_memory_task_faster(tmp_path):
    """Compares the fraction of rewarded actions over all of training, for each of five seeds."""

    def score(seed, keys):
        Recall.hits.clear()
        config = Config(
            env="given",
            seed=seed,
            total_steps=8192,
            num_envs=32,
            num_workers=0,
            num_steps=16,
            minibatch_size=128,
            epochs=4,
            gamma=0.9,
            learning_rate=3e-3,
            policy_layers=(16,),
            value_layers=(16,),
            recurrent="gru",
            recurrent_units=16,
            critic_keys=keys,
            eval_episodes=1,
        )
        ppo.train(config, envs=lambda: Recall(shows_hidden=bool(keys)), logdir=tmp_path)
        return np.mean(Recall.hits)

    blind, seeing = ([score(seed, keys) for seed in range(5)] for keys in ((), ("hidden",)))
    print("blind critics:", np.round(blind, 3), "seeing critics:", np.round(seeing, 3))
    assert np.greater(seeing, blind).all()
    assert np.mean(seeing) > np.mean(blind) + 0.05
