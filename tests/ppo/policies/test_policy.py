"""Tests of ppo/policies/policy.py: sampled actions, values and log-probabilities of a loaded policy."""

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import ppo
import vecenv
from ppo import Policy, Run
from ppo.envs import env_options
from ppo.policies.policy import load_agent
from tests.helpers import CountingEnv, assert_same
from tests.ppo.runs import untrained_run

SEEN = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ONE = np.array([0.5, -1.0, 2.0], np.float32)
MANY = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)


@pytest.fixture
def load(tmp_path):
    """Returns a function that loads an untrained policy. The policy's outputs depend on the observation."""

    def load(action_space, observation_space=SEEN, **settings) -> Policy:
        run = untrained_run(tmp_path, observation_space, action_space, **{"policy_output_gain": 1.0, **settings})
        return ppo.load_policy(run)

    return load


ALL_ACTIONS = {
    "Discrete": (spaces.Discrete(4, start=-1), [-1, 0, 1, 2]),
    "MultiDiscrete": (spaces.MultiDiscrete([2, 3]), [[i, j] for i in range(2) for j in range(3)]),
    "MultiBinary": (spaces.MultiBinary(2), [[0, 0], [0, 1], [1, 0], [1, 1]]),
}


@pytest.mark.parametrize("kind", ALL_ACTIONS)
def test_probabilities_sum_to_one_and_are_the_frequencies_of_samples(load, kind):
    space, actions = ALL_ACTIONS[kind]
    policy = load(space)
    probabilities = np.exp(policy.log_prob(np.tile(ONE, (len(actions), 1)), actions))
    assert probabilities.sum() == pytest.approx(1, abs=1e-5) and np.ptp(probabilities) > 0.05
    policy.seed(0)
    sampled = policy(np.tile(ONE, (10_000, 1)), deterministic=False)
    assert sampled.dtype == space.dtype and sampled.shape == (10_000, *space.shape)
    counts = [(sampled.reshape(10_000, -1) == np.reshape(action, -1)).all(axis=1).sum() for action in actions]
    assert sum(counts) == 10_000
    deviation = np.sqrt(10_000 * probabilities * (1 - probabilities))
    assert (np.abs(counts - 10_000 * probabilities) < 5 * deviation).all()
    single = policy(ONE)
    assert policy.log_prob(ONE, single) == pytest.approx(np.log(probabilities.max()), abs=1e-5)


@pytest.mark.parametrize("transform", ["clip", "tanh"])
def test_the_density_of_a_box_action_integrates_to_one_and_matches_the_samples(load, transform):
    space = spaces.Box(-2.0, 6.0, (1,), np.float32)
    policy = load(space, action_transform=transform, initial_log_std=-1.5, policy_output_gain=0.01)
    edges = np.linspace(-2, 6, 4001, dtype=np.float32)
    middles = ((edges[1:] + edges[:-1]) / 2)[:, None]
    masses = np.exp(policy.log_prob(np.tile(ONE, (4000, 1)), middles)) * np.diff(edges)
    assert masses.sum() == pytest.approx(1, abs=1e-3)
    policy.seed(1)
    sampled = policy(np.tile(ONE, (10_000, 1)), deterministic=False)
    assert sampled.dtype == np.float32 and np.ptp(sampled) > 0.5 and space.contains(sampled[0])
    for quantile in (0.1, 0.5, 0.9):
        below = masses[middles[:, 0] < np.quantile(sampled, quantile)].sum()
        assert below == pytest.approx(quantile, abs=0.02)


def test_an_action_at_a_bound_of_tanh_has_a_finite_density(load):
    policy = load(spaces.Box(-2.0, 6.0, (2,), np.float32), action_transform="tanh")
    assert np.isfinite(policy.log_prob(ONE, [-2.0, 6.0]))


def test_a_masked_action_is_not_sampled_and_has_no_probability(load):
    space = spaces.Dict({"action_mask": spaces.MultiBinary(3), "seen": SEEN})
    policy = load(spaces.Discrete(3), space)
    observation = {"action_mask": np.array([1, 0, 1], np.int8), "seen": ONE}
    batch = {name: np.repeat(part[None], 300, axis=0) for name, part in observation.items()}
    assert set(policy(batch, deterministic=False)) == {0, 2}
    allowed = [policy.log_prob(observation, action) for action in (0, 2)]
    assert np.exp(allowed).sum() == pytest.approx(1, abs=1e-5) and policy.log_prob(observation, 1) < -1e8
    for wrong in ({**batch, "seen": ONE[None]}, {**batch, "action_mask": observation["action_mask"][None]}):
        with pytest.raises(
            ValueError, match=r"observations\['(seen|action_mask)'\] has shape \(\d+, 3\), but the batch"
        ):
            policy(wrong)
    nothing = {**observation, "action_mask": np.zeros(3, np.int8)}
    for call in (lambda: policy(nothing, deterministic=False), lambda: policy.log_prob(nothing, 0)):
        with pytest.raises(ppo.NothingAllowed):
            call()


class Masked(gym.Env):
    """Its last observation of an episode has an empty mask, because no action follows it."""

    observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(5), "seen": SEEN})
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action):
        assert action[1] == 2  # the mask allows no other action
        self._steps += 1
        return self._observation(), 1.0, self._steps == 3, False, {}

    def _observation(self):
        mask = [0] * 5 if self._steps == 3 else [1, 1, 0, 0, 1]
        return {"action_mask": np.array(mask, np.int8), "seen": ONE}


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_policy_plays_in_a_vector_env_whose_ended_rows_have_an_empty_mask(load, num_envs, mode, deterministic):
    policy, ends = load(Masked.action_space, Masked.observation_space), 0
    with vecenv.SyncVectorEnv([Masked] * num_envs, autoreset_mode=mode) as envs:
        observations, _ = envs.reset(seed=0)
        for _ in range(10):
            actions = policy(observations, deterministic)
            assert envs.action_space.contains(actions)
            assert np.isfinite(policy.log_prob(observations, actions)).all()
            observations, _, terminated, _, _ = envs.step(actions)
            ends += terminated.sum()
    assert ends >= 2 * num_envs


def test_equal_seeds_sample_equal_actions(load):
    one, other = (load(spaces.Box(-1.0, 1.0, (2,), np.float32)) for _ in range(2))
    assert (one(MANY, deterministic=False) != other(MANY, deterministic=False)).any()
    one.seed(3)
    other.seed(3)
    first, second = one(MANY, deterministic=False), one(MANY, deterministic=False)
    np.testing.assert_array_equal(first, other(MANY, deterministic=False))
    assert (first != second).any() and one(ONE, deterministic=False).shape == (2,)
    np.testing.assert_array_equal(one(MANY), other(MANY))  # the default is deterministic


def test_values_are_in_the_units_of_rewards(load, tmp_path):
    space = spaces.Discrete(2)
    policy = load(space)
    (path,) = tmp_path.iterdir()
    agent = load_agent(Run.open(path), print)
    encoded = agent.network.encode(agent.observations.inputs(tf.constant(MANY)))
    wanted = agent.values(agent.network.features(encoded), encoded).numpy()
    np.testing.assert_allclose(policy.value(MANY), wanted, atol=1e-5)
    assert policy.value(ONE).shape == () and policy.value(MANY).dtype == np.float32
    np.testing.assert_allclose(policy.value(MANY), [policy.value(one) for one in MANY], atol=1e-5)
    scaled = Policy(agent, return_scale=3.0)
    np.testing.assert_allclose(scaled.value(MANY), 3 * wanted, atol=1e-5)


def test_a_recurrent_policys_values_and_log_probs_leave_its_memory_as_it_is(load):
    policy = load(spaces.Box(-1.0, 1.0, (1,), np.float32), recurrent="gru", num_steps=16)
    at_start = policy.value(MANY)
    assert policy.memory is None
    first = policy(MANY)
    memory = policy.memory
    value, log_prob, after = policy.value(MANY), policy.log_prob(MANY, first), policy(MANY)
    assert (value != at_start).all() and (after != first).all()
    policy.memory = memory
    np.testing.assert_array_equal(policy.log_prob(MANY, first), log_prob)
    np.testing.assert_array_equal(policy(MANY), after)
    policy.memory = memory
    policy.reset(np.array([True] + [False] * 4))
    assert (policy.memory[0] == 0).all() and (memory[0] != 0).all()
    with pytest.raises(ValueError, match="remembers 5 envs, but this call has 1"):
        policy.value(ONE)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_copied_or_pickled_policy_goes_on_like_the_original(load, copied):
    policy = load(spaces.Box(-99, 99, (2,), np.float32), recurrent="gru", normalize_observations=True)
    for variable in policy._agent.variables:  # as after training
        variable.assign(variable + 0.05)
    policy._return_scale = 2.5
    policy(MANY)
    twin = copied(policy)
    assert_same(twin.value(MANY), policy.value(MANY))
    for _ in range(2):
        assert_same(twin(MANY, deterministic=False), policy(MANY, deterministic=False))


class Opponent(CountingEnv):
    """Observes the value that a policy assigns to its state."""

    def __init__(self, policy):
        super().__init__(0)
        self._policy = policy

    def _observe(self):
        return np.array([0, 0, self._policy.value(ONE)])


@pytest.mark.slow
def test_functions_that_make_envs_may_capture_a_policy(load, capfd):
    policy = load(spaces.Discrete(2))
    with vecenv.AsyncVectorEnv([lambda: Opponent(policy)], num_workers=1) as envs:
        assert envs.reset()[0][0, 2] == pytest.approx(policy.value(ONE), abs=1e-6)
    assert capfd.readouterr().err == ""


def test_invalid_actions_and_observations_are_errors(load):
    policy = load(spaces.Discrete(3))
    for observations, actions in (
        (ONE, 3),
        (ONE, [0]),
        (MANY, 0),
        (MANY, [0] * 4),
        (MANY, [0, 1, 2, 3, 0]),
        (ONE, 0.7),
    ):
        with pytest.raises(ValueError, match=r"is not (an action|a batch of 5 actions) in Discrete\(3\)"):
            policy.log_prob(observations, actions)
    for call in (policy.value, lambda wrong: policy.log_prob(wrong, 0), lambda wrong: policy(wrong, False)):
        with pytest.raises(ValueError, match="shape"):
            call(np.zeros(4))


def test_observations_that_do_not_fit_their_space_are_an_error(load):
    wrong = {
        "an image scaled to [0, 1]": (spaces.Box(0, 255, (40, 40, 3), np.uint8), np.full((40, 40, 3), 0.5)),
        "an int above the dtype's": (spaces.Box(0, 255, (3,), np.uint8), [1, 2, 256]),
        "a fraction": (spaces.Discrete(3), 0.9),
        "a choice that does not exist": (spaces.Discrete(3, start=1), [0, 2, 4]),
        "one of many": (spaces.MultiDiscrete([2, 2]), [0, 2]),
        "a bool": (spaces.MultiBinary(3), [0.2, 0.9, 0]),
        "NaN": (SEEN, [0, np.nan, 0]),
        "text": (SEEN, ["a", "b", "c"]),
    }
    for name, (space, observation) in wrong.items():
        policy = load(spaces.Discrete(2), space)
        for call in (policy, policy.value):
            with pytest.raises(
                ValueError, match=r"^observations (has|holds) .*(cannot hold|not numeric|outside|is not finite)"
            ):
                call(observation)
                pytest.fail(name)
    left = load(spaces.Discrete(2), spaces.Discrete(3, start=1))([0, 2])  # 0: the row of an agent that has left
    assert left.shape == (2,)
    full = spaces.MultiDiscrete([100, 100], start=[28, 28], dtype=np.int8)  # up to the largest int8
    assert load(spaces.Discrete(2), full)(np.array([127, 28], np.int8)) in (0, 1)
    with pytest.raises(ValueError, match="shape"):
        load(spaces.Discrete(2), full)([[30, 30, 30]])
    masked = spaces.Dict(x=SEEN, action_mask=spaces.MultiBinary(2))
    assert load(spaces.Discrete(2), masked)({"x": ONE, "action_mask": np.array([0, 255], np.uint8)}) == 1
    assert load(spaces.Discrete(2), spaces.MultiBinary(3))([True, False, True]) in (0, 1)


@pytest.mark.parametrize("space", [SEEN, spaces.Discrete(3), spaces.Dict(x=SEEN), spaces.Tuple([SEEN, SEEN])])
def test_the_error_for_what_reset_returns_says_to_pass_its_first_element(load, space):
    with pytest.raises(ValueError, match="`reset` and `step` return tuples: pass only the observation, their first"):
        load(spaces.Discrete(2), space)((space.sample(), {}))


def test_an_observation_without_a_key_is_an_error_that_names_it(load):
    with pytest.raises(ValueError, match=r"observations\[1\]\['x'\] is missing, but the networks need it$"):
        load(spaces.Discrete(2), spaces.Tuple([SEEN, spaces.Dict(x=SEEN)]))((ONE, {}))


def test_the_error_for_an_array_instead_of_a_dict_names_the_keys(load):
    with pytest.raises(ValueError, match=r"Pass a dict with the keys 'a', 'b', not an array of shape \(12,\)$"):
        load(spaces.Discrete(2), spaces.Dict(a=SEEN, b=SEEN))(np.zeros(12))


def test_the_return_scale_of_a_run_is_in_its_checkpoint(tmp_path):
    scales = []

    class Listening(ppo.Callback):
        def on_update(self, report):
            scales.append(report["return_scale"])

    config = ppo.Config(
        env="Pendulum-v1", total_steps=32, num_envs=2, num_workers=0, num_steps=16, minibatch_size=16, epochs=1,
        eval_episodes=1,
    )  # fmt: skip
    run = ppo.train(config, callbacks=Listening(), logdir=tmp_path)
    policy, agent = ppo.load_policy(run.path), load_agent(Run.open(run.path), print)
    unscaled = Policy(agent)
    assert scales[-1] > 1.5
    np.testing.assert_allclose(policy.value(MANY), scales[-1] * unscaled.value(MANY), rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"env": "CartPole-v1", "wrappers": ("TimeAwareObservation",), "env_kwargs": {"max_episode_steps": 7}},
        {"env": "Taxi-v4", "wrappers": ("TimeAwareObservation",), "info_masks": True},
    ],
)
def test_the_code_in_the_warning_about_wrappers_makes_the_env_that_the_policy_was_trained_on(tmp_path, settings):
    config = ppo.Config(**settings)
    env = vecenv.make_single(config.env, **env_options(config))
    run = untrained_run(tmp_path, env.observation_space, env.action_space, given=False, **settings)
    with pytest.warns(UserWarning, match="with the wrappers TimeAwareObservation: use it with") as warnings:
        policy = ppo.load_policy(run)
    advised = eval(str(warnings[0].message).split("`")[1], {"vecenv": vecenv})
    assert advised.observation_space == policy.observation_space == env.observation_space
