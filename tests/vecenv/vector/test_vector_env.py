"""Tests of Gymnasium's contract: constructor arguments, observation modes, errors, infos and wrappers."""

import copy
import functools
import inspect
import pickle
import re

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import vector as wrappers

import vecenv
from tests.helpers import Color, CountingEnv, SampledEnv, assert_same, counting_fns

BOTH = [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv]


@pytest.mark.parametrize("name", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_constructors_take_gymnasiums_arguments_in_gymnasiums_order(name):
    theirs = inspect.signature(getattr(gym.vector, name).__init__).parameters
    ours = inspect.signature(getattr(vecenv, name).__init__).parameters
    positional = [key for key, parameter in ours.items() if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)
    for key in theirs:
        if key != "shared_memory":  # vecenv's default None means "if possible"; True insists
            assert ours[key].default == theirs[key].default


@pytest.mark.parametrize("name", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_every_public_method_and_attribute_of_gymnasium_exists(name):
    fns = [lambda: gym.make("CartPole-v1")] * 2
    with getattr(vecenv, name)(fns) as ours:
        theirs = getattr(gym.vector, name)(fns)
        missing = {key for key in dir(theirs) if not key.startswith("_") and not hasattr(ours, key)}
        theirs.close()
    assert missing <= {"parent_pipes", "error_queue"}  # details of Gymnasium's pipes


def test_a_small_dev_shm_is_no_limit_and_shared_memory_false_does_not_use_it(monkeypatch):
    anonymous = vecenv.memory.block._anonymous

    def full(size, shared_memory):
        if shared_memory:
            raise OSError(28, "No space left on device")
        return anonymous(size, shared_memory)

    fns = counting_fns(4)
    with vecenv.AsyncVectorEnv(fns) as one:
        monkeypatch.setattr(vecenv.memory.block, "_anonymous", full)
        with vecenv.AsyncVectorEnv(fns) as other:
            assert other.reset(seed=1)[0].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0]]
        with vecenv.AsyncVectorEnv(fns, shared_memory=False) as other:
            assert other.shared_memory is False
            assert_same(one.reset(seed=1), other.reset(seed=1))
            for _ in range(10):
                assert_same(one.step([0, 1, 0, 1]), other.step([0, 1, 0, 1]))


def test_a_worker_function_is_rejected_and_the_error_says_what_to_use():
    with pytest.raises(ValueError, match=r"worker= is not supported.*wrap it in env_fns.*autoreset_mode"):
        vecenv.AsyncVectorEnv(counting_fns(2), worker=lambda *args: None)


def test_a_number_in_place_of_shared_memory_is_rejected():
    with pytest.raises(TypeError, match=r"shared_memory=2.*pass num_workers by name"):
        vecenv.AsyncVectorEnv(counting_fns(4), 2)


@pytest.mark.parametrize(("value", "message"), [(0, "positive"), (-1, "positive"), (1.5, "must be an integer or None")])
def test_max_concurrency_is_checked_as_in_gymnasium(value, message):
    for cls in (vecenv.AsyncVectorEnv, gym.vector.AsyncVectorEnv):
        with pytest.raises(ValueError, match=message):
            cls(counting_fns(2), max_concurrency=value)


def test_max_concurrency_limits_how_many_envs_run_at_a_time():
    with vecenv.AsyncVectorEnv(counting_fns(4), num_workers=4, max_concurrency=2) as envs:
        assert envs.num_workers == 2


def different_fns():
    """Returns functions that make two envs whose observation spaces differ in their bounds."""
    made = [spaces.Box(0, 1, (2,)), spaces.Box(-1, 2, (2,))]
    return [lambda s=s: SampledEnv(s, spaces.Discrete(2)) for s in made]


@pytest.mark.parametrize("cls", BOTH)
def test_observation_mode_different_batches_the_bounds_as_gymnasium_does(cls):
    theirs = gym.vector.SyncVectorEnv(different_fns(), observation_mode="different")
    with cls(different_fns(), observation_mode="different") as ours:
        assert ours.observation_space == theirs.observation_space
        assert ours.single_observation_space == theirs.single_observation_space
        assert_same(ours.reset(seed=3), theirs.reset(seed=3))
        for _ in range(20):
            assert_same(ours.step([0, 1]), theirs.step([0, 1]))
    with pytest.raises(RuntimeError, match=r"observation_mode='same'.*use observation_mode='different'"):
        cls(different_fns())


@pytest.mark.parametrize("cls", BOTH)
def test_observation_mode_different_accepts_equal_spaces_of_any_kind(cls):
    with cls([lambda: SampledEnv(Color(), spaces.Discrete(2))] * 2, observation_mode="different") as envs:
        assert envs.observation_space == spaces.Tuple([Color(), Color()])


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("order", [1, -1])
def test_observation_mode_takes_a_pair_of_spaces_in_either_order(cls, order):
    single, batched = spaces.Box(-5, 5, (2,)), spaces.Box(-5, 5, (2, 2))
    with cls(different_fns(), observation_mode=(batched, single)[::order]) as envs:
        assert envs.single_observation_space == single and envs.observation_space == batched
        assert envs.reset(seed=1)[0].shape == (2, 2)


@pytest.mark.parametrize("cls", [*BOTH, gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv])
def test_an_invalid_observation_mode_raises_the_same_error_as_in_gymnasium(cls):
    with pytest.raises(ValueError, match="Invalid `observation_mode`, expected: 'same' or 'different'"):
        cls(counting_fns(2), observation_mode="other")
    with pytest.raises(TypeError, match="Expected both elements of observation_mode to be Spaces"):
        cls(counting_fns(2), observation_mode=(1, 2))
    with pytest.raises(RuntimeError, match="do not share a common shape and dtype"):
        cls(counting_fns(2), observation_mode=(spaces.Box(0, 1, (2, 4)), spaces.Box(0, 1, (4,))))


def test_values_of_a_custom_space_travel_through_the_pipe_and_shared_memory_true_is_an_error():
    fns = [lambda: SampledEnv(Color(), spaces.Discrete(2))] * 3
    theirs = gym.vector.SyncVectorEnv(fns)
    for shared_memory in (None, False):
        with vecenv.AsyncVectorEnv(fns, shared_memory=shared_memory, num_workers=2) as ours:
            assert ours.observation_space == theirs.observation_space
            assert_same(ours.reset(seed=3), theirs.reset(seed=3))
            assert_same(ours.step([0, 1, 1]), theirs.step([0, 1, 1]))
    for cls in (vecenv.AsyncVectorEnv, gym.vector.AsyncVectorEnv):
        with pytest.raises(ValueError, match="shared_memory=False"):
            cls(fns, shared_memory=True)


@pytest.mark.parametrize(
    ("cls", "workers"), [(vecenv.SyncVectorEnv, {}), *[(BOTH[1], {"num_workers": n}) for n in (0, 1)]]
)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_vector_env_cannot_be_copied(cls, workers, copied):
    with cls(counting_fns(2), **workers) as envs:
        envs.reset(seed=0)
        with pytest.raises(TypeError, match=rf"{cls.__name__} cannot be copied or pickled.*get_state\(\)"):
            copied(envs)
        envs.step([0, 0])


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("space", [spaces.Box(0, 1, (0,)), spaces.Box(0, 1, (3, 0), np.float64), spaces.Dict({})])
def test_spaces_without_elements_work_as_in_gymnasium(cls, space):
    with cls([lambda: SampledEnv(space, spaces.Discrete(2))] * 3) as envs:
        theirs = gym.vector.SyncVectorEnv([lambda: SampledEnv(space, spaces.Discrete(2))] * 3)
        assert_same(envs.reset(seed=1), theirs.reset(seed=1))
        assert_same(envs.step([0, 1, 0]), theirs.step([0, 1, 0]))


@pytest.mark.parametrize("cls", [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv, gym.vector.SyncVectorEnv])
def test_disabled_autoreset_with_reset_masks_equals_gymnasium(cls):
    made = {}
    for key in (cls, gym.vector.AsyncVectorEnv):
        envs = key([lambda: gym.make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.DISABLED)
        made[key] = [envs.reset(seed=2)]
        envs.action_space.seed(1)
        for _ in range(150):
            made[key].append(envs.step(envs.action_space.sample()))
            ended = made[key][-1][2] | made[key][-1][3]
            if ended.any():
                made[key].append(envs.reset(seed=[5, 6, 7], options={"reset_mask": ended, "low": -0.01, "high": 0.01}))
        envs.close()
    assert len(made[cls]) > 155
    for one, other in zip(*made.values(), strict=True):
        assert_same(one, other)


def test_stepping_past_the_end_with_autoreset_disabled_raises_an_assertion_error():
    for cls in BOTH:
        with cls(counting_fns(2, 1), autoreset_mode="Disabled") as envs:
            envs.reset()
            envs.step([0, 0])
            with pytest.raises(gym.error.ResetNeeded, match="reset_mask") as caught:
                envs.step([0, 0])
            assert isinstance(caught.value, AssertionError)


def test_calls_while_another_is_pending_raise_gymnasiums_errors():
    with vecenv.AsyncVectorEnv(counting_fns(2)) as envs:
        for wait in (envs.reset_wait, envs.step_wait, envs.call_wait):
            with pytest.raises(NoAsyncCallError, match="without any prior call to"):
                wait()
        envs.reset_async()
        for call in (
            envs.reset_async,
            lambda: envs.step_async([0, 0]),
            lambda: envs.call_async("index"),
            lambda: envs.set_attr("index", 1),
            lambda: envs.send([0, 0]),
            lambda: envs.apply(lambda env: 1),
        ):
            with pytest.raises(AlreadyPendingCallError, match="while waiting for a pending call to `reset`"):
                call()
        envs.reset_wait()
    with pytest.raises(
        ClosedEnvironmentError, match=r"Trying to operate on `AsyncVectorEnv`, after a call to `close\(\)`"
    ):
        envs.step([0, 0])


def test_closing_while_a_call_is_pending_warns_as_gymnasium_does():
    for cls in (vecenv.AsyncVectorEnv, gym.vector.AsyncVectorEnv):
        envs = cls(counting_fns(2))
        envs.reset_async()
        with pytest.warns(UserWarning, match="Calling `close` while waiting for a pending call to `reset` to complete"):
            envs.close()


WRAPPED = {
    "RecordEpisodeStatistics": lambda envs: wrappers.RecordEpisodeStatistics(envs),
    "NormalizeObservation": lambda envs: wrappers.NormalizeObservation(envs),
    "NormalizeReward": lambda envs: wrappers.NormalizeReward(envs),
    "ClipReward": lambda envs: wrappers.ClipReward(envs, 0.2, 0.8),
    "TransformReward": lambda envs: wrappers.TransformReward(envs, lambda reward: 2 * reward),
    "TransformObservation": lambda envs: wrappers.TransformObservation(envs, lambda observation: observation + 1),
    "VectorizeTransformObservation": lambda envs: wrappers.VectorizeTransformObservation(
        envs, gym.wrappers.TransformObservation, func=lambda x: x * 2, observation_space=envs.single_observation_space
    ),
    "FlattenObservation": lambda envs: wrappers.FlattenObservation(envs),
    "DtypeObservation": lambda envs: wrappers.DtypeObservation(envs, np.float64),
    "DictInfoToList": lambda envs: wrappers.DictInfoToList(envs),
    "several": lambda envs: wrappers.NormalizeReward(wrappers.RecordEpisodeStatistics(envs)),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_gymnasiums_vector_wrappers_behave_the_same(name, cls, mode):
    fns = [lambda: gym.make("CartPole-v1")] * 3
    bare = cls(fns, autoreset_mode=mode)
    try:
        theirs = WRAPPED[name](gym.vector.SyncVectorEnv(fns, autoreset_mode=mode))
    except ValueError as error:  # the wrapper rejects this mode, and must reject it for vecenv too
        with pytest.raises(ValueError, match=re.escape(str(error))):
            WRAPPED[name](bare)
        bare.close()
        return
    ours = WRAPPED[name](bare)
    assert_same(without_times(ours.reset(seed=1)), without_times(theirs.reset(seed=1)))
    ours.action_space.seed(2)
    for _ in range(100):
        actions = ours.action_space.sample()
        assert_same(without_times(ours.step(actions)), without_times(theirs.step(actions)))
    ours.close()


def without_times(result):
    infos = result[-1]
    if isinstance(infos, dict):
        for statistics in (infos.get("episode"), infos.get("final_info", {}).get("episode")):
            if statistics is not None:
                statistics.pop("t", None)
                statistics.pop("_t", None)
        return result
    for info in infos:  # DictInfoToList
        info.pop("episode", None)
    return (*result[:-1], tuple(infos))


class RenderingEnv(CountingEnv):
    """Renders its index as a shade of gray."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012
    render_mode = "rgb_array"

    def render(self):
        return np.full((32, 48, 3), 10 * self.index, np.uint8)


@pytest.mark.parametrize("cls", BOTH)
def test_render_returns_one_frame_per_env(cls):
    with cls([lambda i=i: RenderingEnv(i) for i in range(3)]) as envs:
        assert envs.render_mode == "rgb_array"
        envs.reset(seed=1)
        frames = envs.render()
        assert isinstance(frames, tuple) and [frame[0, 0, 0] for frame in frames] == [0, 10, 20]


def test_a_video_can_be_recorded(tmp_path):
    pytest.importorskip("moviepy")
    envs = vecenv.AsyncVectorEnv([lambda i=i: RenderingEnv(i, 100) for i in range(3)])
    envs = wrappers.RecordVideo(envs, str(tmp_path), step_trigger=lambda step: step == 0, video_length=5)
    envs.reset(seed=1)
    for _ in range(8):
        envs.step(envs.action_space.sample())
    envs.close()
    assert [path.stat().st_size > 0 for path in tmp_path.glob("*.mp4")] == [True]


@pytest.mark.parametrize("cls", BOTH)
def test_apply_runs_a_function_on_the_chosen_envs(cls):
    with cls(counting_fns(5)) as envs:
        assert envs.apply(lambda env: env.index * 10) == [0, 10, 20, 30, 40]
        assert envs.apply(lambda env: setattr(env, "length", 99) or env.index, [3, 1]) == [3, 1]
        assert envs.get_attr("length") == (3, 99, 5, 99, 4)
        with pytest.raises(ZeroDivisionError):
            envs.apply(lambda env: 1 / env.index)
        envs.reset()  # an error in a call leaves the envs usable
        envs.step([0] * 5)


@pytest.mark.parametrize("kind", [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv])
def test_seeds_may_be_an_array(kind):
    with kind([lambda: gym.make("CartPole-v1")] * 2) as envs:
        expected, _ = envs.reset(seed=[3, 5])
        np.testing.assert_array_equal(envs.reset(seed=np.array([3, 5]))[0], expected)
        with pytest.raises(TypeError, match="float"):
            envs.reset(seed=[3.7, 5])


def test_np_random_and_np_random_seed_have_one_entry_per_env():
    for cls in BOTH:
        with cls([lambda: gym.make("CartPole-v1")] * 2) as envs:
            envs.reset(seed=7)
            assert envs.np_random_seed == (7, 8)
            assert [type(generator) for generator in envs.np_random] == [np.random.Generator] * 2


def test_observations_returns_the_newest_observations():
    for cls in BOTH:
        with cls(counting_fns(2)) as envs:
            observations, _ = envs.reset()
            np.testing.assert_array_equal(envs.observations, observations)


class OwnNumpyRandom(CountingEnv):
    """Draws from NumPy's global generator."""

    def draw(self):
        return float(np.random.random())


def test_workers_do_not_share_the_state_of_numpys_global_generator():
    with vecenv.AsyncVectorEnv([lambda: OwnNumpyRandom(0)] * 4, num_workers=4) as envs:
        assert len(set(envs.call("draw"))) == 4


def test_returned_arrays_including_nested_leaves_are_not_overwritten():
    space = spaces.Dict({"a": spaces.Box(0, 1, (3,)), "b": spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.Discrete(9)])})
    with vecenv.AsyncVectorEnv([lambda: SampledEnv(space, spaces.Discrete(2))] * 2) as envs:
        kept = [envs.reset(seed=1)[0]] + [envs.step([0, 1])[0] for _ in range(4)]
        copies = [np.concatenate([k["a"].ravel(), k["b"][0].ravel(), k["b"][1].ravel()]) for k in kept]
        for _ in range(5):
            envs.step([0, 1])
        again = [np.concatenate([k["a"].ravel(), k["b"][0].ravel(), k["b"][1].ravel()]) for k in kept]
    np.testing.assert_array_equal(copies, again)


def test_options_are_not_changed_and_each_env_gets_its_seed():
    class SeedsEnv(CountingEnv):
        def reset(self, *, seed=None, options=None):
            self.seen = (seed, options)
            return super().reset(seed=seed)

    options = {"reset_mask": np.array([True, False, True]), "speed": 2}
    with vecenv.AsyncVectorEnv([lambda i=i: SeedsEnv(i) for i in range(3)]) as envs:
        envs.reset(seed=5)
        assert envs.get_attr("seen") == ((5, None), (6, None), (7, None))
        envs.reset(seed=[1, 2, 3], options=options)
        assert envs.get_attr("seen") == ((1, {"speed": 2}), (6, None), (3, {"speed": 2}))
    assert options.keys() == {"reset_mask", "speed"}


NAMES = [name for mode in AutoresetMode for name in (mode.name, mode.value)]


@pytest.mark.parametrize("cls", [vecenv.SyncVectorEnv, functools.partial(vecenv.AsyncVectorEnv, num_workers=0)])
def test_an_autoreset_mode_may_be_a_members_name_or_value_and_the_error_lists_the_values(cls):
    assert [cls(counting_fns(1), autoreset_mode=name).autoreset_mode.name for name in NAMES] == [
        mode.name for mode in AutoresetMode for _ in range(2)
    ]
    with pytest.raises(ValueError, match=r"autoreset_mode='same' is unknown: .*\['NextStep', 'SameStep', 'Disabled'\]"):
        cls(counting_fns(1), autoreset_mode="same")


@pytest.mark.parametrize("cls", [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv])
@pytest.mark.parametrize(
    ("env_fns", "message"),
    [
        (CountingEnv, r"env_fns=<class .*CountingEnv'> is not a list: .* such as \[make_env\] \* num_envs"),
        (4, "env_fns=4 is not a list"),
        ([4], r"env_fns\[0\] is 4, which is not a function: write `lambda: int\(\.\.\.\)`"),
        ("CartPole-v1", "env_fns='CartPole-v1' is not a list: for an id, call vecenv.make"),
        ([gym.make("CartPole-v1")], r"which is not a function: write `lambda: gymnasium\.make\('CartPole-v1'\)`"),
        (["CartPole-v1"], r"which is not a function: write `lambda: gymnasium\.make\('CartPole-v1'\)`"),
    ],
)
def test_the_error_for_functions_that_are_no_list_says_what_to_pass(cls, env_fns, message):
    with pytest.raises(TypeError, match=message):
        cls(env_fns)
