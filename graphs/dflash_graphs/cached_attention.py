"""Attention over a key/value cache that the graph itself updates, for backends that run the file as it stands.

A key stands in the column of its position from the start, so a row's result does not depend on where its call began.
Ports of layer `i`: inputs `past_key.i` [1, parts * kv_heads, P, head_dim / parts] and `past_value.i` [1, kv_heads, P,
head_dim]; outputs `present_key.i`, `present_value.i`, the same with the rows of the call, to be bound to the same
memory. `cache_positions` i32 [P] holds 0, 1, …; P exceeds the position of the call's last row and is best a multiple of
128. What stands at later positions is ignored as long as it is finite. Where a kernel takes over (plain causal layers
with short keys, rotated as a whole) that port is missing, and P may be anything large enough.

Keys of more than 128 entries are cut in parts whose products are added: the sum of a longer product is split at 128 or
not depending on how many columns it is computed with (ONNX Runtime, x86), and a row would depend on P.
"""

import functools

import numpy as np

from .positions import FAR, Positions, number, rotate, visible
from .specs import AttentionSpec
from .vocabulary import Dim, KernelOps, Ops, Value

_LONGEST = 128


def key_parts(head_dim: int) -> int:
    """How many parts a key is cut in."""
    parts = -(-head_dim // _LONGEST)
    return parts if head_dim % parts == 0 else 1


def cached_attention(
    ops: KernelOps,
    layer: int,
    query: Value,
    key: Value,
    value: Value,
    spec: AttentionSpec,
    at: Positions,
    capacity: Dim,
    *,
    window: int | None,
    causal: bool,
) -> Value:
    """As `attention.attention`; the cache gets the call's own rows."""
    groups, parts = spec.heads // spec.kv_heads, key_parts(spec.head_dim)
    if causal and window is None and parts == 1 and spec.head_dim % 16 == 0 and spec.rope.dim == spec.head_dim:
        return _by_kernel(ops, layer, query, key, value, spec, at, capacity)
    query = rotate(ops, query, at, spec.rope, spec.heads, spec.head_dim)
    key = rotate(ops, key, at, spec.rope, spec.kv_heads, spec.head_dim)
    start, width = ops.slice(at.ids, 0, 1, 0), spec.head_dim // parts

    def stored(name: str, rows: Value, pieces: int) -> Value:
        count, size = pieces * spec.kv_heads, spec.head_dim // pieces
        rows = ops.transpose(ops.reshape(rows, [-1, spec.kv_heads, pieces, size]), [2, 1, 0, 3])
        shape: list[Dim] = [1, count, capacity, size]
        past = ops.input(f"past_{name}.{layer}", shape)
        cache = ops.store(past, ops.reshape(rows, [1, count, -1, size]), start)
        ops.output(f"present_{name}.{layer}", cache, shape)
        return cache

    keys, values = stored("key", key, parts), stored("value", value, 1)
    query = ops.multiply(query, ops.constant(np.array(spec.head_dim**-0.5, np.float32)))
    query = ops.transpose(ops.reshape(query, [-1, spec.kv_heads, groups, parts, width]), [3, 1, 2, 0, 4])
    query = ops.reshape(query, [1, parts * spec.kv_heads, -1, width])  # rows of a key head: query head, then token
    scores = ops.matmul(query, keys, transpose_b=True)
    if parts > 1:
        scores = functools.reduce(ops.add, ops.split(scores, [spec.kv_heads] * parts, 1))
    mask = _mask(ops, at.ids, start, capacity, window, causal)
    probabilities = ops.softmax(ops.add(scores, ops.concat([mask] * groups, 0)), 3)
    mixed = ops.reshape(ops.matmul(probabilities, values), [spec.heads, -1, spec.head_dim])
    return ops.reshape(ops.transpose(mixed, [1, 0, 2]), [-1, spec.heads * spec.head_dim])


def _by_kernel(
    ops: KernelOps, layer: int, query: Value, key: Value, value: Value, spec: AttentionSpec, at: Positions, size: Dim
) -> Value:
    shape: list[Dim] = [1, spec.kv_heads, size, spec.head_dim]
    past = (ops.input(f"past_key.{layer}", shape), ops.input(f"past_value.{layer}", shape))
    out, *present = ops.causal_attention(query, key, value, past, at.ids, spec)
    for name, cache in zip(("key", "value"), present, strict=True):
        ops.output(f"present_{name}.{layer}", cache, shape)
    return out


def _mask(ops: Ops, ids: Value, start: Value, capacity: Dim, window: int | None, causal: bool) -> Value:
    """Additive mask [T, P]; positions after the call's last row are out of sight."""
    keys = ops.input("cache_positions", [capacity], "i32")
    keys = ops.select(ops.less(keys, ops.add(start, ops.rows(ids))), keys, number(ops, FAR))
    return visible(ops, keys, ids, window, causal)
