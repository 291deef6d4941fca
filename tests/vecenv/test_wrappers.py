"""Tests of vecenv/wrappers.py: its wrappers, alone and in vector envs."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import vecenv
from tests.helpers import SampledEnv, assert_same
from vecenv.testing import check_vector_env
from vecenv.wrappers import ActionMaskObservation, IgnoreKeys

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


class Masked(SampledEnv):
    """Its infos hold masks that depend on the step; None stands for an info without a mask."""

    def __init__(self, observation_space, action_space, masks):
        super().__init__(observation_space, action_space)
        self._masks, self._step = masks, 0

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        self._step = 0
        return observation, {**info, "action_mask": self._masks[0]}

    def step(self, action):
        observation, reward, *_, info = super().step(action)
        self._step += 1
        info = info if (mask := self._masks[self._step]) is None else {**info, "action_mask": mask}
        return observation, reward, False, self._step == len(self._masks) - 1, info


BOX = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("observed", "acted", "masks", "expected"),
    [
        (BOX, spaces.Discrete(3, start=5), [np.array([1, 0, 1], np.int8), [True, False, False], None], ["101", "100"]),
        (
            spaces.Dict(x=BOX),
            spaces.MultiDiscrete([2, 3]),
            [(np.array([0, 1], np.int8), np.array([1, 1, 0], np.int8)), np.array([1, 0, 0, 0, 7.0]), None],
            ["01110", "10001"],
        ),
        (
            BOX,
            spaces.Tuple([spaces.Discrete(2), BOX, spaces.MultiDiscrete([1, 2])]),
            [(np.array([0, 1]), (np.array([1]), np.array([0, 1]))), np.ones(5), None],
            ["01101", "11111"],
        ),
    ],
)
def test_the_mask_of_infos_becomes_part_of_the_observation(observed, acted, masks, expected):
    env = ActionMaskObservation(Masked(observed, acted, masks))
    found = [env.reset(seed=1)[0], *(env.step(acted.sample())[0] for _ in masks[1:])]
    assert all(observation in env.observation_space for observation in found)
    texts = ["".join(map(str, observation["action_mask"])) for observation in found]
    assert texts == [*expected, expected[-1]]  # the last step of an episode needs no mask
    assert set(found[0]) == (
        {"x", "action_mask"} if isinstance(observed, spaces.Dict) else {"observation", "action_mask"}
    )


def test_masked_envs_are_the_same_in_parallel_and_resume_exactly():
    fns = [lambda: ActionMaskObservation(gym.make("Taxi-v4", max_episode_steps=5))] * 2
    envs = vecenv.SyncVectorEnv(fns, autoreset_mode="SameStep")
    with envs, vecenv.AsyncVectorEnv(fns, num_workers=2, autoreset_mode="SameStep") as parallel:
        assert_same(envs.reset(seed=5), parallel.reset(seed=5))
        for t in range(8):
            assert_same(envs.step(np.full(2, t % 6)), parallel.step(np.full(2, t % 6)))
        parallel.set_state(vecenv.state.loads(vecenv.state.dumps(envs.get_state())))
        assert_same(envs.step(np.full(2, 1)), parallel.step(np.full(2, 1)))


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (lambda: gym.make("Pendulum-v1"), r"no action mask can restrict the actions Box.*omit info_masks"),
        (lambda: ActionMaskObservation(gym.make("Taxi-v4")), "already has the key 'action_mask': omit ActionMask"),
        (lambda: gym.make("CartPole-v1"), r"the info has no 'action_mask', but only the keys \[\]: omit ActionMask"),
    ],
)
def test_envs_without_a_mask_to_add_are_errors(env, message):
    with pytest.raises(ValueError, match=message):
        ActionMaskObservation(env()).reset()
