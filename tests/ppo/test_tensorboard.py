"""Tests of what a run reports: declared metrics, and in TensorBoard also hyperparameters and videos."""

import sys
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo
from ppo import Run
from ppo.algorithm import update
from ppo.run.metrics import METRICS, Clock, MetricsWriter
from tests.drawing import Raising, Striped

CONFIG = ppo.Config(
    total_steps=128, num_envs=4, num_steps=8, minibatch_size=16, epochs=1, num_workers=1, report_interval=32,
    eval_episodes=2, policy_layers=(8,), value_layers=(8,), video_interval=64, checkpoint_interval=64,
)  # fmt: skip


class Listener(ppo.Callback):
    def __init__(self):
        self.warnings, self.report = [], {}

    def on_warning(self, message):
        self.warnings.append(message)

    def on_report(self, report):
        self.report = report


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains with every TensorBoard output enabled; returns the run's path, its last report and its events."""
    listener = Listener()
    result = ppo.train(CONFIG, envs=Striped, callbacks=[listener], logdir=tmp_path_factory.mktemp("runs"))
    assert not listener.warnings
    events = EventAccumulator(str(result.path), size_guidance={"tensors": 0})
    events.Reload()
    return result.path, listener.report, events


def test_every_metric_has_a_group_and_is_written(trained):
    _, report, events = trained
    missing = {"kl_penalty", "action_std", "eval_return_mean", "eval_return_std"}  # need other settings or actions
    assert set(METRICS) - set(report) == missing
    grouped = {name: group for name, group in METRICS.items() if group is not None}
    assert set(METRICS) - set(grouped) == {"env_steps"}  # the x-axis
    written = {tag for tag in events.Tags()["tensors"] if tag.split("/")[0] in grouped.values()}
    assert written == {f"{group}/{name}" for name, group in grouped.items() if name in report}
    assert [event.step for event in events.Tensors("kl/kl")] == [32, 64, 96, 128]


def test_an_undeclared_metric_is_an_error(tmp_path):
    with closing(MetricsWriter(Run.create(tmp_path, "run", CONFIG), CONFIG, 0)) as writer:
        writer.write({"env_steps": 32, "kl": 0.5})
        with pytest.raises(ValueError, match="the metric 'rate' is not declared: add it to ppo"):
            writer.write({"env_steps": 64, "kl": 0.5, "rate": 1.0, "loss": None})
    assert set(update.METRICS) <= set(METRICS)


def test_the_manual_lists_every_metric():
    manual = (Path(__file__).parents[2] / "docs" / "ppo.md").read_text()
    assert not [name for name in METRICS if f"`{name}`" not in manual]


def test_the_hyperparameters_are_the_configs_settings(trained):
    assert "_hparams_/session_start_info" in trained[2].Tags()["tensors"]
    plugins = trained[2].SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"clip_range" in plugins and b"policy_layers" in plugins


def test_a_video_is_written_as_a_file_and_as_an_animation_in_tensorboard(trained):
    path, _, events = trained
    files = sorted(file.name for file in (path / "videos").iterdir())
    assert files == [f"step_{step:012d}-episode-0.mp4" for step in (64, 128)]
    shown = events.Tensors("video/deterministic")
    assert [event.step for event in shown] == [64, 128]
    width, height, picture = shown[0].tensor_proto.string_val
    assert (width, height) == (b"64", b"64") and picture.startswith(b"GIF89a")
    assert events.SummaryMetadata("video/deterministic").plugin_data.plugin_name == "images"


def test_a_run_whose_env_cannot_be_rendered_warns_once_and_continues(tmp_path):
    listener = Listener()
    result = ppo.train(CONFIG, envs=Raising, callbacks=[listener], logdir=tmp_path)
    assert result.env_steps == 128 and len(listener.warnings) == 1
    assert "no more videos will be recorded" in listener.warnings[0] and "no paint" in listener.warnings[0]


def test_a_missing_encoder_is_a_warning_before_training(tmp_path, monkeypatch):
    class Stops(Listener):
        def on_start(self, config, env_steps):
            (self.before,) = self.warnings
            raise ppo.StopTraining

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    listener = Stops()
    assert ppo.train(CONFIG, envs=Striped, callbacks=[listener], logdir=tmp_path).interrupted
    assert "no more videos will be recorded: imageio_ffmpeg is missing" in listener.before


def test_videos_of_a_vector_env_passed_by_the_user_are_rejected_at_once(tmp_path):
    import vecenv

    with (
        vecenv.AsyncVectorEnv([Striped] * 4, num_workers=1, **ppo.vector_options(CONFIG)) as envs,
        pytest.raises(ppo.ConfigError, match="video_interval needs separate envs"),
    ):
        ppo.train(CONFIG, envs=envs, logdir=tmp_path)


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
