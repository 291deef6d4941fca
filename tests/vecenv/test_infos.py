"""Tests of vecenv/rows/infos.py: merging batched infos equals adding the info of each env, and results never change."""

import itertools
import pickle
import threading
from collections import OrderedDict
from copy import deepcopy
from functools import partial
from operator import itemgetter
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import vecenv
from tests.helpers import CountingEnv, assert_same
from vecenv.rows.infos import RowInfos, add_batch, add_info, join_infos, merge_infos, select_infos, split_infos

values = st.one_of(
    st.integers(-5, 5),
    st.just(2**70),
    st.just(np.float32(0.5)),
    st.just(np.bool_(True)),
    st.none(),
    st.floats(-2, 2),
    st.booleans(),
    st.text(max_size=2),
    st.just(np.array([1.0, 2.0])),
    st.just(np.array([3, 4])),
    st.dictionaries(st.sampled_from("xy"), st.floats(-1, 1), max_size=2),
)
infos = st.dictionaries(st.sampled_from("abc"), values, max_size=3)
named = st.dictionaries(st.sampled_from(["a", "b", "_a", "final_obs", 3]), values, max_size=3)
alike = st.lists(st.tuples(st.integers(-5, 5), st.floats(-2, 2), st.booleans()), min_size=4, max_size=4).map(
    lambda rows: [{"n": n, "x": x, "inner": {"flag": flag}} for n, x, flag in rows]
)


@settings(deadline=None)
@given(
    each=st.one_of(st.lists(named, min_size=4, max_size=4), alike),
    rows=st.permutations(range(4)),
    count=st.integers(1, 4),
)
def test_merging_infos_at_once_equals_adding_them_one_by_one(each, rows, count):
    chosen = [(i, each[i]) for i in rows[:count]]
    expected = {}
    for k, (_, info) in enumerate(sorted(chosen, key=itemgetter(0))):
        add_info(expected, info, k, count)
    merged = merge_infos(chosen)
    assert merged.rows == sorted(rows[:count])
    for found in (merged, pickle.loads(pickle.dumps(merged))):
        assert_same(found.batched(), expected)


@settings(deadline=None)
@given(
    each=st.lists(infos, min_size=4, max_size=4),
    order=st.one_of(st.just([0, 1, 2, 3]), st.permutations(range(4))),
    cut=st.integers(0, 4),
)
def test_adding_batched_infos_equals_adding_single_infos(each, order, cut):
    parts = [np.array(rows, dtype=np.int64) for rows in (order[:cut], order[cut:])]
    expected, found, runs = {}, {}, []
    for rows in parts:
        part = {}
        for k, i in enumerate(rows):
            part = add_info(part, each[i], k, len(rows))
        for k, i in enumerate(rows):  # the env's info, after the batch has unified its dtypes
            expected = add_info(expected, split_infos(part, len(rows))[k], int(i), 4)
        runs.append(RowInfos.of_batch(rows.tolist(), select_infos(part, np.arange(len(rows)))))
        found = add_batch(found, runs[-1].batched(), rows, 4)
    if order == sorted(order):
        found = join_infos([run for run in runs if run.rows], 4)
    assert {key for key in found if not key.startswith("_")} == {key for key in expected if not key.startswith("_")}
    for found_one, expected_one in zip(split_infos(found, 4), split_infos(expected, 4), strict=True):
        assert_same(found_one, expected_one)


class Reading:
    """A mutable value that numpy cannot hold."""

    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return isinstance(other, Reading) and self.number == other.number


class ReusingEnv(CountingEnv):
    """Changes the objects that it has returned: all instances in a process return the same info and frame."""

    info: ClassVar = {"at": np.zeros(2), "nested": {"array": np.zeros(2, np.int64)}, "list": [[0]], "obj": Reading(0)}
    frame: ClassVar = np.zeros(3)
    render_mode = "rgb_array"

    def _fill(self):
        number = 100 * self.index + 10 * self.episode + self.steps
        self.info["number"] = self.info["nested"]["number"] = self.info["list"][0][0] = self.info["obj"].number = number
        self.info["at"][:] = self.info["nested"]["array"][:] = self.frame[:] = number
        return self.info

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], self._fill()

    def step(self, action):
        return *super().step(action)[:-1], self._fill()

    def render(self):
        self._fill()
        return self.frame


class CopyingEnv(ReusingEnv):
    """Returns copies."""

    def _observe(self):
        return CountingEnv._observe(self).copy()

    def _fill(self):
        return deepcopy(super()._fill())


class ReusingNumbersEnv(ReusingEnv):
    """Returns the same info with new numbers at each step."""

    info: ClassVar = {"number": 0, "at": np.zeros(2)}

    def _fill(self):
        self.info["number"] = self.info["at"][:] = 100 * self.index + 10 * self.episode + self.steps
        return self.info


class CopyingNumbersEnv(ReusingNumbersEnv):
    """Returns copies."""

    _observe = CopyingEnv._observe

    def _fill(self):
        return deepcopy(super()._fill())


ENVS = [vecenv.SyncVectorEnv, *(partial(vecenv.AsyncVectorEnv, num_workers=number) for number in (0, 2))]
MODES = list(AutoresetMode)


def run(make, env_cls, mode, lists=False):
    """Returns the results of a reset and of nine steps, in which episodes of all envs end."""
    envs = make([partial(env_cls, i, 3 + i % 2) for i in range(4)], autoreset_mode=mode)
    results = [envs.reset(seed=0)]
    for _ in range(9):
        results.append(envs.step(np.zeros(4, np.int64)))
        over = results[-1][2] | results[-1][3]
        if mode == AutoresetMode.DISABLED and over.any():
            results.append(envs.reset(options={"reset_mask": over}))
    envs.close()
    return tuple((*result[:-1], tuple(split_infos(result[-1], 4))) if lists else result for result in results)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", ENVS)
@pytest.mark.parametrize(("reusing", "copying"), [(ReusingEnv, CopyingEnv), (ReusingNumbersEnv, CopyingNumbersEnv)])
def test_infos_that_were_returned_stay_as_they_are_when_the_env_changes_its_objects(make, mode, reusing, copying):
    assert_same(run(make, reusing, mode), run(gym.vector.SyncVectorEnv, copying, mode))
    assert_same(run(make, reusing, mode, lists=True), run(vecenv.SyncVectorEnv, copying, mode, lists=True))


@pytest.mark.parametrize("make", ENVS)
def test_infos_that_recv_returned_stay_as_they_are_when_the_env_changes_its_objects(make):
    def received(env_cls, make=make):
        with make([partial(env_cls, i, 3 + i % 2) for i in range(4)], autoreset_mode="SameStep") as envs:
            envs.reset(seed=0)
            batches = []
            for _ in range(9):
                envs.send(np.zeros(4, np.int64))
                batches.append(envs.recv())
        return tuple(dict(zip(batch.env_ids.tolist(), split_infos(batch.infos, 4), strict=True)) for batch in batches)

    assert_same(received(ReusingEnv), received(CopyingEnv, vecenv.SyncVectorEnv))


@pytest.mark.parametrize("make", ENVS)
def test_frames_that_were_returned_stay_as_they_are_when_the_env_changes_its_objects(make):
    with make([partial(ReusingEnv, i) for i in range(2)]) as envs:
        envs.reset()
        frames = envs.render()
        envs.step([0, 0])
        envs.render()
    np.testing.assert_array_equal(frames, [[0] * 3, [100] * 3])


def test_an_object_that_cannot_be_copied_is_returned_itself():
    class Locked(CountingEnv):
        lock = threading.Lock()

        def step(self, action):
            return *super().step(action)[:-1], {"lock": self.lock}

    with vecenv.SyncVectorEnv([lambda: Locked(0)]) as envs:
        envs.reset()
        assert envs.step([0])[-1]["lock"][0] is Locked.lock


class ReusingVectorEnv(VectorEnv):
    """A vector env that returns the same arrays at each step."""

    single_observation_space, single_action_space = CountingEnv.observation_space, CountingEnv.action_space
    render_mode = "rgb_array"

    def __init__(self, num_envs, autoreset_mode):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": autoreset_mode}
        self.numbers, self.masks, self.steps = np.zeros(num_envs, np.int64), np.ones(num_envs, np.bool_), 0
        inner = {"number": self.numbers, "_number": self.masks}
        self.infos = {"number": self.numbers, "_number": self.masks, "inner": inner, "_inner": self.masks}

    def reset(self, *, seed=None, options=None):
        self.numbers[:] = self.steps = 0
        return np.zeros((self.num_envs, 3)), self.infos

    def step(self, actions):
        self.steps += 1
        self.numbers[:] = self.steps
        flags = np.zeros(self.num_envs, np.bool_)
        return np.zeros((self.num_envs, 3)), np.zeros(self.num_envs), flags, flags, self.infos

    def render(self):
        return (self.numbers,) * self.num_envs


@pytest.mark.parametrize("num_workers", [0, 1])
def test_infos_of_a_vector_env_stay_as_they_are_when_it_changes_its_arrays(num_workers):
    with vecenv.AsyncVectorEnv(vecenv.Batched(ReusingVectorEnv, 2), num_workers=num_workers) as envs:
        infos, frames = [envs.reset()[1]], [envs.render()]
        for _ in range(2):
            infos.append(envs.step([0, 0])[-1])
            frames.append(envs.render())
    for number, (info, frame) in enumerate(zip(infos, frames, strict=True)):
        masked = {"number": np.full(2, number), "_number": np.ones(2, np.bool_)}
        assert_same(info, {**masked, "inner": masked, "_inner": np.ones(2, np.bool_)})
        assert_same(frame, (np.full(2, number),) * 2)


class PartialInfosVectorEnv(ReusingVectorEnv):
    """Gives values for all envs, but masks that only include those with even numbers."""

    def __init__(self, num_envs, autoreset_mode):
        super().__init__(num_envs, autoreset_mode)
        self.masks[1::2] = False
        self.infos |= {"object": np.full(num_envs, "x", object), "_object": self.masks}
        self.infos |= {"text": np.full(num_envs, "x"), "_text": self.masks}
        self.infos["inner"] = OrderedDict(**self.infos["inner"], other=self.numbers, _other=self.masks)
        # "_named" is the mask of "named", so its own mask is ignored.
        self.infos |= {"named": self.numbers, "_named": np.ones(num_envs, np.bool_), "__named": self.masks}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_infos_of_a_vector_env_are_empty_outside_of_their_masks(num_workers):
    with vecenv.AsyncVectorEnv(vecenv.Batched(PartialInfosVectorEnv, 4), num_workers=num_workers) as envs:
        envs.reset()
        envs.step([0] * 4)
        infos = envs.step([0] * 4)[-1]
    mask = np.array([True, False, True, False])
    numbers = {"number": np.array([2, 0, 2, 0]), "_number": mask}
    others = {"object": np.array(["x", None, "x", None]), "text": np.array(["x", "", "x", ""])}
    expected = {**numbers, "inner": {**numbers, "other": np.array([2, 0, 2, 0]), "_other": mask}, **others}
    masks = {"_inner": mask, "_object": mask, "_text": mask}
    assert_same(infos, {**expected, **masks, "named": np.full(4, 2), "_named": np.ones(4, np.bool_)})
    owned = [infos[key] for key in ("_number", *masks)] + [infos["inner"][key] for key in ("_number", "_other")]
    assert not any(np.shares_memory(one, other) for one, other in itertools.combinations(owned, 2))


def test_infos_of_several_workers_with_names_of_masks_raise_nothing():
    for first, second in (({"_a": {"z": 1}}, {"a": 1}), ({"a": 1}, {"_a": np.ones(2)}), ({"_a": 2}, {"a": "x"})):
        found = {}
        for row, info in enumerate((first, second)):
            found = add_batch(found, add_info({}, info, 0, 1), np.array([row]), 2)
        assert found["_a"].dtype == np.bool_ and found["_a"].tolist() == [i == ("a" in second) for i in range(2)]


def test_rows_without_a_text_are_empty():
    merged = add_batch({}, add_info({}, {"s": np.array(["ab", "c"])}, 0, 1), np.array([1]), 2)
    assert merged["s"].tolist() == [["", ""], ["ab", "c"]]


VALUES = st.one_of(
    st.integers(-5, 5), st.floats(-1, 1), st.booleans(), st.text(max_size=3), st.none(),
    st.builds(lambda n: np.arange(n, dtype=np.float32), st.integers(1, 3)), st.just([1, 2]),
    st.builds(np.float32, st.floats(-1, 1, width=32)), st.builds(np.bool_, st.booleans()),
)  # fmt: skip
INFO = st.dictionaries(st.sampled_from("ab"), st.one_of(VALUES, st.dictionaries(st.sampled_from("xy"), VALUES)))


@settings(max_examples=200, deadline=None)
@given(st.lists(INFO, min_size=1, max_size=3))
def test_merged_infos_can_be_split_without_loss(infos):
    """No value is truncated or converted to fit the values of other envs."""
    merged = {}
    for i, info in enumerate(infos):
        merged = add_info(merged, info, i, len(infos))
    for info, back in zip(infos, split_infos(merged, len(infos)), strict=True):
        assert info.keys() == back.keys()
        for key, value in info.items():
            assert_equal_values(value, back[key])


def assert_equal_values(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_values(one[key], other[key])
    elif isinstance(one, np.ndarray):
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


def test_an_info_that_cannot_be_pickled_is_named():
    class Locked(CountingEnv):
        def step(self, action):
            *results, _ = super().step(action)
            return *results, {"speed": 1.0, "lock": threading.Lock()}

    with vecenv.AsyncVectorEnv([lambda: Locked(0, 3)] * 2, num_workers=1) as envs:
        envs.reset()
        with pytest.raises(vecenv.EnvError, match=r"The infos under \['lock'\] cannot be pickled"):
            envs.step([0, 0])
