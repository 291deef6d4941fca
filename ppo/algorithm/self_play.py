"""Self-play: a pool of frozen versions of a policy, from which its opponents are drawn."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ppo.config import Config, ConfigError
from ppo.model.agent import HOST, Agent
from ppo.seeds import opponent_rng


class Snapshots(tf.Module):
    """The pool. It always keeps the first snapshot; of the others, it keeps the newest.

    Args:
        config: The settings.
        agent: An agent with the same variables as those whose snapshots are taken.

    Attributes:
        count: Number of snapshots taken so far, a scalar.
        elo: Elo rating of the newest policy, in which a player that acts at random has a rating of 0.
    """

    def __init__(self, config: Config, agent: Agent):
        super().__init__(name="snapshots")
        self._size, self._seed = config.self_play_pool, config.seed
        width = sum(variable.shape.num_elements() for variable in agent.variables)
        with tf.device(HOST):
            # float64 holds float32 weights and float64 statistics exactly.
            self._values = tf.Variable(tf.zeros([self._size, width], tf.float64), trainable=False, name="values")
            self._steps = tf.Variable(tf.zeros([self._size], tf.int64), trainable=False, name="env_steps")
            self._ratings = tf.Variable(tf.zeros([self._size], tf.float64), trainable=False, name="ratings")
            self.count = tf.Variable(0, dtype=tf.int64, trainable=False, name="count")
            self.elo = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="elo")

    def __len__(self) -> int:
        return min(int(self.count), self._size)

    @property
    def newest(self) -> int:
        """Index of the newest snapshot."""
        return self._place(int(self.count) - 1)

    def add(self, agent: Agent, env_steps: int) -> None:
        """Adds the current policy."""
        place = self._place(int(self.count))
        flat = [variable.numpy().astype(np.float64).ravel() for variable in agent.variables]
        self._values[place].assign(np.concatenate(flat))
        self._steps[place].assign(env_steps)
        self._ratings[place].assign(float(self.elo))
        self.count.assign_add(1)

    def load(self, index: int, opponent: Agent) -> None:
        """Makes an agent act as a snapshot does."""
        values, begin = self._values[index].numpy(), 0
        for variable in opponent.variables:
            end = begin + variable.shape.num_elements()
            variable.assign(values[begin:end].reshape(variable.shape).astype(variable.dtype.as_numpy_dtype))
            begin = end

    def drawn(self, rollout: int) -> int:
        """Returns the index of the snapshot that is the opponent in a rollout; all are equally likely."""
        return int(opponent_rng(self._seed, rollout).integers(len(self)))

    def nearest(self, env_steps: float) -> int:
        """Returns the index of the snapshot that was taken nearest to a number of env-steps."""
        return int(np.abs(self._steps.numpy()[: len(self)] - env_steps).argmin())

    def rating(self, index: int) -> float:
        """Returns the Elo rating that the policy had when a snapshot was taken."""
        return float(self._ratings[index])

    def _place(self, number: int) -> int:
        """Returns the index of snapshot `number`, counted from 0."""
        return number if number < self._size else 1 + (number - 1) % (self._size - 1)


def opponent_rows(config: Config, num_agents: int) -> np.ndarray:
    """Returns which rows of a team an opponent plays, `bool[N * K]`: one side of some envs, in turns.

    Raises:
        ConfigError: If the envs do not have two agents.
    """
    if num_agents != 2:
        raise ConfigError(f"self_play needs two agents that share a policy, but {config.env} has {num_agents}")
    rows = np.zeros([config.num_envs, num_agents], np.bool_)
    played = np.arange(round(config.num_envs * (1.0 - (config.self_play or 0.0))))
    rows[played, played % num_agents] = True
    return rows.ravel()


def elo(scores: dict[str, float], ratings: dict[str, float], games: int) -> float:
    """Returns the Elo rating at which a player is expected to reach its total score against opponents.

    One more draw with each opponent keeps the rating finite.

    Args:
        scores: Fraction of the points against each opponent: 1 for a win and 0.5 for a draw.
        ratings: The rating of each opponent.
        games: Number of games against each opponent.
    """
    total = sum(score * games + 0.5 for score in scores.values()) / (games + 1)
    low, high = min(ratings.values()) - 4000.0, max(ratings.values()) + 4000.0
    for _ in range(60):
        middle = (low + high) / 2
        expected = sum(1.0 / (1.0 + 10.0 ** ((ratings[name] - middle) / 400.0)) for name in scores)
        low, high = (middle, high) if expected < total else (low, middle)
    return (low + high) / 2
