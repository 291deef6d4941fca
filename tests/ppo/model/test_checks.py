"""Tests of ppo/model/checks.py."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import ppo
from ppo import TrainingDiverged
from ppo.model.checks import check_losses

LOSSES = {"policy_loss": 0.1, "value_loss": 0.2, "grad_norm": 0.3, "kl": 0.01, "gradient_steps": 4.0}
NAN = float("nan")


@pytest.mark.parametrize("name", ["policy_loss", "value_loss", "grad_norm", "kl"])
def test_a_loss_that_is_not_finite_stops_training(name):
    check_losses(LOSSES, 64)
    with pytest.raises(TrainingDiverged, match=f"{name} is nan in the update after 64 env-steps"):
        check_losses({**LOSSES, name: NAN}, 64)


class Scripted(gym.Env):
    """Returns `value`, and `other` at step 5."""

    action_space = spaces.Discrete(2)

    def __init__(self, space, value, other, final=False):
        self.observation_space, self.value, self.other, self.final = space, value, other, final

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.value, {}

    def step(self, action):
        self.t += 1
        return self.other if self.t == 5 else self.value, 1.0, self.t == (5 if self.final else 10), False, {}


@pytest.mark.parametrize(
    ("space", "value", "other", "message"),
    [
        (
            spaces.Box(-np.inf, np.inf, (1,), np.float64),
            np.ones(1),
            np.full(1, 1e40),
            r"env 0 returned 1e\+40, beyond the range of float32, in its {}observation at step 4 of",
        ),
        (spaces.Discrete(3), 1, 3, r"env 0 returned 3 in its {}observation, outside Discrete\(3\), at step 4 of"),
        (spaces.Discrete(2, start=5), 5, 0, r"env 0 returned 0 in its {}observation, outside Discrete\(2, start=5\)"),
        (
            spaces.MultiDiscrete([2, 2]),
            np.array([0, 1]),
            np.array([1, -1]),
            "returned -1 in its {}observation, outside",
        ),
    ],
)
@pytest.mark.parametrize("final", [False, True])
def test_an_observation_that_the_networks_cannot_read_ends_training(tmp_path, space, value, other, message, final):
    config = ppo.Config(env="x", num_envs=2, num_steps=8, minibatch_size=16, epochs=1, num_workers=0, eval_episodes=1)
    with pytest.raises(TrainingDiverged, match=message.format("final " if final else "")):
        ppo.train(config, lambda: Scripted(space, value, other, final), logdir=tmp_path, progress=False)


def test_an_update_without_a_gradient_step_is_checked_only_for_its_kl():
    unmeasured = {**LOSSES, "policy_loss": NAN, "value_loss": NAN, "grad_norm": NAN, "gradient_steps": 0.0}
    check_losses({**unmeasured, "kl": 0.0}, 64)
    with pytest.raises(TrainingDiverged, match="kl is nan"):
        check_losses({**unmeasured, "kl": NAN}, 64)
