"""Tests of ppo/footprint.py: the estimate is compared with the peak memory of real runs and with available memory."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import ppo
import vecenv
from ppo import footprint

FACTOR = 1.5

MEASURE = """
import dataclasses, json, re, sys, tempfile
from ppo.cli import load_tensorflow
load_tensorflow()
import gymnasium as gym, numpy as np, ppo, vecenv
from ppo.footprint import check_memory

shape, dtype, choices, settings = json.loads(sys.argv[1])

class Plain(gym.Env):
    action_space = gym.spaces.Discrete(choices)
    def __init__(self, space):
        self.observation_space, self.observation, self.steps = space, np.zeros(space.shape, space.dtype), 0
    def reset(self, *, seed=None, options=None):
        return self.observation, {}
    def step(self, action):
        self.steps += 1
        return self.observation, 1.0, False, self.steps % 8 == 0, {}

def peak():
    # Not ru_maxrss, which a process inherits from its parent.
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

space = gym.spaces.Box(0, 1, tuple(shape), np.dtype(dtype))
config = ppo.Config(env="given", num_workers=0, epochs=1, eval_episodes=1, **settings)
config = dataclasses.replace(config, total_steps=2 * config.batch_size)
vecenv_available, vecenv.available_memory = vecenv.available_memory, lambda: 0
with vecenv.SyncVectorEnv([lambda: Plain(space)] * config.num_envs, **ppo.vector_options(config)) as envs:
    try:
        held = sum(array.nbytes for array in envs.arrays.values())
        check_memory(config, (space, Plain.action_space), held_bytes=held)
    except ppo.ConfigError as error:
        number, unit = re.search("need about ([0-9.]+) (.iB)", str(error)).groups()
vecenv.available_memory = vecenv_available
before = peak()
ppo.train(config, lambda: Plain(space), logdir=tempfile.mkdtemp(dir=sys.argv[2]))
print(json.dumps([float(number) * {"MiB": 2**20, "GiB": 2**30}[unit], peak() - before]))
"""

SHAPES = {
    "small": ([4], "float32", 2, {"num_envs": 4, "num_steps": 8, "minibatch_size": 16}),
    "long": ([20_000], "float32", 2, {"num_envs": 16, "num_steps": 32, "minibatch_size": 64}),
    "frames": ([84, 84, 4], "uint8", 2, {"num_envs": 8, "num_steps": 32, "minibatch_size": 64}),
    "choices": ([4], "float32", 2**15, {"num_envs": 16, "num_steps": 32, "minibatch_size": 256}),
    "minibatch": ([84, 84, 4], "uint8", 2, {"num_envs": 8, "num_steps": 32, "minibatch_size": 256}),
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_estimate_is_close_to_the_peak_memory_of_a_run(tmp_path, name):
    words = [sys.executable, "-c", MEASURE, json.dumps(SHAPES[name]), str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    estimate, measured = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: estimated {estimate / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert measured / FACTOR < estimate < measured * FACTOR


def test_a_run_that_does_not_fit_in_memory_is_an_error_with_the_numbers_and_the_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(vecenv, "available_memory", lambda: 2**30)
    config = ppo.Config(env="given", num_envs=4, num_steps=64, minibatch_size=64, num_workers=0)

    class Wide(gym.Env):
        observation_space = gym.spaces.Box(-1, 1, (200_000,), np.float32)
        action_space = gym.spaces.Discrete(2)

    with pytest.raises(ppo.ConfigError, match=r"would need about .* GiB of memory, but 1.0 GiB is available") as caught:
        ppo.train(config, Wide, logdir=tmp_path)
    for remedy in (r"GiB: lower --num-envs or --num-steps", r"MiB: lower --minibatch-size"):
        assert remedy in str(caught.value)
    assert not list(tmp_path.iterdir())


ACTIONS = {
    "Discrete": gym.spaces.Discrete(2**16),
    "MultiDiscrete": gym.spaces.MultiDiscrete([2**13] * 8),
    "MultiBinary": gym.spaces.MultiBinary(2**16),
    "Box of integers": gym.spaces.Box(0, 2**15 - 1, (2,), np.int32),
    "Box": gym.spaces.Box(-np.inf, np.inf, (2**15,), np.float32),
    "Dict": gym.spaces.Dict({"a": gym.spaces.Discrete(2**15), "b": gym.spaces.MultiBinary(2**15)}),
}


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("settings", [{}, {"action_transform": "tanh"}, {"network": "unused:name"}], ids=str)
def test_the_estimate_counts_an_output_of_the_policy_for_each_choice_of_an_action(monkeypatch, name, settings):
    """Each of these actions needs 2**16 outputs. A copy of those of 32 x 64 steps takes 512 MiB."""
    spaces = (gym.spaces.Box(-1, 1, (4,), np.float32), ACTIONS[name])
    monkeypatch.setattr(vecenv, "available_memory", lambda: 2**30)
    config = ppo.Config(num_envs=64, num_steps=32, minibatch_size=256, **settings)
    with pytest.raises(ppo.ConfigError, match=r"The rollouts need 3\.6 GiB: .* A minibatch needs 19[23] MiB: "):
        footprint.check_memory(config, spaces, held_bytes=0)


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({}, 40 * 44 * 3 + 9 * 10 * 32 + 3 * 4 * 64 + 1 * 2 * 64),
        ({"network": "unused:name"}, 0),
    ],
    ids=str,
)
def test_the_estimate_for_a_minibatch_counts_the_activations_of_the_cnn(monkeypatch, settings, numbers):
    """By hand: kernels of 8, 4 and 3 pixels with strides 4, 2 and 1."""
    monkeypatch.setattr(vecenv, "available_memory", lambda: 0)
    space = gym.spaces.Box(0, 255, (40, 44, 3), np.uint8)
    spaces = (space, gym.spaces.Discrete(5))
    config = ppo.Config(minibatch_size=2048, num_envs=256, num_steps=32, **settings)
    units = 0 if config.network else sum((*config.policy_layers, *config.value_layers))
    bytes_needed = 2048 * (40 * 44 * 3 + 3 * 4 * (numbers + units + 5))
    with pytest.raises(ppo.ConfigError, match=f"A minibatch needs {bytes_needed / 2**20:.0f} MiB"):
        footprint.check_memory(config, spaces, held_bytes=0)


def test_a_process_that_has_compiled_too_many_updates_gets_an_error_before_xla_crashes(tmp_path, monkeypatch):
    limit = tmp_path / "max_map_count"
    monkeypatch.setattr(footprint, "MAX_MAP_COUNT", limit)
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    config = ppo.Config(env="CartPole-v1", num_envs=2, num_workers=0, minibatch_size=64)
    limit.write_text(str(mappings + 1_000))
    with pytest.raises(ppo.ConfigError, match=r"Start each run in its own process, raise vm\.max_map_count"):
        ppo.train(config, logdir=tmp_path / "runs")
    assert not list((tmp_path / "runs").iterdir())
    limit.write_text(str(mappings + 5_000))
    footprint.check_mappings(1)
    with pytest.raises(ppo.ConfigError, match=r"training may need 6,000 more memory mappings.* train fewer policies"):
        footprint.check_mappings(6)  # each of six policies compiles its own update


def test_a_system_that_does_not_report_memory_mappings_is_not_checked(tmp_path, monkeypatch):
    limit = tmp_path / "max_map_count"
    limit.write_text("1")
    monkeypatch.setattr(footprint, "MAX_MAP_COUNT", limit)
    with pytest.raises(ppo.ConfigError):
        footprint.check_mappings(1)
    limit.write_text("max")
    footprint.check_mappings(1)
    limit.write_text("1")
    monkeypatch.setattr(footprint, "MAPS", tmp_path / "maps")
    footprint.check_mappings(1)
    limit.unlink()
    footprint.check_mappings(1)


def test_without_a_known_memory_limit_no_run_is_rejected(monkeypatch):
    monkeypatch.setattr(vecenv, "available_memory", lambda: None)
    spaces = (gym.spaces.Box(-1, 1, (10**7,), np.float32), gym.spaces.Discrete(2))
    footprint.check_memory(ppo.Config(), spaces, held_bytes=0)
    monkeypatch.setattr(vecenv, "available_memory", lambda: 2**30)
    with pytest.raises(ppo.ConfigError, match="lower --num-envs"):
        footprint.check_memory(ppo.Config(), spaces, held_bytes=0)


@pytest.mark.parametrize(
    ("needed", "limit", "text"),
    [
        (5 * 2**30, None, r"need 5\.0 GiB, but there is no room in memory \(64 MiB is available\)\."),
        (5 * 2**30, "`ulimit -v`", r"need 5\.0 GiB, .* in `ulimit -v` \(64 MiB is available\)\. Lower"),
        (None, None, r"need memory, but there is no room in memory\."),
        (None, "the memory in /dev/shm", r"but there is no room in the memory in /dev/shm\."),
    ],
)
def test_the_engines_memory_error_names_the_trainers_settings(tmp_path, monkeypatch, needed, limit, text):
    def full(*arguments, **options):
        available = 64 * 2**20 if needed else None
        sizes = {"needed_bytes": needed, "available_bytes": available}
        raise vecenv.SharedMemoryFull("or shared_memory=False", **sizes, limit=limit)

    monkeypatch.setattr(vecenv, "make", full)
    for config in (ppo.Config(), dataclasses.replace(ppo.Config(), env="Ant-v5")):
        with pytest.raises(ppo.ConfigError, match=text) as caught:
            ppo.train(config, logdir=tmp_path)
        message = str(caught.value)
        assert "the rollouts of 64 envs x 32 steps" in message and "Lower --num-envs or --num-steps" in message
        assert "shared_memory" not in message and ("shm-size" in message) == (limit != "`ulimit -v`")
