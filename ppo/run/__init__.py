"""The folder of a training run, its checkpoints and its reports."""
