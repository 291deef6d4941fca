"""The schedules of the learning rate, the discount factor and the KL penalty."""

from __future__ import annotations

import tensorflow as tf

from ppo.config import Config


def learning_rate_at(config: Config, update: int) -> float:
    """Returns the scheduled learning rate: constant, or falling linearly to 0 after the last update."""
    if config.lr_schedule != "linear":
        return config.learning_rate
    return config.learning_rate * max(0.0, 1.0 - update / config.num_updates)


def gamma_at(config: Config, update: int) -> float:
    """Returns the scheduled discount factor: linear from `gamma` to `final_gamma`, which it reaches at the end.

    A factor that rises during training is from François-Lavet et al. (2015, arXiv 1512.02011).
    """
    final = config.final_gamma
    if final is None:
        final = 0.995 if config.gamma == Config.gamma else config.gamma
    return config.gamma + (final - config.gamma) * min(1.0, update / config.num_updates)


def schedule_change(before: Config, config: Config, update: int) -> str | None:
    """Returns a sentence on how a new `total_steps` changes the schedules of a resumed run; None if it does not."""
    changes = []
    for name, scheduled, digits in (("learning_rate", learning_rate_at, 3), ("gamma", gamma_at, 5)):
        now, then = scheduled(config, update), scheduled(before, update)
        if now != then:
            changes.append(f"{name} continues at {now:.{digits}g} instead of {then:.{digits}g}")
    if not changes:
        return None
    return (
        f"total_steps is {config.total_steps} instead of {before.total_steps}, so the schedules change: "
        f"{', and '.join(changes)}"
    )


def effective_rate(config: Config, *, scheduled: tf.Tensor, base: tf.Tensor) -> tf.Tensor:
    """Returns the learning rate of an update: the scheduled rate, adapted to the KL if so configured.

    Args:
        config: The settings.
        scheduled: The rate of the schedule, which "kl_adaptive" ignores.
        base: The result of `adapted_base_rate` in the previous update; `config.learning_rate` in the first update.
    """
    if config.lr_schedule == "kl_adaptive":
        return base
    if config.kl_limit is None:
        return scheduled
    return tf.where(base < config.learning_rate, scheduled * (base / config.learning_rate), scheduled)


def adapted_base_rate(config: Config, base: tf.Tensor, kl: tf.Tensor) -> tf.Tensor:
    """Returns the next update's base rate for the base rate and the KL of this update.

    With "kl_adaptive", as in rl_games, the rate is divided by 1.5 if the KL exceeds twice the target, and multiplied by
    1.5 below half the target. It stays between 1e-6 and 1e-2, or within wider bounds that include the initial rate.

    Otherwise, the rate is divided by 1.5 if the KL exceeds the limit, if there is one. Below half the limit, it is
    multiplied by 1.5, up to the initial rate. It never falls below 1e-6 or, if that is less, the initial rate, because
    it could not recover from 0.
    """
    initial = config.learning_rate
    if config.lr_schedule == "kl_adaptive":
        most_kl, least_kl, highest = 2.0 * config.kl_target, 0.5 * config.kl_target, max(1e-2, initial)
    elif config.kl_limit is not None:
        most_kl, least_kl, highest = config.kl_limit, 0.5 * config.kl_limit, initial
    else:
        return base
    slower = tf.where(kl > most_kl, tf.maximum(base / 1.5, min(1e-6, initial)), base)
    return tf.where(kl < least_kl, tf.minimum(base * 1.5, highest), slower)


def adapted_penalty(penalty: tf.Tensor, kl: tf.Tensor, *, kl_target: float) -> tf.Tensor:
    """Returns the KL penalty of the next update.

    It is multiplied by 1.5 if the KL exceeds 1.3 times its target, and divided by 1.5 below 0.7 times. The
    penalty stays between 1e-6 and 1e6, so it can always recover.
    """
    stronger = tf.where(kl > 1.3 * kl_target, tf.minimum(penalty * 1.5, 1e6), penalty)
    return tf.where(kl < 0.7 * kl_target, tf.maximum(penalty / 1.5, 1e-6), stronger)
