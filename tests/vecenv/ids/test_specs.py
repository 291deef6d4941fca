"""Tests of "module:id" in vecenv.make: this process imports the module only to step its envs."""

import importlib
import multiprocessing
import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

import vecenv
from tests.helpers import importable

MODULE = """
import os
from pathlib import Path
import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space
from tests.helpers import CountingEnv

with open(Path(__file__).with_name("pids"), "a") as file:
    print(os.getpid(), file=file)

class Env(CountingEnv):
    name = "Env"

    def __init__(self, colors=(), render_mode=None):
        assert "Other/Inner-v3" in gym.registry  # an env may use the other registrations
        super().__init__(0)
        self.colors = colors

class Vector(VectorEnv):
    name = "Vector"

    def __init__(self, num_envs, autoreset_mode, colors=()):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": autoreset_mode}
        self.single_observation_space = CountingEnv.observation_space
        self.single_action_space = CountingEnv.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.colors = colors

    def reset(self, *, seed=None, options=None):
        return np.zeros((self.num_envs, 3)), {}

gym.register("Other/Inner-v3", entry_point=f"{__name__}:Env")
gym.register("Plain-v0", entry_point=f"{__name__}:Env", kwargs={"colors": ["red"]}, max_episode_steps=2)
gym.register("Class-v0", entry_point=Env, kwargs={"colors": ("red",)}, max_episode_steps=2)
gym.register("Lambda-v0", entry_point=lambda **kwargs: Env(colors=("red",), **kwargs), max_episode_steps=2)
gym.register("Two-v0", f"{__name__}:Env", vector_entry_point=f"{__name__}:Vector")
gym.register("Batch-v0", vector_entry_point=f"{__name__}:Vector", kwargs={"colors": ["red"]})
gym.register("BatchClass-v0", vector_entry_point=Vector, kwargs={"colors": ("red",)})
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """Returns the name of a module that is not imported yet; its `pids()` lists the processes that imported it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    with importable(getattr(request, "param", MODULE), tmp_path, request.node.nodeid) as name:
        yield name


@pytest.mark.parametrize("name", ["Plain-v0", "Class-v0", "Lambda-v0"])
def test_workers_import_the_module_of_an_id_and_this_process_does_not(module, name):
    with vecenv.make(f"{module}:{name}", num_envs=3, num_workers=2) as envs:
        assert envs.spec.id == name and envs.spec.max_episode_steps == 2
        assert [list(colors) for colors in envs.get_attr("colors")] == [["red"]] * 3
        envs.reset(seed=0)
        assert [envs.step([0] * 3)[3].tolist() for _ in range(2)] == [[False] * 3, [True] * 3]
    assert module not in sys.modules and name not in gym.registry
    assert module.pids() and os.getpid() not in module.pids()


@pytest.mark.parametrize("name", ["Batch-v0", "BatchClass-v0"])
def test_workers_also_build_the_vector_envs_of_a_module(module, name):
    with vecenv.make(f"{module}:{name}", num_envs=4, num_workers=2) as envs:
        assert envs.spec.id == name and [list(colors) for colors in envs.get_attr("colors")] == [["red"]] * 4
        np.testing.assert_array_equal(envs.reset(seed=0)[0], np.zeros((4, 3)))
    assert module not in sys.modules and os.getpid() not in module.pids()


def test_num_workers_zero_imports_the_module_in_this_process(module):
    with vecenv.make(f"{module}:Class-v0", num_envs=2, num_workers=0) as envs:
        envs.reset(seed=0)
    assert module.pids() == [os.getpid()]


def test_an_imported_module_is_looked_up_in_this_process(module):
    importlib.import_module(str(module))
    with vecenv.make(f"{module}:Class-v0", num_envs=2, num_workers=1) as envs:
        assert envs.spec.entry_point is gym.spec("Class-v0").entry_point


def test_only_the_workers_import_the_module_of_single_envs(module):
    for _ in range(3):
        with vecenv.make(f"{module}:Plain-v0", num_envs=1):
            pass
    assert len(module.pids()) == 3 and os.getpid() not in module.pids()


def test_a_vector_env_is_stepped_here_as_soon_as_the_workers_have_found_it(module):
    for _ in range(2):
        with vecenv.make(f"{module}:Batch-v0", num_envs=2) as envs:
            assert envs.num_workers == 0 and envs.spec.id == "Batch-v0"
    assert module.pids()[-1] == os.getpid()


def test_what_the_workers_report_about_a_vector_env_is_remembered(module):
    for _ in range(3):
        with vecenv.make(f"{module}:Batch-v0", num_envs=1, num_workers=1):
            pass
    assert len(module.pids()) == 1 + 3


def test_an_id_with_both_forms_is_built_from_its_vector_entry_point_by_workers_too(module):
    with vecenv.make(f"{module}:Two-v0", num_envs=2, num_workers=1) as envs:
        assert envs.call("name") == ("Vector",) * 2
    with vecenv.make(f"{module}:Two-v0", num_envs=2, num_workers=1, backend="python") as envs:
        assert envs.call("name") == ("Env",) * 2
    with vecenv.make(f"{module}:Two-v0", num_envs=2, num_workers=1, render_mode="rgb_array") as envs:
        assert envs.call("name") == ("Env",) * 2  # Vector does not accept the argument
    for how, argument in (({"backend": "python"}, "backend='python'"), ({"wrappers": ["ClipReward"]}, "`wrappers`")):
        message = f"Batch-v0 is registered only as a vector env, but {argument} needs single envs: omit"
        with pytest.raises(gym.error.Error, match=message) as caught:  # which commands print without a traceback
            vecenv.make(f"{module}:Batch-v0", **how)
        assert isinstance(caught.value, ValueError)
    assert module not in sys.modules


def test_warm_up_imports_no_module(module):
    vecenv.warm_up(f"{module}:Plain-v0")
    assert module not in sys.modules and not module.pids()


def test_the_module_sees_current_environment_variables(module, tmp_path, monkeypatch):
    (tmp_path / f"{module}.py").write_text(f"import os\nassert os.environ['COLOR'] == 'blue'\n{MODULE}")
    monkeypatch.setenv("COLOR", "blue")
    with vecenv.make(f"{module}:Plain-v0", num_envs=1) as envs:
        assert envs.spec.id == "Plain-v0"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_class_instead_of_an_id_is_an_error_that_says_what_to_pass(num_workers):
    with pytest.raises(TypeError, match=r"neither a string nor an EnvSpec.*module:name.*AsyncVectorEnv"):
        vecenv.make(gym.Env, 2, num_workers=num_workers)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Plan-v0", gym.error.NameNotFound, "Environment `Plan` doesn't exist. Did you mean: `Plain`"),
        ("Plain-v7", gym.error.VersionNotFound, "`v7`.*`v0`"),
        ("Others/Inner-v3", gym.error.NamespaceNotFound, "Others"),
        ("no id", gym.error.Error, "Malformed environment ID: no id"),
    ],
)
def test_an_unknown_id_raises_gymnasiums_error_which_names_the_closest_id(module, name, error, message):
    with pytest.raises(error, match=message):
        vecenv.make(f"{module}:{name}")
    assert module not in sys.modules


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("def fail():\n    raise RuntimeError('no license')\nfail()\n", r"(?s)in fail.*RuntimeError: no license"),
        ("import nothing_of_that_name\n", r"(?s)line 1, in <module>.*nothing_of_that_name"),
        ("import sys\nsys.exit(3)\n", r"(?s)SystemExit: 3"),
        ("import os\nos.abort()\n", r"was killed by SIGABRT .* during construction"),
        ("import os\nos._exit(5)\n", r"exited with code 5 .* during construction"),
    ],
    indirect=["module"],
)
def test_a_module_that_cannot_be_imported_is_an_error_of_the_worker(module, message):
    with pytest.raises(vecenv.VecEnvError, match=message):
        vecenv.make(f"{module}:Plain-v0", num_workers=1)
    assert module not in sys.modules


def test_a_module_in_the_current_folder_is_found(tmp_path):
    (tmp_path / "here.py").write_text(MODULE)
    code = "import sys, vecenv; vecenv.make('here:Plain-v0', 2).close(); assert 'here' not in sys.modules"
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True, timeout=60)


SCRIPT = """
import gymnasium as gym, vecenv, registering_package
for context in {methods}:
    with vecenv.AsyncVectorEnv([lambda: gym.make("Plain-v0")] * 3, num_workers=2, context=context) as envs:
        envs.reset(seed=0)
        assert envs.apply(lambda env: type(env.unwrapped).__module__) == ["registering_package"] * 3
with vecenv.make("Plain-v0", 2) as envs:
    envs.reset(seed=0)
"""


def test_a_package_that_registers_its_ids_in_workers_too_causes_no_warning(tmp_path):
    """A worker registers the ids of its parent before an env imports the package."""
    (tmp_path / "registering_package").mkdir()
    # Entry points are strings: unpickling a class would import the package before the worker registers its ids.
    strings = "".join(
        line for line in MODULE.splitlines(keepends=True) if "Class-v0" not in line and "lambda" not in line
    )
    (tmp_path / "registering_package" / "__init__.py").write_text(strings)
    code = SCRIPT.format(methods=multiprocessing.get_all_start_methods())
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and "Overriding" not in done.stderr, done.stderr
