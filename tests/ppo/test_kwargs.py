"""Tests of ppo/kwargs.py: arguments of an env as a setting, and as words of a command line."""

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo import Config
from ppo.kwargs import Kwargs, to_words
from vecenv.kwargs import from_words

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def test_numpy_numbers_become_python_numbers():
    values = {"a": np.int64(3), "b": [np.float32(0.5), (np.bool_(True),)], "c": {"d": np.array(7)}, "e": np.str_("x")}
    kwargs = Config(env_kwargs=values, eval_env_kwargs=values).env_kwargs
    assert kwargs == {"a": 3, "b": [0.5, [True]], "c": {"d": 7}, "e": "x"} and type(kwargs["a"]) is int
    assert kwargs["b"][1][0] is True
    for value in (np.arange(2), np.datetime64(3, "s"), {1, 2}):
        with pytest.raises(ValueError, match=r"cannot represent the value of 'a', .*: use numbers, strings, lists"):
            Kwargs({"a": value})


@given(st.dictionaries(st.text(), VALUES, max_size=3))
def test_arguments_survive_words_and_json(values):
    kwargs = Kwargs(values)
    assert from_words(to_words(kwargs)) == kwargs == values
    config = Config(env_kwargs={f"_{key}": value for key, value in values.items()})
    assert Config.from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_arguments_can_be_hashed_copied_and_pickled_but_not_changed():
    kwargs = Kwargs({"a": 1, "b": [1, math.inf]})
    assert hash(kwargs) == hash(Kwargs({"b": [1, math.inf], "a": 1.0})) and kwargs == Kwargs(
        {"a": 1.0, "b": [1, math.inf]}
    )
    assert copy.deepcopy(kwargs) == pickle.loads(pickle.dumps(kwargs)) == kwargs
    assert len({Config(env_kwargs=kwargs), Config(env_kwargs=dict(kwargs)), Config()}) == 2
    for change in (
        lambda: kwargs.update(a=2),
        lambda: kwargs.pop("a"),
        lambda: kwargs.setdefault("c", 1),
        lambda: exec("kwargs['a'] = 2", {"kwargs": kwargs}),
        lambda: exec("kwargs |= {}", {"kwargs": kwargs}),
    ):
        with pytest.raises(TypeError, match=r"make a new Config with dataclasses\.replace"):
            change()


def test_arguments_do_not_change_with_the_dict_they_were_made_from():
    values = {"a": [1]}
    kwargs = Kwargs(values)
    values["a"].append(2)
    assert kwargs == {"a": [1]} and Kwargs({"a": (1, 2)}) == {"a": [1, 2]}
