"""Tests of vecenv/rows/infos.py: merging batched infos equals adding the info of each env."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_same
from vecenv.rows.infos import add_batch, add_info, merge_infos, select_infos, split_infos

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
    for i, info in chosen:
        add_info(expected, info, i, 4)
    assert_same(merge_infos(chosen, 4), expected)


@settings(deadline=None)
@given(each=st.lists(infos, min_size=4, max_size=4), order=st.permutations(range(4)), cut=st.integers(0, 4))
def test_adding_batched_infos_equals_adding_single_infos(each, order, cut):
    parts = [np.array(rows, dtype=np.int64) for rows in (order[:cut], order[cut:])]
    expected, found = {}, {}
    for rows in parts:
        part = {}
        for k, i in enumerate(rows):
            part = add_info(part, each[i], k, len(rows))
        for k, i in enumerate(rows):  # the env's info, after the batch has unified its dtypes
            expected = add_info(expected, split_infos(part, len(rows))[k], int(i), 4)
        found = add_batch(found, select_infos(part, np.arange(len(rows))), rows, 4)
    assert {key for key in found if not key.startswith("_")} == {key for key in expected if not key.startswith("_")}
    for found_one, expected_one in zip(split_infos(found, 4), split_infos(expected, 4), strict=True):
        assert_same(found_one, expected_one)
