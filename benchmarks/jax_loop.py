"""PPO in JAX, written to be as fast as JAX goes on a CPU. One iteration is a rollout and its update.

With the envs of EnvPool, whose steps XLA can call, the whole iteration is one compiled function. With other envs, one
compiled function acts, and another one learns. The parameters are one vector, and all samples are one matrix, so that
a gradient step gathers one array and updates another. NumPy draws the noise and shuffles the samples, because XLA takes
longer on a CPU. One thread computes: more are slower for networks of this size.

It has the settings of `bench_ppo` and normalizes observations, rewards and advantages. Unlike ppo, it clips the norm of
all gradients together, trains on the rows of automatic resets, does not bootstrap truncated episodes from their final
observation, computes no metrics, and checks, saves and reports nothing.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

# Before JAX is imported.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

GAMMA, LAMBDA, CLIP_RANGE, VALUE_COEF = 0.99, 0.95, 0.2, 0.5
LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class Rollout(NamedTuple):
    """T steps of N envs, and the T + 1 observations `[T + 1, N, size]` around them."""

    observations: Any
    actions: Any
    rewards: Any
    terminated: Any
    truncated: Any


class Algorithm:
    """PPO as pure functions of a state: parameters `float32[P]`, the state of Adam, and the statistics.

    Args:
        num_envs: Number of envs (N).
        size: Size of an observation.
        num_actions: Size of an action.

    Attributes:
        state: The initial state.
    """

    def __init__(self, num_envs: int, size: int, num_actions: int):
        rng = np.random.default_rng(0)
        flat, self._unravel = ravel_pytree({
            "policy": _layers(rng, [size, 64, 64, num_actions], gain=0.01),
            "value": _layers(rng, [size, 64, 64, 1], gain=1.0),
            "log_std": jnp.zeros(num_actions, jnp.float32),
        })  # fmt: skip
        self._adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-5))
        moments = {
            "count": 1e-4, "mean": np.zeros(size), "variance": np.ones(size), "returns": np.zeros(num_envs),
            "return_count": 1e-4, "return_mean": 0.0, "return_variance": 1.0,
        }  # fmt: skip
        self.state = (flat, self._adam.init(flat), jax.tree.map(jnp.float32, moments))
        self._size, self._num_actions = size, num_actions

    def act(self, state: Any, observations: jax.Array, noise: jax.Array) -> jax.Array:
        """Returns actions, not clipped, `float32[N, num_actions]`."""
        params = self._unravel(state[0])
        return _mlp(params["policy"], _normalized(state[2], observations)) + jnp.exp(params["log_std"]) * noise

    def learn(self, state: Any, rollout: Rollout, order: jax.Array) -> Any:
        """Returns the state after an update. `order` are the samples of each minibatch, `int32[steps, B]`."""
        flat, optimizer, moments = state
        inputs = _normalized(moments, rollout.observations)
        values = _mlp(self._unravel(flat)["value"], inputs)[..., 0]
        moments, rewards = _merged_statistics(moments, rollout)
        samples = jnp.concatenate(
            [
                inputs[:-1].reshape(-1, self._size),
                rollout.actions.reshape(-1, self._num_actions),
                _advantages(rollout, rewards, values).reshape(-1, 1),
                values[:-1].reshape(-1, 1),
            ],
            axis=1,
        )
        old = self._log_prob(flat, samples)
        samples = jnp.concatenate([samples, old[:, None]], axis=1)

        def loss(flat: jax.Array, some: jax.Array) -> jax.Array:
            advantages, values, old = some[:, -3], some[:, -2], some[:, -1]
            ratio = jnp.exp(self._log_prob(flat, some) - old)
            errors = _mlp(self._unravel(flat)["value"], some[:, : self._size])[:, 0] - (advantages + values)
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            clipped = jnp.clip(ratio, 1 - CLIP_RANGE, 1 + CLIP_RANGE)
            return VALUE_COEF * (errors**2).mean() - jnp.minimum(ratio * advantages, clipped * advantages).mean()

        def step(carried: tuple, indices: jax.Array) -> tuple:
            flat, optimizer = carried
            updates, optimizer = self._adam.update(jax.grad(loss)(flat, samples[indices]), optimizer, flat)
            return (optax.apply_updates(flat, updates), optimizer), None

        (flat, optimizer), _ = lax.scan(step, (flat, optimizer), order)
        return flat, optimizer, moments

    def _log_prob(self, flat: jax.Array, samples: jax.Array) -> jax.Array:
        params, size = self._unravel(flat), self._size
        actions, log_std = samples[:, size : size + self._num_actions], params["log_std"]
        noise = (actions - _mlp(params["policy"], samples[:, :size])) * jnp.exp(-log_std)
        return -(0.5 * noise**2 + log_std + LOG_SQRT_2PI).sum(-1)


def compiled_trainer(
    envs: Any, num_envs: int, *, num_steps: int, minibatch_size: int, epochs: int
) -> Callable[[], None]:
    """Returns a function that runs one iteration: a single compiled function, which also steps the envs.

    Args:
        envs: Envs of EnvPool.
        num_envs: Number of envs (N).
        num_steps: Steps of each env per update (T).
        minibatch_size: Size of a minibatch (B).
        epochs: Passes over the N * T samples.
    """
    jax.config.update("jax_enable_x64", True)  # EnvPool takes float64 actions
    handle, _, _, step_envs = envs.xla()
    observations = jnp.asarray(envs.reset()[0], jnp.float32)
    num_actions = envs.action_space.shape[-1]
    algorithm = Algorithm(num_envs, observations.shape[1], num_actions)

    @jax.jit
    def iteration(handle: Any, state: Any, observations: jax.Array, noise: jax.Array, order: jax.Array) -> Any:
        def step(carried: tuple, noise: jax.Array) -> tuple:
            handle, observations = carried
            actions = algorithm.act(state, observations, noise)
            handle, (following, rewards, terminated, truncated, *_) = step_envs(
                handle, jnp.clip(actions, -1, 1).astype(jnp.float64)
            )
            kept = (observations, actions, rewards.astype(jnp.float32), terminated, truncated)
            return (handle, following.astype(jnp.float32)), kept

        (handle, last), (before, *others) = lax.scan(step, (handle, observations), noise)
        rollout = Rollout(jnp.concatenate([before, last[None]]), *others)
        return handle, algorithm.learn(state, rollout, order), last

    state, rng = algorithm.state, np.random.default_rng(0)

    def iterate() -> None:
        nonlocal handle, state, observations
        noise = rng.standard_normal([num_steps, num_envs, num_actions], np.float32)
        order = _shuffled(rng, num_envs * num_steps, minibatch_size, epochs)
        handle, state, observations = jax.block_until_ready(iteration(handle, state, observations, noise, order))

    return iterate


def trainer(envs: Any, num_envs: int, *, num_steps: int, minibatch_size: int, epochs: int) -> Callable[[], None]:
    """Returns a function that runs one iteration in a loop on the host, for any Gymnasium vector env.

    The other arguments are those of `compiled_trainer`.
    """
    observations = np.asarray(envs.reset()[0])
    size, num_actions = observations.shape[1], envs.action_space.shape[-1]
    algorithm = Algorithm(num_envs, size, num_actions)
    act, learn = jax.jit(algorithm.act), jax.jit(algorithm.learn)
    state, rng = algorithm.state, np.random.default_rng(0)
    rollout = Rollout(
        np.empty([num_steps + 1, *observations.shape], observations.dtype),
        np.empty([num_steps, num_envs, num_actions], np.float32),
        np.empty([num_steps, num_envs], np.float32),
        np.empty([num_steps, num_envs], bool),
        np.empty([num_steps, num_envs], bool),
    )
    rollout.observations[-1] = observations

    def iterate() -> None:
        nonlocal state
        noise = rng.standard_normal([num_steps, num_envs, num_actions], np.float32)
        rollout.observations[0] = rollout.observations[-1]
        for t in range(num_steps):
            actions = np.asarray(act(state, rollout.observations[t], noise[t]))
            rollout.actions[t] = actions
            found = envs.step(np.clip(actions, -1, 1))
            rollout.observations[t + 1], rollout.rewards[t] = found[:2]
            rollout.terminated[t], rollout.truncated[t] = found[2:4]
        order = _shuffled(rng, num_envs * num_steps, minibatch_size, epochs)
        # JAX may read NumPy's memory in place, so it must be done before the next rollout is written.
        state = jax.block_until_ready(learn(state, rollout, order))

    return iterate


def _shuffled(rng: np.random.Generator, count: int, minibatch_size: int, epochs: int) -> np.ndarray:
    order = rng.permuted(np.tile(np.arange(count, dtype=np.int32), (epochs, 1)), axis=1)
    return order.reshape(-1, minibatch_size)


def _normalized(moments: dict, observations: jax.Array) -> jax.Array:
    scaled = (observations.astype(jnp.float32) - moments["mean"]) * lax.rsqrt(moments["variance"] + 1e-8)
    return jnp.clip(scaled, -10, 10)


def _merged_statistics(moments: dict, rollout: Rollout) -> tuple[dict, jax.Array]:
    """Returns the statistics with those of a rollout, and its normalized rewards."""
    ended = rollout.terminated | rollout.truncated

    def discount(total: jax.Array, step: tuple) -> tuple:
        reward, end = step
        total = reward + GAMMA * total
        return jnp.where(end, 0.0, total), total

    last, returns = lax.scan(discount, moments["returns"], (rollout.rewards, ended))
    moments = moments | {"returns": last}
    seen = rollout.observations[:-1].reshape(-1, rollout.observations.shape[-1]).astype(jnp.float32)
    for name, values in (("return_", returns.reshape(-1)), ("", seen)):
        moments |= _merged(moments, name, values)
    return moments, rollout.rewards * lax.rsqrt(moments["return_variance"] + 1e-8)


def _merged(moments: dict, name: str, seen: jax.Array) -> dict:
    """Returns running moments after more samples (Chan et al., 1979)."""
    count, mean, variance = (moments[name + key] for key in ("count", "mean", "variance"))
    total, change = count + len(seen), seen.mean(0) - mean
    squares = variance * count + seen.var(0) * len(seen) + change**2 * count * len(seen) / total
    return {name + "count": total, name + "mean": mean + change * len(seen) / total, name + "variance": squares / total}


def _advantages(rollout: Rollout, rewards: jax.Array, values: jax.Array) -> jax.Array:
    def advantage(later: jax.Array, step: tuple) -> tuple:
        reward, value, following, terminated, end = step
        delta = reward + GAMMA * following * (1 - terminated) - value
        later = delta + GAMMA * LAMBDA * (1 - end) * later
        return later, later

    ended = (rollout.terminated | rollout.truncated).astype(jnp.float32)
    steps = (rewards, values[:-1], values[1:], rollout.terminated.astype(jnp.float32), ended)
    return lax.scan(advantage, jnp.zeros_like(values[0]), steps, reverse=True)[1]


def _layers(rng: np.random.Generator, sizes: list[int], gain: float) -> list[tuple[jax.Array, jax.Array]]:
    def weights(rows: int, columns: int) -> np.ndarray:
        return np.linalg.qr(rng.normal(size=[max(rows, columns)] * 2))[0][:rows, :columns].astype(np.float32)

    layers = [
        (jnp.asarray(weights(*pair)) * np.float32(2**0.5), jnp.zeros(pair[1], jnp.float32))
        for pair in itertools.pairwise(sizes)
    ]
    return [*layers[:-1], (layers[-1][0] * np.float32(gain), layers[-1][1])]


def _mlp(layers: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    for weights, biases in layers[:-1]:
        x = jnp.tanh(x @ weights + biases)
    return x @ layers[-1][0] + layers[-1][1]
