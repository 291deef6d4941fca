"""Tests of vecenv/kwargs.py."""

import math

import pytest

from vecenv.kwargs import from_words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a=1", "b=x", "c=0.5"], {"a": 1, "b": "x", "c": 0.5}),
        (['{"a": 1, "b": [1, 2]}'], {"a": 1, "b": [1, 2]}),
        (["a=[1, 2]", 'b={"c": null}', 'd="1"'], {"a": [1, 2], "b": {"c": None}, "d": "1"}),
        (["a=True", "b=false", "c=None", "d=null"], {"a": True, "b": False, "c": None, "d": None}),
        (["a=.5", "b=-.5", "c=5.", "d=+1", "e=+.5e1", "f=1e5", "g=5.e-1"],
         {"a": 0.5, "b": -0.5, "c": 5.0, "d": 1, "e": 5.0, "f": 1e5, "g": 0.5}),
        (["a=007", "b=1_000", "c=nan", "d=inf", "e=.", "f=1.2.3", "g=0x10", "h=-", "i=e5", "j=00.5", "k=\u0663.5"],
         {"a": "007", "b": "1_000", "c": "nan", "d": "inf", "e": ".", "f": "1.2.3", "g": "0x10", "h": "-", "i": "e5",
          "j": "00.5", "k": "\u0663.5"}),
        (["a=Infinity", "b=-Infinity", '{"c": Infinity}'], {"a": math.inf, "b": -math.inf, "c": math.inf}),
        (["a=", "b=x=y", "c=-1"], {"a": "", "b": "x=y", "c": -1}),
        (['{"a": 1}', "a=2"], {"a": 2}),
        ([], {}),
    ],
)  # fmt: skip
def test_words_are_pairs_or_json(words, expected):
    found = from_words(words)
    assert found == expected and [type(value) for value in found.values()] == [type(v) for v in expected.values()]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("{a: 1}", r"'{a: 1}' is not JSON \(.*\): write keys and strings in double quotes"),
        ("a=[1, 2", r"the value of 'a', \[1, 2, is not JSON"),
        ("a", "'a' is neither KEY=VALUE nor a JSON object"),
        ("a-b=1", "neither KEY=VALUE"),
    ],
)
def test_the_error_for_a_word_that_is_neither_a_pair_nor_json_says_what_to_write(word, message):
    with pytest.raises(ValueError, match=message):
        from_words([word])
