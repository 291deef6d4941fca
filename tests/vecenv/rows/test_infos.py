"""Tests of vecenv/rows/infos.py: batched infos are those of Gymnasium without its losses, and results never change."""

import itertools
import pickle
import threading
from collections import OrderedDict
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import vecenv
from tests.helpers import CountingEnv, assert_same, counting_fns
from vecenv.rows.infos import (
    add_masked_infos,
    batched_infos,
    columns_of,
    columns_of_batch,
    columns_of_mask,
    masked_infos,
    split_infos,
)
from vecenv.rows.messages import StepObjects

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

VALUES = st.one_of(
    st.integers(-5, 5), st.floats(-1, 1), st.booleans(), st.text(max_size=3), st.none(),
    st.builds(lambda n: np.arange(n, dtype=np.float32), st.integers(1, 3)), st.just([1, 2]),
    st.builds(np.float32, st.floats(-1, 1, width=32)), st.builds(np.bool_, st.booleans()),
)  # fmt: skip
INFO = st.dictionaries(st.sampled_from("ab"), st.one_of(VALUES, st.dictionaries(st.sampled_from("xy"), VALUES)))


def merged_one_by_one(chosen, num_envs):
    """Returns batched infos, and whether they are those of Gymnasium. A slow reference for `batched_infos`."""
    result, keys = {}, list(dict.fromkeys(key for info in chosen.values() for key in info))
    for key in keys:
        if isinstance(key, str) and key[:1] == "_" and key[1:] in keys:
            continue
        found = {env: info[key] for env, info in chosen.items() if key in info}
        result[f"_{key}"] = np.array([env in found for env in range(num_envs)])
        types = {np.asarray(value).dtype for value in found.values()}
        number = (bool, int, float, np.number, np.ndarray)
        if key != "final_obs" and all(isinstance(value, dict) for value in found.values()):
            result[key] = merged_one_by_one(found, num_envs)
            continue
        column = np.full(num_envs, None)
        if (
            key != "final_obs"
            and all(isinstance(value, number) for value in found.values())
            and len({np.shape(value) for value in found.values()}) == 1
            and (np.dtype(object) not in types or "f" in {dtype.kind for dtype in types})  # ints of more than 64 bits
        ):
            dtypes = {np.dtype(int) if type(v) is int else np.asarray(v).dtype for v in found.values()}
            column = np.zeros((num_envs, *np.shape(next(iter(found.values())))), np.result_type(*dtypes))
        for env, value in found.items():
            column[env] = value
        result[key] = column
    return result


@settings(deadline=None)
@given(
    each=st.one_of(st.lists(infos, min_size=4, max_size=4), st.lists(named, min_size=4, max_size=4), alike),
    order=st.permutations(range(4)),
    count=st.integers(1, 4),
    cuts=st.tuples(st.integers(0, 4), st.integers(0, 4)),
)
def test_batched_infos_equal_a_slow_loop_however_the_envs_are_spread(each, order, count, cuts):
    """Runs of rows are pickled or not, whole batches or parts of them, in any order."""
    chosen = order[:count]
    expected = merged_one_by_one({env: each[env] for env in sorted(chosen)}, 4)
    low, high = sorted(cuts)
    columns = []
    for k, run in enumerate((chosen[:low], chosen[low:high], chosen[high:])):
        part = columns_of([(env, each[env]) for env in run]) if run else []
        columns += pickle.loads(pickle.dumps(StepObjects(part, {}))).infos if k else part
    assert_same(batched_infos(columns, 4), expected)
    positions = np.full(4, -1)
    positions[chosen] = np.arange(count)
    some = batched_infos(columns, count, positions)
    for env, info in zip(chosen, split_infos(some, count), strict=True):
        assert_same(info, split_infos(expected, 4)[env])


@settings(deadline=None)
@given(each=st.lists(st.one_of(infos, named), min_size=4, max_size=4), some=st.sets(st.integers(0, 3), min_size=1))
def test_reading_batched_infos_gives_the_same_infos(each, some):
    infos = batched_infos(columns_of(list(enumerate(each))), 4)
    assert_same(batched_infos(columns_of_batch(infos, 4, 0), 4), infos)
    read = batched_infos(columns_of_batch(infos, 4, 3, np.array(sorted(some))), 7)
    for env, info in enumerate(split_infos(infos, 4)):
        assert_same(split_infos(read, 7)[3 + env] if read else {}, info if env in some else {})
    assert all(np.shares_memory(a, b) is False for a, b in zip(arrays_of(infos), arrays_of(read), strict=False))


def arrays_of(infos):
    for values in infos.values():
        yield from arrays_of(values) if isinstance(values, dict) else [values]


@pytest.mark.parametrize("mask", [[True] * 3, [True, False, True], [False] * 3])
def test_infos_of_a_mask_are_those_of_its_envs(mask):
    mask, texts = np.array(mask), np.array(["a", "b", None])
    values = {"x": np.arange(3.0), "n": np.array([[1, 2], [3, 4], [5, 6]]), "text": texts, "_x": np.ones(3)}
    expected = batched_infos(columns_of(infos_of_rows(values, np.flatnonzero(mask))), 3)
    assert_same(batched_infos(columns_of_mask(values, mask), 3), expected)
    found = masked_infos(deepcopy(values), mask)
    assert_same(found, expected)
    masks = [mask, *(values for key, values in found.items() if key[0] == "_")]
    assert not any(np.shares_memory(one, other) for one, other in itertools.combinations(masks, 2))


def infos_of_rows(values, rows):
    return [(int(i), {key: array[i] for key, array in values.items()}) for i in rows]


@pytest.mark.parametrize("added", [[1], [1, 3], []])
def test_infos_of_a_mask_can_be_added_to_those_of_other_envs(added):
    """They may have other keys, dtypes or shapes."""
    first = {"same": np.arange(4.0), "number": np.arange(4), "shape": np.ones((4, 2)), "first": np.arange(4)}
    second = {"same": 10 + np.arange(4.0), "number": np.arange(4) / 8, "shape": np.ones(4), "second": np.arange(4)}
    second = {"_first": np.ones(4), "_second": np.ones(4), **second}  # the first two are names of masks
    rows, mask = np.array([True, False, True, False]), np.isin(range(4), added)
    expected = batched_infos(columns_of(infos_of_rows(first, [0, 2]) + infos_of_rows(second, added)), 4)
    found = masked_infos(deepcopy(first), rows)
    add_masked_infos(found, deepcopy(second), mask)
    assert_same(found, expected)


@settings(max_examples=200, deadline=None)
@given(INFO, st.integers(1, 4))
def test_infos_of_the_same_kind_are_batched_as_in_gymnasium(info, num_envs):
    theirs, expected = gym.vector.SyncVectorEnv(counting_fns(num_envs)), {}
    for i in range(0, num_envs, 2):
        expected = theirs._add_info(expected, info, i)
    found = batched_infos(columns_of([(i, info) for i in range(0, num_envs, 2)]), num_envs)
    assert_same(found, expected)
    assert list(found) == list(expected)


@pytest.mark.parametrize("nested", [False, True])
def test_the_bools_of_numpy_can_be_inverted_as_in_gymnasium(nested):
    """`~np.True_` is False, but `~True` is -2, which counts as true."""
    infos = [{"x": {"y": flag} if nested else flag} for flag in (np.True_, np.False_)]
    theirs, expected = gym.vector.SyncVectorEnv(counting_fns(2)), {}
    for i, info in enumerate(infos):
        expected = theirs._add_info(expected, info, i)
    found = batched_infos(columns_of([*enumerate(infos)]), 2)
    found, expected = [each["x"]["y"] if nested else each["x"] for each in (found, expected)]
    assert (~found).tolist() == (~expected).tolist() == [False, True]


@pytest.mark.parametrize("order", [1, -1])
def test_mixed_values_of_different_envs_are_not_converted(order):
    for one, other in (
        (2**63, 1),
        (np.uint64(2**64 - 1), np.int64(-1)),
        (np.int64(2**53 + 1), np.uint64(3)),
        ("a", 1),
        ({"a": 1}, 2),
    ):
        given = [one, other][::order]
        for columns in (
            columns_of([(env, {"x": value}) for env, value in enumerate(given)]),
            [column for env, value in enumerate(given) for column in columns_of([(env, {"x": value})])],
        ):
            found = batched_infos(columns, 2)["x"]
            assert found.dtype == object and found.tolist() == given
    integers, floats = [np.array([3, 4]), np.array([0.5, 1.5])][::order]
    found = batched_infos(columns_of([(0, {"x": integers}), (1, {"x": floats})]), 2)["x"]
    np.testing.assert_array_equal(found, [[3, 4], [0.5, 1.5]][::order])
    found = batched_infos(columns_of([(0, {"x": np.ones(3 + order)}), (1, {"x": np.ones(3)})]), 2)["x"]
    assert found.dtype == object and [value.shape for value in found] == [(3 + order,), (3,)]


@pytest.mark.parametrize("value", [np.float64(1), np.int64(1), np.bool_(1), np.float32(1), np.array(1.0), np.ones(2)])
@pytest.mark.parametrize("key", ["x", "nested"])
def test_types_in_an_array_of_objects_do_not_depend_on_how_the_envs_are_spread(value, key):
    given = [value, "text", None, (1, value), value]
    infos = [{key: {"y": each} if key == "nested" and each is value else each} for each in given]
    at_once = columns_of(list(enumerate(infos)))
    one_by_one = [column for env, info in enumerate(infos) for column in columns_of([(env, info)])]
    assert repr(batched_infos(at_once, 5)) == repr(batched_infos(one_by_one, 5))


def test_a_mask_replaces_an_info_key_of_the_same_name_in_any_env():
    for first, second in (
        ({"x": 1, "_x": {"y": 2}}, {"x": 3}), ({"_x": "text"}, {"x": 3}), ({"x": 3}, {"_x": [1]}),
        ({"_x": True}, {"x": 3}), ({"_x": {"z": 1}}, {"x": 1}), ({"x": 1}, {"_x": np.ones(2)}), ({"_x": 2}, {"x": "x"}),
    ):  # fmt: skip
        found = batched_infos(columns_of([(0, first), (1, second)]), 2)
        assert found.keys() == {"x", "_x"}
        assert found["_x"].dtype == np.bool_ and found["_x"].tolist() == ["x" in first, "x" in second]


class ReusingEnv(CountingEnv):
    """Changes the objects that it has returned: all instances in a process return the same info and frame."""

    info: ClassVar = {
        "at": np.zeros(2),
        "nested": {"array": np.zeros(2, np.int64)},
        "list": [[0]],
        "obj": SimpleNamespace(number=0),
    }
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


def run(make, env_cls, mode):
    """Returns the results of a reset and of nine steps, in which episodes of all envs end."""
    envs = make([partial(env_cls, i, 3 + i % 2) for i in range(4)], autoreset_mode=mode)
    results = [envs.reset(seed=0)]
    for _ in range(9):
        results.append(envs.step(np.zeros(4, np.int64)))
        over = results[-1][2] | results[-1][3]
        if mode == AutoresetMode.DISABLED and over.any():
            results.append(envs.reset(options={"reset_mask": over}))
    envs.close()
    return tuple(results)


def with_lists(results):
    """Returns the results of `run` with infos as lists."""
    return tuple((*result[:-1], tuple(split_infos(result[-1], 4))) for result in results)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", ENVS)
@pytest.mark.parametrize(("reusing", "copying"), [(ReusingEnv, CopyingEnv), (ReusingNumbersEnv, CopyingNumbersEnv)])
def test_infos_that_were_returned_stay_as_they_are_when_the_env_changes_its_objects(make, mode, reusing, copying):
    results = run(make, reusing, mode)
    assert_same(results, run(gym.vector.SyncVectorEnv, copying, mode))
    assert_same(with_lists(results), with_lists(run(vecenv.SyncVectorEnv, copying, mode)))


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
        self.list, self.lists = [0], np.empty(num_envs, object)
        self.lists[0] = self.list
        self.infos |= {"object": self.lists, "_object": np.arange(num_envs) == 0}

    def reset(self, *, seed=None, options=None):
        self.numbers[:] = self.list[0] = self.steps = 0
        return np.zeros((self.num_envs, 3)), self.infos

    def step(self, actions):
        self.steps += 1
        self.numbers[:] = self.list[0] = self.steps
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
        assert info.pop("object").tolist() == [[number], None] and info.pop("_object").tolist() == [True, False]
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


def test_rows_without_a_text_are_empty():
    merged = batched_infos(columns_of([(1, {"s": np.array(["ab", "c"])})]), 2)
    assert merged["s"].tolist() == [["", ""], ["ab", "c"]]


@settings(max_examples=200, deadline=None)
@given(st.lists(INFO, min_size=1, max_size=3))
def test_merged_infos_can_be_split_without_loss(infos):
    """No value is truncated or converted to fit the values of other envs."""
    merged = batched_infos(columns_of(list(enumerate(infos))), len(infos))
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
