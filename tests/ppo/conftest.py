"""TensorFlow is loaded once for all tests of the trainer, without its notes."""

from ppo.commands import load_tensorflow

load_tensorflow()
