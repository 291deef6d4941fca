"""Tests of vecenv/wrappers.py: each wrapper, alone and in vector envs."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import vecenv
from tests.helpers import CountingEnv, SampledEnv, assert_same
from vecenv.testing import check_vector_env
from vecenv.wrappers import FrameDelta, IgnoreKeys, RandomStart

WRAPPERS = {
    "RandomStart": lambda env: RandomStart(env, max_steps=4),
    "FrameDelta": FrameDelta,
    "both": lambda env: FrameDelta(RandomStart(env, max_steps=4)),
}


def cartpole():
    return gym.make("CartPole-v1", max_episode_steps=20)


class Walk(gym.Env):
    """Adds each action to a position and records it; ends after `length` steps. The seed determines where it starts."""

    observation_space = spaces.Box(-1e6, 1e6, (1,), np.float64)
    action_space = spaces.Box(0, 1, (1,), np.float64)

    def __init__(self, length=100):
        self.length = length
        self.history, self.resets = [], []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.random(1)
        self.taken = []
        self.history.append(self.taken)
        self.resets.append((seed, options))
        return self.position.copy(), {"reset": True, "steps": 0}

    def step(self, action):
        self.position += action
        self.taken.append(float(action[0]))
        over = len(self.taken) == self.length
        return self.position.copy(), 1.0, over, False, {"steps": len(self.taken)}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.filterwarnings("ignore:.*(different from the unwrapped version|is -?infinity)")
def test_the_wrappers_pass_gymnasiums_env_checker(name):
    """The checker also warns about every wrapper and about the infinite bounds of CartPole's observations."""
    check_env(WRAPPERS[name](cartpole().unwrapped), skip_render_check=True)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_wrappers_pass_the_conformance_suite(name):
    assert len(check_vector_env(lambda: WRAPPERS[name](cartpole()))) == 15


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_parallel_equals_serial(name, mode):
    fns = [lambda: WRAPPERS[name](cartpole())] * 3
    results = []
    for make in (vecenv.SyncVectorEnv, lambda *a, **k: vecenv.AsyncVectorEnv(*a, num_workers=2, **k)):
        with make(fns, autoreset_mode=mode) as envs:
            found = [envs.reset(seed=5)]
            found += [envs.step(np.full(3, t % 2)) for t in range(60)]
            results.append(tuple(found))
    assert_same(*results)
    assert sum(step[2].sum() + step[3].sum() for step in results[0][1:]) > 3


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_spec_makes_an_equal_env(name):
    env = WRAPPERS[name](cartpole())
    again = gym.make(env.spec)
    assert str(again) == str(env)
    assert_same(again.reset(seed=3), env.reset(seed=3))
    assert_same(again.step(0), env.step(0))


def test_a_random_start_takes_every_allowed_number_of_steps_and_returns_the_last_observation():
    walk = Walk()
    env = RandomStart(walk, max_steps=3)
    for seed in range(200):
        observation, info = env.reset(seed=seed, options={"level": 2})
        assert observation == walk.position and info == {"reset": True, "steps": len(walk.taken)}
        assert walk.resets[-1] == (seed, {"level": 2})
    assert (
        np.bincount([len(taken) for taken in walk.history], minlength=4).min() > 25
    )  # about 50 each of 0, 1, 2 and 3 steps
    actions = [action for taken in walk.history for action in taken]
    assert len(set(actions)) == len(actions) > 200 and 0.4 < np.mean(actions) < 0.6


def test_a_random_start_depends_only_on_the_seed():
    """It neither uses nor changes the action space's generator, and unseeded resets differ from each other."""
    histories = []
    for seed in (None, 1):
        walk = Walk()
        walk.action_space = spaces.Box(0, 1, (1,), np.float64, seed=seed)
        env = RandomStart(walk, max_steps=5)
        env.action_space.seed(seed)
        env.reset(seed=8)
        for _ in range(20):
            env.reset()
        histories.append(walk.history)
        if seed == 1:
            assert env.action_space.sample() == spaces.Box(0, 1, (1,), np.float64, seed=1).sample()
    assert histories[0] == histories[1]
    assert len(set(map(tuple, histories[0]))) > 15


def test_a_random_start_resets_again_if_the_episode_ends():
    walk = Walk(length=2)
    env = RandomStart(walk, max_steps=3)
    for seed in range(50):
        observation, info = env.reset(seed=seed, options={"level": 2})
        assert len(walk.taken) < 2 and observation == walk.position and info["steps"] == len(walk.taken)
    again = [reset for reset in walk.resets if reset[0] is None]
    assert len(again) > 10 and all(options == {"level": 2} for _, options in again)


def test_a_random_start_with_max_steps_zero_is_an_error():
    with pytest.raises(ValueError, match="max_steps=0: it must be 1 or more"):
        RandomStart(Walk(), max_steps=0)


def test_frame_deltas_add_up_to_the_observations():
    """The env writes each observation into the same array."""
    env, plain = FrameDelta(CountingEnv(3)), CountingEnv(3)
    for _ in range(2):
        total, _ = env.reset()
        np.testing.assert_array_equal(total, plain.reset()[0])
        for _ in range(3):
            delta, *_ = env.step(0)
            np.testing.assert_array_equal(delta, [0, 0, 1])
            total += delta
            np.testing.assert_array_equal(total, plain.step(0)[0])


@pytest.mark.parametrize(
    ("space", "low", "high", "dtype"),
    [
        (spaces.Box(0, 255, (2,), np.uint8), -255, 255, np.int16),
        (spaces.Box(5, 6, (2,), np.float32), -1, 6, np.float32),  # 5 to 6 after a reset, then -1 to 1
        (spaces.Box(-3, -1, (2,), np.int32), -3, 2, np.int64),
        (spaces.Box(-np.inf, np.inf, (2,), np.float64), -np.inf, np.inf, np.float64),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error")
def test_frame_deltas_are_within_the_bounds(space, low, high, dtype):
    env = FrameDelta(SampledEnv(space, spaces.Discrete(2)))
    assert env.observation_space == spaces.Box(dtype(low), dtype(high), (2,), dtype)
    assert env.reset(seed=0)[0] in env.observation_space
    deltas = [env.step(0)[0] for _ in range(100)]
    assert all(delta in env.observation_space for delta in deltas)
    assert np.min(deltas) < 0 < np.max(deltas)


@pytest.mark.filterwarnings("error")
def test_frame_deltas_of_bounds_too_large_to_subtract_are_unbounded():
    env = FrameDelta(SampledEnv(spaces.Box(-3e38, 3e38, (2,), np.float32), spaces.Discrete(2)))
    assert env.observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.Dict({"a": spaces.Discrete(2)}),
                                   spaces.Box(0, 9, (2,), np.int64), spaces.Box(0, 1, (2,), np.bool_)])  # fmt: skip
def test_frame_deltas_of_unsupported_spaces_are_an_error(space):
    with pytest.raises(ValueError, match="FrameDelta needs a Box of floats"):
        FrameDelta(SampledEnv(space, spaces.Discrete(2)))


NESTED = spaces.Dict(
    {
        "mission": spaces.Text(5),
        "sight": spaces.Dict({"near": spaces.Box(0, 1, (2,)), "far.off": spaces.Discrete(3), "words": spaces.Text(3)}),
        "a/b": spaces.Discrete(4),
        "pair": spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1)]),
    }
)


def ignoring(keys):
    return IgnoreKeys(SampledEnv(NESTED, spaces.Discrete(2)), keys)


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        (["mission", "sight/words"], {"sight": {"near", "far.off"}, "a/b": None, "pair": None}),
        (["sight.words", "a/b"], {"mission": None, "sight": {"near", "far.off"}, "pair": None}),
        (["sight/far.off", "pair"], {"mission": None, "sight": {"near", "words"}, "a/b": None}),
        (["sight/near", "sight"], {"mission": None, "a/b": None, "pair": None}),
        ([], {"mission": None, "sight": {"near", "far.off", "words"}, "a/b": None, "pair": None}),
    ],
)
def test_ignored_keys_are_dropped_and_all_else_is_unchanged(keys, left):
    env, plain = ignoring(keys), SampledEnv(NESTED, spaces.Discrete(2))
    for found, whole in [(env.reset(seed=1)[0], plain.reset(seed=1)[0]), (env.step(0)[0], plain.step(0)[0])]:
        assert found in env.observation_space and found.keys() == left.keys()
        for key, names in left.items():
            expected = whole[key] if names is None else {name: whole[key][name] for name in names}
            assert_same(found[key], expected)


def test_envs_with_ignored_keys_are_the_same_in_parallel():
    fns = [lambda: ignoring(["mission", "sight/words"])] * 3
    results = []
    for make in (vecenv.SyncVectorEnv, lambda *a, **k: vecenv.AsyncVectorEnv(*a, num_workers=2, **k)):
        with make(fns, autoreset_mode="SameStep") as envs:
            found = [envs.reset(seed=5)]
            results.append(tuple(found + [envs.step(np.full(3, t % 2)) for t in range(40)]))
    assert_same(*results)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["misson"], r"no key 'misson' to ignore: it has \['a/b', 'mission', 'pair/0', .*'sight/words'\]"),
        (["pair/0"], "no key 'pair/0'"),
        (["mission", "sight", "a/b", "pair"], r"leaves nothing to observe: drop fewer keys"),
    ],
)
def test_ignoring_a_key_that_does_not_exist_or_all_keys_is_an_error(keys, message):
    with pytest.raises(ValueError, match=message):
        ignoring(keys)
    with pytest.raises(ValueError, match=r"no keys to ignore: it is Box\(.*, not a Dict"):
        IgnoreKeys(cartpole(), ["x"])


@pytest.mark.filterwarnings("ignore:.*(different from the unwrapped version)")
def test_gymnasiums_checker_and_the_conformance_suite_pass_envs_with_ignored_keys():
    check_env(ignoring(["mission"]), skip_render_check=True)
    assert len(check_vector_env(lambda: ignoring(["mission", "sight/words"]))) > 12
