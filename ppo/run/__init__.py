"""What a training run writes to disk, and what it reports."""
