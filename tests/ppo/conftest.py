"""TensorFlow is loaded once for all tests of the trainer, without its notes."""

from ppo.cli import load_tensorflow

load_tensorflow()
