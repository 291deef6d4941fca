"""`python -m vecenv` prints the facts that a bug report needs."""

import subprocess
import sys

import pytest

from vecenv import __main__, opengl


def test_the_report_has_every_fact_that_a_bug_report_needs(capsys):
    __main__.main([])
    printed = capsys.readouterr().out
    for name in ("python", "platform", "vecenv-ppo", "gymnasium", "tensorflow", "cores", "start methods",
                 "shared memory", "OpenGL, egl", "OpenGL, osmesa"):  # fmt: skip
        assert f"\n{name} " in f"\n{printed}", name
    assert "fork" in printed


def test_the_report_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "vecenv"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("python "), done


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tests.helpers:CountingEnw"], "has no class or function CountingEnw either. Did you mean 'CountingEnv'"),
        (["no_such_module:Env"], "the module 'no_such_module' cannot be imported"),
        ([], "ENV is missing: write it before options that take several words, or as `--env ENV`"),
        (["--env-kwargs", "low_ms=5", "CartPole-v1"], "ENV is missing: write it before options that take several"),
        (["--wrappers", "ClipReward", "CartPole-v1"], "ENV is missing: write it before options that take several"),
        (["CartPole-v1", "--env-kw", "a=1"], "unrecognized arguments: --env-kw a=1"),
        (["CartPole-v1", "Pendulum-v1"], "unrecognized arguments: Pendulum-v1"),
        (["--env", "CartPole-v1", "Pendulum-v1"], "unrecognized arguments: Pendulum-v1"),
        (["CartPole-v1", "--num-envs", "0"], "num_envs=0 is out of range: it must be 1 or more"),
        (["CartPole-v1", "--num-workers", "0", "-1"], "num_workers=-1 is out of range: it must be 0 to 16"),
        (["CartPole-v1", "--num-workers", "17"], "num_workers=17 is out of range: it must be 0 to 16"),
        (["CartPole-v1", "--seconds", "0"], "seconds=0.0 is out of range: it must be positive"),
        (["CartPole-v1", "--seconds", "inf"], "seconds=inf is out of range"),
        (["CartPole-v1", "--seconds", "nan"], "seconds=nan is out of range"),
        (["CartPole-v1", "--env-kwargs", "[4]"], "'[4]' is neither KEY=VALUE nor a JSON object"),
        (["CartPole-v1", "--env-kwargs", "seconds=4", "num_envs=2"], "sets num_envs, seconds, which the env would not"),
        (["CartPole-v1", "--wrappers", "a b"], "'a b' names no wrapper"),
        (["CartPole-v1", "--wrappers", "ClipRewards"], "has no wrapper 'ClipRewards'. Did you mean"),
        (["CartPole-v1", "--env-kwargs", "size=[4"], "the value of 'size', [4, is not JSON"),
    ],
)
def test_a_wrong_argument_of_measure_is_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["measure", *words])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and message in printed.splitlines()[-1] and "Traceback" not in printed


def test_the_report_does_not_load_tensorflow():
    code = "import sys, vecenv.__main__; vecenv.__main__.report(); assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_report_distinguishes_a_missing_library_from_a_broken_one(monkeypatch):
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None if name == "OSMesa" else "lib.so")
    monkeypatch.setattr(opengl, "why_not", lambda backend: "no device")
    found = __main__.report()
    assert found["OpenGL, egl"] == "does not work: no device"
    assert found["OpenGL, osmesa"] == "libOSMesa is not installed"


def test_a_backend_that_cannot_render_has_a_reason():
    pytest.importorskip("mujoco")
    assert "invalid value for environment variable MUJOCO_GL" in opengl.why_not("nonsense")


def test_the_reason_of_a_backend_without_its_library_is_the_library(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, stderr="AttributeError"))
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None if name == "OSMesa" else "lib.so")
    assert opengl.why_not("osmesa") == "libOSMesa is not installed" and opengl.why_not("egl") == "AttributeError"


@pytest.mark.parametrize(
    ("display", "chosen", "expected"),
    [(":0", "", [None]), ("", "osmesa", ["osmesa"]), ("", "", ["egl"]), (":0", "egl", ["egl"])],
)
def test_display_and_mujoco_gl_decide_which_opengl_backends_are_tried(monkeypatch, display, chosen, expected):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "lib.so" if name == "EGL" else None)
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setenv("MUJOCO_GL", chosen)
    assert opengl.backends() == expected
