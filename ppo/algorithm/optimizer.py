"""Adam with clipping by global norm, written with plain variables so that it can run inside an XLA-compiled loop."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

BETA_1 = 0.9
BETA_2 = 0.999


class Adam(tf.Module):
    """Adam (Kingma and Ba, 2014, algorithm 1 in the form given at the end of section 2).

    Attributes:
        learned: The variables that `apply` updates.
    """

    def __init__(self, variables: Sequence[tf.Variable], *, epsilon: float, max_grad_norm: float):
        super().__init__(name="adam")
        self.learned = list(variables)
        self._epsilon = epsilon
        self._max_grad_norm = max_grad_norm
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="steps")
        self._first = [tf.Variable(tf.zeros_like(v), trainable=False, name="first_moment") for v in self.learned]
        self._second = [tf.Variable(tf.zeros_like(v), trainable=False, name="second_moment") for v in self.learned]

    def apply(self, gradients: Sequence[tf.Tensor], learning_rate: tf.Tensor) -> tf.Tensor:
        """Takes one step and returns the global norm of the gradients before clipping, a float32 scalar."""
        norm = tf.linalg.global_norm(gradients)
        scale = tf.minimum(1.0, self._max_grad_norm / (norm + 1e-6))
        self.steps.assign_add(1)
        steps = tf.cast(self.steps, tf.float32)
        beta_1, beta_2, epsilon = (tf.constant(value) for value in (BETA_1, BETA_2, self._epsilon))
        beta_1_power, beta_2_power = beta_1**steps, beta_2**steps
        for variable, first, second, gradient in zip(self.learned, self._first, self._second, gradients, strict=True):
            tf.raw_ops.ResourceApplyAdam(  # one pass over the variable and its moments; XLA supports it
                var=variable.handle,
                m=first.handle,
                v=second.handle,
                beta1_power=beta_1_power,
                beta2_power=beta_2_power,
                lr=learning_rate,
                beta1=beta_1,
                beta2=beta_2,
                epsilon=epsilon,
                grad=gradient * scale,
            )
        return norm
