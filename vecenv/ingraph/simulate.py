"""simulate: one step of envs and of an algorithm, fused into one graph operation."""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

from vecenv.ingraph.types import Algorithm, SimulatedStep, Transition
from vecenv.ingraph.vector_env import InGraphVectorEnv


def simulate(envs: InGraphVectorEnv, algorithm: Algorithm) -> SimulatedStep:
    """Steps every env once with the actions of an algorithm that learns from the results, as graph operations.

    Every tensor that the algorithm receives or that this function returns is a copy, which variables may hold
    indefinitely. `InGraphVectorEnv.rollout` returns the same steps without copies, once every `num_steps` steps.

    Args:
        envs: Envs over a vector env with `autoreset_mode="SameStep"`. Reset it before the first step.
        algorithm: See `Algorithm`. State that its methods keep between steps must be in variables. AutoGraph converts
            the methods, as it converts the function that calls this one.

    Raises:
        ValueError: If the autoreset mode is not SAME_STEP, the only mode in which each env makes a transition in every
            step.

    Example: see `examples/a2c.py`.
    """
    mode = envs.envs.autoreset_mode
    if mode != AutoresetMode.SAME_STEP:
        raise ValueError(
            f"simulate needs a transition from every env in every step, which autoreset_mode={mode.value!r} does not "
            "provide: build the envs with autoreset_mode='SameStep'"
        )
    observations, is_first = envs.observations_copied()
    algorithm.begin_episode(is_first)
    actions = algorithm.perform(observations)
    step, next_observations = envs.step_copied(actions)
    algorithm.experience(
        Transition(observations, actions, step.rewards, step.terminated, step.truncated, next_observations)
    )
    algorithm.end_episode(step.terminated | step.truncated)
    return step
