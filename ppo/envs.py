"""envs.py: the vector envs that a run trains on and is evaluated on."""

from __future__ import annotations

from gymnasium.vector import AutoresetMode

import vecenv
from ppo.config import Config
from vecenv.ingraph import slots_for


def training_envs(config: Config) -> vecenv.AsyncVectorEnv:
    """Makes the envs of a run, with memory for two rollouts."""
    return _make(config, config.num_envs, num_slots=slots_for(config.num_steps))


def evaluation_envs(config: Config, num_envs: int) -> vecenv.AsyncVectorEnv:
    """Makes separate envs of the same kind."""
    return _make(config, num_envs, num_slots=2)


def _make(config: Config, num_envs: int, *, num_slots: int) -> vecenv.AsyncVectorEnv:
    # Clipped in the worker: the learner needs the action that was sampled, the env one within its bounds.
    return vecenv.make(
        config.env,
        num_envs,
        backend=config.backend,
        num_workers=None if config.num_workers is None else min(config.num_workers, num_envs),
        vector_kwargs={
            "autoreset_mode": AutoresetMode.SAME_STEP,
            "num_slots": num_slots,
            "clip_actions": True,
            "float32_observations": True,
            "infos": False,
        },
    )
