"""Tests of what users of other vector envs complain about, one per complaint, numbered."""

import gc
import multiprocessing
import os
import subprocess
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import CountingEnv, FaultyEnv, SampledEnv, before_each_message, counting_fns, process_exists
from tests.vecenv.vector.test_send_recv import GatedEnv


def test_01_a_dead_worker_is_an_error_and_not_a_hang_or_a_bare_eof():
    with vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2) as envs:
        envs.reset()
        envs.processes[1].kill()
        with pytest.raises(
            vecenv.WorkerDied,
            match=r"worker 1 \(envs 2:4\) was killed by SIGKILL \(often because memory ran out.*Close",
        ):
            for _ in range(3):
                envs.step([0] * 4)


LOCK = threading.Lock()  # stands for any module's lock that the parent uses too


class LockingEnv(CountingEnv):
    def __init__(self):
        with LOCK:
            super().__init__(0)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("by_reference")
def test_02_threads_in_the_parent_do_not_deadlock_the_workers():
    """With fork, a lock that another thread holds stays locked in the child forever."""
    with LOCK, vecenv.AsyncVectorEnv([LockingEnv] * 2, num_workers=2) as envs:
        assert envs.reset()[0].shape == (2, 3)


def test_03_nothing_is_left_in_shared_memory_and_the_resource_tracker_is_silent():
    code = (
        "import gymnasium as gym, vecenv\n"
        "envs = vecenv.make('CartPole-v1', num_envs=4)\n"
        "envs.reset(); envs.step([0] * 4)\n"
        "with open('/proc/self/maps') as maps:\n"
        "    shared = [line for line in maps if '/dev/shm/' in line]\n"
        "assert shared and all(line.endswith('(deleted)\\n') for line in shared)\n"  # even while the envs are open
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_04_no_step_of_an_episode_is_skipped_repeated_or_hidden_by_autoreset():
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        with vecenv.AsyncVectorEnv(counting_fns(3), autoreset_mode=mode) as envs:
            envs.reset()
            rewards = np.stack([envs.step([0] * 3)[1] for _ in range(10)], axis=1)
        for row, length in zip(rewards, (3, 4, 5), strict=True):
            episode = [*range(1, length + 1), *([0] if mode == AutoresetMode.NEXT_STEP else [])]
            np.testing.assert_array_equal(row, np.resize(episode, 10))


def test_05_the_last_observation_is_neither_lost_nor_overwritten_by_the_reset():
    """This holds even for an env that always returns the same buffer."""
    with vecenv.AsyncVectorEnv(counting_fns(2), autoreset_mode="SameStep") as envs:
        envs.reset()
        for _ in range(3):
            observations, *_, infos = envs.step([0] * 2)
        np.testing.assert_array_equal(infos["final_obs"][0], [0, 0, 3])
        np.testing.assert_array_equal(observations[0], [0, 1, 0])


def test_06_truncation_and_termination_are_distinguished():
    with vecenv.AsyncVectorEnv(counting_fns(2)) as envs:  # env 0 terminates, env 1 is truncated
        envs.reset()
        steps = [envs.step([0] * 2) for _ in range(4)]
    assert [list(step[2]) for step in steps] == [[False, False]] * 2 + [[True, False], [False, False]]
    assert [list(step[3]) for step in steps] == [[False, False]] * 3 + [[False, True]]


def test_07_returned_arrays_including_nested_leaves_are_not_overwritten():
    space = spaces.Dict({"a": spaces.Box(0, 1, (3,)), "b": spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.Discrete(9)])})
    with vecenv.AsyncVectorEnv([lambda: SampledEnv(space, spaces.Discrete(2))] * 2) as envs:
        kept = [envs.reset(seed=1)[0]] + [envs.step([0, 1])[0] for _ in range(4)]
        copies = [np.concatenate([k["a"].ravel(), k["b"][0].ravel(), k["b"][1].ravel()]) for k in kept]
        for _ in range(5):
            envs.step([0, 1])
        again = [np.concatenate([k["a"].ravel(), k["b"][0].ravel(), k["b"][1].ravel()]) for k in kept]
    np.testing.assert_array_equal(copies, again)


def test_08_a_step_of_many_cheap_envs_takes_one_message_per_worker_and_not_one_per_env():
    """Gymnasium sends 32 messages to 32 processes."""
    sent: list[bytes] = []
    with vecenv.AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 32, num_workers=2) as envs:
        envs.reset(seed=1)
        with before_each_message(sent.append):
            for _ in range(10):
                envs.step(np.zeros(32, np.int64))
    assert len(sent) == 20 and max(map(len, sent)) < 100  # bytes


def test_09_there_is_one_process_per_core_and_one_numerical_thread_per_process(monkeypatch):
    class Threads(CountingEnv):
        def threads(self):
            return os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with vecenv.AsyncVectorEnv([lambda: Threads(0)] * 100) as envs:
        assert len(envs.processes) == min(vecenv.available_cores(), 100)
        assert set(envs.call("threads")) == {("1", "1", "1")}


def test_10_a_straggler_does_not_hold_up_other_envs(tmp_path):
    with vecenv.AsyncVectorEnv([lambda i=i: GatedEnv(i, tmp_path / "never") for i in range(4)], num_workers=4) as envs:
        envs.reset()
        envs.send([0] * 4)
        assert sorted(envs.recv(3).env_ids) == [1, 2, 3]  # env 0 hangs
        with pytest.warns(UserWarning, match="pending call to `send`"):
            envs.close(timeout=0)


def test_11_numeric_infos_of_mixed_types_are_not_truncated():
    class MixedEnv(CountingEnv):
        def step(self, action):
            observation, *rest, _ = super().step(action)
            return observation, *rest, {"value": 1 if self.index == 0 else 0.5}

    with vecenv.AsyncVectorEnv([lambda i=i: MixedEnv(i) for i in range(2)]) as envs:
        envs.reset()
        *_, infos = envs.step([0] * 2)
    np.testing.assert_array_equal(infos["value"], [1.0, 0.5])


@pytest.mark.parametrize("dtype", [np.float16, np.int8, np.uint8, np.float64])
def test_12_spaces_keep_their_dtype_and_rewards_of_shape_1_become_numbers(dtype):
    class OddRewards(SampledEnv):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, np.array([reward]), *rest

    space = spaces.Dict({"x": spaces.Box(0, 9, (2,), dtype), "g": spaces.Graph(spaces.Box(0, 1, (2,)), None)})
    with vecenv.AsyncVectorEnv([lambda: OddRewards(space, spaces.Discrete(2))] * 2) as envs:
        observations, _ = envs.reset(seed=1)
        assert observations["x"].dtype == dtype and len(observations["g"]) == 2
        assert envs.step([0, 1])[1].shape == (2,)


def test_13_options_are_not_changed_and_each_env_gets_its_seed():
    class SeedsEnv(CountingEnv):
        def reset(self, *, seed=None, options=None):
            self.seen = (seed, options)
            return super().reset(seed=seed)

    options = {"reset_mask": np.array([True, False, True]), "speed": 2}
    with vecenv.AsyncVectorEnv([lambda i=i: SeedsEnv(i) for i in range(3)]) as envs:
        envs.reset(seed=5)
        assert envs.get_attr("seen") == ((5, None), (6, None), (7, None))
        envs.reset(seed=[1, 2, 3], options=options)
        assert envs.get_attr("seen") == ((1, {"speed": 2}), (6, None), (3, {"speed": 2}))
    assert options.keys() == {"reset_mask", "speed"}


def test_14_a_script_may_define_envs_inline_without_a_main_guard_and_the_parent_builds_none(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, gymnasium as gym, vecenv\n"
        "class Mine(gym.Env):\n"
        "    observation_space = action_space = gym.spaces.Discrete(2)\n"
        "    def __init__(self): self.pid = os.getpid(); print('built', flush=True)\n"
        "    def reset(self, **kwargs): return 0, {}\n"
        "gym.register('Mine-v0', Mine)\n"
        "envs = vecenv.AsyncVectorEnv([lambda: gym.make('Mine-v0', disable_env_checker=True)] * 3, context='spawn')\n"
        "envs.reset()\n"
        "assert os.getpid() not in envs.get_attr('pid')\n"
        "envs.close()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("built") == 3


def test_15_close_returns_in_time_even_if_envs_hang_and_forgetting_it_does_no_harm():
    envs = vecenv.AsyncVectorEnv([lambda i=i: FaultyEnv(i, "hang", "close") for i in range(4)], num_workers=2)
    pids = [process.pid for process in envs.processes]
    envs.reset()
    envs.close(timeout=0.2)
    assert not any(process_exists(pid) for pid in pids)
    envs = vecenv.AsyncVectorEnv(counting_fns(2))
    pids = [process.pid for process in envs.processes]
    del envs
    gc.collect()
    assert not any(process_exists(pid) for pid in pids) and not multiprocessing.active_children()
