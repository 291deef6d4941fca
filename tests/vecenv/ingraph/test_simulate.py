"""Tests of vecenv.ingraph.simulate: an algorithm receives exactly what a plain loop over Gymnasium's envs sees."""

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import FaultyEnv, SampledEnv, assert_same, counting_fns
from vecenv.ingraph import Algorithm, InGraphVectorEnv, Transition, simulate, slots_for

N, STEPS, SEED = 4, 150, 7
T = 5  # the steps pass through both slabs 15 times

BOX = spaces.Box(-1, 1, (2, 3), np.float32)
OBSERVATIONS = {
    "Box": BOX,
    "Discrete": spaces.Discrete(5),
    "Dict": spaces.Dict({"a": BOX, "b": spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 255, (4,), np.uint8)])}),
}
ACTIONS = {
    "Box": spaces.Box(-1, 1, (2,), np.float32),
    "Discrete": spaces.Discrete(3),
    "Dict": spaces.Dict({"left": spaces.Discrete(2), "right": spaces.Box(-1, 1, (1,), np.float32)}),
}
KINDS = [(vecenv.SyncVectorEnv, {}), (vecenv.AsyncVectorEnv, {"num_workers": 2})]


class Replay:
    """An algorithm that performs given actions and records its calls and the tensors it receives."""

    def __init__(self, schedule):
        """Takes a nested structure of actions `[STEPS, N, ...]`."""
        self.schedule = schedule
        self.time = tf.Variable(0)
        self.calls, self.told = [], {}

    def begin_episode(self, began):
        self.calls.append("begin_episode")
        self.told["began"] = began

    def perform(self, observations):
        self.calls.append("perform")
        self.told["observations"] = observations
        time = self.time.read_value()
        self.time.assign_add(1)
        return tf.nest.map_structure(lambda actions: tf.constant(actions)[time], self.schedule)

    def experience(self, transition):
        self.calls.append("experience")
        self.told["transition"] = transition

    def end_episode(self, ended):
        self.calls.append("end_episode")
        self.told["ended"] = ended


def schedule_of(envs, num_steps=STEPS):
    envs.action_space.seed(SEED)
    drawn = [envs.action_space.sample() for _ in range(num_steps)]
    return tf.nest.map_structure(lambda *leaves: np.stack(leaves), *drawn)


def at(schedule, t):
    return tf.nest.map_structure(lambda leaf: leaf[t], schedule)


def plain_loop(fns, schedule, num_steps=STEPS):
    """Yields what `simulate` must pass to the algorithm and return at each step, computed by Gymnasium alone."""
    envs = gym.vector.SyncVectorEnv(fns, autoreset_mode=AutoresetMode.SAME_STEP)
    observations, _ = envs.reset(seed=SEED)
    began = np.ones(len(fns), bool)
    returns, lengths = np.zeros(len(fns)), np.zeros(len(fns), np.int64)
    for t in range(num_steps):
        actions = at(schedule, t)
        after, rewards, terminated, truncated, infos = envs.step(actions)
        ended = terminated | truncated
        led_to = tf.nest.map_structure(np.copy, after)
        for i in np.flatnonzero(ended):
            paths = zip(tf.nest.flatten(led_to), tf.nest.flatten(infos["final_obs"][i]), strict=True)
            for batch, final in paths:
                batch[i] = final
        returns, lengths = returns + rewards, lengths + 1
        told = {
            "began": began,
            "observations": observations,
            "transition": Transition(observations, actions, rewards, terminated, truncated, led_to),
            "ended": ended,
        }
        yield told, (after, rewards, terminated, truncated, returns, lengths)
        observations, began = after, ended
        returns, lengths = np.where(ended, 0, returns), np.where(ended, 0, lengths)
    envs.close()


def make(fns, kind=vecenv.SyncVectorEnv, **kwargs):
    kwargs = {"autoreset_mode": "SameStep", "num_slots": slots_for(T), **kwargs}
    vector = kind(fns, **kwargs)
    return vector, InGraphVectorEnv(vector, num_steps=T)


def as_numpy(nested):
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), nested)


def one_step(envs, algorithm):
    """Returns a graph function that simulates one step and returns its result and what the algorithm received."""

    @tf.function
    def step():
        result = simulate(envs, algorithm)
        return tuple(result), dict(algorithm.told)

    return step


@pytest.mark.parametrize(("kind", "kwargs"), KINDS, ids=["sync", "2 workers"])
@pytest.mark.parametrize("name", OBSERVATIONS)
def test_an_algorithm_sees_what_a_plain_loop_sees(name, kind, kwargs):
    """Compares after the last step, so that a tensor that changed after its step fails the test."""
    fns = [lambda: SampledEnv(OBSERVATIONS[name], ACTIONS[name])] * N
    vector, envs = make(fns, kind, **kwargs)
    with vector:
        schedule = schedule_of(vector)
        algorithm: Algorithm = Replay(schedule)
        step = one_step(envs, algorithm)
        envs.reset(seed=SEED)
        found = [step() for _ in range(STEPS)]
    assert step.experimental_get_tracing_count() == 1
    assert algorithm.calls == ["begin_episode", "perform", "experience", "end_episode"]
    ends = 0
    for (returned, told), (expected_told, expected) in zip(found, plain_loop(fns, schedule), strict=True):
        assert_same(as_numpy(told), expected_told)
        assert_same(as_numpy(returned), expected)
        ends += expected_told["ended"].sum()
    assert ends > 50


def test_a_graph_loop_may_keep_the_tensors_without_copying():
    """Neither a TensorArray nor `assign` copies, and neither needs to."""
    fns = [lambda: SampledEnv(BOX, ACTIONS["Discrete"])] * N
    vector, envs = make(fns)
    algorithm = Replay(schedule_of(vector))
    last = tf.Variable(tf.zeros([N, 2, 3]))

    @tf.function
    def run():
        kept = [tf.TensorArray(dtype, STEPS) for dtype in (tf.float32, tf.float32, tf.float32, tf.float64)]
        for t in tf.range(STEPS):
            before = last.read_value()
            result = simulate(envs, algorithm)
            transition = algorithm.told["transition"]
            last.assign(transition.observations)
            values = before, transition.next_observations, result.observations, result.episode_returns
            kept = [array.write(t, value) for array, value in zip(kept, values, strict=True)]
        return [array.stack() for array in kept]

    envs.reset(seed=SEED)
    before, led_to, after, returns = as_numpy(run())
    steps = list(plain_loop(fns, algorithm.schedule))
    np.testing.assert_array_equal(led_to, [told["transition"].next_observations for told, _ in steps])
    np.testing.assert_array_equal(after, [expected[0] for _, expected in steps])
    np.testing.assert_array_equal(returns, [expected[4] for _, expected in steps])
    np.testing.assert_array_equal(before[1:], [told["observations"] for told, _ in steps[:-1]])


def test_the_methods_are_called_in_order_at_run_time():
    """In every iteration, each method reads a variable that the previous method has written."""

    class Ordered(Replay):
        def __init__(self):
            super().__init__(np.zeros([STEPS, N], np.int64))
            self.state = tf.Variable(0)

        def pass_through(self, stage):
            tf.debugging.assert_equal(self.state, stage)
            self.state.assign((stage + 1) % 4)

        def begin_episode(self, began):
            self.pass_through(0)

        def perform(self, observations):
            self.pass_through(1)
            return super().perform(observations)

        def experience(self, transition):
            self.pass_through(2)

        def end_episode(self, ended):
            self.pass_through(3)

    _, envs = make(counting_fns(N))
    algorithm = Ordered()

    @tf.function
    def run():
        for _ in tf.range(20):
            simulate(envs, algorithm)

    envs.reset()
    run()
    assert algorithm.state.numpy() == 0 and algorithm.time.numpy() == 20


def test_methods_may_branch_on_tensors():
    """AutoGraph converts the methods as it does the loop around `simulate`."""

    class Branching(Replay):
        def end_episode(self, ended):
            if tf.reduce_any(ended):
                self.ended.assign_add(tf.reduce_sum(tf.cast(ended, tf.int32)))

    _, envs = make(counting_fns(N))
    algorithm = Branching(np.zeros([STEPS, N], np.int64))
    algorithm.ended = tf.Variable(0)

    @tf.function
    def run():
        for _ in tf.range(60):
            simulate(envs, algorithm)

    envs.reset()
    run()
    assert algorithm.ended.numpy() == 20 + 15 + 12 + 20  # episodes of 3, 4, 5 and 3 steps


def test_began_is_correct_after_a_rollout_a_plain_step_and_a_reset():
    """The next slab is different memory, and a plain `step` does not tell the algorithm that an episode has ended."""
    vector, envs = make(counting_fns(N, length=5))  # episodes of 5, 6, 7 and 5 steps
    step = one_step(envs, Replay(np.zeros([STEPS, N], np.int64)))
    envs.reset()
    began = [step()[1]["began"].numpy() for _ in range(T)]
    assert began[0].all() and not np.any(began[1:])
    for array in (vector.arrays[("terminated",)], vector.arrays[("truncated",)], vector.arrays[("episode_length",)]):
        array[T + 1] = True  # the next slab, not yet written
    envs.rollout()
    np.testing.assert_array_equal(step()[1]["began"], [True, False, False, True])  # the sixth step
    np.testing.assert_array_equal(step()[1]["began"], [False, True, False, False])
    for _ in range(3):
        envs.step(tf.zeros([N], tf.int64))
    np.testing.assert_array_equal(step()[1]["began"], [True, False, False, True])  # the eleventh step
    envs.reset()
    assert step()[1]["began"].numpy().all()


def test_a_rollout_holds_the_simulated_steps():
    fns = counting_fns(N)
    _, envs = make(fns)
    step = one_step(envs, Replay(np.zeros([STEPS, N], np.int64)))
    envs.reset(seed=SEED)
    found = [step()[1]["transition"] for _ in range(T)]
    rollout = envs.rollout()
    np.testing.assert_array_equal(rollout.observations[:-1], [transition.observations for transition in found])
    np.testing.assert_array_equal(rollout.rewards, [transition.rewards for transition in found])


@pytest.mark.parametrize(
    ("before", "kind", "kwargs"),
    [
        pytest.param(before, kind, kwargs, marks=pytest.mark.slow if kwargs and before != T + 2 else ())
        for before in (0, 1, T, T + 2, 2 * T, 3 * T + 1)
        for kind, kwargs in KINDS
    ],
)
def test_a_simulation_continues_exactly_after_a_restart(before, kind, kwargs, tmp_path):
    fns = [lambda: gym.make("CartPole-v1", max_episode_steps=7)] * N
    found = []
    for restarts in (False, True):
        vector, envs = make(fns, kind, **kwargs)
        algorithm = Replay(schedule_of(vector))
        step = one_step(envs, algorithm)
        envs.reset(seed=SEED)
        for _ in range(before):
            step()
        if restarts:
            vecenv.state.save(tmp_path / "states", envs.get_state())
            vector.close()
            vector, envs = make(fns, kind, **kwargs)
            step = one_step(envs, algorithm)
            envs.reset(seed=1)
            for _ in range(4):  # moves the envs away from the saved state
                envs.step(np.zeros(N, np.int64))
            envs.set_state(vecenv.state.load(tmp_path / "states"))
        found.append([as_numpy(step()) for _ in range(40)])
        vector.close()
    assert_same(*map(tuple, found))


def test_saving_the_state_within_a_rollout_does_not_change_the_rollout():
    vector, envs = make(counting_fns(N, length=9))
    with vector:
        envs.reset(seed=SEED)
        for _ in range(T):
            envs.step(np.zeros(N, np.int64))
            envs.get_state()
        np.testing.assert_array_equal(envs.rollout().rewards, np.arange(1.0, T + 1)[:, None].repeat(N, 1))


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_any_other_autoreset_mode_is_an_error_that_names_the_right_one(mode):
    _, envs = make(counting_fns(N), autoreset_mode=mode)
    with pytest.raises(ValueError, match=f"autoreset_mode='{mode}' does not provide: .*autoreset_mode='SameStep'"):
        one_step(envs, Replay(np.zeros([STEPS, N], np.int64)))()


def test_an_exception_of_an_env_is_raised_unchanged():
    _, envs = make([lambda i=i: FaultyEnv(i, "raise") for i in range(N)])
    step = one_step(envs, Replay(np.zeros([STEPS, N], np.int64)))
    envs.reset()
    step()
    with pytest.raises(ValueError, match="the motor is on fire"), envs.raising():
        step()


def test_actions_of_the_wrong_shape_are_an_error():
    _, envs = make(counting_fns(N))
    step = one_step(envs, Replay(np.zeros([STEPS, N + 1], np.int64)))
    envs.reset()
    with pytest.raises(ValueError, match=r"shape"), envs.raising():
        step()
