"""Tests of vecenv/errors.py: exceptions survive pickling, as joblib, Ray and multiprocessing.Pool pass them on."""

import contextlib
import copy
import importlib
import multiprocessing
import pickle
from pathlib import Path

import cloudpickle
import pytest
from gymnasium.error import DependencyNotInstalled

import vecenv
from tests.helpers import CountingEnv, subclasses_of
from vecenv.errors import in_one_line
from vecenv.workers.messenger import BadMessage

ROUND_TRIPS = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "cloudpickle": lambda error: cloudpickle.loads(cloudpickle.dumps(error)),
    "copy": copy.copy,
}


pytestmark = pytest.mark.usefixtures("by_reference")  # an exception of an env has the class that it has here


class Local(Exception):
    """Needs two arguments."""

    def __init__(self, joint, angle):
        super().__init__(f"{joint} is at {angle}")


class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no text")


class Raising(CountingEnv):
    def __init__(self, make_error):
        super().__init__(0)
        self._make_error = make_error

    def step(self, action):
        raise self._make_error()


class Nesting(CountingEnv):
    """Steps another env in a worker of its own."""

    def step(self, action):
        with vecenv.AsyncVectorEnv([lambda: Raising(lambda: KeyError("gone"))]) as envs:
            envs.reset()
            envs.step([0])


def error_of(env_fn):
    """Returns the error that a vector env raises when an env raises in a step."""
    with vecenv.AsyncVectorEnv([env_fn], daemon=False) as envs:
        envs.reset()
        with pytest.raises(vecenv.EnvError) as raised:
            envs.step([0])
    raised.value.add_note("trial 7")
    return raised.value


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(KeyError, ["gone"]), (OSError, [2, "no file"]), (UnicodeDecodeError, ["ascii", b"", 0, 1, "x"]), (Local, "ab")],
)
def test_an_env_error_keeps_its_message_types_and_notes_when_it_is_pickled(kind, arguments):
    raised = error_of(lambda: Raising(lambda: kind(*arguments)))
    assert isinstance(raised, kind)
    for name, round_trip in ROUND_TRIPS.items():
        found = round_trip(round_trip(raised))
        assert isinstance(found, kind) and isinstance(found, vecenv.EnvError), name
        assert str(found) == str(raised) and found.__notes__ == ["trial 7"], name


def test_the_error_of_an_env_in_a_vector_env_in_an_env_keeps_its_type():
    found = pickle.loads(pickle.dumps(error_of(lambda: Nesting(0))))
    assert isinstance(found, KeyError) and isinstance(found, vecenv.EnvError)


def test_an_env_error_whose_type_cannot_be_imported_elsewhere_is_still_an_env_error(tmp_path, monkeypatch):
    raised = error_of(lambda: Raising(lambda: Local("knee", 3)))
    pickled = pickle.dumps(raised)
    monkeypatch.delattr(f"{__name__}.Local")
    found = pickle.loads(pickled)
    assert type(found) is vecenv.EnvError and str(found) == str(raised)


def test_an_error_of_a_worker_reaches_the_parent_of_a_pool():
    with multiprocessing.get_context("spawn").Pool(1) as pool, pytest.raises(KeyError, match="'gone'") as raised:
        pool.apply(_raise_in_worker)
    assert isinstance(raised.value, vecenv.EnvError)


def _raise_in_worker():
    raise vecenv.errors.env_error(KeyError, "env 0 in worker 0 raised during step: 'gone'")


def test_every_exception_of_the_package_survives_pickling():
    package = Path(vecenv.__path__[0])
    files = [path.relative_to(package.parent) for path in package.rglob("*.py")]
    for file in files:
        if "ingraph" not in file.parts and file.stem != "__main__":  # TensorFlow takes seconds to import
            with contextlib.suppress(ImportError, DependencyNotInstalled):  # an extra is missing
                importlib.import_module(".".join(file.with_suffix("").parts))
    made = {
        vecenv.SharedMemoryFull: vecenv.SharedMemoryFull("m", needed_bytes=3),
        BadMessage: BadMessage("worker 1", "a line of a log"),
    }
    kinds = [kind for kind in subclasses_of(Exception) if kind.__module__.startswith("vecenv")]
    for kind in kinds:
        error = made.get(kind) or kind("the message")
        error.add_note("trial 7")
        found = pickle.loads(pickle.dumps(error))
        assert type(found) is kind and str(found) == str(error) and vars(found) == vars(error), kind
    assert {"StateError", "RuleBroken", "RowsLate", "OtherForm"} <= {kind.__name__ for kind in kinds}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("two\nlines"), "ValueError: two"),
        (ValueError("\n\nthree\nlines"), "ValueError: three"),
        (ValueError(), "ValueError"),
        (Unprintable(), "Unprintable"),
        (vecenv.NotRestorable(), "NotRestorable"),
        (vecenv.NotRestorable("env 0 has a thread:\nits heater"), "env 0 has a thread: its heater"),
        (OSError("EGLError(\n\terr = 3,\n)"), "OSError: EGLError( err = 3,"),
        (ValueError("cut off:"), "ValueError: cut off:"),
    ],
)
def test_an_error_in_one_line_is_the_first_line_of_its_message(error, expected):
    assert in_one_line(error) == expected


@pytest.mark.parametrize(
    ("make_error", "expected"),
    [
        (lambda: KeyError("gone"), "KeyError: 'gone'"),
        (lambda: ValueError("two\nlines"), "ValueError: two"),
        (lambda: _noted(ValueError("cold"), "a note\nof two lines"), "ValueError: cold"),
        (lambda: ExceptionGroup("many", [KeyError(1), ValueError(2)]), "ExceptionGroup: many (2 sub-exceptions)"),
        (lambda: Unprintable(), "Unprintable"),
        (lambda: StopIteration(), "StopIteration"),
    ],
)
def test_an_env_error_in_one_line_is_the_exception_of_the_env(make_error, expected):
    raised = error_of(lambda: Raising(make_error))
    assert expected in in_one_line(raised) and "\n" not in in_one_line(raised)
    assert in_one_line(pickle.loads(pickle.dumps(raised))) == in_one_line(raised)


def _noted(error, note):
    error.add_note(note)
    return error
