"""Which environments of other packages work? `python -m benchmarks.environments` measures them and prints a table.

Each package is installed into its own virtual environment, together with this project, and one env takes ten steps.
The columns are:

- bit-equal: four envs in two worker processes (`vecenv.make`) return the same observations, rewards and episode ends as
  Gymnasium's SyncVectorEnv, bit for bit, with random actions. The number counts the steps of each env. A package's own
  vector env is compared with `gymnasium.make_vec` instead. Where a process can hold only one env, each env has its own
  worker, and the reference is Gymnasium's AsyncVectorEnv.
- env-steps/s: speed of eight envs with random actions, in `vecenv.AsyncVectorEnv` and in Gymnasium's AsyncVectorEnv.
  The two alternate every second, and each number is the median of five seconds. "hangs" means that Gymnasium's
  AsyncVectorEnv was not constructed within a minute.

The JSON files also have the number of rules of `vecenv.testing` that apply and hold, the env-steps of `ppo train`,
which stops after `--train-steps` or `--time-limit` seconds, and the mean return of the deterministic policy over 10
episodes of `ppo evaluate`, before and after training. The policy before training is that of a run with one small
update, whose learning rate of 1e-30 is too low to change it.

Each stage runs in processes of its own, so a crash or a hang fails only that stage. Each row is a JSON file in `--out`,
from which `--table-only` prints the table again. A failure is the package's fault if Gymnasium alone fails in the same
way, and of unknown origin if the process of a stage crashes or hangs. Not measured: how well settings other than the
defaults learn.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import queue
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

ROOT = Path(__file__).parents[1]
HUNG_S = 600.0  # after which a stage counts as hung and is killed
Stage = Literal["single", "equal", "conformance", "train", "speed"]
Outcome = dict[str, Any]
"""`ok`, and either the numbers of a stage or `error` and `blame`, which is "package", "ours" or "unknown"."""


@dataclass(frozen=True)
class Row:
    """An env of a package.

    Attributes:
        name: Name of the row and of its JSON file.
        requires: What pip installs besides this project. The package comes first.
        flags: Flags of `ppo train`.
        variables: Environment variables that the package needs on a machine without a display.
        vector: Whether `vecenv.make` uses the package's vector env. It is then compared with `gymnasium.make_vec`.
        alone: Whether a process can hold only one env. Each env then has its own worker, and Gymnasium's AsyncVectorEnv
            replaces SyncVectorEnv as the reference.
        fast: Whether the row takes less than a minute once its package is installed.
    """

    name: str
    requires: tuple[str, ...]
    flags: str
    variables: tuple[str, ...] = ()
    vector: bool = False
    alone: bool = False
    fast: bool = False

    @property
    def command(self) -> str:
        """Flags of `ppo train`, preceded by the environment variables."""
        return " ".join((*self.variables, self.flags))

    @property
    def package(self) -> str:
        """Name of the package, without extras or version."""
        return re.split(r"[\[<>=! ]", self.requires[0])[0]


BOX2D = ("gymnasium[box2d]",)
ROBOTICS = "gymnasium-robotics"
ROWS = (
    Row("lunar-lander", BOX2D, "--env LunarLander-v3", fast=True),
    Row("bipedal-walker", BOX2D, "--env BipedalWalker-v3"),
    Row("car-racing", BOX2D, "--env CarRacing-v3"),
    Row(
        "minigrid",
        ("minigrid",),
        "--env minigrid:MiniGrid-DoorKey-5x5-v0 "
        """--wrappers 'FilterObservation:{"filter_keys": ["direction", "image"]}'""",
        fast=True,
    ),
    Row("highway", ("highway-env",), "--env highway_env:highway-fast-v0"),
    Row("ale", ("ale-py",), "--env ale_py:ALE/Pong-v5", vector=True),
    # dm_control 1.0.50 fails to load a task with mujoco 4.0
    Row("dm-control", ("dm-control", "shimmy[dm-control]", "mujoco<4"), "--env shimmy:dm_control/cartpole-balance-v0"),
    # Fetch tasks of gymnasium-robotics 1.4.2 raise an AssertionError with mujoco 3.12 or newer
    Row("fetch-reach", (ROBOTICS, "mujoco<3.12"), "--env gymnasium_robotics:FetchReach-v4"),
    Row("point-maze", (ROBOTICS, "mujoco<3.12"), "--env gymnasium_robotics:PointMaze_UMaze-v3"),
    # metaworld imports packaging without requiring it
    Row("metaworld", ("metaworld", "packaging"), "--env metaworld:Meta-World/MT1 --env-kwargs env_name=reach-v3"),
    Row("vizdoom", ("vizdoom",), "--env vizdoom.gymnasium_wrapper:VizdoomBasic-v1 --num-envs 16 --num-steps 128"),
    Row("pybullet", ("pybullet-envs-gymnasium",), "--env pybullet_envs_gymnasium:HopperBulletEnv-v0"),
    Row("popgym", ("popgym",), "--env popgym:popgym-RepeatPreviousEasy-v0", fast=True),
    Row("flappy-bird", ("flappy-bird-gymnasium",), "--env flappy_bird_gymnasium:FlappyBird-v0"),
    Row("pusht", ("gym-pusht",), "--env gym_pusht:gym_pusht/PushT-v0 --action-transform tanh"),
    Row(
        "aloha",
        ("gym-aloha",),
        "--env gym_aloha:gym_aloha/AlohaInsertion-v0 --num-envs 4 --num-steps 32",
        ("MUJOCO_GL=egl",),
    ),
    Row(
        "mo-gymnasium",
        ("mo-gymnasium",),
        "--env mo_gymnasium:deep-sea-treasure-v0 --wrappers mo_gymnasium.wrappers:LinearReward",
        fast=True,
    ),
    Row("crafter", ("crafter",), "--env benchmarks.environments:crafter --num-envs 16 --num-steps 128"),
    # robosuite 1.5.2 raises errors on construction with mujoco 3.10 or newer
    Row(
        "robosuite",
        ("robosuite", "mujoco<3.10"),
        "--env benchmarks.environments:robosuite --num-envs 16 --num-steps 128",
    ),
    # stable-retro allows one emulator per process
    Row(
        "stable-retro",
        ("stable-retro",),
        "--env stable_retro:make --env-kwargs game=Airstriker-Genesis-v0 max_episode_steps=1000 "
        "--num-envs 4 --num-workers 4 --num-steps 128",
        ("PYGLET_HEADLESS=1",),
        alone=True,
    ),
    Row("panda-gym", ("panda-gym",), "--env panda_gym:PandaReach-v3"),
    Row("anytrading", ("gym-anytrading",), "--env gym_anytrading:stocks-v0"),
    Row("pyflyt", ("PyFlyt",), "--env PyFlyt.gym_envs:PyFlyt/QuadX-Hover-v4"),
    Row(
        "miniworld",
        ("miniworld",),
        "--env miniworld:MiniWorld-Hallway-v0 --num-envs 16 --num-steps 128",
        ("PYGLET_HEADLESS=1",),
    ),
    Row("tetris", ("tetris-gymnasium",), "--env tetris_gymnasium.envs:tetris_gymnasium/Tetris"),
    Row("safety-gymnasium", ("safety-gymnasium",), "--env safety_gymnasium:SafetyPointGoal1-v0"),
)


def crafter() -> Any:
    """Returns crafter's env, which has the API of OpenAI Gym 0.21, as a Gymnasium env."""
    import crafter
    import gymnasium as gym
    import numpy as np

    class Crafter(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        action_space = gym.spaces.Discrete(17)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
            super().reset(seed=seed)
            self._env = crafter.Env(seed=int(self.np_random.integers(2**31)))
            return self._env.reset(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            observation, reward, ended, info = self._env.step(action)
            return observation, float(reward), ended and info["discount"] == 0, ended and info["discount"] > 0, {}

    return Crafter()


def robosuite() -> Any:
    """Returns robosuite's Lift task with a Panda arm and without cameras, in robosuite's wrapper for Gymnasium."""
    import robosuite
    from robosuite.wrappers import GymWrapper

    class Wrapper(GymWrapper):
        unwrapped = property(lambda self: self)  # gymnasium.make sets its spec and reads the wrapper's

    off = dict.fromkeys(("has_renderer", "has_offscreen_renderer", "use_camera_obs"), False)
    env = Wrapper(robosuite.make("Lift", robots="Panda", reward_shaping=True, horizon=200, **off))
    env.metadata = {"render_modes": []}  # it is None, but Gymnasium's SyncVectorEnv needs a dict
    return env


class Failed(Exception):
    """A stage has failed. `blame` is "package" or "ours"."""

    def __init__(self, error: str, blame: str):
        super().__init__(error)
        self.blame = blame


@contextlib.contextmanager
def gymnasium_alone() -> Iterator[None]:
    """Blames the package for errors of code that runs its envs without this project's vector envs."""
    from vecenv.testing import RuleBroken

    try:
        yield
    except (Failed, RuleBroken):
        raise
    except Exception as error:
        raise Failed(f"without this project: {_one_line(error)}", "package") from error


# Stages. They run in the row's virtual environment. Only they and their helpers import this project.


def versions(row: Row) -> Outcome:
    """Returns the versions of Python, the package, Gymnasium, NumPy and MuJoCo."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in (row.package, "gymnasium", "numpy", "mujoco"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return {"versions": {"python": sys.version.split()[0], **found}}


def single(row: Row) -> Outcome:
    """Steps one env without this project's vector envs."""
    _, _, make_one = _makers(row)
    try:
        env = make_one()
    except Exception as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        ours = raised_in.is_relative_to(ROOT / "vecenv")
        raise Failed(_one_line(error), "ours" if ours else "package") from error
    with contextlib.closing(env), gymnasium_alone():
        _take_steps(env, 10)
    return {}


def equal(row: Row, steps: int, time_limit: float) -> Outcome:
    """Compares `vecenv.make` with Gymnasium for at most `steps` steps and half of the time limit."""
    make, reference, _ = _makers(row)
    with gymnasium_alone():
        envs = reference(4)
    taken, difference = _compare(envs, make(num_envs=4), steps, time_limit / 2)
    if difference is None:
        return {"steps": taken}
    at, other = _compare(reference(4), reference(4), steps, time_limit / 2)
    if other is not None:
        words = f"{other} of two of Gymnasium's vector envs with the same seeds differ at step {at}"
        raise Failed(f"nondeterministic: {words}", "package")
    raise Failed(f"{difference} differ from those of Gymnasium's vector env at step {taken}", "ours")


def conformance(row: Row) -> Outcome:
    """Checks the rules of `vecenv.testing`. A failure of Gymnasium's vector env is the package's fault.

    A rule takes at most 1,000 steps, or as many as one env takes in five seconds. If no episode ends within these
    steps, the rules about the end of an episode do not apply.
    """
    from vecenv.testing import RuleBroken, check_vector_env

    make, reference, make_one = _makers(row)
    with contextlib.closing(make_one()) as env, gymnasium_alone():
        begin = time.perf_counter()
        _take_steps(env, 10)
        most = min(1000, 10 + round(10 * 5 / (time.perf_counter() - begin)))
    try:
        return {"rules": len(check_vector_env(lambda: make(num_envs=3), max_steps=most))}
    except Exception as error:
        failure = error
    theirs = ""
    try:
        with gymnasium_alone():
            check_vector_env(lambda: reference(3), max_steps=most)
    except RuleBroken as error:
        theirs = str(error)
    if not isinstance(failure, RuleBroken):
        raise failure
    broken = re.findall(r"^- (.*)\n  (.*)", str(failure), re.MULTILINE)
    ours = [(rule, fault) for rule, fault in broken if rule not in theirs]
    rule, fault = (ours or broken)[0]
    raise Failed(f'"{rule}" {fault}', "ours" if ours else "package")


def speed(row: Row, turns: int = 5) -> Outcome:
    """Steps eight envs in turns of a second and returns the median env-steps per second of each vector env."""
    import gymnasium as gym

    import vecenv

    _, _, make_one = _makers(row)
    with gymnasium_alone():
        theirs = _in_time(60, lambda: gym.vector.AsyncVectorEnv([make_one] * 8))
    ours = vecenv.AsyncVectorEnv([make_one] * 8, num_workers=8 if row.alone else None)
    rivals = {"vecenv": ours, **({} if theirs is None else {"gymnasium": theirs})}
    actions = [rivals["vecenv"].action_space.sample() for _ in range(16)]
    rates: dict[str, list[float]] = {name: [] for name in rivals}
    for envs in rivals.values():
        envs.reset(seed=0)
        envs.step(actions[0])
    for _, (name, envs) in itertools.product(range(turns), rivals.items()):
        start, count = time.perf_counter(), 0
        while (seconds := time.perf_counter() - start) < 1:
            envs.step(actions[count % 16])
            count += 1
        rates[name].append(8 * count / seconds)
    for envs in rivals.values():
        envs.close()
    return {"gymnasium": None, **{name: statistics.median(of_turns) for name, of_turns in rates.items()}}


def _in_time(seconds: float, make: Callable[[], Any]) -> Any:
    """Returns `make()`, or None if it does not return within `seconds`."""
    made: queue.Queue[Any] = queue.Queue()

    def run() -> None:
        try:
            made.put((make(), None))
        except BaseException as error:
            made.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = made.get(timeout=seconds)
    except queue.Empty:
        return None
    if error is not None:
        raise error
    return result


def _makers(row: Row) -> tuple[Callable[..., Any], Callable[[int], Any], Callable[[], Any]]:
    """Returns functions that make vecenv's vector env, Gymnasium's vector env, and a single env of a row.

    vecenv's vector env has two workers, or one per env if a process can hold only one env.
    """
    import gymnasium as gym

    import vecenv
    from ppo.cli.train import parse
    from ppo.envs import env_options

    _, config = parse(shlex.split(row.flags))
    options = env_options(config)
    make_one = functools.partial(vecenv.make_single, config.env, **options)

    def reference(num_envs: int) -> Any:
        if row.vector:
            return gym.make_vec(config.env, num_envs, **config.env_kwargs)
        kind = gym.vector.AsyncVectorEnv if row.alone else gym.vector.SyncVectorEnv
        return kind([make_one] * num_envs)

    def ours(num_envs: int) -> Any:
        workers = num_envs if row.alone else 2
        return vecenv.make(config.env, num_envs, num_workers=workers, backend=config.backend, **options)

    return ours, reference, make_one


def _take_steps(env: Any, steps: int) -> None:
    env.reset(seed=0)
    for _ in range(steps):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()


def _compare(reference: Any, envs: Any, steps: int, time_limit: float) -> tuple[int, str | None]:
    """Returns the number of steps taken, and what differs at the last one, or None if nothing does."""
    import numpy as np

    end = time.monotonic() + time_limit
    names = ("observations", "rewards", "terminated", "truncated")
    with contextlib.closing(reference), contextlib.closing(envs):
        with gymnasium_alone():
            expected = reference.reset(seed=3)[0]
        if not same(expected, envs.reset(seed=3)[0]):
            return 0, "observations"
        reference.action_space.seed(3)
        for step in range(1, steps + 1):
            actions = reference.action_space.sample()
            with gymnasium_alone():
                observations, rewards, *ends, _ = reference.step(actions)
            expected = (observations, np.asarray(rewards, np.float64), *ends)  # ale-py returns ints
            for name, one, other in zip(names, expected, envs.step(actions)[:4], strict=True):
                if not same(one, other):
                    return step, name
            if time.monotonic() > end:
                return step, None
        return steps, None


def same(one: Any, other: Any) -> bool:
    """Returns whether two batches of any space are equal bit for bit."""
    import numpy as np

    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray) and one.dtype != object:
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and all(map(same, one, other))
    return one == other


def _one_line(error: Exception) -> str:
    from vecenv.errors import in_one_line

    return " ".join(in_one_line(error).split())


def in_this_process(stage: str, name: str, file: str, **options: Any) -> None:
    """Runs a stage of the row `name` and writes its outcome to a file."""
    row = next(row for row in ROWS if row.name == name)
    try:
        outcome = {"ok": True, **globals()[stage](row, **options)}
    except Failed as error:
        outcome = {"ok": False, "error": str(error), "blame": error.blame}
    except Exception as error:
        outcome = {"ok": False, "error": _one_line(error), "blame": "ours"}
    Path(file).write_text(json.dumps(outcome))


# The parent process.


def call(
    words: Sequence[Any], timeout_s: float, stop_s: float | None = None, variables: Iterable[str] = ()
) -> tuple[str, str]:
    """Runs a command in an empty folder, and kills the processes that it leaves behind.

    Args:
        words: The command.
        timeout_s: Seconds after which the command is killed. If it is asked to stop, they count from then.
        stop_s: Seconds after which the command is asked to stop, by SIGTERM.
        variables: Environment variables, as NAME=VALUE.

    Returns:
        The output, and how the command failed: "" if it did not, or if it was asked to stop.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output, tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            list(map(str, words)),
            cwd=folder,  # some packages write files there
            env={**os.environ, "PYTHONPATH": str(ROOT), **dict(item.split("=", 1) for item in variables)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(stop_s or timeout_s)
            if stopped := process.poll() is None and stop_s is not None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout_s)
            code = process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if code is None:
        return text, f"no end after {timeout_s:.0f} s"
    if code == 0 or (stopped and code in (128 + signal.SIGTERM, -signal.SIGTERM)):
        return text, ""
    return text, signal.Signals(-code).name if code < 0 else f"exit code {code}"


def last_error(text: str, how: str) -> str:
    """Returns the line of a command's output that best explains why the command failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error|[\w.]+(Error|Exception|Exit)|WorkerDied)\b", line)]
    conflicts = [line for line in errors if "conflict" in line]
    return (conflicts or errors[-1:] or lines[-1:] or [how])[0] if not how.startswith(("no end", "SIG")) else how


def install(row: Row, folder: Path) -> Outcome:
    """Creates a virtual environment with this project and the row's package."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    text, how = call([*pip, "-e", f"{ROOT}[mujoco,ppo]", *row.requires], 3 * HUNG_S)
    if not how:
        return {"ok": True}
    unbuilt = re.search(r"pip-install-\w+/([\w.-]+)_[0-9a-f]{32}/", text)
    error = f"pip cannot build its requirement {unbuilt[1]}" if unbuilt else last_error(text, how)
    return {"ok": False, "error": error, "blame": "package"}


def run_stage(stage: str, row: Row, python: Path | str, **options: Any) -> Outcome:
    """Runs a stage in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        arguments = f"{stage!r}, {row.name!r}, {str(file)!r}, **{options!r}"
        code = f"from benchmarks.environments import in_this_process; in_this_process({arguments})"
        text, how = call([python, "-c", code], HUNG_S, variables=row.variables)
        if file.is_file():
            return json.loads(file.read_text())
    return {"ok": False, "error": last_error(text, how), "blame": "unknown"}


def train(row: Row, python: Path | str, runs: Path, steps: int, time_limit: float) -> Outcome:
    """Scores a policy before and after training, with the commands that a user types."""
    shutil.rmtree(runs, ignore_errors=True)
    ppo, outcome = (python, "-m", "ppo"), {"ok": True}
    run = functools.partial(call, variables=row.variables)
    flags = [*shlex.split(row.flags), "--eval-episodes", "1", "--report-interval", "1"]
    untrained = ["--total-steps=1", "--num-envs=4", "--num-steps=32", "--minibatch-size=64", "--learning-rate=1e-30"]
    trained = ["--total-steps", steps]
    for when, settings, stop_s in (("before", untrained, None), ("after", trained, time_limit)):
        begin = time.monotonic()
        text, how = run([*ppo, "train", *flags, *settings, "--logdir", runs / when], HUNG_S, stop_s)
        if not how:
            lines = [line for file in (runs / when).glob("*/metrics.jsonl") for line in file.read_text().splitlines()]
            if not lines:
                error = f"the env is too slow for one update in {time_limit:.0f} s"
                return {**outcome, "ok": False, "error": error, "blame": "package"}
            outcome |= {"env_steps": json.loads(lines[-1])["env_steps"], "seconds": time.monotonic() - begin}
            (folder,) = (runs / when).iterdir()
            words = [*ppo, "evaluate", folder, "--episodes", "10", "--seed", "0", "--json", "--trust-modules"]
            text, how = run(words, HUNG_S)
        if how:
            stopped = how.startswith(("no end", "SIG")) or "was killed by SIG" in text
            blame = "package" if "raised by env" in text else "unknown" if stopped else "ours"
            return {**outcome, "ok": False, "error": last_error(text, how), "blame": blame}
        outcome[when] = json.loads(next(line for line in text.splitlines() if line.startswith("{")))["return_mean"]
    return outcome


def measure_row(
    row: Row, python: Path | str, file: Path, stages: Iterable[Stage], steps: int, train_steps: int, time_limit: float
) -> None:
    """Runs stages of a row whose package is installed, and updates the row's file after each stage."""
    record = json.loads(file.read_text())
    found = run_stage("versions", row, python).get("versions", {})
    if found != record.get("versions", found):
        record = {"install": record["install"]}  # other versions were measured
    record["versions"] = found
    for stage in stages:
        if stage == "train":
            runs = file.resolve().with_suffix("")
            record[stage] = train(row, python, runs, train_steps, time_limit)
        else:
            options = {"steps": steps, "time_limit": time_limit} if stage == "equal" else {}
            record[stage] = run_stage(stage, row, python, **options)
        print(f"  {stage}: {record[stage]}", file=sys.stderr, flush=True)
        file.write_text(json.dumps(record, indent=1))
        if stage == "single" and not record[stage]["ok"]:
            return


def table(out: Path) -> str:
    """Returns the table in Markdown, followed by the reason for each failure."""
    lines = ["| package | flags of `ppo train` | bit-equal steps | env-steps/s |", "|---|---|---|---|"]
    reasons: list[str] = []

    def failed(record: Outcome, stage: str) -> bool:
        return not record.get(stage, {"ok": True})["ok"]

    def steps(outcome: Outcome) -> str:
        return f"{outcome['steps']:,}"

    for row in ROWS:
        file = out / f"{row.name}.json"
        if not file.is_file():
            continue
        record = json.loads(file.read_text())

        def cell(stage: str, shown: Callable[[Outcome], str], record: Any = record, row: Row = row) -> str:
            outcome = record.get(stage)
            if outcome is None or outcome["ok"]:
                return "-" if outcome is None else shown(outcome)
            if outcome["error"].startswith("nondeterministic"):
                return "nondeterministic"
            fault = {"package": "", "ours": ", fault of this project"}.get(outcome["blame"], ", unknown fault")
            reasons.append(f"{len(reasons) + 1}. {row.package}{fault}: `{_short(outcome['error'])}`")
            return f"no ({len(reasons)})"

        cells = [
            f"{row.package} {record.get('versions', {}).get(row.package, '')}".strip(),
            f"`{row.command}`",
            cell(next((stage for stage in ("install", "single") if failed(record, stage)), "equal"), steps),
            cell("speed", lambda found: f"{found['vecenv']:,.0f} / {_speed(found['gymnasium'])}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *reasons]).rstrip()


def _speed(rate: float | None) -> str:
    return "hangs" if rate is None else f"{rate:,.0f}"


def _short(error: str) -> str:
    text = error.replace("`", "'").replace(str(ROOT), ".")
    return text if len(text) <= 200 else f"{text[:197]}..."


def main(
    only: tuple[str, ...] = (),
    fast: bool = False,
    measure: tuple[Stage, ...] = ("single", "equal", "conformance", "train", "speed"),
    out: Path = Path("runs/environments"),
    envs_dir: Path | None = None,
    keep: bool = False,
    here: bool = False,
    table_only: bool = False,
    steps: int = 1000,
    train_steps: int = 100_000,
    time_limit: float = 300,
) -> None:
    """Measures rows and prints the table of all measured rows.

    Args:
        only: Names of rows. Empty: all rows.
        fast: Measure only rows that take less than a minute once their packages are installed.
        measure: Stages to measure. Outcomes of other stages are kept. "single" steps one env; if that fails, the
            row's other stages are skipped.
        out: Folder for one JSON file per row, and for the runs.
        envs_dir: Folder for the virtual environments. None: a temporary folder.
        keep: Keep the virtual environments in `envs_dir`. The next call with the same folder reuses them.
        here: Use the packages that are installed for this Python instead of virtual environments.
        table_only: Only print the table from the JSON files.
        steps: Steps of each env that are compared with Gymnasium.
        train_steps: Env-steps of training.
        time_limit: Seconds after which training is asked to stop. Each comparison of steps ends after half as long.
    """
    if unknown := set(only) - {row.name for row in ROWS}:
        raise SystemExit(f"error: unknown rows {sorted(unknown)}: use names from {[row.name for row in ROWS]}")
    if keep and envs_dir is None:
        raise SystemExit("error: --keep needs --envs-dir, the folder of the environments to keep")
    rows = [row for row in ROWS if not table_only and row.name in (only or [row.name]) and (row.fast or not fast)]
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if rows and envs_dir is None and not here:
            envs_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for requires, group in itertools.groupby(rows, key=lambda row: row.requires):
            same = list(group)
            folder = None if here else Path(envs_dir or "").resolve() / re.sub(r"[^\w.]+", "-", " ".join(requires))
            installed: Outcome = {"ok": True} if folder is None else install(same[0], folder)
            for row in same:
                print(f"{row.name}: {installed}", file=sys.stderr, flush=True)
                file = out / f"{row.name}.json"
                record = json.loads(file.read_text()) if file.is_file() else {}
                file.write_text(json.dumps({**record, "install": installed}, indent=1))
                if installed["ok"]:
                    python = sys.executable if folder is None else folder / "bin/python"
                    measure_row(row, python, file, measure, steps, train_steps, time_limit)
            if folder is not None and not keep:
                shutil.rmtree(folder)
    print(table(out))


if __name__ == "__main__":
    tyro.cli(main)
