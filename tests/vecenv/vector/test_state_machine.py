"""A vector env in any state, after any sequence of calls, returns what Gymnasium's SyncVectorEnv returns.

Hypothesis draws the spaces, the vector env and the calls. `Reference` is Gymnasium's SyncVectorEnv with the few things
that Gymnasium lacks: steps of some envs, the totals of episodes, and episodes that the death of a worker cuts.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import tempfile
from collections.abc import Iterable

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import vecenv
from tests.helpers import any_space_at_all, assert_same, box_spaces, process_exists, stop_process

MAX_ENVS = 4
SEEDS = st.integers(0, 2**31 - 1)
BUILDS = st.fixed_dictionaries(
    {
        "workers": st.sampled_from(["sync", 0, 1, 2, 2, 3, 3]),
        "copy": st.booleans(),
        "num_slots": st.integers(2, 3),
        "on_worker_death": st.sampled_from(["restart", "restart", "raise"]),
    }
)


class DrawingEnv(gym.Env):
    """Draws observations, infos and the ends of its episodes, all from `np_random`. A new env has a known generator.

    A reward depends on all elements of its action and of the previous action, which the env keeps without a copy.
    """

    def __init__(self, index, observation_space, action_space):
        self.observation_space, self.action_space = copy.deepcopy((observation_space, action_space))
        self._np_random, self._np_random_seed = seeding.np_random(index)
        self.index, self.bias, self.level = index, 0.0, 0
        self.episode, self.steps, self.kept = 0, 0, 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level = (options or {}).get("level", 0)
        self.episode, self.steps, self.kept = self.episode + 1, 0, 0.0
        return self._observe(), {"episode": self.episode, "level": self.level}

    def step(self, action):
        assert self.action_space.contains(action), action
        draw = self.np_random.random()
        reward = draw + self.bias + self.level + weight_of(action) + weight_of(self.kept) / 2
        self.kept, self.steps = action, self.steps + 1
        info = {"draw": draw, "nested": {"pair": np.array([draw, self.steps])}, "name": f"{self.index}:{self.steps}"}
        info = info if draw < 0.7 else {"draw": draw} if draw < 0.9 else {}
        return self._observe(), reward, draw < 0.15, 0.15 <= draw < 0.3, info

    def mix(self, number):
        return self.index, self.episode, self.steps, self.bias, number, self.np_random.random()

    def _observe(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def get_state(self):
        return [self.bias, self.level, self.episode, self.steps, weight_of(self.kept)]

    def set_state(self, state):
        self.bias, self.level, self.episode, self.steps, self.kept = state
        self.np_random.random()  # moves no generator, because it is restored afterwards


def weight_of(value):
    """Returns a number that depends on every element of an action, and on its place."""
    if value is None:
        return 0.0
    if isinstance(value, str):
        return float(sum((k + 1) * ord(letter) for k, letter in enumerate(value)))
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, (tuple, list)):
        return sum((k + 1) * weight_of(child) for k, child in enumerate(value))
    numbers = np.asarray(value, dtype=np.float64).ravel()
    return float(np.dot(numbers, np.arange(1, len(numbers) + 1)))


class Cut(gym.Wrapper):
    """An env whose worker has died: its next step, which does not reach the env, truncates the episode."""

    def __init__(self, env, last_observation):
        super().__init__(env)
        self.last_observation, self.info = last_observation, {}

    def step(self, action):
        self.info = {"worker_restarted": True}
        return self.last_observation, 0.0, False, True, self.info

    def reset(self, **kwargs):  # in the same step
        observation, info = self.env.reset(**kwargs)
        return observation, info | self.info


class Reference:
    """What a vector env must return. A deep copy is the state of its envs."""

    def __init__(self, observation_space, action_space, num_envs, mode):
        fns = [lambda i=i: DrawingEnv(i, observation_space, action_space) for i in range(num_envs)]
        self.envs = gym.vector.SyncVectorEnv(fns, autoreset_mode=mode)
        self.has_reset = False
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)

    @property
    def mode(self):
        return self.envs.autoreset_mode

    @property
    def over(self):
        """The envs that a step would begin an episode of, or raise for if autoreset is disabled."""
        ended = self.envs._autoreset_envs & (self.mode != AutoresetMode.SAME_STEP)
        return np.flatnonzero(ended).tolist()

    @property
    def cut(self):
        return [i for i, env in enumerate(self.envs.envs) if isinstance(env, Cut)]

    @property
    def observations(self):
        space = self.envs.single_observation_space
        return concatenate(space, self.envs._env_obs, create_empty_array(space, len(self.envs.envs)))

    def reset(self, seed, options):
        mask = (options or {}).get("reset_mask", np.ones(len(self.envs.envs), bool))
        self._uncut(np.flatnonzero(mask))
        self.returns[mask], self.lengths[mask], self.has_reset = 0, 0, True
        return self.envs.reset(seed=seed, options=copy.copy(options))

    def step(self, actions):
        ids = range(len(self.envs.envs))
        before = self._begin(ids)
        result = self.envs.step(copy.deepcopy(actions))
        self._end(ids, before, *result[1:4])
        return result

    def step_one(self, i, action):
        """Steps one env with a batch of one action; returns a batch of one result."""
        whole, part = self.envs, copy.copy(self.envs)
        part.num_envs, part.envs, part.action_space = 1, [whole.envs[i]], batch_space(whole.single_action_space, 1)
        part._env_obs, part._observations = [None], create_empty_array(whole.single_observation_space, 1)
        for name in ("_rewards", "_terminations", "_truncations", "_autoreset_envs"):
            setattr(part, name, getattr(whole, name)[[i]])
        before = self._begin([i])
        result = part.step(copy.deepcopy(action))
        whole._env_obs[i] = part._env_obs[0]
        for name in ("_rewards", "_terminations", "_truncations", "_autoreset_envs"):
            getattr(whole, name)[i] = getattr(part, name)[0]
        self._end([i], before, *result[1:4])
        return result

    def kill(self, ids):
        """Replaces envs whose worker has died with new envs, and cuts their episodes."""
        for i in ids:
            fresh = self.envs.envs[i] = self.envs.env_fns[i]()
            if self.has_reset:
                fresh.reset()
                if i not in self.over:
                    self.envs.envs[i] = Cut(fresh, self.envs._env_obs[i])

    def _begin(self, ids):
        """Forgets the totals of finished episodes; returns the envs of which this step is not counted."""
        ended = self.envs._terminations | self.envs._truncations
        first = [i for i in ids if ended[i] or self.envs._autoreset_envs[i]]
        self.returns[first], self.lengths[first] = 0, 0
        return {*self.cut, *(self.over if self.mode == AutoresetMode.NEXT_STEP else ())}

    def _end(self, ids, uncounted, rewards, terminated, truncated):
        for k, i in enumerate(ids):
            if i not in uncounted:
                self.returns[i] += rewards[k]
                self.lengths[i] += 1
        self._uncut(ids)

    def _uncut(self, ids: Iterable[int]):
        for i in ids:
            if isinstance(self.envs.envs[i], Cut):
                self.envs.envs[i] = self.envs.envs[i].env


class VectorEnvMachine(RuleBasedStateMachine):
    """Calls a vector env and its `Reference` in turns. Rules name the states in which they are legal."""

    def __init__(self):
        super().__init__()
        self.envs, self.pending, self.results, self.clock = None, None, [], 0

    @initialize(
        observation_space=st.one_of(box_spaces(), any_space_at_all()),
        action_space=st.one_of(box_spaces(), any_space_at_all()),
        num_envs=st.sampled_from([1, 2, 3, 3, MAX_ENVS, MAX_ENVS]),
        mode=st.sampled_from(AutoresetMode),
        build=BUILDS,
        resets=st.sampled_from([True, True, True, False]),
    )
    def begin(self, observation_space, action_space, num_envs, mode, build, resets):
        self.spaces, self.num_envs, self.mode = (observation_space, action_space), num_envs, mode
        self.reference = Reference(*self.spaces, num_envs, mode)
        self.saved = []
        self.build(build)
        if resets:
            self.check_batch(self.envs.reset(seed=3), self.reference.reset(3, None))

    def build(self, build):
        spaces = self.spaces
        fns = [lambda i=i: DrawingEnv(i, *spaces) for i in range(self.num_envs)]
        arguments = {"autoreset_mode": self.mode, "copy": build["copy"], "num_slots": build["num_slots"]}
        self.ranges, self.restarts = [], False
        if build["workers"] == "sync":
            self.envs = vecenv.SyncVectorEnv(fns, **arguments)
        else:
            workers = min(build["workers"], self.num_envs)
            if workers:
                arguments["on_worker_death"] = build["on_worker_death"]
                self.restarts = build["on_worker_death"] == "restart"
                bounds = [self.num_envs * w // workers for w in range(workers + 1)]
                self.ranges = [range(low, high) for low, high in itertools.pairwise(bounds)]
            self.envs = vecenv.AsyncVectorEnv(fns, num_workers=workers, **arguments)
        theirs = self.reference.envs
        assert self.envs.observation_space == theirs.observation_space
        assert self.envs.action_space == theirs.action_space and self.envs.metadata == theirs.metadata
        self.pending = None  # the method that waits, and what it must return
        self.in_flight = {}  # what recv must return for each env
        self.results = []  # what was returned, copies of it, and when views in it were returned
        self.clock = 0  # counts the batches
        self.stopped = None  # a worker that will be killed before it reads the next message
        self.deaths = 0

    # The states of the machine

    def idle(self):
        return self.pending is None and not self.in_flight

    def steps(self):
        """Whether `step` is legal."""
        return self.idle() and self.reference.has_reset and not self.steps_raise()

    def steps_raise(self):
        return self.mode == AutoresetMode.DISABLED and bool(self.reference.over)

    def is_async(self):
        return isinstance(self.envs, vecenv.AsyncVectorEnv)

    # The calls

    @precondition(lambda self: self.steps())
    @rule(seeds=st.lists(SEEDS, min_size=1, max_size=5), narrow=st.booleans(), waits=st.booleans())
    def step(self, seeds, narrow, waits):
        """Steps all envs once for each seed of actions. Only the last step may stay pending."""
        for seed in seeds[:-1]:
            self.step_now(seed, narrow)
        if self.is_async() and not waits and self.steps():
            actions = self.actions(self.num_envs, seeds[-1], narrow)
            expected = self.reference.step(actions)
            self.envs.step_async(actions)
            self.lose()
            self.pending = "step_wait", self.envs.step_wait, lambda result: self.check_batch(result, expected)
            scribble(actions)  # they belong to the caller again
        else:
            self.step_now(seeds[-1], narrow)

    def step_now(self, seed, narrow=False):
        """Steps all envs if that is legal."""
        if self.steps():
            self.lose()
            actions = self.actions(self.num_envs, seed, narrow)
            expected = self.reference.step(actions)
            self.check_batch(self.envs.step(actions), expected)
            scribble(actions)
            self.what_was_returned_does_not_change()
            self.the_newest_batch_is_that_of_gymnasium()

    def step_to_an_end(self, seeds):
        """Steps all envs until an episode is over, or the seeds are used up."""
        for seed in seeds:
            if not self.reference.over:
                self.step_now(seed)

    @precondition(lambda self: self.idle() and self.reference.has_reset and self.steps_raise())
    @rule(seed=SEEDS)
    def step_envs_that_are_over(self, seed):
        """They must be reset, which the mask of Gymnasium's documentation does."""
        self.lose()
        with pytest.raises(AssertionError, match=rf"envs {re.escape(str(self.reference.over))} are over.*No env was"):
            self.envs.step(self.actions(self.num_envs, seed))
        options = {"reset_mask": np.isin(range(self.num_envs), self.reference.over)}
        self.check_batch(self.envs.reset(options=options), self.reference.reset(None, options))

    @precondition(lambda self: self.idle())
    @rule(
        seed=st.one_of(st.none(), SEEDS, st.lists(st.one_of(st.none(), SEEDS), min_size=MAX_ENVS, max_size=MAX_ENVS)),
        options=st.one_of(st.none(), st.fixed_dictionaries({"level": st.integers(1, 9)})),
        mask=st.one_of(st.none(), st.just("ended"), st.lists(st.booleans(), min_size=MAX_ENVS, max_size=MAX_ENVS)),
        waits=st.booleans(),
    )
    def reset(self, seed, options, mask, waits):
        seed = seed[: self.num_envs] if isinstance(seed, list) else seed
        if mask == "ended":
            mask = [i in {*self.reference.over, *self.reference.cut} for i in range(self.num_envs)]
        if mask is not None and self.reference.has_reset and any(mask[: self.num_envs]):
            options = {**(options or {}), "reset_mask": np.array(mask[: self.num_envs])}
        expected = self.reference.reset(seed, options)
        if waits or not self.is_async():
            self.lose()
            self.check_batch(self.envs.reset(seed=seed, options=options), expected)
        else:
            self.envs.reset_async(seed=seed, options=options)
            self.lose()
            self.pending = "reset_wait", self.envs.reset_wait, lambda result: self.check_batch(result, expected)
        if options and "reset_mask" in options:
            options["reset_mask"][:] = False  # it belongs to the caller again

    @precondition(lambda self: self.pending is not None)
    @rule(refuses=st.booleans())
    def wait(self, refuses):
        if refuses:
            self.refuse()
        _, wait, check = self.pending
        self.pending = None
        check(wait())
        self.deaths = 0

    @precondition(lambda self: self.pending is None and self.reference.has_reset)
    @rule(order=st.permutations(range(MAX_ENVS)), most=st.sampled_from([1, 2, 4, 4]), seed=SEEDS, narrow=st.booleans())
    def send(self, order, most, seed, narrow):
        closed = {*self.in_flight, *(self.reference.over if self.mode == AutoresetMode.DISABLED else ())}
        ids = [i for i in order if i < self.num_envs and i not in closed][:most]
        if not ids:
            return
        actions = self.actions(len(ids), seed, narrow)
        everyone = ids == [*range(self.num_envs)]
        self.envs.send(actions, None if everyone else ids)
        self.lose()
        for k, i in enumerate(ids):
            self.in_flight[i] = self.reference.step_one(i, self.one_of(actions, k, len(ids)))
        scribble(actions)
        self.results = [kept for kept in self.results if kept[2] != self.clock]  # send overwrites the newest view

    @precondition(lambda self: self.in_flight)
    @rule(share=st.floats(0, 1), refuses=st.booleans())
    def recv(self, share, refuses):
        """Receives in two parts, because how many envs are done after the first depends on timing."""
        if refuses:
            self.refuse()
        self.receive(round(share * len(self.in_flight)) or None)
        if self.in_flight:
            self.receive(None)

    def receive(self, some):
        batch = self.envs.recv(some)
        ids = batch.env_ids.tolist()
        assert len(ids) >= (some or len(self.in_flight)) and len(set(ids)) == len(ids)
        observations = list(iterate(batch_space(self.spaces[0], len(ids)), batch.observations))
        for k, i in enumerate(ids):
            expected = self.in_flight.pop(i)
            (observation,) = iterate(batch_space(self.spaces[0], 1), expected[0])
            assert_same(observations[k], observation)
            for ours, theirs in zip(batch[1:4], expected[1:4], strict=True):
                assert ours.dtype == theirs.dtype and ours[k] == theirs[0]
            assert_same(infos_of(batch.infos, k), infos_of(expected[4], 0))
        self.keep(batch[:5], None)

    @precondition(lambda self: self.idle())
    @rule(
        value=st.one_of(st.floats(-9, 9), st.lists(st.floats(-9, 9), min_size=MAX_ENVS, max_size=MAX_ENVS)),
        order=st.permutations(range(MAX_ENVS)),
        most=st.integers(1, MAX_ENVS),
        waits=st.booleans(),
    )
    def set_attr_apply_and_call(self, value, order, most, waits):
        value = value[: self.num_envs] if isinstance(value, list) else value
        ids = [i for i in order if i < self.num_envs][:most]
        self.lose()
        self.envs.set_attr("bias", value)
        self.reference.envs.set_attr("bias", value)
        found = self.envs.apply(lambda env: env.get_state(), ids)
        assert found == [self.reference.envs.envs[i].unwrapped.get_state() for i in ids]
        assert self.envs.np_random_seed == self.reference.envs.np_random_seed
        self.deaths = 0
        expected = self.reference.envs.call("mix", most)
        if waits or not self.is_async():
            assert self.envs.call("mix", most) == expected
        else:
            self.envs.call_async("mix", most)
            self.pending = "call_wait", self.envs.call_wait, lambda result: assert_same(result, expected)

    @precondition(lambda self: self.idle())
    @rule(through_file=st.booleans(), seeds=st.lists(SEEDS, max_size=9))
    def get_state(self, through_file, seeds):
        """Saves the states of the envs, often at the end of an episode."""
        self.lose()
        self.deaths = 0
        self.step_to_an_end(seeds)
        if self.reference.cut:
            with pytest.raises(vecenv.NotRestorableNow, match="step all its envs"):
                self.envs.get_state()
            return
        if self.reference.has_reset and "Graph(" in repr(self.spaces[0]):  # a GraphInstance is no plain value
            with pytest.raises(vecenv.NotRestorable, match="GraphInstance"):
                self.envs.get_state()
            return
        states = self.envs.get_state()
        if through_file:
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "states.npz")
                vecenv.state.save(path, states)
                states = vecenv.state.load(path)
        self.refuse()
        self.saved.append((states, copy.deepcopy(self.reference)))

    @precondition(lambda self: self.idle() and self.saved)
    @rule(index=st.integers(0, 99), build=st.one_of(st.none(), BUILDS), seed=SEEDS)
    def set_state(self, index, build, seed):
        """Restores states in the vector env that they came from or in another one, and steps it."""
        states, reference = self.saved[-1 - index % len(self.saved)]
        if build is not None:
            self.close()
            self.build(build)
        self.lose()
        self.envs.set_state(states)
        self.reference, self.clock, self.deaths = copy.deepcopy(reference), self.clock + 1, 0
        self.step_now(seed)

    @precondition(lambda self: self.idle() and self.restarts and self.stopped is None and self.deaths < 2)
    @rule(worker=st.integers(0, 2), in_call=st.booleans(), seeds=st.lists(SEEDS, max_size=9))
    def kill_a_worker(self, worker, in_call, seeds):
        """Kills a worker now, or before it reads the next message. Its restart is found out by the next call."""
        self.step_to_an_end(seeds)
        process = self.envs.processes[worker % len(self.ranges)]
        if not process_exists(process.pid):
            return
        self.reference.kill(self.ranges[worker % len(self.ranges)])
        self.deaths += 1
        stop_process(process.pid)
        self.stopped = process
        if not in_call:
            self.lose()

    def lose(self):
        """Kills the stopped worker, if there is one."""
        if self.stopped is not None:
            self.stopped.kill()
            self.stopped.join()
            self.stopped = None

    @precondition(lambda self: self.idle() and self.ranges and not self.restarts)
    @rule(
        worker=st.integers(0, 2),
        name=st.sampled_from(["reset", "step", "recv", "call", "set_attr", "apply", "get_state", "step_wait"]),
        build=BUILDS,
    )
    def lose_a_worker(self, worker, name, build):
        """The next call raises, and then only `close` is legal. The next vector env begins from scratch."""
        if name in ("step", "recv", "step_wait") and not self.steps():
            name = "call"
        actions = self.actions(self.num_envs, 0)
        worker %= len(self.ranges)
        process, envs = self.envs.processes[worker], self.ranges[worker]
        stop_process(process.pid)
        if name == "recv":
            self.envs.send(actions)
        elif name == "step_wait":
            self.envs.step_async(actions)
        self.stopped = process
        self.lose()
        calls = {"step": [actions], "call": ["index"], "set_attr": ["bias", 1.0], "apply": [lambda env: 0]}
        where = rf"worker {worker} \(envs {envs.start}:{envs.stop}\) was killed by SIGKILL"
        with pytest.raises(vecenv.WorkerDied, match=where):
            getattr(self.envs, name)(*calls.get(name, ()))
        for call in self.calls().values():
            with pytest.raises(vecenv.StateError, match="was broken by an earlier fault"):
                call()
        self.close()
        self.reference = Reference(*self.spaces, self.num_envs, self.mode)
        self.build(build)

    def refuse(self):
        """Calls that are illegal now raise Gymnasium's errors, and change nothing."""
        calls = self.calls()
        legal = {"step_wait": "step_async", "reset_wait": "reset_async", "call_wait": "call_async", "recv": "send"}
        waits = {name: calls.pop(name) for name in legal if name in calls}
        for name, call in waits.items():
            if name != (self.pending[0] if self.pending else "recv" if self.in_flight else None):
                with pytest.raises(NoAsyncCallError, match=f"without any prior call to `{legal[name]}`"):
                    call()
        if not self.idle():
            pending = self.pending[0].removesuffix("_wait") if self.pending else "send"
            for name, call in calls.items():
                if name != "send" or self.pending:
                    with pytest.raises(AlreadyPendingCallError, match=f"pending call to `{pending}`"):
                        call()
            if self.in_flight:
                with pytest.raises(AlreadyPendingCallError, match="while they are in flight"):
                    calls["send"]()

    def calls(self):
        """Returns calls of all methods that use envs."""
        envs, actions = self.envs, self.actions(self.num_envs, 0)
        calls = {
            "step": lambda: envs.step(actions), "reset": envs.reset, "send": lambda: envs.send(actions),
            "recv": envs.recv, "call": lambda: envs.call("index"), "apply": lambda: envs.apply(lambda env: 0),
            "set_attr": lambda: envs.set_attr("bias", 0.0), "get_state": envs.get_state,
            "set_state": lambda: envs.set_state([]), "render": envs.render,
        }  # fmt: skip
        if self.is_async():
            calls |= {"step_async": lambda: envs.step_async(actions), "reset_async": envs.reset_async}
            calls |= {name: getattr(envs, name) for name in ("step_wait", "reset_wait", "call_wait")}
        return calls

    # What always holds

    @invariant()
    def what_was_returned_does_not_change(self):
        clock = self.clock + bool(self.pending and self.pending[0] != "call_wait")
        for result, before, born in self.results:
            if born is None or clock - born < self.envs.num_slots:
                assert_same(result, before)

    @precondition(lambda self: self.envs is not None and self.idle() and self.reference.has_reset)
    @invariant()
    def the_newest_batch_is_that_of_gymnasium(self):
        assert_same(self.envs.observations, self.reference.observations)
        np.testing.assert_array_equal(self.envs.episode_returns, self.reference.returns)
        np.testing.assert_array_equal(self.envs.episode_lengths, self.reference.lengths)

    def check_batch(self, result, expected):
        assert_same(result, expected)
        self.clock, self.deaths = self.clock + 1, 0
        self.keep(result[1:], None)
        self.keep(result[:1], None if self.envs.copy else self.clock)
        if not self.envs.copy:
            for array in arrays_of(result[0]):
                assert any(np.shares_memory(array, field) for field in self.envs.arrays.values())

    def keep(self, result, born):
        self.results.append((result, copy.deepcopy(result), born))
        if len(self.results) > 6:
            old, _, born = self.results.pop(0)
            if born is None:
                scribble(old)  # it belongs to the caller

    def actions(self, count, seed, narrow=False):
        """Samples a batch of actions; with `narrow`, of another dtype if the space is a Box of floats."""
        space = batch_space(self.spaces[1], count)
        space.seed(seed)
        actions = space.sample()
        return actions.astype(np.float16) if narrow and getattr(actions, "dtype", None) == np.float32 else actions

    def one_of(self, actions, k, count):
        """Returns a batch with the action at position k of a batch."""
        if isinstance(actions, np.ndarray):
            return actions[[k]]
        action = list(iterate(batch_space(self.spaces[1], count), actions))[k]
        return concatenate(self.spaces[1], [action], create_empty_array(self.spaces[1], 1))

    def close(self):
        pids = [process.pid for process in getattr(self.envs, "processes", [])]
        self.lose()
        self.envs.close()
        self.envs.close()
        assert not any(map(process_exists, pids))
        for call in self.calls().values():
            with pytest.raises(vecenv.StateError, match="after a call to `close"):
                call()
        for result, before, born in self.results:  # copies outlive the memory
            if born is None:
                assert_same(result, before)

    def teardown(self):
        if self.envs is not None:
            self.close()


def arrays_of(value):
    """Yields the arrays of numbers of a nested batch."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from arrays_of(child)


def scribble(value):
    """Overwrites all arrays of a nested value."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value[...] = np.zeros((), value.dtype)
    elif isinstance(value, (dict, tuple, list, np.ndarray)):
        for child in value.values() if isinstance(value, dict) else value:
            scribble(child)


def infos_of(infos, k):
    """Returns the infos of one row of a batch."""
    row = {}
    for key, values in infos.items():
        if not key.startswith("_") and infos[f"_{key}"][k]:
            row[key] = infos_of(values, k) if isinstance(values, dict) else values[k]
    return row


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("examples", "calls"), [(10, 25), pytest.param(200, 60, marks=SLOW)])
@pytest.mark.filterwarnings("ignore:.*It is restarted", "ignore:.*Calling `close` while waiting")
def test_any_sequence_of_calls_returns_what_gymnasium_returns(examples, calls):
    how = settings(max_examples=examples, stateful_step_count=calls, deadline=None)
    run_state_machine_as_test(VectorEnvMachine, settings=how)
