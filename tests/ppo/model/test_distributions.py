"""Tests of ppo/model/distributions.py against hand-worked cases, integrals, sums and sample counts."""

import math

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf

import vecenv
from ppo.model import distributions

BOX = gym.spaces.Box(np.array([-1, -2], np.float32), np.array([1, 4], np.float32))
GAUSSIAN = distributions.for_space(BOX)
CATEGORICAL = distributions.for_space(gym.spaces.Discrete(3, start=-1))
CHOICES = distributions.for_space(gym.spaces.MultiDiscrete([[2, 3], [1, 4]], start=[[0, 5], [1, -2]]))
BITS = distributions.for_space(gym.spaces.MultiBinary((2, 2)))


def gaussian(mean, log_std, count=1):
    return tf.tile(tf.constant([[*mean, *log_std]], tf.float32), [count, 1])


def test_gaussian_log_prob_and_entropy_worked_by_hand():
    # mean (0, 1), std (1, 2), sample (1, 3): z = (1, 1). The bounds of the second entry are 3 from its middle.
    # log p = -0.5 - 0.5 - log 1 - log 2 - log(2 pi) - log 3;  entropy = log 2 + 2 * 0.5 * log(2 pi e) + log 3
    outputs = gaussian([0.0, 1.0], [0.0, math.log(2.0)])
    log_prob = GAUSSIAN.log_prob(outputs, tf.constant([[1.0, 3.0]]))
    assert float(log_prob[0]) == pytest.approx(-1 - math.log(6) - math.log(2 * math.pi), rel=1e-6)
    entropy = GAUSSIAN.entropy(outputs)
    assert float(entropy[0]) == pytest.approx(math.log(6) + math.log(2 * math.pi * math.e), rel=1e-6)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (BOX, [1.0, 0.0]),
        (gym.spaces.Dict(a=BOX, b=gym.spaces.Discrete(2)), [1.0, 0.0]),
        (gym.spaces.Box(-np.inf, np.inf, (2,)), [1.0, 1.0]),  # nothing is clipped
    ],
)
def test_the_objective_rewards_no_deviation_above_that_of_uniform_actions(space, expected):
    distribution = distributions.for_space(space)
    uniform = math.log(np.std(np.linspace(-1, 1, 100_001)))
    outputs = tf.constant([[0.0] * (distribution.num_outputs - 2) + [uniform - 0.1, uniform + 0.1]], tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        rewarded = distribution.rewarded_entropy(outputs)
    assert tape.gradient(rewarded, outputs)[0, -2:].numpy().tolist() == expected
    excess = 0.1 * (2 - sum(expected))
    assert float(rewarded[0]) == pytest.approx(float(distribution.entropy(outputs)[0]) - excess, rel=1e-4)


def test_gaussian_samples_have_the_given_mean_and_standard_deviation():
    noise = GAUSSIAN.noise([50_000], tf.constant([1, 2]))
    actions = GAUSSIAN.sample(gaussian([1.0, -2.0], [0.0, 1.0], 50_000), noise).numpy()
    np.testing.assert_allclose(actions.mean(axis=0), [1.0, 1 + 3 * -2.0], atol=0.1)
    np.testing.assert_allclose(actions.std(axis=0), [1.0, 3 * math.e], rtol=0.02)


@pytest.mark.parametrize("transform", ["clip", "tanh"])
@pytest.mark.parametrize("mean", [-1.5, 0.2, 1.0])
def test_a_density_integrates_to_one_and_gives_entropy_and_kl(transform, mean):
    """Each quantity is compared with an integral over a fine grid of actions, for every transform."""
    space = gym.spaces.Box(-3.0, 1.0, (1,), np.float64)
    distribution = distributions.for_space(space, transform=transform)
    outputs, other = tf.constant([[mean, -0.5]]), tf.constant([[0.3, -0.2]])
    u = np.linspace(-6, 6, 20_001)[:, None]  # evenly spaced samples cover the tails too
    grid = 2 * {"clip": u, "tanh": np.tanh(u)}[transform] - 1
    samples = tf.constant(u, tf.float32)
    log_prob = distribution.log_prob(tf.tile(outputs, [len(u), 1]), samples).numpy().astype(np.float64)
    other_log_prob = distribution.log_prob(tf.tile(other, [len(u), 1]), samples).numpy()
    density = np.exp(log_prob)

    def integral(values):
        return np.trapezoid(values, grid[:, 0])

    assert integral(density) == pytest.approx(1.0, abs=1e-3)
    assert float(distribution.entropy(outputs)[0]) == pytest.approx(-integral(density * log_prob), abs=3e-3)
    kl = integral(density * (log_prob - other_log_prob))
    assert float(distribution.kl(outputs, other)[0]) == pytest.approx(kl, abs=3e-3)


@pytest.mark.parametrize("log_std", [-10.0, 50.0, -50.0])
def test_the_kl_of_gaussians_is_exact_however_wide_or_narrow_they_are(log_std):
    std = math.exp(log_std)
    kl = GAUSSIAN.kl(gaussian([0.0, std], [log_std, log_std]), gaussian([std, std], [log_std, log_std + 1]))
    assert float(kl[0]) == pytest.approx(0.5 + (1 + 0.5 * math.exp(-2) - 0.5), rel=1e-5)


def test_tanh_maps_to_the_bounds():
    distribution = distributions.for_space(BOX, transform="tanh")
    u = tf.constant([[-0.9, 0.5], [0.0, 0.0], [6.0, -6.0]])
    actions = distribution.mode(tf.concat([u, tf.zeros_like(u)], axis=-1))
    np.testing.assert_allclose(actions, np.tanh(u.numpy()) * [1, 3] + [0, 1], rtol=1e-6)
    extreme = gaussian([1e3, -1e3], [0.0, 0.0])
    assert BOX.contains(distribution.mode(extreme).numpy()[0])
    assert np.isfinite(distribution.log_prob(gaussian([9.0, -9.0], [0.0, 0.0]), extreme[:, :2])).all()


@pytest.mark.parametrize("transform", ["clip", "tanh"])
@pytest.mark.parametrize("mean", [-15.0, 0.3, 6.0])
def test_the_log_prob_of_an_action_is_exact_even_though_float32_rounds_the_action(transform, mean):
    """Near these bounds, float32 keeps four decimals. For a sample of 6, tanh loses all of them."""
    distribution = distributions.for_space(gym.spaces.Box(999.0, 1001.0, (1,)), transform=transform)
    outputs, noise = tf.constant([[mean, -0.5]]), tf.constant([[1.0]])
    samples = distribution.samples(outputs, noise, distribution.sample(outputs, noise))
    u = mean + math.exp(-0.5)
    slope = math.log(4) - 2 * abs(u) - 2 * math.log1p(math.exp(-2 * abs(u))) if transform == "tanh" else 0.0
    wanted = -0.5 + 0.5 - 0.5 * math.log(2 * math.pi) - slope
    assert float(distribution.log_prob(outputs, samples)[0]) == pytest.approx(wanted, abs=1e-5)


def test_tanh_needs_bounds():
    with pytest.raises(vecenv.UnsupportedSpace, match="bounds are not finite"):
        distributions.for_space(gym.spaces.Box(-np.inf, 1, (2,)), transform="tanh")


def test_categorical_log_prob_and_entropy_worked_by_hand():
    # probabilities 1/2, 1/4, 1/4 for the actions -1, 0, 1
    logits = tf.math.log(tf.constant([[0.5, 0.25, 0.25]] * 2))
    log_prob = CATEGORICAL.log_prob(logits, tf.constant([-1, 1], tf.int64))
    np.testing.assert_allclose(log_prob, np.log([0.5, 0.25]), rtol=1e-6)
    np.testing.assert_allclose(CATEGORICAL.entropy(logits), [1.5 * math.log(2)] * 2, rtol=1e-6)
    np.testing.assert_array_equal(CATEGORICAL.mode(logits), [-1, -1])


def test_categorical_samples_have_the_given_probabilities():
    logits = tf.math.log(tf.constant([0.7, 0.2, 0.1])) + tf.zeros([50_000, 3])
    actions = CATEGORICAL.sample(logits, CATEGORICAL.noise([50_000], tf.constant([3, 4]))).numpy()
    assert actions.dtype == np.int64
    np.testing.assert_allclose([(actions == k).mean() for k in (-1, 0, 1)], [0.7, 0.2, 0.1], atol=0.01)


@pytest.mark.parametrize("distribution", [CHOICES, BITS], ids=["MultiDiscrete", "MultiBinary"])
def test_log_probs_match_sample_frequencies(distribution):
    """Log-probabilities, entropy and KL are compared with sample counts and with sums over all actions."""
    rng = np.random.default_rng(0)
    outputs, other = (tf.constant(rng.normal(size=distribution.num_outputs), tf.float32) for _ in range(2))
    many = tf.tile(outputs[None], [100_000, 1])
    actions = distribution.sample(many, distribution.noise([100_000], tf.constant([3, 4]))).numpy()
    assert actions.shape == (100_000, 2, 2)
    found, counts = np.unique(actions, axis=0, return_counts=True)
    tiled = [tf.tile(o[None], [len(found), 1]) for o in (outputs, other)]
    log_prob, other_log_prob = (distribution.log_prob(o, tf.constant(found)).numpy() for o in tiled)
    assert np.exp(log_prob).sum() == pytest.approx(1.0, abs=1e-5)  # every action was sampled
    np.testing.assert_allclose(counts / 100_000, np.exp(log_prob), atol=0.01)
    entropy, kl = -(np.exp(log_prob) * log_prob).sum(), (np.exp(log_prob) * (log_prob - other_log_prob)).sum()
    assert float(distribution.entropy(outputs[None])[0]) == pytest.approx(entropy, rel=1e-5)
    assert float(distribution.kl(outputs[None], other[None])[0]) == pytest.approx(kl, rel=1e-4)
    most_likely = found[log_prob.argmax()]
    np.testing.assert_array_equal(distribution.mode(outputs[None])[0], most_likely)


def test_samples_cover_the_range_of_the_space():
    space = gym.spaces.MultiDiscrete([[2, 3], [1, 4]], start=[[0, 5], [1, -2]])
    noise = CHOICES.noise([5_000], tf.constant([0, 0]))
    actions = CHOICES.sample(tf.zeros([5_000, 10]), noise).numpy()
    assert all(space.contains(action) for action in actions)
    np.testing.assert_array_equal(actions.min(axis=0), [[0, 5], [1, -2]])
    np.testing.assert_array_equal(actions.max(axis=0), [[1, 7], [1, 1]])


@pytest.mark.parametrize("distribution", [GAUSSIAN, CATEGORICAL, CHOICES, BITS])
def test_the_same_seed_gives_the_same_noise(distribution):
    one, same, other = (distribution.noise([4, 5], tf.constant([7, k])).numpy() for k in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert one.shape == (4, 5, distribution.num_outputs - distribution.num_free) and (one != other).any()


def test_actions_have_the_shape_and_dtype_of_the_space():
    space = gym.spaces.Box(-1, 1, (2, 3), np.float64)
    distribution = distributions.for_space(space)
    action = distribution.sample(tf.zeros([4, 12]), distribution.noise([4], tf.constant([0, 0])))
    assert action.shape == (4, 2, 3) and action.dtype == tf.float64


@pytest.mark.parametrize(
    "low, high, dtype", [(1e6, 1e6 + 1, np.float32), (-1, 1, np.float16), (-3e38, 3e38, np.float32)]
)
def test_a_transform_that_would_lose_precision_is_rejected(low, high, dtype):
    with pytest.raises(vecenv.UnsupportedSpace, match="without losing precision"):
        distributions.for_space(gym.spaces.Box(low, high, (1,), dtype), transform="tanh")


COMPOSITE = gym.spaces.Dict(
    {
        "a": gym.spaces.Box(-1, 1, (2,)),
        "b": gym.spaces.Tuple([gym.spaces.MultiDiscrete([2, 3]), gym.spaces.Box(-1, 1, (), np.float64)]),
        "c": gym.spaces.MultiBinary(2),
    }
)
PRODUCT = distributions.for_space(COMPOSITE)


def test_a_product_has_logits_then_means_then_log_stds_and_its_log_prob_is_a_sum_worked_by_hand():
    logits, bits = np.log([0.75, 0.25, 0.5, 0.125, 0.375]), [math.log(3), -math.log(4)]
    means, log_stds = [0.0, 1.0, -2.0], [0.0, math.log(2), math.log(3)]
    outputs = tf.constant([[*logits, *bits, *means, *log_stds]], tf.float32)
    assert PRODUCT.num_outputs == outputs.shape[1] and PRODUCT.num_free == 3 and PRODUCT.mask_size == 7
    assert PRODUCT.mask_groups == [slice(0, 2), slice(2, 5)]  # the bits may all be forbidden
    action = {
        "a": tf.constant([[1.0, 3.0]]),
        "b": (tf.constant([[1, 2]], tf.int64), tf.constant([1.0], tf.float64)),
        "c": tf.constant([[1, 0]], tf.int8),
    }
    samples = PRODUCT.recover(action)
    densities = -0.5 * (1 + 1 + 1) - math.log(2) - math.log(3) - 1.5 * math.log(2 * math.pi)  # every z is 1
    wanted = math.log(0.25 * 0.375) + math.log(0.75 * 0.8) + densities
    assert float(PRODUCT.log_prob(outputs, samples)[0]) == pytest.approx(wanted, rel=1e-6)
    mode = PRODUCT.mode(outputs)
    assert tf.nest.map_structure(lambda leaf: leaf.numpy().tolist(), mode) == {
        "a": [[0.0, 1.0]], "b": ([[0, 0]], [-2.0]), "c": [[1, 0]]
    }  # fmt: skip


def test_samples_of_a_product_have_the_form_of_the_space_and_give_its_entropy_and_kl():
    rng, count = np.random.default_rng(0), 100_000
    outputs, other = (tf.constant(0.5 * rng.normal(size=[1, 13]), tf.float32) for _ in range(2))
    noise = PRODUCT.noise([count], tf.constant([3, 4]))
    actions = PRODUCT.sample(tf.tile(outputs, [count, 1]), noise)
    found = tf.nest.map_structure(lambda leaf: (leaf.dtype.name, *leaf.shape), actions)
    assert found == {
        "a": ("float32", count, 2),
        "b": (("int64", count, 2), ("float64", count)),
        "c": ("int8", count, 2),
    }
    samples = PRODUCT.samples(outputs, noise, actions)
    log_probs, others = (PRODUCT.log_prob(tf.tile(o, [count, 1]), samples).numpy() for o in (outputs, other))
    assert float(PRODUCT.entropy(outputs)[0]) == pytest.approx(-log_probs.mean(), abs=0.03)
    assert float(PRODUCT.kl(outputs, other)[0]) == pytest.approx((log_probs - others).mean(), abs=0.03)


def test_equal_leaves_of_a_product_draw_different_noise():
    twins = distributions.for_space(gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Discrete(3)]))
    noise = twins.noise([4, 5], tf.constant([1, 2])).numpy()
    assert noise.shape == (4, 5, 6) and (noise[..., :3] != noise[..., 3:]).all()


def test_an_integer_box_is_bit_equal_to_a_multidiscrete_that_starts_at_its_lower_bound():
    box = gym.spaces.Box(
        np.array([[-3, 0], [2, 250]], np.int16), np.array([[1, 6], [2, 255]], np.int16), dtype=np.int16
    )
    choices = gym.spaces.MultiDiscrete([[5, 7], [1, 6]], start=[[-3, 0], [2, 250]])
    one, other = distributions.for_space(box), distributions.for_space(choices)
    assert one.num_outputs == other.num_outputs == 19 and one.mask_groups == other.mask_groups
    rng, seed = np.random.default_rng(0), tf.constant([1, 2])
    outputs, before = (tf.constant(rng.normal(size=[1000, 19]), tf.float32) for _ in range(2))
    actions, wanted = (d.sample(outputs, d.noise([1000], seed)) for d in (one, other))
    assert actions.dtype == tf.int16 and all(box.contains(action) for action in actions.numpy())
    np.testing.assert_array_equal(actions, wanted)
    np.testing.assert_array_equal(one.log_prob(outputs, actions), other.log_prob(outputs, wanted))
    np.testing.assert_array_equal(one.kl(before, outputs), other.kl(before, outputs))
    np.testing.assert_array_equal(one.mode(outputs), other.mode(outputs))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (gym.spaces.Text(3), "needs Box, Discrete, MultiDiscrete"),
        (
            gym.spaces.Dict(a=gym.spaces.Tuple([gym.spaces.Text(3)])),
            r"action\['a'\]\[0\]: ppo has no policy for .*Text",
        ),
        (gym.spaces.Dict(), "nothing to learn"),
        (gym.spaces.Box(0, 2**20, (2,), np.int32), "an entry has 1,048,577 integers: at most 65,536"),
        (gym.spaces.Box(-np.inf, np.inf, (2,), np.int64), "at most 65,536"),
    ],
    ids=str,
)
def test_the_error_for_an_unsupported_action_space_says_what_is_supported(space, message):
    with pytest.raises(vecenv.UnsupportedSpace, match=message):
        distributions.for_space(space)


@pytest.mark.parametrize(
    ("low", "high", "middle", "half"),
    [
        (-1, 1, 0, 1),
        (-0.01, 0.01, 0, 0.01),
        (0, 512, 256, 256),
        (-1e6, 1e6, 0, 1e6),
        (-1e7, 1e7, 0, 1),
        (np.finfo(np.float32).min, np.finfo(np.float32).max, 0, 1),
        (-np.inf, np.inf, 0, 1),
        (0, np.inf, 0, 1),
        (2, 2, 0, 1),
    ],
)
def test_actions_are_in_units_of_half_the_range_unless_a_bound_is_missing_or_far_away(low, high, middle, half):
    distribution = distributions.for_space(gym.spaces.Box(np.float32([low, -1]), np.float32([high, 1])))
    outputs = gaussian([0.5, 0.5], [-1.0, -1.0])
    mode, sample = distribution.mode(outputs), distribution.sample(outputs, tf.constant([[1.0, 1.0]]))
    np.testing.assert_allclose(mode, [[middle + 0.5 * half, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(sample - mode, [[math.exp(-1) * half, math.exp(-1)]], rtol=1e-5)
    np.testing.assert_allclose(distribution.recover(mode), [[0.5, 0.5]], rtol=1e-6)
