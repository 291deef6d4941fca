"""ppo: a thin TensorFlow 2 PPO trainer on vecenv."""
