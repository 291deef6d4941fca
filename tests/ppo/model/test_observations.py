"""Tests of ppo/model/observations.py: the networks receive each kind of observation in a suitable form."""

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import vecenv
from ppo import Config
from ppo.model.observations import MASK, Observations, image_warnings

RNG = np.random.default_rng(0)

NESTED = spaces.Dict(
    {
        "box": spaces.Box(-1, 1, (2, 3), np.float64),
        "deep": spaces.Tuple([spaces.Discrete(4, start=-1), spaces.Dict(bits=spaces.MultiBinary((2, 2)))]),
        "many": spaces.MultiDiscrete([2, 3], start=[1, 0]),
        "image": spaces.Box(0, 255, (40, 36, 3), np.uint8),
    }
)


def observations(space, mask_size=None, normalize=True, cnn="nature"):
    return Observations(space, Config(normalize_observations=normalize, cnn=cnn), mask_size=mask_size)


def batch_of(space, count=5):
    space.seed(1)
    return gym.vector.utils.batch_space(space, count).sample()


def test_each_kind_of_leaf_is_encoded_for_the_networks():
    batch = batch_of(NESTED)
    inputs = observations(NESTED, normalize=False).inputs(batch)
    assert list(inputs) == ["box", "deep/0", "deep/1/bits", "image", "many"]
    np.testing.assert_array_equal(inputs["box"], batch["box"].reshape(5, 6).astype(np.float32))
    np.testing.assert_array_equal(inputs["deep/0"], np.eye(4)[batch["deep"][0] + 1])
    np.testing.assert_array_equal(inputs["deep/1/bits"], batch["deep"][1]["bits"].reshape(5, 4))
    two = batch["many"] - [1, 0]
    np.testing.assert_array_equal(inputs["many"], np.concatenate([np.eye(2)[two[:, 0]], np.eye(3)[two[:, 1]]], axis=1))
    assert inputs["image"].dtype == tf.uint8
    np.testing.assert_array_equal(inputs["image"], batch["image"])


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64, np.int32])
def test_a_bit_on_top_of_a_large_number_is_normalized_as_in_float64(dtype):
    space = spaces.Dict(z=spaces.Box(0, 2_000_000_000, (2, 2), dtype), a=spaces.Box(-1, 1, (2,)))
    seen, rng = observations(space), np.random.default_rng(0)
    values = (10**9 + rng.integers(0, 2, (1000, 2, 2))).astype(dtype)
    batch = {"z": values, "a": rng.uniform(-1, 1, (1000, 2)).astype(np.float32)}
    tensors = tf.nest.map_structure(tf.constant, batch)
    for part in (slice(0, 300), slice(300, 1000)):
        rows = tf.nest.map_structure(lambda column, part=part: column[part], tensors)
        seen.merge(seen.statistics(seen.raw(rows)))
    flat = values.reshape(1000, 4).astype(np.float64)
    expected = (flat - flat.mean(axis=0)) / np.sqrt(flat.var(axis=0) + 1e-8)
    inputs = seen.inputs(tensors)
    assert {name: column.dtype for name, column in inputs.items()} == {"z": tf.float32, "a": tf.float32}
    np.testing.assert_allclose(inputs["z"], expected, rtol=1e-5)
    np.testing.assert_allclose(tf.function(seen.inputs, jit_compile=True)(tensors)["z"], expected, rtol=1e-5)


def test_numbers_are_normalized_and_each_leaf_separately():
    space = spaces.Dict(a=spaces.Box(-9, 9, (2,)), b=spaces.Box(-9, 9, (1,)), c=spaces.Discrete(2), d=NESTED["image"])
    seen = observations(space)
    batch = batch_of(space, 1000)
    batch["a"] = (batch["a"] * [2, 0.1] + [5, -5]).astype(np.float32)
    seen.merge(seen.statistics(seen.raw(batch)))
    inputs = seen.inputs(batch)
    for name in "ab":
        np.testing.assert_allclose(np.mean(inputs[name], axis=0), 0, atol=1e-4)
        np.testing.assert_allclose(np.std(inputs[name], axis=0), 1, atol=1e-4)
    np.testing.assert_array_equal(inputs["c"], np.eye(2)[batch["c"]])
    np.testing.assert_array_equal(inputs["d"], batch["d"])  # the CNN normalizes images
    assert list(seen.image_normalizers) == ["d"] and seen.image_normalizers["d"].moments.count > 100


@pytest.mark.parametrize(
    ("shape", "order", "expected"),
    [
        ((84, 84), (0, 1), (84, 84, 1)),
        ((84, 84, 3), (0, 1, 2), (84, 84, 3)),
        ((4, 84, 84), (1, 2, 0), (84, 84, 4)),
        ((4, 84, 60, 3), (1, 2, 0, 3), (84, 60, 12)),
        ((4, 3, 84, 60), (2, 3, 0, 1), (84, 60, 12)),
        ((84, 84, 84), (0, 1, 2), (84, 84, 84)),
        ((84, 84, 100), (0, 1, 2), (84, 84, 100)),
        ((2, 84, 84, 100), (1, 2, 0, 3), (84, 84, 200)),
    ],
)
def test_images_have_their_channels_last(shape, order, expected):
    space = spaces.Box(0, 255, shape, np.uint8)
    batch = batch_of(space)
    inputs = observations(space).inputs(batch)["observation"]
    np.testing.assert_array_equal(inputs, batch.transpose(0, *(i + 1 for i in order)).reshape(5, *expected))


@pytest.mark.parametrize(
    ("shape", "order", "expected"),
    [
        ((7, 7, 3), (0, 1, 2), (7, 7, 3)),
        ((8, 8, 20), (0, 1, 2), (8, 8, 20)),
        ((3, 7, 9), (1, 2, 0), (7, 9, 3)),
        ((4, 7, 7, 3), (1, 2, 0, 3), (7, 7, 12)),
        ((84, 20, 1), (0, 1, 2), (84, 20, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.bool_])
def test_small_images_are_normalized_per_channel(shape, order, expected, dtype):
    space = spaces.Box(0, 1 if dtype is np.bool_ else 10, shape, dtype)
    batch = batch_of(space, 200)
    images = batch.transpose(0, *(i + 1 for i in order)).reshape(200, *expected).astype(np.float64)
    plain = observations(space, normalize=False, cnn="small").inputs(batch)["observation"]
    np.testing.assert_allclose(plain, images / space.high.max(), rtol=1e-6)
    seen = observations(space, cnn="small")
    seen.merge(seen.statistics(seen.raw(batch)))
    mean, deviation = images.mean(axis=(0, 1, 2)), images.std(axis=(0, 1, 2))
    inputs = seen.inputs(batch)["observation"]
    assert inputs.dtype == tf.float32
    np.testing.assert_allclose(inputs, (images - mean) / deviation, rtol=1e-3, atol=1e-4)


VECTORS = [
    spaces.Box(0, 255, (4, 7, 3), np.uint8),
    spaces.Box(0, 255, (64, 4, 65), np.uint8),
    spaces.Box(0, 255, (128,), np.uint8),
    spaces.Box(0, 8, (9, 9), np.uint8),
    spaces.Box(0, 1, (84, 84, 3), np.float32),
    spaces.Box(0, 1, (7, 7, 3), np.float32),
    spaces.Box(0, 1, (84, 84, 3), np.bool_),
]


@pytest.mark.parametrize("space", VECTORS, ids=str)
def test_tiny_images_tables_and_other_boxes_are_flattened(space):
    inputs = observations(space, cnn="small").inputs(batch_of(space))["observation"]
    assert inputs.shape == (5, np.prod(space.shape)) and inputs.dtype == tf.float32


def test_small_images_are_flattened_for_a_network_that_cannot_read_them():
    space = spaces.Dict(small=spaces.Box(0, 255, (35, 36, 3), np.uint8), large=spaces.Box(0, 255, (36, 36), np.uint8))
    specs = observations(space).specs
    assert specs["small"].shape == [None, 35 * 36 * 3] and specs["large"] == tf.TensorSpec([None, 36, 36, 1], tf.uint8)


FLAT = {
    "float": (spaces.Box(0, 1, (84, 84, 3)), "nature", ["84 x 84 pixels", "21,168 separate numbers", "uint8"], []),
    "channels first": (spaces.Box(0, 1, (4, 84, 60), np.float64), "nature", ["84 x 60 pixels", "uint8"], ["--cnn"]),
    "no channels": (spaces.Box(0, 1, (64, 64)), "nature", ["uint8"], ["--cnn"]),
    "int32": (spaces.Box(0, 255, (40, 40, 3), np.int32), "small", ["uint8"], ["--cnn"]),
    "too small": (spaces.Box(0, 255, (24, 24, 3), np.uint8), "nature", ["--cnn small", "36 x 36"], ["return pixels"]),
    "both": (spaces.Box(0, 1, (24, 24, 3)), "nature", ["return pixels as uint8", "--cnn small"], []),
}


@pytest.mark.parametrize(("space", "cnn", "said", "unsaid"), FLAT.values(), ids=FLAT)
def test_images_that_are_flattened_cause_a_warning_that_says_what_to_change(space, cnn, said, unsaid):
    nested = spaces.Dict(speed=spaces.Box(-1, 1, (3,)), eyes=spaces.Tuple([spaces.Discrete(2), space]))
    (warning,) = image_warnings(nested, cnn)
    assert warning.startswith("observation['eyes'][1], ")
    assert all(part in warning for part in said) and not any(part in warning for part in unsaid), warning


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (84, 84, 3), np.uint8),
        spaces.Box(0, 1, (100, 6)),
        spaces.Box(-1, 1, (3, 3, 4)),
        spaces.Box(-1, 1, (9000,)),
        spaces.MultiBinary([40, 40]),
    ],
)
def test_other_observations_cause_no_warning(space):
    assert image_warnings(space, "nature") == []


def test_leaves_whose_joined_keys_are_equal_stay_separate():
    space = spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict(b=spaces.Discrete(3)), "é .": spaces.Discrete(4)})
    batch = batch_of(space)
    inputs = observations(space).inputs(batch)
    assert sorted(leaf.shape[1] for leaf in inputs.values()) == [2, 3, 4]


def test_the_networks_do_not_see_the_mask():
    space = spaces.Dict(x=spaces.Box(-1, 1, (2,)), action_mask=spaces.Box(0, 1, (3,), np.int8))
    seen = observations(space, mask_size=3)
    assert seen.has_mask and list(seen.specs) == ["x"]
    mask = seen.inputs({"x": np.zeros((2, 2), np.float32), "action_mask": np.array([[0, 1, 1], [1, 0, 0]], np.int8)})
    np.testing.assert_array_equal(mask[MASK], [[False, True, True], [True, False, False]])
    assert not observations(space).has_mask  # a Gaussian policy treats the key as an ordinary observation
    with pytest.raises(vecenv.UnsupportedSpace, match=r"needs 4 entries.*MultiBinary\(4\)"):
        observations(space, mask_size=4)


def test_a_mask_may_be_a_tuple_as_in_gymnasiums_sample():
    bits = spaces.Tuple([spaces.MultiBinary(2), spaces.MultiBinary(3)])
    seen = observations(spaces.Dict(x=spaces.Box(-1, 1, (2,)), action_mask=bits), mask_size=5)
    batch = {"x": np.zeros((1, 2), np.float32), "action_mask": (np.array([[1, 0]]), np.array([[0, 0, 1]]))}
    np.testing.assert_array_equal(seen.inputs(batch)[MASK], [[1, 0, 0, 0, 1]])
    np.testing.assert_array_equal(seen.mask(batch), [[1, 0, 0, 0, 1]])


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(-1, 1, (0,)), "holds nothing that a network could see"),
        (spaces.Dict({0: spaces.Discrete(2)}), "must be strings"),
    ],
    ids=str,
)
def test_a_space_that_no_network_can_read_is_rejected(space, message):
    with pytest.raises(vecenv.UnsupportedSpace, match=message):
        observations(space)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Dict(a=spaces.Sequence(spaces.Discrete(2)))], ids=str)
def test_the_error_for_a_leaf_without_a_network_names_the_leaf(space):
    with pytest.raises(vecenv.UnsupportedSpace, match=r"no network for the observation space .* of '(observation|a)'"):
        observations(space)
