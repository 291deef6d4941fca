"""Tests of collectors on Ray: where envs are stepped does not change what is learned, and no death hangs a run."""

import dataclasses
import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

import ppo
import vecenv
from ppo import Config, ConfigError
from ppo.algorithm import ray_collector
from ppo.cluster import cluster, cores_of_each
from ppo.collectors import OnRay
from ppo.run.checkpoint import ENV_STATES
from tests.ppo.envs import Fails, RewardTurnsBad, make_cartpole, raises_value_error
from tests.ppo.runs import QUICKLY_COMPILED, checkpoints, reports, rewound, variables

ray = pytest.importorskip("ray")

CONFIG = Config(
    env="CartPole-v1", num_envs=4, num_steps=16, minibatch_size=16, epochs=2, num_workers=0, total_steps=256,
    report_interval=64, checkpoint_interval=128, eval_episodes=2, policy_layers=(8,), value_layers=(8,),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def shared_cluster():
    """Starts Ray once for all tests. A run uses the cluster that its process has initialized."""
    with cluster(None, 4, pytest.fail) as cores:
        assert cores >= 1
        yield


def train(folder, config=CONFIG, **arguments):
    return ppo.train(config, logdir=folder, progress=False, **arguments)


def same(one, other, **tolerance):
    """Asserts that two runs have the same reports and the same variables in their last checkpoints."""
    for ours, theirs in zip(reports(one, times=False), reports(other, times=False), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert value == pytest.approx(theirs[name], nan_ok=True, **tolerance), name
    ours, theirs = variables(one), variables(other)
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_allclose(values, theirs[name], rtol=tolerance.get("rel", 0), atol=tolerance.get("abs", 0))


@pytest.mark.xla  # the actors optimize their graphs, so this process must, too
def test_one_collector_is_bit_for_bit_the_local_one(tmp_path):
    local, remote = train(tmp_path / "a"), train(tmp_path / "b", collectors=1)
    same(remote.path, local.path, rel=0, abs=0)
    states = [vecenv.state.load(checkpoints(one.path)[-1] / ENV_STATES) for one in (local, remote)]
    assert vecenv.state.dumps(states[0]) == vecenv.state.dumps(states[1])
    np.testing.assert_array_equal(local.evaluation.returns, remote.evaluation.returns)


class Camera(gym.Env):
    """Its observation is an image, and the info of each step is a number."""

    observation_space = gym.spaces.Box(0, 255, (40, 40, 3), np.uint8)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._image(), {}

    def step(self, action):
        self._steps += 1
        return self._image(), float(action.sum()), False, self._steps == 7, {"number": self._steps}

    def _image(self):
        return self.np_random.integers(0, 256, (40, 40, 3), np.uint8)


class Masked(gym.Env):
    """Its observation is a Dict with an action mask."""

    action_space = gym.spaces.Discrete(3)

    def __init__(self, scale):
        self._scale = scale
        place = gym.spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = gym.spaces.Dict(place=place, action_mask=gym.spaces.MultiBinary(3))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action):
        draw = self.np_random.random()
        return self._observation(), float(action) * self._scale, draw < 0.1, draw > 0.9, {}

    def _observation(self):
        mask = self.np_random.integers(0, 2, 3, np.int8)
        mask[0] = 1
        return {"place": self.np_random.normal(size=2).astype(np.float32), "action_mask": mask}


SCALED = [functools.partial(Masked, scale) for scale in (1, 2, 3, 4)]
KINDS = {
    "functions, Dict and masks": ({"recurrent": "gru", "recurrent_units": 4}, SCALED),
    "images and infos": ({"info_metrics": ("number:sum",), "cnn": "small"}, Camera),
    "wrappers": ({"wrappers": ("TimeAwareObservation",)}, None),
    "workers": ({"num_workers": 2}, make_cartpole),
    "MuJoCo in C++": ({"env": "InvertedPendulum-v5", "action_transform": "tanh", "num_workers": None}, None),
    "custom network": ({"network": "examples.networks:small_cnn"}, Camera),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [name if number == 0 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(KINDS)]
)
def test_two_collectors_learn_what_one_process_learns(tmp_path, kind):
    settings, source = KINDS[kind]
    config = dataclasses.replace(CONFIG, **settings)
    local, remote = (train(tmp_path / str(k), config, envs=source, collectors=k) for k in (None, 2))
    same(remote.path, local.path, rel=2e-3, abs=2e-4)
    assert [row["episodes"] for row in reports(remote.path)] == [row["episodes"] for row in reports(local.path)]


@pytest.mark.slow
def test_several_agents_are_collected_alike(tmp_path):
    pytest.importorskip("pettingzoo")
    config = dataclasses.replace(
        CONFIG, env="pettingzoo:tests.multi_agent:LeavingEnv", policies="group", num_steps=8, minibatch_size=8
    )
    local, remote = (train(tmp_path / str(k), config, collectors=k) for k in (None, 2))
    same(remote.path, local.path, rel=2e-3, abs=2e-4)


class Plain(gym.Wrapper):
    """A wrapper that does nothing."""


def small_network(inputs, num_outputs, seed):
    import keras

    keras.utils.set_random_seed(seed)
    features = keras.Input(inputs.shape[1:])
    return keras.Model(features, [keras.layers.Dense(num_outputs)(features), keras.layers.Dense(1)(features)])


def make_registered():
    return gym.make("OnlyHere-v0")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["registered here", "named in __main__"])
def test_collectors_find_what_only_this_process_knows(tmp_path, monkeypatch, kind):
    if kind == "registered here":
        monkeypatch.setitem(gym.registry, "OnlyHere-v0", EnvSpec("OnlyHere-v0", lambda: make_cartpole()))
        assert train(tmp_path, dataclasses.replace(CONFIG, env="given"), envs=make_registered, collectors=2).evaluation
        return
    for value in (Plain, small_network):
        monkeypatch.setattr(sys.modules["__main__"], value.__name__, value, raising=False)
    config = dataclasses.replace(CONFIG, wrappers=("__main__:Plain",), network="__main__:small_network")
    assert train(tmp_path, config, collectors=2).evaluation


@pytest.mark.parametrize(
    ("before", "after"), [(None, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, None), (2, 4)))]
)
def test_a_run_resumes_with_any_number_of_collectors(tmp_path, before, after):
    config = dataclasses.replace(CONFIG, recurrent="lstm", recurrent_units=4)
    whole = train(tmp_path / "whole", config, collectors=before)
    part = rewound(whole.path, tmp_path / "part")
    ppo.resume(part, collectors=after, progress=False)
    same(part, whole.path, rel=2e-3, abs=2e-4)
    episodes = [row["episodes"] for row in reports(part)]
    assert episodes == [row["episodes"] for row in reports(whole.path)]  # the envs continued in mid-episode


def process_of(collector, k=0):
    """Returns the id of the process of an actor."""
    return ray.get(collector._actors[k].ping.remote()).pid


class Watching(ppo.Callback):
    """Calls a function with the collector of the run after an update, and records warnings."""

    def __init__(self, monkeypatch, act, update=1):
        self.warnings, self._act, self._update, self._collectors = [], act, update, []
        original = ray_collector.RayCollector.start
        monkeypatch.setattr(
            ray_collector.RayCollector, "start", lambda one: (self._collectors.append(one), original(one))[1]
        )

    def on_update(self, report):
        self._update -= 1
        if self._update == 0:
            self._act(self._collectors[-1])

    def on_warning(self, message):
        self.warnings.append(message)


def kill_soon(collector):
    """Kills an actor while it collects the next rollout."""
    pid = process_of(collector, 1)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()


class Slow(RewardTurnsBad):
    """Its steps take 20 ms."""

    def __init__(self):
        super().__init__(1.0)

    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


def test_a_killed_collector_is_replaced_and_its_envs_begin_fresh_episodes(tmp_path, monkeypatch):
    config = dataclasses.replace(
        CONFIG, env="given", on_worker_death="restart", num_workers=2, num_steps=64, total_steps=768
    )
    watching = Watching(monkeypatch, kill_soon)
    result = train(tmp_path, config, envs=Slow, collectors=2, callbacks=[watching])
    assert result.env_steps == 768 and result.evaluation is not None
    assert sum(report["worker_restarts"] for report in reports(result.path)) == 1
    (warning,) = [one for one in watching.warnings if "collector" in one]
    assert "collector 1 of 2 (envs 2:4" in warning and "began fresh episodes" in warning


def test_the_death_of_a_collector_is_an_error_that_names_it_and_saves_the_run(tmp_path, monkeypatch):
    watching = Watching(monkeypatch, kill_soon)
    with pytest.raises(
        vecenv.WorkerDied, match=r"collector 1 of 2 \(envs 2:4, process \d+ on node .*\) died"
    ) as caught:
        train(
            tmp_path,
            dataclasses.replace(CONFIG, env="given", num_steps=64, total_steps=768),
            envs=Slow,
            collectors=2,
            callbacks=[watching],
        )
    assert any("The run is saved up to env-step" in note for note in caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [True, False], ids=["restart", "raise"])
def test_a_frozen_collector_does_not_hang_the_run(tmp_path, monkeypatch, restarts):
    how = {"on_worker_death": "restart", "num_workers": 2} if restarts else {}
    watching = Watching(monkeypatch, lambda collector: os.kill(process_of(collector), signal.SIGSTOP))
    config = dataclasses.replace(CONFIG, **how)
    if restarts:
        assert train(tmp_path, config, collectors=2, callbacks=[watching]).evaluation is not None
        assert any("collector 0 of 2" in one for one in watching.warnings)
        return
    with pytest.raises(vecenv.WorkerDied, match=r"collector 0 of 2 .* has not answered for 20 s"):
        train(tmp_path, config, collectors=2, callbacks=[watching])


@pytest.mark.slow
def test_a_collector_that_dies_again_and_again_ends_the_run(tmp_path):
    config = dataclasses.replace(CONFIG, env="given", on_worker_death="restart", num_workers=2)
    with pytest.raises(vecenv.WorkerDied, match=r"collector \d of 2 \(envs \d:\d, .*\) died"):
        train(tmp_path, config, envs=functools.partial(Fails, kills_the_collector, 10), collectors=2)


def kills_the_collector():
    os.kill(multiprocessing.parent_process().pid, signal.SIGKILL)
    signal.pause()


def test_the_error_of_an_env_names_the_collector_and_the_env(tmp_path):
    makes = [functools.partial(Fails, raises_value_error, at) for at in (10**9, 10**9, 10**9, 20)]
    with pytest.raises(ValueError, match="the motor is on fire") as caught:
        train(tmp_path, dataclasses.replace(CONFIG, env="given"), envs=makes, collectors=2)
    notes = "\n".join(caught.value.__notes__)
    assert "step 3 of the rollout that began after 0 env-steps" in notes or "step 19" in notes
    assert "in collector 1 of 2 (envs 2:4" in notes and "whose env 0 is env 2 of the run" in notes


@pytest.mark.parametrize(
    ("collectors", "source", "message"),
    [
        (3, None, "3 collectors cannot have equal shares of num_envs=4: set num_envs to a multiple of 3, such as 3"),
        (0, None, "collectors=0 is out of range"),
        (2, "vector", "pass functions that make"),
    ],
)
def test_unusable_collectors_are_errors(tmp_path, collectors, source, message):
    envs = vecenv.SyncVectorEnv([make_cartpole] * 4, **ppo.vector_options(CONFIG)) if source else None
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, envs=envs, collectors=collectors)
    assert not list(tmp_path.iterdir())
    if envs is not None:
        envs.close()


def test_a_cluster_without_collectors_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="a cluster needs collectors"):
        train(tmp_path, cluster="auto")


def test_without_ray_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'vecenv-ppo\[ray\]'"):
        train(tmp_path, collectors=2)


@pytest.mark.parametrize(
    ("nodes", "actors", "cores"), [([8], 1, 8), ([8], 3, 2), ([8, 4], 3, 4), ([8, 3], 3, 3), ([1, 1, 1], 2, 1)]
)
def test_collectors_get_as_many_cores_as_fit_on_the_nodes(nodes, actors, cores):
    assert cores_of_each(nodes, actors) == cores


def test_a_cluster_with_too_few_cores_is_an_error():
    with pytest.raises(ConfigError, match="5 collectors need a core each, but the Ray cluster has 4"):
        cores_of_each([3, 1], 5)


def test_the_shares_of_a_run_may_differ_only_in_the_bounds_of_observations():
    acted, box, gear = gym.spaces.Discrete(2), gym.spaces.Box, gym.spaces.Discrete(3)
    wide, narrow = ({"": (gym.spaces.Dict(place=box(-x, x, (2,)), gear=gear), acted)} for x in (2.0, 1.0))
    assert ray_collector.common_spaces([narrow, wide]) == ray_collector.common_spaces([wide, narrow]) == wide
    others = [
        (gym.spaces.Dict(place=box(-1, 1, (2,)), gear=gym.spaces.Discrete(4)), acted),
        (gym.spaces.Dict(place=box(-1, 1, (3,)), gear=gear), acted),
        (narrow[""][0], gym.spaces.Discrete(3)),
    ]
    for other in others:
        with pytest.raises(ConfigError, match="the envs of collector 1 have the spaces"):
            ray_collector.common_spaces([narrow, {"": other}])


def test_shares_are_contiguous():
    assert OnRay(2).shares(CONFIG) == [range(0, 2), range(2, 4)]


@pytest.mark.slow
def test_a_local_cluster_leaves_the_environment_of_its_process_as_it_was(tmp_path):
    code = """
import os, ppo
from tests.ppo.algorithm.test_ray_collector import CONFIG, train
before = dict(os.environ)
for name in "ab":
    train(os.environ["FOLDER"] + name, CONFIG, collectors=2)
assert not {name for name in os.environ.keys() - before.keys() if "AUTH" in name or "CLUSTER" in name}
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {**QUICKLY_COMPILED, "FOLDER": str(tmp_path / "run"), "HOME": str(tmp_path / "none")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=250)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ray_listens_on_the_loopback_interface_only():
    addresses = listening(os.getpid())
    assert addresses and all(address.startswith(("127.", "::1", "::ffff:127.")) for address in addresses), addresses


def listening(root: int) -> list[str]:
    """Returns the addresses at which the descendants of a process listen."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with_parent = path.read_text().rpartition(")")[2].split()
        parents[int(path.parent.name)] = int(with_parent[1])
    family = {root}
    while new := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= new
    inodes = set()
    for pid in family:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:
                continue
    found = []
    for name, kind, size in (("tcp", socket.AF_INET, 4), ("tcp6", socket.AF_INET6, 16)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                words = bytes.fromhex(local.split(":")[0])
                raw = b"".join(words[i : i + 4][::-1] for i in range(0, size, 4))
                found.append(socket.inet_ntop(kind, raw))
    return found


COMMAND = [sys.executable, "-m", "ppo", "train", "--env", "CartPole-v1", "--collectors", "2", "--num-envs", "4",
           "--num-steps", "16", "--minibatch-size", "16", "--eval-episodes", "1"]  # fmt: skip


def left_of(folder: Path) -> list[str]:
    """Returns the commands of processes that use a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in words:
            found.append(words)
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None], ids=str)
def test_nothing_is_left_behind(tmp_path, how):
    """The command runs in a session of its own, and the signal goes to its process group, as Ctrl-C does."""
    temporary = Path("/tmp") / f"t{os.getpid()}"
    temporary.mkdir()
    environment = {**os.environ, **QUICKLY_COMPILED, "TMPDIR": str(temporary)}
    environment = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
    steps = ["--total-steps", "128" if how is None else "100000000", "--report-interval", "64"]
    command = [*COMMAND, *steps, "--logdir", str(tmp_path / "runs")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    if how is not None:
        for line in process.stdout:
            if "steps  return" in line:  # the report of the first update
                break
        (os.kill if how == signal.SIGKILL else os.killpg)(process.pid, how)
    process.communicate(timeout=120)
    assert process.returncode == (0 if how is None else -9 if how == signal.SIGKILL else 128 + how)
    deadline = time.monotonic() + 30
    while (left := left_of(temporary)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    while (files := list(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not files
    temporary.rmdir()
    if how in (signal.SIGINT, signal.SIGTERM):
        (run,) = (tmp_path / "runs").iterdir()
        assert checkpoints(run)


def test_a_head_that_refuses_connections_for_twenty_seconds_is_lost():
    now = 0.0

    def check_at(seconds):
        nonlocal now
        now = seconds
        head.check()

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # refuses connections until it listens
        address = "{}:{}".format(*server.getsockname())
        head = ray_collector.Head(address, clock=lambda: now)
        for seconds in (4, 5, 10, 24.9):
            check_at(seconds)
        server.listen()
        check_at(30)
        server.close()
        for seconds in (35, 54.9):  # only 19.9 s after the first failure since
            check_at(seconds)
        with pytest.raises(ppo.RunError, match=rf"its head at {address} does not accept connections \(.*refused\)"):
            check_at(60)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_whose_head_dies_is_saved(tmp_path):
    """Ray itself would end the process after some time, without saving the run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | QUICKLY_COMPILED
    command = [*COMMAND, "--total-steps", "100000000", "--report-interval", "64", "--logdir", str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while "steps  return" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        (head,) = [pid for pid in of_session(process.pid) if b"gcs_server" in words_of(pid)]
        os.kill(head, signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    finally:
        for pid in of_session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 2 and "lost the Ray cluster" in errors and "to resume:" in errors, errors
    (run,) = tmp_path.iterdir()
    assert checkpoints(run)


def of_session(session: int) -> list[int]:
    """Returns the processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [int(path.name)] * (os.getsid(int(path.name)) == session)
    return found


def words_of(pid: int) -> bytes:
    """Returns the command line of a process, or b"" if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.mark.slow
def test_an_address_that_cannot_be_reached_is_an_error(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [*COMMAND, "--cluster", "127.0.0.1:1", "--logdir", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and "cannot join the Ray cluster at 127.0.0.1:1" in done.stderr, done.stderr
