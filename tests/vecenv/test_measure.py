"""`python -m vecenv measure ENV` measures what it prints, and says what it could not measure."""

import os

import gymnasium as gym
import numpy as np
import pytest

from tests.helpers import CountingEnv
from vecenv import __main__
from vecenv.measure import SYNC, Measurement, measure, worker_counts

SLEEPING = {"env_id": "benchmarks.slow:Sleeping-v0", "step_ms": 5.0, "num_envs": 4}


def test_four_workers_step_four_sleeping_envs_at_the_same_time():
    found = measure(**SLEEPING, num_workers=[0, 4], seconds=0.5)
    assert set(found.rates) == {SYNC, "vecenv, 0 workers", "vecenv, 4 workers"} and not found.errors
    assert all(seconds >= 5e-3 for seconds in found.step_s)
    assert all(rate <= 1 / 5e-3 for rate in found.rates[SYNC] + found.rates["vecenv, 0 workers"])
    assert max(found.rates[SYNC]) > 0.5 / 5e-3
    assert max(found.gains("vecenv, 4 workers")) > 2


@pytest.mark.parametrize(
    ("env_id", "num_workers", "cores", "expected"),
    [
        ("Sleeping", [0, 2], 4, "Try --num-workers 8."),
        ("Sleeping", [2], 1, "Try --num-workers 4."),
        ("Sleeping", [0, 8], 4, None),
        ("Millisecond", [2], 4, None),
    ],
)
def test_more_workers_than_cores_are_suggested_for_an_env_that_waits(env_id, num_workers, cores, expected, monkeypatch):
    monkeypatch.setattr("vecenv.measure.available_cores", lambda: cores)
    monkeypatch.setattr("vecenv.measure.MOST_PER_CORE", 4)
    found = measure(f"benchmarks.slow:{env_id}-v0", step_ms=5.0, num_envs=8, num_workers=num_workers, seconds=0.5)
    assert ("\nOne env alone waits, or runs another process, for " in str(found)) == (expected is not None)
    assert expected is None or expected in str(found)


@pytest.mark.parametrize("numbers", [{"num_envs": 0}, {"num_workers": [-1]}, {"seconds": 0}, {"seconds": -1.0}])
def test_a_number_out_of_range_is_an_error(numbers):
    with pytest.raises(ValueError, match=f"{next(iter(numbers))}=.* is out of range"):
        measure("CartPole-v1", **numbers)


class OnePerProcess(gym.Env):
    """Raises if the process already has an open one."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    owner = None

    def __init__(self):
        if OnePerProcess.owner == os.getpid():
            raise RuntimeError("only one env per process")
        OnePerProcess.owner = os.getpid()

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def close(self):
        OnePerProcess.owner = None


def test_a_vector_env_that_fails_is_reported_and_the_others_are_measured():
    found = measure("tests.vecenv.test_measure:OnePerProcess", num_envs=2, num_workers=[2], seconds=0.1)
    assert found.errors == {SYNC: "RuntimeError: only one env per process"}
    assert found.rates["vecenv, 2 workers"] and found.gains("vecenv, 2 workers") == []
    assert f"{SYNC}     failed: RuntimeError: only one env per process" in str(found)
    assert "Fastest: vecenv, 2 workers.\n" in str(found)


class EndsInWorkers(CountingEnv):
    """Raises an error in a late step in any process except one."""

    def __init__(self, process):
        super().__init__(0)
        self.process, self.taken = process, 0

    def step(self, action):
        self.taken += 1
        if os.getpid() != self.process and self.taken > 3:  # each of the five turns takes at least one step
            raise RuntimeError("the simulator is gone")
        return super().step(action)


def test_a_vector_env_that_fails_late_is_reported_and_the_others_are_measured():
    name = "tests.vecenv.test_measure:EndsInWorkers"
    found = measure(name, num_envs=2, num_workers=[0, 2], seconds=0.5, process=os.getpid())
    assert found.errors == {"vecenv, 2 workers": "RuntimeError: the simulator is gone"}
    assert list(found.rates) == [SYNC, "vecenv, 0 workers"] and all(len(each) == 5 for each in found.rates.values())


def test_the_error_of_an_env_in_a_worker_is_reported_with_its_cause_and_only_once(monkeypatch):
    monkeypatch.setattr(OnePerProcess, "owner", None)  # the envs of a failed vector env are not closed
    found = measure("tests.vecenv.test_measure:OnePerProcess", num_envs=2, num_workers=[1], seconds=0.1)
    assert found.errors == dict.fromkeys([SYNC, "vecenv, 1 worker"], "RuntimeError: only one env per process")


def test_an_env_that_does_not_work_alone_raises_its_error():
    with pytest.raises(gym.error.NameNotFound):
        measure("NoSuchEnv-v0", seconds=0.1)


@pytest.mark.parametrize(("env_id", "in_one_call"), [("CartPole-v1", False), ("InvertedPendulum-v5", True)])
def test_only_envs_that_make_steps_in_one_call_have_a_row_for_it(env_id, in_one_call):
    if in_one_call:
        pytest.importorskip("mujoco")
    found = measure(env_id, num_envs=2, num_workers=[0], seconds=0.1)
    assert ("vecenv.make, in one call" in found.rates) == in_one_call


def test_a_gain_is_the_ratio_of_speeds_in_the_same_turn():
    found = Measurement([2e-6] * 18 + [4e-6, 9e-3], [1e-3], {SYNC: [100.0, 200.0], "ours": [200.0, 300.0]}, {})
    assert found.gains("ours") == [2.0, 1.5]
    printed = str(found)
    assert "a step takes 2 us (90% of them 2 to 9e+03); a reset takes 1 ms" in printed
    assert "ours                                  250   1.75 x   1.50 to 2.00" in printed
    assert "Fastest: ours, 1.75 times as fast" in printed
    assert "SyncVectorEnv varies by a factor of 2.0. Measure again." in printed
    slower = str(Measurement([2e-6], [1e-3], {SYNC: [100.0], "ours": [90.0]}, {}))
    assert f"Fastest: {SYNC}. Next: ours, 0.90 times as fast." in slower


def test_worker_counts_are_powers_of_two_up_to_the_cores_and_the_envs(monkeypatch):
    monkeypatch.setattr("vecenv.measure.available_cores", lambda: 12)
    assert worker_counts(64) == [0, 2, 4, 8, 12]
    assert worker_counts(4) == [0, 2, 4]
    monkeypatch.setattr("vecenv.measure.available_cores", lambda: 1)
    assert worker_counts(64) == [0, 1]


@pytest.mark.parametrize(
    "words",
    [
        ["Pendulum-v1", "--num-workers", "0", "--env-kwargs", "g=9.0"],
        ["--env", "Pendulum-v1", "--num-workers", "0", "--env-kwargs", "g=9.0"],
        ["--env-kwargs", "g=9.0", "--num-workers", "0", "--env=Pendulum-v1"],
    ],
)
def test_the_command_prints_the_measurement(words, capsys):
    __main__.main(["measure", *words, "--num-envs", "3", "--seconds", "0.1", "--wrappers", "TimeAwareObservation"])
    printed = capsys.readouterr().out
    assert printed.startswith("Pendulum-v1, 3 envs, ") and "one env alone: a step takes " in printed
    assert "\nvecenv, 0 workers " in printed and "\nFastest: " in printed


def test_the_env_may_follow_an_option_that_takes_one_word(capsys):
    __main__.main(["measure", "--num-workers", "0", "--num-envs", "2", "--seconds", "0.1", "CartPole-v1"])
    assert capsys.readouterr().out.startswith("CartPole-v1, 2 envs, ")


def test_a_load_before_the_measurement_is_reported(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for load, reported in ((3.1, True), (2.9, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        printed = str(measure(**SLEEPING, num_workers=[0], seconds=0.1))
        assert ("distort this: the load average was 3.1 before. Close them first." in printed) == reported


class FailsToClose(CountingEnv):
    def __init__(self):
        super().__init__(0)

    def close(self):
        raise OSError("the recording is lost")


def test_an_exception_of_close_is_a_warning_and_the_measurement_is_complete():
    with pytest.warns(UserWarning, match="one env: close raised .*the recording is lost"):
        found = measure(f"{__name__}:FailsToClose", num_envs=2, num_workers=[0], seconds=0.2)
    assert set(found.rates) == {SYNC, "vecenv, 0 workers"} and not found.errors


class IsInterrupted(FailsToClose):
    def step(self, action):
        raise KeyboardInterrupt


def test_an_exception_of_close_does_not_hide_another_one():
    with pytest.raises(KeyboardInterrupt):
        measure(f"{__name__}:IsInterrupted", num_envs=2, num_workers=[0], seconds=0.2)
