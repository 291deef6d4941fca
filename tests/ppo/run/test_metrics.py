"""Tests of what a run reports: declared metrics, in TensorBoard also hyperparameters, and videos in a callback."""

from contextlib import closing
from pathlib import Path

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
from ppo import Run
from ppo.algorithm import update
from ppo.run.metrics import METRICS, Clock, MetricsWriter
from tests.drawing import Striped

CONFIG = ppo.Config(
    total_steps=128, num_envs=4, num_steps=8, minibatch_size=16, epochs=1, num_workers=1, report_interval=32,
    eval_episodes=2, policy_layers=(8,), value_layers=(8,), checkpoint_interval=64,
)  # fmt: skip


class Listener(ppo.Callback):
    def __init__(self):
        self.warnings, self.report = [], {}

    def on_warning(self, message):
        self.warnings.append(message)

    def on_report(self, report):
        self.report = report

    def on_checkpoint(self, env_steps, path):
        run = path.parents[1]
        ppo.record_run(run, run.parent / "videos" / str(env_steps), 1, envs=Striped)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains with every TensorBoard output enabled; returns the run's path, its last report and its events."""
    listener = Listener()
    result = ppo.train(CONFIG, envs=Striped, callbacks=[listener], logdir=tmp_path_factory.mktemp("runs"))
    assert not listener.warnings
    events = EventAccumulator(str(result.path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return result.path, listener.report, events


def test_every_metric_has_a_group_and_is_written(trained):
    _, report, events = trained
    # These need other settings or actions.
    missing = {"kl_penalty", "action_std", "eval_return_mean", "eval_return_std", "worker_restarts"}
    assert set(METRICS) - set(report) == missing
    grouped = {name: group for name, group in METRICS.items() if group is not None}
    assert set(METRICS) - set(grouped) == {"env_steps"}  # the x-axis
    written = {tag for tag in events.Tags()["scalars"] if tag.split("/")[0] in grouped.values()}
    assert written == {f"{group}/{name}" for name, group in grouped.items() if name in report}
    assert [event.step for event in events.Scalars("kl/kl")] == [32, 64, 96, 128]


def test_an_undeclared_metric_is_an_error(tmp_path):
    with closing(MetricsWriter(Run.create(tmp_path, "run", CONFIG), CONFIG, 0)) as writer:
        writer.write({"env_steps": 32, "kl": 0.5})
        with pytest.raises(ValueError, match="the metric 'rate' is not declared: add it to ppo"):
            writer.write({"env_steps": 64, "kl": 0.5, "rate": 1.0, "loss": None})
    assert set(update.METRICS) <= set(METRICS)


@pytest.mark.parametrize("folder", ["runs", "[runs]"])
def test_a_resumed_run_repeats_no_event_of_a_run_that_was_killed(tmp_path, folder):
    run = Run.create(tmp_path / folder, "run", CONFIG)
    with closing(MetricsWriter(run, CONFIG, 0)) as killed, closing(SummaryWriter(run)) as other:
        for step in (32, 64, 96):
            killed.write({"env_steps": step, "kl": 0.5})
            other.write(step)
        # The files are read while the first writer is open, as a process that is killed leaves them.
        (events,) = run.path.glob(f"events.out.tfevents.*.{'[0-9a-f]' * 16}.v2")
        with events.open("ab") as file:
            file.write(b"half of a record")
        with closing(MetricsWriter(run, CONFIG, 64)) as resumed:
            assert resumed.has_report
            for step in (96, 128):
                resumed.write({"env_steps": step, "kl": 0.25})
    found = EventAccumulator(str(run.path), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    # Sorted by step: files that begin in the same second are read in the order of their names, of which 10 precedes 9.
    reports = sorted((event.step, event.value) for event in found.Scalars("kl/kl"))
    assert reports == [(32, 0.5), (64, 0.5), (96, 0.25), (128, 0.25)]
    assert [event.step for event in found.Tensors("mine")] == [32, 64, 96]  # a callback's own file
    assert not list(run.path.glob(".part*"))


class SummaryWriter:
    """Writes events as a callback may do."""

    def __init__(self, run):
        self._writer = tf.summary.create_file_writer(str(run.path))

    def write(self, step):
        with self._writer.as_default(step=step):
            tf.summary.scalar("mine", 1.0)

    def close(self):
        self._writer.close()


def test_the_manual_lists_every_metric():
    manual = (Path(__file__).parents[3] / "docs" / "ppo.md").read_text()
    assert not [name for name in METRICS if f"`{name}`" not in manual]


def test_the_hyperparameters_are_the_configs_settings(trained):
    assert "_hparams_/session_start_info" in trained[2].Tags()["tensors"]
    plugins = trained[2].SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"clip_range" in plugins and b"policy_layers" in plugins


def test_a_callback_records_videos_during_training(trained):
    files = sorted(file.relative_to(trained[0].parent).as_posix() for file in trained[0].parent.glob("videos/*/*"))
    assert files == [f"videos/{step}/{trained[0].name}-episode-0.mp4" for step in (128, 64)]


def test_the_speed_of_each_phase_counts_only_the_time_of_that_phase(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock(10.0, 100)
    for part, seconds in (("collect", 1.0), ("learn", 3.0)):
        with clock.spent_on(part):
            now[0] += seconds
    now[0] += 4.0  # an evaluation
    assert clock.read(200) == {
        "wall_s": 18.0,
        "steps_per_s": 12.5,
        "collect_steps_per_s": 100.0,
        "learn_steps_per_s": pytest.approx(100 / 3),
    }
    clock.restart(200)
    with clock.spent_on("collect"), clock.spent_on("learn"):
        now[0] += 1.0
    assert clock.read(210)["collect_steps_per_s"] == 10.0
