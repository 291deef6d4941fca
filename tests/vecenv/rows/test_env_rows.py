"""Tests of vecenv/rows/env_rows.py and checks.py: stepping, autoreset, and invalid results of envs."""

import os
import pickle
import signal
import subprocess
import warnings
from decimal import Decimal
from fractions import Fraction
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import CountingEnv, SampledEnv, counting_fns, process_exists
from vecenv.rows.observations import observation_writer


@pytest.mark.parametrize("make", [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_autoreset_neither_skips_nor_repeats_a_step(make, mode):
    """Every observation holds the indices of its env, episode and step, in a buffer that the env reuses."""
    with make(counting_fns(5), autoreset_mode=mode) as envs:
        observations, _ = envs.reset()
        np.testing.assert_array_equal(observations, [[i, 0, 0] for i in range(5)])
        expected = [(0, 0)] * 5
        for _ in range(20):
            observations, rewards, terminated, truncated, infos = envs.step(np.zeros(5, np.int64))
            for i, (episode, step) in enumerate(expected):
                length = 3 + i % 3
                if step == length:  # NEXT_STEP: this step was the reset
                    expected[i] = (episode + 1, 0)
                    assert (rewards[i], terminated[i], truncated[i]) == (0.0, False, False)
                    assert infos["started"][i] == episode + 1
                else:
                    over = step + 1 == length
                    assert rewards[i] == step + 1
                    assert terminated[i] == (over and i % 2 == 0) and truncated[i] == (over and i % 2 == 1)
                    expected[i] = (episode, step + 1)
                    if over and mode == AutoresetMode.SAME_STEP:
                        np.testing.assert_array_equal(infos["final_obs"][i], [i, episode, length])
                        assert infos["final_info"]["steps"][i] == length
                        expected[i] = (episode + 1, 0)
                np.testing.assert_array_equal(observations[i], [i, *expected[i]])


def test_disabled_autoreset_requires_a_reset_with_reset_mask():
    envs = vecenv.SyncVectorEnv(counting_fns(2, 2), autoreset_mode=AutoresetMode.DISABLED)
    envs.reset()
    envs.step([0, 0])
    _, _, terminated, _, _ = envs.step([0, 0])
    assert list(terminated) == [True, False]
    with pytest.raises(gym.error.ResetNeeded, match="reset_mask"):
        envs.step([0, 0])
    options = {"reset_mask": np.array([True, False])}
    observations, _ = envs.reset(options=options)
    np.testing.assert_array_equal(observations, [[0, 1, 0], [1, 0, 2]])
    assert envs.episode_lengths.tolist() == [0, 2] and envs.episode_returns.tolist() == [0.0, 3.0]
    assert set(options) == {"reset_mask"}  # the caller's options are unchanged
    observations, *_ = envs.step([0, 0])
    np.testing.assert_array_equal(observations, [[0, 1, 1], [1, 0, 3]])


class Returning(gym.Env):
    """Returns the observation `good` from `reset` and `bad` from `step`."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, good, bad):
        self.observation_space, self._good, self._bad = space, good, bad

    def reset(self, *, seed=None, options=None):
        return self._good, {}

    def step(self, action):
        return self._bad, 0.0, False, False, {}


BOX, BYTES = spaces.Box(-1, 1, (3,)), spaces.Box(0, 9, (2,), np.uint8)
PAIR = spaces.Tuple([spaces.Discrete(2)] * 2)
NAMED = spaces.Dict(a=spaces.Box(0, 1, (2,)))
THREE = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("space", "good", "bad", "error", "message"),
    [
        (BOX, THREE, THREE[:1], ValueError, r"env 1 has shape \(1,\), but its space has shape \(3,\)"),
        (BOX, THREE, THREE[None], ValueError, r"env 1 has shape \(1, 3\)"),
        (BYTES, np.zeros(2, np.uint8), np.full(2, 0.5), TypeError, "dtype float64.*uint8"),
        (BYTES, np.zeros(2, np.uint8), np.full(2, 300), TypeError, "dtype int64.*uint8"),
        (spaces.Discrete(3), 1, 0.5, TypeError, "dtype float64.*int64"),
        (NAMED, {"a": THREE[:2]}, {"b": THREE[:2]}, ValueError, r"without \['a'\]"),
        (NAMED, {"a": THREE[:2]}, {"a": THREE}, ValueError, r"observation\['a'\] of env 1"),
        (PAIR, (0, 0), (0,), ValueError, r"without \[1\]"),
    ],
)
def test_an_observation_that_does_not_fit_its_space_is_an_error_with_env_and_key(space, good, bad, error, message):
    envs = vecenv.SyncVectorEnv([lambda: Returning(space, good, good), lambda: Returning(space, good, bad)])
    envs.reset()
    with pytest.raises(error, match=message) as caught:
        envs.step([0, 0])
    assert "raised by env 1 during step" in caught.value.__notes__


def test_a_worker_also_names_env_and_key_of_an_observation_that_does_not_fit():
    good = {"a": THREE[:2]}
    fns = [lambda bad=bad: Returning(NAMED, good, bad) for bad in (good, good, {"a": THREE}, good)]
    with vecenv.AsyncVectorEnv(fns, num_workers=2) as envs:
        envs.reset()
        with pytest.raises(ValueError, match=r"in worker 1(?s:.)*observation\['a'\] of env 2 has shape \(3,\)"):
            envs.step([0] * 4)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.array([300, 1], np.uint16), np.uint8),
        (np.array([300, -300]), np.int8),
        ([300, -300], np.int8),
        (np.array([2**31, 0]), np.int32),
        (np.array([2**63, 0], np.uint64), np.int64),
        (np.array([-1, 0]), np.uint64),
        (np.array([0.5, 0]), np.int8),
    ],
)
def test_an_observation_that_its_dtype_cannot_hold_is_an_error_and_others_are_converted(given, dtype):
    space = spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, (2,), dtype)
    with vecenv.SyncVectorEnv([lambda: SampledEnv(space, spaces.Discrete(2))]) as envs:
        env = envs.envs[0]
        small = np.minimum(np.abs(given), 7).astype(np.int64)
        env.reset = lambda **kwargs: (small, {})
        np.testing.assert_array_equal(envs.reset()[0], [small])
        env.reset = lambda **kwargs: (given, {})
        with pytest.raises(TypeError, match=r"observation of env 0 has dtype .* does not fit .* without loss"):
            envs.reset()


def test_an_observation_of_an_unpickled_space_is_written_without_a_conversion(monkeypatch):
    """The dtypes of unpickled spaces are not numpy's own objects. Workers unpickle the spaces of a script's classes."""
    space = pickle.loads(pickle.dumps(spaces.Box(0, 1, (2,), np.float32)))
    assert space.dtype is not np.dtype(np.float32)
    rows = np.zeros((1, 2), np.float32)
    monkeypatch.setattr("vecenv.rows.observations.fitted", None)
    observation_writer(space, {("observation",): rows}, {}, "observation")(0, np.ones(2, np.float32))
    np.testing.assert_array_equal(rows, [[1, 1]])


def test_a_value_of_an_object_leaf_is_not_written_again_by_the_steps_of_other_envs():
    """Here, it would replace an observation that was restored in between."""

    class Texts(CountingEnv):
        observation_space = spaces.Text(1, charset="0123456789")

        def _observe(self):
            return str(self.steps)

    with vecenv.SyncVectorEnv([lambda: Texts(0)] * 2) as envs:
        envs.reset()
        state = envs.get_state()
        envs.step([0, 0])
        envs.set_state(state)
        envs.send([0], [1])
        assert envs.recv().observations == ("1",) and envs.observations == ("0", "1")


def test_values_that_fit_without_loss_are_accepted():
    space = spaces.Box(0, 255, (2,), np.uint8)
    envs = vecenv.SyncVectorEnv([lambda: Returning(space, [1, 2], np.array([3, 255]))])
    np.testing.assert_array_equal(envs.reset()[0], [[1, 2]])
    np.testing.assert_array_equal(envs.step([0])[0], [[3, 255]])


class KeepingActions(CountingEnv):
    """Rewards the change from its first action, which it stores uncopied, as an env with a smoothness cost might."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)
    first = None

    def step(self, action):
        if self.first is None:
            self.first = action
        observation, _, *rest = super().step(np.int64(0))
        return observation, float(action[0] - self.first[0]), *rest


def test_an_env_may_keep_its_action_beyond_the_step():
    envs = vecenv.SyncVectorEnv([lambda: KeepingActions(0, 100)])
    envs.reset()
    rewards = [envs.step(np.array([[k / 8]], np.float32))[1][0] for k in range(6)]
    assert rewards == [k / 8 for k in range(6)]


def test_clipped_actions_reach_the_env_within_its_bounds():
    envs = vecenv.SyncVectorEnv([lambda: KeepingActions(0, 100)], clip_actions=True)
    assert envs.single_action_space == spaces.Box(-np.inf, np.inf, (1,), np.float32)
    envs.reset()
    envs.step(np.array([[-5.0]], np.float32))
    assert envs.step(np.array([[7.0]], np.float32))[1][0] == 2.0


class Angle(gym.Space):
    """A custom space of floats."""

    def __init__(self):
        super().__init__((), np.float64)

    def __eq__(self, other):
        return isinstance(other, Angle)

    def __repr__(self):
        return "Angle()"


@pytest.mark.parametrize("space", [spaces.Box(0, 3, (1,), np.int32), spaces.MultiBinary(2), Angle()], ids=str)
def test_clipped_actions_keep_the_bounds_of_integers_and_custom_spaces(space):
    envs = vecenv.SyncVectorEnv([lambda: SampledEnv(spaces.Box(0, 1, (2,)), space)], clip_actions=True)
    assert envs.single_action_space == space


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("nested", [lambda box: box, lambda box: spaces.Dict(a=spaces.Tuple([box]))])
def test_clipped_actions_need_the_same_bounds_in_every_env(num_workers, nested):
    fns = [lambda b=bound: SampledEnv(spaces.Box(0, 1, (2,)), nested(spaces.Box(-b, b, (1,)))) for bound in (1, 10)]
    message = r"(?s)action space different from .*-1\.0, 1\.0.*env 1: .*-10\.0, 10\.0.*RescaleAction"
    with pytest.raises(RuntimeError, match=message):
        vecenv.AsyncVectorEnv(fns, num_workers=num_workers, clip_actions=True)


def test_float32_observations_are_rounded_once_and_must_be_finite():
    envs = vecenv.SyncVectorEnv(counting_fns(2), float32_observations=True)
    observations, _ = envs.reset()
    assert observations.dtype == np.float32 and envs.single_observation_space.dtype == np.float32
    bad = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    for value in (np.nan, np.inf, 1e300):
        envs = vecenv.SyncVectorEnv(
            [
                lambda: Returning(bad, np.zeros(2), np.zeros(2)),
                lambda v=value: Returning(bad, np.zeros(2), np.array([0, v])),
            ],
            float32_observations=True,
        )
        envs.reset()
        with np.errstate(over="ignore"), pytest.raises(ValueError, match="observation of env 1 is not finite"):
            envs.step([0, 0])
    envs = vecenv.SyncVectorEnv([lambda: Returning(bad, np.array([0, np.nan]), None)], finite_observations=True)
    with pytest.raises(ValueError, match="observation of env 0 is not finite") as caught:
        envs.reset()
    assert caught.value.__notes__ == ["raised by env 0 during reset"]


def test_a_final_observation_must_be_finite_too():
    class BlowingUp(CountingEnv):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            return (observation * np.nan if terminated else observation), reward, terminated, truncated, info

    envs = vecenv.SyncVectorEnv(
        [lambda: CountingEnv(1, 2), lambda: BlowingUp(2, 2)], autoreset_mode="SameStep", float32_observations=True
    )
    envs.reset()
    envs.step([0, 0])
    with pytest.raises(ValueError, match="final_observation of env 1 is not finite"):
        envs.step([0, 0])


class Extreme(CountingEnv):
    """Observes numbers that float32 rounds to 0 and infinity; its rewards and infos add up to infinity, then to NaN."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    rewards = (1e308, 1e308, -np.inf)

    def _observe(self):
        return np.array([1e-320, 1e300, self.steps])

    def step(self, action):
        observation, _, *others, _ = super().step(action)
        reward = self.rewards[self.steps - 1]
        return observation, reward, *others, {"cost": reward}


@pytest.mark.parametrize("raises", ["np.seterr", "warnings"])
def test_a_script_that_lets_numpy_raise_does_not_affect_what_the_engine_computes(raises):
    keys = ["cost:sum", "never:mean"]
    with (
        np.errstate(all="raise" if raises == "np.seterr" else "warn"),
        warnings.catch_warnings(action="error"),
        vecenv.SyncVectorEnv([lambda: Extreme(0)] * 2, autoreset_mode="SameStep", info_keys=keys) as envs,
    ):
        envs.reset()
        for total in (1e308, np.inf, np.nan):
            observations, *_, infos = envs.step([0, 0])
            np.testing.assert_array_equal(envs.episode_returns, [total] * 2)
            assert observations[:, :2].tolist() == [[0.0, np.inf]] * 2
        assert infos["final_obs"][0].tolist() == [0.0, np.inf, 3.0]
        assert all(np.isnan(values).all() for values in envs.episode_infos.values())


def test_different_spaces_raise_gymnasiums_error_which_names_the_env():
    box = spaces.Box(0, 1, (2,))
    fns = [lambda n=n: SampledEnv(box, spaces.Discrete(n)) for n in (2, 2, 3)]
    for make in (
        lambda fns: vecenv.SyncVectorEnv(fns),
        lambda fns: vecenv.AsyncVectorEnv(fns, num_workers=3),
        lambda fns: vecenv.AsyncVectorEnv(fns, num_workers=2),
    ):
        with pytest.raises(RuntimeError, match=r"(?s)action space different.*must be equal.*env 2: Discrete\(3\)"):
            make(fns)
    same_actions = [lambda: gym.make("Acrobot-v1"), lambda: gym.make("MountainCar-v0")]
    for cls in (vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv):
        with pytest.raises(
            RuntimeError, match=r"different observation spaces, but observation_mode='same'.*env 1: Box"
        ):
            cls(same_actions)
        with pytest.raises(RuntimeError, match=r"do not share a common shape and dtype.*env 1: Box"):
            cls(same_actions, observation_mode="different")


class Results(CountingEnv):
    """Replaces some results, such as `reward`, at the fourth step of its second episode."""

    def __init__(self, index, **replaced):
        super().__init__(index, length=6)
        self._replaced = replaced

    def reset(self, **kwargs):
        observation, info = super().reset(**kwargs)
        return observation, self._replaced.get("reset_info", info) if self.episode == 1 else info

    def step(self, action):
        observation, *results = super().step(action)
        if self.episode == 1 and self.steps == 4:
            names = ("reward", "terminated", "truncated", "info")
            results = [self._replaced.get(name, result) for name, result in zip(names, results, strict=True)]
        return observation, *results


def run_until_replaced(replaced, cls=vecenv.SyncVectorEnv, mode=AutoresetMode.NEXT_STEP, **options):
    """Returns the results of the step at which env 2 replaces some of its results."""
    fns = [lambda: Results(0), lambda: Results(1), lambda: Results(2, **replaced)]
    with cls(fns, autoreset_mode=mode, **options) as envs:
        envs.reset()
        for _ in range(6 + 4 + (mode == AutoresetMode.NEXT_STEP)):
            result = envs.step([0, 0, 0])
    return result


NOT_NUMBERS = [None, "3", b"3", 1j, np.datetime64("2026-01-01"), np.timedelta64(3, "s"), np.array("3"), [1.0], {}]
NOT_NUMBERS += [np.array([1.0, 2.0]), np.array(None), np.array([], np.float64), np.complex64(1)]
NOT_NUMBERS += [np.ma.masked, np.array("3", object), np.timedelta64(3, "ns"), np.datetime64(3, "ns")]
NOT_FLAGS = ["False", "", None, float("nan"), np.float32("nan"), 2, -1, 0.5, [], [False], {}, 1j, np.array(None)]
NOT_FLAGS += [np.array([True, False]), np.array([], np.bool_), np.array(0.5), np.array([True, None])]
NOT_INFOS = [None, [], (), 3, "info", [("a", 1)]]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("reward", value, "a real number") for value in NOT_NUMBERS]
    + [("terminated", value, "a bool") for value in NOT_FLAGS]
    + [("truncated", value, "a bool") for value in NOT_FLAGS]
    + [("info", value, "a dict") for value in NOT_INFOS],
)
def test_a_result_of_the_wrong_type_is_an_error_that_names_env_step_and_value(name, value, expected):
    with pytest.raises(TypeError) as caught:
        run_until_replaced({name: value})
    text = str(caught.value)
    assert text.startswith(f"{name} of env 2 at step 4 of its episode is ") and f"not {expected}. " in text
    assert type(value).__name__ in text and (repr(value)[:12] in text)
    assert "raised by env 2 during step" in caught.value.__notes__


@pytest.mark.parametrize("infos", [True, False])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_reset_info_that_is_not_a_dict_is_an_error_that_names_the_env(mode, infos):
    for value in NOT_INFOS:
        with pytest.raises(TypeError, match=r"info of env 2 at reset is .*, not a dict\. ") as caught:
            run_until_replaced({"reset_info": value}, mode=mode, infos=infos)
        assert "raised by env 2 during step" in caught.value.__notes__
        with vecenv.SyncVectorEnv([lambda v=value: Results(1, reset_info=v)], infos=infos) as envs:
            envs.reset()
            with pytest.raises(TypeError, match=r"info of env 0 at reset is .*, not a dict") as caught:
                envs.reset()
            assert "raised by env 0 during reset" in caught.value.__notes__


class Seeded(CountingEnv):
    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return super().reset(seed=seed)


@pytest.mark.parametrize("seed", [255, np.uint8(255), [np.uint8(255), np.int64(256)]], ids=repr)
def test_seeds_reach_the_envs_as_ints(seed):
    with vecenv.SyncVectorEnv([lambda: Seeded(0)] * 2) as envs:
        envs.reset(seed=seed)
        assert repr(envs.get_attr("seed")) == "(255, 256)"


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([True, False], TypeError, "must be a numpy array, got <class 'list'>"),
        (np.array([True]), ValueError, r"must have shape `\(2,\)`, got \(1,\)"),
        (np.array([1, 0]), TypeError, "must have `dtype=np.bool_`, got int"),
        (np.array([False, False]), ValueError, "at least one True value"),
    ],
)
def test_a_wrong_reset_mask_is_an_error_that_resets_no_env(mask, error, message):
    with vecenv.SyncVectorEnv(counting_fns(2), autoreset_mode=AutoresetMode.DISABLED) as envs:
        envs.reset()
        envs.step([0, 0])
        with pytest.raises(error, match=message):
            envs.reset(options={"reset_mask": mask})
        assert envs.step([0, 0])[1].tolist() == [2.0, 2.0]


class Optional(CountingEnv):
    def reset(self, *, seed=None, options=None):
        self.options = options
        return super().reset(seed=seed)


def test_envs_get_the_options_without_the_mask():
    with vecenv.SyncVectorEnv([lambda: Optional(0)] * 2, autoreset_mode=AutoresetMode.DISABLED) as envs:
        envs.reset(options={"speed": 1})
        envs.reset(options={"reset_mask": np.array([False, True]), "speed": 2})
        assert envs.get_attr("options") == ({"speed": 1}, {"speed": 2})


class Unknown:
    """Is shown as a text of the given length."""

    def __init__(self, length):
        self._text = "<" + "x" * (length - 2) + ">"

    def __repr__(self):
        return self._text


@pytest.mark.parametrize("make", [Unknown, lambda length: "x" * (length - 2)], ids=["object", "str"])
def test_a_message_shows_up_to_80_characters_of_a_value(make):
    for length, shown in ((80, True), (81, False)):
        with pytest.raises(TypeError, match="not a real number") as caught:
            run_until_replaced({"reward": make(length)})
        assert (repr(make(length)) in str(caught.value)) is shown


def test_a_worker_also_reports_a_result_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"env 2 in worker 1(?s:.)*reward of env 2 at step 4 .* is '3' \(str\), not a"):
        run_until_replaced({"reward": "3"}, vecenv.AsyncVectorEnv, num_workers=2)


REAL = [3, True, np.float16(1.5), np.int8(-3), np.uint64(3), np.bool_(True), 2**70, float("nan"), np.float32("inf")]
REAL += [
    np.array(1.5),
    np.array([2], np.int32),
    np.array([[True]]),
    Fraction(1, 2),
    Decimal("1.5"),
    np.array(1.5, object),
]


def test_a_reward_beyond_float64_is_an_error_that_names_it():
    with pytest.raises(TypeError, match=r"reward of env 2 at step 4 .* is 10{9}.*0 \(int\), which is too large"):
        run_until_replaced({"reward": 10**400})


@pytest.mark.parametrize("reward", REAL)
def test_every_real_number_is_a_reward(reward):
    _, rewards, *_ = run_until_replaced({"reward": reward})
    np.testing.assert_array_equal(rewards, [4.0, 4.0, float(np.asarray(reward, np.float64).item())])


@pytest.mark.parametrize(
    "make", [bool, int, float, np.bool_, np.int64, np.float32, np.array, lambda flag: np.array([flag])]
)
@pytest.mark.parametrize("flag", [False, True])
def test_every_truth_value_is_a_flag(make, flag):
    _, _, terminated, truncated, _ = run_until_replaced({"terminated": make(flag)})
    assert terminated.tolist() == [False, False, flag] and not truncated.any()
    _, _, terminated, truncated, _ = run_until_replaced({"truncated": make(flag)})
    assert truncated.tolist() == [False, False, flag] and not terminated.any()


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.uint8, np.float64])
def test_spaces_keep_their_dtype_and_rewards_of_shape_1_become_numbers(dtype):
    class OddRewards(SampledEnv):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, np.array([reward]), *rest

    space = spaces.Dict({"x": spaces.Box(0, 9, (2,), dtype), "g": spaces.Graph(spaces.Box(0, 1, (2,)), None)})
    with vecenv.AsyncVectorEnv([lambda: OddRewards(space, spaces.Discrete(2))] * 2) as envs:
        observations, _ = envs.reset(seed=1)
        assert observations["x"].dtype == dtype and len(observations["g"]) == 2
        assert envs.step([0, 1])[1].shape == (2,)


class ExhaustedEnv(CountingEnv):
    """Reads past the end of its data set during the call that `when` names."""

    def __init__(self, when):
        super().__init__(0)
        self._data, self._when = iter([]), when

    def reset(self, **kwargs):
        return (next(self._data) if self._when == "reset" else None) or super().reset(**kwargs)

    def step(self, action):
        return (next(self._data) if self._when in ("step", "recv") else None) or super().step(action)

    def read(self):
        return next(self._data)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("when", ["reset", "step", "recv", "call"])
def test_the_end_of_an_envs_data_set_is_an_error_of_the_env_even_in_a_generator(when, num_workers):
    def batches(envs):
        yield envs.reset()
        if when == "recv":
            envs.send([0])
            yield envs.recv()
        yield envs.call("read") if when == "call" else envs.step([0])

    with vecenv.AsyncVectorEnv([lambda: ExhaustedEnv(when)], num_workers=num_workers) as envs:
        with pytest.raises(vecenv.EnvError, match=r"raised by env 0 during (.|\n)*StopIteration") as raised:
            list(batches(envs))
        assert not isinstance(raised.value, StopIteration)


SHARED = CountingEnv(0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("wrapped", [False, True])
def test_two_rows_cannot_share_an_env(num_workers, wrapped):
    fns = [*counting_fns(2), lambda: SHARED, lambda: gym.Wrapper(SHARED) if wrapped else SHARED]
    with pytest.raises(ValueError, match=r"which is also env 2\..*build a new env in each call"):
        vecenv.AsyncVectorEnv(fns, num_workers=num_workers)


def test_envs_are_told_apart_even_if_their_unwrapped_objects_are_temporary():
    class Fresh(CountingEnv):
        @property
        def unwrapped(self):
            return Proxy()

    class Proxy:
        __slots__ = tuple(f"slot_{k}" for k in range(40))  # a size that is rare, so that the next one gets its id

    with vecenv.SyncVectorEnv([lambda i=i: Fresh(i) for i in range(8)]) as envs:
        assert envs.get_attr("index") == tuple(range(8))


class SimulatorEnv(CountingEnv):
    """Starts a program, which `close` ends. Writes the id of its process to a file in `folder`."""

    def __init__(self, index, folder, size=3):
        super().__init__(index)
        self.observation_space = spaces.Box(-1, 1, (size,), np.float64)
        self._program = subprocess.Popen(["sleep", "600"])
        (folder / str(self._program.pid)).touch()

    def close(self):
        self._program.kill()
        self._program.wait()


def _fails(index, folder):
    if index == 3:
        raise ValueError("no such robot")
    return SimulatorEnv(index, folder)


def _differs(index, folder):
    return SimulatorEnv(index, folder, size=3 + index // 3)


MAKERS = {
    "sync": vecenv.SyncVectorEnv,
    **{f"{number} workers": partial(vecenv.AsyncVectorEnv, num_workers=number) for number in (0, 1, 2)},
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(("make_env", "error"), [(_fails, ValueError), (_differs, RuntimeError)])
def test_a_failed_construction_closes_the_envs_that_were_built(make, make_env, error, tmp_path):
    with pytest.raises(error):
        make([partial(make_env, i, tmp_path) for i in range(4)])
    started = [int(path.name) for path in tmp_path.iterdir()]
    left = [pid for pid in started if process_exists(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(started) >= 2 and not left
