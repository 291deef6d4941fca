"""One question per file. `pytest benchmarks --benchmark-only` runs them; docs/performance.md shows the answers."""
