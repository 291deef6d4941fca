"""Tests of vecenv/memory/layout.py: the arithmetic of one memory block."""

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import vecenv
from tests.helpers import any_space
from vecenv import tree
from vecenv.memory import layout
from vecenv.memory.block import Block


@given(any_space(), any_space(), st.integers(1, 9), st.integers(2, 5), st.booleans())
def test_fields_are_aligned_and_never_overlap(observation_space, action_space, num_envs, num_slots, final):
    rows = layout.env_fields(observation_space, action_space, final_observation=final)
    plan = layout.plan(rows, num_slots=num_slots, num_envs=num_envs)
    end = 0
    for field in plan.fields.values():
        assert field.offset % 64 == 0 and field.stride % 64 == 0
        assert field.offset >= end
        assert field.stride >= num_envs * field.dtype.itemsize * int(np.prod(field.shape))
        end = field.offset + num_slots * field.stride
    assert end <= plan.size


@given(any_space(), st.integers(1, 5))
def test_a_value_written_to_one_row_appears_only_there(space, num_envs):
    plan = layout.plan(
        layout.env_fields(space, spaces.Discrete(2), final_observation=False), num_slots=2, num_envs=num_envs
    )
    views = Block.private(plan.size).views(plan)
    for number, view in enumerate(views.values()):
        view[...] = number % 2
    views[layout.REWARD][1, num_envs - 1] = 7.0
    for number, (path, view) in enumerate(views.items()):
        if path != layout.REWARD:
            assert (view == number % 2).all()
    assert views[layout.REWARD][1, num_envs - 1] == 7.0


def test_padded_slabs_and_views_are_the_same_memory():
    plan = layout.plan({("x",): (np.dtype(np.float32), (5,))}, num_slots=3, num_envs=3)
    block = Block.private(plan.size)
    view, slab = block.views(plan)[("x",)], block.slabs(plan)[("x",)]
    view[...] = np.arange(45, dtype=np.float32).reshape(3, 3, 5)
    assert slab.shape == (3, 16) and slab.flags.c_contiguous  # 15 numbers per slot, padded to 64 bytes
    np.testing.assert_array_equal(slab[:, :15].reshape(3, 3, 5), view)


def test_a_leaf_without_a_fixed_shape_has_no_field_and_check_fixed_names_it():
    space = spaces.Dict({"name": spaces.Text(4), "x": spaces.Box(0, 1, (2,))})
    rows = layout.env_fields(space, spaces.Discrete(2), final_observation=False)
    assert ("observation", "x") in rows and ("observation", "name") not in rows
    with pytest.raises(vecenv.UnsupportedSpace, match=r"Text \(the space\['name'\]\) has no fixed shape.*Because\."):
        tree.check_fixed(space, "Because.")


def test_pick_finds_each_leaf_that_nest_placed():
    space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(4)])})
    nested = tree.nest(space, lambda path: path)
    assert nested == {"a": ("a",), "b": (("b", 0), ("b", 1))}
    assert all(tree.pick(nested, path) == path for path, _ in tree.leaves(space))
