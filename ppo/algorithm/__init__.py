"""PPO itself: rollouts, advantages, objectives, and the update."""
