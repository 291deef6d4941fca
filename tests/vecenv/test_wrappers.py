"""Tests of vecenv/wrappers.py: IgnoreKeys, alone and in vector envs."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import vecenv
from tests.helpers import SampledEnv, assert_same
from vecenv.testing import check_vector_env
from vecenv.wrappers import IgnoreKeys

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
        IgnoreKeys(gym.make("CartPole-v1"), ["x"])


@pytest.mark.filterwarnings("ignore:.*(different from the unwrapped version)")
def test_gymnasiums_checker_and_the_conformance_suite_pass_envs_with_ignored_keys():
    check_env(ignoring(["mission"]), skip_render_check=True)
    assert len(check_vector_env(lambda: ignoring(["mission", "sight/words"]))) > 12
