"""Tests of send and recv: partial batches in the order in which envs finish."""

import array
import fcntl
import multiprocessing
import os
import select
import termios
import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector.utils import iterate
from hypothesis import given, settings
from hypothesis import strategies as st

import vecenv
from tests.helpers import CountingEnv, SampledEnv, any_space_at_all, assert_same, counting_fns
from tests.vecenv.vector.test_sync_vector_env import MODES
from vecenv.rows.infos import split_infos
from vecenv.workers.protocol import FRAME

BOTH = [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv]


@settings(max_examples=8, deadline=None)
@given(
    space=any_space_at_all(),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from([np.float32, np.float16]),  # float16 is not the space's dtype
    num_workers=st.integers(1, 4),
    schedule=st.lists(st.permutations(range(4)).flatmap(lambda ids: st.integers(0, 4).map(lambda n: ids[:n]))),
)
def test_every_env_returns_what_it_returns_alone_whatever_the_order(space, mode, dtype, num_workers, schedule):
    """This holds for any space, mode and schedule of sends."""
    fns = [lambda: SampledEnv(space, spaces.Box(-1, 1, (2,), np.float32), info=True)] * 4
    alone = [vecenv.SyncVectorEnv(fns[:1], autoreset_mode=mode) for _ in range(4)]
    for i, one in enumerate(alone):
        one.reset(seed=3 + i)
    serial = vecenv.SyncVectorEnv(fns, autoreset_mode=mode)
    with vecenv.AsyncVectorEnv(fns, num_workers=num_workers, autoreset_mode=mode) as parallel:
        assert_same(parallel.reset(seed=3), serial.reset(seed=3))
        for step, ids in enumerate(schedule):
            if not ids:
                continue
            actions = np.stack([np.full(2, (step + i) % 20 / 20) for i in ids]).astype(dtype)
            expected = {i: alone[i].step(action[None]) for i, action in zip(ids, actions, strict=True)}
            for envs in (serial, parallel):
                envs.send(actions[:1], ids[:1])
                if len(ids) > 1:
                    envs.send(actions[1:], np.array(ids[1:]))
                left = set(ids)
                while left:
                    batch = envs.recv(1)
                    for k, i in enumerate(batch.env_ids.tolist()):
                        (theirs,) = iterate(alone[i].observation_space, expected[i][0])
                        assert_same(list(iterate(envs.observation_space, batch.observations))[k], theirs)
                        for ours, theirs in zip(batch[1:4], expected[i][1:4], strict=True):
                            assert ours.dtype == theirs.dtype and ours[k] == theirs[0]
                        infos = split_infos(batch.infos, len(batch.env_ids))[k]
                        assert repr(infos) == repr(split_infos(expected[i][4], 1)[0])
                        left.remove(i)


class GatedEnv(CountingEnv):
    """Env 0 steps only once the file `gate` exists."""

    def __init__(self, index, gate):
        super().__init__(index, 100)
        self.gate = gate

    def step(self, action):
        while self.index == 0 and not os.path.exists(self.gate):
            os.sched_yield()
        return super().step(action)


def test_recv_does_not_wait_for_the_slowest_env(tmp_path):
    gate = tmp_path / "open"
    with vecenv.AsyncVectorEnv([lambda i=i: GatedEnv(i, gate) for i in range(4)], num_workers=2) as envs:
        envs.reset()
        envs.send([0, 0], [2, 3])
        assert sorted(envs.recv(2).env_ids) == [2, 3]
        envs.send([0, 0, 0], [3, 0, 2])
        batch = envs.recv(2)  # env 0 blocks only its own worker
        assert sorted(batch.env_ids) == [2, 3]
        np.testing.assert_array_equal(batch.observations, [[i, 0, 2] for i in batch.env_ids])
        np.testing.assert_array_equal(batch.infos["steps"], [2, 2])
        with pytest.raises(multiprocessing.TimeoutError, match=r"after 0.01 second.*0 of 1 envs.*envs \[0\].*again"):
            envs.recv(1, timeout=0.01)
        with pytest.raises(AlreadyPendingCallError, match=r"envs \[0\] while they are in flight"):
            envs.send([0, 0], [0, 1])
        gate.touch()
        assert list(envs.recv().env_ids) == [0]  # a late reply is neither lost nor mistaken for another
        observations, *_ = envs.step([0] * 4)
        np.testing.assert_array_equal(observations[:, 2], [2, 1, 3, 3])


@pytest.mark.parametrize("cls", BOTH)
def test_the_errors_for_wrong_calls_say_what_is_wrong(cls):
    with cls(counting_fns(3)) as envs:
        envs.reset()
        with pytest.raises(NoAsyncCallError, match="Calling `recv` without any prior call to `send`"):
            envs.recv(1)
        for ids, message in (
            ([0, 3], "use ids from 0 to 2"),
            ([-1, 0], "use ids from 0 to 2"),
            ([1, 1], "name each env once"),
            ([], "non-empty sequence of env indices"),
            ([[0]], "sequence of env indices"),
            ([0.5], "sequence of env indices"),
        ):
            with pytest.raises(ValueError, match=message):
                envs.send([0] * len(ids), ids)
        with pytest.raises(ValueError, match=r"shape \(1,\), but 2 envs"):
            envs.send([0], [0, 1])
        envs.send([0, 1], [2, 0])
        with pytest.raises(ValueError, match=r"recv\(3\): 2 envs are in flight"):
            envs.recv(3)
        calls = (envs.reset, lambda: envs.step([0] * 3), lambda: envs.call("index"), lambda: envs.set_attr("index", 1))
        for call in calls:
            with pytest.raises(AlreadyPendingCallError, match="pending call to `send`"):
                call()
        assert sorted(envs.recv().env_ids) == [0, 2]
        envs.reset()


def test_the_error_for_nan_in_an_action_names_its_env():
    space = spaces.Box(-1, 1, (1,), np.float32)
    with vecenv.SyncVectorEnv([lambda: SampledEnv(space, space)] * 4) as envs:
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="NaN in actions for env 3"):
            envs.send(np.array([[0.0], [np.nan]], np.float32), [1, 3])


class HeavyEnv(CountingEnv):
    """Takes actions and returns infos larger than a pipe's buffer."""

    action_space = spaces.Box(-1, 1, (40_000,), np.float32)

    def step(self, action):
        assert action.dtype == np.float64 and action[0] == self.index / 10
        observation, *rest, _ = super().step(action)
        return observation, *rest, {"note": "x" * 300_000}


def test_messages_larger_than_a_pipes_buffer_in_both_directions_do_not_deadlock():
    with vecenv.AsyncVectorEnv([lambda i=i: HeavyEnv(i, 100) for i in range(6)], num_workers=2) as envs:
        envs.reset()
        for _ in range(2):
            for i in range(6):
                envs.send(np.full((1, 40_000), i / 10), [i])
            batch = envs.recv()
            assert sorted(batch.env_ids) == list(range(6)) and len(batch.infos["note"][5]) == 300_000


class GatedTypingEnv(CountingEnv):
    """Each env steps only while its own gate, a file in the folder `gates`, exists."""

    action_space = spaces.Text(1_000_000)

    def __init__(self, index, gates):
        super().__init__(index, 100)
        self.gate = gates / str(index)

    def step(self, action):
        while not self.gate.exists():
            os.sched_yield()
        return super().step(action)


def test_timeouts_expire_after_messages_that_had_to_wait_for_room_in_a_pipe(tmp_path):
    def close_gates():
        for gate in tmp_path.iterdir():
            gate.unlink()

    def open_gates():
        for i in range(4):
            (tmp_path / str(i)).touch()

    with vecenv.AsyncVectorEnv([lambda i=i: GatedTypingEnv(i, tmp_path) for i in range(4)], num_workers=1) as envs:
        envs.reset()
        channel = envs._pool.workers[0].channel
        envs.send(["a"], [0])
        envs.send(["a" * 400_000], [1])
        assert channel.unsent
        room = select.poll()
        room.register(channel.fileno(), select.POLLOUT)
        (tmp_path / "0").touch()
        room.poll()  # until the worker has read what was in the pipe
        envs.send(["a"], [2])
        assert list(envs.recv(1).env_ids) == [0]
        too_late = threading.Timer(5.0, open_gates)  # ends a wait that ignores its timeout
        too_late.start()
        with pytest.raises(multiprocessing.TimeoutError):
            envs.recv(1, timeout=0.2)
        open_gates()
        assert sorted(envs.recv().env_ids) == [1, 2]
        close_gates()
        envs.step_async(["a"] * 4)
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.2)
        too_late.cancel()
        envs.close(terminate=True)


def test_recv_returns_every_result_that_has_arrived():
    with vecenv.AsyncVectorEnv(counting_fns(5, 50), num_workers=1, infos=False) as envs:
        envs.reset()
        envs.send([0] * 5)
        arrived = array.array("i", [0])
        while arrived[0] < 5 * FRAME.size:
            fcntl.ioctl(envs._pool.workers[0].channel.fileno(), termios.FIONREAD, arrived)
        assert sorted(envs.recv(1).env_ids) == [0, 1, 2, 3, 4]


def test_hundreds_of_sends_before_a_recv_do_not_deadlock():
    with vecenv.AsyncVectorEnv(counting_fns(700, 50), num_workers=1) as envs:
        envs.reset()
        for i in range(700):
            envs.send([0], [i])
        assert sorted(envs.recv().env_ids) == list(range(700))


def test_an_error_names_env_and_worker_and_then_only_close_is_legal():
    def fail(env):
        env.length = None

    with vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2) as envs:
        envs.reset()
        envs.apply(fail, [2])
        envs.send([0] * 4)
        with pytest.raises(TypeError, match="env 2 in worker 1 raised during step"):
            envs.recv()
        with pytest.raises(vecenv.StateError):
            envs.recv()


class LockAction(gym.Space):
    """A space whose actions cannot be pickled."""

    def sample(self, mask=None, probability=None):
        return threading.Lock()

    def contains(self, x):
        return True

    def __eq__(self, other):
        return isinstance(other, LockAction)


def test_actions_that_cannot_be_pickled_are_rejected_before_any_env_is_in_flight():
    class Env(CountingEnv):
        action_space = LockAction()

    with vecenv.AsyncVectorEnv([lambda i=i: Env(i) for i in range(4)], num_workers=2) as envs:
        envs.reset()
        with pytest.raises(TypeError, match="pickle"):
            envs.send([0, 0, threading.Lock()], [0, 1, 3])
        with pytest.raises(NoAsyncCallError):
            envs.recv()
        envs.send([0, 0], [0, 3])
        assert sorted(envs.recv().env_ids) == [0, 3]


def test_after_an_error_in_recv_a_serial_vector_env_can_only_be_closed():
    with vecenv.SyncVectorEnv(counting_fns(3)) as envs:
        envs.reset()
        envs.apply(lambda env: setattr(env, "length", None), [1])
        envs.send([0] * 3)
        with pytest.raises(TypeError):
            envs.recv()
        for call in (envs.recv, envs.reset, lambda: envs.apply(type)):
            with pytest.raises(vecenv.StateError, match="broken by an earlier fault"):
                call()


def test_while_one_env_takes_one_step_the_others_take_many(tmp_path):
    gate = tmp_path / "open"
    with vecenv.AsyncVectorEnv([lambda i=i: GatedEnv(i, gate) for i in range(4)], num_workers=4) as envs:
        envs.reset()
        envs.send([0] * 4)
        done = np.zeros(4, int)
        while done.sum() < 60:
            batch = envs.recv(2)
            done[batch.env_ids] += 1
            envs.send([0] * len(batch.env_ids), batch.env_ids)
        assert done[0] == 0 and done[1:].min() > 0
        gate.touch()
        assert sorted(envs.recv().env_ids) == [0, 1, 2, 3]


def test_closing_does_not_wait_for_an_env_in_flight(tmp_path):
    with vecenv.AsyncVectorEnv([lambda i=i: GatedEnv(i, tmp_path / "never") for i in range(4)], num_workers=4) as envs:
        envs.reset()
        envs.send([0] * 4)
        assert sorted(envs.recv(3).env_ids) == [1, 2, 3]  # env 0 hangs
        with pytest.warns(UserWarning, match="pending call to `send`"):
            envs.close(timeout=0)
