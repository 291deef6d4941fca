"""Advantage actor-critic (A2C) on `vecenv.ingraph.simulate` balances a pole: an algorithm other than PPO.

Run it:  python -m examples.a2c    (with seed 3 instead of 0: python -m examples.a2c 3)
"""

import sys

import tensorflow as tf

import vecenv
from vecenv.ingraph import InGraphVectorEnv, simulate, slots_for

NUM_ENVS, NUM_STEPS, UPDATES = 32, 16, 2000  # each update learns from T = 16 steps of N = 32 envs
GAMMA, LAMBDA, RATE, ENTROPY = 0.99, 0.95, 2e-3, 3e-4


class A2C(tf.Module):
    """Stores T steps, takes a gradient step on them, and starts again."""

    def __init__(self):
        self.policy, self.value = [dense(4, 64), dense(64, 2, 0.01)], [dense(4, 64), dense(64, 1)]
        self.weights = tf.nest.flatten([self.policy, self.value])
        self.squares = [tf.Variable(tf.zeros_like(weight)) for weight in self.weights]
        self.rate, self.greedy, self.time = tf.Variable(RATE), tf.Variable(False), tf.Variable(0)
        shapes = {"states": [4], "next_states": [4], "actions": [], "rewards": [], "terminated": [], "ended": []}
        self.memory = {name: tf.Variable(tf.zeros([NUM_STEPS, NUM_ENVS, *shape])) for name, shape in shapes.items()}

    def begin_episode(self, began):
        pass  # a recurrent policy would clear its state here

    def perform(self, observations):
        logits = network(self.policy, observations)
        return tf.argmax(logits, axis=1) if self.greedy else tf.random.categorical(logits, 1)[:, 0]

    def experience(self, step):
        if not self.greedy:
            ended, states = step.terminated | step.truncated, (step.observations, step.next_observations)
            seen = (*states, step.actions, step.rewards, step.terminated, ended)
            for column, values in zip(self.memory.values(), seen, strict=True):
                column.scatter_update(tf.IndexedSlices(tf.cast(values, tf.float32)[None], self.time[None]))
            if self.time.assign_add(1) == NUM_STEPS:
                self.learn(**self.memory)
                self.time.assign(0)

    def end_episode(self, ended):
        pass  # an algorithm that learns from whole episodes would learn here

    @tf.function(jit_compile=True)
    def learn(self, states, next_states, actions, rewards, terminated, ended):
        values, next_values = network(self.value, states)[..., 0], network(self.value, next_states)[..., 0]
        errors = (1 - GAMMA) * rewards + GAMMA * (1 - terminated) * next_values - values
        advantages = [tf.zeros([NUM_ENVS])]
        for t in reversed(range(NUM_STEPS)):
            advantages.insert(0, errors[t] + GAMMA * LAMBDA * (1 - ended[t]) * advantages[0])
        advantages = tf.stack(advantages[:-1])
        with tf.GradientTape() as tape:
            log_probs = tf.nn.log_softmax(network(self.policy, states))
            taken = tf.gather(log_probs, tf.cast(actions, tf.int32), axis=2, batch_dims=2)
            entropy = -tf.reduce_sum(tf.exp(log_probs) * log_probs, axis=2)
            wrong = tf.square(network(self.value, states)[..., 0] - (values + advantages))
            loss = tf.reduce_mean(wrong - taken * advantages - ENTROPY * entropy)
        for weight, square, gradient in zip(self.weights, self.squares, tape.gradient(loss, self.weights), strict=True):
            square.assign(0.99 * square + 0.01 * gradient**2)  # RMSProp
            weight.assign_sub(self.rate * gradient / (tf.sqrt(square) + 1e-5))
        self.rate.assign_sub(RATE / UPDATES)


def dense(inputs, outputs, scale=1.0):
    return tf.Variable(tf.random.normal([inputs, outputs], 0, scale / inputs**0.5)), tf.Variable(tf.zeros([outputs]))


def network(layers, inputs):
    (first, first_bias), (second, second_bias) = layers
    return tf.matmul(tf.tanh(tf.matmul(inputs, first) + first_bias), second) + second_bias


@tf.function
def mean_return(envs, algorithm, num_steps):
    """Steps all envs and returns the mean return of the episodes that end during these steps."""
    total, episodes = tf.constant(0.0, tf.float64), 0
    for _ in tf.range(num_steps):
        step = simulate(envs, algorithm)
        returns = step.episode_returns[step.terminated | step.truncated]
        total, episodes = total + tf.reduce_sum(returns), episodes + tf.size(returns)
    return total / tf.cast(episodes, tf.float64)


if __name__ == "__main__":
    tf.random.set_seed(seed := int([*sys.argv, 0][1]))
    kwargs = {"num_slots": slots_for(NUM_STEPS), "autoreset_mode": "SameStep"}
    with vecenv.make("CartPole-v1", NUM_ENVS, vector_kwargs=kwargs) as vector:
        envs, algorithm = InGraphVectorEnv(vector, num_steps=NUM_STEPS), A2C()
        envs.reset(seed=seed)
        for tenth in range(1, 11):
            score = mean_return(envs, algorithm, tf.constant(UPDATES // 10 * NUM_STEPS))
            print(f"training, part {tenth} of 10: mean return {score:.1f}")
        algorithm.greedy.assign(True)
        envs.reset(seed=seed + NUM_ENVS)
        print(f"the greedy policy: mean return {mean_return(envs, algorithm, tf.constant(500)):.1f}")
