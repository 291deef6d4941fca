"""Tests of ppo/config.py and ppo/presets.py: every setting is checked, documented and stored."""

import dataclasses
import inspect
import json
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest

import ppo
from ppo import Config, ConfigError, preset
from ppo.config import RESUMABLE, SETTINGS, TYPES, accepts_none
from ppo.presets import PRESETS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minibatch_size": 60}, "minibatch_size=60 does not divide .* 64 \\* 32 = 2048: the nearest size .* is 64"),
        ({"minibatch_size": 5000}, "the nearest size that does is 2048"),
        ({"num_envs": 0}, "num_envs=0 is out of range: it must be 1 to 65536"),
        ({"num_envs": 1_000_000}, "num_envs=1000000 is out of range"),
        ({"num_workers": -1}, "num_workers=-1 is out of range: it must be 0 or more, or None"),
        ({"kl_target": 0.0}, "kl_target=0.0 is out of range: it must be above 0"),
        ({"kl_limit": -1.0}, "kl_limit=-1.0 is out of range: it must be above 0, or None"),
        ({"entropy_coef": -1.0}, "entropy_coef=-1.0 is out of range: it must be 0 or more"),
        ({"objective": "kl"}, "objective='kl' is unknown: it must be clip or kl_penalty"),
        ({"lr_schedule": "cosine"}, "it must be linear, constant or kl_adaptive"),
        ({"backend": "c"}, "backend='c' is unknown: it must be auto or python"),
        ({"num_workers": 65}, "num_workers=65 is more than num_envs=64"),
        ({"gamma": 1.5}, "gamma=1.5 is out of range: it must be 0 to 1"),
        ({"learning_rate": float("nan")}, "learning_rate=nan is out of range"),
        ({"learning_rate": -1.0}, "it must be above 0"),
        ({"policy_layers": (64, 0)}, "policy_layers"),
        ({"seed": -1}, "seed=-1"),
        ({"env_kwargs": {"a": {1, 2}}}, "env_kwargs: JSON cannot represent the value of 'a'"),
        ({"env_kwargs": {1: 2}}, "env_kwargs: the key 1 is not a string"),
        ({"env_kwargs": {"num_envs": 2, "backend": 1}}, "sets backend, num_envs, which the environment would not"),
        ({"env_kwargs": {"autoreset_mode": "SameStep"}}, "sets autoreset_mode, which the environment would not"),
        ({"eval_env_kwargs": {"wrappers": []}}, "eval_env_kwargs=.* sets wrappers, which the environment would not"),
        ({"env_kwargs": "a=1"}, "env_kwargs='a=1' is of the wrong type"),
        ({"wrappers": ("module:",)}, "wrappers: 'module:' names no wrapper"),
        (
            {"wrappers": ("Name:{size: 4}",)},
            r"wrappers: the arguments of the wrapper .* are not JSON \(.*write, for exam",
        ),
        (
            {"wrappers": ("NormalizeReward",)},
            "wrappers: NormalizeReward begins with new statistics .* normalize_rewards",
        ),
        ({"wrappers": ("mine:NormalizeReward", "mine:")}, "wrappers: 'mine:' names no wrapper"),
        ({"wrappers": "Name"}, "wrappers='Name' is of the wrong type"),
        ({"wrappers": (Counter,)}, "it must be a string. Write its name, 'collections:Counter'"),
        ({"wrappers": [gym.wrappers.TimeLimit]}, "it must be a string. Write its name, 'TimeLimit'"),
        ({"network": json.dumps}, "it must be a string or None. Write its name, 'json:dumps'"),
        ({"network": lambda: 0}, "Write its name, 'module:name'$"),
        (
            {"env": lambda: 0},
            r"Write its name, 'module:name'\. A function .* can be passed to ppo\.train\(config, envs=",
        ),
        ({"env": gym.Env()}, r"it must be a string\. A function that makes an env can be passed"),
        ({"cnn": np.arange(3)}, "it must be 'nature' or 'impala' or 'small'$"),
        ({"seed": None}, "it must be an integer$"),
        ({"policy_layers": 64}, "it must be a tuple or list of integers$"),
        ({"learning_rate": lambda left: 1e-3 * left}, r"it must be a number\. Schedules are lr_schedule, for"),
        ({"critic_keys": (1,)}, "critic_keys=1 is of the wrong type"),
    ],
)
def test_the_error_for_an_invalid_setting_names_a_valid_value(settings, message):
    with pytest.raises(ConfigError, match=message):
        Config(**settings)


@pytest.mark.parametrize(
    ("settings", "num_steps", "minibatch_size"),
    [
        ({}, 32, 128),
        ({"num_envs": 256}, 32, 128),
        ({"num_envs": 65}, 32, 104),
        ({"num_envs": 37}, 32, 74),
        ({"num_envs": 6}, 256, 128),
        ({"num_envs": 1}, 2048, 128),
        ({"num_envs": 8, "num_steps": 100}, 100, 100),
        ({"num_envs": 8, "minibatch_size": 64}, 256, 64),
        ({"num_envs": 8, "recurrent": "gru"}, 32, 128),
        ({"num_envs": 6, "recurrent": "gru"}, 32, 96),
        ({"num_envs": 7, "recurrent": "gru", "num_steps": 200}, 200, 200),
    ],
)
def test_few_envs_fill_a_batch_with_more_steps_and_minibatches_divide_it(settings, num_steps, minibatch_size):
    config = Config(**settings)
    assert (config.num_steps, config.minibatch_size) == (num_steps, minibatch_size)
    assert Config.from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
@pytest.mark.parametrize("num_envs", [*range(1, 130), 1000, 4097])
def test_every_number_of_envs_has_valid_defaults(num_envs, recurrent):
    config = Config(num_envs=num_envs, recurrent=recurrent)
    assert config.num_steps >= 32
    assert config.minibatch_size <= 128
    assert num_envs > 64 or recurrent != "none" or 1024 < config.batch_size <= 2048


def test_a_config_survives_json():
    config = Config(policy_layers=(32,), num_workers=None, learning_rate=1 / 3)
    assert Config.from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    with pytest.raises(ConfigError, match="unknown settings \\['lr'\\]"):
        Config.from_json({"lr": 1})


def test_the_error_for_an_unknown_preset_names_the_closest_preset():
    with pytest.raises(ConfigError, match="Did you mean 'cartpole'"):
        preset("cartpol")
    assert {"cartpole", "swimmer", "quadruped"} <= set(PRESETS)


@pytest.mark.parametrize(
    "settings",
    [{"total_steps": 100.5}, {"num_envs": True}, {"seed": None}, {"gamma": "0.9"}, {"policy_layers": (64.5,)},
     {"policy_layers": 64}, {"normalize_rewards": "no"}, {"env": 5}, {"num_workers": 1.5}, {"minibatch_size": 0},
     {"minibatch_size": 1, "normalize_advantages": True}, {"initial_log_std": float("nan")},
     {"kl_target": 0}, {"initial_log_std": -1.0, "min_log_std": -0.5}],
    ids=str,
)  # fmt: skip
def test_a_value_of_the_wrong_type_or_without_a_meaning_is_rejected(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Config(**settings)


def test_numpy_numbers_and_lists_become_python_numbers_and_tuples():
    config = Config(seed=np.int64(3), learning_rate=np.float32(0.5), policy_layers=[64, np.int32(32)], clip_range=1)
    assert config == Config(seed=3, learning_rate=0.5, policy_layers=(64, 32), clip_range=1.0)
    assert Config.from_json(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_whole_floats_become_integers():
    config = Config(total_steps=1e6, num_workers=np.float32(2.0), policy_layers=[64.0])
    assert config == Config(total_steps=1_000_000, num_workers=2, policy_layers=(64,))
    assert all(type(n) is int for n in (config.total_steps, config.num_workers, *config.policy_layers))


RANGES = {name: setting.range for name, setting in SETTINGS.items() if setting.range is not None}


@pytest.mark.parametrize("name", RANGES)
def test_the_config_checks_each_declared_range(name):
    """A number just outside the range is rejected, and the message contains the range."""
    legal, default = RANGES[name], getattr(Config(), name)
    kind = float if "float" in str(TYPES[name]) else int
    outside = kind(legal.least) if legal.above else kind(legal.least - 1)
    value = (outside,) if isinstance(default, tuple) else outside
    with pytest.raises(ValueError, match=f"{name}=.* is out of range: it must be {legal}"):
        dataclasses.replace(Config(), **{name: value})
    if legal.most < 2**40:
        with pytest.raises(ValueError, match="is out of range"):
            dataclasses.replace(Config(), **{name: kind(legal.most + 1)})
    assert outside not in legal and float("nan") not in legal and float("inf") not in legal
    if accepts_none(name):
        assert getattr(dataclasses.replace(Config(), **{name: None}), name) is None


def test_every_numeric_setting_has_a_range():
    kinds = {name: str(kind) for name, kind in TYPES.items() if "Literal" not in str(kind)}
    numeric = {name for name, kind in kinds.items() if "int" in kind or "float" in kind}
    assert numeric == set(RANGES), f"these have a range or are numeric, but not both: {numeric ^ set(RANGES)}"


def test_every_field_declares_a_setting_that_the_docstring_documents():
    assert list(SETTINGS) == [field.name for field in dataclasses.fields(Config)]
    shown = " ".join(Config.__doc__.split())
    for name, setting in SETTINGS.items():
        assert setting.help.endswith("."), f"the help of {name} is not a sentence: end it with a period"
        assert f"{name}: {setting.help}" in shown, name
    assert str(inspect.signature(Config)).startswith("(env: str = 'HalfCheetah-v5', total_steps: int = 1000000, ")


def test_a_stored_config_must_have_exactly_the_settings_of_this_version():
    values = dataclasses.asdict(Config(gamma=0.9))
    assert Config.from_json(values) == Config(gamma=0.9)
    with pytest.raises(ConfigError, match=r"unknown settings \['clip_schedule'\]: they come from another version"):
        Config.from_json({**values, "clip_schedule": "linear"})
    with pytest.raises(ConfigError, match=r"the settings \['gamma'\] are missing"):
        Config.from_json({name: value for name, value in values.items() if name != "gamma"})


def test_a_resumed_run_may_change_only_amounts_intervals_reports_and_where_envs_are_stepped():
    assert set(RESUMABLE) == {
        "total_steps", "num_workers", "backend", "report_interval", "checkpoint_interval", "eval_interval",
        "eval_episodes", "eval_env_kwargs", "info_metrics", "step_timeout_s", "on_worker_death",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"recurrent_units": 32}, ["recurrent_units"]),
        ({"recurrent_units": 32, "recurrent": "gru"}, []),
        ({"kl_target": 0.1}, ["kl_target"]),
        ({"kl_target": 0.1, "lr_schedule": "kl_adaptive"}, []),
        ({"kl_limit": 0.1, "lr_schedule": "kl_adaptive"}, ["kl_limit"]),
        ({"kl_limit": None, "lr_schedule": "kl_adaptive"}, []),
        ({"clip_range": 0.1, "objective": "kl_penalty"}, ["clip_range"]),
        ({"observation_clip": 5.0, "normalize_observations": False}, ["observation_clip"]),
        ({"network": "a:b", "policy_layers": (8,), "activation": "elu"}, ["policy_layers", "activation"]),
        ({"cnn": "small"}, []),
        ({"initial_log_std": -1.0}, []),
    ],
)
def test_changed_settings_without_effect_are_found(settings, names):
    found = Config(**settings).without_effect(images=True, gaussians=True)
    assert [name for several in found.values() for name in several] == names


@pytest.mark.parametrize(
    ("name", "near"), [("n_envs", "num_envs"), ("n_epochs", "epochs"), ("ent_coef", "entropy_coef")]
)
def test_the_error_for_an_unknown_setting_names_the_nearest_one(name, near):
    with pytest.raises(TypeError, match=f"no setting '{name}'. Did you mean '{near}'"):
        Config(**{name: 1})
    with pytest.raises(TypeError, match=f"no setting '{name}'. Did you mean '{near}'"):
        dataclasses.replace(Config(), **{name: 1})


@pytest.mark.parametrize(
    ("name", "counterpart"),
    [
        ("target_kl", "kl_limit"),
        ("log_std_init", "initial_log_std"),
        ("n_timesteps", "total_steps"),
        ("log_interval", "report_interval, in env-steps of all envs"),
    ],
)
def test_the_error_for_a_name_of_sb3_names_the_counterpart_and_not_the_nearest_setting(name, counterpart):
    with pytest.raises(TypeError, match=f"no setting '{name}'. Its counterpart is {counterpart}\\."):
        Config(**{name: 1})


def test_the_error_for_a_name_of_sb3_without_a_counterpart_says_so():
    with pytest.raises(TypeError, match=r"no setting 'clip_range_vf'\. It has no counterpart in ppo\."):
        Config(clip_range_vf=0.2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["CartPole-v1"], TypeError, "config='CartPole-v1' is not a ppo.Config: write"),
        ([Config(), "CartPole-v1"], ConfigError, r"is a string: name the env .*Config\(env='CartPole-v1'\)"),
        (
            [Config(), object()],
            ConfigError,
            "envs=<object .* is neither a function .* write, for example, envs=lambda:",
        ),
        ([Config(), None, print], TypeError, "callbacks contains <.*print>, which is not a ppo.Callback: derive"),
        ([Config(), None, [ppo.Callback]], TypeError, "callbacks contains <class .*pass an instance"),
        ([Config(), None, None], TypeError, "callbacks contains None, .*pass an instance"),
    ],
)
def test_an_argument_of_train_in_another_librarys_form_is_an_error_that_says_what_to_write(
    tmp_path, arguments, error, message
):
    config, envs, callbacks = [*arguments, *[None, ()][len(arguments) - 1 :]]
    with pytest.raises(error, match=message):
        ppo.train(config, envs, callbacks=callbacks, logdir=tmp_path)
    assert not list(tmp_path.iterdir())
