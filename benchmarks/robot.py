"""How fast is the complete task of a robot, compared with its bare physics? `python -m benchmarks.robot`.

Unit: env-steps per second of all envs, four simulation steps each, as the median of the rounds, and the median ratio of
the bare physics to vecenv's complete task within a round. All use all cores, except the plain loop.
Not measured: creation and the policy.

All rivals step vecenv/robots/quadruped.xml in turns, with the same random actions. "vecenv" is the complete task, with
current sensors, observations, rewards, infos, noise, pushes, randomized models and autoreset. The bare physics repeats
its states and controls with the model of the file, and computes nothing else.

mjbatch requires a MuJoCo of its own: make a virtual environment, `pip install mjbatch` there, and pass its interpreter.
This file then also runs there, with nothing but mjbatch and its requirements.

Each rival is first checked to compute the same positions, bit for bit with the same version of MuJoCo.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

TASK = "vecenv.robots:Quadruped-v0"
MODEL = Path(__file__).parents[1] / "vecenv" / "robots" / "quadruped.xml"
SUBSTEPS = 4
FIELDS = ("qpos", "qvel", "qacc_warmstart", "ctrl")
ENV_STEPS = 6400  # of a round
CHECKED_STEPS = 5
MAX_ERROR = 1e-3  # in meters and radians, of another version of MuJoCo

Advance = Callable[[dict[str, np.ndarray]], np.ndarray]
"""Steps all simulations once from these fields `[N, ...]`, and returns their positions."""


def main(num_envs: tuple[int, ...] = (64, 512), mjbatch: str | None = None, rounds: int = 20) -> None:
    """Prints the median env-steps per second of each rival, and the median ratio to vecenv's complete task.

    Args:
        num_envs: Numbers of envs.
        mjbatch: Python interpreter of an environment that has mjbatch.
        rounds: Number of rounds that count.
    """
    from benchmarks.machine import in_turns

    print("| envs | rival | env-steps/s | rival / vecenv |\n|---:|---|---:|---:|")
    for count in num_envs:
        with tempfile.TemporaryDirectory() as folder:
            seconds = in_turns(rivals(count, mjbatch, Path(folder) / "recorded.npz"), rounds)
        ours, steps = np.array(seconds["vecenv"]), count * num_steps(count)
        for name, taken in seconds.items():
            speed, ratio = steps / statistics.median(taken), np.median(ours / np.array(taken))
            print(f"| {count} | {name} | {speed:,.0f} | {ratio:.2f} |")


def num_steps(num_envs: int) -> int:
    """Returns the number of steps of a round."""
    return max(CHECKED_STEPS, ENV_STEPS // num_envs)


def random_actions(num_envs: int) -> np.ndarray:
    """Returns the actions of a round: float32[T, N, 12]."""
    return np.random.default_rng(0).uniform(-0.5, 0.5, (num_steps(num_envs), num_envs, 12)).astype(np.float32)


def rivals(num_envs: int, interpreter: str | None, file: Path) -> dict[str, Callable[[], Any]]:
    """Returns a function for each rival, which takes `num_steps(num_envs)` steps. Writes the recorded states to `file`.

    Args:
        num_envs: Number of envs.
        interpreter: Python interpreter of an environment that has mjbatch, or None to omit mjbatch.
        file: File for the recorded states.
    """
    import vecenv
    from vecenv import available_cores
    from vecenv.robots import Quadruped

    actions = random_actions(num_envs)
    envs = vecenv.make(TASK, num_envs)
    envs.reset(seed=0)
    checked = _recorded(Quadruped(num_envs, randomized=False), actions[:CHECKED_STEPS], num_skipped=0)
    timed = _recorded(Quadruped(num_envs), actions, num_skipped=len(actions))
    np.savez(file, **{f"checked_{name}": values for name, values in checked.items()}, **timed)
    rivals = {
        "vecenv": lambda: [envs.step(batch) for batch in actions],
        "mujoco.batch": _round(_mujoco_batch(num_envs), file),
        "loop over mj_step": _round(_loop(num_envs), file),
    }
    if interpreter is not None:
        rivals["mjbatch"] = _in_a_process([interpreter, __file__, *map(str, (num_envs, available_cores(), file))])
    return rivals


def _recorded(envs: Any, actions: np.ndarray, num_skipped: int) -> dict[str, np.ndarray]:
    """Returns the fields [T, N, ...] with which each step begins, and the positions "after" it."""
    state = {name: envs.physics.batch.bind(name) for name in FIELDS}
    recorded: dict[str, list[np.ndarray]] = {name: [] for name in (*FIELDS, "after")}
    envs.reset(seed=0)
    for batch in actions[:num_skipped]:
        envs.step(batch)
    for batch in actions:
        state["ctrl"][...] = envs.apply(batch)
        for name, values in state.items():
            recorded[name].append(values.copy())
        envs.step(batch)
        recorded["after"].append(state["qpos"].copy())
    return {name: np.stack(values) for name, values in recorded.items()}


def _round(advance: Advance, file: Path | str, tolerance: float = 0.0) -> Callable[[], None]:
    """Returns a function that repeats the recorded steps, after a check of `advance`."""
    recorded = dict(np.load(file))

    def step(t: int, prefix: str = "") -> np.ndarray:
        return advance({name: recorded[prefix + name][t] for name in FIELDS})

    for t, expected in enumerate(recorded["checked_after"]):
        np.testing.assert_allclose(step(t, "checked_"), expected, rtol=0, atol=tolerance)

    def repeat() -> None:
        for t in range(len(recorded["qpos"])):
            step(t)

    return repeat


def _mujoco_batch(num_envs: int) -> Advance:
    from mujoco.batch import Batch

    from vecenv import available_cores

    model = mujoco.MjModel.from_xml_path(str(MODEL))
    return _of_batch(Batch(model, num_envs, nthread=available_cores()))


def _of_batch(batch: Any) -> Advance:
    state = {name: batch.bind(name) for name in FIELDS}

    def advance(fields: dict[str, np.ndarray]) -> np.ndarray:
        for name, values in fields.items():
            state[name][...] = values
        batch.step(nstep=SUBSTEPS)
        return state["qpos"]

    return advance


def _loop(num_envs: int) -> Advance:
    model = mujoco.MjModel.from_xml_path(str(MODEL))
    datas = [mujoco.MjData(model) for _ in range(num_envs)]
    qpos = np.zeros((num_envs, model.nq))

    def advance(fields: dict[str, np.ndarray]) -> np.ndarray:
        for i, data in enumerate(datas):
            for name, values in fields.items():
                getattr(data, name)[:] = values[i]
            mujoco.mj_step(model, data, SUBSTEPS)
            qpos[i] = data.qpos
        return qpos

    return advance


def _in_a_process(words: list[str]) -> Callable[[], Any]:
    """Starts a process that ends with this one, and returns a function that makes it perform a round."""
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def perform() -> None:
        child.stdin.write("\n")
        if not child.stdout.readline():
            raise RuntimeError(f"{words[0]} failed, see above")

    perform()
    return perform


def _serve(num_envs: int, num_threads: int, file: str) -> None:
    """Performs a round with mjbatch for each line of the standard input, and answers with a line."""
    from mjbatch import Batch

    model = mujoco.MjModel.from_xml_path(str(MODEL))
    repeat = _round(_of_batch(Batch(model, num_envs, num_threads)), file, MAX_ERROR)
    for _ in sys.stdin:
        repeat()
        print("done", flush=True)


if __name__ == "__main__":
    if __package__:
        import tyro

        tyro.cli(main)
    else:
        _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
