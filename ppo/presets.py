"""Presets: tuned settings by name, and the settings of the 2017 project."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any

from ppo.config import Config, ConfigError

PRESETS: dict[str, Config] = {
    # For its speed: the pole is balanced within seconds.
    "cartpole": Config(
        env="CartPole-v1",
        total_steps=200_000,
        minibatch_size=256,
        epochs=10,
        learning_rate=1e-3,
        final_gamma=0.99,
        kl_limit=0.08,
        value_coef=0.5,
        max_grad_norm=0.5,
        recompute_advantages=False,
    ),
    # With a floor of -1.5, the policy needs the noise to walk: the tracking errors of the deterministic policy are
    # larger than those in training.
    "quadruped": Config(
        env="vecenv.robots:Quadruped-v0",
        total_steps=2_500_000,
        minibatch_size=512,
        epochs=5,
        learning_rate=1e-3,
        lr_schedule="kl_adaptive",
        final_gamma=0.99,
        kl_target=0.02,
        entropy_coef=0.0,
        max_grad_norm=0.5,
        normalize_advantages=True,
        activation="relu",
        policy_layers=(128, 128),
        value_layers=(128, 128),
        critic_keys=("critic",),
        initial_log_std=-0.8,
        min_log_std=-2.2,
        info_metrics=("error/velocity", "error/yaw"),
    ),
    # Swimming pays off late, so the return spans the whole episode, and a rollout is longer than an episode.
    "swimmer": Config(
        env="Swimmer-v5",
        num_envs=4,
        num_steps=1024,
        minibatch_size=256,
        epochs=10,
        learning_rate=6e-4,
        gamma=0.9999,
        gae_lambda=0.98,
        kl_limit=0.08,
        entropy_coef=0.0,
        max_grad_norm=0.5,
        normalize_advantages=True,
        initial_log_std=-0.5,
        min_log_std=-10.0,
    ),
}
"""Settings by name, tuned for current versions of the tasks. Atari games and the presets `paper/NAME` follow below."""

# Settings for Atari games without sticky actions, chosen for the time that Pong takes on two CPU cores. They differ
# from CleanRL's ppo_atari.py (Huang et al., 2022) in these points:
# - The network sees 52 x 52 pixels instead of 84 x 84, with 28% of the operations. Images are normalized.
# - A rollout has 32 x 64 steps instead of 8 x 128, and an update has three epochs instead of four.
# - The learning rate follows the KL, as in rl_games, the clip range is 0.2 instead of 0.1, and the value loss is not
#   clipped.
# - A lost life ends an episode, but the policy has to press FIRE itself to serve again, as in evaluations. CleanRL
#   presses NOOP and FIRE after each lost life.
# - A game begins with FIRE and up to 28 idle frames or, if it has no FIRE, with up to 29 idle frames. CleanRL begins
#   with 1 to 30 idle frames and then FIRE.
# - The frames before an episode are black. CleanRL repeats the first frame.
_ATARI = Config(
    env_kwargs={"repeat_action_probability": 0.0, "life_loss_info": True, "img_height": 52, "img_width": 52},
    eval_env_kwargs={"life_loss_info": False, "reward_clipping": False},
    total_steps=1_000_000,
    num_envs=32,
    num_steps=64,
    minibatch_size=256,
    epochs=3,
    learning_rate=5e-4,
    lr_schedule="kl_adaptive",
    final_gamma=0.99,
    kl_target=0.02,
    value_coef=0.5,
    entropy_coef=0.01,
    max_grad_norm=0.5,
    normalize_advantages=True,
    normalize_rewards=False,
    policy_layers=(),  # the policy and the values are linear functions of the CNN's features
    value_layers=(),
)

PRESETS |= {
    "pong": dataclasses.replace(_ATARI, env="vecenv.atari:Atari/Pong-v5"),
    "breakout": dataclasses.replace(
        _ATARI,
        env="vecenv.atari:Atari/Breakout-v5",
        # A deterministic policy that never presses FIRE again would wait for 30 minutes of play, ale-py's limit. This
        # is the limit of Mnih et al. (2015): 5 minutes at 60 frames per second.
        eval_env_kwargs={**_ATARI.eval_env_kwargs, "max_num_frames_per_episode": 18_000},
    ),
}

_PAPER = Config(
    num_envs=30,
    num_steps=200,
    epochs=25,
    minibatch_size=30 * 200,
    learning_rate=1e-4,
    lr_schedule="constant",
    adam_epsilon=1e-8,
    gamma=0.995,
    gae_lambda=1.0,
    objective="kl_penalty",
    kl_limit=None,
    value_coef=1.0,
    entropy_coef=0.0,
    max_grad_norm=1e6,  # never clips
    normalize_advantages=True,
    recompute_advantages=False,
    observation_clip=5.0,
    policy_layers=(200, 100),
    value_layers=(200, 100),
    activation="relu",
    policy_output_gain=0.1,
    initial_log_std=math.log(0.35),
    min_log_std=-10.0,
)


def _paper(env: str, total_steps: int, num_steps: int = 200, **others: Any) -> Config:
    sizes = {"num_steps": num_steps, "minibatch_size": others.pop("minibatch_size", 30 * num_steps)}
    return dataclasses.replace(_PAPER, env=env, total_steps=total_steps, **sizes, **others)


PRESETS |= {
    "paper/pendulum": _paper("Pendulum-v1", 1_000_000, minibatch_size=1000),
    "paper/cartpole": _paper(  # without continuous actions
        "CartPole-v1", 200_000, num_steps=50, initial_log_std=Config.initial_log_std, min_log_std=Config.min_log_std
    ),
    "paper/reacher": _paper("Reacher-v5", 5_000_000, num_steps=100, gamma=0.985),
    "paper/cheetah": _paper("HalfCheetah-v5", 10_000_000, num_steps=1000, gamma=0.99, final_gamma=0.99),
    "paper/walker": _paper("Walker2d-v5", 10_000_000),
    "paper/hopper": _paper("Hopper-v5", 10_000_000, num_steps=400),
    "paper/ant": _paper("Ant-v5", 20_000_000),
    "paper/humanoid": _paper("Humanoid-v5", 50_000_000, num_steps=400),
}
"""The settings of 2017, from batch-ppo's configs.py, on current versions of the tasks.

An update used 30 or 60 episodes in 2017 and uses a fixed number of steps here. Other differences remain: rewards are
divided by the standard deviation of the return instead of the reward, truncated episodes are bootstrapped, the mean of
the policy is not squashed by tanh, and its standard deviation is an exponential instead of a softplus.
"""


def preset(name: str) -> Config:
    """Returns the preset with the given name.

    Raises:
        ConfigError: If there is no such preset. The message names the nearest one.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown preset {name!r}: use one of {', '.join(sorted(PRESETS))}.{hint}")
    return PRESETS[name]
