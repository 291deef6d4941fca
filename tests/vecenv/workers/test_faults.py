"""Tests of vecenv/workers/faults.py: the errors of a pool name the worker, its envs, the cause and the remedy."""

import multiprocessing
import pickle
from types import SimpleNamespace

import pytest

import vecenv
from vecenv.errors import OtherForm
from vecenv.workers import faults
from vecenv.workers.messenger import WorkerHandle
from vecenv.workers.protocol import ErrorReply

WORKER = WorkerHandle(1, 2, 5, SimpleNamespace(exitcode=3, join=lambda timeout: None), None, -1)
ON_FIRE = "Traceback ...\nValueError: the motor is on fire\n"

pytestmark = pytest.mark.filterwarnings("error")


def failed(text=ON_FIRE, kind=ValueError, env=None, doing="construction", refusal=None, other_form=None, **how):
    exception = pickle.dumps(kind) if isinstance(kind, type) else kind
    return faults.worker_failed(WORKER, ErrorReply(text, "", exception, env, doing, refusal, other_form), **how)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_death_says_how_and_what_is_left_of_the_vector_env_unless_the_worker_restarts(restarts):
    error = str(faults.worker_died(WORKER, "step", restarts=restarts))
    assert error.startswith("worker 1 (envs 2:5) exited with code 3 (") and " during step." in error
    assert error.endswith("during step. This vector env can now only be closed.") != restarts


def test_a_timeout_names_the_call_or_the_setting_and_the_workers():
    for doing, words in (("step", ["`step_wait`", "can now only be closed."]), ("construction", ["start_timeout_s"])):
        error = faults.timed_out([WORKER, WORKER], doing, 0.5)
        assert isinstance(error, multiprocessing.TimeoutError)
        for word in ("after 0.5 second(s): no answer from worker 1 (envs 2:5), worker 1 (envs 2:5).", *words):
            assert word in str(error)


@pytest.mark.parametrize(("env", "who"), [(None, "envs 2:5"), (0, "env 0"), (4, "env 4")])
def test_an_exception_names_its_env_if_it_is_known_and_carries_the_traceback(env, who):
    error = failed(env=env)
    assert isinstance(error, ValueError) and isinstance(error, vecenv.EnvError)
    assert str(error) == (
        f"{who} in worker 1 raised during construction:\n\n{ON_FIRE}\n"
        "Fix the env or its arguments (the traceback is above)."
    )


def test_the_advice_names_worker_init():
    assert str(failed(doing="worker_init")).endswith("\nFix worker_init (the traceback is above).")


@pytest.mark.parametrize("exception", [None, b"cno_such_module\nError\n."])
def test_an_exception_whose_type_is_unknown_here_is_an_env_error(exception):
    error = failed(kind=exception)
    assert isinstance(error, vecenv.EnvError) and not isinstance(error, ValueError)


@pytest.mark.parametrize("kind", [vecenv.SharedMemoryFull, vecenv.NotRestorable, None])
def test_a_refusal_is_no_fault_of_the_env(kind):
    error = failed(kind=kind, env=3, doing="get_state", refusal="it has no get_state()")
    assert type(error) is (kind or vecenv.NotRestorable)
    assert str(error) == "env 3 in worker 1: it has no get_state()"


def test_an_env_that_turns_out_to_have_another_form_is_no_error_message():
    form = OtherForm("a vector env of two agents")
    assert failed(other_form=form) is form


@pytest.mark.parametrize(("env", "who"), [(None, "envs 2:5"), (4, "env 4")])
def test_an_exception_in_a_step_names_the_env_and_breaks_the_vector_env(env, who):
    """Gymnasium also logs the error, and calls the number of the env that of a worker."""
    error = str(failed(env=env, doing="step"))
    assert error.startswith(f"{who} in worker 1 raised during step:")
    assert error.endswith("\nFix the env (the traceback is above). This vector env can now only be closed.")


def test_an_exception_between_steps_leaves_the_vector_env_intact():
    assert str(failed(doing="call", broken=False)).endswith("\nFix the env or the call (the traceback is above).")


def test_a_module_that_only_this_process_has_is_named_if_it_is_the_cause():
    lost = "ModuleNotFoundError: No module named "
    text = str(failed(f"{lost}'no_such_module'\n{lost}'another'\n\nDuring handling ...\n{lost}'pytest'\n"))
    assert f"has loaded the module 'pytest' (from {pytest.__file__})" in text and "put its folder on sys.path" in text
    assert text.endswith("give it the name of its file.") and "Fix the env" not in text
    assert "Fix the env" in str(failed(f"{lost}'pytest'\n\nDuring handling ...\n{lost}'no_such_module'\n"))
    assert "Fix the env" in str(failed(f"See '{lost}'pytest'\n"))
