"""How many seconds of training does a good policy take? `python -m benchmarks.speedrun` measures the leaderboard.

The leaderboard is in docs/results.md.

Unit: seconds of training until an evaluation exceeds a given return. Training time starts at the first step, includes
ppo's tracing and compilation, and excludes evaluations. Start-up is reported separately: it is the time from the start
of the process to the first step, which is mainly spent on imports.
Not measured: the influence of settings. Every rival uses its own published settings.

ppo uses its defaults. SB3 uses the settings of rl-baselines3-zoo for the v3 tasks (hyperparams/ppo.yml and sac.yml),
with one env and one thread of torch. Each run has its own process, and only one run is active at a time. Every 10,000
env-steps, the deterministic policy plays 10 episodes in separate envs. A run ends at the first evaluation that exceeds
all returns, at the first evaluation after `--limit` seconds, or after a million env-steps.
"""

from __future__ import annotations

import datetime
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

from benchmarks.machine import commit, load_tensorflow, machine

EPISODES, INTERVAL, ENV_STEPS = 10, 10_000, 1_000_000


@dataclass(frozen=True)
class Task:
    """The returns that a trainer must exceed on an env.

    Attributes:
        env: The id of the env, also in `ZOO`.
        returns: The returns.
    """

    env: str
    returns: tuple[int, ...]


Name = Literal["cheetah", "walker"]
TASKS: dict[Name, Task] = {
    "cheetah": Task("HalfCheetah-v5", (2000, 3000, 5000)),
    "walker": Task("Walker2d-v5", (2000,)),
}

ZOO: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": {
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
    "Walker2d-v5": {
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
"""The settings of PPO that differ between the tasks; `sb3_ppo` sets the common ones."""


class Reached(NamedTuple):
    """The first evaluation that exceeded a return."""

    env_steps: int
    seconds: float  # of training


@dataclass
class Progress:
    """Records evaluations until all returns are exceeded or the time limit has passed."""

    returns: tuple[int, ...]
    limit_s: float = math.inf  # of training
    begin_s: float = 0.0  # when training began, in time.time()
    evaluation_s: float = 0.0  # spent on evaluations

    def __post_init__(self) -> None:
        self.reached: dict[int, Reached] = {}

    def take(self, env_steps: int, seconds: float, score: float) -> bool:
        """Records an evaluation and returns whether it is the last one.

        Args:
            env_steps: Env-steps of training so far.
            seconds: Time since training began, earlier evaluations included.
            score: Mean return.
        """
        for wanted in self.returns:
            if score > wanted:
                self.reached.setdefault(wanted, Reached(env_steps, seconds - self.evaluation_s))
        print(f"  {env_steps:>9,} {seconds - self.evaluation_s:7.1f} s {score:8.0f}", file=sys.stderr, flush=True)
        return len(self.reached) == len(self.returns) or seconds - self.evaluation_s > self.limit_s


def ours(task: Task, seed: int, limit_s: float) -> Progress:
    """Trains with the defaults until all returns are exceeded, a million steps are done, or the limit has passed."""
    import ppo

    config = ppo.Config(
        env=task.env,
        total_steps=ENV_STEPS,
        seed=seed,
        eval_interval=INTERVAL,
        eval_episodes=EPISODES,
        checkpoint_interval=10**9,
    )
    load_tensorflow()
    progress = Progress(task.returns, limit_s)

    class Watch(ppo.Callback):
        def on_start(self, config: ppo.Config, env_steps: int) -> None:
            progress.begin_s = time.time()

        def on_update(self, report: dict[str, Any]) -> None:
            if "eval_return_mean" in report:  # `wall_s` is read before the evaluation
                last = progress.take(report["env_steps"], report["wall_s"], report["eval_return_mean"])
                progress.evaluation_s += time.time() - progress.begin_s - report["wall_s"]
                if last:
                    raise ppo.StopTraining

    with tempfile.TemporaryDirectory() as folder:
        ppo.train(config, callbacks=Watch(), logdir=folder, progress=False)
    return progress


def sb3_ppo(task: Task, seed: int, limit_s: float) -> Progress:
    """Trains SB3's PPO until all returns are exceeded, a million steps are done, or the limit has passed."""
    import torch
    from stable_baselines3 import PPO

    policy = {
        "log_std_init": -2,
        "ortho_init": False,
        "activation_fn": torch.nn.ReLU,
        "net_arch": {"pi": [256, 256], "vf": [256, 256]},
    }
    tuned = {"n_steps": 512, "policy_kwargs": policy, **ZOO[task.env]}
    return _sb3(PPO, task, seed, limit_s, normalize=True, **tuned)


def sb3_sac(task: Task, seed: int, limit_s: float) -> Progress:
    """Trains SB3's SAC until all returns are exceeded, a million steps are done, or the limit has passed."""
    from stable_baselines3 import SAC

    return _sb3(SAC, task, seed, limit_s, normalize=False, learning_starts=10_000)


def _sb3(algorithm: Any, task: Task, seed: int, limit_s: float, *, normalize: bool, **settings: Any) -> Progress:
    import gymnasium as gym
    import torch
    from gymnasium.vector import AutoresetMode
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    import vecenv

    torch.set_num_threads(1)  # for PPO, two threads are slower, see bench_ppo.py
    progress, env = Progress(task.returns, limit_s), task.env
    envs = DummyVecEnv([lambda: gym.make(env)])
    train = VecNormalize(envs, gamma=settings["gamma"]) if normalize else envs
    test = vecenv.make(env, num_envs=EPISODES, vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP})

    def score() -> float:
        observations, _ = test.reset(seed=seed)
        going, total = [True] * EPISODES, 0.0
        while any(going):
            seen = train.normalize_obs(observations) if normalize else observations
            actions, _ = model.predict(seen, deterministic=True)
            observations, rewards, terminated, truncated, _ = test.step(actions)
            total += sum(float(r) for r, counts in zip(rewards, going, strict=True) if counts)
            going = [g and not e for g, e in zip(going, terminated | truncated, strict=True)]
        return total / EPISODES

    class Watch(BaseCallback):
        going, next_at = True, INTERVAL

        def _on_training_start(self) -> None:
            progress.begin_s = time.time()

        def _on_step(self) -> bool:
            return self.going

        def _on_rollout_start(self) -> None:  # called after the previous update
            if self.num_timesteps >= self.next_at:
                start = time.time()
                self.going = not progress.take(self.num_timesteps, start - progress.begin_s, score())
                progress.evaluation_s += time.time() - start
                self.next_at += INTERVAL

    model = algorithm("MlpPolicy", train, seed=seed, device="cpu", **settings)
    model.learn(ENV_STEPS, callback=Watch())
    return progress


RIVALS = {"ppo": ours, "SB3-PPO": sb3_ppo, "SB3-SAC": sb3_sac}


def one(rival: str, task: str, seed: int, limit_s: float) -> dict[str, Any]:
    """Runs one rival in a new process and returns its start-up in seconds and when it exceeded each return."""
    start = time.time()
    words = [sys.executable, "-m", "benchmarks.speedrun", "--rivals", rival, "--tasks", task]
    words += ["--only-seed", str(seed), "--limit", str(limit_s)]
    process = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    result = json.loads(process.stdout.splitlines()[-1])
    return {**result, "startup_s": result["begin_s"] - start}


def main(
    tasks: tuple[Name, ...] = ("cheetah", "walker"),
    rivals: tuple[Literal["ppo", "SB3-PPO", "SB3-SAC"], ...] = ("ppo",),
    seeds: tuple[int, ...] = (100, 101, 102, 103, 104),
    limit: float = math.inf,
    only_seed: int | None = None,
) -> None:
    """Prints the seconds of training that each trainer takes to exceed the returns, in rows of the leaderboard.

    Args:
        tasks: Names of `TASKS`.
        rivals: Trainers to compare.
        seeds: The seeds.
        limit: Seconds of training after which a run ends.
        only_seed: Run only this seed, in this process, and print the result as JSON.
    """
    if only_seed is not None:
        (rival,), (task,) = rivals, tasks
        progress = RIVALS[rival](TASKS[task], only_seed, limit)
        print(json.dumps({"begin_s": progress.begin_s, "reached": progress.reached}))
        return
    origin = f"{datetime.date.today()} | {commit() or 'unknown'}"  # before the runs, which take long
    print(json.dumps(machine()))
    print(
        "| date | commit | task | return | trainer | seconds of each seed | median | env-steps, median | start-up, s |"
    )
    print("|---|---|---|---:|---|---|---:|---:|---:|")
    for task in tasks:
        runs: dict[str, list[dict[str, Any]]] = {rival: [] for rival in rivals}
        for seed in seeds:
            for rival in rivals:
                print(f"{rival} {task} {seed}", file=sys.stderr)
                runs[rival].append(one(rival, task, seed, limit))
        for wanted in TASKS[task].returns:
            for rival in rivals:
                print(_row(origin, task, wanted, rival, runs[rival], limit), flush=True)


def _row(origin: str, task: str, wanted: int, rival: str, runs: list[dict[str, Any]], limit_s: float) -> str:
    never, so_long = (math.inf, math.inf), "never" if limit_s == math.inf else f"> {limit_s:.0f}"
    steps, seconds = zip(*[run["reached"].get(str(wanted), never) for run in runs], strict=True)
    each = ", ".join(_number(s, so_long) for s in seconds)
    startup = statistics.median(run["startup_s"] for run in runs)
    median, count = _number(statistics.median(seconds), so_long), statistics.median(steps)
    steps_taken = "" if count == math.inf else f"{count:,.0f}"
    return f"| {origin} | {task} | {wanted:,} | {rival} | {each} | {median} | {steps_taken} | {startup:.1f} |"


def _number(seconds: float, never: str) -> str:
    return never if seconds == math.inf else f"{seconds:.1f}"


if __name__ == "__main__":
    tyro.cli(main)
