"""Tests of vecenv/testing.py: correct vector envs pass, and each fault breaks the rule that describes it."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import SampledEnv
from vecenv.testing import RULES, RuleBroken, check_vector_env

CLASSES = [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv, gym.vector.SyncVectorEnv]


@pytest.mark.parametrize(
    ("cls", "mode"),
    [
        pytest.param(cls, mode, marks=pytest.mark.slow if cls is CLASSES[1] and mode != AutoresetMode.SAME_STEP else ())
        for cls in CLASSES
        for mode in AutoresetMode
    ],
)
def test_correct_vector_envs_pass(cls, mode):
    held = check_vector_env(lambda: cls([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=mode))
    assert len(held) >= 14 and all(sentence.endswith(".") for sentence in held)


def test_a_single_env_is_checked_in_a_vector_env():
    assert len(check_vector_env(lambda: gym.make("Pendulum-v1"))) == 17


@pytest.mark.parametrize("cls", [vecenv.SyncVectorEnv, gym.vector.SyncVectorEnv])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_masked_resets_are_checked_in_every_autoreset_mode(cls, mode):
    held = check_vector_env(lambda: cls([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=mode))
    assert any("does not change the envs outside the mask" in sentence for sentence in held)


def test_third_party_vector_envs_pass():
    assert len(check_vector_env(lambda: gym.make_vec("CartPole-v1", 3, "vector_entry_point"))) == 14


def test_an_error_in_close_breaks_the_rules_during_which_it_occurs():
    class Stuck(vecenv.SyncVectorEnv):
        def close_extras(self, **kwargs):
            super().close_extras(**kwargs)
            raise OSError("the arm is stuck")

    with pytest.raises(RuleBroken, match=f"{len(RULES)} of {len(RULES)} rules(?s:.*)the arm is stuck"):
        check_vector_env(lambda: Stuck([lambda: gym.make("CartPole-v1")] * 3))


class Faulty(vecenv.SyncVectorEnv):
    """Breaks one rule."""

    def __init__(self, fault, mode):
        fns = [lambda: gym.make("CartPole-v1", max_episode_steps=20)] * 3
        super().__init__(fns, autoreset_mode=mode)
        self.fault, self.over = fault, np.zeros(3, bool)
        if fault == "mode":
            self.metadata["autoreset_mode"] = "next"
        if fault == "action_space":
            self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        if self.fault == "mask" and options:
            options = None
        observations, infos = super().reset(seed=None if self.fault == "seed" else seed, options=options)
        if self.fault == "list" and isinstance(seed, list):
            observations = observations + 0.01
        return (observations.astype(np.float64) if self.fault == "dtype" else observations), infos

    def step(self, actions):
        if self.fault == "actions":
            actions[:] = 0
        if self.fault == "number":
            actions = np.resize(actions, 3)
        observations, rewards, terminated, truncated, infos = super().step(actions)
        if self.fault == "alias":
            self.kept = getattr(self, "kept", observations)
            self.kept[...] = observations
            observations = self.kept
        if self.fault == "reward shape":
            rewards = rewards[:, None]
        if self.fault == "nan":
            rewards[1] = np.nan
        if self.fault == "late nan":
            rewards[terminated | truncated] = np.nan
        if self.fault == "flags":
            terminated = terminated.astype(np.float64)
        if self.fault == "reward after end":
            rewards = np.where(self.over, 1.0, rewards)
        if self.fault == "final":
            infos.pop("final_obs", None)
        if self.fault == "info mask" and np.any(terminated | truncated):
            infos["speed"] = np.zeros(3)
        self.over = terminated | truncated
        return observations, rewards, terminated, truncated, infos

    def set_state(self, states, **kwargs):
        if self.fault == "state":  # the pole's angle is forgotten
            states[1]["env"][-1]["state"]["dict"][0][1][2] = 0.0
        super().set_state(states, **kwargs)


@pytest.mark.parametrize(
    ("fault", "mode", "sentence"),
    [
        ("action_space", "NextStep", "The action space is the batch"),
        ("mode", "NextStep", "is an `AutoresetMode`"),
        ("dtype", "NextStep", "`reset` returns observations of the observation space"),
        ("seed", "NextStep", "A second reset with the same seed"),
        ("list", "NextStep", r"`reset\(seed=s\)` equals"),
        ("actions", "NextStep", "does not change the actions"),
        ("number", "NextStep", "A batch that lacks one env's action"),
        ("alias", "NextStep", "are not changed by the next step"),
        ("reward shape", "NextStep", "`step` returns observations of the space"),
        ("nan", "NextStep", "rewards are not finite"),
        ("flags", "NextStep", "`step` returns observations of the space"),
        ("reward after end", "NextStep", "NEXT_STEP: the step after"),
        ("final", "SameStep", "SAME_STEP: `infos"),
        ("info mask", "NextStep", "and each info has its mask"),
        ("late nan", "NextStep", r"Up to the end of an episode(?s:.*)step \d+: rewards are not finite"),
        ("mask", "Disabled", "does not change the envs outside the mask"),
        ("mask", "NextStep", "does not change the envs outside the mask"),
        ("state", "NextStep", r"A new vector env that gets the states(?s:.*)missing from `get_state`, or from `saved`"),
    ],
)
def test_each_fault_breaks_the_rule_that_describes_it(fault, mode, sentence):
    with pytest.raises(RuleBroken, match=f"rules do not hold(?s:.*){sentence}"):
        check_vector_env(lambda: Faulty(fault, mode))


def test_an_exception_of_an_env_is_told_once_and_is_the_cause():
    class Broken(Faulty):
        def step(self, actions):
            raise KeyError("hnd")

    with pytest.raises(RuleBroken) as caught:
        check_vector_env(lambda: Broken(None, "NextStep"))
    assert str(caught.value).count("KeyError: 'hnd'") == 1
    assert isinstance(caught.value.__cause__, KeyError)


class Outside(vecenv.SyncVectorEnv):
    """Changes the observations that each step returns."""

    space = gym.spaces.Dict(
        {
            "camera": gym.spaces.Box(-1, 1, (40, 40), np.float32),
            "arm": gym.spaces.Tuple([gym.spaces.Discrete(5, start=1), gym.spaces.Box(0, np.inf, (), np.float64)]),
        }
    )

    def __init__(self, change, mode="NextStep"):
        super().__init__([lambda: SampledEnv(self.space, gym.spaces.Discrete(2))] * 3, autoreset_mode=mode)
        self.change = change

    def step(self, actions):
        observations, *results = super().step(actions)
        return self.change(observations) or observations, *results


def camera(index, value):
    def change(observations):
        observations["camera"][index] = value

    return change


def arm(index, value):
    return lambda observations: observations["arm"][index].__setitem__(0, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (camera((2, 39, 7), -3.5), r"observation['camera'][39, 7] of env 2 is -3.5, outside -1.0 to 1.0"),
        (camera((2, 39, 7), 3.5), r"observation['camera'][39, 7] of env 2 is 3.5, outside -1.0 to 1.0"),
        (camera((2, 39, 7), np.nan), r"observation['camera'][39, 7] of env 2 is nan, outside -1.0 to 1.0"),
        (camera((2, 39, 7), np.inf), r"observation['camera'][39, 7] of env 2 is inf, outside -1.0 to 1.0"),
        (arm(1, -0.25), r"observation['arm'][1] of env 0 is -0.25, outside 0.0 to inf"),
        (arm(0, 6), r"observation['arm'][0] of env 0 is 6, outside 1 to 5"),
        (lambda o: {**o, "camera": o["camera"].astype(float)}, "observation['camera'] has dtype float64, but its"),
        (lambda o: {**o, "camera": o["camera"][:2]}, "observation['camera'] has shape (2, 40, 40), but its space"),
        (lambda o: {**o, "camera": [0]}, "observation['camera'] is [0] (list), not in Box"),
        (lambda o: {"camera": o["camera"]}, "observation has the keys ['camera'], but its space has ['arm', 'camera']"),
        (lambda o: {**o, "arm": o["arm"][:1]}, "observation['arm'] has the keys [0], but its space has [0, 1]"),
        (lambda o: {**o, "arm": 3}, "observation['arm'] is 3 (int), but its space is a Tuple"),
    ],
)  # fmt: skip
def test_an_observation_outside_its_space_is_reported_with_env_key_entry_and_bound(change, message):
    with pytest.raises(RuleBroken) as caught:
        check_vector_env(lambda: Outside(change), max_steps=50)
    line = next(line for line in str(caught.value).splitlines() if message in line)
    assert len(line) < 150


class Imprecise(gym.Env):
    """Returns float64 although its space says float32, in `reset` or only in `step`."""

    observation_space = gym.spaces.Dict(arm=gym.spaces.Box(-1, 1, (2,), np.float32))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, where):
        self.where = where

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"arm": np.zeros(2, np.float64 if self.where == "reset" else np.float32)}, {}

    def step(self, action):
        return {"arm": np.zeros(2, np.float64)}, 0.0, False, True, {}


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    "make",
    [
        Imprecise,
        lambda where: vecenv.SyncVectorEnv([lambda: Imprecise(where)] * 3),
        lambda where: vecenv.AsyncVectorEnv([lambda: Imprecise(where)] * 3, num_workers=1),
        lambda where: gym.vector.SyncVectorEnv([lambda: Imprecise(where)] * 3),
    ],
)
def test_an_observation_of_another_dtype_is_reported_although_a_vector_env_converts_it(make, where):
    message = rf"`{where}` returns (?s:.*)observation\['arm'\] of env 0 has dtype float64, but its space says float32"
    with pytest.raises(RuleBroken, match=message):
        check_vector_env(lambda: make(where), max_steps=50)


def test_a_final_observation_outside_its_space_is_reported_with_env_key_entry_and_bound():
    class Final(Outside):
        def step(self, actions):
            result = super().step(actions)
            for final in filter(None, result[4].get("final_obs", ())):
                final["camera"][3, 4] = 2
            return result

    with pytest.raises(RuleBroken, match=r"final_obs\['camera'\]\[3, 4\] of env \d is 2.0, outside -1.0 to 1.0"):
        check_vector_env(lambda: Final(lambda o: None, "SameStep"))


def test_a_warning_says_why_states_are_not_checked():
    class Stateless(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(2, np.float32), {}

        def step(self, action):
            return np.zeros(2, np.float32), 0.0, False, True, {}

    message = r"not checked: A new vector env that gets the states .*\.Stateless does not define get_state\(\)"
    with pytest.warns(UserWarning, match=message):
        held = check_vector_env(Stateless)
    assert not any("get_state" in sentence for sentence in held)


def test_a_warning_says_which_rules_are_not_checked_if_no_episode_ends():
    def make():
        return vecenv.SyncVectorEnv([lambda: gym.make("Pendulum-v1").unwrapped] * 3)

    message = (
        r"not checked: NEXT_STEP.* Up to the end of .* Reason: no episode ended within 60 steps: give the env a time"
    )
    with pytest.warns(UserWarning, match=message):
        assert len(check_vector_env(make, max_steps=60)) == 14


def test_every_rule_has_a_sentence():
    assert len({rule.__doc__ for rule in RULES}) == len(RULES) and all(rule.__doc__.strip() for rule in RULES)


def test_spaces_without_a_fixed_shape_pass():
    space = gym.spaces.Dict({"name": gym.spaces.Text(4), "x": gym.spaces.Box(0, 1, (2,))})
    check_vector_env(lambda: vecenv.SyncVectorEnv([lambda: SampledEnv(space, gym.spaces.Discrete(2))] * 3))


def test_spaces_with_different_bounds_pass():
    made = [gym.spaces.Box(0, 1, (2,)), gym.spaces.Box(5, 9, (2,))]
    for mode in ("NextStep", "SameStep"):
        check_vector_env(
            lambda mode=mode: vecenv.SyncVectorEnv(
                [lambda s=s: SampledEnv(s, gym.spaces.Discrete(2)) for s in made], True, "different", mode
            )
        )
