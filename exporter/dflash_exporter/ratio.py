"""Which matrices int4 leaves at 8 bits when only a share of the weights is to have 4.

Knows NNCF's criterion. Reads every candidate once, block by block, before a graph is built.
"""

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter

import numpy as np

from .checkpoint import Tensor
from .formats import Format


def with_ratio(weight_format: Format, tensors: Mapping[str, Tensor]) -> Format:
    """Return the format with the names of the tensors that stay at 8 bits, the most sensitive ones.

    As in NNCF, layers get 4 bits from the least sensitive on, until one more would exceed the share.
    """
    candidates = {name: t for name, t in tensors.items() if len(t.shape) == 2}
    candidates = {name: t for name, t in candidates.items() if weight_format.may_be_4_bits(name, t.shape)}
    if weight_format.int4.ratio == 1 or not candidates:
        return weight_format
    sizes = {name: t.shape[0] * t.shape[1] for name, t in candidates.items()}
    room = weight_format.int4.ratio * sum(sizes.values())
    ranked = sorted(((_sensitivity(t), name) for name, t in candidates.items()), key=itemgetter(0))
    kept = set(candidates)
    for _, name in ranked:
        room -= sizes[name]
        if room < 0:
            break
        kept.remove(name)
    return replace(weight_format, at_8_bits=frozenset(kept))


def _sensitivity(tensor: Tensor) -> float:
    """NNCF's measure without data: the inverse of the largest mean squared error that a row has at 8 bits.

    The error of a row is that of rounding to 255 steps between its smallest and largest value, step² / 12.
    """
    widest = max(float(np.ptp(rows.astype(np.float32), axis=1).max()) for _, rows in tensor.blocks())
    return 1 / ((widest / 255) ** 2 / 12 + float(np.finfo(np.float32).eps))
