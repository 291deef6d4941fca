"""Tests of vecenv/mujoco/rendering.py: frames are Gymnasium's, and where none can be drawn it says what to install."""

import ctypes.util
import os

import gymnasium as gym
import numpy as np
import pytest

import vecenv
from vecenv.errors import RenderingFailed
from vecenv.mujoco import HalfCheetah, rendering

SIZE = {"render_mode": "rgb_array", "width": 80, "height": 60}


@pytest.fixture
def opengl(monkeypatch):
    """Has Gymnasium draw without a display, as we do."""
    monkeypatch.delenv("DISPLAY", raising=False)
    found = [name for name, library in (("egl", "EGL"), ("osmesa", "OSMesa")) if ctypes.util.find_library(library)]
    if not found:
        pytest.skip("no OpenGL without a display: apt-get install libegl1")
    monkeypatch.setenv("MUJOCO_GL", found[0])
    return found[0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Hopper-v5", "Reacher-v5", "Humanoid-v5"])
def test_every_frame_is_gymnasiums(opengl, env_id, num_workers):
    theirs = gym.vector.SyncVectorEnv([lambda: gym.make(env_id, **SIZE)] * 3)
    with vecenv.make(env_id, 3, num_workers=num_workers, **SIZE) as ours:
        assert ours.render_mode == "rgb_array"
        ours.reset(seed=1), theirs.reset(seed=1)
        theirs.action_space.seed(1)
        for _ in range(3):
            for _ in range(8):
                actions = theirs.action_space.sample()
                ours.step(actions), theirs.step(actions)
            frames = ours.render()
            assert isinstance(frames, tuple) and frames[0].shape == (60, 80, 3) and frames[0].dtype == np.uint8
            np.testing.assert_array_equal(np.stack(frames), np.stack(theirs.render()))
            assert np.stack(frames).std() > 5
    theirs.close()


def test_without_a_display_what_works_is_found_and_nothing_is_left_in_the_environment(opengl, monkeypatch):
    monkeypatch.delenv("MUJOCO_GL")
    before = dict(os.environ)
    envs = HalfCheetah(3, **SIZE)
    envs.reset(seed=0)
    frame = envs.render_env(2)
    assert frame.shape == (60, 80, 3) and frame.std() > 5
    assert dict(os.environ) == before
    envs.close(), envs.close()


@pytest.mark.parametrize("variable", [None, "no_such_library"])
def test_where_nothing_can_be_drawn_it_says_what_to_install(monkeypatch, variable):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    if variable is None:
        monkeypatch.setattr(rendering.ctypes.util, "find_library", lambda name: None)
    else:
        monkeypatch.setenv("MUJOCO_GL", variable)
    envs = HalfCheetah(2, **SIZE)
    envs.reset(seed=0)
    with pytest.raises(RenderingFailed, match=r"env 1 cannot be rendered.*apt-get install libegl1.*MUJOCO_GL"):
        envs.render_env(1)
    envs.step(np.zeros((2, 6), np.float32))  # nothing else is the worse for it


def test_without_a_render_mode_it_says_what_to_write():
    envs = HalfCheetah(2)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        envs.render()


def test_other_options_than_gymnasiums_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'zoom'"):
        HalfCheetah(2, zoom=3)
