"""Initial weights."""

from __future__ import annotations

import numpy as np


def orthogonal(rows: int, columns: int, gain: float, rng: np.random.Generator) -> np.ndarray:
    """Returns a random `float32[rows, columns]` whose shorter side is orthonormal, times `gain` (Saxe et al., 2013)."""
    gaussian = rng.normal(size=(max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(gaussian)
    q *= np.sign(np.diag(r))
    return (gain * (q if rows >= columns else q.T)).astype(np.float32)
