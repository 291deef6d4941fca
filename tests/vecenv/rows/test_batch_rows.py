"""Tests of vecenv/rows/batch_rows.py: envs that a vector env steps in one call behave like envs stepped one by one."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

import vecenv
from tests.helpers import CountingEnv, assert_same, counting_fns
from vecenv import Batched

pytestmark = pytest.mark.filterwarnings("ignore:.*It is restarted")


class FreshCountingEnv(CountingEnv):
    """Returns a new array for each observation, because Gymnasium's SyncVectorEnv does not copy final observations."""

    def _observe(self):
        return super()._observe().copy()


class CountingVectorEnv(VectorEnv):
    """A vector env that does not depend on vecenv and steps CountingEnvs one by one.

    Each instance numbers its envs from 0, so a second worker returns the same observations as the first.
    """

    def __init__(self, num_envs, autoreset_mode, length=3):
        fns = [lambda i=i: FreshCountingEnv(i, length + i % 3) for i in range(num_envs)]
        self._envs = gym.vector.SyncVectorEnv(fns, autoreset_mode=autoreset_mode)
        self.num_envs, self.metadata = num_envs, self._envs.metadata
        self.single_observation_space = CountingEnv.observation_space
        self.single_action_space = CountingEnv.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.color, self.size, self.options = "blue", (3, 4), None

    def reset(self, *, seed=None, options=None):
        self.options = options and dict(options)
        return self._envs.reset(seed=seed, options=options)

    def step(self, actions):
        if (np.asarray(actions) == 1).any():
            raise RuntimeError("one is refused")
        return self._envs.step(actions)


class PartialCountingVectorEnv(CountingVectorEnv):
    """Can also step a subset of its envs."""

    def step_rows(self, ids, actions):
        results = [np.zeros((self.num_envs, 3)), np.zeros(self.num_envs)]
        results += [np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)]
        infos = {}
        for i, action in zip(ids, actions, strict=True):
            env, over = self._envs.envs[i], self._envs._autoreset_envs[i]
            row = (*env.reset(), 0.0, False, False) if over else env.step(action)
            observation, reward, terminated, truncated, info = (
                (row[0], *row[2:], row[1]) if over else row
            )  # fmt: skip
            for column, value in zip(results, (observation, reward, terminated, truncated), strict=True):
                column[i] = value
            infos = self._envs._add_info(infos, info, i)
            self._envs._autoreset_envs[i] = terminated or truncated
        return (*results, infos)

    def episode(self):
        return self._envs.envs[0].episode


class HandingOver(PartialCountingVectorEnv):
    """Lets the engine pass on its infos without copies."""

    hands_over_infos = True


def batched(num_envs=3, cls=CountingVectorEnv, **kwargs):
    return Batched(lambda num_envs, autoreset_mode: cls(num_envs, autoreset_mode, **kwargs), num_envs)


MODES = list(AutoresetMode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", [None, 0, 1, 2])
def test_any_vector_env_returns_the_same_in_workers_as_alone(mode, num_workers):
    """Here, num_workers=None stands for SyncVectorEnv."""
    if num_workers is None:
        ours = vecenv.SyncVectorEnv(batched(4), autoreset_mode=mode)
    else:
        ours = vecenv.AsyncVectorEnv(batched(4), num_workers=num_workers, autoreset_mode=mode)
    parts = [CountingVectorEnv(n, mode) for n in ([2, 2] if num_workers == 2 else [4])]
    size = 4 // len(parts)
    with ours:
        observations, infos = ours.reset(seed=3)
        for k, part in enumerate(parts):
            expected = part.reset(seed=list(range(3 + k * size, 3 + (k + 1) * size)))
            assert_same(observations[k * size : (k + 1) * size], expected[0])
        assert_same(infos, {"started": np.zeros(4, int), "_started": np.ones(4, bool)})
        for step in range(9):
            actions = np.zeros(4, np.int64)
            result = ours.step(actions)
            for k, part in enumerate(parts):
                rows = slice(k * size, (k + 1) * size)
                *expected, expected_infos = part.step(actions[rows])
                assert_same(tuple(values[rows] for values in result[:4]), tuple(expected))
                for key, values in expected_infos.items():
                    mine = result[4][key]
                    if isinstance(values, dict):
                        assert_same({name: column[rows] for name, column in mine.items()}, values)
                    else:
                        assert_same(mine[rows], values)
            if mode == AutoresetMode.DISABLED and (step + 1) % 3 == 0:
                mask = np.array([True, False, True, True])
                assert ours.reset(options={"reset_mask": mask})[0][:, 2].tolist() == [0, 3, 0, 0]
                for k, part in enumerate(parts):
                    part.reset(options={"reset_mask": mask[k * size : (k + 1) * size]})
                assert ours.reset(options={"reset_mask": ~mask})[0][:, 2].tolist() == [0, 0, 0, 0]
                for k, part in enumerate(parts):
                    if (~mask)[k * size : (k + 1) * size].any():
                        part.reset(options={"reset_mask": (~mask)[k * size : (k + 1) * size]})


@pytest.mark.parametrize("build", ["serial", 0, 1])
@pytest.mark.parametrize("cls", [CountingVectorEnv, HandingOver])
def test_batched_rows_equal_rows_stepped_one_by_one(build, cls):
    """Totals, infos and final observations equal those of the same envs made from a list of functions."""
    for mode in MODES[:2]:
        if build == "serial":
            ours = vecenv.SyncVectorEnv(batched(4, cls), autoreset_mode=mode)
        else:
            ours = vecenv.AsyncVectorEnv(batched(4, cls), num_workers=build, autoreset_mode=mode)
        with ours, vecenv.SyncVectorEnv(counting_fns(4), autoreset_mode=mode) as theirs:
            assert_same(ours.reset(seed=0), theirs.reset(seed=0))
            for _ in range(11):
                assert_same(ours.step([0] * 4), theirs.step([0] * 4))
                assert_same(ours.episode_returns, theirs.episode_returns)
                assert_same(ours.episode_lengths, theirs.episode_lengths)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("cls", [PartialCountingVectorEnv, HandingOver])
def test_send_and_recv_can_step_a_subset_of_the_rows(num_workers, cls):
    fns = batched(4, cls)
    with vecenv.AsyncVectorEnv(fns, num_workers=num_workers) as ours, vecenv.SyncVectorEnv(counting_fns(4)) as theirs:
        ours.reset(seed=0), theirs.reset(seed=0)
        for ids in ([3, 1, 0, 2], [0, 2], [1], [0, 1, 2, 3], [3, 0], [2], [1, 3], [0, 1, 2, 3]):
            for envs in (ours, theirs):
                envs.send([0] * len(ids), ids)
            batch, expected = ours.recv(), theirs.recv()
            at, there = np.argsort(batch.env_ids), np.argsort(expected.env_ids)
            assert_same(tuple(values[at] for values in batch[:4]), tuple(values[there] for values in expected[:4]))
            for key, values in expected.infos.items():
                assert_same(batch.infos[key][at], values[there])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_actions_of_another_dtype_than_that_of_the_space_reach_the_vector_env_unchanged(num_workers):
    class Acting(PartialCountingVectorEnv):
        def __init__(self, num_envs, autoreset_mode):
            super().__init__(num_envs, autoreset_mode)
            self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
            self.action_space = batch_space(self.single_action_space, num_envs)

        def step_rows(self, ids, actions):
            self.received = dict(zip(ids, actions.tolist(), strict=True))
            return super().step_rows(ids, np.zeros(len(ids), np.int64))

    with vecenv.AsyncVectorEnv(batched(3, Acting), num_workers=num_workers) as envs:
        envs.reset(seed=0)
        envs.send(np.array([[0.1], [0.2]]), [2, 0])
        envs.recv()
        assert envs.get_attr("received")[0] == {2: [0.1], 0: [0.2]}


def test_a_masked_reset_passes_on_the_other_options():
    with vecenv.SyncVectorEnv(batched(3), autoreset_mode="Disabled") as envs:
        envs.reset(seed=0, options={"low": 1})
        assert envs.get_attr("options")[0] == {"low": 1}
        mask = np.array([True, False, True])
        envs.reset(options={"reset_mask": mask, "low": 2})
        assert_same(envs.get_attr("options")[0], {"reset_mask": mask, "low": 2})


def test_sending_to_a_vector_env_that_cannot_step_a_subset_is_an_error():
    with vecenv.AsyncVectorEnv(batched(4), num_workers=1) as envs:
        envs.reset(seed=0)
        envs.send([0], [2])
        with pytest.raises(NotImplementedError, match=r"steps all its envs at once.*step_rows"):
            envs.recv()


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_that_dies_restarts_and_its_episodes_are_cut(mode):
    fns = batched(4, PartialCountingVectorEnv, length=50)
    how = {"num_workers": 2, "autoreset_mode": mode, "on_worker_death": "restart"}
    with vecenv.AsyncVectorEnv(fns, **how) as envs:
        envs.reset(seed=0)
        for _ in range(6):
            envs.step([0] * 4)
        envs.processes[0].kill(), envs.processes[0].join()
        observations, rewards, _, truncated, infos = envs.step([0] * 4)
        assert list(rewards) == [0, 0, 7, 7] and list(truncated) == [True, True, False, False]
        assert min(envs.call("episode")) >= 0  # the new envs can be used before their next step
        assert list(infos["worker_restarted"]) == [True, True, False, False]
        assert envs.episode_returns.tolist() == [21, 21, 28, 28]
        assert envs.episode_lengths.tolist() == [6, 6, 7, 7]
        if mode == AutoresetMode.SAME_STEP:
            assert [row[2] for row in infos["final_obs"][:2]] == [6, 6]
            assert list(observations[:, 2]) == [0, 0, 7, 7]
            assert infos["_started"].tolist() == [True, True, False, False]
            following = [[1, 1, 8, 8], [2, 2, 9, 9]]
        else:
            assert list(observations[:, 2]) == [6, 6, 7, 7]
            following = [[0, 0, 8, 8], [1, 1, 9, 9]]
        if mode == AutoresetMode.DISABLED:
            with pytest.raises(AssertionError, match="reset_mask"):
                envs.step([0] * 4)
            mask = np.array([True, True, False, False])
            assert list(envs.reset(options={"reset_mask": mask})[0][:, 2]) == [0, 0, 7, 7]
            following = [[1, 1, 8, 8], [2, 2, 9, 9]]
        for steps in following:
            observations, _, _, truncated, _ = envs.step([0] * 4)
            assert list(observations[:, 2]) == steps and not truncated.any()


def test_states_cannot_be_saved_while_rows_of_a_restarted_worker_wait_for_their_reset():
    class Saving(PartialCountingVectorEnv):
        def get_state(self):
            return [env.get_state() for env in self._envs.envs]

        def set_state(self, states):
            raise NotImplementedError

    with vecenv.AsyncVectorEnv(batched(4, Saving, length=50), num_workers=2, on_worker_death="restart") as envs:
        envs.reset(seed=0)
        envs.step([0] * 4)
        envs.processes[0].kill(), envs.processes[0].join()
        envs.step([0] * 4)  # reports the cut episodes
        with pytest.raises(vecenv.NotRestorable, match="just restarted: step its envs"):
            envs.get_state()
        envs.step([0] * 4)
        assert len(envs.get_state()) == 4


def test_rows_whose_episode_was_over_when_their_worker_died_begin_the_next_episode():
    fns = batched(4, PartialCountingVectorEnv, length=3)  # 3 and 4 steps in each worker
    with vecenv.AsyncVectorEnv(fns, num_workers=2, on_worker_death="restart") as envs:
        envs.reset(seed=0)
        for _ in range(3):
            _, _, terminated, truncated, _ = envs.step([0] * 4)
        assert (terminated | truncated).tolist() == [True, False, True, False]
        envs.processes[0].kill(), envs.processes[0].join()
        observations, rewards, terminated, truncated, infos = envs.step([0] * 4)
        assert observations[:, 2].tolist() == [0, 3, 0, 4] and rewards.tolist() == [0, 0, 0, 4]
        assert truncated.tolist() == [False, True, False, True] and not terminated.any()
        assert infos["worker_restarted"].tolist() == [False, True, False, False]
        observations, rewards, terminated, truncated, infos = envs.step([0] * 4)
        assert observations[:, 2].tolist() == [1, 0, 1, 0] and rewards.tolist() == [1, 0, 1, 0]
        assert not (terminated | truncated).any() and "worker_restarted" not in infos
        assert envs.episode_lengths.tolist() == [1, 0, 1, 0]


def test_an_exception_of_the_vector_env_names_the_worker_and_its_envs():
    with vecenv.AsyncVectorEnv(batched(4), num_workers=2) as envs:
        envs.reset(seed=0)
        with pytest.raises(RuntimeError, match=r"(?s)envs 2:4 in worker 1 raised during step.*one is refused"):
            envs.step([0, 0, 0, 1])
        with pytest.raises(vecenv.StateError):
            envs.step([0] * 4)


def test_an_exception_in_this_process_has_a_note_that_names_all_envs_or_the_faulty_one():
    with vecenv.SyncVectorEnv(batched(4)) as envs:
        envs.reset(seed=0)
        with pytest.raises(RuntimeError, match="one is refused") as caught:
            envs.step([0, 0, 0, 1])
        assert caught.value.__notes__ == ["raised by envs 0:4 during step"]
    with vecenv.SyncVectorEnv(batched(3, Replacing, rewards=np.array([1.0, None, 2.0]))) as envs:
        envs.reset(seed=0)
        with pytest.raises(TypeError, match="reward of env 1") as caught:
            for _ in range(6):
                envs.step([0] * 3)
        assert caught.value.__notes__ == ["raised by env 1 during step"]
    with vecenv.SyncVectorEnv(batched(3, Replacing, reset_infos=None)) as envs:
        envs.reset(seed=0)
        with pytest.raises(TypeError, match="info of envs 0:3") as caught:
            envs.reset(seed=None)
        assert caught.value.__notes__ == ["raised by envs 0:3 during reset"]


def test_attributes_belong_to_the_vector_env():
    with vecenv.AsyncVectorEnv(batched(4), num_workers=2) as envs:
        assert envs.get_attr("color") == ("blue",) * 4 and envs.get_attr("size") == ((3, 4),) * 4
        envs.set_attr("color", [np.ones(2) for _ in range(4)])
        assert envs.get_attr("color")[3].tolist() == [1, 1]
        envs.set_attr("color", "red")
        assert envs.get_attr("color") == ("red",) * 4
        envs.reset(seed=5)
        with pytest.raises(ValueError, match=r"one attribute.*for all its envs.*backend='python'"):
            envs.set_attr("color", ["red", "red", "green", "green"])  # equal within each worker
        assert envs.get_attr("color") == ("red",) * 4
        with pytest.raises(AttributeError, match=r"has no 'smell'.*backend='python'"):
            envs.get_attr("smell")
        with pytest.raises(TypeError, match="no single env"):
            envs.apply(lambda env: env)
        envs.step([0] * 4)  # none of these errors breaks the vector env


class Wild(CountingVectorEnv):
    """Returns an infinite value in its last row from the second step on."""

    def step(self, actions):
        observations, *rest = super().step(actions)
        observations[-1, 2] = np.inf if observations[-1, 2] > 1 else 0
        return (observations, *rest)


class WildReset(CountingVectorEnv):
    """Returns NaN in its last row from `reset`."""

    def reset(self, **arguments):
        observations, infos = super().reset(**arguments)
        observations[-1, 2] = np.nan
        return observations, infos


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("option", ["float32_observations", "finite_observations"])
def test_observations_must_be_finite_on_request(num_workers, option):
    with vecenv.AsyncVectorEnv(batched(4, Wild), num_workers=num_workers, **{option: True}) as envs:
        observations, _ = envs.reset(seed=0)
        assert observations.dtype == (np.float32 if option == "float32_observations" else np.float64)
        envs.step([0] * 4)
        with pytest.raises(ValueError, match=r"observation of env (3|1) is not finite"):
            envs.step([0] * 4)
    with (
        vecenv.AsyncVectorEnv(batched(4, WildReset), num_workers=num_workers, **{option: True}) as envs,
        pytest.raises(ValueError, match=r"observation of env (3|1) is not finite"),
    ):
        envs.reset(seed=0)


def test_actions_are_clipped_to_the_bounds():
    with vecenv.make("Hopper-v5", 2, vector_kwargs={"clip_actions": True}) as ours:
        assert ours.single_action_space == spaces.Box(-np.inf, np.inf, (3,))
        with vecenv.make("Hopper-v5", 2) as theirs:
            ours.reset(seed=0), theirs.reset(seed=0)
            wild = np.array([[3, -4, 0.2], [0.1, -9, 1.5]], np.float32)
            assert_same(ours.step(wild), theirs.step(np.clip(wild, -1, 1)))


@pytest.mark.parametrize("num_envs", [1, 2])
def test_one_value_for_all_envs_need_not_equal_itself(num_envs):
    with vecenv.SyncVectorEnv(batched(num_envs)) as envs:
        envs.set_attr("color", float("nan"))
        assert all(np.isnan(color) for color in envs.get_attr("color"))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_different_value_for_one_env_is_an_error(row):
    with vecenv.SyncVectorEnv(batched(3)) as envs, pytest.raises(ValueError, match="'color' is one attribute"):
        envs.set_attr("color", ["green" if i == row else "red" for i in range(3)])


class Talking(CountingVectorEnv):
    """Its actions have no fixed shape."""

    def __init__(self, num_envs, autoreset_mode):
        super().__init__(num_envs, autoreset_mode)
        self.single_action_space = spaces.Text(5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda num_envs, autoreset_mode: CountingEnv(0), TypeError, "returned a CountingEnv"),
        (lambda num_envs, autoreset_mode: CountingVectorEnv(7, autoreset_mode), ValueError, "a vector env of 7 envs"),
        (lambda num_envs, autoreset_mode: CountingVectorEnv(num_envs, "SameStep"), ValueError, "autoreset_mode"),
        (lambda num_envs, autoreset_mode: Talking(num_envs, autoreset_mode), ValueError, "(?s)Text.*backend='python'"),
        (lambda wrong: None, TypeError, "num_envs"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unsuitable_vector_env_is_rejected(make, error, message, num_workers):
    with pytest.raises(error, match=message):
        vecenv.AsyncVectorEnv(Batched(make, 4), num_workers=num_workers)


def test_a_vector_env_that_is_rejected_is_closed():
    closed = []

    class Closing(CountingVectorEnv):
        def close(self):
            closed.append(self.num_envs)

    with pytest.raises(ValueError, match="a vector env of 7 envs"):
        vecenv.SyncVectorEnv(Batched(lambda num_envs, autoreset_mode: Closing(7, autoreset_mode), 4))
    assert closed == [7]


def test_an_error_of_a_reset_with_seeds_says_that_seeds_are_a_list():
    class OneSeed(CountingVectorEnv):
        def reset(self, *, seed=None, options=None):
            raise TypeError("no")

    for seed, notes in ((0, True), (None, False)):
        with vecenv.SyncVectorEnv(batched(4, OneSeed)) as envs, pytest.raises(TypeError, match="no") as caught:
            envs.reset(seed=seed)
        assert any("must accept a list of seeds" in note for note in caught.value.__notes__) is notes


@pytest.mark.parametrize(
    ("how", "dropped"), [({}, False), ({"infos": False}, True), ({"infos": False, "info_keys": ["steps"]}, False)]
)
def test_a_vector_env_learns_that_its_infos_are_not_needed(how, dropped):
    class Dropping(CountingVectorEnv):
        dropped = False

        def drop_infos(self):
            self.dropped = True

    with vecenv.SyncVectorEnv(batched(4, Dropping), **how) as envs:
        assert envs.get_attr("dropped") == (dropped,) * 4


def test_invalid_arguments_are_rejected():
    with pytest.raises(TypeError, match="is not a function"):
        Batched(3, 4)
    with pytest.raises(ValueError, match="num_envs=0"):
        Batched(CountingVectorEnv, 0)
    assert len(Batched(CountingVectorEnv, 5)[1:3]) == 2 and len(Batched(CountingVectorEnv, 1)) == 1


def test_restart_is_rejected_for_a_vector_env_that_cannot_step_a_subset():
    with pytest.raises(ValueError, match=r"on_worker_death='restart' needs.*step_rows"):
        vecenv.AsyncVectorEnv(batched(4), num_workers=2, on_worker_death="restart")


class Forgetful(CountingVectorEnv):
    """Omits final observations."""

    def step(self, actions):
        *result, infos = super().step(actions)
        infos.pop("final_obs", None)
        return (*result, infos)


class Narrow(CountingVectorEnv):
    """Returns one row of observations for all envs."""

    def step(self, actions):
        observations, *rest = super().step(actions)
        return (observations[:1], *rest)


class Wide(CountingVectorEnv):
    """Returns numbers that a byte cannot hold."""

    def __init__(self, num_envs, autoreset_mode):
        super().__init__(num_envs, autoreset_mode)
        self.single_observation_space = spaces.Box(0, 255, (3,), np.uint8)
        self.observation_space = batch_space(self.single_observation_space, num_envs)

    def step(self, actions):
        observations, *rest = super().step(actions)
        return (observations.astype(np.uint16) + 300, *rest)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Wide, r"observation of Wide has dtype uint16, which does not fit its space's uint8 without loss"),
        (Forgetful, r"Forgetful ended episodes of envs \[0, 3\] in SAME_STEP mode without infos\['final_obs'\]"),
        (Narrow, r"Narrow returned observation of shape \(1, 3\), but its space says \(4, 3\)"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_vector_env_that_omits_results_is_an_error(cls, message, num_workers):
    with vecenv.AsyncVectorEnv(batched(4, cls), num_workers=num_workers, autoreset_mode="SameStep") as envs:
        envs.reset(seed=0)
        with pytest.raises((ValueError, TypeError), match=message):
            for _ in range(3):
                envs.step([0] * 4)


class Telling(CountingVectorEnv):
    """Returns the infos of `says(kind, n)`, where the kind is "reset" or "step"."""

    def __init__(self, says, **arguments):
        super().__init__(**arguments)
        self._says = says

    def reset(self, **arguments):
        return super().reset(**arguments)[0], self._says("reset", self.num_envs)

    def step(self, actions):
        return *super().step(actions)[:-1], self._says("step", self.num_envs)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
def test_infos_do_not_depend_on_the_number_of_workers(num_workers):
    def says(kind, n):
        keys = {"reset": ["a"], "step": ["b", "c"]}[kind]
        return {key: values for k in keys for key, values in {k: np.full(n, 7.0), f"_{k}": np.ones(n, bool)}.items()}

    with vecenv.AsyncVectorEnv(Batched(partial(Telling, says), 4), num_workers=num_workers) as envs:
        assert_same(envs.reset(seed=0)[1], says("reset", 4))
        infos = envs.step([0] * 4)[4]
        assert_same(infos, says("step", 4))
        assert all(values.flags.writeable for values in infos.values())


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda n: {"b": np.ones(n)}, r"at step has the key 'b' without a mask '_b'"),
        (lambda n: {"b": np.ones(n), "_b": np.ones(n + 1, bool)}, r"at step has the key 'b' without a mask '_b'"),
        (lambda n: {"b": np.ones(n), "_b": [True] * n}, r"at step has the key 'b' without a mask '_b'"),
        (lambda n: {"b": np.ones(n), "_b": np.ones(n)}, r"at step has the key 'b' without a mask '_b'"),
        (lambda n: {"b": {"c": np.ones(n)}, "_b": np.ones(n, bool)}, r"at step has the key 'c' without a mask '_c'"),
        (lambda n: {"b": [1.0] * n, "_b": np.ones(n, bool)}, r"at step has \[1.0, .*\(list\) under the key 'b'"),
        (lambda n: {"b": 1.0, "_b": np.ones(n, bool)}, r"at step has 1.0 \(float\) under the key 'b'"),
        (lambda n: {"b": np.ones(n + 1), "_b": np.ones(n, bool)}, r"under the key 'b', which must be an array \["),
    ],
)
def test_infos_in_another_format_are_an_error_whatever_the_number_of_workers(values, message, num_workers):
    def says(kind, n):
        return {"a": np.ones(n), "_a": np.ones(n, bool)} if kind == "reset" else values(n)

    for infos in (True, False) if "mask" in message else (True,):
        envs = vecenv.AsyncVectorEnv(Batched(partial(Telling, says), 4), num_workers=num_workers, infos=infos)
        with envs:
            envs.reset(seed=0)
            with pytest.raises(TypeError, match=message):
                envs.step([0] * 4)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("cls", [Telling, type("TellingOver", (Telling,), {"hands_over_infos": True})])
def test_infos_that_are_dropped_need_no_arrays(num_workers, cls):
    def says(kind, n):
        return {"names": ["a"] * n, "_names": np.ones(n, bool), "score": 3.0, "_score": np.ones(n, bool)}

    env = Batched(partial(cls, says), 4)
    with vecenv.AsyncVectorEnv(env, num_workers=num_workers, autoreset_mode="Disabled", infos=False) as envs:
        envs.reset(seed=0)
        assert envs.step([0] * 4)[-1] == {}
        assert envs.reset(options={"reset_mask": np.array([True, False, True, False])})[1] == {}


@pytest.mark.parametrize("hands_over", [True, False])
def test_an_env_in_this_process_may_hand_over_its_arrays_of_infos_without_copies(hands_over):
    given = np.zeros(2)
    cls = type("Giving", (Telling,), {"hands_over_infos": hands_over})
    says = {"score": given, "_score": np.ones(2, bool)}
    with vecenv.SyncVectorEnv(Batched(partial(cls, lambda kind, n: says), 2)) as envs:
        envs.reset(seed=0)
        assert np.shares_memory(envs.step([0] * 2)[-1]["score"], given) is hands_over


@pytest.mark.parametrize("all_rows", [True, False])
def test_a_reset_of_all_rows_keeps_every_key_and_checks_the_mask_of_final_observations(all_rows):
    mask = np.array([True] * 4 if all_rows else [True, False, True, True])
    found: dict[str, np.ndarray] = {"a": np.ones(4), "_a": np.zeros(4, bool)}
    with vecenv.SyncVectorEnv(Batched(partial(Telling, lambda kind, n: found), 4), autoreset_mode="Disabled") as envs:
        envs.reset(seed=0)
        assert ("a" in envs.reset(options={"reset_mask": mask})[1]) is all_rows
        found |= {"final_obs": np.full(4, None), "_final_obs": [False] * 4}
        with pytest.raises(TypeError, match="the key 'final_obs' without a mask"):
            envs.reset(options={"reset_mask": mask})


class Replacing(CountingVectorEnv):
    """Replaces some results of its sixth step and its second reset."""

    def __init__(self, num_envs, autoreset_mode, **replace):
        super().__init__(num_envs, autoreset_mode, length=3)
        self._replace, self._steps, self._resets = replace, 0, 0

    def reset(self, **kwargs):
        observations, infos = super().reset(**kwargs)
        self._resets += 1
        return observations, self._replace.get("reset_infos", infos) if self._resets == 2 else infos

    def step(self, actions):
        observations, *results = super().step(actions)
        self._steps += 1
        if self._steps == 6:  # env 0 began its second episode at the fourth step
            for k, name in enumerate(("rewards", "terminated", "truncated", "infos")):
                if name in self._replace:
                    results[k] = self._replace[name]
        return observations, *results


def run_until_replaced(**replace):
    with vecenv.AsyncVectorEnv(batched(3, Replacing, **replace), num_workers=1) as envs:
        envs.reset(seed=0)
        for _ in range(6):
            result = envs.step([0] * 3)
    return result


NUMBER, BOOL = "not a real number", "not a bool"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "rewards",
            np.array(["3", "4", "5"]),
            rf"reward of env 0 at step 2 of its episode is .*'3'.* \(str_\), {NUMBER}",
        ),
        ("rewards", np.array([1.0, None, 2.0]), rf"reward of env 1 at step 1 of its episode is None .*, {NUMBER}"),
        ("rewards", np.ones(3, complex), rf"reward of env 0 at step 2 of its episode is .*1\+0j.*, {NUMBER}"),
        ("rewards", np.ones(3, "M8[s]"), rf"reward of env 0 at step 2 of its episode is .*datetime64.*, {NUMBER}"),
        ("rewards", np.ones(1), r"Replacing returned reward of shape \(1,\) for 3 envs"),
        ("rewards", 1.0, r"Replacing returned reward of shape \(\) for 3 envs"),
        ("terminated", np.array([0.5, 0.0, 0.0]), rf"terminated of env 0 at step 2 .* is .*0\.5.*, {BOOL}"),
        ("terminated", np.array([False, None, True]), rf"terminated of env 1 at step 1 .* is None .*, {BOOL}"),
        ("truncated", np.array(["", "", ""]), rf"truncated of env 0 at step 2 .* is .*''.*, {BOOL}"),
        ("truncated", np.zeros((3, 1), bool), r"Replacing returned truncated of shape \(3, 1\) for 3 envs"),
        ("infos", None, "info of envs 0:3 at step is None .*, not a dict. Fix what Replacing returns"),
        ("infos", [{}] * 3, "info of envs 0:3 at step is .*, not a dict"),
    ],
)
def test_a_result_of_the_wrong_type_is_an_error_that_names_env_step_and_value(name, values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        run_until_replaced(**{name: values})


def test_reset_infos_that_are_not_a_dict_are_an_error_that_names_the_envs():
    with vecenv.AsyncVectorEnv(batched(3, Replacing, reset_infos=None), num_workers=0) as envs:
        envs.reset(seed=0)
        with pytest.raises(TypeError, match=r"info of envs 0:3 at reset is None .*, not a dict"):
            envs.reset(seed=0)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int64, object, list])
def test_rewards_and_flags_may_have_any_dtype_that_can_represent_them(dtype):
    wanted = [1, 0, 1]
    values = wanted if dtype is list else np.array(wanted, dtype)
    _, rewards, terminated, truncated, _ = run_until_replaced(rewards=values, terminated=values, truncated=values)
    assert rewards.tolist() == terminated.tolist() == truncated.tolist() == wanted


class Extreme(CountingVectorEnv):
    """Observes numbers that float32 rounds to 0 and infinity; its rewards add up to infinity."""

    def __init__(self, num_envs, autoreset_mode):
        super().__init__(num_envs, autoreset_mode)
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def step(self, actions):
        observations, _, *others = super().step(actions)
        observations[:] = 1e-320, 1e300, 1
        return observations, np.full(self.num_envs, 1e308), *others


def test_a_script_that_lets_numpy_raise_does_not_affect_what_the_engine_computes():
    with np.errstate(all="raise"), vecenv.SyncVectorEnv(batched(2, Extreme), autoreset_mode="SameStep") as envs:
        envs.reset()
        for _ in range(3):
            observations, *_ = envs.step([0, 0])
        assert observations.tolist() == [[0.0, np.inf, 1.0]] * 2 and envs.episode_returns.tolist() == [np.inf] * 2


class Filling(CountingVectorEnv):
    """Writes its observations into `out`, and records the arrays that it received."""

    def __init__(self, num_envs, autoreset_mode, received=None):
        super().__init__(num_envs, autoreset_mode)
        self._received = [] if received is None else received

    def _fill(self, observations, out):
        self._received.append(out)
        if out is None:
            return observations
        out[...] = observations
        return out

    def reset(self, *, seed=None, options=None, out=None):
        observations, infos = super().reset(seed=seed, options=options)
        return self._fill(observations, out), infos

    def step(self, actions, *, out=None):
        observations, *results = super().step(actions)
        return self._fill(observations, out), *results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("float32", [False, True])
def test_a_vector_env_may_write_its_observations_into_the_rows(mode, num_workers, float32):
    received = []
    how = {"autoreset_mode": mode, "num_workers": num_workers, "float32_observations": float32}
    ours = vecenv.AsyncVectorEnv(batched(4, Filling, received=received), **how)
    theirs = vecenv.AsyncVectorEnv(batched(4), **how)
    with ours, theirs:
        assert_same(ours.reset(seed=0), theirs.reset(seed=0))
        for _ in range(11):
            *results, infos = ours.step([0] * 4)
            assert_same((*results, infos), theirs.step([0] * 4))
            ended = results[2] | results[3]
            if mode == AutoresetMode.DISABLED and ended.any():
                options = {"reset_mask": ended}
                assert_same(ours.reset(options=options), theirs.reset(options=options))
                if num_workers == 0:
                    assert received[-1] is None  # the rows outside the mask must not be written
        if num_workers == 0:
            memory = ours.arrays[("observation",)]
            given = [out for out in received if out is not None]
            assert len(given) == 12 and all(np.shares_memory(out, memory) for out in given)
            assert all(out.dtype == memory.dtype and out.shape == (4, 3) for out in given)


@pytest.mark.parametrize("without", ["reset", "step"])
def test_a_vector_env_gets_no_arrays_if_one_of_its_methods_does_not_accept_them(without):
    half = type("Half", (Filling,), {without: getattr(CountingVectorEnv, without)})
    received = []
    with vecenv.SyncVectorEnv(batched(4, half, received=received)) as ours, vecenv.SyncVectorEnv(batched(4)) as theirs:
        assert_same(ours.reset(seed=0), theirs.reset(seed=0))
        assert_same(ours.step([0] * 4), theirs.step([0] * 4))
    assert received == [None]


def test_a_wrapper_still_changes_the_observations_of_a_vector_env_that_writes_into_rows():
    class Doubled(gym.vector.VectorObservationWrapper):
        def observations(self, observations):
            return 2 * observations

    def make(num_envs, autoreset_mode):
        return Doubled(Filling(num_envs, autoreset_mode))

    with vecenv.AsyncVectorEnv(Batched(make, 4), num_workers=0) as envs:
        envs.reset(seed=0)
        assert envs.step([0] * 4)[0][:, 2].tolist() == [2] * 4
