"""The report on the machine."""

import subprocess
import sys

import pytest

from vecenv import __main__ as info
from vecenv import opengl


def test_the_report_says_what_a_bug_report_needs(capsys):
    info.main([])
    printed = capsys.readouterr().out
    for name in ("python", "platform", "vecenv-ppo", "gymnasium", "tensorflow", "cores", "start methods", 
                 "shared memory", "OpenGL, egl", "OpenGL, osmesa"):  # fmt: skip
        assert f"\n{name} " in f"\n{printed}", name
    assert "fork" in printed


def test_it_runs_as_a_module_and_loads_no_tensorflow():
    code = "import sys, vecenv.__main__; vecenv.__main__.report(); assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_library_that_is_not_there_or_does_not_work_is_told_apart(monkeypatch):
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None if name == "OSMesa" else "lib.so")
    monkeypatch.setattr(opengl, "why_not", lambda backend: "no device")
    found = info.report()
    assert found["OpenGL, egl"] == "does not work: no device"
    assert found["OpenGL, osmesa"] == "libOSMesa is not installed"


def test_what_does_not_draw_has_a_reason():
    pytest.importorskip("mujoco")
    assert "invalid value for environment variable MUJOCO_GL" in opengl.why_not("nonsense")


@pytest.mark.parametrize(
    ("display", "chosen", "expected"),
    [(":0", "", [None]), ("", "osmesa", ["osmesa"]), ("", "", ["egl"]), (":0", "egl", ["egl"])],
)
def test_which_opengl_is_tried(monkeypatch, display, chosen, expected):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "lib.so" if name == "EGL" else None)
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setenv("MUJOCO_GL", chosen)
    assert opengl.backends() == expected
