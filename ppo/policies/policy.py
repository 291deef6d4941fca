"""A trained policy as a function of NumPy arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from os import PathLike
from typing import Any

import gymnasium as gym
import numpy as np
import tensorflow as tf
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from ppo.model.agent import HOST, Agent, batch_specs
from ppo.model.normalize import RunningMoments
from ppo.model.observations import invalid
from ppo.run.checkpoint import LATEST, Checkpoints, check_actions, module_name, only_reward_moments
from ppo.run.folder import Run
from ppo.run.modules import config_to_load
from ppo.run.wrappers import named_wrappers
from ppo.runtime.graphs import graph_function
from ppo.runtime.startup import call_with_tensorflow
from vecenv.tree import can_hold, leaves, name_of, nest, pick


class Policy:
    """The policy and the value function of a run, with their normalizers. `load_policy` returns one.

    The policy itself, `value` and `log_prob` take one observation or a batch `[N, ...]`, nested like the space, and
    return one result or N results. They raise ValueError if a shape does not match the space. Only `value` needs the
    keys that only the value function reads (`critic_keys`).

    A recurrent policy remembers the observations of earlier calls: call `reset` when an episode ends.

    A policy can be pickled and copied, with its weights, so a function that makes an env may capture one. A worker that
    unpickles it imports TensorFlow.

    Attributes:
        observation_space: Space of one observation.
        action_space: Space of one action.
        memory: Memory of a recurrent policy before the next observation, `float32[N, S]`; None at the start of
            episodes. Assign an earlier value to go back to it.
    """

    def __init__(self, agent: Agent, *, return_scale: float | Callable[[], float] = 1.0):
        self.observation_space, self.action_space = agent.observations.space, agent.action_space
        self.memory: np.ndarray | None = None
        self._agent, self._return_scale = agent, return_scale  # by which training divides rewards
        self._rng = np.random.default_rng()
        critics = agent.observations.critic_paths
        # The leaf whose shape tells one observation from a batch.
        self._telling = next(path for path, _ in leaves(self.observation_space) if path not in critics)
        signature = agent.signature
        self._values = graph_function(self._value_in_graph, input_signature=signature)
        self._log_probs = graph_function(
            self._log_prob_in_graph, input_signature=[*signature, batch_specs(self.action_space)]
        )

    @property
    def description(self) -> str:
        """One line about the inputs, the layers and the number of parameters of the networks."""
        return self._agent.description

    def __call__(self, observations: Any, deterministic: bool = True) -> Any:
        """Returns actions, in the shape, dtype, bounds and nesting of the action space. Advances the memory.

        They are the most likely actions, or sampled as in training if `deterministic` is False.

        In a batch, an action mask may forbid every action: in NEXT_STEP mode, a vector env ignores the action for the
        last observation of an episode, whose mask is often empty. The action of such a row is arbitrary.

        Raises:
            ValueError: If the observations do not fit their space or are not finite, or N changed without a `reset`.
            NothingAllowed: If the action mask of a single observation forbids every action.
        """
        batch, single, memory = self._batch(observations)
        seed = None if deterministic else self._rng.integers(2**31, size=2, dtype=np.int32)
        actions, self.memory = self._agent.act(batch, memory, checked=single, seed=seed)

        def bounded(path: tuple) -> Any:
            space, values = pick(self.action_space, path), pick(actions, path)
            if isinstance(space, gym.spaces.Box):  # as the engine does for envs
                values = np.clip(values, space.low, space.high)
            return values[0] if single else values

        return nest(self.action_space, bounded)

    def value(self, observations: Any) -> np.ndarray:
        """Returns estimates of the discounted return, `float32[N]` or a scalar, in the units of the env's rewards.

        Actions are sampled, rewards are clipped as in training, and the return is discounted by the discount factor of
        the last update, which moves from `gamma` to `final_gamma`. Reads the memory but does not advance it: call this
        before acting.

        Raises:
            ValueError: As for a call, or if the observations lack a key that only the value function reads.
        """
        batch, single, memory = self._batch(observations, valued=True)
        with tf.device(HOST):
            values = self._values(batch, memory).numpy() * np.float32(self._scale())
        return values[0] if single else values

    def log_prob(self, observations: Any, actions: Any) -> np.ndarray:
        """Returns the log-probabilities of actions in nats, `float32[N]` or a scalar; for Box actions, log-densities.

        With `action_transform` "clip", this is the density of the Gaussian, before clipping to the bounds. Reads the
        memory but does not advance it: call this before acting, or restore `memory` first.

        Raises:
            ValueError: As for a call, or if an action is not in the action space.
            NothingAllowed: If the action mask of a single observation forbids every action.
        """
        batch, single, memory = self._batch(observations)
        if single:
            self._agent.check_mask(batch)

        def batched(path: tuple) -> np.ndarray:
            given, dtype = np.asarray(pick(actions, path)), pick(self.action_space, path).dtype
            values = given.astype(dtype)
            if not np.issubdtype(dtype, np.floating) and (values != given).any():
                raise TypeError  # the cast would turn 0.7 into 0
            return values[None] if single else values

        try:
            values = nest(self.action_space, batched)
        except (KeyError, IndexError, TypeError):  # a leaf of a nested action is missing or of the wrong type
            values = None
        if values is None or not batch_space(self.action_space, len(memory)).contains(values):
            kind = "an action" if single else f"a batch of {len(memory)} actions"
            raise ValueError(f"{actions!r} is not {kind} in {self.action_space}")
        with tf.device(HOST):
            log_probs = self._log_probs(batch, memory, values).numpy()
        return log_probs[0] if single else log_probs

    def seed(self, seed: int | None = None) -> None:
        """Seeds the sampling of actions. None: an unpredictable seed, as before the first call."""
        self._rng = np.random.default_rng(seed)

    def reset(self, ended: np.ndarray | None = None) -> None:
        """Clears a recurrent policy's memory of the envs whose episode `ended`, `bool[N]`, or of all envs."""
        if ended is None:
            self.memory = None
        elif self.memory is not None:
            self.memory = np.where(np.asarray(ended, np.bool_)[:, None], np.float32(0), self.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        weights = [variable.numpy() for variable in self._agent.variables]
        parts = self._agent.arguments, weights, self._scale(), self.memory, self._rng
        return call_with_tensorflow, (__name__, _unpickled.__name__, *parts)

    def _scale(self) -> float:
        return self._return_scale() if callable(self._return_scale) else self._return_scale

    def _value_in_graph(self, observations: Any, memory: tf.Tensor) -> tf.Tensor:
        return self._agent.step(observations, memory).values

    def _log_prob_in_graph(self, observations: Any, memory: tf.Tensor, actions: Any) -> tf.Tensor:
        outputs, distribution = self._agent.step(observations, memory).outputs, self._agent.distribution
        return distribution.log_prob(outputs, distribution.recover(actions))

    def _batch(self, observations: Any, *, valued: bool = False) -> tuple[Any, bool, np.ndarray]:
        """Returns the observations as a batch, whether there is just one, and the memory for them.

        Zeros replace the `critic_keys`, which may be missing, unless the batch is `valued`: read by the value function.
        """
        given, space = self._leaf(observations, self._telling), pick(self.observation_space, self._telling)
        rank = given.ndim - len(space.shape)
        if rank not in (0, 1):
            raise ValueError(f"observations of shape {given.shape} are neither in the space {space} nor a batch")
        num_envs = len(given) if rank else 1
        unread = frozenset() if valued else self._agent.observations.critic_paths

        def leaf(path: tuple) -> np.ndarray:
            space = pick(self.observation_space, path)
            if path in unread:
                return np.zeros([num_envs, *space.shape], space.dtype)
            values = self._leaf(observations, path)
            values = values if rank else values[None]
            if values.shape != (wanted := (num_envs, *space.shape)):
                name = name_of("observations", path)
                raise ValueError(f"{name} has shape {values.shape}, but the batch and the space {space} need {wanted}")
            return self._fitted(values, path)

        batch = nest(self.observation_space, leaf)
        if self.memory is None or not self._agent.state_size:
            return batch, not rank, self._agent.initial_state(num_envs)
        if len(self.memory) != num_envs:
            raise ValueError(
                f"a recurrent policy remembers {len(self.memory)} envs, but this call has {num_envs} observations: "
                "call reset() first"
            )
        return batch, not rank, self.memory

    def _leaf(self, observations: Any, path: tuple) -> np.ndarray:
        try:
            values = pick(observations, path)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{name_of('observations', path)} is missing, but the networks need it{self._hint(observations)}"
            ) from error
        try:
            given = np.asarray(values)
        except ValueError as error:
            raise ValueError(
                f"{name_of('observations', path)} cannot be converted to an array{self._hint(observations)}"
            ) from error
        if given.dtype.kind not in "biuf":
            name, hint = name_of("observations", path), self._hint(observations)
            raise ValueError(f"{name} has dtype {given.dtype}, which is not numeric{hint}")
        return given

    def _hint(self, observations: Any) -> str:
        """Returns what to add to an error about observations: which form was passed, and which is expected."""
        space = self.observation_space
        if isinstance(space, spaces.Dict) and isinstance(observations, np.ndarray):
            shape = observations.shape
            return f". Pass a dict with the keys {', '.join(map(repr, space))}, not an array of shape {shape}"
        members = space.spaces if isinstance(space, spaces.Tuple) else None
        if isinstance(observations, tuple) and (
            members is None
            or len(observations) != len(members)
            or (isinstance(observations[-1], dict) and not isinstance(members[-1], spaces.Dict))
        ):
            return ". `reset` and `step` return tuples: pass only the observation, their first element"
        return ""

    def _fitted(self, given: np.ndarray, path: tuple) -> np.ndarray:
        """Returns a leaf in the dtype of its space, or raises ValueError if its values would change."""
        space, name = pick(self.observation_space, path), name_of("observations", path)
        if path in self._agent.observations.mask_paths:
            return (given != 0).astype(space.dtype)
        if not can_hold(space.dtype, given):
            raise ValueError(f"{name} has values of dtype {given.dtype} that {space} cannot hold: do not scale them")
        with np.errstate(over="ignore"):  # checked next
            fitted = given.astype(space.dtype, copy=False)
        bad = invalid(space, fitted)
        if bad is not None and not np.issubdtype(space.dtype, np.inexact):
            bad &= fitted != 0  # the rows of agents that have left are 0
        if bad is not None and bad.any():
            raise ValueError(f"{name} holds {given[bad][0]}, which is not finite as float32 or is outside {space}")
        return fitted


def _unpickled(
    arguments: tuple, weights: list[np.ndarray], scale: float, memory: np.ndarray | None, rng: np.random.Generator
) -> Policy:
    with tf.device(HOST):
        agent = Agent(*arguments)
    for variable, values in zip(agent.variables, weights, strict=True):
        variable.assign(values)
    policy = Policy(agent, return_scale=scale)
    policy.memory, policy._rng = memory, rng
    return policy


def load_policy(
    run: Run | PathLike[str] | str,
    *,
    checkpoint: str | int = LATEST,
    group: str | None = None,
    trust_modules: bool = False,
) -> Policy:
    """Returns the policy of a run's newest checkpoint, or of another one.

    The env does not need to be installed. Nothing is unpickled.

    Args:
        run: The run folder, its name in "runs", or what `train` returned.
        checkpoint: "latest"; "best" for the checkpoint with the highest mean return of an evaluation; or the number of
            env-steps of a checkpoint that is kept.
        group: The group of agents whose policy to load; None if the run has one policy.
        trust_modules: Whether to allow the import of the module of the run's `network`.

    Raises:
        RunError: If there is no run, no such group, no such checkpoint that can be read, or no permission to import the
            run's network.

    Example:
        policy = ppo.load_policy("runs/20260101-120000-cheetah")
        action = policy(observation)
    """
    run = Run.open(run, trust_modules=trust_modules)
    config = run.read_config()
    if wrappers := named_wrappers(config):
        masks = ["vecenv.wrappers:ActionMaskObservation"] if config.info_masks else []
        arguments = f"wrappers={[*config.wrappers, *masks]}" + (f", **{config.env_kwargs}" if config.env_kwargs else "")
        warnings.warn(
            f"the policy of {run.path} takes the observations and returns the actions of an env with the wrappers "
            f"{', '.join(wrapper.name for wrapper in wrappers)}: use it with "
            f"`vecenv.make_single({config.env!r}, {arguments})`",
            stacklevel=2,
        )
    returns = RunningMoments((), name="moments")
    agent = load_agent(run, warnings.warn, checkpoint=checkpoint, team=run.team(group), returns=returns)
    return Policy(agent, return_scale=float(returns.deviation))


def load_agent(
    run: Run, warn: Callable[[str], None], *, checkpoint: str | int = LATEST, team: str | None = None,
    returns: RunningMoments | None = None,
) -> Agent:  # fmt: skip
    """Returns the networks and normalizers of a checkpoint; of the only team if `team` is None.

    Also restores the statistics of the reward normalizer into `returns`. Raises RunError if there is no readable
    checkpoint whose policy acts as it did in training. Calls `warn` for each damaged one.
    """
    config = config_to_load(run, env=False)
    run.check_begun()
    team = run.team(team)
    with tf.device(HOST):
        agent = Agent(config.of_team(1) if team else config, *run.read_spaces()[team])
    objects: dict[str, Any] = {module_name("agent", team): agent}
    if returns is not None:
        objects[module_name("learner", team)] = only_reward_moments(returns)
    Checkpoints(run.checkpoints, **objects).restore(
        checkpoint, warn=warn, partial=True, check=lambda path: check_actions(path, agent, team)
    )
    return agent
