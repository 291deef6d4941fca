"""Tests of two rules: after a fault in a step or a reset only `close` is legal, and infos never raise."""

import gymnasium as gym
import numpy as np
import pytest

import vecenv
from tests.helpers import CountingEnv, assert_same, counting_fns
from vecenv.vector.results import ResultAssembler


class Ending(CountingEnv):
    """Env 0 terminates at step 2, and env 1 raises at the same step."""

    def step(self, action):
        if self.index == 1 and self.steps == 1:
            raise ValueError("the motor is on fire")
        return super().step(action)


MAKERS = {
    "sync": vecenv.SyncVectorEnv,
    "async": lambda fns, **options: vecenv.AsyncVectorEnv(fns, num_workers=1, **options),
    "local": lambda fns, **options: vecenv.AsyncVectorEnv(fns, num_workers=0, **options),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_after_an_error_in_a_step_only_close_is_legal_so_that_no_episode_end_is_lost(make, mode):
    with make([lambda i=i: Ending(i, 2) for i in range(2)], autoreset_mode=mode) as envs:
        envs.reset()
        envs.step([0, 0])
        with pytest.raises(ValueError, match="on fire"):
            envs.step([0, 0])
        for call in (lambda: envs.step([0, 0]), envs.reset, lambda: envs.call("index"), lambda: envs.send([0, 0])):
            with pytest.raises(vecenv.StateError, match="broken by an earlier fault"):
                call()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_after_an_error_in_a_reset_only_close_is_legal(make):
    class Env(CountingEnv):
        def reset(self, **kwargs):
            if self.index == 1:
                raise ValueError("stuck")
            return super().reset(**kwargs)

    with make([lambda i=i: Env(i) for i in range(2)]) as envs:
        with pytest.raises(ValueError, match="stuck"):
            envs.reset()
        with pytest.raises(vecenv.StateError):
            envs.reset()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_call_rejected_before_any_env_steps_breaks_nothing(make):
    with make(counting_fns(2)) as envs:
        envs.reset()
        for actions, error in (([0], ValueError), ([0.5, 0.5], TypeError)):
            with pytest.raises(error):
                envs.step(actions)
        with pytest.raises(ValueError):
            envs.reset(seed=[1])
        assert envs.step([0, 0])[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_after_an_interrupt_while_results_are_assembled_only_close_is_legal(make, monkeypatch):
    """The step may have ended an episode without the caller seeing it."""
    with make(counting_fns(2)) as envs:
        envs.reset()

        def interrupted(*arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(ResultAssembler, "after_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            envs.step([0, 0])
        monkeypatch.undo()
        with pytest.raises(vecenv.StateError):
            envs.step([0, 0])


class Informing(CountingEnv):
    """Returns the next of `values` as an info in each step."""

    values = ()

    def step(self, action):
        *others, _ = super().step(action)
        return *others, {"value": self.values[self.steps - 1]} if self.steps <= len(self.values) else {}


AWKWARD = [
    [2**63, 2**63],  # too large for NumPy's integers
    [1, -(2**70)],
    [1, 2, 3, 4, 5, 2**64],  # the last value arrives after the key has moved to shared memory
    [np.uint64(2**63), 1],
    ["text", 1],
    [np.array([1, 2]), np.array([1, 2, 3])],
    [np.datetime64("2026-01-01"), 1],
    [{"a": 1}, 3],
    [None, 1.5],
    [1j, 2**70],
    [np.array(["a"]), np.array(["abc"])],
]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("values", AWKWARD, ids=str)
def test_an_info_that_numpy_cannot_hold_is_an_object(make, values):
    class Env(Informing):
        pass

    Env.values = values
    with make([lambda i=i: Env(i, 100) for i in range(2)]) as envs:
        envs.reset()
        for value in values:
            infos = envs.step([0, 0])[4]
            given = infos["value"]
            for i in range(2):
                one = {key: column[i] for key, column in given.items()} if isinstance(given, dict) else given[i]
                expected = {**value, "_a": True} if isinstance(value, dict) else value
                if isinstance(expected, (dict, np.ndarray)):
                    assert_same(one, expected)
                else:
                    assert one == expected
            assert infos["_value"].tolist() == [True, True]


class Uncopied(str):
    def __deepcopy__(self, memo):
        raise TypeError("this action cannot be copied")

    def __reduce__(self):
        raise TypeError("this action cannot be copied")


class TypingEnv(CountingEnv):
    """Takes texts as actions, and observes a list."""

    observation_space = gym.spaces.Sequence(gym.spaces.Discrete(9))
    action_space = gym.spaces.Text(9)

    def _observe(self):
        return [self.index, self.steps]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_action_that_cannot_be_passed_on_breaks_nothing(make):
    with make([lambda i=i: TypingEnv(i) for i in range(2)]) as envs:
        envs.reset()
        for call in (envs.step, envs.send):
            with pytest.raises(TypeError, match="cannot be copied"):
                call((Uncopied("a"), Uncopied("b")))
        assert envs.step(("a", "b"))[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_caller_owns_observations_without_a_fixed_shape(make):
    with make([lambda i=i: TypingEnv(i) for i in range(2)]) as envs:
        envs.reset()
        envs.send(("a", "b"))
        batch = envs.recv()
        for observation in batch.observations:
            observation.append(8)
        assert envs.observations == ([0, 1], [1, 1])


@pytest.mark.parametrize("make", [MAKERS["sync"], MAKERS["local"]], ids=["sync", "local"])
def test_a_step_before_the_first_reset_breaks_nothing_as_in_gymnasium(make):
    with make([lambda: gym.make("CartPole-v1")] * 2) as envs:
        with pytest.raises(gym.error.ResetNeeded):
            envs.step([0, 0])
        envs.reset(seed=0)
        assert envs.step([0, 0])[1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_mask_belongs_to_the_caller_again_when_reset_async_returns(num_workers):
    with vecenv.AsyncVectorEnv(counting_fns(2, 9), num_workers=num_workers) as envs:
        envs.reset()
        envs.step([0, 0])
        mask = np.array([True, False])
        envs.reset_async(options={"reset_mask": mask})
        mask[:] = [False, True]
        assert envs.reset_wait()[0][:, 2].tolist() == [0, 1]


def test_a_state_that_cannot_be_written_leaves_no_half_restored_batch():
    with vecenv.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2) as envs:
        envs.reset()
        states = envs.get_state()
        states[1]["row"].pop("observation")
        with pytest.raises(KeyError):
            envs.set_state(states)
        with pytest.raises(vecenv.StateError, match="broken"):
            envs.step([0, 0])


def test_send_before_the_first_reset_is_the_envs_own_error_with_restarts_too():
    fns = [lambda: gym.make("CartPole-v1")] * 2
    with vecenv.AsyncVectorEnv(fns, num_workers=2, on_worker_death="restart") as envs:
        envs.send([0, 0])
        with pytest.raises(gym.error.ResetNeeded):
            envs.recv()
