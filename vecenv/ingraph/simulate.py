"""Simulate: one step of envs and of an algorithm, fused; for import from `vecenv.ingraph`."""

from __future__ import annotations

from typing import Any, Protocol

from gymnasium.vector import AutoresetMode

from vecenv.ingraph.types import Algorithm, SimulatedStep, Transition


class Simulable(Protocol):
    """What `simulate` uses of an `InGraphVectorEnv`."""

    envs: Any

    def begun(self) -> tuple[Any, Any]:
        """Returns copies of the newest observations, and whether each is an episode's first."""

    def step_copied(self, actions: Any) -> tuple[SimulatedStep, Any]:
        """Steps every env; returns copies of what follows, and of the observations that the actions led to."""


def simulate(envs: Simulable, algorithm: Algorithm) -> SimulatedStep:
    """Steps every env once with the actions of an algorithm that learns from what follows, as graph operations.

    Every tensor that the algorithm gets, and that is returned, is a copy: it may be kept as it is, in a `tf.Variable`
    or a `tf.TensorArray`, for as long as you like. (`tf.Variable.assign` shares memory with what it is given, so a view
    of the slab would change later.) `InGraphVectorEnv.rollout` has the same steps without a copy, every `num_steps`.

    Args:
        envs: An `InGraphVectorEnv`. Reset before the first step; of vector envs with `autoreset_mode="SameStep"`.
        algorithm: See `Algorithm`. What its methods keep from one step to the next must be in variables. AutoGraph
            converts them as it does the function that calls this one.

    Raises:
        ValueError: If autoreset is not SAME_STEP, as only then each step is a transition.

    Example: see `examples/a2c.py`.
    """
    mode = envs.envs.autoreset_mode
    if mode != AutoresetMode.SAME_STEP:
        raise ValueError(
            f"simulate makes each step a transition, but with autoreset_mode={mode.value!r} not every step is one: "
            "build the envs with autoreset_mode='SameStep'"
        )
    observations, began = envs.begun()
    algorithm.begin_episode(began)
    actions = algorithm.perform(observations)
    step, next_observations = envs.step_copied(actions)
    algorithm.experience(
        Transition(observations, actions, step.rewards, step.terminated, step.truncated, next_observations)
    )
    algorithm.end_episode(step.terminated | step.truncated)
    return step
