"""TensorFlow as ppo uses it: importing it, its compiled code for later runs, and graph functions."""
