"""Causal and block attention over a key/value cache, in its portable form.

Ports of layer `i`: inputs `past_key.i`, `past_value.i` [kv_heads, capacity, head_dim], of which the rows before the
first position of the call count; outputs `key.i`, `value.i` [T, kv_heads * head_dim], the rows to store. The nodes
labelled `attention.i.query` and `attention.i.output` [T, heads * head_dim] bracket the part that a runtime may replace
by a paged kernel.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .specs import AttentionSpec, RopeSpec
from .vocabulary import Ops, Value

_FAR = 1 << 30  # a key position nothing may see


@dataclass(frozen=True)
class Positions:
    """What all layers of one call share: i32 [T] positions, and cos / sin f32 [T, 1, dim / 2]."""

    ids: Value
    cos: Value
    sin: Value


def positions(ops: Ops, rope: RopeSpec, rows: int) -> Positions:
    """Declare the port `position_ids` and derive the rotary tables from it."""
    ids = ops.input("position_ids", [rows], "i32")
    with ops.precise():
        angles = ops.multiply(
            ops.reshape(ops.convert(ids, "f32"), [-1, 1, 1]), ops.constant(rope.inverse_frequencies())
        )
        return Positions(ids, ops.cos(angles), ops.sin(angles))


def rotate(ops: Ops, x: Value, at: Positions, rope: RopeSpec, head_dim: int) -> Value:
    """Rotate the first `rope.dim` entries of every head, [T, heads, head_dim]."""
    half, rest = rope.dim // 2, head_dim - rope.dim
    parts = ops.split(x, [half, half] + ([rest] if rest else []), 2)
    with ops.precise():
        first = ops.subtract(ops.multiply(parts[0], at.cos), ops.multiply(parts[1], at.sin))
        second = ops.add(ops.multiply(parts[1], at.cos), ops.multiply(parts[0], at.sin))
        return ops.concat([first, second, *parts[2:]], 2)


def attention(
    ops: Ops,
    layer: int,
    query: Value,
    key: Value,
    value: Value,
    spec: AttentionSpec,
    at: Positions,
    capacity: int,
    *,
    window: int | None = None,
    causal: bool = True,
) -> Value:
    """Attend from queries [T, heads, head_dim] to the cache and the call's own rows; [T, heads * head_dim]."""
    groups = spec.heads // spec.kv_heads
    query = ops.label(f"attention.{layer}.query", ops.reshape(query, [-1, spec.heads * spec.head_dim]))
    key = ops.label(f"attention.{layer}.key", ops.reshape(key, [-1, spec.kv_width]))
    value = ops.label(f"attention.{layer}.value", ops.reshape(value, [-1, spec.kv_width]))
    ops.output(f"key.{layer}", key)
    ops.output(f"value.{layer}", value)

    def by_head(x: Value) -> Value:  # [T, kv_width] -> [kv_heads, 1, T, head_dim]
        return ops.transpose(ops.reshape(x, [-1, spec.kv_heads, 1, spec.head_dim]), [1, 2, 0, 3])

    shape = [spec.kv_heads, capacity, spec.head_dim]
    past_key = ops.reshape(ops.input(f"past_key.{layer}", shape), [shape[0], 1, *shape[1:]])
    past_value = ops.reshape(ops.input(f"past_value.{layer}", shape), [shape[0], 1, *shape[1:]])
    grouped = ops.transpose(ops.reshape(query, [-1, spec.kv_heads, groups, spec.head_dim]), [1, 2, 0, 3])
    grouped = ops.multiply(grouped, ops.constant(np.array(spec.head_dim**-0.5, np.float32)))
    scores = ops.concat(
        [ops.matmul(grouped, past_key, transpose_b=True), ops.matmul(grouped, by_head(key), transpose_b=True)], 3
    )
    probabilities = ops.softmax(ops.add(scores, _mask(ops, at.ids, capacity, window, causal)), 3)
    old = ops.slice(probabilities, 0, capacity, 3)
    new = ops.slice(probabilities, capacity, (1 << 31) - 1, 3)
    mixed = ops.add(ops.matmul(old, past_value), ops.matmul(new, by_head(value)))
    mixed = ops.reshape(ops.transpose(mixed, [2, 0, 1, 3]), [-1, spec.heads * spec.head_dim])
    return ops.label(f"attention.{layer}.output", mixed)


def _mask(ops: Ops, ids: Value, capacity: int, window: int | None, causal: bool) -> Value:
    """Additive mask [T, capacity + T]: 0 where a query may look, a large negative number elsewhere."""

    def number(n: int) -> Value:
        return ops.constant(np.array([n], np.int32))

    cached = ops.constant(np.arange(capacity, dtype=np.int32))
    cached = ops.select(ops.less(cached, ops.slice(ids, 0, 1, 0)), cached, number(_FAR))
    keys = ops.reshape(ops.concat([cached, ids], 0), [1, -1])
    queries = ops.reshape(ids, [-1, 1])
    seen = ops.less(keys, ops.add(queries, number(1))) if causal else ops.less(keys, number(_FAR))
    if window is not None:
        near = ops.less(ops.subtract(queries, number(window)), keys)
        seen = ops.logical_and(seen, near)
        if not causal:
            seen = ops.logical_and(seen, ops.less(keys, ops.add(queries, number(window))))
    if not causal and window is None:  # broadcast over the queries
        seen = ops.logical_and(seen, ops.less(queries, number(_FAR)))
    floats: Any = (np.array([0.0], np.float32), np.array([-1e30], np.float32))
    return ops.select(seen, ops.constant(floats[0]), ops.constant(floats[1]))
