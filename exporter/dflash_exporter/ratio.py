"""Which matrices int4 leaves at 8 bits when only a share of the weights is to have 4.

Knows the criterion. Reads every candidate once, block by block, before a graph is built.
"""

import os
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
    how = os.environ.get("CRIT", "nncf")
    worst = 0.0
    num = den = 0.0
    for _, rows in tensor.blocks():
        rows = rows.astype(np.float32)
        if how == "nncf":
            step = (rows.max(axis=1) - rows.min(axis=1)) / 255
            worst = max(worst, float(step.max() ** 2 / 12))
        else:
            g = rows.reshape(len(rows), -1, 64)
            s = np.abs(g).max(-1, keepdims=True) / 7.5
            num += float(((np.round(g / np.maximum(s, 1e-9)) * s - g) ** 2).sum())
            den += float((g**2).sum())
    return 1 / (worst + 1e-7) if how == "nncf" else num / den if how == "rel" else num
