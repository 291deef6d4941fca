"""Tests of LocalPool: with num_workers=0, this process steps the envs, and results are the same as with workers."""

import gc
import multiprocessing
import os
import weakref
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import CountingEnv, assert_same, counting_fns
from vecenv.rows.messages import RowsOptions
from vecenv.testing import check_vector_env
from vecenv.workers.local_pool import LocalPool


def local(num_envs=4, **kwargs):
    return vecenv.AsyncVectorEnv(counting_fns(num_envs), num_workers=0, **kwargs)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_rules_for_vector_envs_hold(mode):
    fns = [lambda: gym.make("CartPole-v1")] * 3
    check_vector_env(lambda: vecenv.AsyncVectorEnv(fns, num_workers=0, autoreset_mode=mode))


def test_no_process_is_started_and_this_process_holds_the_envs():
    before = multiprocessing.active_children()
    with local() as envs:
        assert envs.num_workers == 0 and envs.processes == []
        assert multiprocessing.active_children() == before
        envs.reset(seed=0)
        seen = []
        envs.apply(lambda env: seen.append((os.getpid(), env.index)), [2, 0])
        assert seen == [(os.getpid(), 2), (os.getpid(), 0)]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_call_returns_the_same_as_with_workers(mode):
    theirs = vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2, autoreset_mode=mode)
    with local(autoreset_mode=mode) as ours, theirs:
        assert_same(ours.reset(seed=0), theirs.reset(seed=0))
        for _ in range(3 if mode == AutoresetMode.DISABLED else 9):
            for envs in (ours, theirs):
                envs.step_async([0] * 4)
            assert_same(ours.step_wait(), theirs.step_wait())
        mask = np.array([True, False, True, False])
        if mode == AutoresetMode.DISABLED:
            arguments = {"seed": 9, "options": {"reset_mask": mask}}
            assert_same(ours.reset(**arguments), theirs.reset(**arguments))
        assert ours.get_attr("steps") == theirs.get_attr("steps")
        ours.set_attr("length", [5, 6, 7, 8]), theirs.set_attr("length", [5, 6, 7, 8])
        assert ours.call("__getattribute__", "length") == theirs.call("__getattribute__", "length")


def test_a_serial_vector_env_passes_the_callers_own_objects_to_its_envs_as_gymnasium_does():
    values, options = [[0], [1]], {"weights": [2]}

    class Keeping(CountingEnv):
        def reset(self, *, seed=None, options=None):
            self.weights = options["weights"]
            return super().reset(seed=seed)

    for cls in (vecenv.SyncVectorEnv, gym.vector.SyncVectorEnv):
        with closing(cls([lambda i=i: Keeping(i) for i in range(2)])) as envs:
            envs.set_attr("extra", values)
            envs.reset(options=options)
            for env, value in zip(envs.envs, values, strict=True):
                assert env.extra is value and env.weights is options["weights"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_arguments_belong_to_the_caller_again_when_a_call_has_begun(num_workers):
    class Keeping(CountingEnv):
        def reset(self, *, seed=None, options=None):
            self.weights = options["weights"]
            return super().reset(seed=seed)

        def same(self, value):
            return value

    options, value = {"weights": [1]}, [2]
    with vecenv.AsyncVectorEnv([lambda i=i: Keeping(i) for i in range(2)], num_workers=num_workers) as envs:
        envs.reset_async(options=options)
        options["weights"].append(3)
        envs.reset_wait()
        assert envs.get_attr("weights") == ([1], [1])
        envs.call_async("same", value)
        value.append(3)
        assert envs.call_wait() == ([2], [2])


def test_envs_step_in_the_order_in_which_their_actions_were_sent():
    with local() as envs:
        envs.reset(seed=0)
        envs.send([0, 0], [3, 1])
        envs.send([0], [0])
        assert list(envs.recv(2).env_ids) == [3, 1]
        assert list(envs.recv(1, timeout=0).env_ids) == [0]  # timeouts have no effect
        envs.send([0], [2])
        batch = envs.recv()
        assert list(batch.env_ids) == [2]
        assert_same(batch.observations, np.array([[2.0, 0, 1]]))


class Failing(CountingEnv):
    """Raises at its second step."""

    def step(self, action):
        if self.steps == 1:
            raise KeyError("lost")
        return super().step(action)


def test_an_exception_is_raised_unchanged_and_then_only_close_is_legal():
    envs = vecenv.AsyncVectorEnv([lambda: CountingEnv(0), lambda: Failing(1)], num_workers=0)
    envs.reset(seed=0)
    envs.step([0, 0])
    with pytest.raises(KeyError, match="lost") as raised:
        envs.step([0, 0])
    assert raised.value.__notes__ == ["raised by env 1 during step"]
    with pytest.raises(vecenv.StateError, match="broken"):
        envs.step([0, 0])
    envs.close()


def test_a_call_that_needs_a_reset_leaves_the_envs_usable():
    pytest.importorskip("pygame")
    with vecenv.SyncVectorEnv([lambda: gym.make("CartPole-v1", render_mode="rgb_array")] * 2) as envs:
        with pytest.raises(gym.error.ResetNeeded):
            envs.render()
        envs.reset(seed=0)
        assert len(envs.render()) == 2


def test_an_error_in_a_call_leaves_the_envs_usable():
    with local() as envs:
        envs.reset()
        with pytest.raises(AttributeError, match="nonsense"):
            envs.get_attr("nonsense")
        envs.step([0] * 4)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_an_error_in_a_step_breaks_the_vector_env_except_a_batch_that_needs_a_reset(batched, reset):
    class Failing(gym.vector.SyncVectorEnv if batched else CountingEnv):
        error = ValueError("the motor is on fire")

        def step(self, action):
            if self.error is not None:
                raise self.error
            return super().step(action)

    def build(num_envs, autoreset_mode):
        return Failing(counting_fns(num_envs), autoreset_mode=autoreset_mode)

    with vecenv.SyncVectorEnv(vecenv.Batched(build, 2) if batched else [lambda: Failing(0)] * 2) as envs:
        if reset:
            envs.reset()
        if batched:
            Failing.error = gym.error.ResetNeeded("the motor is cold")
            with pytest.raises(gym.error.ResetNeeded):
                envs.step([0, 0])
            Failing.error = ValueError("the motor is on fire")
        with pytest.raises(ValueError, match="on fire"):
            envs.step([0, 0])
        with pytest.raises(vecenv.StateError, match="broken"):
            envs.step([0, 0])


@pytest.mark.parametrize("begin", ["reset", "set_state"])
def test_an_env_that_needs_a_reset_in_the_middle_of_its_episode_breaks_the_vector_env(begin):
    class Lost(CountingEnv):
        def step(self, action):
            if self.steps == 1 and self.index == 1:
                raise gym.error.ResetNeeded("lost")
            return super().step(action)

    fns = [lambda i=i: Lost(i) for i in range(2)]
    with vecenv.SyncVectorEnv(fns) as saved, vecenv.SyncVectorEnv(fns) as envs:
        saved.reset()
        envs.reset() if begin == "reset" else envs.set_state(saved.get_state())
        envs.get_attr("steps")
        envs.step([0, 0])
        with pytest.raises(gym.error.ResetNeeded, match="lost"):
            envs.step([0, 0])
        with pytest.raises(vecenv.StateError, match="broken"):
            envs.step([0, 0])


def test_an_error_in_a_constructor_is_raised_and_leaves_nothing_behind():
    def fail():
        raise OSError("no license")

    with pytest.raises(OSError, match="no license"):
        vecenv.AsyncVectorEnv([lambda: CountingEnv(0), fail], num_workers=0)


@pytest.mark.parametrize("how", [{"on_worker_death": "restart"}, {"context": "spawn"}])
def test_worker_options_are_rejected_without_workers(how):
    with pytest.raises(ValueError, match=r"needs worker processes, but num_workers=0 starts none"):
        local(**how)


@pytest.mark.filterwarnings("error")
def test_closing_a_pool_releases_its_envs_and_may_be_repeated():
    pool = LocalPool(counting_fns(2), RowsOptions())
    pool.close()  # before it has started
    pool.start()
    env = weakref.ref(pool.envs[0])
    pool.close()
    pool.close()
    gc.collect()
    assert env() is None


def test_every_env_is_closed_even_if_one_raises():
    closed = []

    class Closing(CountingEnv):
        def close(self):
            closed.append(self.index)
            if self.index == 1:
                raise OSError("still busy")

    envs = vecenv.AsyncVectorEnv([lambda i=i: Closing(i) for i in range(3)], num_workers=0)
    with pytest.warns(UserWarning, match=r"an env raised in close\(\):(.|\n)*still busy"):
        envs.close()
    assert closed == [0, 1, 2]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("mode", ["single", "batched"])
def test_an_error_in_close_is_a_warning_with_and_without_workers(num_workers, mode):
    class Closing(gym.vector.SyncVectorEnv if mode == "batched" else CountingEnv):
        def close(self, **kwargs):
            raise OSError("still busy")

    def build(num_envs, autoreset_mode):
        return Closing(counting_fns(num_envs), autoreset_mode=autoreset_mode)

    source = vecenv.Batched(build, 2) if mode == "batched" else [lambda: Closing(0)] * 2
    envs = vecenv.AsyncVectorEnv(source, num_workers=num_workers)
    with pytest.warns(UserWarning, match=r"an env raised in close\(\):(.|\n)*still busy"):
        envs.close()
    assert envs.closed
