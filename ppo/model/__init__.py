"""The policy and the value function."""
