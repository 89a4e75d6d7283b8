"""Finds the smallest row count at which this machine computes every row bit for bit as in a wide call.

Matrix kernels may take another path for very few rows. Plain decoding and short verifies are padded to the count found
here; where no count passes, the bundle is refused, or reported as not exact with the largest difference.
"""

import numpy as np
from numpy.typing import NDArray

from .protocols import Head, Target

_CANDIDATES = (2, 3, 4, 5, 6, 8, 11)


def smallest_exact_rows(target: Target, head: Head, vocabulary: int) -> int | None:
    """Return the smallest safe row count, or None when none of the candidates is; leaves the target reset."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, target.max_rows).tolist()
    wide = row_outputs(target, head, tokens)
    safe = None
    for rows in reversed(_CANDIDATES):  # every wider candidate has to pass as well
        narrow = row_outputs(target, head, tokens[:rows])
        if not all(np.array_equal(a, b[:rows]) for a, b in zip(narrow, wide, strict=True)):
            break
        safe = rows
    target.reset()
    return safe


def largest_difference(target: Target, head: Head, vocabulary: int) -> float:
    """Return by how much a logit of a row differs at most between the candidates and a wide call."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, target.max_rows).tolist()
    wide = row_outputs(target, head, tokens)[-1]
    counts = [rows for rows in _CANDIDATES if rows <= len(tokens)]
    differences = [np.abs(row_outputs(target, head, tokens[:rows])[-1] - wide[:rows]).max() for rows in counts]
    target.reset()
    return float(max(differences))


def row_outputs(target: Target, head: Head, tokens: list[int]) -> list[NDArray[np.float32]]:
    """Copies of hidden rows, features and logits of `tokens` on an empty context."""
    target.reset()
    rows = target.verify(tokens)
    return [rows.hidden.copy(), rows.features.copy(), head(rows.hidden).values.copy()]
