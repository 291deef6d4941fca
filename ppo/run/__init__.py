"""The folder of a training run, its checkpoints, and what a run reports."""
