"""Where does the time of PPO go? `python -m benchmarks.budget --env HalfCheetah-v5` prints a table of shares.

Unit: microseconds per step of all envs and per env-step, and the share of an iteration.
Not measured: start-up and compilation.

Each row is the difference between two measurements, where the second does the work of the first and one thing more:
the envs alone, the vector env, its steps in a graph, the same steps with the policy, and a whole iteration. These
measurements take turns in one process, and each number is a median over the turns.

- physics (MuJoCo tasks in C++): `mujoco.batch` repeats the physics of a vecenv run, with one thread per core.
- envs (other envs): one env in this process takes the steps of all envs of one worker, as if workers cost nothing.
- vector env: the rest of a step: numpy around the physics, rows, and, with workers, pipes and waiting.
- graph: TensorFlow calls the Python function that steps the envs, and converts its results.
- policy: normalization, networks and sampling during collection.
- gradient steps: the difference between an update with twice the epochs and one with the given epochs.
- advantages and the rest of the update: log-probabilities, values, advantages and statistics.
- checks and reports: the rest of an iteration.

Actions of the first three rows are random. Collection uses an untrained policy.
This benchmark takes PPO apart, so it uses names of ppo and of the vector env that are not public.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import tyro

import ppo
import vecenv
from benchmarks.bench_mujoco import physics
from benchmarks.machine import load_tensorflow

Call = Callable[[], Any]


def budget(
    env: str = "HalfCheetah-v5",
    num_envs: int = 64,
    num_steps: int = 64,
    minibatch_size: int = 1024,
    epochs: int = 2,
    backend: str = "auto",
    turns: int = 15,
) -> None:
    """Prints the budget of PPO on an env.

    Args:
        env: Env id.
        num_envs: Number of envs.
        num_steps: Steps of a rollout.
        minibatch_size: Samples of a gradient step.
        epochs: Epochs of an update.
        backend: "auto" or "python".
        turns: Number of turns to take medians over.
    """
    never = 10**9
    config = ppo.Config(env=env, num_envs=num_envs, num_steps=num_steps, minibatch_size=minibatch_size, epochs=epochs,
                        backend=backend, recompute_advantages=False, total_steps=never,
                        report_interval=never, checkpoint_interval=never)  # type: ignore[arg-type]  # fmt: skip
    load_tensorflow()
    with (
        vecenv.make(env, num_envs, backend=backend, vector_kwargs=ppo.vector_options(config)) as vector,  # type: ignore[arg-type]
        tempfile.TemporaryDirectory() as folder,
    ):
        calls, envs_row = _calls(config, vector)
        watch = Turns(calls, turns)
        ppo.train(config, callbacks=watch, logdir=Path(folder), progress=False)
    _print(config, {name: statistics.median(each) for name, each in watch.seconds.items()}, envs_row)


class Turns(ppo.Callback):
    """Times each iteration of a run and, between iterations, all other calls. The first turn is a warm-up."""

    def __init__(self, calls: dict[str, Call], turns: int):
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._calls = calls
        self._left = turns + 1
        self._start = 0.0

    def on_update(self, report: dict[str, Any]) -> None:
        """Ends the time of an iteration, and times all other calls."""
        seconds = {"iterate": time.perf_counter() - self._start}
        for name, call in self._calls.items():
            start = time.perf_counter()
            call()
            seconds[name] = time.perf_counter() - start
        if self._start:
            for name, taken in seconds.items():
                self.seconds[name].append(taken)
        self._left -= 1
        if not self._left:
            raise ppo.StopTraining
        self._start = time.perf_counter()


def _print(config: ppo.Config, times: dict[str, float], envs_row: str) -> None:
    update, double = times["update"], times["update, twice the epochs"]
    gradients = max(0.0, double - update)
    rows = {
        envs_row: times["envs"],
        "vector env": times["vector env"] - times["envs"],
        "graph": times["graph"] - times["vector env"],
        "policy": times["collect"] - times["graph"],
        "gradient steps": gradients,
        "advantages and the rest of the update": update - gradients,
        "checks and reports": times["iterate"] - times["collect"] - update,
    }
    total = times["iterate"]
    setting = (
        f"{config.num_envs} envs, {config.num_steps} steps, minibatch {config.minibatch_size}, {config.epochs} epochs"
    )
    print(f"{config.env}, {setting}: {config.batch_size / total:,.0f} env-steps/s, {total * 1e3:.1f} ms an update")
    print("| | us per step of all envs | us per env-step | share |\n|---|---:|---:|---:|")
    for name, seconds in rows.items():
        step = seconds / config.num_steps * 1e6
        print(f"| {name} | {step:,.1f} | {step / config.num_envs:.2f} | {seconds / total:.0%} |")


def _calls(config: ppo.Config, vector: vecenv.AsyncVectorEnv) -> tuple[dict[str, Call], str]:
    """Returns the functions to time, by name, and the name of the row of the envs alone."""
    import tensorflow as tf

    from ppo.algorithm.batch import shuffled
    from ppo.algorithm.rollout import LocalCollector
    from ppo.algorithm.update import Learner
    from ppo.model.agent import Agent

    spaces = (vector.single_observation_space, vector.env_action_space)
    agent, collector = Agent(config, *spaces), LocalCollector(config, vector, {"": spaces})
    collector.use([agent])
    envs, learner = collector.envs, Learner(config, agent)
    collector.begin(0)
    learner.observe(*collector.collect(0, 0).collected)
    space = vector.single_action_space
    space.seed(0)
    actions = np.array(
        [[vector.env_action_space.sample() for _ in range(config.num_envs)] for _ in range(config.num_steps)],
        space.dtype,
    )
    in_graph = tf.constant(actions)

    def step() -> None:
        for t, batch in enumerate(actions):
            vector.step_slot(t + 1, batch)

    @tf.function(autograph=False)
    def graph() -> Any:
        def body(t: tf.Tensor, _: Any) -> Any:
            return t + 1, envs.step(in_graph[t]).observations

        tf.while_loop(lambda t, _: t < config.num_steps, body, (0, envs.observations()), parallel_iterations=1)
        return envs.rollout()

    (collected,) = collector.collect(1, 0).collected
    scheduled = tf.constant(config.learning_rate), tf.constant(config.gamma)
    more = dataclasses.replace(config, epochs=2 * config.epochs)
    orders = [tf.constant(shuffled(c, 0)) for c in (config, more)]
    double = Learner(more, agent)
    alone, envs_row = _envs_alone(config, actions, in_cpp=vector.num_workers == 0)
    calls = {
        "envs": alone,
        "vector env": step,
        "graph": graph,
        "collect": lambda: collector.collect(1, 0),
        "update": lambda: learner.update_in_graph(collected, *scheduled, orders[0])["kl"].numpy(),
        "update, twice the epochs": lambda: double.update_in_graph(collected, *scheduled, orders[1])["kl"].numpy(),
    }
    return calls, envs_row


def _envs_alone(config: ppo.Config, actions: np.ndarray, *, in_cpp: bool) -> tuple[Call, str]:
    if in_cpp:
        return next(physics(config.env, config.num_envs, actions, num_skipped=3)), "physics"
    cores = vecenv.available_cores()
    env, of_one = gym.make(config.env), actions.reshape(-1, *actions.shape[2:])[::cores]
    env.reset(seed=0)

    def step() -> None:
        for action in of_one:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return step, f"envs, on {cores} cores"


if __name__ == "__main__":
    tyro.cli(budget)
