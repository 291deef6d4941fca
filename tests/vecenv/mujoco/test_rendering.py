"""Tests of vecenv/mujoco/rendering.py: frames equal Gymnasium's, and without OpenGL the error says what to install."""

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest

import vecenv
from vecenv.errors import RenderingFailed
from vecenv.mujoco import HalfCheetah, MujocoVectorEnv

ROOT = Path(__file__).parents[3]
SIZE = {"render_mode": "rgb_array", "width": 80, "height": 60}


@pytest.fixture
def opengl(monkeypatch):
    """Makes Gymnasium render without a display, as vecenv does."""
    monkeypatch.delenv("DISPLAY", raising=False)
    found = [name for name, library in (("egl", "EGL"), ("osmesa", "OSMesa")) if ctypes.util.find_library(library)]
    if not found:
        pytest.skip("no OpenGL without a display: apt-get install libegl1")
    monkeypatch.setenv("MUJOCO_GL", found[0])
    return found[0]


SLOW_TASKS = ("Hopper-v5", "Swimmer-v5", "Humanoid-v5")


@pytest.mark.parametrize("num_workers", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "env_id", ["HalfCheetah-v5", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TASKS)]
)
def test_every_frame_equals_gymnasiums(opengl, env_id, num_workers):
    """Renders in workers, because Mesa's OpenGL may crash in a process that has loaded TensorFlow."""
    theirs = vecenv.AsyncVectorEnv([lambda: gym.make(env_id, **SIZE)] * 2, num_workers=1)
    with vecenv.make(env_id, 2, num_workers=num_workers, **SIZE) as ours:
        assert ours.num_workers > 0
        assert ours.render_mode == "rgb_array"
        ours.reset(seed=1), theirs.reset(seed=1)
        theirs.action_space.seed(1)
        for _ in range(2):
            for _ in range(8):
                actions = theirs.action_space.sample()
                ours.step(actions), theirs.step(actions)
            frames = ours.render()
            assert isinstance(frames, tuple) and frames[0].shape == (60, 80, 3) and frames[0].dtype == np.uint8
            np.testing.assert_array_equal(np.stack(frames), np.stack(theirs.render()))
            assert np.stack(frames).std() > 5
    theirs.close()


def run_alone(function):
    """Runs a function of this module in a process without TensorFlow."""
    code = f"from tests.vecenv.mujoco import test_rendering; test_rendering.{function}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr


class Painted(HalfCheetah):
    """The second and later cheetahs are thick and red."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.physics.expand("geom_size")[1:] *= 2
        self.physics.expand("geom_rgba")[1:] = [1, 0, 0, 1]


def painted():
    """Renders without MUJOCO_GL, with models that differ; runs in a separate process."""
    before = dict(os.environ)
    envs = Painted(3, reset_noise_scale=0.0, **SIZE)
    envs.reset(seed=0)
    first, second, third = envs.render()
    assert first.shape == (60, 80, 3) and first.std() > 5
    assert (first != second).mean() > 0.01 and (second == third).all()
    assert dict(os.environ) == before
    small = HalfCheetah(1, **SIZE)
    small.mujoco_renderer.width = 40
    assert small.render()[0].shape == (60, 40, 3)
    small.close()
    envs.close(), envs.close()


def test_frames_show_each_envs_model_and_environment_variables_do_not_change(opengl, monkeypatch):
    monkeypatch.delenv("MUJOCO_GL")
    run_alone("painted")


def followed():
    """Renders a robot at two places on a floor without a pattern; runs in a separate process."""
    camera = '<camera name="track" mode="trackcom" pos="0 -1 0.5" xyaxes="1 0 0 0 0.5 1"/>'
    for inside in ("", camera):
        spec = mujoco.MjSpec.from_string(
            '<mujoco><worldbody><light directional="true"/><geom type="plane" size="0 0 1"/><body pos="0 0 0.2">'
            f'<freejoint/><geom size="0.1" rgba="1 0 0 1"/>{inside}</body></worldbody></mujoco>'
        )
        envs = Ball(2, xml_file=spec, frame_skip=1, **SIZE)
        envs.reset(seed=0)
        envs.data.qpos[1, 0] = 30
        for _ in range(2):
            near, far = envs.render()
            red = (
                (near[..., 0] > 2 * near[..., 1].astype(int)).mean(),
                (far[..., 0] > 2 * far[..., 1].astype(int)).mean(),
            )
            assert min(red) > 0.01 and abs(red[0] - red[1]) < 0.01
            envs.step(np.zeros((2, 0)))
        envs.close()


class Ball(MujocoVectorEnv):
    def observe(self):
        return self.data.qpos

    def outcome(self, before, actions):
        return np.zeros(self.num_envs), np.zeros(self.num_envs, bool), {}


def framed():
    """Renders an arm in all directions, with a free object before it in the model; runs in a separate process."""
    for actuator in ('<motor joint="elbow"/>', '<position tendon="cable"/>'):
        spec = mujoco.MjSpec.from_string(
            '<mujoco><worldbody><light directional="true"/><geom type="plane" size="0 0 1"/>'
            '<body pos="1 -1 0.1"><freejoint/><geom size="0.1"/></body><body pos="1 0 1">'
            '<geom type="cylinder" size="0.05 0.05"/><body><joint axis="0 0 1"/>'
            '<geom type="capsule" fromto="0 0 0 2 0 0" size="0.02"/>'
            '<body pos="2 0 0"><joint name="elbow" axis="0 0 1"/>'
            '<geom type="capsule" fromto="0 0 0 2 0 0" size="0.02"/>'
            '<geom pos="2 0 0" size="0.4" rgba="1 0 0 1"/></body></body></body></worldbody>'
            '<tendon><fixed name="cable"><joint joint="elbow" coef="1"/></fixed></tendon>'
            f"<actuator>{actuator}</actuator></mujoco>"
        )
        envs = Ball(4, xml_file=spec, frame_skip=1, **SIZE)
        envs.reset(seed=0)
        envs.data.qpos[0, -1] = 3  # folded
        envs.render_env(0)
        envs.data.qpos[:, -2] = np.arange(4) * np.pi / 2
        envs.physics.start(np.arange(4))
        for frame in envs.render():
            assert 1e-4 < (frame[..., 0] > 2 * frame[..., 1].astype(int)).mean() < 0.1
        envs.close()


@pytest.mark.parametrize("renders", ["followed", "framed"])
def test_the_camera_of_a_task_follows_the_robot_by_default_or_shows_all_that_it_reaches(opengl, renders):
    run_alone(renders)


@pytest.mark.parametrize("variable", [None, "no_such_library"])
def test_the_error_without_opengl_says_what_to_install(monkeypatch, variable):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if variable is None:
        monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    else:
        monkeypatch.setenv("MUJOCO_GL", variable)
    envs = HalfCheetah(2, **SIZE)
    envs.reset(seed=0)
    with pytest.raises(RenderingFailed, match=r"env 1 cannot be rendered.*apt-get install libegl1.*MUJOCO_GL"):
        envs.render_env(1)
    envs.step(np.zeros((2, 6), np.float32))  # the envs can still be stepped


def test_the_error_for_a_backend_that_does_not_work_says_what_it_lacks(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "no_such_library")
    monkeypatch.setattr("vecenv.mujoco.rendering.why_not", lambda backend: f"{backend} is not installed")
    envs = HalfCheetah(2, **SIZE)
    envs.reset(seed=0)
    with pytest.raises(RenderingFailed, match=r"works: no_such_library: no_such_library is not installed\. Install a "):
        envs.render_env(0)


def test_the_error_without_a_render_mode_says_what_to_pass():
    envs = HalfCheetah(2)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        envs.render()
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        envs.mujoco_renderer  # noqa: B018


def test_options_that_gymnasium_lacks_are_rejected():
    with pytest.raises(TypeError, match="unexpected keyword argument 'zoom'"):
        HalfCheetah(2, zoom=3)


TRACKED = '<mujoco><worldbody><body><freejoint/><geom size="1"/><camera name="track"/></body></worldbody></mujoco>'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"default_camera_config": "top"}, r"`camera`\) is 'top', but must be a dict .*\['track'\], pass camera_name"),
        ({"default_camera_config": {"dist": 2}}, r"`camera`\) has the unknown key 'dist': use azimuth, distance"),
        ({"default_camera_config": {"distance": "far"}}, "invalid distance: 'far'"),
        ({"default_camera_config": {"lookat": np.zeros(2)}}, "invalid lookat: array"),
        ({"default_camera_config": {"type": 1, "trackbodyid": 9}}, r"trackbodyid: 9, which is not in range\(0, 2\)"),
        ({"default_camera_config": {"type": mujoco.mjtCamera.mjCAMERA_TRACKING}}, "invalid trackbodyid: -1"),
        ({"camera_name": "top"}, r"the model has no camera 'top': its cameras are \['track'\]"),
        ({"camera_id": 1}, "camera_id=1: it must be from -1 to 0"),
        ({"max_geom": "many"}, "max_geom='many': it must be a positive integer"),
        ({"width": 80.0}, "width=80.0: it must be a positive integer"),
        ({"visual_options": {"joints": True}}, "must map members of mujoco.mjtVisFlag to 0 or 1"),
        ({"visual_options": {999: True}}, "must map members of mujoco.mjtVisFlag to 0 or 1"),
    ],
)
def test_an_invalid_camera_or_size_is_an_error_that_says_what_is_valid_before_anything_is_rendered(options, message):
    spec = mujoco.MjSpec.from_string(TRACKED)
    with pytest.raises((TypeError, ValueError), match=message):
        Ball(1, xml_file=spec, frame_skip=1, render_mode="rgb_array", **options)
    if "default_camera_config" in options:
        with pytest.raises((TypeError, ValueError), match=message):
            type("Filmed", (Ball,), {"camera": options["default_camera_config"]})(1, xml_file=spec, frame_skip=1)


def misdirected():
    """Gives a renderer's camera an attribute that does not exist; runs in a separate process."""
    envs = HalfCheetah(1, **SIZE)
    envs.reset(seed=0)
    envs.mujoco_renderer.default_cam_config = {"dist": 2}
    with pytest.raises(AttributeError, match="dist"):
        envs.render()
    envs.close()


def test_an_error_of_a_working_backend_is_not_reported_as_a_missing_backend(opengl):
    run_alone("misdirected")
