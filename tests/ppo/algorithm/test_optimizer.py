"""Tests of ppo/algorithm/optimizer.py."""

import numpy as np
import tensorflow as tf

from ppo.algorithm.optimizer import Adam


def test_adam_with_clipping_equals_a_slow_loop():
    rng = np.random.default_rng(0)
    start = [rng.normal(size=(3, 2)).astype(np.float32), rng.normal(size=4).astype(np.float32)]
    variables = [tf.Variable(value) for value in start]
    adam = Adam(variables, epsilon=1e-5, max_grad_norm=0.5)
    expected = [value.astype(np.float64) for value in start]
    first, second = [0.0, 0.0], [0.0, 0.0]
    for step in range(1, 21):
        gradients = [rng.normal(size=value.shape).astype(np.float32) * (0.01 if step % 2 else 1.0) for value in start]
        norm = adam.apply([tf.constant(g) for g in gradients], tf.constant(0.1))
        true_norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradients))
        np.testing.assert_allclose(norm, true_norm, rtol=1e-5)
        for k, gradient in enumerate(gradients):
            gradient = gradient * min(1.0, 0.5 / true_norm)
            first[k] = 0.9 * first[k] + 0.1 * gradient
            second[k] = 0.999 * second[k] + 0.001 * gradient**2
            corrected = np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            expected[k] -= 0.1 * corrected * first[k] / (np.sqrt(second[k]) + 1e-5)
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable, value, rtol=1e-4, atol=1e-5)
