"""Tests of ppo/algorithm/update.py: the compiled update equals a slow reference and reads only its own rollout."""

import dataclasses
import functools
import importlib.util
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

import vecenv
from ppo import Config
from ppo.algorithm import losses
from ppo.algorithm.batch import shuffled
from ppo.algorithm.rollout import LocalCollector
from ppo.algorithm.teams import team_of
from ppo.algorithm.update import METRICS, Learner
from ppo.envs import spaces_of
from ppo.model.agent import Agent
from ppo.model.networks import MLP
from tests.ppo.runs import compile_updates
from vecenv.ingraph import slots_for

CONFIG = Config(
    env="Pendulum-v1",
    total_steps=1000,
    num_envs=4,
    num_steps=10,
    epochs=3,
    minibatch_size=8,
    policy_layers=(8,),
    value_layers=(8,),
)


class Switches(gym.Env):
    """Returns Dict observations with a random action mask; episodes last at most five steps."""

    observation_space = gym.spaces.Dict(
        {
            "place": gym.spaces.Box(-1, 1, (2, 2), np.float64),
            "name": gym.spaces.Discrete(3, start=1),
            "action_mask": gym.spaces.MultiBinary(7),
        }
    )
    action_space = gym.spaces.MultiDiscrete([3, 4])

    def __init__(self):
        self._steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        self._steps += 1
        assert self._mask[action[0]] and self._mask[3 + action[1]], f"the mask {self._mask} forbids action {action}"
        return self._observe(), float(action[0] - action[1]), self._steps % 9 == 0, self._steps % 5 == 0, {}

    def _observe(self):
        self._mask = self.np_random.integers(0, 2, 7, np.int8)
        self._mask[[1, 5]] = 1
        return {"place": self.np_random.uniform(-1, 1, (2, 2)), "name": self.np_random.integers(1, 4),
                "action_mask": self._mask}  # fmt: skip


class NoiseImages(gym.Env):
    """Returns observations of a noise image and two bits, the first of which is the parity of the step number."""

    observation_space = gym.spaces.Tuple([gym.spaces.Box(0, 255, (2, 36, 40), np.uint8), gym.spaces.MultiBinary(2)])
    action_space = gym.spaces.MultiBinary(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action):
        self._steps += 1
        return self._observe(), float(action[0]) - 0.5 * float(action[1]), False, self._steps == 6, {}

    def _observe(self):
        return self.np_random.integers(0, 256, (2, 36, 40), np.uint8), np.array([self._steps % 2, 1], np.int8)


class SmallImages(NoiseImages):
    """Returns noise images of 7 x 7 pixels, as minigrid does, in a Dict."""

    observation_space = gym.spaces.Dict(
        {"image": gym.spaces.Box(0, 255, (7, 7, 3), np.uint8), "direction": gym.spaces.Discrete(4)}
    )

    def _observe(self):
        image = self.np_random.integers(0, 256, (7, 7, 3), np.uint8)
        return {"image": image, "direction": self._steps % 4}


IMAGES = {"minibatch_size": 20, "epochs": 1}


class Machine(gym.Env):
    """Has a composite action space, a mask for its discrete parts, and an observation "inside" for the critic."""

    observation_space = gym.spaces.Dict(
        {
            "inside": gym.spaces.Box(-5, 5, (2,)),
            "outside": gym.spaces.Box(-1, 1, (3,)),
            "action_mask": gym.spaces.MultiBinary(12),
        }
    )
    action_space = gym.spaces.Dict(
        {
            "dial": gym.spaces.Box(-2, 2, (2,)),
            "lever": gym.spaces.Tuple([gym.spaces.Discrete(3, start=-1), gym.spaces.Box(0, 1, (1,), np.float64)]),
            "steps": gym.spaces.Box(np.array([-2, 5]), np.array([1, 7]), dtype=np.int32),
            "bits": gym.spaces.MultiBinary(2),
        }
    )

    def __init__(self):
        self._steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        bits, lever, steps = np.split(self._mask, [2, 5])
        chosen = (*(action["steps"] - [-2, 5] + [0, 4]), action["lever"][0] + 1)
        assert steps[chosen[0]] and steps[chosen[1]] and lever[chosen[2]] and (bits >= action["bits"]).all()
        self._steps += 1
        reward = float(action["dial"].sum() + action["lever"][1][0] + action["bits"][0] - action["steps"][0])
        return self._observe(), reward + self._inside[0], self._steps % 9 == 0, self._steps % 5 == 0, {}

    def _observe(self):
        self._inside = self.np_random.normal(size=2).astype(np.float32)
        self._mask = self.np_random.integers(0, 2, 12, np.int8)
        self._mask[[3, 6, 10]] = 1
        outside = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return {"inside": self._inside, "outside": outside, "action_mask": self._mask}


def parts(config, make=None, max_episode_steps=7):
    """Returns envs whose episodes are truncated within a rollout, with an agent, its learner and its collector."""
    vector = vecenv.SyncVectorEnv(
        [make or (lambda: gym.make(config.env, max_episode_steps=max_episode_steps))] * config.num_envs,
        autoreset_mode="SameStep",
        num_slots=slots_for(config.num_steps),
        clip_actions=True,
        float32_observations=True,
    )
    spaces = (vector.single_observation_space, vector.env_action_space)
    agent, collector = Agent(config, *spaces), LocalCollector(config, vector, {"": spaces})
    collector.use([agent])
    return vector, collector.envs, agent, Learner(config, agent), collector


def parts_of_group(config, make, name, **options):
    """Returns envs of several agents after a reset, the team of a group, and a function that collects its rollouts.

    The function returns a rollout as `Collected` and as NumPy arrays.
    """
    from vecenv.adapters.pettingzoo import ParallelVectorEnv

    config = dataclasses.replace(config, env="pettingzoo:given")
    vector = ParallelVectorEnv(
        [make] * config.num_envs,
        num_workers=0,
        autoreset_mode="SameStep",
        num_slots=slots_for(config.num_steps),
        **options,
    )
    collector = LocalCollector(config, vector, spaces_of(config, vector))
    teams = [team_of(config, name, collector.members[name], spaces) for name, spaces in collector.spaces.items()]
    collector.use([team.actor for team in teams])
    number = [team.name for team in teams].index(name)
    collector.begin(0)

    def collect(update):
        rollouts = collector.collect(update, 0)
        return rollouts.collected[number], rollouts.arrays[number]

    return vector, teams[number], collect


def update_eagerly(config, learner, collected, *, rate=1e-3):
    """Runs one update without tracing it, which would take longer, and returns its metrics."""
    arguments = tf.constant(rate), tf.constant(config.gamma), tf.constant(shuffled(config, 0))
    return learner.update_in_graph.python_function(collected, *arguments)


class SlowAgent:
    """Evaluates an agent on one rollout, step by step."""

    def __init__(self, agent, rollout, state):
        self.agent, self.rollout, self.initial = agent, rollout, state
        self.ended = rollout.terminated | rollout.truncated
        self.num_steps, self.num_envs = self.ended.shape
        self.lives = np.ones_like(self.ended) if rollout.valid is None else rollout.valid[:-1]
        self.acts = self.lives
        if rollout.valid is not None and agent.observations.has_mask:
            self.acts = self.lives & agent.observations.mask(rollout.observations)[:-1].any(axis=-1)
        self.ended |= ~self.lives

    def at(self, observations, t):
        return tf.nest.map_structure(lambda leaf: tf.constant(leaf[t]), observations)

    def unroll(self, *, finals=False):
        """Returns the outputs [T, N, ...], the values [T + 1, N] and, if asked, those of final observations [T, N]."""
        agent, state = self.agent, self.initial
        outputs, values, after = [], [], []
        for t in range(self.num_steps + 1):
            if t:
                state = tf.where(self.ended[t - 1][:, None], 0.0, state)
            parameters, value, state = agent.step(self.at(self.rollout.observations, t), state)
            outputs.append(parameters)
            values.append(value)
            if finals and t < self.num_steps:
                after.append(agent.step(self.at(self.rollout.final_observations, t), state).values)
        return tf.stack(outputs[:-1]), tf.stack(values), tf.stack(after) if finals else None


def gaussian_kl(old, new):
    """Returns KL(old || new), summed over action dimensions, as a tensor."""
    (old_mean, old_log_std), (mean, log_std) = (tf.split(outputs, 2, axis=-1) for outputs in (old, new))
    old_var, var = tf.exp(2 * old_log_std), tf.exp(2 * log_std)
    return tf.reduce_sum(log_std - old_log_std + (old_var + (old_mean - mean) ** 2) / (2 * var) - 0.5, axis=-1)


def slow_advantages(config, slow, rewards, gamma):
    """Returns advantages and value targets [T, N], computed in a loop."""
    result, targets = np.zeros_like(rewards), np.zeros_like(rewards)
    values, finals = (of_all.numpy() for of_all in slow.unroll(finals=True)[1:])
    for i in range(slow.num_envs):
        later = 0.0
        for t in reversed(range(slow.num_steps)):
            following = values[t + 1, i]
            if slow.rollout.terminated[t, i]:
                following = 0.0
            elif slow.rollout.truncated[t, i]:
                following = finals[t, i]
            if slow.ended[t, i]:
                later = 0.0
            later = rewards[t, i] + gamma * following - values[t, i] + gamma * config.gae_lambda * later
            result[t, i], targets[t, i] = later, later + values[t, i]
    return result, targets


def slow_update(config, agent, learner, rollout, collected, order, rate, gamma):
    """Runs the update as one would write it on a blackboard: NumPy, loops, and eager TensorFlow for gradients.

    The policy learns only from the samples of a minibatch in which its agent can act, and the value function from those
    in which it lives. A minibatch without a living agent takes no step. Returns the metrics.
    """
    slow, distribution = SlowAgent(agent, rollout, collected.state), agent.distribution
    T, N = slow.num_steps, slow.num_envs
    old_outputs, old_values, _ = slow.unroll()
    samples = distribution.samples(old_outputs, collected.noise, tf.nest.map_structure(tf.constant, rollout.actions))
    old = distribution.log_prob(old_outputs, samples).numpy()
    entropy_coef = config.entropy_coef * rate / config.learning_rate
    if config.lr_schedule == "kl_adaptive":
        rate = tf.constant(learner.base_rate.numpy())
    elif config.kl_limit is not None:
        rate = rate * learner.base_rate / config.learning_rate
    used = {"learning_rate": float(rate)}
    if config.objective == "kl_penalty":
        used["kl_penalty"] = float(learner.penalty)
    weights = None if rollout.valid is None else tf.constant(slow.lives.reshape(-1), tf.float32)
    begins, ended = tf.constant(rollout.episode_lengths[0] == 1), tf.constant(slow.ended)
    rewards = learner.rewards(tf.constant(rollout.rewards, tf.float32), begins, ended, weights).numpy()
    computed = slow_advantages(config, slow, rewards, gamma)
    first_targets, totals, taken = computed[1], np.zeros(6), 0
    for k, items in enumerate(order):
        if config.recompute_advantages and not agent.observations.has_images and k % config.num_minibatches == 0:
            computed = slow_advantages(config, slow, rewards, gamma)
        acting = [(s // N, s % N) for s in items if slow.acts[s // N, s % N]]
        living = [(s // N, s % N) for s in items if slow.lives[s // N, s % N]]
        if not living:
            continue
        policy_loss = entropy = rewarded_entropy = approx_kl = clip_fraction = 0.0
        with tf.GradientTape() as tape:
            all_outputs, all_values = slow.unroll()[:2]
            if acting:
                times, rows = np.array(acting).T
                advantage = computed[0][times, rows]
                if config.normalize_advantages:
                    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                outputs = tf.gather_nd(all_outputs, acting)
                chosen = tf.nest.map_structure(functools.partial(tf.gather_nd, indices=acting), samples)
                log_ratio = distribution.log_prob(outputs, chosen) - old[times, rows]
                ratio = tf.exp(log_ratio)
                clipped = tf.clip_by_value(ratio, 1 - config.clip_range, 1 + config.clip_range)
                policy_loss = -tf.reduce_mean(tf.minimum(ratio * advantage, clipped * advantage))
                if config.objective == "kl_penalty":
                    kl_of = distribution.kl if agent.log_std is None else gaussian_kl
                    kl = tf.reduce_mean(kl_of(old_outputs.numpy()[times, rows], outputs))
                    policy_loss = -tf.reduce_mean(ratio * advantage) + learner.penalty.numpy() * kl
                    if kl > losses.CUTOFF_FACTOR * config.kl_target:
                        excess = kl - losses.CUTOFF_FACTOR * config.kl_target
                        policy_loss += losses.CUTOFF_COEF * excess**2
                entropy = rewarded_entropy = tf.reduce_mean(distribution.entropy(outputs))
                if agent.log_std is not None and config.action_transform == "clip":  # all Boxes here have bounds
                    rewarded_entropy -= tf.reduce_sum(tf.nn.relu(agent.log_std + np.log(3) / 2))
                approx_kl = tf.reduce_mean(ratio - 1 - log_ratio)
                clip_fraction = np.mean(np.abs(ratio - 1) > config.clip_range)
            times, rows = np.array(living).T
            value_loss = tf.reduce_mean((tf.gather_nd(all_values, living) - computed[1][times, rows]) ** 2) / 2
            loss = policy_loss + config.value_coef * value_loss - entropy_coef * rewarded_entropy
        gradients = tape.gradient(loss, agent.learned, unconnected_gradients="zero")
        if agent.log_std is not None:
            below = agent.log_std.numpy() < config.min_log_std
            gradients[-1] = np.where(below, np.minimum(gradients[-1], 0), gradients[-1])
        of = {id(variable): gradient for variable, gradient in zip(agent.learned, gradients, strict=True)}
        norms = [adam.apply([of[id(variable)] for variable in adam.learned], rate) for adam in learner.optimizers]
        found = (policy_loss, value_loss, entropy, approx_kl, clip_fraction, np.square(norms).sum())
        totals += [float(value) for value in found]
        taken += 1
    kls = distribution.kl(old_outputs, slow.unroll()[0]).numpy()
    if agent.observations.has_images:
        last = order[-config.num_minibatches :][: -(-config.num_minibatches // 4)]
        kl = float(kls[last // N, last % N].mean())
    else:
        kl = float(kls[slow.acts].mean())
    if config.lr_schedule != "kl_adaptive" and config.kl_limit is not None:
        if kl > config.kl_limit:
            learner.base_rate.assign(learner.base_rate / 1.5)
        elif kl < config.kl_limit / 2:
            learner.base_rate.assign(min(learner.base_rate.numpy() * 1.5, config.learning_rate))
    for variable, above, below, factor in ((learner.penalty, 1.3, 0.7, 1.5), (learner.base_rate, 2.0, 0.5, 1 / 1.5)):
        if config.objective != "kl_penalty" if variable is learner.penalty else config.lr_schedule != "kl_adaptive":
            continue
        if kl > above * config.kl_target:
            variable.assign(variable * factor)
        elif kl < below * config.kl_target:
            variable.assign(variable / factor)
    seen = tf.nest.map_structure(lambda leaf: leaf[:-1].reshape(T * N, *leaf.shape[2:]), rollout.observations)
    raw = agent.observations.raw(tf.nest.map_structure(tf.constant, seen))
    agent.observations.merge(agent.observations.statistics(raw, weights))
    errors = (first_targets - old_values[:-1].numpy())[slow.lives]
    if agent.log_std is not None:
        used["action_std"] = np.exp(np.maximum(agent.log_std, config.min_log_std)).mean()
    return {
        **dict(zip(METRICS, [*totals[:5] / taken, np.sqrt(totals[5] / taken)], strict=True)),
        **used,
        "return_scale": np.sqrt(learner.rewards.moments.variance + 1e-8),
        "kl": kl,
        "gradient_steps": taken,
        "explained_variance": 1 - errors.var() / first_targets[slow.lives].var(),
    }


def check_predictions(collected, agent, rollout):
    """Compares the predictions that were stored during a rollout with those of an agent."""
    outputs, values, _ = SlowAgent(agent, rollout, collected.state).unroll()
    found = collected.predictions
    np.testing.assert_allclose(found.outputs, tf.reshape(outputs, found.outputs.shape), rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(found.values, values, rtol=2e-3, atol=2e-4)


def check_update(fast, slow, metrics, expected):
    """Compares agents and learners, and the metrics of their updates."""
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=0.02, abs=2e-4), name
    for part, one, other in zip(("agent", "learner"), fast, slow, strict=True):
        for mine, theirs in zip(one.variables, other.variables, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=2e-4, err_msg=f"{part} {mine.name}")


# Each case has its own update. XLA compiles those of slow cases.
slow = functools.partial(pytest.param, marks=[pytest.mark.slow, pytest.mark.xla])


def both(*values):
    """Returns a quick case that is not compiled and the same case compiled."""
    return pytest.param(*values), slow(*values)


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        slow({"recompute_advantages": False}, None),
        *both({"objective": "kl_penalty", "kl_target": 1e-3, "kl_limit": 1e-3, "min_log_std": -0.7, "epochs": 2}, None),
        slow({"objective": "kl_penalty", "kl_target": 1.0, "entropy_coef": 0.1}, None),
        slow({"min_log_std": -0.7, "normalize_advantages": True}, None),
        slow({"kl_limit": 1e-3}, None),
        slow({"lr_schedule": "kl_adaptive", "learning_rate": 1e-2, "kl_target": 1e-3}, None),
        slow({"action_transform": "tanh", "entropy_coef": 0.1}, None),
        slow({"action_transform": "tanh"}, None),
        slow({"entropy_coef": 0.1}, Switches),
        *both(
            {
                "network": "tests.ppo.model.test_custom:keras_network",
                "minibatch_size": 20,
                "normalize_advantages": True,
                "recompute_advantages": False,
            },
            None,
        ),
        slow(IMAGES | {"entropy_coef": 0.1}, NoiseImages),
        (IMAGES | {"cnn": "small", "minibatch_size": 5}, NoiseImages),  # 8 final observations, more than a minibatch
        slow(IMAGES | {"cnn": "impala"}, NoiseImages),
        slow(IMAGES | {"kl_limit": 1e-4, "epochs": 2}, NoiseImages),
        slow(IMAGES | {"recurrent": "gru", "recurrent_units": 5}, NoiseImages),
        slow(IMAGES | {"recurrent": "lstm", "recurrent_units": 5}, NoiseImages),
        slow(IMAGES | {"network": "tests.ppo.model.test_custom:convolutional_network"}, NoiseImages),
        slow(IMAGES | {"cnn": "small", "recurrent": "gru", "recurrent_units": 5}, SmallImages),
        *both({"recurrent": "gru", "recurrent_units": 5, "minibatch_size": 20, "epochs": 2}, None),
        slow({"recurrent": "lstm", "recurrent_units": 5, "minibatch_size": 20, "epochs": 2}, Switches),
        *both(
            {
                "entropy_coef": 0.1,
                "initial_log_std": -0.54,
                "critic_keys": ("inside",),
                "minibatch_size": 20,
                "epochs": 1,
            },
            Machine,
        ),
        slow({"action_transform": "tanh"}, Machine),
        slow({"critic_keys": ("inside",), "recurrent": "gru", "recurrent_units": 5, "minibatch_size": 20}, Machine),
    ],
    ids=lambda case: case.__name__ if callable(case) else "-".join(f"{k}={v}" for k, v in (case or {}).items()),
)
def test_the_update_equals_the_slow_update(settings, make):
    config = dataclasses.replace(CONFIG, **settings)
    _, envs, agent, learner, collector = parts(config, make)
    _, _, slow_agent, slow_learner, _ = parts(config, make)
    envs.reset(seed=0)
    rate, gamma = tf.constant(1e-2), 0.9  # not that of the settings
    for update in range(2):
        (collected,) = collector.collect(update, 0).collected
        arrays = envs.last_rollout()
        assert arrays.truncated.any()
        check_predictions(collected, slow_agent, arrays)
        order = shuffled(config, update)
        expected = slow_update(config, slow_agent, slow_learner, arrays, collected, order, rate, gamma)
        metrics = learner.update_in_graph(collected, rate, tf.constant(gamma), tf.constant(order))
        check_update((agent, learner), (slow_agent, slow_learner), metrics, expected)
    assert learner.update_in_graph.experimental_get_tracing_count() == 1
    assert collector.collect_in_graph.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        slow("a", {"minibatch_size": 4}),
        *both("b", {"minibatch_size": 2, "entropy_coef": 0.1, "normalize_advantages": True}),
        # Not compiled: with one acting sample in a minibatch, the gradient is rounding noise, which Adam scales up.
        pytest.param("b", {"minibatch_size": 2, "objective": "kl_penalty", "kl_target": 1e-3}, marks=pytest.mark.slow),
        slow("a", {"minibatch_size": 20, "recurrent": "gru", "recurrent_units": 5}),
        slow("b", {"minibatch_size": 10, "recurrent": "lstm", "recurrent_units": 5}),
    ],
)
def test_a_policy_learns_where_its_agent_can_act_and_its_value_where_the_agent_lives(name, settings):
    """In `Turns`, agents leave and enter, and their masks forbid every action in half of the steps."""
    pytest.importorskip("pettingzoo")
    from tests.multi_agent import Turns

    config = dataclasses.replace(CONFIG, env="", epochs=1, **settings)
    _, team, collect = parts_of_group(config, Turns, name)
    _, slow_team, _ = parts_of_group(config, Turns, name)
    whole = config.of_team(len(team.members))
    rate, gamma = tf.constant(1e-2), 0.9  # not that of the settings
    for update in range(2):
        collected, arrays = collect(update)
        check_predictions(collected, slow_team.agent, arrays)
        order = shuffled(whole, update)
        expected = slow_update(whole, slow_team.agent, slow_team.learner, arrays, collected, order, rate, gamma)
        some = SlowAgent(team.agent, arrays, None)
        assert some.acts.any() and (some.lives & ~some.acts).any() and not some.lives.all()
        if config.recurrent == "none":
            living, acting = (part.reshape(-1)[order].any(axis=1) for part in (some.lives, some.acts))
            assert (living & ~acting).any() and expected["gradient_steps"] == living.sum()
            assert name == "a" or not living.all()
        metrics = team.learner.update_in_graph(collected, rate, tf.constant(gamma), tf.constant(order))
        fast, reference = ((part.agent, part.learner) for part in (team, slow_team))
        check_update(fast, reference, metrics, expected)
    assert team.learner.update_in_graph.experimental_get_tracing_count() == 1


FAMILIES = {
    "vectors in two chains": ({}, None),
    "vectors in one chain": ({"network": f"{__name__}:twin"}, None),
    "a recurrent network": ({"recurrent": "gru", "recurrent_units": 5, "minibatch_size": 20}, None),
    "a custom network of Keras": ({"network": "tests.ppo.model.test_custom:keras_network"}, None),
    "images, which XLA does not compile": ({"cnn": "small", "minibatch_size": 20}, SmallImages),
    "several agents": ({"objective": "kl_penalty", "kl_target": 1e-3}, None),
}
"""Settings and envs of one policy of each kind."""


@pytest.mark.xla
@pytest.mark.parametrize("family", FAMILIES)
def test_the_update_that_users_run_equals_the_one_that_most_tests_run(family):
    """Up to rounding: weights differ by less than 1e-5 (6e-6 measured) and learn by more than 1e-4 in each array."""
    settings, make = FAMILIES[family]
    config = dataclasses.replace(CONFIG, **{"epochs": 2, **settings})
    sides = []
    for compiles in (True, False):
        compile_updates(compiles)
        if family == "several agents":
            pytest.importorskip("pettingzoo")
            from tests.multi_agent import Turns

            _, team, collect = parts_of_group(config, Turns, "a")
            agent, learner, whole = team.agent, team.learner, config.of_team(len(team.members))
        else:
            _, envs, agent, learner, collector = parts(config, make)
            envs.reset(seed=0)
            whole, collect = config, lambda number, of=collector: of.collect(number, 0).collected
        sides.append((compiles, agent, learner, collect))
    (_, agent, learner, collect), (_, slow_agent, slow_learner, _) = sides
    initial = [variable.numpy() for variable in agent.learned]
    for number in range(3):
        collected, *_ = collect(number)
        arguments = collected, tf.constant(1e-2), tf.constant(0.9), tf.constant(shuffled(whole, number))
        found = []
        for compiles, _, of_side, _ in sides:
            compile_updates(compiles)
            metrics = of_side.update_in_graph(*arguments)
            found.append({name: float(value) for name, value in metrics.items()})
        assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-6)
    for part, one, other in (("agent", agent, slow_agent), ("learner", learner, slow_learner)):
        for mine, theirs in zip(one.variables, other.variables, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=f"{part} {mine.name}")
    for variable, before in zip(agent.learned, initial, strict=True):
        assert np.abs(variable - before).max() > 1e-4, variable.name


@pytest.mark.xla
@pytest.mark.parametrize("network", [None, f"{__name__}:two_networks"])
def test_the_policy_and_the_value_function_learn_side_by_side(network):
    """TensorFlow runs two functions concurrently only if neither writes a variable that the other one uses."""
    _, envs, agent, learner, collector = parts(dataclasses.replace(CONFIG, network=network))
    envs.reset(seed=0)
    arguments = tf.constant(1e-2), tf.constant(0.99), tf.constant(shuffled(CONFIG, 0))
    learner.update_in_graph.get_concrete_function(*collector.collect(0, 0).collected, *arguments)  # compiles nothing
    parts_of_update = (*learner._chains, learner._new_estimates)
    functions = [function for part in parts_of_update for function in part._list_all_concrete_functions()]
    *chains, estimates = [
        {id(tensor) for tensor in function.captured_inputs if tensor.dtype == tf.resource} for function in functions
    ]
    for group, adam, held in zip(agent.learned_groups, learner.optimizers, chains, strict=True):
        assert {id(variable.handle) for variable in (*group, *adam.variables)} <= held
    policy, value = chains
    assert not policy & (value | estimates)


@pytest.mark.parametrize("settings", [{}, {"network": f"{__name__}:two_networks"}], ids=str)
def test_gradients_of_the_policy_and_the_value_function_are_clipped_separately(settings):
    found = []
    for value_coef in (1.0, 100.0):
        config = dataclasses.replace(CONFIG, value_coef=value_coef, max_grad_norm=1e-3, adam_epsilon=1.0, **settings)
        _, envs, agent, learner, collector = parts(config)
        envs.reset(seed=0)
        update_eagerly(config, learner, *collector.collect(0, 0).collected)
        found.append([variable.numpy() for variable in agent.learned_groups[0]])
        assert learner.optimizers[0].learned[-1] is agent.log_std
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "settings", [{"recurrent": "gru", "minibatch_size": 20}, {"network": f"{__name__}:twin"}], ids=str
)
def test_a_network_with_common_layers_has_one_optimizer(settings):
    agent, learner = parts(dataclasses.replace(CONFIG, **settings))[2:4]
    (adam,) = learner.optimizers
    assert [id(variable) for variable in adam.learned] == [id(variable) for variable in agent.learned]


@pytest.mark.parametrize(
    ("settings", "make", "enabled", "parts_compiled", "whole_compiled"),
    [
        ({}, None, True, 4, False),  # two chains, the estimates and the KL
        ({}, None, False, 0, False),
        ({"network": f"{__name__}:twin"}, None, True, 0, True),
        ({"network": f"{__name__}:twin"}, None, False, 0, False),
        ({"network": f"{__name__}:graph_function_twin"}, None, True, 0, False),
        ({"cnn": "small"}, SmallImages, True, 0, False),
    ],
)
def test_xla_compiles_the_whole_update_or_the_parts_of_two_chains_but_neither_images_nor_graph_functions(
    monkeypatch, settings, make, enabled, parts_compiled, whole_compiled
):
    made = []

    def graph_function(function, *, jit_compile=False):
        made.append(jit_compile)
        return function

    monkeypatch.setattr("ppo.algorithm.update.graph_function", graph_function)
    monkeypatch.setattr("ppo.algorithm.update.compiles_updates", enabled)
    parts(dataclasses.replace(CONFIG, **settings), make)
    assert made == [True] * parts_compiled + [False, whole_compiled]  # `observe` and the whole update come last


def test_updates_are_compiled_by_default():
    """In a fresh copy of the module, because `tests/conftest.py` sets the flag."""
    spec = importlib.util.find_spec("ppo.algorithm.update")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert fresh.compiles_updates


@pytest.mark.parametrize("observations", [True, False])
@pytest.mark.parametrize("rewards", [True, False])
def test_a_new_learner_lacks_statistics_if_observations_or_rewards_are_normalized(observations, rewards):
    config = dataclasses.replace(CONFIG, normalize_observations=observations, normalize_rewards=rewards)
    assert parts(config)[3].lacks_statistics == (observations or rewards)


def test_the_kl_penalty_begins_at_1_and_the_base_learning_rate_at_the_configured_one():
    learner = parts(dataclasses.replace(CONFIG, objective="kl_penalty", learning_rate=0.125))[3]
    assert float(learner.penalty) == 1 and float(learner.base_rate) == 0.125


def test_the_explained_variance_is_finite_and_at_most_1_if_all_targets_are_equal():
    config = dataclasses.replace(CONFIG, normalize_rewards=False, epochs=1, minibatch_size=40)
    _, envs, _, learner, collector = parts(config)
    envs.reset(seed=0)
    (collected,) = collector.collect(0, 0).collected
    rollout = collected.rollout
    every_step_ends = {"rewards": tf.ones_like(rollout.rewards), "terminated": tf.ones_like(rollout.terminated)}
    collected = collected._replace(rollout=rollout._replace(**every_step_ends))
    assert -np.inf < update_eagerly(config, learner, collected)["explained_variance"] <= 1


def test_the_kl_of_a_policy_that_sees_images_is_the_mean_over_the_first_quarter_of_the_last_epoch():
    config = dataclasses.replace(CONFIG, num_steps=5, minibatch_size=2, epochs=2, cnn="small")
    _, envs, agent, learner, collector = parts(config, SmallImages)
    envs.reset(seed=0)
    (collected,) = collector.collect(0, 0).collected
    now = collected.predictions.outputs
    old = now + tf.random.stateless_normal(now.shape, (0, 1))
    collected = collected._replace(predictions=collected.predictions._replace(outputs=old))
    metrics = update_eagerly(config, learner, collected, rate=0.0)  # so the policy does not change
    chosen = shuffled(config, 0)[10:13].flatten()  # 3 of 10 minibatches
    kls = agent.distribution.kl(old, now).numpy().flatten()
    assert float(metrics["kl"]) == pytest.approx(kls[chosen].mean(), rel=1e-4)


def test_a_custom_network_may_call_a_graph_function_with_a_loop():
    _, envs, agent, learner, collector = parts(dataclasses.replace(CONFIG, network=f"{__name__}:graph_function_twin"))
    envs.reset(seed=0)
    learner.update(*collector.collect(0, 0).collected, 0)
    agent.act(np.zeros([4, 3], np.float32), agent.initial_state(4))


def test_a_rollout_runs_in_order():
    """TensorFlow lowers loops that are traced for its parallel executor to operations that the other one rejects."""
    _, envs, _, _, collector = parts(CONFIG)
    envs.reset(seed=0)
    collector.collect(0, 0)
    (rollout,) = collector.collect_in_graph._list_all_concrete_functions()
    (loop,) = [operation for operation in rollout.graph.get_operations() if "While" in operation.type]
    assert "_lower_using_switch_merge" not in loop.node_def.attr


@pytest.mark.parametrize("objective", ["clip", pytest.param("kl_penalty", marks=pytest.mark.slow)])
def test_an_update_is_finite_even_if_actions_have_become_exp_450_times_as_likely(objective):
    _, envs, _, learner, collector = parts(dataclasses.replace(CONFIG, objective=objective))
    envs.reset(seed=0)
    (collected,) = collector.collect(0, 0).collected
    mean, log_std = tf.unstack(collected.predictions.outputs, axis=-1)
    far = tf.stack([mean + 30 * tf.exp(log_std), log_std], axis=-1)
    predictions = collected.predictions._replace(outputs=far)
    collected = collected._replace(predictions=predictions, noise=collected.noise - 30)  # the same actions
    metrics = update_eagerly(CONFIG, learner, collected)
    assert all(np.isfinite(value) for value in metrics.values()) and metrics["approx_kl"] > 1e6


@pytest.mark.parametrize("settings", [*both({}), slow({"objective": "kl_penalty"})], ids=str)
def test_without_a_living_agent_an_update_takes_no_step(settings):
    """Weights, Adam's moments and its step counter stay as they are, even if earlier updates left momentum."""
    pytest.importorskip("pettingzoo")
    from tests.multi_agent import Turns

    config = dataclasses.replace(CONFIG, env="", **settings)
    _, team, collect = parts_of_group(config, Turns, "b")
    arguments = tf.constant(1e-2), tf.constant(0.99), tf.constant(shuffled(config, 0))
    team.learner.update_in_graph(collect(0)[0], *arguments)
    collected, _ = collect(1)
    rollout = collected.rollout
    collected = collected._replace(rollout=rollout._replace(valid=tf.zeros_like(rollout.valid)))
    variables = [*team.agent.variables, *(v for adam in team.learner.optimizers for v in adam.variables)]
    before = [variable.numpy() for variable in variables]
    assert any(np.any(value) for value in before[len(team.agent.variables) :])
    metrics = team.learner.update_in_graph(collected, *arguments)
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable, value, err_msg=variable.name)
    assert metrics["gradient_steps"] == 0 and metrics["kl"] == 0
    assert all(np.isnan(metrics[name]) for name in METRICS)  # not measured


class Echo(gym.Env):
    """Shows a random letter in every step, and rewards the action that equals it, whatever happened before."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps, self._letter = 0, int(self.np_random.integers(2))
        return self._letter, {}

    def step(self, action):
        reward = float(action == self._letter)
        self._steps, self._letter = self._steps + 1, int(self.np_random.integers(2))
        return self._letter, reward, False, self._steps == 9, {}


def probabilities_of_echoes():
    """Returns the probability with which a policy repeats each letter after ten updates."""
    # With a greater lambda, the advantage of a step contains those of later steps.
    config = dataclasses.replace(CONFIG, num_steps=32, minibatch_size=32, gae_lambda=0.0)
    _, envs, agent, learner, collector = parts(config, Echo)
    envs.reset(seed=0)
    for number in range(10):
        (collected,) = collector.collect(number, 0).collected
        order = tf.constant(shuffled(config, number))
        learner.update_in_graph(collected, tf.constant(1e-2), tf.constant(0.99), order)
    outputs = agent.step(tf.range(2), tf.zeros([2, agent.state_size])).outputs
    return np.diagonal(tf.nn.softmax(outputs))


def test_a_policy_learns_which_action_was_right_in_which_state():
    assert (probabilities_of_echoes() > 0.9).all()


@pytest.mark.slow
@pytest.mark.parametrize("steps", [-1, 1])
def test_a_policy_learns_nothing_from_the_advantages_of_other_steps(monkeypatch, steps):
    """Shows that `test_a_policy_learns_which_action_was_right_in_which_state` can fail."""
    right = losses.gae

    def wrong(**rollout):
        advantages, targets = right(**rollout)
        return tf.roll(advantages, steps, axis=0), targets

    monkeypatch.setattr(losses, "gae", wrong)
    assert (probabilities_of_echoes() < 0.7).any()


class Twin(tf.Module):
    """The built-in network as a custom network for vectors in any nesting."""

    def __init__(self, inputs, num_outputs, seed):
        super().__init__()
        mlp = functools.partial(MLP, activation="tanh", rng=np.random.default_rng(seed))
        self.width = sum(spec.shape[1] for spec in self.leaves(inputs))
        sizes = [self.width, 8]
        self.policy = mlp([*sizes, num_outputs], output_gain=CONFIG.policy_output_gain, name="policy")
        self.value = mlp([*sizes, 1], output_gain=1.0, name="value")

    def leaves(self, nested):
        """Returns the leaves in the order of the space, unlike `tf.nest.flatten`, which sorts keys."""
        if isinstance(nested, (tf.Tensor, tf.TensorSpec)):
            return [nested]
        children = nested.values() if isinstance(nested, dict) else nested
        return [leaf for child in children for leaf in self.leaves(child)]

    def __call__(self, inputs):
        hidden = tf.concat(self.leaves(inputs), axis=-1)
        return self.policy(hidden), self.value(hidden)


class Half(tf.Module):
    """One of the two networks of a twin."""

    def __init__(self, twin, network):
        super().__init__()
        self._leaves, self._network = twin.leaves, network

    def __call__(self, inputs):
        return self._network(tf.concat(self._leaves(inputs), axis=-1))


class TwinWithControlFlow(Twin):
    """Needs AutoGraph."""

    def __call__(self, inputs):
        scale = tf.zeros([])
        for _ in tf.range(4):
            scale += 0.25
        outputs, values = super().__call__(tf.nest.map_structure(lambda leaf: leaf * scale, inputs))
        if scale < 0.5:
            values = -values
        return outputs, values


class TwinWithGraphFunction(Twin):
    """Calls a graph function with a loop, which XLA cannot differentiate correctly together with the update."""

    def __init__(self, inputs, num_outputs, seed):
        super().__init__(inputs, num_outputs, seed)
        self._traced_once = tf.function(self._hidden, input_signature=[tf.TensorSpec([None, self.width])])

    def _hidden(self, x):
        return tf.while_loop(lambda i, _: i < 4, lambda i, y: (i + 1, y + 0.25 * x), (0, tf.zeros_like(x)))[1]

    def __call__(self, inputs):
        hidden = self._traced_once(tf.concat(self.leaves(inputs), axis=-1))
        return self.policy(hidden), self.value(hidden)


def twin(inputs, num_outputs, seed):
    return Twin(inputs, num_outputs, seed)


def two_networks(inputs, num_outputs, seed):
    twin = Twin(inputs, num_outputs, seed)
    return Half(twin, twin.policy), Half(twin, twin.value)


def control_flow_twin(inputs, num_outputs, seed):
    return TwinWithControlFlow(inputs, num_outputs, seed)


def graph_function_twin(inputs, num_outputs, seed):
    return TwinWithGraphFunction(inputs, num_outputs, seed)


class Renamed(gym.ObservationWrapper):
    """Pendulum, with observations nested in different ways."""

    def __init__(self, kind):
        super().__init__(gym.make(CONFIG.env, max_episode_steps=7))
        self._nest = {
            "box": lambda x: x,
            "dict": lambda x: {"z": x[:1], "a": x[1:]},
            "nested": lambda x: {"z": (x[2:], {"y": x[:1], "b": x[1:2]}), "a": x[1:]},
        }[kind]
        self.observation_space = self._space(self._nest(np.zeros(3, np.float32)))

    def _space(self, example):
        if isinstance(example, dict):
            return gym.spaces.Dict([(key, self._space(child)) for key, child in example.items()])
        if isinstance(example, tuple):
            return gym.spaces.Tuple([self._space(child) for child in example])
        return gym.spaces.Box(-np.inf, np.inf, example.shape, np.float32)

    def observation(self, observation):
        return self._nest(observation)


def compiled_code():
    """Returns the bytes of machine code that XLA has compiled and TensorFlow never frees; 0 on other systems."""
    maps = Path("/proc/self/maps")
    fields = [line.split() for line in maps.read_text().splitlines()] if maps.exists() else []
    ends = [field[0].split("-") for field in fields if "x" in field[1] and len(field) == 5]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


@pytest.mark.xla
@pytest.mark.slow  # `test_the_update_equals_the_slow_update` has a quick case with a custom network
@pytest.mark.parametrize(
    ("kind", "network", "settings"),
    [
        ("box", "twin", {}),
        ("dict", "two_networks", {}),
        ("nested", "control_flow_twin", {}),
        ("nested", "graph_function_twin", {"objective": "kl_penalty"}),
    ],
)
def test_a_custom_network_trains_like_the_same_built_in_network_and_compiles_once(kind, network, settings):
    metrics = []
    for custom in (None, f"{__name__}:{network}"):
        # Without clipping, one network with separate layers learns exactly like two networks.
        config = dataclasses.replace(CONFIG, learning_rate=1e-2, network=custom, max_grad_norm=1e6, **settings)
        _, envs, _, learner, collector = parts(config, lambda: Renamed(kind))
        envs.reset(seed=0)
        learner.observe(*collector.collect(0, 0).collected)
        found, code = [], []
        for update in range(3):
            found.append(learner.update(*collector.collect(update, 0).collected, update))
            code.append(compiled_code())
        assert len(set(code)) == 1, "XLA compiled more than once"
        metrics.append(found)
    for expected, found in zip(*metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert found["kl"] > 1e-4


@pytest.mark.parametrize(
    "settings", [*both({}), slow({"num_envs": 64}), slow({"recurrent": "gru", "minibatch_size": 20})], ids=str
)
def test_training_reads_neither_released_slabs_nor_unwritten_rows(settings):
    """Filling every released slab with NaN leaves the trained weights bit-identical."""
    config = dataclasses.replace(CONFIG, **settings)
    results = []
    for poisoned in (False, True):
        vector, envs, agent, learner, collector = parts(config)
        envs.reset(seed=0)
        for update in range(5):
            (collected,) = collector.collect(update, 0).collected
            order = tf.constant(shuffled(config, update))
            learner.update_in_graph(collected, tf.constant(1e-2), tf.constant(0.99), order)
            if poisoned:
                low = update % 2 * (config.num_steps + 1)
                for array in vector.arrays.values():
                    array[low : low + config.num_steps + 1] = np.nan if array.dtype.kind == "f" else 1
        results.append([variable.numpy() for variable in (*agent.variables, *learner.variables)])
        assert all(np.isfinite(value).all() for value in results[-1])
    for clean, after_poison in zip(*results, strict=True):
        np.testing.assert_array_equal(clean, after_poison)


def test_every_epoch_visits_every_sample_once_in_a_new_order():
    order = shuffled(CONFIG, 0).reshape(CONFIG.epochs, -1)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(40), (3, 1)))
    assert (order[0] != order[1]).any()
    np.testing.assert_array_equal(shuffled(CONFIG, 5), shuffled(CONFIG, 5))
    assert (shuffled(CONFIG, 5) != shuffled(CONFIG, 6)).any()
    of_envs = shuffled(dataclasses.replace(CONFIG, recurrent="gru", minibatch_size=20), 0).reshape(6, 10, 2)
    assert of_envs.dtype == np.int32
    np.testing.assert_array_equal(of_envs, of_envs[:, :1] + 4 * np.arange(10)[:, None])  # all steps of two envs
    np.testing.assert_array_equal(np.sort(of_envs[:, 0].reshape(3, 4), axis=1), np.tile(np.arange(4), (3, 1)))
