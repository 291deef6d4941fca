"""Tests of vecenv/workers/pickling.py: envs from modules that only the parent can import."""

import array
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import pickle
import runpy
import subprocess
import sys
import threading
import types
import xml.parsers.expat
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import cloudpickle
import gymnasium as gym
import pytest

import vecenv
from tests.helpers import CountingEnv
from tests.start_methods import METHODS
from vecenv.workers import pickling
from vecenv.workers.pickling import dumps

SOURCE = """
import threading

import gymnasium as gym
import numpy as np

SCALE = {scale}
lock = threading.Lock()


class Broken(Exception):
    pass


def number(env):
    return SCALE


class Env(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(1, float(SCALE)), {{}}

    def step(self, action):
        if action:
            raise Broken("the motor is on fire")
        return np.full(1, float(SCALE)), 1.0, False, False, {{}}

    def import_by_name(self, name):
        import importlib

        return importlib.import_module(name).SCALE


class Locked(Env):
    def reset(self, **kwargs):
        with lock:
            return super().reset(**kwargs)
"""


def first_observation(make, **kwargs):
    with vecenv.AsyncVectorEnv([make] * 2, num_workers=1, **kwargs) as envs:
        return envs.reset()[0][0, 0]


@pytest.fixture(autouse=True)
def restored_modules(monkeypatch):
    """Restores sys.modules, sys.path and the current folder, and checks that cloudpickle's own list is unchanged."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before, registered = set(sys.modules), set(gym.registry)
    by_value = cloudpickle.list_registry_pickle_by_value()
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    for env_id in set(gym.registry) - registered:
        del gym.registry[env_id]
    assert cloudpickle.list_registry_pickle_by_value() == by_value


def write(folder, name="only_here", scale=7):
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.py"
    file.write_text(SOURCE.format(scale=scale))
    return file


def load(file, name="loaded_by_path"):
    """Loads a file as a module, as Python's documentation recommends."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_path(tmp_path, monkeypatch):
    return load(write(tmp_path)).Env


def in_a_package(tmp_path, monkeypatch):
    package = write(tmp_path / "package", "__init__", scale=3)
    write(tmp_path / "package", "inner", scale=7)
    spec = importlib.util.spec_from_file_location(
        "renamed", package, submodule_search_locations=[str(tmp_path / "package")]
    )
    sys.modules["renamed"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["renamed"])
    return importlib.import_module("renamed.inner").Env


def without_a_file(tmp_path, monkeypatch):
    module = sys.modules["typed_in"] = types.ModuleType("typed_in")
    exec(SOURCE.format(scale=7), vars(module))
    return module.Env


def from_a_relative_entry(tmp_path, monkeypatch):
    write(tmp_path / "plugins")
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, "plugins")
    made = importlib.import_module("only_here").Env
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path / "outputs")  # as Hydra does
    return made


def from_an_earlier_folder(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, "")
    made = importlib.import_module("only_here").Env
    monkeypatch.chdir("/")  # as %cd does in a notebook
    return made


def from_an_earlier_folder_whose_module_is_hidden(tmp_path, monkeypatch):
    made = from_an_earlier_folder(tmp_path, monkeypatch)
    write(tmp_path / "other", scale=5)
    monkeypatch.chdir(tmp_path / "other")
    return made


def from_an_earlier_folder_by_name(tmp_path, monkeypatch):
    from_an_earlier_folder(tmp_path, monkeypatch)

    def make():
        from only_here import Env

        return Env()

    return make


WAYS = [by_path, in_a_package, without_a_file, from_a_relative_entry, from_an_earlier_folder,
        from_an_earlier_folder_whose_module_is_hidden, from_an_earlier_folder_by_name]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_envs_of_modules_that_only_the_parent_can_import(way, tmp_path, monkeypatch):
    assert first_observation(way(tmp_path, monkeypatch)) == 7


@pytest.mark.parametrize("way", [by_path, from_an_earlier_folder])
@pytest.mark.parametrize("context", ["spawn", "fork"])
def test_such_envs_with_other_start_methods(way, context, tmp_path, monkeypatch):
    assert first_observation(way(tmp_path, monkeypatch), context=context) == 7


@pytest.mark.parametrize("way", [by_path, from_an_earlier_folder, without_a_file])
def test_registered_ids_of_such_envs(way, tmp_path, monkeypatch):
    made = way(tmp_path, monkeypatch)
    gym.register("OnlyHere-v0", f"{made.__module__}:Env", max_episode_steps=9)
    with vecenv.make("OnlyHere-v0", 2, num_workers=1) as envs:
        assert envs.reset()[0][0, 0] == 7
    assert first_observation(lambda: gym.make("OnlyHere-v0")) == 7


@pytest.mark.parametrize("name", ["<run_path>", "job", "__mp_main__"])
def test_envs_of_scripts_that_runpy_runs(name, tmp_path):
    script = write(tmp_path, "script")
    script.write_text(
        script.read_text() + "\nfrom tests.vecenv.workers.test_pickling import first_observation\n"
        "seen = first_observation(Env), first_observation(lambda: Env())\n"
    )
    assert runpy.run_path(str(script), run_name=name)["seen"] == (7, 7)


NAMED = """
import gymnasium as gym, numpy as np, vecenv
from gymnasium.utils import RecordConstructorArgs

class Env(gym.Env):
    observation_space, action_space = gym.spaces.Box(-9, 9, (1,), np.float64), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.full(1, 7.0), {{}}

class Double(gym.ObservationWrapper, RecordConstructorArgs):
    def __init__(self, env):
        RecordConstructorArgs.__init__(self)
        gym.ObservationWrapper.__init__(self, env)
    def observation(self, observation):
        return 2 * observation

class Vector(gym.vector.SyncVectorEnv):
    def __init__(self, num_envs):
        super().__init__([lambda: Double(Env())] * num_envs)

gym.register("Mine-v0", "__main__:Env", vector_entry_point="__main__:Vector")
doubled = Double(gym.make("Mine-v0")).spec
for make in (
    lambda: vecenv.AsyncVectorEnv([lambda: gym.make("Mine-v0")], num_workers=1, context={context!r}),
    lambda: vecenv.AsyncVectorEnv([lambda: gym.make("__main__:Mine-v0")], num_workers=1, context={context!r}),
    lambda: vecenv.AsyncVectorEnv([lambda: gym.make(doubled)], num_workers=1, context={context!r}),
    lambda: vecenv.make("Mine-v0", 1, num_workers=1, wrappers=["__main__:Double"]),
    lambda: vecenv.make("Mine-v0", 1, num_workers=1),
):
    with make() as envs:
        print(envs.reset()[0].item())
"""


@pytest.mark.parametrize("context", METHODS)
def test_names_in_a_script_cross_in_specs_and_as_wrappers(context, tmp_path):
    """As in notebooks; Gymnasium's AsyncVectorEnv forks on Linux, so its workers know the script's names."""
    script = tmp_path / "script.py"
    script.write_text(NAMED.format(context=context))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=90)
    assert done.stdout.split() == ["7.0", "7.0", "14.0", "14.0", "14.0"], done.stderr


def test_functions_and_exceptions_of_such_modules_cross_too(tmp_path):
    module = load(write(tmp_path))
    with vecenv.AsyncVectorEnv([module.Env] * 2, num_workers=1) as envs:
        assert envs.apply(module.number) == [7, 7]
        envs.reset()
        with pytest.raises(module.Broken, match="the motor is on fire"):
            envs.step([0, 1])


def test_an_env_that_cannot_be_pickled_by_value_is_an_error_that_names_the_cause(tmp_path):
    module = load(write(tmp_path))
    with pytest.raises(TypeError, match="lock") as caught:
        vecenv.AsyncVectorEnv([module.Locked], num_workers=1)
    assert "Workers cannot import these modules by their names" in caught.value.__notes__[0]
    assert "loaded_by_path" in caught.value.__notes__[0]


class Simulator:
    def __init__(self):
        self.clients = {"a": [threading.Lock()]}

    def make(self):
        return CountingEnv(0)


def capturing(simulator):
    return lambda: CountingEnv(simulator is None)


SIMULATOR = Simulator()
CAPTURING = {
    "a closure": (capturing(SIMULATOR), r"\(function capturing\.<locals>\.<lambda>\) > variable 'simulator' "),
    "a global variable": (lambda: CountingEnv(SIMULATOR is None), r"\(function <lambda>\) > variable 'SIMULATOR' "),
    "a default": (lambda simulator=SIMULATOR: CountingEnv(0), r"\(function <lambda>\) > default 0 "),
    "partial": (partial(CountingEnv, length=SIMULATOR), r"\(partial\) > argument 'length' "),
    "a method": (SIMULATOR.make, r"\(method Simulator\.make\) > object "),
}


@pytest.mark.parametrize(("env_fn", "way"), CAPTURING.values(), ids=CAPTURING)
def test_a_function_that_captures_what_cannot_be_pickled_is_an_error_that_leads_to_it(env_fn, way):
    way += r"\(Simulator\) > attribute 'clients' \(dict\) > key 'a' \(list\) > element 0 \(lock\) cannot be pickled"
    message = rf"^env_fns\[1\] {way} for the workers .*Create it inside the function"
    with pytest.raises(TypeError, match=message) as caught:
        vecenv.AsyncVectorEnv([lambda: CountingEnv(0), env_fn], num_workers=1)
    assert not getattr(caught.value, "__notes__", []), "no module is to blame"
    with (
        pytest.raises(TypeError, match=r"^worker_init \(function .* > variable 'SIMULATOR' .*lock"),
        vecenv.AsyncVectorEnv([lambda: CountingEnv(0)], num_workers=1, worker_init=lambda: SIMULATOR),
    ):
        pass


def test_the_function_of_a_batched_that_captures_what_cannot_be_pickled_is_an_error_that_leads_to_it():
    with pytest.raises(TypeError, match=r"^env_fns \(Batched\) > .* > variable 'simulator' .*lock"):
        vecenv.AsyncVectorEnv(vecenv.Batched(capturing(SIMULATOR), 2), num_workers=1)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_a_forked_worker_inherits_functions_and_specs_without_pickling_them():
    gym.register("Capturing-v0", capturing(SIMULATOR))
    fns = [capturing(SIMULATOR), lambda: gym.make("Capturing-v0", disable_env_checker=True)]
    with vecenv.AsyncVectorEnv(fns, num_workers=2, context="fork", on_worker_death="restart") as envs:
        envs.reset()
        envs.processes[0].kill()
        with pytest.warns(UserWarning, match="restarted"):
            envs.step([0, 0])


def test_an_id_whose_spec_cannot_be_pickled_is_an_error_that_says_why():
    gym.register("Capturing-v0", capturing(SIMULATOR))
    assert first_observation(lambda: CountingEnv(3)) == 3  # such a spec does not matter to other envs
    with pytest.raises(vecenv.VecEnvError, match=r"the spec of 'Capturing-v0' .* > variable 'simulator' .*lock"):
        vecenv.AsyncVectorEnv([lambda: gym.make("Capturing-v0", disable_env_checker=True)], num_workers=1)


def test_arguments_that_cannot_be_pickled_are_an_error_that_leads_to_them():
    with vecenv.AsyncVectorEnv([lambda: CountingEnv(0)], num_workers=1) as envs:
        with pytest.raises(TypeError, match=r"ResetCommand.* > key 'simulator' \(Simulator\) > .*lock"):
            envs.reset(options={"simulator": SIMULATOR})
        envs.reset()


def test_a_worker_that_misses_a_module_of_the_parent_is_an_error_that_names_the_file(tmp_path):
    module = load(write(tmp_path))
    with vecenv.AsyncVectorEnv([module.Env], num_workers=1) as envs:
        envs.reset()
        with pytest.raises(ModuleNotFoundError, match=r"loaded the module 'loaded_by_path' .*only_here.py.*sys.path"):
            envs.call("import_by_name", "loaded_by_path")


def test_modules_that_workers_can_import_are_sent_by_name():
    """Their classes keep their identity, and their sources may hold what cannot be pickled."""
    found = [CountingEnv, gym.make, pytest.raises, importlib.import_module, types.SimpleNamespace, array.array]
    found += [itertools.count, xml.parsers.expat.errors]  # built in; a module that an extension module has created
    assert len(dumps(found)) < 500


def test_modules_of_a_former_sys_path_are_sent_by_name(tmp_path, monkeypatch):
    """Workers search the folders of all modules that the parent has loaded."""
    (tmp_path / "formerly_importable.py").write_text("class Env: ...\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        module = importlib.import_module("formerly_importable")
    assert len(dumps(module.Env)) < 100


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_a_fork_can_pickle_although_a_thread_of_the_parent_was_pickling():
    begun, finish = threading.Event(), threading.Event()

    class Slow:
        def __reduce__(self):
            begun.set()
            finish.wait()
            return int, ()

    with ThreadPoolExecutor() as threads:
        threads.submit(dumps, Slow())
        begun.wait()
        child = multiprocessing.get_context("fork").Process(target=dumps, args=(3,))
        child.start()
        child.join(10)
        finish.set()
    child.kill()
    assert child.exitcode == 0


@pytest.mark.parametrize("name", [None, "a_module_that_is_not_loaded"])
def test_functions_whose_module_is_not_loaded_are_sent_by_value(name):
    function = types.FunctionType((lambda: 7).__code__, {})
    function.__module__ = name
    assert pickle.loads(dumps(function))() == 7


def test_a_spec_may_name_what_a_script_does_not_define():
    spec = gym.envs.registration.EnvSpec("Missing-v0", "__main__:NoSuchEnv")
    assert pickle.loads(dumps(spec)).entry_point == "__main__:NoSuchEnv"


@pytest.mark.timeout(20)
def test_the_way_to_an_object_that_cannot_be_pickled_is_found_although_objects_refer_to_each_other():
    first, second = types.SimpleNamespace(), types.SimpleNamespace()
    first.second, second.first, second.lock = second, first, threading.Lock()
    with pytest.raises(TypeError, match=r"> attribute 'second' \(SimpleNamespace\) > attribute 'lock' \(lock\) cannot"):
        dumps(first)


def test_a_function_with_a_variable_that_has_no_value_yet_is_an_error_that_names_the_function():
    def function(simulator=SIMULATOR):
        return later, simulator

    with pytest.raises(TypeError, match=r"the value \(function .*function\) cannot be pickled"):
        dumps(function)
    later = None


class Vast:
    """An object for whose pickle there is no memory."""

    def __reduce__(self):
        raise MemoryError


def test_a_lack_of_memory_is_no_object_that_cannot_be_pickled():
    with pytest.raises(vecenv.SharedMemoryFull):
        dumps(Vast())


def test_what_python_finds_in_sys_path_is_pickled_without_a_look_at_all_modules(monkeypatch):
    """The look takes milliseconds with thousands of modules, and callbacks may send a function at each step."""
    monkeypatch.setattr(pickling, "import_path", lambda: pytest.fail("looked at all modules"))
    assert pickle.loads(dumps([lambda: 3, json.dumps, cloudpickle.dumps]))[0]() == 3
