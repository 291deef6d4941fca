"""Envs and wrappers by name: unregistered classes and functions, arguments, and what helps if a name is not found."""

import contextlib
import os
import sys

import gymnasium as gym
import numpy as np
import pytest

import vecenv
from tests.helpers import assert_same, importable
from tests.vecenv.rows.test_batch_rows import CountingVectorEnv
from vecenv.vector.single_env import SingleEnv
from vecenv.wrappers import IgnoreKeys

MODULE = """
import os
from pathlib import Path
import gymnasium as gym
from tests.helpers import CountingEnv, counting_fns

with open(Path(__file__).with_name("pids"), "a") as file:
    print(os.getpid(), file=file)

THREE = 3

class Counting(CountingEnv):
    def __init__(self, length=2, render_mode=None):
        super().__init__(0, length)

class Vector(gym.vector.SyncVectorEnv):
    def __init__(self, num_envs, autoreset_mode):
        super().__init__(counting_fns(num_envs), autoreset_mode=autoreset_mode)

def pendulum(g=10.0):
    return gym.wrappers.RescaleAction(gym.make("Pendulum-v1", g=g), -1, 1)

class Negated(gym.RewardWrapper):
    def reward(self, reward):
        return -reward

def doubled(env, times=2):
    return gym.wrappers.TransformReward(env, lambda reward: times * reward)

class Both(CountingEnv):
    pass

gym.register("Both", entry_point=lambda: CountingEnv(1, 7))
"""


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """Returns the name of a module that is not imported yet; its `pids()` lists the processes that import it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    with importable(MODULE, tmp_path, request.node.nodeid) as name:
        yield name


def rollout(envs, seed=3, steps=12):
    """Returns the results of a reset and of `steps` steps with actions that depend only on the seed."""
    with contextlib.closing(envs):
        envs.action_space.seed(seed)
        found = [envs.reset(seed=seed)]
        found += [envs.step(envs.action_space.sample()) for _ in range(steps)]
    return tuple(found)


@pytest.mark.parametrize("context", [None, "spawn", "fork"])
def test_a_function_that_is_not_registered_makes_the_same_envs_with_and_without_workers(module, context):
    how = {"vector_kwargs": {"context": context}} if context else {}
    parallel = rollout(vecenv.make(f"{module}:pendulum", 3, num_workers=2, g=9.0, max_episode_steps=5, **how))
    assert module not in sys.modules and module.pids() and os.getpid() not in module.pids()
    serial = rollout(vecenv.make(f"{module}:pendulum", 3, num_workers=0, g=9.0, max_episode_steps=5))

    def make():
        env = gym.wrappers.RescaleAction(gym.make("Pendulum-v1", g=9.0), -1, 1)
        return gym.wrappers.TimeLimit(env, 5)

    assert_same(parallel, serial)
    assert_same(serial, rollout(gym.vector.SyncVectorEnv([make] * 3)))
    assert sum(step[3].sum() for step in serial[1:]) == 6


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_class_that_is_not_registered_makes_envs_and_its_id_is_module_and_name(module, num_workers):
    with vecenv.make(f"{module}:Counting", 2, num_workers=num_workers, length=4) as envs:
        assert envs.spec.id == f"{module}:Counting" and envs.get_attr("length") == (4, 4)
        assert repr(envs) == f"AsyncVectorEnv({module}:Counting, num_envs=2)"


def test_a_vector_env_class_that_is_not_registered_steps_the_envs_of_a_worker(module):
    with vecenv.make(f"{module}:Vector", 4, num_workers=2) as envs:
        assert envs.spec.entry_point is None and envs.reset()[0].shape == (4, 3)
    assert module not in sys.modules


def test_a_registered_id_comes_before_a_name_of_the_module(module):
    with vecenv.make(f"{module}:Both", 1, num_workers=0) as envs:
        assert envs.get_attr("length") == (7,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Countin", r"The module module_\d+ has no class or function Countin either. Did you mean 'Counting'"),
        ("nothing_like_it_at_all", r"has no class or function nothing_like_it_at_all either\."),
        ("THREE", "names a value of type int: name a registered id, or a class or function that makes the env"),
    ],
)
def test_a_name_that_the_module_lacks_is_an_error_that_lists_the_nearest(module, name, message):
    with pytest.raises(gym.error.Error, match=message):
        vecenv.make(f"{module}:{name}")
    assert module not in sys.modules


def test_the_error_for_a_class_of_pettingzoo_names_what_steps_it():
    pytest.importorskip("pettingzoo")
    with pytest.raises(gym.error.Error, match=r"write 'pettingzoo:tests\.multi_agent:LeavingEnv' in ppo"):
        vecenv.make("tests.multi_agent:LeavingEnv", num_workers=0)


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        (
            "Zzzzzzzz-v0",
            'If a package registers this id, import it or name its module: "module:id". To use a class or function',
        ),
        ("Nowhere/Nothing-v0", 'Namespace Nowhere not found.*"module:id"'),
        ("HalfCheeta-v5", r"Did you mean: `HalfCheetah`\? If a package registers"),
        ("HalfCheetah-v9", "`v9`.*`v5`"),
        ("my_env.py:MyEnv", "env id 'my_env.py:MyEnv': 'my_env.py' names a file. Give its module, 'my_env', and run"),
        ("my_env.py", """env id 'my_env.py' names a file: name a class or function in it, as in "my_env:NAME\""""),
        ("./arm.xml", """names a file: name the class of a task that loads this model, as in "arm:NAME\""""),
        ("./envs/my_env.py:MyEnv", "'./envs/my_env.py' names a file. Give its module, 'my_env'"),
        ("nomod.sub:X-v0", r"'nomod.sub' cannot be imported \(No module named 'nomod'\). Run the command in its"),
    ],
)
def test_the_error_for_an_env_that_is_not_found_says_what_helps_before_any_worker_starts(env_id, message, monkeypatch):
    monkeypatch.setattr(sys.modules["vecenv.make"], "AsyncVectorEnv", None)
    with pytest.raises(gym.error.Error, match=message):
        vecenv.make(env_id)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_missing_module_of_a_package_is_an_error_like_a_missing_package(num_workers):
    with pytest.raises(
        gym.error.Error, match=r"'tests\.missing' cannot be imported \(No module.*Run the command"
    ) as seen:
        vecenv.make("tests.missing:Env", num_workers=num_workers)
    assert "Traceback" not in str(seen.value)


def test_a_missing_module_that_an_existing_one_imports_keeps_its_error(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import another_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"'another_that_is_missing'$"):
        vecenv.make("needs_another:Env", num_workers=0)


def test_arguments_that_an_env_refuses_raise_gymnasiums_error(module):
    for num_workers in (0, 1):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'color' was raised from the environment"):
            vecenv.make(f"{module}:Counting", 1, num_workers=num_workers, color="red")


def test_an_argument_may_be_called_env_id():
    gym.register("Shim-v0", entry_point=lambda env_id: gym.make(env_id))
    try:
        with vecenv.make("Shim-v0", 2, env_id="CartPole-v1") as envs:
            assert envs.reset()[0].shape == (2, 4)
    finally:
        del gym.registry["Shim-v0"]


def test_all_arguments_of_a_vecenv_id_belong_to_the_env(module):
    """An argument named env_id must not select another env, whose module would then be imported."""
    assert_same(rollout(vecenv.make("vecenv/Pendulum-v1", 2, g=9.0)), rollout(vecenv.make("Pendulum-v1", 2, g=9.0)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'env_id'"):
        vecenv.make("vecenv/Pendulum-v1", 2, env_id=f"{module}:pendulum")
    assert not module.pids()


def test_wrappers_by_name_are_applied_in_order_with_their_arguments(module):
    names = [
        f"{module}:Negated",
        "TimeAwareObservation",
        'FrameStackObservation:{"stack_size": 3}',
        f"{module}:doubled",
    ]
    parallel = rollout(vecenv.make("CartPole-v1", 3, num_workers=2, wrappers=names))
    assert module not in sys.modules and os.getpid() not in module.pids()
    serial = rollout(vecenv.make("CartPole-v1", 3, num_workers=0, wrappers=names))

    def make():
        env = gym.wrappers.TransformReward(gym.make("CartPole-v1"), lambda reward: -reward)
        env = gym.wrappers.FrameStackObservation(gym.wrappers.TimeAwareObservation(env), 3)
        return gym.wrappers.TransformReward(env, lambda reward: 2 * reward)

    assert_same(parallel, serial)
    assert_same(serial, rollout(gym.vector.SyncVectorEnv([make] * 3)))
    assert serial[0][0].shape == (3, 3, 5) and serial[1][1].tolist() == [-2.0] * 3


def test_with_a_wrapper_a_mujoco_task_becomes_ordinary_envs():
    with vecenv.make("Hopper-v5", 2, wrappers=["TimeAwareObservation"]) as envs:
        assert envs.num_workers > 0 and envs.single_observation_space.shape == (12,)


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        ("framestack", r"gymnasium\.wrappers has no wrapper 'framestack'\. Did you mean 'FrameStackObservation'\?"),
        ("vector", "has no wrapper 'vector'.*Name a wrapper of another package as \"module:Wrapper\""),
        ("MODULE:Negate", "has no wrapper 'Negate'. Did you mean 'Negated'"),
        ("MODULE:THREE", "has no wrapper 'THREE'"),
        (
            "nomod:Wrapper",
            r"wrapper 'nomod:Wrapper': the module 'nomod' cannot be imported \(No module named 'nomod'\)",
        ),
    ],
)
@pytest.mark.parametrize("num_workers", [0, None])
def test_the_error_for_a_wrapper_that_is_not_found_names_the_nearest(module, wrapper, message, num_workers):
    with pytest.raises(gym.error.Error, match=message):
        vecenv.make("CartPole-v1", 2, num_workers, wrappers=[wrapper.replace("MODULE", module)])
    assert (module in sys.modules) == (num_workers == 0 and "MODULE" in wrapper)


def test_a_malformed_wrapper_name_or_arguments_that_are_not_json_are_an_error():
    for text in ("Wrapper:{size: 4}", 'Wrapper:{"size": 4'):
        with pytest.raises(ValueError, match=r"are not JSON \(.*\): write, for example, 'Wrapper:\{\"size\": 4\}'"):
            vecenv.make("CartPole-v1", wrappers=[text])
    for text in ("", "module:", "module:Wrapper:4", "a wrapper"):
        with pytest.raises(ValueError, match="names no wrapper: write 'Wrapper'"):
            vecenv.NamedWrapper(text)


def test_a_wrapper_that_refuses_its_arguments_is_named():
    with pytest.raises(TypeError, match=r"(?s)stack_size.*The wrapper 'FrameStackObservation' raised this error\."):
        vecenv.make("CartPole-v1", wrappers=["FrameStackObservation"])


def test_json_arrays_become_tuples_for_gymnasiums_wrappers_only(module):
    with vecenv.make("CartPole-v1", num_workers=0, wrappers=['ReshapeObservation:{"shape": [2, 2]}']) as envs:
        assert envs.reset(seed=0)[0].shape == (1, 2, 2)
    assert vecenv.NamedWrapper('FilterObservation:{"filter_keys": [["a"]]}').kwargs == {"filter_keys": (("a",),)}
    assert vecenv.NamedWrapper(f'{module}:doubled:{{"sizes": [2]}}').kwargs == {"sizes": [2]}


def test_a_string_in_place_of_a_list_of_wrappers_or_keys_is_an_error():
    with pytest.raises(TypeError, match="wrappers='RescaleAction' is a string: pass a list of wrappers"):
        vecenv.make("CartPole-v1", wrappers="RescaleAction")
    with pytest.raises(TypeError, match="keys='mission' is a string: pass a list of keys"):
        IgnoreKeys(gym.make("CartPole-v1"), "mission")


def test_make_single_takes_the_names_wrappers_and_arguments_of_make(module):
    for env_id in ("CartPole-v1", "vecenv/CartPole-v1"):
        env = vecenv.make_single(env_id, wrappers=["TimeAwareObservation"], max_episode_steps=3)
        assert env.spec.max_episode_steps == 3 and env.observation_space.shape == (5,)
    assert vecenv.make_single(f"{module}:Counting", length=9).get_wrapper_attr("length") == 9


def test_a_single_env_of_a_vector_env_has_the_same_episodes(module):
    env = vecenv.make_single(f"{module}:Vector")
    with vecenv.make(f"{module}:Vector", 1) as envs:
        np.testing.assert_array_equal(env.reset(seed=4)[0], envs.reset(seed=4)[0][0])
        for _ in range(2):
            ours, theirs = env.step(0), envs.step(np.array([0]))
            assert_same(tuple(ours[:4]), (theirs[0][0], theirs[1][0], theirs[2][0], theirs[3][0]))
    env.close()


def test_a_single_env_of_a_vector_env_takes_composite_actions():
    class Composite(CountingVectorEnv):
        def __init__(self):
            super().__init__(1, gym.vector.AutoresetMode.NEXT_STEP)
            self.single_action_space = gym.spaces.Dict(aim=gym.spaces.Box(-1, 1, (2,)), fire=gym.spaces.Discrete(2))

        def step(self, actions):
            assert actions["aim"].shape == (1, 2) and actions["fire"].tolist() == [0]
            return super().step(actions["fire"])

    env = SingleEnv(Composite())
    env.reset(seed=0)
    env.step({"aim": np.zeros(2, np.float32), "fire": 0})


def test_warm_up_takes_wrappers_and_arguments_into_account(monkeypatch):
    started = []
    monkeypatch.setattr(sys.modules["vecenv.make"], "start_fork_server", lambda: started.append(True))
    vecenv.warm_up("Hopper-v5", healthy_reward=2.0)
    assert not started
    vecenv.warm_up("Hopper-v5", wrappers=["TimeAwareObservation"])
    assert started
