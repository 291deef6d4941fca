"""A straightforward PPO loop in JAX: one compiled function acts, another one learns.

It has the settings of `bench_ppo` and normalizes observations, rewards and advantages. Unlike ppo, it clips the norm of
all gradients together, trains on the rows of automatic resets, does not bootstrap truncated episodes from their final
observation, computes no metrics, and checks, saves and reports nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

GAMMA, LAMBDA, CLIP_RANGE, VALUE_COEF = 0.99, 0.95, 0.2, 0.5


def trainer(envs: Any, num_envs: int, *, num_steps: int, minibatch_size: int, epochs: int) -> Callable[[], None]:
    """Returns a function that runs one iteration.

    Args:
        envs: A Gymnasium vector env with vectors as observations and as actions.
        num_envs: Number of envs (N).
        num_steps: Steps of each env per update (T).
        minibatch_size: Size of a minibatch (B).
        epochs: Passes over the N * T samples.
    """
    rng, batch_size = np.random.default_rng(0), num_envs * num_steps
    observations = np.asarray(envs.reset()[0])
    size, num_actions = observations.shape[1], envs.action_space.shape[-1]
    params = {
        "policy": _layers(rng, [size, 64, 64, num_actions], gain=0.01),
        "value": _layers(rng, [size, 64, 64, 1], gain=1.0),
        "log_std": jnp.zeros(num_actions),
    }
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-5))
    moments = {
        "count": 1e-4, "mean": jnp.zeros(size), "variance": jnp.ones(size), "returns": jnp.zeros(num_envs),
        "return_count": 1e-4, "return_mean": 0.0, "return_variance": 1.0,
    }  # fmt: skip
    state = (params, adam.init(params), jax.tree.map(jnp.asarray, moments))

    def normalized(moments: dict, observations: jax.Array) -> jax.Array:
        return jnp.clip((observations - moments["mean"]) / jnp.sqrt(moments["variance"] + 1e-8), -10, 10)

    def log_prob(params: dict, inputs: jax.Array, actions: jax.Array) -> jax.Array:
        noise = (actions - _mlp(params["policy"], inputs)) * jnp.exp(-params["log_std"])
        return -(0.5 * noise**2 + params["log_std"] + 0.5 * jnp.log(2 * jnp.pi)).sum(-1)

    @jax.jit
    def act(policy: Any, log_std: jax.Array, moments: dict, observations: jax.Array, noise: jax.Array) -> jax.Array:
        return _mlp(policy, normalized(moments, observations.astype(jnp.float32))) + jnp.exp(log_std) * noise

    @jax.jit
    def learn(state: Any, rollout: dict, order: jax.Array) -> Any:
        params, optimizer, moments = state
        inputs = normalized(moments, rollout["observations"].astype(jnp.float32))
        values = _mlp(params["value"], inputs)[..., 0]
        ended = rollout["terminated"] | rollout["truncated"]

        def discount(total: jax.Array, step: tuple) -> tuple:
            reward, end = step
            total = reward + GAMMA * total
            return jnp.where(end, 0.0, total), total

        last, returns = lax.scan(discount, moments["returns"], (rollout["rewards"], ended))
        moments = moments | {"returns": last}
        for name, seen in (("return_", returns.reshape(-1)), ("", rollout["observations"][:-1].reshape(-1, size))):
            moments |= _merged(moments, name, seen)
        rewards = rollout["rewards"] / jnp.sqrt(moments["return_variance"] + 1e-8)

        def advantage(later: jax.Array, step: tuple) -> tuple:
            reward, value, following, terminated, end = step
            delta = reward + GAMMA * following * (1 - terminated) - value
            later = delta + GAMMA * LAMBDA * (1 - end) * later
            return later, later

        steps = (rewards, values[:-1], values[1:], rollout["terminated"], ended)
        advantages = lax.scan(advantage, jnp.zeros(num_envs), steps, reverse=True)[1]
        samples = {
            "inputs": inputs[:-1].reshape(-1, size),
            "actions": rollout["actions"].reshape(-1, num_actions),
            "advantages": advantages.reshape(-1),
            "targets": (advantages + values[:-1]).reshape(-1),
        }
        samples["old"] = log_prob(params, samples["inputs"], samples["actions"])

        def loss(params: dict, some: dict) -> jax.Array:
            ratio = jnp.exp(log_prob(params, some["inputs"], some["actions"]) - some["old"])
            advantages = (some["advantages"] - some["advantages"].mean()) / (some["advantages"].std() + 1e-8)
            clipped = jnp.clip(ratio, 1 - CLIP_RANGE, 1 + CLIP_RANGE)
            errors = _mlp(params["value"], some["inputs"])[:, 0] - some["targets"]
            return VALUE_COEF * (errors**2).mean() - jnp.minimum(ratio * advantages, clipped * advantages).mean()

        def step(carried: tuple, indices: jax.Array) -> tuple:
            params, optimizer = carried
            gradients = jax.grad(loss)(params, jax.tree.map(lambda column: column[indices], samples))
            updates, optimizer = adam.update(gradients, optimizer, params)
            return (optax.apply_updates(params, updates), optimizer), None

        (params, optimizer), _ = lax.scan(step, (params, optimizer), order)
        return params, optimizer, moments

    rollout = {
        "observations": np.empty([num_steps + 1, *observations.shape], observations.dtype),
        "actions": np.empty([num_steps, num_envs, num_actions], np.float32),
        "rewards": np.empty([num_steps, num_envs], np.float32),
        "terminated": np.empty([num_steps, num_envs], bool),
        "truncated": np.empty([num_steps, num_envs], bool),
    }
    rollout["observations"][-1] = observations

    def iterate() -> None:
        nonlocal state
        params, _, moments = state
        used = (params["policy"], params["log_std"], {name: moments[name] for name in ("mean", "variance")})
        noise = rng.standard_normal([num_steps, num_envs, num_actions], np.float32)
        rollout["observations"][0] = rollout["observations"][-1]
        for t in range(num_steps):
            actions = np.asarray(act(*used, rollout["observations"][t], noise[t]))
            rollout["actions"][t] = actions
            found = envs.step(np.clip(actions, -1, 1))
            rollout["observations"][t + 1], rollout["rewards"][t] = found[:2]
            rollout["terminated"][t], rollout["truncated"][t] = found[2:4]
        order = rng.permuted(np.tile(np.arange(batch_size, dtype=np.int32), (epochs, 1)), axis=1)
        # JAX may read NumPy's memory in place, so it must be done before the next rollout is written.
        state = jax.block_until_ready(learn(state, rollout, order.reshape(-1, minibatch_size)))

    return iterate


def _layers(rng: np.random.Generator, sizes: list[int], gain: float) -> list[tuple[jax.Array, jax.Array]]:
    def weights(rows: int, columns: int) -> np.ndarray:
        return np.linalg.qr(rng.normal(size=[max(rows, columns)] * 2))[0][:rows, :columns].astype(np.float32)

    layers = [(jnp.asarray(weights(*pair)) * 2**0.5, jnp.zeros(pair[1])) for pair in itertools.pairwise(sizes)]
    return [*layers[:-1], (layers[-1][0] * gain, layers[-1][1])]


def _mlp(layers: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    for weights, biases in layers[:-1]:
        x = jnp.tanh(x @ weights + biases)
    return x @ layers[-1][0] + layers[-1][1]


def _merged(moments: dict, name: str, seen: jax.Array) -> dict:
    """Returns running moments after more samples (Chan et al., 1979)."""
    count, mean, variance = (moments[name + key] for key in ("count", "mean", "variance"))
    total, change = count + len(seen), seen.mean(0) - mean
    squares = variance * count + seen.var(0) * len(seen) + change**2 * count * len(seen) / total
    return {name + "count": total, name + "mean": mean + change * len(seen) / total, name + "variance": squares / total}
