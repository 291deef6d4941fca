"""Tests of networks applied in chunks."""

import numpy as np
import pytest
import tensorflow as tf

from ppo.algorithm.chunks import in_chunks


@pytest.mark.parametrize("count", [1, 3, 4, 8, 9])
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_chunks_are_joined_in_order(count, known):
    sizes = []

    def double(rows):
        tf.py_function(lambda rows: sizes.append(len(rows)), [rows["a"]], [])
        return {"a": tf.cast(rows["a"], tf.float32) * 2.0, "b": rows["b"]}

    a, b = np.arange(2 * count, dtype=np.uint8).reshape(count, 2), np.arange(count, dtype=np.int64)

    @tf.function(input_signature=[
        tf.TensorSpec([count if known else None, 2], tf.uint8), tf.TensorSpec([count if known else None], tf.int64)
    ])  # fmt: skip
    def run(a, b):
        result = in_chunks(double, {"a": a, "b": b}, 4)
        assert result["a"].shape.as_list() == [count if known else None, 2]
        return result

    result = run(a, b)
    np.testing.assert_array_equal(result["a"], a * 2.0)
    np.testing.assert_array_equal(result["b"], b)
    assert sizes == [4] * (count // 4) + [count % 4] * (count % 4 > 0)
