"""Tests of runs on an unregistered env with arguments and wrappers, from training to videos."""

import dataclasses
import functools
import json
import pickle
import re
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest
import tensorflow as tf
from gymnasium import spaces

import ppo
import vecenv
from ppo import Config, ConfigError, Run, RunError, evaluate_run, record_run
from ppo.run.modules import config_to_load
from tests.helpers import SampledEnv, subclasses_of
from tests.ppo.envs import Broken, Counted, StrictTaxi, make_cartpole
from tests.ppo.runs import command, only_run, parsed, reports, train, untrained_run

MODULE = """
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from tests.drawing import Striped

class Told(Striped):
    metadata = dict(Striped.metadata)
    observation_space = spaces.Dict({
        "mission": spaces.Text(9),
        "sight": spaces.Dict({"near": spaces.Box(-1, 1, (2,)), "words": spaces.Sequence(spaces.Discrete(2))}),
    })

    def __init__(self, length=5, reward=1.0, render_mode=None):
        super().__init__(length, render_mode)
        self.reward = reward

    def told(self, observation):
        return {"mission": "go", "sight": {"near": observation + np.float32(self.np_random.random()), "words": (1,)}}

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        return self.told(observation), info

    def step(self, action):
        self._steps += 1
        seen = self.told(np.zeros(2, np.float32))
        return seen, self.reward * float(action), self._steps == self._length, False, {}

class Near(gym.ObservationWrapper):
    def __init__(self, env, size=2):
        super().__init__(env)
        sight = env.observation_space["sight"]
        near = spaces.Box(-10, 10, (2 * size,))
        self.observation_space = spaces.Dict({**env.observation_space, "sight": spaces.Dict({**sight, "near": near})})
        self.size = size

    def observation(self, observation):
        near = np.tile(observation["sight"]["near"], self.size)
        return {**observation, "sight": {**observation["sight"], "near": near}}

class Plus(gym.Wrapper):
    def step(self, action):
        observation, reward, *others = self.env.step(action)
        return observation, reward + 1, *others
"""
SMALL = ["--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32", "--epochs", "1", "--report-interval", "64",
         "--eval-episodes", "2", "--total-steps", "128"]  # fmt: skip


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Returns the name of a module that is not imported yet."""
    name = f"told_{tmp_path.name.rpartition('_')[2]}"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    yield name
    sys.modules.pop(name, None)


IGNORING = 'vecenv.wrappers:IgnoreKeys:{"keys": ["mission", "sight/words"]}'


def settings_of(module):
    """Returns settings for the module's env as the words of a command line and as a `Config`."""
    wrappers = [f'{module}:Near:{{"size": 3}}', "RecordEpisodeStatistics", f"{module}:Plus", IGNORING]
    words = ["--env", f"{module}:Told", "--env-kwargs", "length=7", "reward=0.5", "--wrappers", *wrappers]
    config = Config(
        env=f"{module}:Told",
        env_kwargs={"length": 7, "reward": 0.5},
        wrappers=tuple(wrappers),
    )
    return words, config


@pytest.mark.slow
def test_a_run_on_an_unregistered_env_is_trained_evaluated_filmed_exported_and_resumed(module, tmp_path, capsys):
    words, _ = settings_of(module)
    logdir = tmp_path / "runs"
    run = train(*words, *SMALL, "--num-workers", 2, logdir=logdir)
    assert module not in sys.modules  # only workers import it, because this process has loaded TensorFlow
    report = reports(run)[-1]
    assert report["length_mean"] == 7 and 7 <= report["return_mean"] <= 10.5
    values = json.loads((run.path / "config.json").read_text())
    assert values["env_kwargs"] == {"length": 7, "reward": 0.5}
    assert values["wrappers"] == settings_of(module)[0][6:]
    near = gym.spaces.Box(-10, 10, (6,))
    assert run.read_spaces()[""][0] == gym.spaces.Dict(sight=gym.spaces.Dict(near=near))

    with pytest.raises(RunError, match="pass --trust-modules"):
        command("evaluate", [str(run.path)])
    capsys.readouterr()
    assert command("evaluate", [str(run.path), "--trust-modules", "--episodes", "3", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["length_mean"] == 7 and 7 <= summary["return_mean"] <= 10.5
    assert (
        command("visualize", [str(run.path), "--trust-modules", "--episodes", "1", "--outdir", str(tmp_path / "v")])
        == 0
    )
    assert "in 7 steps" in capsys.readouterr().out
    assert command("export", [str(run.path), "--outdir", str(tmp_path / "e")]) == 0
    observation = {"sight": {"near": np.zeros(6, np.float32)}}
    assert ppo.load_policy(run.path)(observation) in (0, 1)
    assert module not in sys.modules
    again = ["--resume", str(run.path), "--trust-modules", "--total-steps", "192", "--num-workers", "0"]
    assert command("train", again) == 0 and module in sys.modules
    assert run.read_config().total_steps == 192


def test_settings_that_cannot_apply_to_given_envs_are_an_error(tmp_path):
    kwargs = {"env_kwargs": {"a": 1}, "eval_env_kwargs": {"b": 1}}
    config = Config(wrappers=("TimeAwareObservation",), num_envs=2, minibatch_size=64, **kwargs)
    with pytest.raises(
        ConfigError, match="env_kwargs and eval_env_kwargs and wrappers would have no effect on the env"
    ):
        ppo.train(config, envs=lambda: gym.make("CartPole-v1"), logdir=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrappers", "name", "space"),
    [((), "mission", "Text"), (('FilterObservation:{"filter_keys": ["sight"]}',), "sight/words", "Sequence")],
)
def test_a_key_that_no_network_can_read_is_named_with_the_wrapper_that_drops_it(
    module, tmp_path, wrappers, name, space
):
    config = Config(env=f"{module}:Told", wrappers=wrappers, num_envs=2, num_workers=1, minibatch_size=64)
    flag = re.escape(f'Drop it with --wrappers \'vecenv.wrappers:IgnoreKeys:{{"keys": ["{name}"]}}\', or wrap the env')
    with pytest.raises(vecenv.UnsupportedSpace, match=rf"no network for the observation space {space}.*{flag}"):
        ppo.train(config, logdir=tmp_path / "runs")
    assert not list((tmp_path / "runs").iterdir())


def test_an_action_space_without_a_policy_is_named(tmp_path):
    actions = gym.spaces.Dict(a=gym.spaces.Discrete(2), words=gym.spaces.Sequence(gym.spaces.Discrete(3)))
    make = functools.partial(SampledEnv, gym.spaces.Box(-1, 1, (2,)), actions)
    config = Config(num_envs=2, num_workers=0, num_steps=8)
    with pytest.raises(vecenv.UnsupportedSpace, match=r"action\['words'\]: ppo has no policy for .*Sequence"):
        ppo.train(config, make, logdir=tmp_path / "runs")


def test_wrappers_of_gymnasium_and_vecenv_need_no_trust(tmp_path):
    settings = {"wrappers": ("TimeAwareObservation", IGNORING), "env": "CartPole-v1"}
    run = untrained_run(tmp_path, gym.spaces.Box(-1, 1, (5,)), gym.spaces.Discrete(2), **settings)
    assert config_to_load(run).wrappers == settings["wrappers"]


def test_flags_of_the_env_are_read_and_a_resumed_run_keeps_them(module, tmp_path):
    words, expected = settings_of(module)
    config = parsed(*words)
    assert config == expected
    assert parsed(*["--env-kwargs", '{"length": 7}']).env_kwargs == {"length": 7}
    assert parsed(*[]).env_kwargs == {} and parsed(*["--wrappers"]).wrappers == ()
    run = untrained_run(tmp_path / "runs", gym.spaces.Box(-1, 1), gym.spaces.Discrete(2), **vars(expected))
    resumed = parsed(*["--resume", str(run.path), "--trust-modules", "--total-steps", "77"])
    assert resumed.env_kwargs == config.env_kwargs and resumed.wrappers == config.wrappers
    with pytest.raises(ConfigError, match="wrappers would change"):
        parsed(*["--resume", str(run.path), "--trust-modules", "--wrappers", "Other"])
    with pytest.raises(ConfigError, match="env_kwargs would change"):
        parsed(*["--resume", str(run.path), "--trust-modules", "--env-kwargs", "length=8"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env-kwargs", "{length: 7}"], "is not JSON"),
        (["--env-kwargs", "length"], "is neither KEY=VALUE nor a JSON object"),
    ],
)
def test_the_error_for_arguments_that_cannot_be_read_says_what_to_write(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    printed = " ".join(re.sub("[│╭╮╰╯─]", " ", "".join(capsys.readouterr())).split())
    assert ended.value.code == 2 and message in printed


def test_the_error_for_a_video_of_an_env_without_render_mode_says_so(module, tmp_path):
    (tmp_path / "modules" / f"{module}.py").write_text(
        "import gymnasium as gym\ndef make():\n    return gym.make('CartPole-v1')\n"
    )
    env = gym.make("CartPole-v1")
    spaces = env.observation_space, env.action_space
    run = untrained_run(tmp_path / "runs", *spaces, given=False, env=f"{module}:make")
    with pytest.raises(
        RunError,
        match=r"could not be recorded: TypeError: make\(\) got an unexpected .* must accept render_mode\. .*rgb_array",
    ):
        record_run(Run.open(run.path, trust_modules=True), tmp_path / "out", 1)


TINY = Config(num_envs=2, num_steps=32, minibatch_size=32, epochs=1, total_steps=64, eval_episodes=2, num_workers=0)


def test_evaluations_and_videos_get_further_arguments(tmp_path, capsys):
    config = dataclasses.replace(
        TINY,
        env="CartPole-v1",
        env_kwargs={"max_episode_steps": 7, "sutton_barto_reward": True},
        eval_env_kwargs={"max_episode_steps": 4},
        eval_interval=64,
        report_interval=64,
    )
    result = ppo.train(config, logdir=tmp_path / "runs")
    report = reports(result.path)[-1]
    # Sutton and Barto's reward is -1 when the pole falls and 0 otherwise.
    assert report["length_mean"] == 7 and report["eval_return_mean"] == 0
    assert result.evaluation.lengths.tolist() == [4, 4] and result.evaluation.returns.tolist() == [0, 0]
    assert Run.open(result.path).read_config().eval_env_kwargs == {"max_episode_steps": 4}
    assert command("evaluate", [str(result.path), "--episodes", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["length_mean"] == 4
    assert command("visualize", [str(result.path), "--episodes", "1", "--outdir", str(tmp_path / "videos")]) == 0
    assert "in 4 steps" in capsys.readouterr().out
    again = ["--resume", str(result.path), "--total-steps", "128", "--eval-env-kwargs", "max_episode_steps=3"]
    assert command("train", again) == 0
    assert json.loads((result.path / "evaluation.json").read_text())["length_mean"] == 3


class NeverUpdates(ppo.Callback):
    def on_update(self, report):
        raise AssertionError("training has begun")


@pytest.mark.parametrize("interval", [None, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("env", "num_workers", "kwargs", "message"),
    [
        ("CartPole-v1", 0, {"mapname": 1}, r"unexpected keyword argument 'mapname'"),
        ("CartPole-v1", 1, {"mapname": 1}, r"unexpected keyword argument 'mapname'"),
        ("HalfCheetah-v5", 0, {"forward_weight": 1}, r"forward_weight"),
        ("FrozenLake-v1", 0, {"map_name": "4x4"}, r"with the space Discrete\(64\), but these envs have Discrete\(16\)"),
    ],
)
def test_a_mistake_in_the_arguments_of_evaluations_ends_the_run_before_training(
    tmp_path, env, num_workers, kwargs, message, interval
):
    given = {"env_kwargs": {"map_name": "8x8"}} if env == "FrozenLake-v1" else {}
    how = {"num_workers": num_workers, "eval_interval": interval, "eval_env_kwargs": kwargs}
    config = dataclasses.replace(TINY, env=env, **given, **how)
    with pytest.raises(Exception, match=message) as caught:
        ppo.train(config, logdir=tmp_path, callbacks=NeverUpdates())
    assert f"built once before training, with eval_env_kwargs={kwargs}" in caught.value.__notes__[-1]
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_checks_the_arguments_of_evaluations_before_training(tmp_path):
    env, config = gym.make("CartPole-v1"), dataclasses.replace(TINY, env="CartPole-v1")
    run = untrained_run(tmp_path, env.observation_space, env.action_space, given=False, **vars(config))
    with pytest.raises(TypeError, match="'mapname'"):
        ppo.resume(run, total_steps=128, eval_env_kwargs={"mapname": 1}, callbacks=NeverUpdates())


def test_one_evaluation_env_is_built_before_training_and_closed(tmp_path, monkeypatch):
    built = []

    class Notes(ppo.Callback):
        def on_start(self, config, env_steps):
            built.append((Counted.built, Counted.open))

    ppo.train(TINY, Counted, logdir=tmp_path, callbacks=Notes())
    assert built == [(3, 2)]
    assert (Counted.built, Counted.open, Counted.most) == (5, 0, 4)


class Fails(Counted):
    """Raises in its constructor or its reset, or returns an info that cannot be copied or pickled."""

    def __init__(self, when):
        super().__init__()
        self._when = when
        if when == "construction":
            raise ValueError("the motor is on fire")

    def reset(self, *, seed=None, options=None):
        if self._when == "reset":
            raise ValueError("the motor is on fire")
        observation, info = super().reset(seed=seed, options=options)
        return observation, {"lock": threading.Lock()} if self._when == "infos" else info


@pytest.mark.parametrize("when", ["construction", "reset"])
def test_a_mistake_in_any_evaluation_function_ends_the_run_before_training(tmp_path, when):
    evaluated = [Counted, functools.partial(Fails, when)]
    with pytest.raises(ValueError, match="on fire") as caught:
        ppo.train(TINY, Counted, eval_envs=evaluated, logdir=tmp_path, callbacks=NeverUpdates())
    assert f"raised by env 1 during {when}" in caught.value.__notes__
    assert "built once before training" in caught.value.__notes__[-1] and not list(tmp_path.iterdir())


def test_infos_of_evaluation_envs_do_not_matter(tmp_path):
    config = dataclasses.replace(TINY, num_workers=1)
    assert ppo.train(config, functools.partial(Fails, "infos"), callbacks=Stops(), logdir=tmp_path).env_steps == 0


class MaskedInSB3(gym.Wrapper):
    """Has the method from which sb3-contrib's MaskablePPO takes masks."""

    def action_masks(self):
        return np.ones(2, bool)


def masked_in_sb3(observed):
    env = MaskedInSB3(gym.make("CartPole-v1"))
    if not observed:
        return env
    space = spaces.Dict(x=env.observation_space, action_mask=spaces.MultiBinary(2))
    return gym.wrappers.TransformObservation(env, lambda x: {"x": x, "action_mask": np.ones(2, np.int8)}, space)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_masks_that_only_sb3_reads_are_a_warning(tmp_path, num_workers, recwarn):
    config = dataclasses.replace(TINY, num_workers=num_workers)
    with pytest.warns(UserWarning, match=r"the envs have a method action_masks\(\), which ppo never calls"):
        ppo.train(config, functools.partial(masked_in_sb3, False), callbacks=Stops(), logdir=tmp_path)
    recwarn.clear()
    ppo.train(config, functools.partial(masked_in_sb3, True), callbacks=Stops(), logdir=tmp_path)
    assert not [one for one in recwarn if "action_masks" in str(one.message)]


def test_training_loads_no_tensorflow_in_workers(tmp_path):
    config = dataclasses.replace(TINY, num_workers=2)
    with vecenv.AsyncVectorEnv([make_cartpole] * config.num_envs, **ppo.vector_options(config)) as envs:
        ppo.train(config, envs, logdir=tmp_path)
        loaded = envs.apply(lambda env: "tensorflow" in __import__("sys").modules)
    assert not any(loaded)


class Normalizes(gym.Wrapper):
    """A wrapper with a normalizer inside, whose statistics it may freeze."""

    def __init__(self, wrapper, frozen=False):
        super().__init__(wrapper(gym.make("CartPole-v1")))
        self.env.update_running_mean = not frozen


NORMALIZERS = ("NormalizeObservation", "NormalizeReward")


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_functions_with_normalizers_of_gymnasium_are_refused(tmp_path, name, num_workers):
    config = dataclasses.replace(TINY, num_workers=num_workers)
    plain, normalizes = make_cartpole, functools.partial(Normalizes, getattr(gym.wrappers, name))
    message = rf"the wrappers of env \d: {name} begins with new statistics .* use normalize_"
    for envs, eval_envs in (([plain, normalizes], None), (plain, [plain, normalizes])):
        with pytest.raises(ConfigError, match=message):
            ppo.train(config, envs, eval_envs=eval_envs, logdir=tmp_path)
    with (
        vecenv.SyncVectorEnv([plain, normalizes], **ppo.vector_options(config)) as envs,
        pytest.raises(ConfigError, match=message),
    ):
        ppo.train(config, envs, logdir=tmp_path)
    frozen = functools.partial(normalizes, frozen=True)
    assert ppo.train(config, frozen, callbacks=Stops(), logdir=tmp_path).env_steps == 0


def test_functions_with_normalizers_are_refused_in_evaluations_and_videos(tmp_path):
    env = gym.make("CartPole-v1")
    run = untrained_run(tmp_path, env.observation_space, env.action_space, given=True, **vars(TINY))
    normalizes = functools.partial(Normalizes, gym.wrappers.NormalizeObservation)
    for use in (evaluate_run, lambda run, episodes, envs: record_run(run, tmp_path / "videos", episodes, envs=envs)):
        with pytest.raises(ConfigError, match="NormalizeObservation begins with new statistics"):
            use(run.path, 1, envs=normalizes)


def sampled(bound, count=3, size=2):
    """Returns a function that makes an env whose observations have these bounds."""
    observed = gym.spaces.Dict(x=gym.spaces.Box(-bound, 2 * bound, (size,)), n=gym.spaces.Discrete(count))
    return functools.partial(SampledEnv, observed, gym.spaces.Discrete(2))


def test_envs_may_differ_in_the_bounds_of_their_observations(tmp_path):
    result = ppo.train(TINY, [sampled(1), sampled(5)], eval_envs=sampled(9), logdir=tmp_path)
    observed, _ = Run.open(result.path).read_spaces()[""]
    assert observed["x"] == gym.spaces.Box(-5, 10, (2,))
    assert len(evaluate_run(result.path, 2, envs=[sampled(1), sampled(7)]).returns) == 2
    again = ppo.resume(result.path, total_steps=128, envs=[sampled(3), sampled(2)], progress=False)
    assert again.env_steps == 128 and Run.open(result.path).read_spaces()[""][0]["x"] == observed["x"]
    tuned = ppo.train(TINY, sampled(4), init_from=result.path, callbacks=Stops(), logdir=tmp_path, name="tuned")
    assert Run.open(tuned.path).read_spaces()[""][0]["x"].high.tolist() == [8, 8]


def test_an_observation_may_be_a_scalar(tmp_path):
    space = gym.spaces.Box(-1, 1, ())
    result = ppo.train(TINY, functools.partial(SampledEnv, space, gym.spaces.Discrete(2)), logdir=tmp_path)
    assert Run.open(result.path).read_spaces()[""][0] == space
    assert ppo.load_policy(result.path)(np.float32(0.5)) in (0, 1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (sampled(1, size=3), r"do not share a common shape and dtype.*env 1: .*Wrap the envs"),
        (sampled(1, count=4), r"observation space\['n'\] must be the same in all envs.*MultiDiscrete\(\[3 4\]\)"),
    ],
)
def test_envs_that_differ_in_more_than_bounds_are_refused(tmp_path, other, message):
    with pytest.raises((vecenv.UnsupportedSpace, ConfigError), match=message):
        ppo.train(TINY, [sampled(1), other], logdir=tmp_path)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_envs_with_different_action_bounds_are_refused(tmp_path, num_workers):
    box = gym.spaces.Box(-1, 1, (2,))
    envs = [functools.partial(SampledEnv, box, gym.spaces.Box(-b, b, (1,))) for b in (1, 10)]
    with pytest.raises(vecenv.UnsupportedSpace, match=r"env 1: Box\(-10.0, 10.0.*RescaleAction"):
        ppo.train(dataclasses.replace(TINY, num_workers=num_workers), envs, logdir=tmp_path)


def test_an_env_limited_to_one_per_process_is_trained_and_evaluated_with_one_worker_per_env(tmp_path, capsys):
    config = dataclasses.replace(TINY, env="tests.registered:Lonely-v0", num_workers=2, eval_episodes=5)
    result = ppo.train(config, logdir=tmp_path)
    assert len(result.evaluation.returns) == 5
    assert command("evaluate", [str(result.path), "--episodes", "3", "--json", "--trust-modules"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 3


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_error_in_close_does_not_lose_the_evaluation(tmp_path, num_workers):
    config = dataclasses.replace(TINY, num_workers=num_workers)
    with pytest.warns(UserWarning, match=r"an env raised in close\(\):(.|\n)*still busy"):
        result = ppo.train(config, functools.partial(Broken, "close"), logdir=tmp_path)
    assert len(result.evaluation.returns) == 2 and (result.path / "evaluation.json").exists()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_end_of_an_envs_data_set_is_an_error_that_names_the_env(tmp_path, num_workers):
    config = dataclasses.replace(TINY, num_workers=num_workers)
    with pytest.raises(vecenv.EnvError, match=r"raised by env 0 during step(.|\n)*StopIteration"):
        ppo.train(config, functools.partial(Broken, "step"), logdir=tmp_path)


def test_every_exception_survives_pickling():
    kinds = [kind for kind in subclasses_of(Exception) if kind.__module__.startswith("ppo.")]
    for kind in kinds:
        error = kind("the message")
        error.add_note("trial 7")
        found = pickle.loads(pickle.dumps(error))
        assert type(found) is kind and str(found) == str(error) and vars(found) == vars(error), kind
    assert {"ConfigError", "RunError", "TrainingDiverged"} <= {kind.__name__ for kind in kinds}


class Stops(ppo.Callback):
    """Notes warnings, and stops a run before its first update."""

    def __init__(self):
        self.warnings = []

    def on_warning(self, message):
        self.warnings.append(message)

    def on_start(self, config, env_steps):
        raise ppo.StopTraining


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_mask_that_is_in_infos_but_not_read_is_a_warning(tmp_path, num_workers):
    config = Config(env="Taxi-v4", num_envs=2, num_workers=num_workers, num_steps=32, minibatch_size=64)
    masked = dataclasses.replace(config, info_masks=True)
    cartpole = dataclasses.replace(config, env="CartPole-v1")
    unmasked = functools.partial(SampledEnv, gym.spaces.Discrete(500), gym.spaces.Discrete(6))
    some = [unmasked, StrictTaxi]
    for settings, envs, count in ((config, None, 1), (config, some, 1), (masked, None, 0), (cartpole, None, 0)):
        stops = Stops()
        ppo.train(settings, envs, callbacks=stops, logdir=tmp_path)
        assert sum("set info_masks=True (--info-masks)" in warning for warning in stops.warnings) == count


def test_masks_in_infos_hold_in_training_evaluations_policies_and_exports(tmp_path):
    words = ["--env", f"{StrictTaxi.__module__}:StrictTaxi", "--info-masks", "--num-workers", "1", *SMALL]
    assert (
        command("train", [*words, "--logdir", str(tmp_path / "runs")]) == 0
    )  # StrictTaxi raises if an action is masked
    run = only_run(tmp_path / "runs")
    run = Run.open(run.path, trust_modules=True)
    for envs in (None, StrictTaxi, [StrictTaxi] * 2):
        assert evaluate_run(run, 2, seed=1, envs=envs).lengths.tolist() == [20, 20]
    policy = ppo.load_policy(run)
    artifact = tf.saved_model.load(str(ppo.export(run, tmp_path / "exports", "savedmodel")[0]))
    env = StrictTaxi()
    observation, info = env.reset(seed=3)
    for _ in range(20):
        seen = {"observation": np.int64(observation), "action_mask": info["action_mask"]}
        action = policy(seen)
        inputs = {name: tf.constant(value)[None] for name, value in seen.items()}
        assert artifact.signatures["serving_default"](**inputs)["action"].numpy().tolist() == [action]
        observation, _, _, truncated, info = env.step(action)
    assert truncated
    with vecenv.SyncVectorEnv([StrictTaxi] * 4, **ppo.vector_options(Config(num_steps=32))) as envs:
        config = Config(num_envs=4, num_steps=32, info_masks=True)
        with pytest.raises(ConfigError, match=r"info_masks would have no effect .*ActionMaskObs"):
            ppo.train(config, envs, logdir=tmp_path)
