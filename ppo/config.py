"""`Config`: every setting of a training run, each with its type, default, range, help text and group."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, Literal

import vecenv
from ppo.kwargs import Kwargs


class ConfigError(ValueError):
    """A setting, or a combination of settings, is invalid. The message says how to fix it."""


@dataclass(frozen=True)
class Range:
    """The range of numbers from `least` to `most`.

    Attributes:
        least: The lower bound, included unless `above` is set.
        most: The upper bound, included unless it is infinity.
        above: Whether numbers must be greater than `least`.
    """

    least: float
    most: float = math.inf
    above: bool = False

    def __contains__(self, value: float) -> bool:
        """Returns whether a number is in the range. NaN and infinity never are."""
        return (value > self.least if self.above else value >= self.least) and value <= self.most and value != math.inf

    def __str__(self) -> str:
        if self.most != math.inf:
            return f"{self.least:g} to {self.most:.10g}"
        return f"above {self.least:g}" if self.above else f"{self.least:g} or more"


# Arguments of `vecenv.make` and of its vector envs, which no env receives.
_OF_MAKE = {"backend", "num_envs", "num_workers", "vector_kwargs", "wrappers"}
_OF_MAKE |= set(inspect.signature(vecenv.AsyncVectorEnv).parameters)

_PETTINGZOO = "pettingzoo:"
"""Prefix of the name of an environment with several agents."""

NORMALIZERS = {"NormalizeObservation": "normalize_observations", "NormalizeReward": "normalize_rewards"}
"""Gymnasium's wrappers that keep statistics of their own, and the settings that replace them."""

AT_LEAST_0, AT_LEAST_1, POSITIVE, UNIT = Range(0), Range(1), Range(0, above=True), Range(0, 1)


@dataclass(frozen=True)
class Setting:
    """The metadata of a field of `Config`, declared with `Annotated` next to the type and the default.

    Attributes:
        group: Heading of the setting's flag in `ppo train --help`. Settings of "network" must equal those of the
            run in `init_from`, and settings of "agents" need an env with several agents.
        range: The valid numbers, or the valid entries of a tuple. None if the setting is not numeric.
        help: What the setting does, in one or two short sentences.
        resumable: Whether a resumed run may change it.
        derived: Whether the constructor computes it from other settings if it is not given.
    """

    group: str
    range: Range | None = None
    _: KW_ONLY
    help: str
    resumable: bool = False
    derived: bool = False


_DERIVED: Any = None
"""The default of a derived setting, which is never None after construction."""

_SAMPLES_PER_UPDATE, _SAMPLES_PER_STEP = 2048, 128  # of a batch and a minibatch, unless the settings say otherwise


@dataclass(frozen=True)
class Config:
    """Every setting of one training run. The constructor raises `ConfigError` if a setting is invalid."""

    # fmt: off
    env: Annotated[str, Setting("task", help=
        'Gymnasium id, "module:id", "module:name" of a class or function, or "pettingzoo:module".')] = "HalfCheetah-v5"
    total_steps: Annotated[int, Setting("task", AT_LEAST_1, resumable=True, help=
        "Env-steps to train for; the last update is completed.")] = 1_000_000
    num_envs: Annotated[int, Setting("task", Range(1, 2**16), help="Number of envs (N).")] = 64
    num_workers: Annotated[int | None, Setting("task", AT_LEAST_0, resumable=True, help=
        "Worker processes. None: one per core, or 0 (this process) for MuJoCo in C++.")] = None
    backend: Annotated[Literal["auto", "python"], Setting("task", resumable=True, help=
        '"auto": MuJoCo tasks in C++ and registered vector envs; "python": neither.')] = "auto"
    num_steps: Annotated[int, Setting("task", AT_LEAST_1, derived=True, help=
        "Steps of each env per update (T). By default, 32, or with fewer than 64 envs the largest power of two with "
        "N * T up to 2,048, unless the policy is recurrent.")] = _DERIVED
    env_kwargs: Annotated[Mapping[str, Any], Setting("task", help=
        "Arguments of the env.")] = Kwargs()
    wrappers: Annotated[tuple[str, ...], Setting("task", help=
        '"Wrapper", "module:Wrapper" or \'Wrapper:{"size": 4}\', innermost first.')] = ()
    info_masks: Annotated[bool, Setting("task", help="Read action masks from infos.")] = False

    seed: Annotated[int, Setting("run", Range(0, 2 ** 31 - 1), help="Random seed.")] = 0
    report_interval: Annotated[int, Setting("run", AT_LEAST_1, resumable=True, help=
        "Env-steps between reports.")] = 10_000
    checkpoint_interval: Annotated[int, Setting("run", AT_LEAST_1, resumable=True, help=
        "Env-steps between checkpoints. One is also due after ten minutes.")] = 200_000
    eval_interval: Annotated[int | None, Setting("run", AT_LEAST_1, resumable=True, help=
        "Env-steps between evaluations. A checkpoint precedes each. None: one at the end.")] = None
    info_metrics: Annotated[tuple[str, ...], Setting("run", resumable=True, help=
        "Infos to report: KEY, KEY:last or outer/inner at the last step of an episode, KEY:sum or KEY:mean over its "
        "steps.")] = ()
    eval_episodes: Annotated[int, Setting("run", AT_LEAST_1, resumable=True, help="Episodes per evaluation.")] = 20
    sample: Annotated[bool, Setting("run", help=
        "Evaluate with sampled actions.")] = False
    eval_env_kwargs: Annotated[Mapping[str, Any], Setting("run", resumable=True, help=
        "Overrides env_kwargs in evaluations and videos.")] = Kwargs()
    step_timeout_s: Annotated[float | None, Setting("run", POSITIVE, resumable=True, help=
        "Seconds to wait for a step. None: forever.")] = 300.0
    on_worker_death: Annotated[Literal["raise", "restart"], Setting("run", resumable=True, help=
        "End the run, or restart the worker and truncate its episodes.")] = "raise"

    epochs: Annotated[int, Setting("optimization", AT_LEAST_1, help="Passes over a batch.")] = 10
    minibatch_size: Annotated[int, Setting("optimization", AT_LEAST_1, derived=True, help=
        "Size of a minibatch; divides N * T. By default, the largest possible size up to 128.")] = _DERIVED
    learning_rate: Annotated[float, Setting("optimization", POSITIVE, help="Initial learning rate.")] = 5e-4
    lr_schedule: Annotated[Literal["linear", "constant", "kl_adaptive"], Setting("optimization", help=
        "Decay to 0, stay constant, or adapt to kl_target.")] = "linear"
    adam_epsilon: Annotated[float, Setting("optimization", POSITIVE, help="Adam's epsilon.")] = 1e-5
    gamma: Annotated[float, Setting("optimization", UNIT, help="Initial discount factor.")] = 0.99
    final_gamma: Annotated[float | None, Setting("optimization", UNIT, help=
        "Final discount factor, reached linearly. None: 0.995 if gamma is 0.99, otherwise gamma.")] = None
    gae_lambda: Annotated[float, Setting("optimization", UNIT, help=
        "GAE's lambda.")] = 0.95

    objective: Annotated[Literal["clip", "kl_penalty"], Setting("objective", help=
        "Clipping, or BatchPPO's penalty.")] = "clip"
    clip_range: Annotated[float, Setting("objective", POSITIVE, help="Clip range of the probability ratio.")] = 0.2
    kl_target: Annotated[float, Setting("objective", POSITIVE, help="Target KL in nats.")] = 0.01
    kl_limit: Annotated[float | None, Setting("objective", POSITIVE, help=
        "KL above which the learning rate drops. None: never.")] = 0.02
    value_coef: Annotated[float, Setting("objective", AT_LEAST_0, help=
        "Weight of half the squared value error: SB3's vf_coef times 2. Has little effect unless layers are "
        "shared.")] = 0.25
    entropy_coef: Annotated[float, Setting("objective", AT_LEAST_0, help=
        "Initial weight of the entropy. The linear schedule applies to it, too.")] = 0.001
    max_grad_norm: Annotated[float, Setting("objective", POSITIVE, help=
        "Maximum gradient norm, separately for the policy and the value function unless they share layers.")] = 10.0

    normalize_advantages: Annotated[bool, Setting("normalization", help=
        "Scale each minibatch's advantages to mean 0 and standard deviation 1.")] = False
    recompute_advantages: Annotated[bool, Setting("normalization", help=
        "Recompute advantages before each epoch, except with images.")] = True
    normalize_observations: Annotated[bool, Setting("normalization", help=
        "Normalize observations by running moments. If off, images are divided by 255.")] = True
    normalize_rewards: Annotated[bool, Setting("normalization", help=
        "Divide rewards by the running standard deviation of the return.")] = True
    observation_clip: Annotated[float, Setting("normalization", POSITIVE, help=
        "Bound of normalized observations.")] = 10.0

    policy_layers: Annotated[tuple[int, ...], Setting("network", AT_LEAST_1, help=
        "Units of each policy layer.")] = (64, 64)
    value_layers: Annotated[tuple[int, ...], Setting("network", AT_LEAST_1, help=
        "Units of each value layer.")] = (64, 64)
    activation: Annotated[Literal["tanh", "relu", "elu"], Setting("network", help=
        "Activation of the hidden layers.")] = "tanh"
    cnn: Annotated[Literal["nature", "impala", "small"], Setting("network", help="CNN for images.")] = "nature"
    critic_keys: Annotated[tuple[str, ...], Setting("network", help=
        "Observation keys for the value function only.")] = ()
    recurrent: Annotated[Literal["none", "gru", "lstm"], Setting("network", help=
        "Recurrent core, if any.")] = "none"
    recurrent_units: Annotated[int, Setting("network", AT_LEAST_1, help="Recurrent units.")] = 64
    network: Annotated[str | None, Setting("network", help=
        'Custom network (docs/custom-networks.md). None: built-in.')] = None
    policy_output_gain: Annotated[float, Setting("network", POSITIVE, help=
        "Initial scale of the policy's outputs.")] = 0.01
    action_transform: Annotated[Literal["clip", "tanh"], Setting("network", help=
        "Clip Box actions, or squash them with tanh.")] = "clip"
    initial_log_std: Annotated[float, Setting("network", Range(-10, 2), help=
        "Initial log standard deviation of actions, in units of half the range of a bounded Box.")] = -0.7
    min_log_std: Annotated[float, Setting("network", Range(-10, 2), help=
        "Minimum log standard deviation, in the same units.")] = -2.0

    policies: Annotated[Literal["shared", "group"], Setting("agents", help=
        "One policy for all agents, or one per group.")] = "shared"
    global_state: Annotated[bool, Setting("agents", help=
        "Let the value function also read `env.state()`.")] = False
    # fmt: on

    def __post_init__(self) -> None:
        for name, hint in TYPES.items():
            if getattr(self, name) is not None or not SETTINGS[name].derived:
                object.__setattr__(self, name, _typed(name, getattr(self, name), hint))
        for name, setting in SETTINGS.items():
            if setting.range is not None:
                self._check_range(name, setting.range, ", or None" if accepts_none(name) else "")
            words = typing.get_args(TYPES[name]) if typing.get_origin(TYPES[name]) is Literal else ()
            if words and getattr(self, name) not in words:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is unknown: it must be {', '.join(words[:-1])} or {words[-1]}"
                )
        self._derive()
        self._check_env()
        if "" in self.info_metrics or len(set(self.info_metrics)) < len(self.info_metrics):
            raise ConfigError(f"info_metrics={self.info_metrics!r} has an empty or a repeated key: remove it")
        if self.normalize_advantages:
            self._check_range("minibatch_size", Range(2), or_else=", or turn normalize_advantages off")
        if self.num_workers is not None and self.num_workers > self.num_envs:
            raise ConfigError(
                f"num_workers={self.num_workers} is more than num_envs={self.num_envs}: "
                f"use at most {self.num_envs}, or None for one worker per core"
            )
        if self.num_workers == 0 and self.on_worker_death == "restart":
            raise ConfigError(
                "on_worker_death='restart' needs worker processes, but num_workers=0 starts none: omit one"
            )
        if self.batch_size % self.minibatch_size:
            raise ConfigError(
                f"minibatch_size={self.minibatch_size} does not divide the batch of num_envs * num_steps = "
                f"{self.num_envs} * {self.num_steps} = {self.batch_size}: the nearest size that does is "
                f"{_nearest_divisor(self.batch_size, self.minibatch_size)}"
            )
        self._check_agents()
        if self.initial_log_std < self.min_log_std:
            raise ConfigError(
                f"initial_log_std={self.initial_log_std:g} is below min_log_std={self.min_log_std:g}: raise it, or "
                "lower the minimum"
            )
        if self.critic_keys and self.network is not None:
            raise ConfigError(
                "--critic-keys cannot be combined with --network: a custom network computes the policy and the values "
                "from the same inputs. Omit one of them"
            )
        if self.recurrent != "none":
            self._check_recurrent()

    def _derive(self) -> None:
        """Sets the derived settings that were not given."""
        if self.num_steps is _DERIVED:
            # The minibatches of a recurrent policy hold whole sequences, so these stay short.
            steps = 2 ** int(math.log2(_SAMPLES_PER_UPDATE / self.num_envs)) if self.recurrent == "none" else 0
            object.__setattr__(self, "num_steps", max(32, steps))
        if self.minibatch_size is _DERIVED:
            # Samples that stay together, and the number of such sequences.
            length, count = (1, self.batch_size) if self.recurrent == "none" else (self.num_steps, self.num_envs)
            most = max(1, _SAMPLES_PER_STEP // length)
            object.__setattr__(self, "minibatch_size", length * max(n for n in range(1, most + 1) if count % n == 0))

    def _check_range(self, name: str, legal: Range, or_else: str = "") -> None:
        value = getattr(self, name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if any(number not in legal for number in numbers):
            raise ConfigError(f"{name}={value!r} is out of range: it must be {legal}{or_else}")

    def _check_env(self) -> None:
        for name in ("env_kwargs", "eval_env_kwargs"):
            kwargs = getattr(self, name)
            if taken := sorted(_OF_MAKE & kwargs.keys()):
                raise ConfigError(
                    f"{name}={dict(kwargs)} sets {', '.join(taken)}, which the environment would not receive: use the "
                    "trainer's own settings, or pass functions that make the envs"
                )
        for wrapper in self.wrappers:
            try:
                named = vecenv.NamedWrapper(wrapper)
            except ValueError as error:
                raise ConfigError(f"wrappers: {error}") from error
            if named.module.startswith("gymnasium.") and named.name in NORMALIZERS:
                raise normalizer_error("wrappers", named.name)

    def _check_agents(self) -> None:
        """Checks the settings for environments with several agents."""
        if not self.is_multi_agent:
            names = [name for name, setting in SETTINGS.items() if setting.group == "agents"]
            if changed := [name for name in names if getattr(self, name) != getattr(type(self), name)]:
                raise ConfigError(
                    f"settings for several agents have no effect on env={self.env!r}: {', '.join(changed)}. Omit them, "
                    'or name an environment with several agents, "pettingzoo:module"'
                )
            return
        for name in ("wrappers", "info_metrics"):
            if getattr(self, name) not in (getattr(type(self), name), False):
                raise ConfigError(f"environments with several agents do not support {name}: omit it")
        if self.global_state and self.network is not None:
            raise ConfigError("global_state needs a separate value function: use no custom network")

    def without_effect(self, *, images: bool, gaussians: bool) -> dict[str, list[str]]:
        """Returns changed settings that have no effect, by reason.

        `images` and `gaussians` say whether a policy has a CNN and whether it has Gaussian actions.
        """
        reasons = [
            (self.recurrent == "none", "recurrent is none", ["recurrent_units"]),
            (self.objective != "clip", "objective is not clip", ["clip_range"]),
            (
                self.objective == "clip" and self.lr_schedule != "kl_adaptive",
                "neither objective nor lr_schedule adapts to it",
                ["kl_target"],
            ),
            (
                self.lr_schedule == "kl_adaptive" and self.kl_limit is not None,
                "lr_schedule is kl_adaptive",
                ["kl_limit"],
            ),
            (not self.normalize_observations, "normalize_observations is off", ["observation_clip"]),
            (self.network is None and not images, "no observation is an image", ["cnn"]),
            (not gaussians, "no action is continuous", ["action_transform", "initial_log_std", "min_log_std"]),
            (
                self.network is not None,
                "network replaces the built-in one",
                ["policy_layers", "value_layers", "activation", "cnn", "policy_output_gain"],
            ),
        ]
        found = {
            reason: [name for name in names if getattr(self, name) != getattr(type(self), name)]
            for holds, reason, names in reasons
            if holds
        }
        return {reason: names for reason, names in found.items() if names}

    def _check_recurrent(self) -> None:
        if self.network is not None:
            raise ConfigError("--recurrent cannot be combined with --network, which has no recurrent core: omit one")
        if self.minibatch_size % self.num_steps or self.num_envs % (self.minibatch_size // self.num_steps):
            sizes = [self.num_steps * n for n in range(1, self.num_envs + 1) if self.num_envs % n == 0]
            raise ConfigError(
                f"minibatch_size={self.minibatch_size} does not hold whole sequences, which a recurrent policy needs: "
                f"it must be num_steps={self.num_steps} times a divisor of num_envs={self.num_envs}. Use one of "
                f"{', '.join(map(str, sizes))}"
            )

    @property
    def is_multi_agent(self) -> bool:
        """Whether `env` names an environment with several agents."""
        return self.env.startswith(_PETTINGZOO)

    @property
    def pettingzoo_name(self) -> str:
        """The name of the environment with several agents, "module" or "module:function"."""
        return self.env.removeprefix(_PETTINGZOO)

    def of_team(self, num_agents: int) -> Config:
        """Returns the settings of a learner whose rows are the K agents of a team in all N envs: N * K rows."""
        return replace(
            self,
            num_envs=self.num_envs * num_agents,
            total_steps=self.total_steps * num_agents,
            critic_keys=(*self.critic_keys, *(["state"] if self.global_state else [])),
        )

    @property
    def batch_size(self) -> int:
        """Samples per update, N * T."""
        return self.num_envs * self.num_steps

    @property
    def num_minibatches(self) -> int:
        """Gradient steps per epoch."""
        return self.batch_size // self.minibatch_size

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
        return -(-self.total_steps // self.batch_size)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Config:
        """Returns the config with the JSON values of `dataclasses.asdict(config)`.

        Raises:
            ConfigError: If a setting is unknown, missing or invalid.
        """
        if unknown := sorted(values.keys() - SETTINGS.keys()):
            raise ConfigError(f"unknown settings {unknown}: they come from another version of ppo")
        if missing := sorted(SETTINGS.keys() - values.keys()):
            raise ConfigError(
                f"the settings {missing} are missing: the file is damaged, or from another version of ppo"
            )
        return cls(**values)


TYPES: dict[str, Any] = typing.get_type_hints(Config)
"""The type of each setting, without its metadata."""

SETTINGS: dict[str, Setting] = {
    name: hint.__metadata__[0] for name, hint in typing.get_type_hints(Config, include_extras=True).items()
}
"""The metadata of each setting, by name, in the order of the fields."""


RESUMABLE = tuple(name for name, setting in SETTINGS.items() if setting.resumable)
"""The settings that a resumed run may change."""


def normalizer_error(where: str, wrapper: str) -> ConfigError:
    """Returns the error for envs with one of the wrappers in `NORMALIZERS`."""
    return ConfigError(
        f"{where}: {wrapper} begins with new statistics in each evaluation, video and resumed run: omit it, and use "
        f"{NORMALIZERS[wrapper]}, whose statistics are part of the run"
    )


def accepts_none(name: str) -> bool:
    """Returns whether a setting may be None."""
    return type(None) in typing.get_args(TYPES[name])


def described(name: str) -> str:
    """Returns the help text of a setting, with its range."""
    setting = SETTINGS[name]
    return setting.help if setting.range is None else f"{setting.help} [{setting.range}]"


# `help(ppo.Config)` shows the class docstring and the signature. Neither is readable with raw `Annotated` metadata.
Config.__doc__ = f"{Config.__doc__}\n\nAttributes:\n" + "\n".join(
    textwrap.fill(f"{name}: {described(name)}", 112, initial_indent=" " * 4, subsequent_indent=" " * 8)
    for name in SETTINGS
)
Config.__init__.__annotations__.update(TYPES)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Converts a value to the type of its field: NumPy scalars to Python numbers, 1e6 to 1000000, lists to tuples.

    Raises:
        ConfigError: If the value has another type.
    """
    value = value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if value is None and option is type(None):
            return value
        if typing.get_origin(option) is Literal and isinstance(value, str):
            return value
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(_typed(name, item, typing.get_args(option)[0]) for item in value)
        if typing.get_origin(option) is Mapping and isinstance(value, Mapping):
            try:
                return Kwargs(value)
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from error
        if option is float and type(value) in (int, float):
            return float(value)
        if option is int and type(value) is float and value.is_integer():
            return int(value)
        if option in (bool, int, str) and type(value) is option:  # isinstance would accept a bool as an int
            return value
    wanted = " or ".join(map(_noun, options))
    raise ConfigError(f"{name}={value!r} is of the wrong type: it must be {wanted}{_instead_of(name, value, options)}")


def _noun(option: Any) -> str:
    """Returns what error messages call the values of a type."""
    kind, arguments = typing.get_origin(option), typing.get_args(option)
    if kind is Literal:
        return " or ".join(map(repr, arguments))
    if kind is tuple:
        return f"a tuple or list of {'integers' if arguments[0] is int else 'strings'}"
    nouns = {bool: "True or False", int: "an integer", float: "a number", str: "a string", Mapping: "a dict"}
    return nouns.get(kind or option, "None")


def _instead_of(setting: str, value: Any, options: tuple[Any, ...]) -> str:
    """Returns what to write instead of an object that has no form in JSON: an env, a function or a class."""
    if float in options and callable(value):
        return ". Schedules are lr_schedule, for learning_rate and entropy_coef, and final_gamma, for gamma"
    hint = ""
    if str in options and callable(value):
        module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "<unnamed>")
        named = name if module.startswith("gymnasium.wrappers") else f"{module}:{name}"
        hint = f". Write its name, '{named if '<' not in name else 'module:name'}'"
    if setting == "env" and (callable(value) or hasattr(value, "step")):
        hint += ". A function that makes an env can be passed to ppo.train(config, envs=FUNCTION)"
    return hint


_SB3 = {
    "n_timesteps": "total_steps",
    "vf_coef": "value_coef, which is twice as large",
    "target_kl": "kl_limit",
    "net_arch": "policy_layers and value_layers",
    "log_std_init": "initial_log_std",
    "policy": "network, for networks of your own",
    "policy_kwargs": "policy_layers, value_layers, activation, initial_log_std and network",
    "features_extractor_class": "network",
    "features_extractor_kwargs": "network",
    "norm_obs": "normalize_observations",
    "norm_reward": "normalize_rewards",
    "clip_obs": "observation_clip",
    "eval_freq": "eval_interval, in env-steps of all envs",
    "save_freq": "checkpoint_interval, in env-steps of all envs",
    "log_interval": "report_interval, in env-steps of all envs",
    "reset_num_timesteps": "ppo.resume",
    "tensorboard_log": "the argument `logdir` of ppo.train",
    "verbose": "the argument `progress` of ppo.train",
    "device": "the variable CUDA_VISIBLE_DEVICES",
    **dict.fromkeys(
        [
            "clip_range_vf",
            "use_sde",
            "sde_sample_freq",
            "clip_reward",
            "normalize_images",
            "optimizer_class",
            "optimizer_kwargs",
        ]
    ),
}
"""The counterparts of SB3's names whose nearest setting is another one, or None if there is none."""

_construct = Config.__init__


@functools.wraps(_construct)
def _init(self: Config, *args: Any, **settings: Any) -> None:
    """Names the nearest setting if one is unknown, such as another library's name."""
    for unknown in sorted(settings.keys() - SETTINGS.keys()):
        near = difflib.get_close_matches(unknown, SETTINGS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        if unknown in _SB3:
            counterpart = _SB3[unknown]
            hint = f" Its counterpart is {counterpart}." if counterpart else " It has no counterpart in ppo."
        raise TypeError(f"Config has no setting {unknown!r}.{hint} `ppo train --help` lists all settings.")
    _construct(self, *args, **settings)


Config.__init__ = _init  # type: ignore[method-assign]


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: abs(d - wanted))
