"""Tests of vecenv/by_value.py: functions and classes that no other process can import."""

import contextlib
import dataclasses
import enum
import functools
import gc
import importlib
import importlib.util
import multiprocessing
import pickle
import sys
import threading
import traceback
import weakref

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

import vecenv
from tests.helpers import CountingEnv
from tests.start_methods import METHODS
from vecenv import by_value

WAYS = [0, *METHODS]


def sent(value):
    return pickle.loads(by_value.dumps(value))


def workers(way):
    """Returns the arguments of a vector env without workers for 0, and otherwise with workers of a start method."""
    return {"num_workers": 0} if way == 0 else {"num_workers": 2, "context": way}


def counter():
    count = 0

    def add():
        nonlocal count
        count += 1

    def read():
        return count

    return add, read


def test_functions_still_share_a_captured_variable():
    add, read = sent(counter())
    add()
    add()
    assert read() == 2


def test_pickled_functions_may_call_themselves_and_capture_variables_without_a_value():
    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    def later():
        return missing

    assert sent(factorial)(5) == 120
    again = sent(later)
    with pytest.raises(NameError):
        again()
    missing = 3
    assert later() == missing


def local_class():
    """Returns a class that cannot be imported and uses many features of class definitions."""

    @functools.lru_cache(maxsize=3)
    def fibonacci(n):
        return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

    class Parent:
        def greet(self):
            return "hello"

    @dataclasses.dataclass
    class Found(Parent):
        length: int = 3
        created = 0

        @functools.cached_property
        def table(self):
            type(self).created += 1
            return list(range(self.length))

        def greet(self):
            return super().greet() + str(fibonacci(10)) + str(fibonacci.cache_parameters()["maxsize"])

    return Found


def forget(classes):
    """Empties a list of classes and checks that they are gone, as in a process that never had them."""
    gone = [weakref.ref(cls) for cls in classes]
    classes.clear()
    gc.collect()
    assert not any(reference() for reference in gone)


def test_a_class_that_a_process_does_not_know_works_there():
    classes = [local_class()]
    data = by_value.dumps(classes[0](4))
    forget(classes)
    found = pickle.loads(data)
    assert found.greet() == "hello553" and found.table is found.table == [0, 1, 2, 3] and type(found).created == 1
    assert dataclasses.asdict(found) == {"length": 4}


def test_a_class_that_comes_back_keeps_the_state_that_it_has_here():
    """cloudpickle would give it the methods and attributes that it had when it was pickled."""
    cls = local_class()
    data = by_value.dumps([cls(), cls])
    cls.created, method = 5, cls.greet
    (instance, again) = pickle.loads(data)
    assert again is cls is type(instance) and cls.created == 5 and cls.greet is method


class Bomb:
    def __reduce__(self):
        return eval, ("1 / 0",)


def test_a_class_whose_unpickling_failed_is_received_again():
    classes = [local_class()]
    classes[0].bomb = Bomb()
    broken = by_value.dumps(classes[0])
    del classes[0].bomb
    whole = by_value.dumps(classes[0])
    forget(classes)
    with pytest.raises(ZeroDivisionError):
        pickle.loads(broken)
    assert pickle.loads(whole)(2).table == [0, 1]


def test_a_cell_that_no_function_captures_keeps_its_value():
    add, read = counter()
    add()
    (cell,) = read.__closure__
    again, other, reading = sent([cell, cell, read])
    assert again is other and again.cell_contents == reading() == 1


def test_a_cached_function_keeps_its_attributes_and_one_of_a_module_is_found_by_its_name(tmp_path, monkeypatch):
    @functools.cache
    def double(n):
        return 2 * n

    double.unit = "m"
    again = sent(double)
    assert again(3) == 6 and again.unit == "m" and again.cache_info().currsize == 1 and double.cache_info().misses == 0
    (tmp_path / "tables.py").write_text("import functools\n@functools.cache\ndef table():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tables", raising=False)
    table = importlib.import_module("tables").table
    assert sent(table) is table


def test_known_classes_are_not_pickled_again():
    cls = local_class()
    by_value.dumps(cls)
    cls.lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        by_value.dumps(cls(2))
    assert type(pickle.loads(by_value.dumps(cls(2), {by_value.identity_of(cls)}))) is cls


def test_a_traceback_shows_the_lines_of_a_pickled_function():
    def divide(x):
        return 1 / x  # a line of this file

    try:
        sent(divide)(0)
    except ZeroDivisionError as error:
        assert "# a line of this file" in "".join(traceback.format_exception(error))
    else:
        pytest.fail("nothing was raised")


def episodes_of(env_fns, make, steps=5, **kwargs):
    """Returns the rewards and infos of some steps."""
    with contextlib.closing(make(env_fns, **kwargs)) as envs:
        envs.reset()
        results = [envs.step(np.zeros(len(env_fns), int)) for _ in range(steps)]
        return [(rewards.tolist(), infos["seen"].tolist()) for _, rewards, _, _, infos in results]


def with_shared_variables():
    resets = 0
    add, read = counter()

    class Env(CountingEnv):
        def reset(self, **kwargs):
            nonlocal resets
            resets += 1
            add()
            observation, _ = super().reset(**kwargs)
            return observation, {"seen": read()}

        def step(self, action):
            observation, _, terminated, truncated, _ = super().step(action)
            return observation, float(resets), terminated, truncated, {"seen": read()}

    return functools.partial(Env, 0, 2)


@pytest.mark.parametrize("way", WAYS)
def test_an_env_whose_functions_share_variables_gives_the_same_in_any_process(way):
    env_fns = [with_shared_variables() for _ in range(3)]
    expected = episodes_of([with_shared_variables() for _ in range(3)], gym.vector.SyncVectorEnv)
    assert episodes_of(env_fns, vecenv.AsyncVectorEnv, **workers(way)) == expected
    assert expected[-1][0][0] > 1


@pytest.mark.parametrize("way", WAYS)
def test_values_of_local_classes_travel_without_changing_the_classes(way):
    """Classes count, and an enum is compared by identity, as in Gymnasium, whose workers are forks."""

    class Mode(enum.Enum):
        EASY = 1
        HARD = 2

    class Task:
        made = 0

        def __init__(self):
            type(self).made += 1

    class Env(CountingEnv):
        resets = 0

        def reset(self, *, seed=None, options=None):
            type(self).resets += 1
            observation, _ = super().reset(seed=seed)
            options = options or {"mode": None, "task": None}
            hard, known = options["mode"] is Mode.HARD, isinstance(options["task"], Task)
            return observation, {"hard": hard, "known": known, "resets": self.resets, "task": Task()}

    method = Task.__init__
    with vecenv.AsyncVectorEnv([functools.partial(Env, 0, 2)] * 2, **workers(way)) as envs:
        envs.reset()
        made = Task.made
        _, infos = envs.reset(options={"mode": Mode.HARD, "task": Task()})
        assert infos["hard"].all() and infos["known"].all() and all(type(task) is Task for task in infos["task"])
        assert envs.apply(lambda env: isinstance(env.unwrapped, Env)) == [True, True]
        _, infos = envs.reset()
        assert not infos["hard"].any() and infos["resets"].tolist() == ([5, 6] if way == 0 else [3, 3])
    assert Task.__init__ is method and Task.made == made + (5 if way == 0 else 1)


class Unpacking:
    """A function that makes envs and unpickles a class of its own, which the parent does not know."""

    def __init__(self, packed):
        self._packed = packed

    def __getstate__(self):
        return self._packed

    def __setstate__(self, packed):
        self._packed, self._made = packed, pickle.loads(packed)

    def __call__(self):
        made = self._made

        class Env(CountingEnv):
            def reset(self, **kwargs):
                observation, _ = super().reset(**kwargs)
                return observation, {"made": made()}

        return Env(0)


def test_replies_hold_classes_that_the_parent_does_not_know():
    classes = [type("Found", (), {"greet": lambda self: "hello"})]
    packed = cloudpickle.dumps(classes[0])
    forget(classes)
    with vecenv.AsyncVectorEnv([Unpacking(packed)] * 2, num_workers=1) as envs:
        _, infos = envs.reset()
        assert [each.greet() for each in infos["made"]] == ["hello"] * 2


def test_replies_refer_to_classes_of_the_parent_even_if_only_the_vector_env_still_has_them():
    class Env(CountingEnv):
        def reset(self, **kwargs):
            observation, _ = super().reset(**kwargs)
            Found.lock = threading.Lock()  # so that a pickle of the class would fail
            return observation, {"found": Found()}

    Found = local_class()
    with vecenv.AsyncVectorEnv([functools.partial(Env, 0)] * 2, num_workers=1) as envs:
        gone = weakref.ref(Found)
        Found = None
        gc.collect()
        _, infos = envs.reset()
        assert all(type(found) is gone() for found in infos["found"])


@pytest.mark.parametrize("way", WAYS)
def test_values_of_classes_in_a_file_that_only_the_parent_can_load_keep_their_class(tmp_path, way):
    (tmp_path / "tasks.py").write_text("class Task:\n    pass\n")
    spec = importlib.util.spec_from_file_location("loaded_tasks", tmp_path / "tasks.py")
    module = sys.modules["loaded_tasks"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        Task = module.Task

        class Env(CountingEnv):
            def reset(self, *, seed=None, options=None):
                observation, _ = super().reset(seed=seed)
                return observation, {"known": isinstance(options["task"], Task), "task": Task()}

        with vecenv.AsyncVectorEnv([functools.partial(Env, 0)] * 2, **workers(way)) as envs:
            _, infos = envs.reset(options={"task": Task()})
        assert infos["known"].all() and all(type(task) is Task for task in infos["task"])
    finally:
        del sys.modules["loaded_tasks"]


class Nested(CountingEnv):
    """Holds a vector env of forks, whose infos have a class that only these forks still know."""

    def __init__(self, index, classes):
        super().__init__(index)

        class Inner(CountingEnv):
            def reset(self, **kwargs):
                observation, _ = super().reset(**kwargs)
                return observation, {"found": classes[0]()}

        self._inner = vecenv.AsyncVectorEnv([functools.partial(Inner, 0)], num_workers=1, context="fork")
        classes.clear()
        gc.collect()

    def reset(self, **kwargs):
        observation, _ = super().reset(**kwargs)
        _, infos = self._inner.reset()
        return observation, {"greeting": infos["found"][0].greet()}

    def close(self):
        self._inner.close()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_replies_of_a_fork_of_a_worker_do_not_refer_to_classes_that_the_worker_has_dropped():
    with vecenv.AsyncVectorEnv([functools.partial(Nested, 0, [local_class()])], num_workers=1) as envs:
        _, infos = envs.reset()
        assert infos["greeting"].tolist() == ["hello553"]
