"""Resets and steps a vector env as TensorFlow graph operations on shared memory."""

from vecenv.ingraph.simulate import simulate
from vecenv.ingraph.types import Algorithm, Rollout, SimulatedStep, Step, Transition
from vecenv.ingraph.vector_env import InGraphVectorEnv, slots_for

__all__ = ["Algorithm", "InGraphVectorEnv", "Rollout", "SimulatedStep", "Step", "Transition", "simulate", "slots_for"]
