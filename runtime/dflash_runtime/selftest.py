"""Finds the smallest row count at which this machine computes every row bit for bit as in a wide call.

Matrix kernels may take another path for very few rows. Plain decoding and short verifies are padded to the count found
here; where no count passes, the bundle is refused, or reported as not exact with the largest difference.
"""

from collections.abc import Iterator

import numpy as np
from dflash_graphs.specs import CHUNK
from numpy.typing import NDArray

from .protocols import Head, Target

_CANDIDATES = (1, 2, 3, 4, 5, 6, 8, 11)
_START = 13  # where the calls of few rows begin
_Outputs = list[NDArray[np.float32]]


def smallest_exact_rows(target: Target, head: Head, vocabulary: int, fewest: int) -> int | None:
    """Return the smallest safe row count from `fewest` up, or None when none is safe; leaves the target reset."""
    safe = None
    for rows, wide, narrow in _comparisons(target, head, vocabulary):
        if rows < fewest or not all(map(np.array_equal, narrow, wide)):  # every wider candidate has to pass as well
            break
        safe = rows
    target.reset()
    return safe


def largest_difference(target: Target, head: Head, vocabulary: int) -> float:
    """Return by how much a logit of a row differs at most between a wide call and narrow ones of two rows or more."""
    pairs = list(_comparisons(target, head, vocabulary))
    target.reset()
    return max(float(np.abs(narrow[-1] - wide[-1]).max()) for rows, wide, narrow in pairs if rows > 1)


def _comparisons(target: Target, head: Head, vocabulary: int) -> Iterator[tuple[int, _Outputs, _Outputs]]:
    """Yield each candidate, the last first, with the outputs of its rows in a wide call and in one of their own.

    The wide call is a piece of a prefill, and the others begin before a chunk boundary, which the longer ones cross.
    All stand late: the first rows of a context attend to hardly more than themselves.
    """
    tokens = np.random.default_rng(0).integers(0, vocabulary, target.prefill_rows).tolist()
    target.reset()
    wide = _outputs(target, head, tokens, slice(_START, _START + max(_CANDIDATES)))
    target.reset()
    target.verify(tokens[:CHUNK])
    target.commit(_START)
    for rows in reversed(_CANDIDATES):
        narrow = _outputs(target, head, tokens[_START : _START + rows], slice(rows))
        yield rows, [values[:rows] for values in wide], narrow


def row_outputs(target: Target, head: Head, tokens: list[int]) -> _Outputs:
    """Copies of hidden rows, features and logits of `tokens`, on an empty context."""
    target.reset()
    return _outputs(target, head, tokens, slice(len(tokens)))


def _outputs(target: Target, head: Head, tokens: list[int], part: slice) -> _Outputs:
    rows = target.verify(tokens)
    hidden = rows.hidden[part]
    return [hidden.copy(), rows.features[part].copy(), head(hidden).copy()]
