"""One question per file. `pytest benchmarks --benchmark-only` answers them; see the README for how to read them."""
