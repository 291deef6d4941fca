"""Config: every setting of a training run with its default, its unit and its check."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import Literal

from ppo.ranges import RANGES, Range

ADDED = ("video_interval", "histograms", "overlap", "halves", "kl_limit")
"""Settings that runs made by version 0.1 do not name: they have the defaults."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work; the message says what would."""


@dataclass(frozen=True)
class Config:
    """Settings of one training run."""

    env: str = "HalfCheetah-v5"
    """Gymnasium id of the env, also as "module:id"."""

    total_steps: int = 1_000_000
    """Env-steps to train for, all envs together. The last rollout is finished, so a few more are taken. The rollout
    that initializes the normalizers of a new run is not counted."""

    num_envs: int = 64
    """Envs that are stepped together (N)."""

    num_workers: int | None = None
    """Worker processes for the envs; 0 for none, as for a debugger; None for what is fastest: one per core, but none
    for MuJoCo tasks, which this process steps in C++ on a thread per core."""

    backend: Literal["auto", "python"] = "auto"
    """"auto" steps Gymnasium's MuJoCo tasks, v5, in C++; "python" uses the envs themselves. Results are the same."""

    num_steps: int = 32
    """Steps of every env between two updates (T); the batch has num_envs * num_steps samples."""

    epochs: int = 10
    """Passes over the batch in one update."""

    minibatch_size: int = 64
    """Samples per gradient step (B); must divide num_envs * num_steps."""

    learning_rate: float = 3e-4
    """Adam's step size at the start."""

    lr_schedule: Literal["linear", "constant", "kl_adaptive"] = "linear"
    """Course of the learning rate: linear to 0 over total_steps; constant; or from update to update such that an
    update's KL stays near kl_target."""

    adam_epsilon: float = 1e-5
    """Adam's epsilon, added to the root of the second moment."""

    overlap: bool = False
    """Collect the next rollout while the update runs, with the policy from before it."""

    halves: bool | None = None
    """Step the envs in two halves, one while the policy serves the other; None for where that is faster: Ant, Humanoid
    and HumanoidStandup, v5, in C++ in this process."""

    gamma: float = 0.99
    """Discount per step."""

    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation; 0 looks one step ahead, 1 to the end of the episode."""

    objective: Literal["clip", "kl_penalty"] = "clip"
    """What keeps the new policy near the old: "clip", PPO's clipped ratio; or "kl_penalty", BatchPPO's penalty on the
    KL, which adapts to kl_target, with a squared cutoff."""

    clip_range: float = 0.2
    """How far the probability ratio may leave 1 before its gradient is cut, with objective "clip"."""

    clip_schedule: Literal["constant", "linear"] = "constant"
    """Course of clip_range: constant, or linear to 0 over total_steps."""

    kl_target: float = 0.01
    """KL of an update, in nats, that the penalty and the adaptive learning rate aim at."""

    kl_init_penalty: float = 1.0
    """Weight of the KL penalty at the start."""

    kl_cutoff_factor: float = 2.0
    """How many kl_targets a minibatch's KL may reach before the squared cutoff sets in."""

    kl_cutoff_coef: float = 1000.0
    """Weight of the squared cutoff."""

    kl_stop: float | None = None
    """KL of a minibatch, in nats, at which the rest of an update is left away; None for never."""

    kl_limit: float | None = 0.08
    """KL of an update, in nats, above which the learning rate is reduced until the KL is below half of
    it; None for no limit. Ignored by the schedule kl_adaptive, which follows kl_target."""

    value_coef: float = 0.25
    """Weight of the value loss beside the policy loss."""

    value_clip_range: float | None = None
    """How far a value may move from that at collection before its error is no longer lessened by it; None for no limit,
    which learns better (Andrychowicz et al., 2021)."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    max_grad_norm: float = 0.5
    """Global norm to which a gradient is clipped."""

    normalize_advantages: bool = True
    """Shift and scale the advantages of each minibatch to mean 0, deviation 1."""

    recompute_advantages: bool = True
    """Compute the advantages anew before each epoch, with the value function as it is then."""

    normalize_observations: bool = True
    """Shift and scale observations by their running mean and deviation."""

    normalize_rewards: bool = True
    """Divide rewards by the running deviation of the discounted return."""

    normalize_values: bool = False
    """Let the value function learn targets shifted and scaled by their running mean and deviation."""

    observation_clip: float = 10.0
    """Bound on normalised observations."""

    reward_clip: float = 10.0
    """Bound on normalised rewards."""

    policy_layers: tuple[int, ...] = (64, 64)
    """Units of the policy's hidden layers."""

    value_layers: tuple[int, ...] = (64, 64)
    """Units of the value function's hidden layers."""

    activation: Literal["tanh", "relu", "elu"] = "tanh"
    """Activation of the hidden layers."""

    share_layers: bool = False
    """One network of policy_layers with two heads, instead of one for the policy and one for the value function."""

    recurrent: Literal["none", "gru", "lstm"] = "none"
    """Memory before the layers, for envs that do not show all of their state: carried through an episode, trained on
    the num_steps of each env in their order."""

    recurrent_units: int = 64
    """Units of the memory."""

    network: str | None = None
    """A network of your own, "module:function", see docs/ppo.md; it takes the place of all the layers above."""

    policy_output_gain: float = 0.01
    """Scale of the initial weights of the policy's last layer."""

    action_transform: Literal["clip", "rescale", "tanh"] = "clip"
    """How a Gaussian sample becomes an action of a Box: clipped to its bounds; [-1, 1] rescaled to the bounds, then
    clipped; or tanh of it, rescaled."""

    initial_log_std: float = -0.5
    """Logarithm of the Gaussian policy's standard deviation at the start, for Box actions."""

    state_dependent_std: bool = False
    """Let the policy network give the deviation too, instead of one that is the same in all states."""

    seed: int = 0
    """Seed of the run. Seeds of envs, evaluations, initial weights, sampling and shuffling are derived from it;
    runs with different seeds are independent."""

    report_interval: int = 10_000
    """Env-steps between two lines of metrics.jsonl."""

    checkpoint_interval: int = 200_000
    """Env-steps between two checkpoints; there is always one at the end."""

    eval_interval: int | None = None
    """Env-steps between two evaluations while training; None for one at the end only."""

    eval_episodes: int = 20
    """Episodes of an evaluation."""

    video_interval: int | None = None
    """Env-steps between two videos of the deterministic policy, kept in RUN/videos and shown by TensorBoard; None for
    none. The run waits for each, and a worker holds its frames, 0.7 MB each where they are 480 x 480."""

    histograms: bool = False
    """Give TensorBoard a histogram of each trained variable every checkpoint_interval."""

    step_timeout_s: float | None = 300.0
    """Seconds after which an env that does not answer is an error; None to wait for ever."""

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), hint))
        for name, legal in RANGES.items():
            self._check_range(name, legal, ", or None" if may_be_none(name) else "")
        for name, words in choices().items():
            if getattr(self, name) not in words:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: it must be {_either(words)}")
        if self.normalize_advantages:
            self._check_range("minibatch_size", Range(2), or_else=", or normalize_advantages off")
        if self.num_workers is not None and self.num_workers > self.num_envs:
            raise ConfigError(
                f"num_workers={self.num_workers} is more than num_envs={self.num_envs}: "
                f"use at most {self.num_envs}, or None for one per core"
            )
        if self.halves and (self.overlap or self.num_workers or self.num_envs < 2):
            raise ConfigError("halves is for two or more envs that this process steps: without num_workers, or overlap")
        if self.batch_size % self.minibatch_size:
            raise ConfigError(
                f"minibatch_size={self.minibatch_size} does not divide the batch of num_envs * num_steps = "
                f"{self.num_envs} * {self.num_steps} = {self.batch_size}: the nearest size that does is "
                f"{_nearest_divisor(self.batch_size, self.minibatch_size)}"
            )
        if self.share_layers and not self.policy_layers:
            raise ConfigError("share_layers shares policy_layers, but there are none: name some")
        if self.network is not None and self.normalize_values:
            raise ConfigError("normalize_values changes the last layer, which it does not know of a --network")
        if self.recurrent != "none":
            self._check_recurrent()

    def _check_range(self, name: str, legal: Range, or_else: str = "") -> None:
        value = getattr(self, name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if any(number not in legal for number in numbers):
            raise ConfigError(f"{name}={value!r} is out of range: it must be {legal}{or_else}")

    def _check_recurrent(self) -> None:
        if self.network is not None:
            raise ConfigError("--network and --recurrent exclude each other: a network of your own has no memory")
        if self.minibatch_size % self.num_steps or self.num_envs % (self.minibatch_size // self.num_steps):
            sizes = [self.num_steps * n for n in range(1, self.num_envs + 1) if self.num_envs % n == 0]
            raise ConfigError(
                f"minibatch_size={self.minibatch_size} does not hold whole sequences of num_steps={self.num_steps} of "
                f"as many envs as divide num_envs={self.num_envs}, which a recurrent policy needs: use one of "
                f"{', '.join(map(str, sizes))}"
            )

    @property
    def batch_size(self) -> int:
        """Samples of one update, N * T."""
        return self.num_envs * self.num_steps

    @property
    def num_minibatches(self) -> int:
        """Gradient steps of one epoch."""
        return self.batch_size // self.minibatch_size

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
        return -(-self.total_steps // self.batch_size)

    @classmethod
    def from_json(cls, values: dict) -> Config:
        """Makes a config from what `dataclasses.asdict` gave and JSON kept."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"unknown settings {unknown}: they come from another version of ppo")
        if missing := sorted(known - set(values) - set(ADDED)):
            raise ConfigError(
                f"the settings {missing} are missing: the file is damaged, or from another version of ppo"
            )
        return cls(**values)


def _typed(name: str, value: typing.Any, hint: typing.Any) -> typing.Any:
    """Returns a value as its field's type has it: numpy's numbers as Python's, lists as tuples.

    Raises:
        ConfigError: If it is of another type.
    """
    value = value.item() if hasattr(value, "item") and not getattr(value, "shape", ()) else value
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal or (value is None and option is type(None)):
            return value
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(_typed(name, item, int) for item in value)
        if option is float and type(value) in (int, float):
            return float(value)
        if option in (bool, int, str) and type(value) is option:  # for a bool is an int to isinstance
            return value
    wanted = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ConfigError(f"{name}={value!r} is of the wrong type: it must be {wanted}")


@functools.cache  # or the presets would take a quarter of a second to import
def _hints() -> dict[str, typing.Any]:
    """Returns the type of each setting."""
    return typing.get_type_hints(Config)


def may_be_none(name: str) -> bool:
    """Returns whether a setting may be None."""
    return type(None) in typing.get_args(_hints()[name])


def choices() -> dict[str, tuple[str, ...]]:
    """Returns the settings that are one of a few words, with these words."""
    hints = _hints()
    return {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is Literal}


def _either(words: tuple[str, ...]) -> str:
    near = ", ".join(words[:-1])
    return f"{near} or {words[-1]}"


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return min(divisors, key=lambda d: abs(d - wanted))
