"""Tests that the examples run from a plain clone and learn what they claim."""

import ctypes.util
import re
import subprocess
import sys
from pathlib import Path

import mujoco
import numpy as np
import pytest
from PIL import Image

import ppo
import vecenv
from examples import steer, sweep
from examples.rough import CELL, RoughQuadruped
from tests.drawing import Striped
from tests.helpers import assert_same
from tests.ppo.runs import command

ROOT = Path(__file__).parents[1]
CRAWLER = "examples.crawler:Crawler-v0"
MEMORY = "examples.memory:HiddenVelocity-v0"
CATCH = "examples.catch:Catch-v0"


def train(tmp_path, *words, env=CRAWLER, timeout=280):
    command = [sys.executable, "-m", "ppo", "train", "--env", env, "--logdir", str(tmp_path), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def score_of(done):
    assert done.returncode == 0, done.stderr
    return float(re.search(r"final score: (-?[\d.,]+)", done.stdout)[1].replace(",", ""))


def test_the_crawler_is_the_same_in_this_process_and_in_workers():
    results = []
    for num_workers in (None, 2):
        with vecenv.make(CRAWLER, 5, num_workers=num_workers) as envs:
            assert envs.num_workers == (num_workers or 0)
            found = [envs.reset(seed=3)]
            found += [envs.step(np.full((5, 2), np.sin(t / 3), np.float32)) for t in range(210)]
            assert found[200][3].all() and not found[199][3].any()
            results.append(tuple(found))
    assert_same(*results)


@pytest.mark.slow  # `test_the_example_tasks_can_be_trained` is quick
@pytest.mark.parametrize("words", [(), ("--num-workers", "2")])
def test_the_crawler_can_be_trained(tmp_path, words):
    done = train(tmp_path, "--total-steps", "5000", *words)
    assert done.returncode == 0, done.stderr
    assert "final score" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_balancing_without_velocities_requires_memory(tmp_path):
    words = ["--num-steps", "64", "--minibatch-size", "512", "--learning-rate", "1e-3"]
    scores = {}
    for recurrent in ("gru", "none"):
        done = train(tmp_path, "--total-steps", "300000", *words, "--recurrent", recurrent, env=MEMORY, timeout=700)
        scores[recurrent] = score_of(done)
    print(scores)
    assert scores["gru"] > 475 and scores["none"] < 100


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_policy_learns_to_catch_a_ball_from_images(tmp_path):
    words = ["--num-envs", "32", "--num-steps", "16", "--minibatch-size", "128", "--epochs", "4", "--gamma", "0.95",
             "--learning-rate", "1e-3"]  # fmt: skip
    score = score_of(train(tmp_path, "--total-steps", "40000", *words, env=CATCH, timeout=1400))
    print(score)
    assert score > 0.9  # out of 1; a random policy scores -0.5


SMALL = ["--num-envs", "4", "--num-steps", "8", "--minibatch-size", "16", "--epochs", "1", "--eval-episodes", "2",
         "--total-steps", "64"]  # fmt: skip


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("CRAWLER", []),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("MEMORY", ["--recurrent", "lstm"]), ("CATCH", []))),
    ],
)
def test_the_example_tasks_can_be_trained(tmp_path, monkeypatch, env, words):
    monkeypatch.chdir(ROOT)
    assert command("train", ["--env", globals()[env], "--logdir", str(tmp_path), *SMALL, *words]) == 0


@pytest.mark.slow
def test_the_crawler_learns_to_crawl(tmp_path):
    done = train(tmp_path, "--total-steps", "200000")
    print(done.stdout[-500:])
    assert score_of(done) > 60  # m/s, summed over 200 steps of 0.05 s; a random policy scores about 0


@pytest.mark.slow
def test_the_a2c_example_runs(tmp_path):
    source = (ROOT / "examples" / "a2c.py").read_text()
    short = tmp_path / "short.py"
    short.write_text(source.replace("UPDATES = 32, 16, 2000", "UPDATES = 32, 16, 20"))
    assert short.read_text() != source
    done = subprocess.run([sys.executable, short], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"mean return ([\d.]+)", done.stdout)) == 11


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a2c_balances_the_pole(seed):
    command = [sys.executable, "-m", "examples.a2c", str(seed)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    returns = [float(score) for score in re.findall(r"mean return ([\d.]+)", done.stdout)]
    assert len(returns) == 11
    assert returns[9] >= 475 and returns[10] >= 475  # the last tenth of training, and the greedy policy


def test_the_a2c_example_is_short():
    assert (ROOT / "examples" / "a2c.py").read_text().count("\n") < 100


def test_wrappers_and_the_python_backend_need_an_env_that_is_registered_as_a_single_env():
    for arguments in ({"wrappers": [lambda env: env]}, {"backend": "python"}):
        with pytest.raises(ValueError, match="needs single envs"):
            vecenv.make(CRAWLER, 2, **arguments)


RANDOMIZED = """
import sys
import numpy as np
import vecenv
from vecenv.mujoco import HalfCheetah

class Randomized(HalfCheetah):
    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.masses = self.physics.expand("body_mass")

    def begin(self, ids, rngs):
        super().begin(ids, rngs)
        self.masses[ids] = self.model.body_mass * rngs.uniform(0.5, 1.5, self.model.nbody)

found = []
for num_workers in (0, 1, 3):
    with vecenv.AsyncVectorEnv(vecenv.Batched(Randomized, 6), num_workers=num_workers) as envs:
        envs.reset(seed=4)
        for step in range(30):
            observations, *_ = envs.step(np.full((6, 6), 0.3, np.float32))
        envs.reset()
        found.append((observations, envs.step(np.full((6, 6), 0.3, np.float32))[0]))
for first, second in found[1:]:
    np.testing.assert_array_equal(first, found[0][0])
    np.testing.assert_array_equal(second, found[0][1])
assert len(np.unique(found[0][0], axis=0)) == 6
"""


def test_randomized_models_depend_on_the_seeds_and_not_on_the_number_of_workers(tmp_path):
    script = tmp_path / "randomized.py"
    script.write_text(RANDOMIZED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_sweep_tries_settings_on_a_custom_env_and_prunes_bad_trials(tmp_path, monkeypatch):
    monkeypatch.setattr("optuna.Trial.should_prune", lambda trial: trial.number == 1)
    config = ppo.Config(
        env="given", num_envs=4, num_steps=8, minibatch_size=16, num_workers=1, eval_episodes=2, total_steps=320
    )
    study = sweep.search(config, Striped, trials=2, logdir=tmp_path)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert [len(trial.intermediate_values) for trial in study.trials] == [5, 1]
    assert study.best_value == study.trials[0].value == study.trials[0].intermediate_values[320] == 5
    assert str(tmp_path) in study.best_trial.user_attrs["run"] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "flags",
    [
        ["--collectors", "2"],
        *(pytest.param(flags, marks=pytest.mark.slow) for flags in (["--track", "wandb"], ["--cluster", "auto"])),
    ],
)
def test_a_sweep_refuses_flags_that_would_have_no_effect(flags):
    words = [sys.executable, "-m", "examples.sweep", "--config", "cartpole", *flags]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "no other flag of `ppo train`" in done.stderr


def test_success_raises_the_level_of_an_env_on_rough_ground_and_a_fall_lowers_it():
    envs = RoughQuadruped(3, max_episode_steps=20, randomized=False, noise=0.0)
    envs.levels[:] = [5, 6, 7]
    envs.reset(seed=0)
    np.testing.assert_allclose(envs.data.qpos[:, 1], [9, 15, 21])
    for step in range(20):
        envs.commands[:] = [[0, 0, 0], [1, 0, 0], [0, 0, 0]]  # the second robot does not follow its command
        if step == 10:
            envs.data.qpos[2, 3:7] = 0, 1, 0, 0  # upside down
        _, _, terminated, truncated, _ = envs.step(np.zeros((3, 12), np.float32))
        assert terminated[2] == (step == 10) and not terminated[:2].any() and truncated[:2].all() == (step == 19)
    assert envs.contacts()[:2].any(axis=1).all() and (envs.heights()[:2] > 0.2).all()
    envs.step(np.zeros((3, 12), np.float32))  # begins the next episodes
    assert envs.levels.tolist() == [6, 6, 6]
    np.testing.assert_allclose(envs.data.qpos[:, 1], 15, atol=0.1)


def test_the_ground_under_the_quadruped_is_where_rays_hit_it():
    envs = RoughQuadruped(1)
    data = mujoco.MjData(envs.model)
    mujoco.mj_forward(envs.model, data)
    rng, last = np.random.default_rng(0), len(envs.ground) - 1
    for row, column in rng.integers(1, last, (100, 2)):
        envs.data.qpos[0, :3] = (column - last / 2) * CELL, (row - last / 2) * CELL, 5
        distance = mujoco.mj_ray(
            envs.model, data, envs.data.qpos[0, :3], [0, 0, -1], None, 1, -1, np.zeros(1, np.int32)
        )
        assert envs.heights()[0] == pytest.approx(distance, abs=1e-3)


def test_levels_do_not_depend_on_the_number_of_workers():
    results = []
    for num_workers in (0, 2):
        with vecenv.make("examples.rough:RoughQuadruped-v0", 4, num_workers=num_workers, max_episode_steps=9) as envs:
            first = envs.reset(seed=3)
            results.append((first, *(envs.step(np.full((4, 12), np.sin(t), np.float32)) for t in range(25))))
    assert_same(*results)


class FakeViewer:
    """Stands for MuJoCo's viewer, which needs a display: presses a key in each of four frames."""

    def __init__(self, model, data, key_callback):
        self.data, self.press, self.keys, self.heights = data, key_callback, [265, 262, 44, 32], []
        self.cam = mujoco.MjvCamera()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def is_running(self):
        if self.keys:
            self.press(self.keys.pop(0))
            return True
        return False

    def sync(self):
        self.heights.append(self.data.qpos[2])


def test_keys_steer_the_quadruped_in_the_viewer(monkeypatch):
    viewers, seen = [], []

    def launch(*args, **kwargs):
        viewers.append(FakeViewer(*args, **kwargs))
        return viewers[0]

    def policy(observations):
        seen.append(observations["policy"][0, 30:33].tolist())
        return np.zeros((1, 12), np.float32)

    monkeypatch.setattr("mujoco.viewer.launch_passive", launch)
    steer.steer(policy)
    assert seen[1:] == [[0.25, 0, 0], [0.25, 0, -0.25], [0.25, 0.25, -0.25]]
    assert viewers[0].cam.trackbodyid == 1
    assert len(set(viewers[0].heights)) == 4 and min(viewers[0].heights) > 0.2


VIEW = """
import sys
from examples import steer
steer.main()
assert "tensorflow" not in sys.modules  # Mesa's OpenGL crashes in a process that has loaded it
"""


@pytest.mark.slow  # tests/ppo/results/test_video.py makes small videos
def test_a_gif_shows_a_trained_quadruped_where_no_display_exists(tmp_path, monkeypatch):
    if not any(ctypes.util.find_library(name) for name in ("EGL", "OSMesa")):
        pytest.skip("no OpenGL without a display: apt-get install libegl1")
    monkeypatch.chdir(ROOT)
    words = [
        "--config",
        "quadruped",
        *SMALL,
        "--env-kwargs",
        "max_episode_steps=20",
        "--logdir",
        str(tmp_path / "runs"),
    ]
    assert command("train", words) == 0
    (run,) = (tmp_path / "runs").iterdir()
    monkeypatch.setenv("DISPLAY", ":4711")  # as after an SSH session has ended
    file = tmp_path / "robot.gif"
    words = [str(run), "--gif", str(file), "--seconds", "0.12"]
    done = subprocess.run([sys.executable, "-c", VIEW, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with Image.open(file) as gif:
        assert gif.size == (320, 240) and gif.n_frames == 3
        assert np.asarray(gif.convert("RGB")).std() > 5
