"""Tests of LocalPool: with num_workers=0, this process steps the envs, and results are the same as with workers."""

import multiprocessing
import os
import threading
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import CountingEnv, assert_same, counting_fns
from vecenv.mujoco import Hopper
from vecenv.testing import check_vector_env


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


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_every_call_returns_the_same_as_with_workers(mode, num_groups):
    theirs = vecenv.AsyncVectorEnv(counting_fns(4), num_workers=2, autoreset_mode=mode)
    with local(autoreset_mode=mode, num_groups=num_groups) as ours, theirs:
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


def test_envs_step_in_the_order_in_which_their_actions_were_sent():
    with local() as envs:
        envs.reset(seed=0)
        envs.send([0, 0], [3, 1])
        envs.send([0], [0])
        assert list(envs.recv(2).env_ids) == [3, 1]
        with pytest.raises(multiprocessing.TimeoutError, match="0 of 1"):
            envs.recv(1, timeout=0)
        envs.send([0], [2])
        batch = envs.recv(2)
        assert list(batch.env_ids) == [0, 2]
        assert_same(batch.observations, np.array([[0.0, 0, 1], [2, 0, 1]]))


class Failing(CountingEnv):
    """Raises at its second step."""

    def step(self, action):
        if self.steps == 1:
            raise KeyError("lost")
        return super().step(action)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_an_exception_is_raised_unchanged_and_then_only_close_is_legal(num_groups):
    fns = [lambda: CountingEnv(0), lambda: Failing(1)]
    envs = vecenv.AsyncVectorEnv(fns, num_workers=0, num_groups=num_groups)
    envs.reset(seed=0)
    envs.step([0, 0])
    with pytest.raises(KeyError, match="lost") as raised:
        envs.step([0, 0])
    assert raised.value.__notes__ == ["raised by env 1 during step"]
    with pytest.raises(vecenv.StateError, match="broken"):
        envs.step([0, 0])
    envs.close()


def test_an_error_in_a_constructor_is_raised_and_leaves_nothing_behind():
    def fail():
        raise OSError("no license")

    with pytest.raises(OSError, match="no license"):
        vecenv.AsyncVectorEnv([lambda: CountingEnv(0), fail], num_workers=0)


@pytest.mark.parametrize("how", [{"on_worker_death": "restart"}, {"context": "spawn"}])
def test_worker_options_are_rejected_without_workers(how):
    with pytest.raises(ValueError, match=r"needs worker processes, but num_workers=0 starts none"):
        local(**how)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_groups_stepped_by_threads_equal_all_envs_stepped_together(mode):
    options = {"num_workers": 0, "num_slots": 7, "autoreset_mode": mode, "infos": False}
    task = vecenv.Batched(partial(Hopper, max_episode_steps=4), 5)
    together = vecenv.AsyncVectorEnv(task, **options)
    with vecenv.AsyncVectorEnv(task, num_groups=2, **options) as apart, together:
        assert together.groups == [range(5)] and apart.groups == [range(2), range(2, 5)]
        actions = np.random.default_rng(0).uniform(-1, 1, (6, 5, 3)).astype(np.float32)

        def step(group: int) -> None:
            rows = apart.groups[group]
            for t, batch in enumerate(actions):
                assert apart.put_actions(batch[rows.start : rows.stop], t + 1, rows) is None
                apart.step_group(group, t + 1)

        for envs in (together, apart):
            envs.reset_slot(0, seed=3)
        threads = [threading.Thread(target=step, args=(group,)) for group in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for t, batch in enumerate(actions):
            together.step_slot(t + 1, together.put_actions(batch, t + 1))
        for path, array in together.arrays.items():
            if path[0] != "final_observation":  # undefined for envs whose episode did not end
                assert_same(apart.arrays[path][1:], array[1:])
        assert_same(apart.step(actions[0]), together.step(actions[0]))


def test_an_error_in_one_group_names_the_env_that_raised_it():
    fns = [lambda: CountingEnv(0), lambda: CountingEnv(1), lambda: Failing(2)]
    envs = vecenv.AsyncVectorEnv(fns, num_workers=0, num_groups=3)
    envs.reset_slot(0, seed=0)
    for slot in (1, 0):
        envs.put_actions([0, 0, 0], slot)
        envs.step_group(0, slot)
        if slot:
            envs.step_group(2, slot)
    with pytest.raises(KeyError, match="lost") as raised:
        envs.step_group(2, 0)
    assert raised.value.__notes__ == ["raised by env 2 during step"]
    with pytest.raises(vecenv.StateError, match="broken"):
        envs.step_group(1, 0)
    envs.close()


def test_impossible_groups_are_rejected():
    with pytest.raises(ValueError, match=r"num_groups=2 needs envs that this process steps"):
        vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1, num_groups=2)
    for number in (0, 3):
        with pytest.raises(ValueError, match=rf"num_groups={number} for 2 envs"):
            local(2, num_groups=number)
    with local(2, num_groups=2, autoreset_mode="Disabled") as envs:
        envs.reset(seed=0)
        with pytest.raises(ValueError, match=r"group 0 cannot be stepped: use 0 to 1, .*DISABLED"):
            envs.step_group(0, 1, [0])
    for envs in (vecenv.AsyncVectorEnv(counting_fns(2), num_workers=1), vecenv.SyncVectorEnv(counting_fns(2))):
        with envs, pytest.raises(ValueError, match="no groups"):
            envs.step_group(0, 1)
    with local(2, num_groups=2) as envs:
        for group in (-1, 2):
            with pytest.raises(ValueError, match=f"group {group} cannot be stepped: use 0 to 1"):
                envs.step_group(group, 1)


def test_a_group_stepped_before_its_first_reset_can_still_be_reset():
    with vecenv.AsyncVectorEnv(vecenv.Batched(Hopper, 2), num_workers=0, num_groups=2) as envs:
        with pytest.raises(gym.error.ResetNeeded):
            envs.step_group(0, 1, np.zeros((1, 3), np.float32))
        envs.reset(seed=0)
        envs.step_group(0, 1, np.zeros((1, 3), np.float32))


def test_every_group_is_closed_even_if_one_raises():
    closed = []

    class Closing(CountingEnv):
        def close(self):
            closed.append(self.index)
            if self.index == 1:
                raise OSError("still busy")

    envs = vecenv.AsyncVectorEnv([lambda i=i: Closing(i) for i in range(3)], num_workers=0, num_groups=3)
    with pytest.raises(OSError, match="still busy"):
        envs.close()
    assert closed == [0, 1, 2]
