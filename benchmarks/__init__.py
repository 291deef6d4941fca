"""One question per file. `pytest benchmarks --benchmark-only` answers them; the README explains the results."""
