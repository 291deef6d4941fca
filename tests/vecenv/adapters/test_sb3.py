"""Tests of vecenv/adapters/sb3.py against Stable-Baselines3 itself, if it is installed."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import vecenv
from tests.helpers import CountingEnv, SampledEnv, assert_same, counting_fns

sb3 = pytest.importorskip("stable_baselines3")
torch = pytest.importorskip("torch")
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize  # noqa: E402

from vecenv.adapters.sb3 import SubprocVecEnv, VecEnvAdapter  # noqa: E402


def serial(fns):
    return VecEnvAdapter(vecenv.SyncVectorEnv(fns, autoreset_mode="SameStep"))


@pytest.mark.parametrize("cls", [SubprocVecEnv, serial])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_the_adapter_equals_sb3s_dummy_vec_env_step_by_step(cls, env_id):
    fns = [lambda: gym.make(env_id, max_episode_steps=30)] * 3
    ours, theirs = cls(fns), DummyVecEnv(fns)
    ours.seed(3), theirs.seed(3)
    assert_same(ours.reset(), theirs.reset())
    ours.action_space.seed(1)
    ends = 0
    for _ in range(100):
        actions = np.stack([ours.action_space.sample() for _ in range(3)])
        (one, rewards, dones, infos), expected = ours.step(actions), theirs.step(actions)
        assert_same((one, rewards.astype(np.float32), dones), expected[:3])
        assert_same(tuple(infos), tuple(expected[3]))
        ends += dones.sum()
    assert ends > 3 and any("terminal_observation" in info for info in infos) == dones.any()
    ours.close()


def test_truncated_and_terminal_observation_describe_the_episode_that_ended():
    venv = SubprocVecEnv(counting_fns(2))  # env 0 terminates after 3 steps, env 1 is truncated after 4
    venv.reset()
    assert venv.reset_infos == [{"started": 0}, {"started": 0}]
    seen = [venv.step(np.zeros(2, np.int64)) for _ in range(4)]
    venv.close()
    observations, _, dones, infos = seen[2]
    assert list(dones) == [True, False] and observations[0, 2] == 0
    np.testing.assert_array_equal(infos[0]["terminal_observation"], [0, 0, 3])
    assert infos[0]["TimeLimit.truncated"] is False and infos[0]["steps"] == 3 and "started" not in infos[0]
    _, _, dones, infos = seen[3]
    assert list(dones) == [False, True] and infos[1]["TimeLimit.truncated"] is True
    np.testing.assert_array_equal(infos[1]["terminal_observation"], [1, 0, 4])
    assert "terminal_observation" not in infos[0] and venv.reset_infos[1] == {"started": 1}


def test_a_vector_env_of_another_package_is_an_error_that_says_how_to_build_one():
    with pytest.raises(TypeError, match=r"got CartPoleVectorEnv.*vecenv\.make\(.*'autoreset_mode': 'SameStep'"):
        VecEnvAdapter(gym.make_vec("CartPole-v1", num_envs=2))


def test_reset_infos_that_the_caller_keeps_never_change():
    venv = SubprocVecEnv(counting_fns(2))
    venv.reset()
    kept = venv.reset_infos
    for _ in range(4):  # both envs reset
        venv.step(np.zeros(2, np.int64))
    venv.close()
    assert list(kept) == [{"started": 0}] * 2 and list(venv.reset_infos) == [{"started": 1}] * 2


class ReusingEnv(CountingEnv):
    """Returns the same info in each step, with new values."""

    def __init__(self, index):
        super().__init__(index, length=9)
        self._info = {"nested": {}, "list": [0], "array": np.zeros(1)}

    def step(self, action):
        *results, _ = super().step(action)
        self._info["number"] = self._info["nested"]["number"] = self._info["list"][0] = self.steps
        self._info["array"][:] = self.steps
        return *results, self._info


@pytest.mark.parametrize("cls", [serial, SubprocVecEnv, lambda fns: SubprocVecEnv(fns, num_workers=0)])
def test_infos_that_were_kept_do_not_change_with_later_steps(cls):
    venv = cls([lambda i=i: ReusingEnv(i) for i in range(2)])
    venv.reset()
    kept = [venv.step(np.zeros(2, np.int64))[3] for _ in range(3)]
    venv.close()
    for number, infos in enumerate(kept, start=1):
        for info in infos:
            assert [info["number"], info["nested"]["number"], *info["list"], *info["array"]] == [number] * 4


class TalkativeEnv(CountingEnv):
    """Returns infos that differ in values, types and keys."""

    def step(self, action):
        observation, *rest, _ = super().step(action)
        info = {"x": self.index, "mixed": [True, 0.5][self.index], "big": 2**60 + 1, "list": [1] * self.index}
        return observation, *rest, {**info, "inner": {f"key {self.index}": "text"}, f"own {self.index}": None}


@pytest.mark.parametrize("cls", [SubprocVecEnv, serial])
def test_each_env_gets_its_own_info_back(cls):
    venv = cls([lambda i=i: TalkativeEnv(i, 50) for i in range(2)])
    venv.reset()
    *_, infos = venv.step(np.zeros(2, np.int64))
    for i, info in enumerate(infos):
        expected = {"x": i, "mixed": [True, 0.5][i], "big": 2**60 + 1, "list": [1] * i}
        expected |= {"inner": {f"key {i}": "text"}, f"own {i}": None}
        assert info == {**expected, "TimeLimit.truncated": False}
    venv.close()


def test_info_numbers_keep_their_types():
    venv = SubprocVecEnv(counting_fns(2, 50))
    venv.reset()
    *_, infos = venv.step(np.zeros(2, np.int64))
    assert {key: type(value) for key, value in infos[1].items()} == {
        "steps": int, "share": float, "TimeLimit.truncated": bool
    }  # fmt: skip
    venv.close()


class OptionsEnv(CountingEnv):
    """Returns the options and the seed of its reset as its info."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {"options": str(options), "seed": seed}


def test_each_env_receives_its_own_options_and_seed():
    venv = SubprocVecEnv([lambda i=i: OptionsEnv(i) for i in range(3)])
    venv.seed(5)
    venv.set_options([{"a": 1}, {"b": np.arange(2)}, {"a": 1}])
    venv.reset()
    assert [info["options"] for info in venv.reset_infos] == ["{'a': 1}", "{'b': array([0, 1])}", "{'a': 1}"]
    assert [info["seed"] for info in venv.reset_infos] == [5, 6, 7]
    venv.reset()
    assert [info["options"] for info in venv.reset_infos] == ["None"] * 3
    venv.close()


def test_attributes_methods_and_wrappers_can_be_addressed_by_env():
    with vecenv.AsyncVectorEnv(counting_fns(4), autoreset_mode="SameStep") as envs:
        venv = VecEnvAdapter(envs)
        assert venv.get_attr("index") == [0, 1, 2, 3] and venv.get_attr("index", [2, -1]) == [2, 3]
        venv.set_attr("length", 9, indices=1)
        assert venv.get_attr("length") == [3, 9, 5, 3]
        assert venv.env_method("__getattribute__", "index", indices=[3]) == [3]
        for i in (4, -5):
            with pytest.raises(IndexError):
                venv.set_attr("length", 7, indices=i)
        assert venv.get_attr("length", np.array([3, -4])) == [3, 3]
        assert venv.has_attr("length") and not venv.has_attr("nothing")
        assert venv.env_is_wrapped(gym.wrappers.TimeLimit) == [False] * 4
    venv = SubprocVecEnv([lambda: gym.make("CartPole-v1")] * 2)
    assert venv.env_is_wrapped(gym.wrappers.TimeLimit) == [True, True]
    venv.close()


TASKS = [("HalfCheetah-v5", {"max_episode_steps": 5}), ("Pong-v5", {"max_num_frames_per_episode": 20})]


def task(name, backend="auto", num_workers=None, **kwargs):
    """Returns an adapter for a MuJoCo task in C++ or ale-py's vector env, or for equal single envs."""
    pytest.importorskip("ale_py" if name == "Pong-v5" else "mujoco")
    env_id = "vecenv.atari:Atari/Pong-v5" if name == "Pong-v5" else name
    options = {"backend": backend, "vector_kwargs": {"autoreset_mode": "SameStep"}}
    return VecEnvAdapter(vecenv.make(env_id, 3, num_workers, **options, **kwargs))


@pytest.mark.parametrize("num_workers", [None, 2])
@pytest.mark.parametrize(("name", "kwargs"), TASKS)
def test_envs_that_are_stepped_in_one_call_equal_single_envs(name, kwargs, num_workers):
    fast, slow = task(name, num_workers=num_workers, **kwargs), task(name, "python", 0, **kwargs)
    fast.seed(3), slow.seed(3)
    assert_same(fast.reset(), slow.reset())
    fast.action_space.seed(1)
    ends = 0
    for _ in range(12):
        actions = np.stack([fast.action_space.sample() for _ in range(3)])
        (*results, infos), (*expected, expected_infos) = fast.step(actions), slow.step(actions)
        assert_same(tuple(results), tuple(expected))
        for info, other, done in zip(infos, expected_infos, results[2], strict=True):
            for key in ("TimeLimit.truncated", "terminal_observation", "x_velocity", *(["lives"] * (not done))):
                assert_same(info.get(key), other.get(key))  # ale-py returns no info of an episode's last step
        ends += results[2].sum()
    assert ends >= 6
    fast.close(), slow.close()


@pytest.mark.parametrize("num_workers", [None, 1])
@pytest.mark.parametrize(("name", "kwargs"), TASKS)
def test_envs_that_are_stepped_in_one_call_have_the_attributes_of_their_vector_env(name, kwargs, num_workers):
    venv = task(name, num_workers=num_workers, **kwargs)
    assert venv.render_mode is None and venv.get_attr("render_mode") == [None] * 3
    assert venv.get_attr("num_envs", [0, -1])[0] in (3, 2) and venv.has_attr("single_action_space")
    assert not venv.has_attr("nothing")
    assert venv.env_is_wrapped(gym.wrappers.TimeLimit) == [False] * 3
    assert venv.env_is_wrapped(gym.wrappers.TimeLimit, indices=1) == [False]
    for call in (
        lambda: venv.set_attr("x", 1),
        lambda: venv.env_method("render"),
        lambda: venv.env_method("reset", indices=[0]),
    ):
        with pytest.raises(TypeError, match=r"no single env.* backend='python'"):
            call()
    with pytest.raises(AttributeError, match="'reset' is a method of the vector env"):
        venv.get_attr("reset")
    venv.seed()  # a random seed
    venv.reset()
    venv.step(np.stack([venv.action_space.sample() for _ in range(3)]))
    venv.close()


@pytest.mark.parametrize(
    ("name", "policy"),
    [("HalfCheetah-v5", "MlpPolicy"), pytest.param("Pong-v5", "CnnPolicy", marks=pytest.mark.slow)],
)
def test_sb3s_ppo_trains_on_envs_that_are_stepped_in_one_call(name, policy):
    venv = VecMonitor(task(name, **dict(TASKS)[name]))
    model = sb3.PPO(policy, venv, n_steps=8, batch_size=12, n_epochs=1, seed=0, device="cpu")
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(48)
    assert model.num_timesteps == 48 and len(model.ep_info_buffer) >= 6
    assert any((one != other).any() for one, other in zip(before, model.policy.parameters(), strict=True))
    sb3.common.evaluation.evaluate_policy(model, venv, n_eval_episodes=3)
    venv.close()


class EnvForSB3(gym.Env):
    """Its `reset` has no `options`: SB3 passes them only if they are set. Infos and rewards show the action."""

    observation_space = spaces.Box(-1, 1, (2,))

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, seed=None):
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action):
        self._steps += 1
        info = {"action": action, "type": str(type(action))}
        return self.np_random.random(2, np.float32), float(np.sum(action) * 0.1), self._steps % 5 == 0, False, info


class Recording(sb3.common.callbacks.BaseCallback):
    """Keeps what each step returns."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_step(self):
        self.seen += [(info["type"], np.asarray(info["action"])) for info in self.locals["infos"]]
        return True


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3),
        spaces.Discrete(3, start=1),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(3),
        spaces.Box(-1, 1, (2,)),
        spaces.Box(-2, 1, (2,), np.float64),
        spaces.Box(0, 10, (2,), np.int64),
        spaces.Box(0, 255, (2,), np.uint8),
    ],
    ids=str,
)
def test_sb3s_ppo_is_the_same_with_every_action_space_and_with_envs_whose_reset_has_no_options(space):
    found = []
    for kind in (SubprocVecEnv, DummyVecEnv):
        venv, recording = kind([lambda: EnvForSB3(space)] * 2), Recording()
        model = sb3.PPO("MlpPolicy", venv, n_steps=8, batch_size=8, n_epochs=2, seed=1, device="cpu")
        model.learn(32, callback=recording)
        venv.close()
        parameters = [parameter.detach().numpy() for parameter in model.policy.parameters()]
        found.append((*recording.seen, *parameters))
    assert len(found[0]) > 32
    assert_same(*found)


def test_floats_for_a_discrete_space_are_an_error_and_the_envs_stay_usable():
    venv = SubprocVecEnv(counting_fns(2))
    venv.reset()
    with pytest.raises(TypeError, match="actions has dtype float64, but the action space needs int64"):
        venv.step(np.array([0.9, 0.0]))
    venv.step(np.zeros(2, np.int64))
    venv.close()


def test_dict_observations_and_lists_of_dict_actions_work():
    observed = spaces.Dict({"x": spaces.Box(0, 1, (2,)), "n": spaces.Discrete(3)})
    acted = spaces.Dict({"go": spaces.Discrete(2), "how": spaces.Box(0, 1, (1,))})
    venv = SubprocVecEnv([lambda: SampledEnv(observed, acted)] * 3)
    assert {key: value.shape for key, value in venv.reset().items()} == {"x": (3, 2), "n": (3,)}
    observations, *_ = venv.step([acted.sample() for _ in range(3)])
    assert observations["x"].shape == (3, 2)
    venv.close()


@pytest.mark.parametrize("shape", [(2,), ()])
def test_the_bounds_of_an_observation_hold_in_all_envs(shape):
    fns = [lambda b=bound: SampledEnv(spaces.Box(-b, 1, shape), spaces.Discrete(2)) for bound in (1, 5)]
    venv = SubprocVecEnv(fns, num_workers=0)
    assert venv.observation_space == spaces.Box(-5, 1, shape)
    venv.close()


def test_another_autoreset_mode_is_rejected():
    with pytest.raises(ValueError, match="'autoreset_mode': 'SameStep'"):
        VecEnvAdapter(vecenv.SyncVectorEnv(counting_fns(2)))
    with pytest.raises(ValueError, match="autoreset_mode=NEXT_STEP is not supported, because SB3 needs SAME_STEP"):
        SubprocVecEnv(counting_fns(2), autoreset_mode="NextStep")
    SubprocVecEnv(counting_fns(2), autoreset_mode="SameStep").close()


@pytest.mark.slow
def test_sb3s_ppo_learns_on_the_adapter():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, torch's threads and the workers compete for the cores
    venv = VecNormalize(VecMonitor(SubprocVecEnv([lambda: gym.make("CartPole-v1")] * 8)))
    model = sb3.PPO("MlpPolicy", venv, n_steps=64, batch_size=128, seed=1, device="cpu").learn(25_000)
    torch.set_num_threads(threads)
    returns = [episode["r"] for episode in model.ep_info_buffer]
    venv.close()
    assert np.mean(returns[-20:]) > 100
