"""Tests of on_worker_death="restart": the run continues, and the cut episodes are truncated."""

import contextlib
import multiprocessing
import os
import re
import signal
import stat
import threading
import time
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import CountingEnv, assert_same, counting_fns, wait_for_end
from tests.start_methods import METHODS
from vecenv.workers import messenger, pipes

pytestmark = pytest.mark.filterwarnings("ignore:.*It is restarted")


def restarting(num_envs=4, length=50, **kwargs):
    return vecenv.AsyncVectorEnv(counting_fns(num_envs, length), num_workers=2, on_worker_death="restart", **kwargs)


def kill(envs, worker):
    process = envs.processes[worker]
    process.kill()
    process.join()


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_cut_episodes_are_truncated_with_their_last_complete_observation(mode):
    with restarting(autoreset_mode=mode) as envs, vecenv.SyncVectorEnv(counting_fns(4, 50)) as serial:
        envs.reset(seed=0), serial.reset(seed=0)
        for _ in range(6):
            envs.step([0] * 4), serial.step([0] * 4)
        kill(envs, 0)
        with pytest.warns(UserWarning, match=r"worker 0 \(envs 0:2\) was killed by SIGKILL.*restarted.*truncated"):
            observations, rewards, terminated, truncated, infos = envs.step([0] * 4)
        expected = serial.step([0] * 4)
        np.testing.assert_array_equal(observations[2:], expected[0][2:])  # worker 1 is unaffected
        np.testing.assert_array_equal(rewards, [0, 0, *expected[1][2:]])
        assert list(truncated) == [True, True, False, False] and not terminated.any()
        assert list(infos["worker_restarted"]) == [True, True, False, False]
        np.testing.assert_array_equal(envs.episode_returns, [21, 21, 28, 28])  # 1 + ... + 6 and 1 + ... + 7
        np.testing.assert_array_equal(envs.episode_lengths, [6, 6, 7, 7])
        if mode == AutoresetMode.SAME_STEP:
            np.testing.assert_array_equal(observations[:2, 2], [0, 0])  # already the next episode's
            np.testing.assert_array_equal(np.stack(infos["final_obs"][:2]), [[0, 0, 6], [1, 0, 6]])
            assert list(infos["_final_obs"]) == [True, True, False, False]
            assert list(infos["final_info"]["worker_restarted"]) == [True, True, False, False]
            next_steps = [1, 1]
        else:
            assert "final_info" not in infos
            np.testing.assert_array_equal(observations[:2], [[0, 0, 6], [1, 0, 6]])
            next_steps = [0, 0]
        if mode == AutoresetMode.DISABLED:
            with pytest.raises(AssertionError, match="reset_mask"):
                envs.step([0] * 4)
            return
        observations, _, _, truncated, _ = envs.step([0] * 4)
        np.testing.assert_array_equal(observations[:, 2], [*next_steps, 8, 8])
        assert not truncated.any()


def test_every_restart_is_counted_and_a_warning_even_under_the_filter_that_drops_repeated_ones():
    with restarting() as envs:
        envs.reset()
        assert envs.worker_restarts == 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(3):
                kill(envs, 0)
                envs.step([0] * 4)
        numbers = [re.search(r"Restarts so far: (\d+)", str(warning.message)).group(1) for warning in caught]
        assert numbers == ["1", "2", "3"] and envs.worker_restarts == 3


def test_a_cut_row_that_the_new_process_leaves_to_the_parent_is_not_checked_there():
    with restarting(finite_observations=True) as envs:
        envs.reset()
        kill(envs, 0)
        np.testing.assert_array_equal(envs.step([0] * 4)[0][:, 2], [0, 0, 1, 1])


def test_with_disabled_autoreset_a_mask_resets_the_cut_envs():
    with restarting(autoreset_mode="Disabled") as envs:
        envs.reset()
        kill(envs, 1)
        *_, truncated, _ = envs.step([0] * 4)
        assert list(truncated) == [False, False, True, True]
        observations, _ = envs.reset(options={"reset_mask": truncated})
        np.testing.assert_array_equal(observations[:, 2], [1, 1, 0, 0])
        observations, *_ = envs.step([0] * 4)
        np.testing.assert_array_equal(observations[:, 2], [2, 2, 1, 1])


def test_a_finished_episode_is_not_cut_but_followed_by_the_next():
    with restarting(length=3) as envs:  # lengths 3, 4, 5, 3
        envs.reset()
        for _ in range(3):
            *_, terminated, truncated, _ = envs.step([0] * 4)
        assert list(terminated | truncated) == [True, False, False, True]
        kill(envs, 0)
        observations, rewards, terminated, truncated, _ = envs.step([0] * 4)
        assert list(truncated | terminated) == [False, True, False, False]
        np.testing.assert_array_equal(observations[:, 2], [0, 3, 4, 0])
        np.testing.assert_array_equal(rewards, [0, 0, 4, 0])


@pytest.mark.parametrize("what", ["reset", "call", "set_attr", "apply"])
def test_a_worker_found_dead_in_another_call_restarts_and_its_episodes_are_cut_at_the_next_step(what):
    with restarting() as envs:
        envs.reset()
        envs.step([0] * 4)
        kill(envs, 1)
        if what == "reset":
            assert_same(envs.reset(seed=3)[0][:, 2], np.zeros(4))
        elif what == "call":
            assert envs.call("index") == (0, 1, 2, 3)
            assert envs.get_attr("episode") == (0, 0, 0, 0)  # the new envs were reset, too
        elif what == "apply":
            assert envs.apply(lambda env: env.index, [3]) == [3]
        else:
            envs.set_attr("length", 77)
            assert envs.get_attr("length") == (77,) * 4
        *_, truncated, _ = envs.step([0] * 4)
        assert list(truncated) == ([False] * 4 if what == "reset" else [False, False, True, True])


@pytest.mark.parametrize("dies_first", [False, True])
def test_a_restore_that_an_env_rejects_changes_neither_the_newest_batch_nor_the_cuts(dies_first):
    with restarting() as envs:
        envs.reset()
        states = envs.get_state()
        states[1] = {**states[1], "env": [{**states[1]["env"][0], "class": "OtherEnv"}]}
        envs.step([0] * 4)
        if dies_first:
            kill(envs, 0)
        with pytest.raises(ValueError, match="belongs to OtherEnv"):
            envs.set_state(states)
        if not dies_first:
            kill(envs, 0)
        observations, _, _, truncated, _ = envs.step([0] * 4)
        np.testing.assert_array_equal(observations, [[0, 0, 1], [1, 0, 1], [2, 0, 1], [3, 0, 1]])
        assert truncated.tolist() == [True, True, False, False]


def test_a_death_in_a_masked_reset_cuts_the_unmasked_envs_of_the_worker():
    with restarting(autoreset_mode="Disabled") as envs:
        envs.reset()
        envs.step([0] * 4)
        kill(envs, 0)
        mask = np.array([True, False, False, False])
        envs.reset_async(options={"reset_mask": mask})
        mask[:] = [False, True, False, False]  # it belongs to the caller again
        observations, _ = envs.reset_wait()
        np.testing.assert_array_equal(observations[:, 2], [0, 1, 1, 1])
        observations, _, _, truncated, _ = envs.step([0] * 4)
        assert list(truncated) == [False, True, False, False]
        np.testing.assert_array_equal(observations[:, 2], [1, 1, 2, 2])


class Deadly:
    """A number whose conversion to an array kills the process, after the preceding leaves have been written."""

    def __array__(self, dtype=None, copy=None):
        os.kill(os.getpid(), signal.SIGKILL)


class DyingEnv(CountingEnv):
    """Env 1 kills its process at its third step, when half of its observation is in memory."""

    observation_space = spaces.Dict({"a": CountingEnv.observation_space, "b": spaces.Box(0, 1, ())})

    def _observe(self):
        deadly = self.steps == 3 and self.index == 1
        return {"a": super()._observe(), "b": Deadly() if deadly else np.array(0.5, np.float32)}


def test_rows_in_flight_between_send_and_recv_are_cut_and_no_other_row_is_lost():
    fns = [lambda i=i: DyingEnv(i, 5000) for i in range(6)]
    with vecenv.AsyncVectorEnv(fns, num_workers=2, on_worker_death="restart") as envs:
        envs.reset()
        steps = dict.fromkeys(range(6), 0)
        cut = 0
        envs.send([0] * 6)
        received = 0
        while cut < 6:  # env 1's worker dies repeatedly; the number of steps that the other worker takes is random
            batch, received = envs.recv(2), received + 1
            assert received < 1000
            for k, i in enumerate(batch.env_ids.tolist()):
                index, _, step = batch.observations["a"][k]
                assert index == i
                if batch.truncated[k]:
                    assert batch.infos["worker_restarted"][k] and batch.rewards[k] == 0
                    assert step == steps[i], "not the last complete observation"
                    cut += 1
                    steps[i] = -1
                else:
                    assert step == steps[i] + 1
                    steps[i] += 1
            envs.send([0] * len(batch.env_ids), batch.env_ids)
        envs.recv()


class UnsentEnv(CountingEnv):
    """Its first step ends the episode, and its process when that reports the step, unless the file `gone` exists."""

    def __init__(self, gone):
        super().__init__(0, 1)
        self._gone = gone

    def step(self, action):
        *others, info = super().step(action)
        return *others, info if self._gone.exists() else {"steps": Bomb(self._gone)}


class Bomb:
    """Ends the process that pickles it."""

    def __init__(self, gone):
        self._gone = gone

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        self._gone.touch()
        os._exit(3)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_step_that_a_worker_has_written_but_not_reported_does_not_end_the_episode(mode, tmp_path):
    fns = [lambda: UnsentEnv(tmp_path / "gone")]
    with vecenv.AsyncVectorEnv(fns, on_worker_death="restart", autoreset_mode=mode) as envs:
        envs.reset()
        envs.send([0])
        batch = envs.recv()
        assert (tmp_path / "gone").exists()
        assert (batch.rewards[0], batch.terminated[0], batch.truncated[0]) == (0, False, True)
        assert batch.infos["worker_restarted"][0] and envs.episode_lengths[0] == 0


def test_infos_continue_after_a_restart():
    with restarting() as envs:
        envs.reset()
        for _ in range(4):
            envs.step([0] * 4)
        kill(envs, 0)
        envs.step([0] * 4), envs.step([0] * 4)
        *_, infos = envs.step([0] * 4)
        np.testing.assert_array_equal(infos["steps"], [1, 1, 7, 7])
        np.testing.assert_array_equal(infos["_steps"], [True] * 4)


def test_a_worker_may_die_twice_in_a_row_but_a_third_death_is_an_error(tmp_path):
    class Mortal(CountingEnv):
        """Ends its process instead of being built, once for each file in the folder."""

        def __init__(self, index):
            for file in tmp_path.iterdir():
                file.unlink()
                os._exit(5)
            super().__init__(index, 50)

    fns = [lambda i=i: Mortal(i) for i in range(2)]
    with vecenv.AsyncVectorEnv(fns, num_workers=2, on_worker_death="restart") as envs:
        for truncated in ([], [True, False], [True, False]):
            kill(envs, 0)
            (tmp_path / "1").touch()
            if truncated:
                assert envs.step([0, 0])[3].tolist() == truncated
                envs.send([0, 0])
                envs.recv()
            else:
                envs.reset()
        for i in range(9):
            (tmp_path / str(i)).touch()
        kill(envs, 0)
        with pytest.raises(vecenv.WorkerDied, match=r"worker 0 \(envs 0:1\).*3 times in a row"):
            envs.step([0, 0])
        assert len(list(tmp_path.iterdir())) == 7
        with pytest.raises(vecenv.StateError):
            envs.step([0, 0])


def test_without_infos_a_cut_episode_has_none_and_its_episode_infos_are_nan():
    with restarting(length=3, infos=False, info_keys=["share"]) as envs:  # lengths 3, 4, 5, 3
        envs.reset()
        for _ in range(4):
            envs.step([0] * 4)
        kill(envs, 0)
        *_, truncated, infos = envs.step([0] * 4)
        assert truncated.tolist() == [True, False, False, False] and infos == {}
        np.testing.assert_array_equal(envs.episode_infos["share"], [np.nan, np.nan, 1.0, np.nan])


def test_a_restore_ends_the_episodes_that_were_cut_and_begins_the_ones_that_can_be_cut():
    with restarting(2) as envs:
        envs.reset()
        states = envs.get_state()
        envs.step([0] * 2), envs.step([0] * 2)
        kill(envs, 0)
        envs.call("index")  # the cut is not reported
        envs.set_state(states)
        observations, _, _, truncated, _ = envs.step([0] * 2)
        assert not truncated.any() and observations[:, 2].tolist() == [1] * 2
        envs.set_state(states)
        kill(envs, 0)
        observations, _, _, truncated, _ = envs.step([0] * 2)
        assert truncated.tolist() == [True, False] and observations[:, 2].tolist() == [0, 1]


def for_each_socket(call):
    """Calls a function with the number of each socket of this process, of which a worker's pipe is one."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                call(number)


class Deserting(CountingEnv):
    """At its first step, leaves as `how` says, unless the file `gone` exists. Is then rebuilt and reset slowly."""

    def __init__(self, gone, how):
        super().__init__(0, 50)
        self._gone, self._how = gone, how
        self._delay()

    def _delay(self):
        if self._gone.exists():
            time.sleep(0.1)

    def reset(self, **kwargs):
        self._delay()
        return super().reset(**kwargs)

    def step(self, action):
        if not self._gone.exists():
            self._gone.write_text(str(os.getpid()))
            if self._how == "dies":
                os._exit(3)
            for_each_socket(os.close)
            signal.pause()
        return super().step(action)


def test_the_timeout_of_a_step_begins_again_when_its_worker_has_been_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(pipes, "SLICE_S", 60.0)  # time that is left for a command that was sent again, at least
    with vecenv.AsyncVectorEnv([lambda: Deserting(tmp_path / "gone", "dies")], on_worker_death="restart") as envs:
        envs.reset()
        envs.step_async([0])
        envs.processes[0].join()
        assert envs.step_wait(timeout=0)[3].tolist() == [True]


def test_a_worker_that_closes_its_pipe_is_replaced_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(messenger, "END_S", 0.1)
    with vecenv.AsyncVectorEnv([lambda: Deserting(tmp_path / "gone", "closes")], on_worker_death="restart") as envs:
        envs.reset()
        with pytest.warns(UserWarning, match=r"worker 0 \(envs 0:1\) closed its pipe but is still running during step"):
            assert envs.step([0])[3].tolist() == [True]
        wait_for_end([int((tmp_path / "gone").read_text())])
        assert envs.step([0])[0][:, 2].tolist() == [0]


def test_a_death_during_construction_is_an_error_even_with_restart():
    def dying():
        os._exit(3)

    with pytest.raises(vecenv.WorkerDied, match=r"exited with code 3.*during construction"):
        vecenv.AsyncVectorEnv([dying] * 2, on_worker_death="restart")


@pytest.mark.parametrize("method", METHODS)
def test_restarts_work_with_every_start_method(method):
    with vecenv.AsyncVectorEnv(
        [lambda: gym.make("CartPole-v1")] * 4, num_workers=2, on_worker_death="restart", context=method
    ) as envs:
        envs.reset(seed=1)
        for worker in (0, 1, 1):
            kill(envs, worker)
            *_, truncated, _ = envs.step([0] * 4)
            assert truncated.sum() == 2
            envs.step([0] * 4)
    with pytest.raises(ValueError, match="on_worker_death='perhaps': use 'raise' or 'restart'"):
        vecenv.AsyncVectorEnv(counting_fns(2), on_worker_death="perhaps")


class GatedEnv(CountingEnv):
    """Env 1 steps only once the file `gate` exists."""

    def __init__(self, index, gate):
        super().__init__(index, 50)
        self.gate = gate

    def step(self, action):
        while self.index == 1 and not self.gate.exists():
            os.sched_yield()
        return super().step(action)


def test_the_reply_of_a_worker_that_died_while_another_was_awaited_is_discarded(tmp_path):
    """The reply must not be mistaken for the reply to the next step."""
    gate = tmp_path / "open"
    fns = [lambda i=i: GatedEnv(i, gate) for i in range(2)]
    with vecenv.AsyncVectorEnv(fns, num_workers=2, on_worker_death="restart") as envs:
        envs.reset()
        envs.step_async([0, 0])
        victim = envs._pool.workers[0]
        while not victim.channel.connection.poll():  # until worker 0 has replied
            os.sched_yield()
        kill(envs, 0)
        threading.Timer(0.3, gate.touch).start()  # while `step_wait` waits for worker 1
        observations, _, _, truncated, _ = envs.step_wait()
        assert list(truncated) == [True, False]
        np.testing.assert_array_equal(observations[:, 2], [0, 1])
        for step in range(5):
            observations, rewards, *_ = envs.step([0, 0])
            np.testing.assert_array_equal(observations[:, 2], [step, step + 2])
            np.testing.assert_array_equal(rewards, [step, step + 2])


def test_an_error_in_the_second_construction_of_an_env_is_raised(tmp_path):
    there = tmp_path / "there"
    there.touch()

    class Reading(CountingEnv):
        def __init__(self, index):
            there.read_text()
            super().__init__(index)

    with vecenv.AsyncVectorEnv([lambda i=i: Reading(i) for i in range(2)], on_worker_death="restart") as envs:
        envs.reset()
        there.unlink()
        kill(envs, 0)
        with pytest.raises(FileNotFoundError, match="raised during construction"):
            envs.step([0, 0])


class Babbling(CountingEnv):
    """Writes what is no message to the worker's pipe."""

    def babble(self):
        for_each_socket(lambda number: os.write(number, b"x" * 64))


class BabblingStep(Babbling):
    def step(self, action):
        self.babble()
        return super().step(action)


@pytest.mark.parametrize("on_worker_death", ["raise", "restart"])
def test_what_an_env_writes_to_the_pipe_of_its_worker_is_an_error(on_worker_death):
    with vecenv.AsyncVectorEnv([lambda: BabblingStep(0)], on_worker_death=on_worker_death) as envs:
        envs.reset()
        with pytest.raises(
            vecenv.VecEnvError, match=r"sent bytes that are not a reply .* during step\. Something else"
        ):
            envs.step([0])


class SecondTime(Babbling):
    """Hangs or writes to the pipe when it is built for the second time."""

    def __init__(self, there, how):
        super().__init__(0)
        if there.exists():
            self.babble() if how == "babbles" else signal.pause()
        there.touch()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("hangs", multiprocessing.TimeoutError, r"worker 0 .* needs more than start_timeout_s=3 to build"),
        ("babbles", vecenv.VecEnvError, r"sent bytes that are not a reply .* during construction"),
    ],
)
def test_a_fault_in_the_second_construction_of_an_env_is_raised(how, error, message, tmp_path):
    make = [lambda: SecondTime(tmp_path / "there", how)]
    with vecenv.AsyncVectorEnv(make, on_worker_death="restart", start_timeout_s=3, context="fork") as envs:
        envs.reset()
        kill(envs, 0)
        with pytest.raises(error, match=message):
            envs.step([0])


def test_a_death_right_after_an_episode_end_cuts_the_new_episode():
    with restarting(length=3, autoreset_mode="SameStep") as envs:  # lengths 3, 4, 5, 3
        envs.reset()
        for _ in range(3):
            envs.step([0] * 4)
        kill(envs, 0)
        *_, truncated, infos = envs.step([0] * 4)
        assert list(truncated) == [True, True, False, False]
        np.testing.assert_array_equal(envs.episode_returns[:2], [0, 6])
        np.testing.assert_array_equal(envs.episode_lengths[:2], [0, 3])
        np.testing.assert_array_equal(infos["final_obs"][0], [0, 1, 0])


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_leaves_without_a_fixed_shape_keep_their_last_value_when_an_episode_is_cut(mode):
    class Named(CountingEnv):
        observation_space = spaces.Dict({"name": spaces.Text(20), "x": CountingEnv.observation_space})

        def _observe(self):
            return {"name": f"env {self.index} step {self.steps}", "x": super()._observe()}

    fns = [lambda i=i: Named(i, 50) for i in range(2)]
    with vecenv.AsyncVectorEnv(fns, num_workers=2, on_worker_death="restart", autoreset_mode=mode) as envs:
        envs.reset()
        envs.step([0, 0]), envs.step([0, 0])
        kill(envs, 0)
        observations, _, _, truncated, infos = envs.step([0, 0])
        assert list(truncated) == [True, False]
        if mode == "SameStep":
            assert observations["name"] == ("env 0 step 0", "env 1 step 3")
            assert infos["final_obs"][0]["name"] == "env 0 step 2"
            np.testing.assert_array_equal(infos["final_obs"][0]["x"], [0, 0, 2])
        else:
            assert observations["name"] == ("env 0 step 2", "env 1 step 3")
            assert envs.step([0, 0])[0]["name"] == ("env 0 step 0", "env 1 step 4")


def test_a_worker_death_with_text_actions_in_flight_does_not_affect_the_other_worker():
    class Typing(CountingEnv):
        action_space = spaces.Text(9)

        def step(self, action):
            if action == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(action)

    fns = [lambda i=i: Typing(i, 50) for i in range(4)]
    with vecenv.AsyncVectorEnv(fns, num_workers=2, on_worker_death="restart") as envs:
        envs.reset()
        envs.send(("go", "die", "go"), [0, 1, 3])
        batch = envs.recv()
        cut = dict(zip(batch.env_ids.tolist(), batch.truncated.tolist(), strict=True))
        assert cut[1] and not cut[3]
        observations, *_, truncated, _ = envs.step(("go",) * 4)
        assert observations[3, 2] == 2 and not truncated[3]
