"""After how many seconds of training is a policy good? `python -m benchmarks.time_to_return`, beside SB3.

Ours with its presets, SB3 with the settings of its zoo (rl-baselines3-zoo, hyperparams/ppo.yml, the v3 tasks), which
take one env. Each run is a process of its own, with nothing beside it; for each seed one after the other. Every 10,000
env-steps 10 episodes are played with the deterministic policy, on envs of their own; a run ends at the first
evaluation above all returns that are asked for, or at the first after `--limit` seconds.

Seconds of training begin with the first step, and leave the evaluations away. Ours hold tracing and compilation.
Start-up is all before that, from the start of the process on: imports above all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import tyro

from benchmarks.conftest import machine

RETURNS = {"cheetah": (2000, 3000), "hopper": (2000,), "walker": (2000,)}
"""Presets, each with the returns that are waited for."""

ZOO: dict[str, dict[str, Any]] = {
    "cheetah": {
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
    },
    "hopper": {
        "batch_size": 32,
        "gamma": 0.999,
        "learning_rate": 9.80828e-05,
        "ent_coef": 0.00229519,
        "clip_range": 0.2,
        "n_epochs": 5,
        "gae_lambda": 0.99,
        "max_grad_norm": 0.7,
        "vf_coef": 0.835671,
    },
    "walker": {
        "batch_size": 32,
        "gamma": 0.99,
        "learning_rate": 5.05041e-05,
        "ent_coef": 0.000585045,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.95,
        "max_grad_norm": 1.0,
        "vf_coef": 0.871923,
    },
}
"""What differs between the tasks; see `sb3` for what does not."""

INTERVAL, EPISODES = 10_000, 10


class Reached(NamedTuple):
    """The first evaluation above a return."""

    env_steps: int
    seconds: float  # of training


@dataclass
class Progress:
    """Takes evaluations, and says when all returns are reached, or enough time has passed."""

    returns: tuple[int, ...]
    limit_s: float = math.inf  # of training
    begin_s: float = 0.0  # when training began, in time.time()
    away_s: float = 0.0  # spent on evaluations

    def __post_init__(self) -> None:
        self.reached: dict[int, Reached] = {}

    def take(self, env_steps: int, seconds: float, score: float) -> bool:
        """Takes an evaluation after so many seconds, others included; returns whether it is the last one."""
        for wanted in self.returns:
            if score > wanted:
                self.reached.setdefault(wanted, Reached(env_steps, seconds - self.away_s))
        print(f"  {env_steps:>9,} {seconds - self.away_s:7.1f} s {score:8.0f}", file=sys.stderr, flush=True)
        return len(self.reached) == len(self.returns) or seconds - self.away_s > self.limit_s


def ours(task: str, seed: int, limit_s: float, **changed: Any) -> Progress:
    """Trains with a preset until its returns are reached, or it is at its end, or the time is."""
    from ppo.cli import load_tensorflow

    load_tensorflow()
    import ppo

    progress = Progress(RETURNS[task], limit_s)

    class Watch(ppo.Callback):
        def on_start(self, config: ppo.Config, env_steps: int) -> None:
            progress.begin_s = time.time()

        def on_update(self, report: dict[str, Any]) -> None:
            if "eval_return_mean" in report:  # an update's `wall_s` is from before its evaluation
                last = progress.take(report["env_steps"], report["wall_s"], report["eval_return_mean"])
                progress.away_s += time.time() - progress.begin_s - report["wall_s"]
                if last:
                    raise ppo.StopTraining

    config = dataclasses.replace(
        ppo.preset(task), seed=seed, eval_interval=INTERVAL, eval_episodes=EPISODES, checkpoint_interval=10**9
    )
    with tempfile.TemporaryDirectory() as folder:
        ppo.train(dataclasses.replace(config, **changed), callbacks=Watch(), logdir=folder)
    return progress


def sb3(task: str, seed: int, limit_s: float) -> Progress:
    """Trains with the settings of SB3's zoo until the returns are reached, or the time or a million steps are over."""
    import gymnasium as gym
    import torch
    from gymnasium.vector import AutoresetMode
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    import ppo
    import vecenv

    torch.set_num_threads(1)  # two are slower, see bench_ppo
    progress, env, settings = Progress(RETURNS[task], limit_s), ppo.preset(task).env, ZOO[task]
    train = VecNormalize(DummyVecEnv([lambda: gym.make(env)]), gamma=settings["gamma"])
    test = vecenv.make(env, num_envs=EPISODES, vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP})

    def score() -> float:
        observations, _ = test.reset(seed=seed)
        going, total = [True] * EPISODES, 0.0
        while any(going):
            actions, _ = model.predict(train.normalize_obs(observations), deterministic=True)
            observations, rewards, terminated, truncated, _ = test.step(actions)
            total += sum(float(r) for r, counts in zip(rewards, going, strict=True) if counts)
            going = [g and not e for g, e in zip(going, terminated | truncated, strict=True)]
        return total / EPISODES

    class Watch(BaseCallback):
        going = True

        def _on_training_start(self) -> None:
            progress.begin_s = time.time()

        def _on_step(self) -> bool:
            return self.going

        def _on_rollout_start(self) -> None:  # which is after the update before
            if self.num_timesteps // INTERVAL > max(0, self.num_timesteps - 512) // INTERVAL:
                start = time.time()
                self.going = not progress.take(self.num_timesteps, start - progress.begin_s, score())
                progress.away_s += time.time() - start

    policy = {
        "log_std_init": -2,
        "ortho_init": False,
        "activation_fn": torch.nn.ReLU,
        "net_arch": {"pi": [256, 256], "vf": [256, 256]},
    }
    model = PPO("MlpPolicy", train, n_steps=512, policy_kwargs=policy, seed=seed, device="cpu", **settings)
    model.learn(1_000_000, callback=Watch())
    return progress


RIVALS = {"ppo": ours, "SB3": sb3}


def one(rival: str, task: str, seed: int, limit_s: float) -> dict[str, Any]:
    """Runs one of them in a process of its own; returns its start-up in seconds, and what it reached, by return."""
    start = time.time()
    words = [sys.executable, "-m", "benchmarks.time_to_return", "--rivals", rival, "--tasks", task]
    words += ["--only-seed", str(seed), "--limit", str(limit_s)]
    process = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    result = json.loads(process.stdout.splitlines()[-1])
    return {"startup_s": result["begin_s"] - start, "reached": result["reached"]}


def main(
    tasks: tuple[Literal["cheetah", "hopper", "walker"], ...] = ("cheetah", "hopper", "walker"),
    rivals: tuple[Literal["ppo", "SB3"], ...] = ("ppo", "SB3"),
    seeds: int = 5,
    limit: float = math.inf,
    only_seed: int | None = None,
) -> None:
    """Prints a table.

    Args:
        tasks: Presets.
        rivals: Who trains.
        seeds: How many, from 0 on.
        limit: Seconds of training after which a run is given up.
        only_seed: Run only this one, here, and print what it reached as JSON.
    """
    if only_seed is not None:
        (rival,), (task,) = rivals, tasks
        progress = RIVALS[rival](task, only_seed, limit)
        print(json.dumps({"begin_s": progress.begin_s, "reached": progress.reached}))
        return
    print(json.dumps(machine()))
    print("| task | return | | seconds of each seed | median | env-steps, median | start-up, s |")
    print("|---|---:|---|---|---:|---:|---:|")
    for task in tasks:
        runs: dict[str, list[dict[str, Any]]] = {rival: [] for rival in rivals}
        for seed in range(seeds):
            for rival in rivals:
                print(f"{rival} {task} {seed}", file=sys.stderr)
                runs[rival].append(one(rival, task, seed, limit))
        for wanted in RETURNS[task]:
            for rival in rivals:
                print(_row(task, wanted, rival, runs[rival], limit), flush=True)


def _row(task: str, wanted: int, rival: str, runs: list[dict[str, Any]], limit_s: float) -> str:
    never, so_long = (math.inf, math.inf), "never" if limit_s == math.inf else f"> {limit_s:.0f}"
    steps, seconds = zip(*[run["reached"].get(str(wanted), never) for run in runs], strict=True)
    each = ", ".join(_number(s, so_long) for s in seconds)
    startup = statistics.median(run["startup_s"] for run in runs)
    median, count = _number(statistics.median(seconds), so_long), statistics.median(steps)
    steps_taken = "" if count == math.inf else f"{count:,.0f}"
    return f"| {task} | {wanted:,} | {rival} | {each} | {median} | {steps_taken} | {startup:.1f} |"


def _number(seconds: float, never: str) -> str:
    return never if seconds == math.inf else f"{seconds:.1f}"


if __name__ == "__main__":
    tyro.cli(main)
