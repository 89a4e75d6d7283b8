"""Where the rows of a call stand: rotary tables and attention masks.

Knows positions. Does not know where keys and values are kept.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .specs import RopeSpec
from .vocabulary import Dim, Ops, Value

FAR = 1 << 30  # a key position nothing may see


@dataclass(frozen=True)
class Positions:
    """What all layers of one call share: i32 [T] positions, and cos / sin f32.

    These are [T, 1, 1, dim], each angle twice; a backend with a kernel gets [T, 1, dim / 2].
    """

    ids: Value
    cos: Value
    sin: Value


def positions(ops: Ops, rope: RopeSpec, rows: Dim) -> Positions:
    """Declare the port `position_ids` and derive the rotary tables from it."""
    ids = ops.input("position_ids", [rows], "i32")
    with ops.precise():
        angles = ops.multiply(
            ops.reshape(ops.convert(ids, "f32"), [-1, 1, 1]), ops.constant(rope.inverse_frequencies())
        )
        if ops.kernels is None:
            angles = ops.reshape(ops.concat([angles, angles], 2), [-1, 1, 1, rope.dim])
        return Positions(ids, ops.cos(angles), ops.sin(angles))


def rotate(ops: Ops, x: Value, at: Positions, rope: RopeSpec, heads: int, head_dim: int) -> Value:
    """Rotate the first `rope.dim` entries of every head, [T, heads, head_dim]; returns [T, heads, 1, head_dim].

    Written as OpenVINO's plugin wants it: four axes, halves turned by a product with -1, concatenated along axis -1.
    Then it makes one node of all. A backend with a kernel returns three axes.
    """
    if ops.kernels is not None:
        return ops.kernels.rotary(x, at.cos, at.sin, rope.dim, (heads, head_dim))
    half, rest = rope.dim // 2, head_dim - rope.dim
    x = ops.reshape(x, [-1, heads, 1, head_dim])
    parts = ops.split(x, [rope.dim, rest], 3) if rest else [x]
    first, second = ops.split(parts[0], [half, half], 3)
    with ops.precise():
        turned = ops.concat([ops.multiply(second, ops.constant(np.array(-1, np.float32))), first], -1)
        rotated = ops.add(ops.multiply(parts[0], at.cos), ops.multiply(turned, at.sin))
        return ops.concat([rotated, *parts[1:]], -1) if rest else rotated


def visible(ops: Ops, keys: Value, ids: Value, window: int | None, causal: bool) -> Value:
    """Additive mask f32 [T, N] for keys at the positions i32 [N]: 0 where a query may look, very negative elsewhere."""
    keys, queries = ops.reshape(keys, [1, -1]), ops.reshape(ids, [-1, 1])
    seen = ops.less(keys, ops.add(queries, number(ops, 1))) if causal else ops.less(keys, number(ops, FAR))
    if window is not None:
        near = ops.less(ops.subtract(queries, number(ops, window)), keys)
        seen = ops.logical_and(seen, near)
        if not causal:
            seen = ops.logical_and(seen, ops.less(keys, ops.add(queries, number(ops, window))))
    if not causal and window is None:  # broadcast over the queries
        seen = ops.logical_and(seen, ops.less(queries, number(ops, FAR)))
    floats: Any = (np.array([0.0], np.float32), np.array([-1e30], np.float32))
    return ops.select(seen, ops.constant(floats[0]), ops.constant(floats[1]))


def number(ops: Ops, n: int) -> Value:
    return ops.constant(np.array([n], np.int32))
