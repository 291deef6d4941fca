"""Tests of ppo/run/spaces.py: the spaces of a policy survive its run folder."""

import json

import numpy as np
import pytest
from gymnasium import spaces

import vecenv
from ppo import Config, ConfigError, Run
from ppo.run.spaces import space_from_json, space_to_json
from vecenv.tree import leaves

NESTED = spaces.Dict(
    {
        "box": spaces.Box(-1, 1, (2, 3), np.float64),
        "deep": spaces.Tuple([spaces.Discrete(4, start=-1), spaces.Dict(bits=spaces.MultiBinary((2, 2)))]),
        "many": spaces.MultiDiscrete([2, 3], start=[1, 0]),
        "image": spaces.Box(0, 255, (40, 36, 3), np.uint8),
    }
)


@pytest.mark.parametrize(
    "space",
    [
        NESTED,
        spaces.Box(np.array([-np.inf, 0.1], np.float32), np.array([1e-7, np.inf], np.float32)),
        spaces.Box(-1, 1, (), np.float64),
        spaces.Discrete(3, start=-5),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.MultiBinary([2, 3]),
        spaces.MultiBinary(3),
        spaces.Box(0, 1, (3,), np.bool_),
    ],
    ids=str,
)
def test_a_space_survives_json(space):
    again = space_from_json(json.loads(json.dumps(space_to_json(space))))
    assert again == space and again.dtype == space.dtype


TWO = (spaces.Discrete(2), spaces.Discrete(3))
UNSORTED = spaces.Dict([("z", TWO[0]), ("m", spaces.Tuple([spaces.Dict([(10, TWO[0]), (9, TWO[1])])])), ("a", TWO[1])])


def test_the_keys_of_a_space_keep_their_order_and_type():
    again = space_from_json(json.loads(json.dumps(space_to_json(UNSORTED))))
    assert [path for path, _ in leaves(again)] == [("z",), ("m", 0, 10), ("m", 0, 9), ("a",)]


def test_keys_that_json_cannot_restore_are_refused():
    with pytest.raises(vecenv.UnsupportedSpace, match=r"must be strings or integers, but it has \[\(0, 1\)\]"):
        space_to_json(spaces.Dict({(0, 1): TWO[0]}))


@pytest.mark.parametrize("part", ["observation", "action"])
def test_a_run_refuses_keys_in_another_order(tmp_path, part):
    run = Run.create(tmp_path, "unsorted", Config())
    other = spaces.Dict([*list(UNSORTED.items())[::-1]])
    run.write_spaces({"": (UNSORTED, UNSORTED)}, given=False)
    run.check_spaces({"": (UNSORTED, UNSORTED)})
    with pytest.raises(
        ConfigError, match=r"the space Dict\('z': .* have Dict\('a': .* with its keys in the same order"
    ):
        run.check_spaces({"": (other, UNSORTED) if part == "observation" else (UNSORTED, other)})


def test_a_run_accepts_other_bounds_of_observations_but_not_of_actions(tmp_path):
    run = Run.create(tmp_path, "bounds", Config())
    one, other = (spaces.Dict(a=spaces.Tuple([spaces.Box(-bound, bound, (2,))])) for bound in (1, 2))
    run.write_spaces({"": (one, one)}, given=False)
    run.check_spaces({"": (other, one)})
    with pytest.raises(ConfigError, match="trained on envs with the space"):
        run.check_spaces({"": (one, other)})
    with pytest.raises(ConfigError, match="trained on envs with the space"):
        run.check_spaces({"": (spaces.Dict(a=spaces.Tuple([spaces.Box(-1, 1, (3,))])), one)})


@pytest.mark.parametrize("number", [3, [3]])
def test_a_run_accepts_both_forms_of_a_row_of_bits(tmp_path, number):
    run = Run.create(tmp_path, "bits", Config())
    space = spaces.MultiBinary(number)
    run.write_spaces({"": (space, space)}, given=False)
    run.check_spaces({"": (space, space)})
    with pytest.raises(ConfigError, match="trained on envs with the space"):
        run.check_spaces({"": (space, spaces.MultiBinary(4))})
