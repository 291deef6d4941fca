"""Where does the time of PPO go? `python -m benchmarks.budget --env HalfCheetah-v5`, a table of shares.

Each row is the difference between two things that are timed, the second of which does all of the first and one thing
more: the envs alone; the vector env; its steps in a graph; the same with the policy; a whole iteration. All of them
take turns in one process, and each figure is a median over the turns.

- physics / envs: of a MuJoCo task stepped in C++, `mujoco.batch` from the states of a run, on a thread per core; of
  other envs, one env in this process times the envs of a worker, so as if workers cost nothing.
- vector env: all else of a step: numpy around the physics, the rows; with workers, pipes, waking up and waiting.
- graph: TensorFlow calls a Python function that steps the envs, and takes what it returns.
- policy: what it adds to the loop: normalising, networks, sampling.
- gradient steps: an update with twice the epochs against one with the epochs asked for.
- advantages and the rest of the update: what remains of it: log-probabilities, values, advantages, statistics.
- checks and reports: the rest of an iteration.

Actions of the first three rows are random, those of the others the untrained policy's. All envs are stepped together,
also where a run would step them in halves, as things that happen at the same time have no shares of the whole.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import tyro

from benchmarks.bench_mujoco import physics
from ppo.cli import load_tensorflow
from vecenv.workers.processes import available_cores

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
        env: Its id.
        num_envs: N.
        num_steps: T.
        minibatch_size: Samples of a gradient step.
        epochs: Of an update.
        backend: "auto" or "python".
        turns: Over which medians are taken.
    """
    load_tensorflow()
    from ppo.config import Config

    config = Config(env=env, num_envs=num_envs, num_steps=num_steps, minibatch_size=minibatch_size, epochs=epochs,
                    backend=backend, recompute_advantages=False, total_steps=10**9, halves=False)  # type: ignore[arg-type]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        calls, close, core = _calls(config, Path(folder))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(turns + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if turn:  # the first one warms up
                    times[name].append(time.perf_counter() - start)
        close()
    _print(config, {name: statistics.median(each) for name, each in times.items()}, core)


def _print(config: Any, times: dict[str, float], core: str) -> None:
    update, double = times["update"], times["update, twice the epochs"]
    gradients = max(0.0, double - update)
    rows = {
        core: times["envs"],
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


def _calls(config: Any, folder: Path) -> tuple[dict[str, Call], Call, str]:
    """Returns what is timed, by name; what closes it; and what the first of them is."""
    import tensorflow as tf

    from ppo.algorithm.update import Learner, shuffled
    from ppo.envs import training_envs
    from ppo.run.callbacks import Callback
    from ppo.run.folder import Run
    from ppo.trainer import Trainer

    vector: Any = training_envs(config, None)
    trainer = Trainer(config, Run.create(folder, "budget", config), vector, Callback())
    trainer.begin()
    trainer.iterate()
    envs, size = trainer._envs, (config.num_steps, config.num_envs)
    space = vector.single_action_space
    space.seed(0)
    actions = np.array(
        [[vector.env_action_space.sample() for _ in range(size[1])] for _ in range(size[0])], space.dtype
    )
    in_graph = tf.constant(actions)

    def step() -> None:
        for t, batch in enumerate(actions):
            vector.step_slot(t + 1, vector.put_actions(batch, t + 1))

    @tf.function(autograph=False)
    def graph() -> Any:
        def body(t: tf.Tensor, _: Any) -> Any:
            return t + 1, envs.step(in_graph[t]).observations

        tf.while_loop(lambda t, _: t < config.num_steps, body, (0, envs.observations()), parallel_iterations=1)
        return envs.rollout()

    collected = trainer._collect(1)
    rates = tf.constant(config.learning_rate), tf.constant(config.clip_range)
    more = dataclasses.replace(config, epochs=2 * config.epochs)
    orders = [tf.constant(shuffled(c, 0)) for c in (config, more)]
    double = Learner(more, trainer._agent, envs)
    calls = {
        "vector env": step,
        "graph": graph,
        "collect": lambda: trainer._collect(1),
        "update": lambda: trainer._learner.update(collected, *rates, orders[0])["kl"].numpy(),
        "update, twice the epochs": lambda: double.update(collected, *rates, orders[1])["kl"].numpy(),
        "iterate": trainer.iterate,
    }
    alone, core = _envs_alone(config, actions, local=type(vector._pool).__name__ == "LocalPool")
    return {"envs": alone, **calls}, vector.close, core


def _envs_alone(config: Any, actions: np.ndarray, *, local: bool) -> tuple[Call, str]:
    if local:
        return next(physics(config.env, config.num_envs, actions, left_away=3)), "physics"
    env, of_one = gym.make(config.env), actions.reshape(-1, *actions.shape[2:])[:: available_cores()]
    env.reset(seed=0)

    def step() -> None:
        for action in of_one:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()

    return step, f"envs, on {available_cores()} cores"


if __name__ == "__main__":
    tyro.cli(budget)
