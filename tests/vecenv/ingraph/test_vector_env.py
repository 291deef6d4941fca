"""Tests of vecenv/ingraph: tensors alias the slab, ops keep program order, and released slabs are never read."""

import ctypes
import gc
import threading
import weakref

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import CountingEnv, FaultyEnv, assert_same, counting_fns
from tests.vecenv.workers.test_restarts import kill, restarting
from vecenv.ingraph import InGraphVectorEnv, Rollout, slots_for

T = 5


def make(num_envs, kind=vecenv.SyncVectorEnv, fns=None, num_steps=T, num_slabs=2, **kwargs):
    envs = kind(
        fns or counting_fns(num_envs, length=4),
        num_slots=slots_for(num_steps, num_slabs),
        float32_observations=True,
        **{"autoreset_mode": "SameStep", **kwargs},
    )
    return envs, InGraphVectorEnv(envs, num_steps=num_steps)


def address(tensor: tf.Tensor) -> int:
    """Returns the address of an eager tensor's memory, obtained through DLPack, which never copies."""
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_void_p))[0]


def collect(envs: InGraphVectorEnv):
    @tf.function
    def run():
        envs.observations()
        for _ in tf.range(envs.num_steps):
            envs.step(tf.zeros([envs.num_envs], tf.int64))
        return envs.rollout()

    return run


def test_reset_takes_one_seed_per_env():
    fns = [lambda: gym.make("CartPole-v1")] * 3
    vector, envs = make(3, fns=fns)
    with vector, vecenv.SyncVectorEnv(fns) as plain:
        seeds = [2**31 - 1, 5, 7]
        np.testing.assert_array_equal(tf.function(lambda: envs.reset(seed=seeds))(), plain.reset(seed=seeds)[0])


def test_actions_of_another_dtype_which_the_slab_cannot_hold_are_an_error():
    vector, envs = make(2)
    with vector:
        envs.reset(seed=0)
        for wrong in (tf.ones([2], tf.int32), np.array([0.7, 1.2]), [True, False]):
            with pytest.raises(TypeError, match=r"actions has dtype \w+, but the action space needs int64.*tf\.cast"):
                envs.step(wrong)
        for _ in range(T):
            envs.step(np.array([1, 0]))
        np.testing.assert_array_equal(envs.rollout().actions, [[1, 0]] * T)


@pytest.mark.parametrize("kind", [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv])
def test_a_rollout_is_the_slab_itself(kind):
    vector, envs = make(64, kind)  # 64 envs need no padding, not even for flags
    with vector:
        run = collect(envs)
        envs.reset(seed=0)
        for slab in (0, 1, 0, 1):
            rollout = run()
            low = slab * (T + 1)
            assert address(rollout.observations) == vector.slabs[("observation",)][low:].ctypes.data
            for name, path in (("rewards", ("reward",)), ("actions", ("action",)), ("terminated", ("terminated",))):
                assert address(getattr(rollout, name)) == vector.slabs[path][low + 1 :].ctypes.data


@pytest.mark.parametrize("nested", [False, True])
def test_the_memory_of_envs_is_released_with_the_graph_functions_that_step_them(nested):
    """TensorFlow itself would keep both as long as the process."""
    vector_env, envs = make(2)
    envs.reset(seed=0)

    @tf.function
    def step():
        return envs.step(tf.zeros(2, tf.int64)).rewards

    first = tf.function(lambda: step() + 0.0) if nested else step
    first()
    left = [weakref.ref(envs), *(weakref.ref(array) for array in vector_env.arrays.values())]
    first = None
    gc.collect()
    assert step().shape == (2,)  # one of the functions is left
    vector_env.close()
    vector_env = envs = step = None
    gc.collect()
    assert not any(reference() is not None for reference in left)


def test_a_tensorflow_thread_that_steps_envs_keeps_its_thread_local_data():
    here = threading.local()
    calls = {}

    class Remembering(CountingEnv):
        def step(self, action):
            here.steps = getattr(here, "steps", 0) + 1
            calls[threading.get_ident()] = here.steps
            return super().step(action)

    vector, envs = make(1, fns=[lambda: Remembering(0, 4)])
    run = collect(envs)
    envs.reset(seed=0)
    for _ in range(4):
        run()
    assert threading.get_ident() not in calls  # TensorFlow's own threads step the envs
    assert sum(calls.values()) == 4 * T
    vector.close()


def test_the_tensors_inside_the_graph_alias_the_slots():
    vector, envs = make(3)
    seen = []

    @tf.function
    def run():
        observations = envs.observations()
        for _ in tf.range(T):
            tf.numpy_function(lambda o: seen.append(o.ctypes.data), [observations], [])
            observations = envs.step(tf.zeros([3], tf.int64)).observations

    envs.reset(seed=0)
    run()
    assert seen == [vector.arrays[("observation",)][slot].ctypes.data for slot in range(T)]


def test_a_compiled_function_reads_the_slab_itself():
    """A write to the slab after the rollout changes the function's result, so nothing was copied.

    The rewards of 8 envs fill slots of 64 bytes without padding.
    """
    vector, envs = make(8)
    envs.reset(seed=0)
    rollout = collect(envs)()
    total = tf.function(lambda r: tf.reduce_sum(r.rewards), jit_compile=True)
    before = float(total(rollout))
    vector.arrays[("reward",)][2, 1] += 1000.0
    assert float(total(rollout)) == before + 1000.0


@pytest.mark.parametrize("num_envs", [3, 64])
def test_graph_steps_equal_the_steps_of_the_vector_env(num_envs):
    _, envs = make(num_envs)
    plain = vecenv.SyncVectorEnv(counting_fns(num_envs, 4), autoreset_mode="SameStep", float32_observations=True)
    envs.reset(seed=0)
    run = collect(envs)
    first, _ = plain.reset(seed=0)
    for _ in range(3):
        rollout = run()
        last = envs.last_rollout()
        np.testing.assert_array_equal(rollout.observations[0], first)
        for t in range(T):
            first, rewards, terminated, truncated, infos = plain.step(np.zeros(num_envs, np.int64))
            np.testing.assert_array_equal(rollout.observations[t + 1], first)
            np.testing.assert_array_equal(rollout.rewards[t], rewards)
            np.testing.assert_array_equal(rollout.terminated[t], terminated)
            np.testing.assert_array_equal(rollout.truncated[t], truncated)
            np.testing.assert_array_equal(rollout.episode_returns[t], plain.episode_returns)
            for i in np.flatnonzero(terminated | truncated):
                np.testing.assert_array_equal(rollout.final_observations[t, i], infos["final_obs"][i])
        for name in Rollout._fields:
            np.testing.assert_array_equal(getattr(rollout, name), getattr(last, name))
    assert run.experimental_get_tracing_count() == 1


def test_a_rollout_holds_the_infos_of_the_episodes_that_ended_in_it():
    keys = ["steps", "started", "share"]
    vector, envs = make(3, vecenv.AsyncVectorEnv, num_workers=0, infos=False, info_keys=keys)
    plain = vecenv.SyncVectorEnv(
        counting_fns(3, 4), autoreset_mode="SameStep", float32_observations=True, info_keys=keys
    )
    with vector, plain:
        envs.reset(seed=0), plain.reset(seed=0)
        run = collect(envs)
        for _ in range(3):
            rollout, last = run(), envs.last_rollout()
            assert set(rollout.episode_infos) == set(keys)
            for t in range(T):
                *_, terminated, truncated, _ = plain.step(np.zeros(3, np.int64))
                over = terminated | truncated
                for key, expected in plain.episode_infos.items():
                    np.testing.assert_array_equal(rollout.episode_infos[key][t][over], expected[over])
                    np.testing.assert_array_equal(last.episode_infos[key][t][over], expected[over])
                    assert np.isnan(expected[over]).all() == (key == "started" or not over.any())


def test_operations_in_a_graph_of_the_caller_keep_what_they_call():
    vector, _ = make(2)
    with vector, tf.Graph().as_default() as graph:
        envs = InGraphVectorEnv(vector, num_steps=T)
        reset = envs.reset(seed=1)
        with tf.compat.v1.Session(graph=graph) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            gc.collect()
            np.testing.assert_array_equal(session.run(reset), vector.observations)


def test_a_released_slab_is_never_read_again():
    """Poisoning every released slab does not change the rollouts that follow."""
    (vector, envs), (_, untouched) = make(3), make(3)
    envs.reset(seed=0), untouched.reset(seed=0)
    run, run_untouched = collect(envs), collect(untouched)
    for slab in (0, 1, 0, 1):
        rollout, expected = run(), run_untouched()
        for name in ("observations", "rewards", "terminated", "truncated", "episode_returns"):
            np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name))
        for array in vector.arrays.values():  # the rollout and the update no longer need this slab
            low = slab * (T + 1)
            array[low : low + T + 1] = np.nan if array.dtype.kind == "f" else 1


def test_operations_run_in_program_order():
    """Reset, steps and rollout run in sequence although no tensor connects them."""
    _, envs = make(2)

    @tf.function
    def run():
        envs.reset(seed=0)
        for _ in tf.range(T):
            envs.step(tf.zeros([2], tf.int64))
        return envs.rollout()

    for _ in range(2):
        np.testing.assert_array_equal(run().observations[:4, 0, 2], [0, 1, 2, 3])


@pytest.mark.parametrize("parallel", [1, 10])
def test_rewards_and_flags_belong_to_the_step_that_returned_them(parallel):
    _, envs = make(3)

    @tf.function
    def run():
        seen = [tf.TensorArray(dtype, T) for dtype in (tf.float64, tf.bool, tf.bool)]
        for t in tf.range(T):
            tf.autograph.experimental.set_loop_options(parallel_iterations=parallel)
            step = envs.step(tf.zeros([3], tf.int64))
            outcome = (step.rewards, step.terminated, step.truncated)
            seen = [array.write(t, value) for array, value in zip(seen, outcome, strict=True)]
        return envs.rollout(), [array.stack() for array in seen]

    envs.reset(seed=0)
    for _ in range(4):
        rollout, seen = run()
        for name, values in zip(("rewards", "terminated", "truncated"), seen, strict=True):
            np.testing.assert_array_equal(values, getattr(rollout, name))


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_copied_observations_are_first_where_an_episode_begins_and_never_where_one_ends(mode):
    _, envs = make(3, fns=counting_fns(3, 2), autoreset_mode=mode)  # episodes of 2, 3 and 4 steps
    envs.reset()
    ended = False
    for _ in range(2 if mode == AutoresetMode.DISABLED else T):
        step = envs.step(tf.zeros([3], tf.int64))
        ended |= np.any(step.terminated | step.truncated)
        observations, is_first = envs.observations_copied()
        np.testing.assert_array_equal(is_first, observations[:, 2] == 0)
    assert ended


@pytest.mark.filterwarnings("ignore:.*It is restarted")
def test_the_observation_of_an_episode_cut_before_its_first_step_is_not_the_first_of_another():
    options = {"num_workers": 1, "on_worker_death": "restart", "autoreset_mode": "NextStep"}
    vector, envs = make(2, vecenv.AsyncVectorEnv, counting_fns(2), **options)
    with vector:
        envs.reset()
        vector.processes[0].kill()
        envs.step(tf.zeros([2], tf.int64))
        assert envs.observations_copied()[1].numpy().tolist() == [False, False]
        envs.step(tf.zeros([2], tf.int64))
        assert envs.observations_copied()[1].numpy().tolist() == [True, True]


def test_unused_outputs_of_a_step_are_not_read():
    vector, envs = make(3)
    read = []

    class Watched(dict):
        def __getitem__(self, path):
            read.append(path)
            return super().__getitem__(path)

    envs.reset(seed=0)
    vector.arrays = Watched(vector.arrays)
    run = collect(envs)
    run()
    read.clear()
    run()
    assert read.count(("observation",)) >= T
    assert read.count(("reward",)) == 0


def test_an_exception_of_an_env_passes_unchanged_through_the_graph():
    fns = [lambda i=i: FaultyEnv(i, "raise") for i in range(3)]
    _, envs = make(3, fns=fns)
    run = collect(envs)
    envs.reset(seed=0)
    with pytest.raises(ValueError, match="the motor is on fire"), envs.raising():
        run()


@pytest.mark.parametrize("inside", [False, True])
def test_an_earlier_exception_does_not_replace_a_later_error_of_another_operation(inside):
    _, envs = make(2)
    envs.reset()

    def too_early():
        with pytest.raises(tf.errors.OpError):
            tf.function(envs.rollout)()

    if not inside:
        too_early()
    with pytest.raises(tf.errors.InvalidArgumentError), envs.raising():
        if inside:
            too_early()
            envs.step(tf.zeros([2], tf.int64))
        tf.debugging.assert_equal(1, 2)


def test_the_error_for_a_wrong_number_of_slots_says_which_number_is_right():
    with pytest.raises(ValueError, match=r"num_slots=2, but rollouts of num_steps=5 need .*=slots_for\(5\)"):
        InGraphVectorEnv(vecenv.SyncVectorEnv([lambda: CountingEnv(0)]), num_steps=5)


def test_the_error_for_a_vector_env_of_gymnasium_names_those_of_vecenv():
    with pytest.raises(TypeError, match=r"not a vector env of vecenv.* vecenv\.AsyncVectorEnv"):
        InGraphVectorEnv(gym.vector.SyncVectorEnv([lambda: CountingEnv(0)]), num_steps=5)


@pytest.mark.parametrize("used", [lambda vector: vector.step([0, 0]), lambda vector: vector.reset()])
def test_a_rollout_never_continues_after_the_vector_env_was_used_directly(used):
    """Its observations would not be the states in which the actions were taken."""
    vector, envs = make(2)
    with vector:
        envs.reset(seed=0)
        actions = tf.zeros([2], tf.int64)
        envs.step(actions)
        used(vector)
        for use in (lambda: envs.step(actions), envs.observations, envs.rollout):
            message = r"reset, stepped or restored directly.*call its reset\(\)"
            with pytest.raises(RuntimeError, match=message), envs.raising():
                use()
        assert envs.reset(seed=0).numpy().tolist() == envs.observations().numpy().tolist()
        envs.step(actions)


def test_a_step_after_the_last_step_of_a_rollout_is_an_error():
    """Such a step would begin the next rollout, and the finished rollout would be lost or overwritten."""
    vector = vecenv.SyncVectorEnv(counting_fns(4), num_slots=slots_for(3), autoreset_mode="SameStep")
    envs = InGraphVectorEnv(vector, num_steps=3)
    envs.reset()
    for _ in range(3):
        envs.step(np.zeros(4, np.int64))
    with pytest.raises(RuntimeError, match=r"all 3 steps.*call rollout\(\)"), envs.raising():
        envs.step(np.zeros(4, np.int64))
    assert envs.steps == 3
    envs.rollout()
    assert envs.steps == 0
    vector.close()


@pytest.mark.parametrize("num_slabs", [2, 3])
def test_a_rollout_stays_valid_as_long_as_documented(num_slabs):
    vector = vecenv.SyncVectorEnv(counting_fns(2, length=1000), num_slots=slots_for(3, num_slabs))
    envs = InGraphVectorEnv(vector, num_steps=3)

    def take():
        for _ in range(3):
            envs.step(np.zeros(2, np.int64))
        envs.rollout()
        return envs.last_rollout().observations

    envs.reset()
    first = take()
    kept = first.copy()
    for _ in range(num_slabs - 2):
        take()
    np.testing.assert_array_equal(first, kept)
    take()
    assert not np.array_equal(first[0], kept[0]) and np.array_equal(first[1:], kept[1:])
    vector.close()


def test_a_rollout_that_is_taken_too_early_is_an_error():
    _, envs = make(2)
    envs.reset(seed=0)
    with pytest.raises(RuntimeError, match="has 5 steps, but 0 were taken"), envs.raising():
        envs.rollout()


@pytest.mark.parametrize("kind", [vecenv.SyncVectorEnv, vecenv.AsyncVectorEnv])
def test_rollouts_continue_exactly_after_a_restart(kind, tmp_path):
    """The caller may have overwritten the slab of the last rollout, because that slab belongs to the caller."""
    (vector, envs), (_, whole) = make(3, kind), make(3)
    run, run_whole = collect(envs), collect(whole)
    envs.reset(seed=0), whole.reset(seed=0)
    run(), run_whole()
    vector.arrays[("observation",)][: T + 1] = np.nan
    vecenv.state.save(tmp_path / "states", envs.get_state())
    vector.close()
    vector, envs = make(3, kind)
    envs.reset(seed=5)
    collect(envs)()
    envs.step(np.zeros(3, np.int64))
    envs.set_state(vecenv.state.load(tmp_path / "states"))
    run = collect(envs)
    np.testing.assert_array_equal(envs.observations(), whole.observations())
    for _ in range(3):
        found, expected = run(), run_whole()
        for name in Rollout._fields:
            if name == "final_observations":  # undefined where no episode ended
                ended = np.asarray(expected.terminated) | np.asarray(expected.truncated)
                assert ended.any()
                np.testing.assert_array_equal(found.final_observations[ended], expected.final_observations[ended])
            else:
                np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    vector.close()


def test_a_graph_rollout_in_cpp_equals_a_rollout_of_ordinary_envs():
    found = []
    for backend in ("auto", "python"):
        how = {"autoreset_mode": "SameStep", "num_slots": slots_for(60), "float32_observations": True}
        with vecenv.make("Hopper-v5", 4, backend=backend, vector_kwargs=how) as envs:
            graph = InGraphVectorEnv(envs, num_steps=60)

            @tf.function
            def collect(graph=graph):
                graph.reset(seed=1)
                for t in tf.range(60):
                    graph.step(tf.fill([4, 3], tf.cast(t, tf.float32) / 60))
                return graph.rollout()

            rollout = collect()
            ended = (rollout.terminated | rollout.truncated).numpy()
            assert ended.any()
            finals = rollout.final_observations.numpy()[ended]
            found.append((rollout.observations.numpy(), rollout.rewards.numpy(), ended, finals))
    assert_same(found[0], found[1])


def test_a_worker_that_dies_inside_the_graph_loop_restarts_too():
    vector = restarting(length=100, autoreset_mode="SameStep", num_slots=slots_for(8))
    envs = InGraphVectorEnv(vector, num_steps=8)

    @tf.function
    def collect():
        for _ in tf.range(8):
            envs.step(tf.zeros([4], tf.int64))
        return envs.rollout()

    envs.reset()
    collect()
    kill(vector, 1)
    collect()
    rollout = envs.last_rollout()
    np.testing.assert_array_equal(rollout.truncated[0], [False, False, True, True])
    np.testing.assert_array_equal(rollout.final_observations[0][2:], [[2, 0, 8], [3, 0, 8]])
    np.testing.assert_array_equal(rollout.observations[-1][:, 2], [16, 16, 7, 7])
    vector.close()
