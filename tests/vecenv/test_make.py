"""Tests of vecenv/make.py: `vecenv.make` chooses the backend, and `gymnasium.make_vec` builds "vecenv/ID"."""

import copy
import multiprocessing
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import vecenv
from tests.helpers import CountingEnv, assert_same
from vecenv.mujoco import Hopper, MujocoVectorEnv


def stepped_in_cpp(envs):
    """Returns whether one MuJoCo vector env in this process steps all envs."""
    return isinstance(envs._pool.envs[0], MujocoVectorEnv)


def test_mujoco_tasks_are_stepped_in_cpp_and_this_is_logged_once(logged):
    for _ in range(2):
        with vecenv.make("Hopper-v5", 3) as envs:
            assert envs.num_workers == 0 and stepped_in_cpp(envs) and envs.spec.id == "Hopper-v5"
    message = "Hopper-v5 is stepped in C++; backend='python' gives single envs with equal spaces and rewards"
    assert logged() == [("INFO", message)]


def test_nothing_is_logged_for_envs_that_are_not_mujoco_tasks(logged):
    with vecenv.make("CartPole-v1", 3) as envs:
        assert envs.num_workers > 0
    assert logged() == []


def test_arguments_that_need_workers_start_workers():
    for arguments in ({"num_workers": 2}, {"vector_kwargs": {"on_worker_death": "restart"}}):
        with vecenv.make("Hopper-v5", 4, **arguments) as envs:
            assert envs.num_workers > 0 and envs.get_attr("frame_skip") == (4,) * 4


def test_backend_python_gives_ordinary_envs():
    with vecenv.make("Hopper-v5", 2, backend="python") as envs:
        assert envs.num_workers > 0
        assert envs.apply(lambda env: type(env.unwrapped).__name__) == ["HopperEnv"] * 2


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "CartPole-v1", "tests.registered:Strange-v0"])
def test_an_argument_of_the_vector_env_among_those_of_the_env_is_an_error_that_says_where_to_pass_it(env_id, logged):
    with pytest.raises(TypeError, match=r"vector_kwargs={'autoreset_mode': 'SameStep', 'copy': False}"):
        vecenv.make(env_id, num_envs=2, autoreset_mode="SameStep", max_episode_steps=9, copy=False)
    assert logged() == []


@pytest.mark.parametrize("num_workers", [None, 1])
def test_unknown_arguments_get_gymnasiums_error(num_workers, logged):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'gravity' was raised from the environment"):
        vecenv.make("Hopper-v5", 2, num_workers=num_workers, gravity=3)
    assert logged()[0][1].endswith("consists of single envs: TypeError: got an unexpected keyword argument 'gravity'")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"wrappers": [gym.wrappers.TimeAwareObservation]}, "wrappers need single envs"),
        ({"render_mode": "rgb_array_list"}, "render_mode='rgb_array_list' needs single envs"),
    ],
)
def test_arguments_that_need_single_envs_select_ordinary_envs_and_the_reason_is_logged(arguments, reason, logged):
    with vecenv.make("HalfCheetah-v5", 2, **arguments) as envs:
        assert envs.num_workers > 0
    (entry,) = logged()
    assert entry[1] == f"HalfCheetah-v5 is not stepped in C++, but consists of single envs: {reason}"


def test_with_an_old_mujoco_version_tasks_become_ordinary_envs_and_the_reason_is_logged(logged, monkeypatch):
    monkeypatch.setitem(sys.modules, "vecenv.mujoco", None)  # makes the import fail
    with vecenv.make("Hopper-v5", 2) as envs:
        assert envs.num_workers > 0
    assert "is not stepped in C++, but consists of single envs: " in logged()[0][1]


def test_the_import_error_of_an_old_mujoco_says_what_to_install():
    for old in ("sys.modules['mujoco.batch'] = None", "import mujoco.batch; del mujoco.batch.Batch.models"):
        code = f"import sys; {old}; import vecenv.mujoco"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert "needs mujoco 4.0 or newer, but this is" in result.stderr and "pip install -U mujoco" in result.stderr


def test_an_old_mujoco_version_that_alone_prevents_stepping_in_cpp_is_a_warning_logged_once():
    code = (
        "import logging, sys, vecenv\n"
        "logging.basicConfig(format='%(levelname)s %(message)s')\n"
        "sys.modules['mujoco.batch'] = None\n"  # as in mujoco 3.16
        "for _ in range(2):\n"
        "    with vecenv.make('Hopper-v5', 1, num_workers=0) as envs:\n"
        "        assert type(envs._pool.envs[0].unwrapped).__name__ == 'HopperEnv'\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "is not stepped in C++" in line]
    assert line.startswith("WARNING Hopper-v5 is not stepped in C++, but consists of single envs: ")
    assert "needs mujoco 4.0 or newer" in line


def test_a_task_that_cannot_be_built_in_cpp_becomes_ordinary_envs_and_the_reason_is_logged(logged, monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("Batch does not take this model")

    monkeypatch.setattr("vecenv.mujoco.physics.Batch", refuse)
    with vecenv.make("Hopper-v5", 2) as envs:
        assert envs.num_workers > 0
    assert logged()[0][1].endswith("but consists of single envs: ValueError: Batch does not take this model")


def test_with_a_python_callback_tasks_become_ordinary_envs_and_the_reason_is_logged(logged):
    mujoco.set_mjcb_control(lambda model, data: None)
    try:
        with vecenv.make("Hopper-v5", 2) as envs:
            assert envs.num_workers > 0
            envs.reset(seed=0)
            envs.step(np.zeros((2, 3), np.float32))
        with pytest.raises(ValueError, match=r"mjcb_control is a Python function.*batch cannot call.*ordinary envs"):
            Hopper(2)
    finally:
        mujoco.set_mjcb_control(None)
    assert "but consists of single envs: ValueError: mjcb_control is a Python function" in logged()[0][1]


def test_registered_arguments_and_time_limits_are_respected():
    gym.register(
        id="MyHopper-v0",
        entry_point="gymnasium.envs.mujoco.hopper_v5:HopperEnv",
        max_episode_steps=7,
        kwargs={"healthy_reward": 3.0, "terminate_when_unhealthy": False},
    )
    try:
        for arguments in ({}, {"max_episode_steps": 5}, {"healthy_reward": 2.0}, {"max_episode_steps": -1}):
            with vecenv.make("MyHopper-v0", 2, **arguments) as ours:
                theirs = gym.vector.SyncVectorEnv([lambda a=arguments: gym.make("MyHopper-v0", **a)] * 2)
                assert stepped_in_cpp(ours)
                assert_same(ours.reset(seed=0), theirs.reset(seed=0))
                for _ in range(9):
                    actions = np.full((2, 3), 0.5, np.float32)
                    assert_same(ours.step(actions), theirs.step(actions))
    finally:
        del gym.registry["MyHopper-v0"]


def test_only_mujoco_entry_points_are_stepped_in_cpp_or_need_a_reason(logged):
    gym.register("Mine-v5", entry_point=lambda: CountingEnv(0))
    try:
        with vecenv.make("Mine-v5", 1) as envs:
            assert envs.num_workers == 1 and not logged()
    finally:
        del gym.registry["Mine-v5"]


WARM_UP = """
import vecenv
from vecenv.workers import launch
for arguments in ({"num_workers": 0}, {}):
    vecenv.warm_up("CartPole-v1", **arguments)
    print(launch._server._process is not None)
started = launch._server._process.pid
with vecenv.make("CartPole-v1") as envs:
    envs.reset(seed=0)
assert launch._server._process.pid == started
"""


@pytest.mark.skipif("forkserver" not in multiprocessing.get_all_start_methods(), reason="there is no fork server")
def test_the_workers_of_make_come_from_the_fork_server_that_warm_up_has_started():
    done = subprocess.run([sys.executable, "-c", WARM_UP], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\nTrue\n", "")


@pytest.mark.parametrize(
    ("env_id", "arguments", "starts"),
    [
        ("CartPole-v1", {}, True),
        ("CartPole-v1", {"num_workers": 0}, False),
        ("HalfCheetah-v5", {}, False),
        ("HalfCheetah-v5", {"num_workers": 1}, True),
        ("HalfCheetah-v5", {"render_mode": "rgb_array"}, True),
        ("HalfCheetah-v5", {"backend": "python"}, True),
    ],
)
def test_warm_up_starts_the_fork_server_only_if_there_will_be_workers(env_id, arguments, starts, monkeypatch):
    started = []
    monkeypatch.setattr(sys.modules["vecenv.make"], "start_fork_server", lambda: started.append(True))
    vecenv.warm_up(env_id, **arguments)
    assert bool(started) == starts


@pytest.mark.parametrize(
    ("env_id", "kwargs"), [("Pendulum-v1", {"g": 2.0}), ("Hopper-v5", {"reset_noise_scale": 0.25, "frame_skip": 2})]
)
def test_the_spec_of_a_vector_env_makes_a_single_env_with_the_same_arguments(env_id, kwargs):
    before = copy.deepcopy(gym.spec(env_id))
    with vecenv.make(env_id, 2, max_episode_steps=7, disable_env_checker=True, **kwargs) as envs:
        envs.spec.kwargs["made_up"] = 1
    assert gym.spec(env_id) == before
    del envs.spec.kwargs["made_up"]
    env = gym.make(envs.spec)
    assert env.spec.max_episode_steps == 7 and env.spec.kwargs.items() >= kwargs.items()
    env.close()


def test_the_spec_of_a_vector_env_without_a_time_limit_makes_a_single_env_without_one():
    with vecenv.make("CartPole-v1", 2, num_workers=0, max_episode_steps=-1) as envs:
        assert gym.make(envs.spec).spec.max_episode_steps is None


def test_an_id_without_a_version_names_the_newest_one():
    with vecenv.make("Hopper", 2) as envs:
        assert envs.spec.id == "Hopper-v5" and stepped_in_cpp(envs)
    assert vecenv.make_single("CartPole").spec.id == "CartPole-v1"


def test_make_vec_returns_an_async_vector_env_and_passes_its_arguments_on():
    envs = gym.make_vec("vecenv/Pendulum-v1", num_envs=3, num_workers=2, autoreset_mode="SameStep", g=9.0)
    theirs = gym.make_vec("Pendulum-v1", num_envs=3, vectorization_mode="sync", g=9.0)
    try:
        assert isinstance(envs, vecenv.AsyncVectorEnv) and envs.num_workers == 2
        assert envs.autoreset_mode == AutoresetMode.SAME_STEP
        assert envs.spec.id == "vecenv/Pendulum-v1" and repr(envs) == "AsyncVectorEnv(vecenv/Pendulum-v1, num_envs=3)"
        assert_same(envs.reset(seed=3), theirs.reset(seed=3))
        actions = np.full((3, 1), 0.5, np.float32)
        assert_same(envs.step(actions), theirs.step(actions))
    finally:
        envs.close()


def test_max_episode_steps_reaches_the_env():
    envs = gym.make_vec("vecenv/Pendulum-v1", num_envs=2, max_episode_steps=3)
    envs.reset(seed=1)
    ends = [envs.step(np.zeros((2, 1), np.float32))[3].all() for _ in range(3)]
    envs.close()
    assert ends == [False, False, True]


def test_every_id_is_registered_under_vecenv_in_a_new_process():
    code = (
        "import gymnasium as gym, vecenv\n"
        "ids = [spec.id for spec in gym.registry.values() if spec.namespace != 'vecenv' and spec.entry_point]\n"
        "missing = [i for i in ids if 'vecenv/' + i.replace('/', '.') not in gym.registry]\n"
        "assert len(ids) > 40 and not missing, missing\n"
        "envs = gym.make_vec('vecenv/CartPole-v1', num_envs=8)\n"
        "assert envs.reset(seed=0)[0].shape == (8, 4)\n"
        "envs.close()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_register_envs_adds_ids_registered_later():
    gym.register("ours/Late-v0", entry_point=lambda **kwargs: CountingEnv(0))
    try:
        vecenv.register_envs()
        vecenv.register_envs()
        envs = gym.make_vec("vecenv/ours.Late-v0", num_envs=2)
        assert envs.reset()[0].shape == (2, 3)
        envs.close()
    finally:
        del gym.registry["ours/Late-v0"], gym.registry["vecenv/ours.Late-v0"]


def test_a_wrong_id_raises_gymnasiums_error():
    with pytest.raises(gym.error.NameNotFound, match="CartPole"):
        gym.make_vec("vecenv/CartPolle-v1", num_envs=2)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("Lamp", "Did you mean 'Lamb'?"),
        ("Lamb-v1", "doesn't exist"),
        ("Farm/Lamb-v1", "Namespace Farm not found"),
        ("Goat-v4", "It provides versioned environments: [ `v3` ]"),
        ("Goat-v1", "`Goat-v3` instead"),
        ("a goat", "Malformed environment ID: a goat"),
    ],
)
def test_a_wrong_name_in_a_module_that_only_workers_import_gives_a_message_without_their_traceback(
    name, advice, tmp_path
):
    (tmp_path / "animals.py").write_text(
        "import gymnasium\nfrom tests.helpers import CountingEnv\n\nclass Lamb(CountingEnv):\n    pass\n"
        "gymnasium.register('Goat-v3', entry_point=Lamb)\n"
    )
    script = f"""
import sys
sys.path.append({str(tmp_path)!r})
import gymnasium, vecenv
try:
    vecenv.make("animals:{name}", num_envs=2, num_workers=1)
except gymnasium.error.Error as error:
    assert isinstance(error, vecenv.EnvError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert advice in done.stdout and len(done.stdout.splitlines()) == 1 and not done.stderr, done


LOUD = """
import os, sys, warnings
import gymnasium as gym
import vecenv
from tests.helpers import CountingEnv

class Loud(CountingEnv):
    def __init__(self):
        super().__init__(0)
        os.write(2, b"native library\\n")
        warnings.warn("an old parameter")

gym.register("Loud-v0", entry_point=Loud)
vecenv.make("Loud-v0", num_envs=3, num_workers=int(sys.argv[1])).close()
"""


@pytest.mark.parametrize("num_workers", ["0", "1"])
def test_nothing_that_constructors_write_to_stderr_is_hidden(num_workers):
    command = [sys.executable, "-c", LOUD, num_workers]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.count("native library") == 3 and "UserWarning: an old parameter" in done.stderr


def test_a_wrapper_that_fails_closes_the_env():
    closed = []

    class Closing(CountingEnv):
        def close(self):
            closed.append(True)

    gym.register("Closing-v0", entry_point=lambda: Closing(0))
    try:
        with pytest.raises(gym.error.Error, match="no wrapper"):
            vecenv.make("Closing-v0", num_workers=0, wrappers=["NoSuchWrapper"])
    finally:
        del gym.registry["Closing-v0"]
    assert closed
