"""Tests of objects that are not Gymnasium envs: the error says what the object is and which wrapper helps.

The packages that define such objects are not installed here. Fake classes have the same methods and, where it matters,
the same module names.
"""

import traceback

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import vecenv
from tests.helpers import CountingEnv, assert_same
from vecenv.wrappers import ActionMaskObservation

SPACES = {"observation_space": spaces.Box(-1, 1, (2,), np.float32), "action_space": spaces.Discrete(2)}
FIRST = np.zeros(2, np.float32)


def of(module, bases=(), **attributes):
    """Returns a class that looks as if it were defined in `module`."""
    return type("Fake", bases, {"__module__": module, **attributes})


OLD_GYM = of("gym.core", **SPACES, reset=lambda self: FIRST)
WRAPPED_GYM = of("gym.wrappers.time_limit", unwrapped=OLD_GYM(), reset=lambda self, **kwargs: FIRST)
AEC = of("pettingzoo.utils.env", possible_agents=["a", "b"], observation_space=lambda self, agent: None)
SB3 = of("stable_baselines3.common.vec_env", num_envs=4, step_wait=lambda self: None)
DM_ENV = of("mine", observation_spec=lambda self: None, action_spec=lambda self: None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of("mine", (OLD_GYM,)), r"Fake is an env of OpenAI Gym, not of Gymnasium: wrap it in shimmy.GymV26Compat"),
        (
            WRAPPED_GYM,
            r"shimmy.GymV21CompatibilityV0\(env=...\) if its reset\(\) accepts no seed \(pip install",
        ),
        (of("mine", (AEC,)), r"Fake is a PettingZoo env with several agents.*ParallelVectorEnv"),
        (of("mine", possible_agents=[]), r"Fake is a PettingZoo env"),
        (of("pettingzoo.utils.env"), r"Fake is a PettingZoo env"),
        (SB3, r"Fake is a vector env of 4 envs, not one env: pass functions that each return one of its envs"),
        (lambda: gym.make_vec("CartPole-v1", 2), r"CartPoleVectorEnv is a vector env of 2 envs.*vecenv.Batched"),
        (DM_ENV, r"Fake is a dm_env.Environment, not a gymnasium.Env: wrap it in shimmy.DmControlCompatibilityV0"),
        (lambda: None, r"the function returned None instead of an env: is its return statement missing\?"),
        (lambda: CountingEnv, r"the function returned the class CountingEnv instead of an env: call the class"),
        (of("mine", action_space=None), r"Fake is not an env, because it has no observation_space\. Each func"),
        (object, r"object is not an env, because it has no observation_space and no action_space"),
    ],
)
def test_an_object_of_another_api_is_an_error_that_names_it_and_the_remedy(make, message):
    with pytest.raises(TypeError, match=message) as caught:
        vecenv.SyncVectorEnv([lambda: CountingEnv(0), make])
    assert caught.value.__notes__ == ["raised by env 1 during construction"]


def test_an_env_of_gymnasium_is_accepted_whatever_else_it_defines():
    class Both(CountingEnv):
        possible_agents, num_envs = ["a"], 4

        def step_wait(self): ...

    with vecenv.SyncVectorEnv([lambda: Both(0)]) as envs:
        assert envs.reset()[0].tolist() == [[0, 0, 0]]


class Duck:
    """An env that is no `gymnasium.Env` and has only what the engine needs, besides the methods of its state."""

    __slots__ = ("steps",)
    observation_space, action_space = SPACES["observation_space"], SPACES["action_space"]

    def __init__(self):
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return FIRST, {}

    def step(self, action):
        self.steps += 1
        return FIRST, float(self.steps), False, False, {}

    def steps_plus(self, number):
        return self.steps + number

    def get_state(self):
        return self.steps

    def set_state(self, state):
        self.steps = state


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_env_need_not_inherit_from_gymnasium(num_workers):
    with vecenv.AsyncVectorEnv([Duck] * 2, num_workers=num_workers) as envs:
        envs.reset(seed=0)
        envs.step([0, 0])
        states = envs.get_state()
        envs.set_attr("steps", [5, 7])
        assert envs.get_attr("steps") == (5, 7) and envs.call("steps_plus", 1) == (6, 8)
        assert envs.step([0, 0])[1].tolist() == [6.0, 8.0]
        envs.set_state(states)
        assert envs.step([0, 0])[1].tolist() == [2.0, 2.0]


def test_an_object_of_another_api_in_a_worker_is_the_same_error():
    fns = [lambda: CountingEnv(0), lambda: CountingEnv(1), of("gym", (), **SPACES)]
    with pytest.raises(TypeError, match=r"(?s)worker 1 raised during construction.*Fake is an env of OpenAI Gym"):
        vecenv.AsyncVectorEnv(fns, num_workers=2)


class OldReset(gym.Env):
    """Inherits from gymnasium.Env, but has the methods of Gym before 0.26."""

    observation_space, action_space = SPACES["observation_space"], SPACES["action_space"]
    metadata = None

    def reset(self):
        return FIRST

    def step(self, action):
        return FIRST, 0.0, False, {}


class OnlyObservation(OldReset):
    def __init__(self, observation=FIRST):
        self._observation = observation

    def reset(self, *, seed=None, options=None):
        return self._observation


class OldStep(OldReset):
    def __init__(self, stepped=(FIRST, 0.0, False, {})):
        self._stepped = stepped

    def reset(self, *, seed=None, options=None):
        return FIRST, {}

    def step(self, action):
        return self._stepped


class OwnFault(OldStep):
    """Has the methods of Gymnasium; its errors read like those of the old API."""

    def step(self, action):
        observation, reward, terminated, truncated, info = self._stepped
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize("observation", [FIRST, (FIRST,) * 3])
@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: gym.wrappers.TimeLimit(env, 5)])
def test_a_reset_that_returns_only_an_observation_is_an_error_that_names_the_new_api_and_the_shim(wrap, observation):
    fns = [lambda: wrap(OnlyObservation(observation))]
    with vecenv.SyncVectorEnv(fns) as envs, pytest.raises(TypeError) as caught:
        envs.reset(seed=0)
    text, kind = str(caught.value), type(observation).__name__
    assert f"OnlyObservation.reset() returned a value of type {kind}. Gymnasium calls reset(seed=..., options" in text
    assert "shimmy.GymV21CompatibilityV0" in text and caught.value.__notes__ == ["raised by env 0 during reset"]


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: gym.wrappers.TimeLimit(env, 5)])
@pytest.mark.parametrize(
    ("make", "message", "doing"),
    [
        (OldReset, r"reset\(\) got an unexpected keyword argument 'seed'", "reset"),
        (OldStep, r"not enough values to unpack \(expected 5, got 4\)", "step"),
        (lambda: OldStep((FIRST, 0.0, False, False, {}, 1)), r"too many values to unpack \(expected 5", "step"),
        (lambda: OldStep(None), "cannot unpack non-iterable NoneType", "step"),
    ],
)
def test_a_method_of_the_old_api_raises_pythons_error_and_notes_name_the_env_and_the_new_api(
    wrap, make, message, doing
):
    fns = [lambda: wrap(make())]
    with vecenv.SyncVectorEnv(fns) as envs, pytest.raises((TypeError, ValueError), match=message) as caught:
        envs.reset(seed=0)
        envs.step([0])
    who, advice = caught.value.__notes__
    assert who == f"raised by env 0 during {doing}"
    assert "(observation, reward, terminated, truncated, info)" in advice and "shimmy" in advice


class NoOptions(CountingEnv):
    """Its `reset` has no `options`, as in many envs for SB3."""

    def reset(self, seed=None):
        return super().reset(seed=seed)


class NoOptionsWrapper(gym.Wrapper):
    def reset(self, seed=None):
        return self.env.reset(seed=seed)


@pytest.mark.parametrize("make", [NoOptions, lambda index: NoOptionsWrapper(CountingEnv(index))])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_env_whose_reset_has_no_options_equals_one_that_has_them_until_they_are_set(make, mode, num_workers):
    def make_envs(make):
        fns = [lambda i=i: make(i) for i in range(2)]
        return vecenv.AsyncVectorEnv(fns, num_workers=num_workers, autoreset_mode=mode)

    mask = {"reset_mask": np.array([True, False])}
    with make_envs(make) as ours, make_envs(CountingEnv) as others:
        for envs in (ours, others):
            envs.reset(seed=3)
        for _ in range(5):
            if mode != "Disabled":
                assert_same(ours.step([0, 0]), others.step([0, 0]))
            assert_same(ours.reset(options=mask), others.reset(options=mask))
        assert_same(ours.reset(options={}), others.reset(options={}))
        with pytest.raises((TypeError, vecenv.EnvError), match="unexpected keyword argument 'options'") as caught:
            ours.reset(options={"a": 1})
    assert "add the argument options=None to this `reset`" in "".join(traceback.format_exception(caught.value))


def test_the_wrapper_for_masks_passes_no_options_unless_they_are_set():
    class Masking(NoOptions):
        def reset(self, seed=None):
            observation, info = super().reset(seed=seed)
            return observation, {**info, "action_mask": np.ones(2, np.int8)}

    assert ActionMaskObservation(Masking(0)).reset(seed=0)[0]["action_mask"].all()


def test_an_error_about_options_in_the_envs_own_code_is_not_blamed_on_its_reset():
    class Calls(CountingEnv):
        def reset(self, *, seed=None, options=None):
            return NoOptions(0).reset(options=options)

    with vecenv.SyncVectorEnv([lambda: Calls(0)]) as envs, pytest.raises(TypeError, match="'options'") as caught:
        envs.reset(seed=0)
    assert caught.value.__notes__ == ["raised by env 0 during reset"]


class Proxy:
    """Wraps an env without inheriting from `gymnasium.Wrapper`."""

    def __init__(self):
        self.unwrapped = NoOptions(0)
        self.observation_space, self.action_space = self.unwrapped.observation_space, self.unwrapped.action_space

    def reset(self, **arguments):
        return self.unwrapped.reset(**arguments)

    def step(self, action):
        return self.unwrapped.step(action)


def test_a_wrapper_of_another_kind_around_an_env_without_options_works():
    with vecenv.SyncVectorEnv([Proxy]) as envs:
        envs.reset(seed=0)


def test_the_same_error_in_the_envs_own_code_is_not_blamed_on_the_old_api():
    with vecenv.SyncVectorEnv([OwnFault]) as envs, pytest.raises(ValueError, match="expected 5, got 4") as caught:
        envs.reset(seed=0)
        envs.step([0])
    assert caught.value.__notes__ == ["raised by env 0 during step"]


def test_metadata_may_be_none():
    with vecenv.SyncVectorEnv([OldStep]) as envs:
        assert envs.metadata == {"autoreset_mode": envs.autoreset_mode}


def test_a_vector_of_rewards_is_an_error_that_names_the_wrapper():
    class TwoRewards(CountingEnv):
        def step(self, action):
            observation, _, *rest = super().step(action)
            return observation, np.array([0.7, -1.0]), *rest

    with vecenv.SyncVectorEnv([lambda: TwoRewards(0)]) as envs:
        envs.reset()
        with pytest.raises(TypeError, match=r"reward of env 0 at step 1 .*array\(\[ 0.7, -1. \]\).*LinearReward"):
            envs.step([0])


def test_an_env_need_not_inherit_from_gymnasiums_env():
    class Duck:
        observation_space, action_space = SPACES["observation_space"], SPACES["action_space"]
        metadata, render_mode = {}, None

        def reset(self, *, seed=None, options=None):
            return [FIRST, {}]

        def step(self, action):
            return FIRST, 1.0, False, False, {}

        def close(self):
            pass

    with vecenv.SyncVectorEnv([Duck]) as envs:
        envs.reset(seed=0)
        assert envs.step([0])[1].tolist() == [1.0]
