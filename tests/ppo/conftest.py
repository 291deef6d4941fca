"""Loads TensorFlow once for all tests of the trainer, without its log messages."""

from ppo.cli import load_tensorflow

load_tensorflow()
