"""Tests of ppo/model/checks.py."""

import pytest

from ppo import TrainingDiverged
from ppo.model.checks import check_losses

LOSSES = {"policy_loss": 0.1, "value_loss": 0.2, "grad_norm": 0.3, "kl": 0.01, "gradient_steps": 4.0}
NAN = float("nan")


@pytest.mark.parametrize("name", ["policy_loss", "value_loss", "grad_norm", "kl"])
def test_a_loss_that_is_not_finite_stops_training(name):
    check_losses(LOSSES, 64)
    with pytest.raises(TrainingDiverged, match=f"{name} is nan in the update after 64 env-steps"):
        check_losses({**LOSSES, name: NAN}, 64)


def test_an_update_without_a_gradient_step_is_checked_only_for_its_kl():
    unmeasured = {**LOSSES, "policy_loss": NAN, "value_loss": NAN, "grad_norm": NAN, "gradient_steps": 0.0}
    check_losses({**unmeasured, "kl": 0.0}, 64)
    with pytest.raises(TrainingDiverged, match="kl is nan"):
        check_losses({**unmeasured, "kl": NAN}, 64)
