"""Tests of ppo/results/video.py: videos show each step, errors are one sentence, and no partial file is left."""

import dataclasses
import functools
import os
import re
import subprocess
import sys

import gymnasium as gym
import imageio.v3 as imageio
import numpy as np
import pytest

import vecenv
from ppo import ConfigError, evaluate_run, record_run
from ppo.policies.evaluation import load_players
from ppo.results import video as videos
from ppo.results.video import VideoError, VideoOptions
from tests.drawing import (
    RUNNER,
    Dying,
    Growing,
    Hanging,
    Picky,
    Raising,
    RaisingLater,
    Reusing,
    Runner,
    Striped,
    nowhere_to_draw,
    seeing,
)  # fmt: skip
from tests.ppo.runs import command, untrained_run
from vecenv import opengl


def a_run(folder, **settings):
    return untrained_run(folder, Striped.observation_space, Striped.action_space, **settings)


@pytest.mark.parametrize("make", [Striped, Reusing])
def test_a_video_has_the_first_frame_and_one_frame_per_step(tmp_path, make):
    run = a_run(tmp_path / "runs")
    files, evaluation = record_run(run, tmp_path / "out", 2, envs=make)
    assert sorted((tmp_path / "out").iterdir()) == files
    assert [file.name for file in files] == [f"{run.path.name}-episode-{k}.mp4" for k in range(2)]
    assert evaluation.lengths.tolist() == [5, 5]
    for file in files:
        np.testing.assert_allclose(rows_of(imageio.imread(file, plugin="FFMPEG")), [0, 10, 20, 30, 40, 50], atol=2)


def rows_of(frames):
    """Returns the number of white rows of each frame of a `Striped`."""
    return (frames[..., 0] > 128).mean(axis=2).sum(axis=1)


def test_a_video_with_fewer_frames_plays_at_the_speed_of_the_env(tmp_path):
    (file,), evaluation = record_run(a_run(tmp_path), tmp_path / "out", 1, envs=Striped, frame_skip=2)
    np.testing.assert_allclose(rows_of(imageio.imread(file, plugin="FFMPEG")), [0, 20, 40], atol=2)
    assert imageio.immeta(file, plugin="FFMPEG")["fps"] == 5 and evaluation.lengths.tolist() == [5]


def test_a_gif_has_the_size_and_the_length_that_were_asked_for(tmp_path):
    options = {"format": "gif", "size": "48x32", "seconds": 0.3}
    (file,), evaluation = record_run(a_run(tmp_path), tmp_path / "out", 1, envs=Striped, **options)
    frames = imageio.imread(file)
    assert file.suffix == ".gif" and frames.shape == (3, 32, 32, 3)  # scaled to fit
    np.testing.assert_allclose(rows_of(frames), [0, 5, 10], atol=1)
    assert imageio.immeta(file)["duration"] == 100 and evaluation.lengths.tolist() == [5]


@pytest.mark.parametrize(
    ("options", "fps", "expected"),
    [
        ({}, 20, (1, 20, np.inf)),
        ({}, 125, (5, 25, np.inf)),
        ({}, None, (1, 30, np.inf)),
        ({"frame_skip": 4, "seconds": 2}, 20, (4, 5, 10)),
        ({"format": "gif"}, 20, (2, 10, 100)),
        ({"format": "gif", "seconds": 60}, 60, (5, 12, 720)),
        ({"format": "gif", "seconds": np.inf}, 60, (5, 12, np.inf)),
    ],
)
def test_the_defaults_limit_the_frames_per_second_and_the_length_of_a_gif(options, fps, expected):
    assert VideoOptions(**options).pace({"render_fps": fps}) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "big"], "size 'big' is not a number of pixels, such as 240, or two, such as 320x240"),
        (["--size", "240x1"], "size '240x1' is not"),
        (["--frame-skip", "0"], "frame_skip 0 is out of range: it must be 1 or more"),
        (["--seconds", "0"], "seconds 0.0 is out of range: it must be above 0"),
    ],
)
def test_an_option_out_of_range_is_an_error_before_anything_is_loaded(words, message):
    with pytest.raises(ConfigError, match=message):
        command("visualize", ["nowhere", *words])


def test_an_unknown_format_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"format 'avi' is unknown: use one of \['mp4', 'gif'\]"):
        record_run(a_run(tmp_path), tmp_path / "out", 1, envs=Striped, format="avi")


def test_the_functions_of_a_list_take_turns(tmp_path):
    envs = [functools.partial(Striped, length) for length in (2, 3)]
    files, evaluation = record_run(a_run(tmp_path), tmp_path / "out", 3, envs=[*envs, *envs])
    assert evaluation.lengths.tolist() == [2, 2, 3] and evaluation.functions.tolist() == [0, 0, 1]
    assert [len(imageio.imread(file, plugin="FFMPEG")) for file in files] == [3, 3, 4]
    assert sorted((tmp_path / "out").iterdir()) == files
    _, evaluation = record_run(a_run(tmp_path), tmp_path / "out", 1, envs=envs)
    assert evaluation.lengths.tolist() == [2]


def test_the_command_prints_the_return_of_each_episode_and_a_fresh_seed_that_reproduces_it(tmp_path, capsys):
    env = gym.make("CartPole-v1")
    spaces = env.observation_space, env.action_space
    run = untrained_run(tmp_path / "runs", *spaces, env="CartPole-v1", given=False)

    def recorded(episodes, *words):
        place = ["--outdir", str(tmp_path / "out"), "--episodes", str(episodes)]
        assert command("visualize", [str(run.path), *place, *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == episodes and all(os.path.isfile(line.split(": ")[0]) for line in lines)
        (seed,) = {re.search(r"seed (\d+)\)$", line)[1] for line in lines}
        return lines, int(seed)

    fresh, seed = recorded(2)
    assert all(f"steps (deterministic policy, seed {seed})" in line for line in fresh)
    assert recorded(2, "--seed", str(seed)) == (fresh, seed) != recorded(2)
    # The evaluation plays each episode in a separate env, so only its first episode is the same.
    scores = evaluate_run(run, 2, seed=seed)
    assert f"return {scores.returns[0]:,.1f} in {scores.lengths[0]:,} steps" in fresh[0]
    (line,), _ = recorded(1, "--seed", "0", "--sample")
    sampled = evaluate_run(run, 1, seed=0, deterministic=False)
    assert f"in {sampled.lengths[0]:,} steps (sampled policy, seed 0)" in line
    assert sampled.lengths[0] != evaluate_run(run, 1, seed=0).lengths[0]


@pytest.mark.skipif("egl" not in opengl.backends() and "osmesa" not in opengl.backends(), reason="no OpenGL here")
def test_a_mujoco_task_is_rendered_without_a_display(tmp_path):
    env = gym.make("InvertedPendulum-v5")
    spaces = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32), env.action_space
    run = untrained_run(tmp_path / "runs", *spaces, env="InvertedPendulum-v5", given=False)
    players = load_players(run, 1)
    files, evaluation = videos.record(players, "name", tmp_path / "out", 1, VideoOptions())
    frames = imageio.imread(files[0], plugin="FFMPEG")
    assert frames.shape[1:] == (480, 480, 3) and frames.std() > 10
    assert (players.tally.episodes, players.tally.steps) == (1, evaluation.lengths[0])


@pytest.mark.skipif("egl" not in opengl.backends() and "osmesa" not in opengl.backends(), reason="no OpenGL here")
@pytest.mark.parametrize(
    ("body", "render", "options", "visible"),
    [
        ('<camera name="track" mode="trackcom" pos="0 -9 1" xyaxes="1 0 0 0 0 1"/>', {}, {}, True),
        ("", {}, {}, True),  # the body that can move any distance
        ("", {}, {"camera": "free"}, False),
        ("", {"default_camera_config": {"lookat": np.array([0.0, 0.0, 1.0])}}, {}, False),  # the env's own view
        ('<camera name="far" mode="fixed" pos="0 -9 1" xyaxes="1 0 0 0 0 1"/>', {}, {"camera": "far"}, True),
    ],
)
def test_the_camera_follows_a_mujoco_robot_unless_another_one_is_chosen(tmp_path, body, render, options, visible):
    (tmp_path / "model.xml").write_text(RUNNER % body)
    make = functools.partial(Runner, tmp_path / "model.xml", **render)
    run = untrained_run(tmp_path / "runs", make().observation_space, make().action_space)
    (file,), _ = record_run(run, tmp_path / "out", 1, envs=make, size="80x60", **options)
    frames = imageio.imread(file, plugin="FFMPEG")
    assert frames.shape == (6, 60, 80, 3)
    red = (frames[..., 0] > 100) & (frames[..., 1] < 60)
    assert red[0].any() and red[-1].any() == visible


@pytest.mark.skipif("egl" not in opengl.backends() and "osmesa" not in opengl.backends(), reason="no OpenGL here")
def test_a_policy_that_observes_frames_sees_those_of_its_env(tmp_path):
    (tmp_path / "model.xml").write_text(RUNNER % "")
    make = functools.partial(seeing, tmp_path / "model.xml")
    run = untrained_run(tmp_path / "runs", gym.spaces.Box(0, 255, (60, 80, 3), np.uint8), gym.spaces.Box(-1, 1, (1,)))
    (file,), _ = record_run(run, tmp_path / "out", 1, envs=make)
    last = imageio.imread(file, plugin="FFMPEG")[-1]
    assert last.shape == (60, 80, 3) and not ((last[..., 0] > 100) & (last[..., 1] < 60)).any()  # the ball has left
    with pytest.raises(VideoError, match=r"'free' cannot be chosen, because the env .* observes its own frames"):
        record_run(run, tmp_path / "out", 1, envs=make, camera="free")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Striped, "the camera 7 cannot be chosen, because the env has no `mujoco_renderer`"),
        (
            functools.partial(gym.make, "Ant-v5", render_mode="rgb_array"),
            r"no camera '7': use one of \['track', 'free'",
        ),
    ],
)
def test_a_camera_that_does_not_exist_is_a_one_sentence_error(tmp_path, make, message):
    env = make()
    run = untrained_run(tmp_path / "runs", env.observation_space, env.action_space)
    with pytest.raises(VideoError, match=message):
        record_run(run, tmp_path / "out", 1, envs=make, camera=7)


def without_modes():
    env = Striped()
    env.metadata = {"render_modes": [], "render_fps": 20}
    return gym.wrappers.PassiveEnvChecker(env)


def without_license():
    raise ValueError("the license has expired")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nowhere_to_draw, "cannot be rendered: it was made without render_mode='rgb_array'"),
        (Raising, "cannot be rendered: RuntimeError: no paint"),
        (without_modes, r'cannot be rendered: AssertionError: With no render_modes.* must list "rgb_array"'),
        (lambda: Striped(drawn="text"), r"cannot be rendered: its render\(\) returned str, not an array"),
        (
            lambda: gym.wrappers.FrameStackObservation(Striped(), 4),
            r"cannot be rendered: .*trained on Box\(.*the envs have Box\(.*--backend python",
        ),
        (
            lambda: Striped(drawn=np.zeros((4, 4))),
            r"its render\(\) returned float64\[4, 4\], not uint8\[height, width, 3\]",
        ),
        (Growing, r"could not be recorded: ValueError: render\(\) returned \(10, 64, 3\) after \(8, 64, 3\)"),
        (RaisingLater, "could not be recorded: ValueError: the brush broke"),
        (without_license, "could not be recorded: ValueError: the license has expired$"),
    ],
)
def test_an_env_that_cannot_be_rendered_is_a_one_sentence_error_and_leaves_no_file(tmp_path, make, message):
    with pytest.raises(VideoError, match=message) as caught:
        record_run(a_run(tmp_path / "runs"), tmp_path / "out", 1, envs=make)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def without_opengl():
    raise AttributeError("PyOpenGL found no glGetError")


def test_the_error_for_an_opengl_library_that_is_missing_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.setattr(videos, "why_not", lambda backend: "libOSMesa is not installed")
    with pytest.raises(VideoError, match="with MUJOCO_GL=osmesa: libOSMesa is not installed"):
        record_run(a_run(tmp_path / "runs"), tmp_path / "out", 1, envs=without_opengl)


def without_backend():
    import mujoco  # noqa: F401

    return AdvisedAlready()


class AdvisedAlready(Striped):
    def render(self):
        raise vecenv.errors.RenderingFailed(f"no backend works. {opengl.ADVICE}")


def test_the_error_without_opengl_says_once_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(videos, "backends", lambda: ["egl"])
    with pytest.raises(VideoError, match="no backend works") as caught:
        record_run(a_run(tmp_path / "runs"), tmp_path / "out", 1, envs=without_backend)
    assert str(caught.value).count(opengl.ADVICE) == 1


def test_the_second_opengl_backend_is_tried_if_the_first_does_not_work(tmp_path, monkeypatch):
    monkeypatch.setattr(videos, "backends", lambda: ["egl", "osmesa"])
    files, _ = record_run(a_run(tmp_path / "runs"), tmp_path / "out", 1, envs=Picky)
    assert files[0].is_file()
    monkeypatch.setattr(videos, "backends", lambda: ["egl"])
    with pytest.raises(VideoError, match="no EGL"):
        record_run(a_run(tmp_path / "runs"), tmp_path / "out2", 1, envs=Picky)


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("imageio_ffmpeg", r"imageio_ffmpeg is missing, but videos need it.*\[video\]"),
        ("PIL", "PIL is missing"),
    ],
)
def test_the_error_without_an_encoder_says_what_to_install(tmp_path, monkeypatch, absent, message):
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(VideoError, match=message):
        record_run(a_run(tmp_path / "runs"), tmp_path / "out", 1, envs=Striped)
    assert not (tmp_path / "out").exists()


def test_the_error_without_ffmpeg_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "")
    monkeypatch.setattr("imageio_ffmpeg._utils._get_ffmpeg_exe", lambda: _raise(RuntimeError("No ffmpeg exe")))
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: _raise(RuntimeError("No ffmpeg exe")))
    with pytest.raises(VideoError, match="apt-get install ffmpeg"):
        record_run(a_run(tmp_path / "runs"), tmp_path / "out", 1, envs=Striped)


def test_an_ffmpeg_that_does_not_run_is_a_one_sentence_error(tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nowhere/ffmpeg")
    with pytest.raises(VideoError, match="no working ffmpeg was found"):
        record_run(a_run(tmp_path / "runs"), tmp_path / "out", 1, envs=Striped)
    assert not (tmp_path / "out").exists()


def test_an_encoder_that_stops_is_a_one_sentence_error(tmp_path, monkeypatch):
    ffmpeg = tmp_path / "ffmpeg"
    ffmpeg.write_text('#!/bin/sh\n[ "$1" = -version ]\n')
    ffmpeg.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(ffmpeg))
    with pytest.raises(VideoError, match="is the disk full") as caught:
        record_run(a_run(tmp_path / "runs"), tmp_path / "out", 1, envs=Striped)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def _raise(error):
    raise error


def test_a_file_in_place_of_the_folder_is_a_one_sentence_error(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(VideoError, match="Choose another folder"):
        record_run(a_run(tmp_path / "runs"), tmp_path / "out", 1, envs=Striped)


@pytest.mark.skipif("egl" not in opengl.backends() and "osmesa" not in opengl.backends(), reason="no OpenGL here")
@pytest.mark.slow
def test_a_task_registered_only_as_a_vector_env_is_rendered(tmp_path):
    observation, action = gym.spaces.Box(-np.inf, np.inf, (9,), np.float32), gym.spaces.Box(-1, 1, (2,), np.float32)
    run = untrained_run(tmp_path / "runs", observation, action, env="examples.crawler:Crawler-v0", given=False)
    run = dataclasses.replace(run, trust_modules=True)
    files, evaluation = record_run(run, tmp_path / "out", 1, seed=0)
    assert evaluation.lengths.tolist() == [200] and imageio.imread(files[0], plugin="FFMPEG").std() > 1
    np.testing.assert_allclose(evaluation.returns, evaluate_run(run, 1, seed=0).returns, rtol=1e-6)


def test_frames_dropped_by_the_encoder_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("imageio_ffmpeg.count_frames_and_secs", lambda path: (3, 0.1))
    with pytest.raises(VideoError, match="3 frames instead of 6: is the disk full"):
        record_run(a_run(tmp_path / "runs"), tmp_path / "out", 1, envs=Striped)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_a_video_is_an_error(tmp_path):
    (tmp_path / "some.mp4").write_bytes(b"\0" * 48)  # like a file that a full disk leaves behind
    with pytest.raises(VideoError, match="0 frames instead of 6: is the disk full"):
        videos._check_frames(tmp_path / "some.mp4", 6)


def test_a_worker_that_dies_during_a_recording_is_an_error_even_if_training_restarts_workers(tmp_path):
    run = a_run(tmp_path / "runs", on_worker_death="restart")
    with pytest.raises(VideoError, match=r"could not be recorded: worker 0 .* exited with code 3"):
        record_run(run, tmp_path / "out", 1, envs=Dying)
    assert not (tmp_path / "out").exists()


def test_an_env_that_hangs_does_not_hang_the_run(tmp_path):
    run = a_run(tmp_path / "runs", step_timeout_s=1.0)
    with pytest.raises(VideoError, match=r"could not be recorded: .* timed out after 1"):
        record_run(run, tmp_path / "out", 1, envs=Hanging)
    assert not (tmp_path / "out").exists()


def test_the_module_that_workers_load_does_not_load_tensorflow():
    code = f"import sys, {videos.__name__}; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
