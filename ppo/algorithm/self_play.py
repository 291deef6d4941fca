"""Self-play: a pool of frozen versions of a policy, from which its opponents are drawn."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ppo.config import Config, ConfigError
from ppo.model.agent import HOST, Agent
from ppo.seeds import opponent_rng


class Snapshots(tf.Module):
    """The pool: the first snapshot, the newest one, and others spread over the training between them.

    Args:
        config: The settings.
        agent: An agent of the same architecture.

    Attributes:
        elo: Rating of the policy in its last evaluation; random play is rated 0. NaN before the first evaluation.
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
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False, name="count")
            self.elo = tf.Variable(np.nan, dtype=tf.float64, trainable=False, name="elo")

    def __len__(self) -> int:
        return int(self._count)

    @property
    def env_steps(self) -> np.ndarray:
        """The number of env-steps at which each snapshot was taken, `int64[len(self)]`, in ascending order."""
        return self._steps.numpy()[: len(self)]

    def add(self, agent: Agent, env_steps: int) -> None:
        """Adds the current policy. If the pool is full, drops the snapshot whose neighbors are closest in time."""
        if len(self) == self._size:
            steps = self.env_steps
            gaps = [*(steps[2:] - steps[:-2]), env_steps - steps[-2]]
            dropped = 1 + int(np.argmin(gaps))
            for column in (self._values, self._steps, self._ratings):
                column[dropped:-1].assign(column[dropped + 1 :])
            self._count.assign_sub(1)
        place = len(self)
        flat = [variable.numpy().astype(np.float64).ravel() for variable in agent.variables]
        self._values[place].assign(np.concatenate(flat))
        self._steps[place].assign(env_steps)
        self._ratings[place].assign(float(self.elo))
        self._count.assign_add(1)

    def load(self, index: int, opponent: Agent) -> None:
        """Copies a snapshot into `opponent`."""
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
        return int(np.argmin(np.abs(self.env_steps - env_steps)))

    def rating(self, index: int) -> float:
        """Returns the rating in the last evaluation before a snapshot was taken; NaN if there was none."""
        return float(self._ratings[index])


def opponent_rows(config: Config, num_agents: int) -> np.ndarray:
    """Returns which rows an opponent plays, `bool[N * 2]`: one seat in each of the first envs, alternating.

    Raises:
        ConfigError: If the envs do not have two agents.
    """
    if num_agents != 2:
        raise ConfigError(f"self_play needs two agents that share a policy, but {config.env} has {num_agents}")
    rows = np.zeros([config.num_envs, num_agents], np.bool_)
    played = np.arange(config.num_opponent_envs)
    rows[played, played % num_agents] = True
    return rows.ravel()


def elo(scores: dict[str, float], ratings: dict[str, float], games: int) -> float:
    """Returns the rating at which the expected total score equals the achieved one (Elo, 1978).

    A virtual draw with each opponent keeps the rating finite.

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
