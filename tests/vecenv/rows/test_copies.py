"""Tests of copies: what envs share never depends on the number of workers.

Each env of an AsyncVectorEnv has its own copy of its function's closure and of all arguments, as in a process of its
own. A SyncVectorEnv passes on the same objects, as Gymnasium's does.
"""

import functools
import math
import os
import pickle
import threading

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import vecenv
from tests.helpers import CountingEnv
from vecenv.rows import copies
from vecenv.rows.copies import copiers


class SharingEnv(gym.Env):
    """Changes its arguments. Observes how often they, or the counter that it was built with, were changed."""

    observation_space, action_space = spaces.Box(0, 99, (), np.float64), spaces.Discrete(2)

    def __init__(self, counter=None):
        self.counter = counter if counter is not None else [0]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.float64(self.count(options["counter"] if options else [0])), {}

    def step(self, action):
        return np.float64(self.count(self.counter)), 0.0, False, False, {}

    def count(self, counter=None, other=None):
        changed = other if counter is None else counter
        changed[0] += 1
        return changed[0]


def counting(counter):
    """Returns a function whose closure counts its calls, and which builds an env that goes on counting."""

    def make():
        counter[0] += 1
        return SharingEnv(counter)

    return make


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_each_env_has_its_own_closure_and_arguments_whatever_the_number_of_workers(num_workers):
    options, value, counter = {"counter": [0]}, np.zeros(1), [0]
    with vecenv.AsyncVectorEnv([counting([0])] * 4, num_workers=num_workers) as envs:
        assert envs.reset(options=options)[0].tolist() == [1] * 4
        assert envs.step([0] * 4)[0].tolist() == [2] * 4  # the first count was in the function
        for values in (value, [value] * 4):
            envs.set_attr("counter", values)
            assert envs.step([0] * 4)[0].tolist() == [1] * 4
        assert envs.call("count", [0]) == envs.call("count", other=[0]) == (1,) * 4
        if num_workers:  # otherwise, this process calls the function itself
            assert envs.apply(lambda env: env.count(counter)) == [1] * 4
    assert (options, value, counter) == ({"counter": [0]}, [0.0], [0])


@pytest.mark.parametrize("make", [vecenv.SyncVectorEnv, gym.vector.SyncVectorEnv])
def test_the_envs_of_a_sync_vector_env_share_their_arguments_as_gymnasiums_do(make):
    options = {"counter": [0]}
    envs = make([counting([0])] * 2)
    assert envs.reset(options=options)[0].tolist() == [1, 2] and options == {"counter": [2]}
    assert envs.step([0] * 2)[0].tolist() == [3, 4]  # the first two counts were in the function
    envs.set_attr("counter", [options["counter"]] * 2)
    assert envs.step([0] * 2)[0].tolist() == [3, 4]
    envs.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_env_has_its_own_action_even_if_the_same_object_is_given_for_all(num_workers):
    class Acting(SharingEnv):
        action_space = spaces.Sequence(spaces.Box(0, 9, (1,), np.float64))

        def step(self, action):
            self.counter = action[0]
            return super().step(action)

    with vecenv.AsyncVectorEnv([Acting] * 4, num_workers=num_workers) as envs:
        envs.reset()
        actions = ((np.zeros(1),),) * 4
        assert envs.step(actions)[0].tolist() == [1] * 4
        envs.send(actions)
        assert envs.recv().observations.tolist() == [1] * 4


@pytest.mark.parametrize("num_workers", [0, 1])
def test_options_belong_to_the_caller_again_when_reset_async_returns(num_workers):
    with vecenv.AsyncVectorEnv([SharingEnv] * 2, num_workers=num_workers) as envs:
        options = {"counter": [5]}
        envs.reset_async(options=options)
        options["counter"][0] = 7
        assert envs.reset_wait()[0].tolist() == [6.0, 6.0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_rows_may_capture_one_env(num_workers):
    env = CountingEnv(0)
    with vecenv.AsyncVectorEnv([lambda: env, lambda: gym.Wrapper(env)], num_workers=num_workers) as envs:
        envs.reset()
        assert envs.step([0, 0])[1].tolist() == [1.0, 1.0]


def test_without_workers_objects_that_cannot_be_pickled_are_shared():
    lock = threading.Lock()
    with vecenv.AsyncVectorEnv([lambda: SharingEnv([0, lock])] * 2, num_workers=0) as envs:
        envs.reset(options={"counter": [0, lock]})
        assert envs.call("count", [0, lock]) == (1, 2)
        envs.set_attr("counter", [lock] * 2)
        assert envs.get_attr("counter") == (lock, lock)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_function_that_captures_what_cannot_be_pickled_still_has_its_own_other_variables(num_workers):
    lock, make = threading.Lock(), counting([0])

    def locking():
        with lock:
            return make() if locking else None  # a function that refers to itself

    context = {"context": "fork"} if num_workers else {}
    with vecenv.AsyncVectorEnv([lambda: locking()] * 4, num_workers=num_workers, **context) as envs:
        envs.reset()
        assert envs.step([0] * 4)[0].tolist() == [2] * 4


# `copiers` itself.


def copy_of(value):
    return copiers([value])[0]()


def test_a_copy_is_of_the_time_when_its_copier_was_made():
    value = {"a": [1]}
    (copier,) = copiers([value])
    value["a"].append(2)
    one, other = copier(), copier()
    one["a"].append(3)
    assert other == {"a": [1]}


def test_functions_are_copied_with_all_that_they_hold():
    counter, default, key = [0], [0], [0]

    @functools.wraps(math.sqrt)
    def function(default=default, *, key=key):
        for each in (counter, default, key, function.held):
            each[0] += 1
        return counter + default + key + function.held

    function.held = [0]
    for value in (function, functools.partial(function), [function], {"f": lambda: function()}):
        copy = copy_of(value)
        copied = copy[0] if isinstance(copy, list) else copy["f"] if isinstance(copy, dict) else copy
        assert copied() == [1] * 4 and copied() == [2] * 4
    assert function() == [1] * 4
    copied = copy_of(function)
    assert (copied.__name__, copied.__doc__) == ("sqrt", math.sqrt.__doc__) and copied.__globals__ is globals()


def test_methods_callable_objects_and_iterators_are_copied():
    class Counter:
        def __init__(self):
            self.count = 0

        def __call__(self):
            self.count += 1
            return self.count

    counter, numbers = Counter(), iter(range(9))
    for value in (counter, counter.__call__, lambda: counter(), lambda: 1 + next(numbers)):
        copied = copy_of(value)
        assert (copied(), copied()) == (1, 2)
    assert counter() == 1 and type(copy_of(counter)) is Counter


def test_two_functions_of_a_copy_share_what_their_originals_share():
    count = 0
    empty: int

    def add():
        nonlocal count
        count += 1
        return add if count else empty

    def read():
        return count

    copied_add, copied_read = copy_of((add, read))
    assert copied_add() is copied_add and copied_read() == 1 and read() == 0
    with pytest.raises(NameError):
        copy_of(lambda: empty)()
    empty = 0


def test_classes_modules_importable_functions_and_memory_maps_stay_the_same_objects(tmp_path):
    class Local:
        pass

    data = np.memmap(tmp_path / "data", mode="w+", shape=9)
    for value in (Local, CountingEnv, np, np.sin, gym.make, copiers, print, data):
        assert copy_of(value) is value
        assert copy_of(lambda value=value: value)() is value
    loaded = pickle.loads(pickle.dumps(data))  # as a worker gets it, without its file
    assert copy_of(loaded) is not loaded


@pytest.mark.parametrize("limit", [copies._LARGE, 1])
@pytest.mark.parametrize("files", [True, False])
def test_arrays_of_any_size_are_writable_copies(limit, files, monkeypatch):
    monkeypatch.setattr(copies, "_LARGE", limit)
    if not files:
        monkeypatch.delattr(copies.os, "memfd_create")
    arrays = [np.arange(300_000.0), np.ones((3, 4), np.int8, order="F"), np.arange(10)[::2], np.zeros(0), np.array("x")]
    frozen = np.arange(5)
    frozen.flags.writeable = False
    values = [lambda: arrays, lambda: [*arrays, frozen]]
    functions = copiers([*values, *values])
    assert functions[:2] == functions[2:]
    for _ in range(2):
        for function in functions[:2]:
            found = function()()
            for copied, array in zip(found, arrays, strict=False):
                np.testing.assert_array_equal(copied, array)
                copied[...] = "y" if array.dtype.kind == "U" else 7
    assert arrays[0][1] == 1 and not functions[1]()()[-1].flags.writeable


def test_a_large_array_is_stored_once_for_all_copies(monkeypatch):
    create, created = os.memfd_create, []
    monkeypatch.setattr(os, "memfd_create", lambda *arguments: created.append(create(*arguments)) or created[-1])
    array = np.ones(2**18)
    functions = copiers([lambda i=i: (array, i)[0] for i in range(20)])
    copied = [function()() for function in functions]
    assert [os.fstat(number).st_size for number in created] == [array.nbytes]
    for i, one in enumerate(copied):
        one[0] = i
    assert [one[0] for one in copied] == list(range(20)) and array[0] == copied[0][1] == 1.0
    others = [np.full(2**18, 2.0), np.full(2**18, 3.0)]
    np.testing.assert_array_equal(copiers([array, others])[1](), others)


def test_copies_share_a_cached_function_so_that_it_loads_data_only_once():
    @functools.cache
    def load():
        return object()

    (copier,) = copiers([functools.partial(max, load)])
    assert copier().args[0] is copier().args[0] is load


def test_a_cached_function_that_depends_on_captured_objects_is_copied_with_them():
    class Task:
        def __init__(self):
            self.level = 1
            self.reward = functools.lru_cache(self._reward)

        def _reward(self, x):
            return x * self.level

    def scaled():
        scale = 1

        @functools.cache
        def times(x):
            return x * scale

        def set_scale(value):
            nonlocal scale
            scale = value

        return times, set_scale

    (copier,) = copiers([(Task(), *scaled())])
    (task, times, set_scale), (other, other_times, _) = copier(), copier()
    task.level = 5
    set_scale(5)
    assert (task.reward(1), times(1), other.reward(1), other_times(1)) == (5, 5, 1, 1)


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_the_file_of_large_arrays_is_closed_with_the_last_copier(monkeypatch):
    create, created = os.memfd_create, []
    monkeypatch.setattr(os, "memfd_create", lambda *arguments: created.append(create(*arguments)) or created[-1])
    (copier,) = copiers([np.ones(2**18)])
    copied = copier()
    del copier
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(*created)
    assert copied.all()


def test_when_files_cannot_be_mapped_arrays_are_copied(monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError("too many open files")

    array = np.arange(2**18, dtype=np.float64)
    _, copier = copiers([np.ones(2**18), (array, array[:10])])
    monkeypatch.setattr(copies.mmap, "mmap", refuse)
    copied, first = copier()
    np.testing.assert_array_equal(copied, array)
    copied[0] = first[0] = 5.0
    assert array[0] == 0.0
