"""PPO itself: rollouts, losses and the update."""
