"""Causal and block attention over a key/value cache, in its portable form.

Ports of layer `i`: inputs `past_key.i`, `past_value.i` [kv_heads, capacity, head_dim], of which the rows before the
first position of the call count; outputs `key.i`, `value.i` [T, kv_heads * head_dim], the rows to store. The nodes
labelled `attention.i.query` and `attention.i.output` [T, heads * head_dim] bracket the part that a runtime may replace
by a paged kernel. An emitter with `kernels` gets `cached_attention` instead.
"""

import numpy as np

from .cached_attention import cached_attention
from .positions import FAR, Positions, number, rotate, visible
from .specs import AttentionSpec
from .vocabulary import Dim, Ops, Value


def attention(
    ops: Ops,
    layer: int,
    query: Value,
    key: Value,
    value: Value,
    spec: AttentionSpec,
    at: Positions,
    capacity: Dim,
    *,
    window: int | None = None,
    causal: bool = True,
) -> Value:
    """Rotate queries and keys [T, heads, head_dim]; attend to the cache and the own rows; [T, heads * head_dim]."""
    if ops.kernels is not None:
        return cached_attention(ops.kernels, layer, query, key, value, spec, at, capacity, window=window, causal=causal)
    assert isinstance(capacity, int)
    query = rotate(ops, query, at, spec.rope, spec.heads, spec.head_dim)
    key = rotate(ops, key, at, spec.rope, spec.kv_heads, spec.head_dim)
    query = ops.label(f"attention.{layer}.query", ops.reshape(query, [-1, spec.heads * spec.head_dim]))
    key = ops.label(f"attention.{layer}.key", ops.reshape(key, [-1, spec.kv_width]))
    value = ops.label(f"attention.{layer}.value", ops.reshape(value, [-1, spec.kv_width]))
    ops.output(f"key.{layer}", key, [-1, spec.kv_width])
    ops.output(f"value.{layer}", value, [-1, spec.kv_width])

    shape = [spec.kv_heads, capacity, spec.head_dim]
    past_key = ops.reshape(ops.input(f"past_key.{layer}", shape), [shape[0], 1, *shape[1:]])
    past_value = ops.reshape(ops.input(f"past_value.{layer}", shape), [shape[0], 1, *shape[1:]])
    own_key, own_value = (_by_key_head(ops, x, spec, 1) for x in (key, value))
    grouped = _by_key_head(ops, query, spec, spec.heads // spec.kv_heads)
    grouped = ops.multiply(grouped, ops.constant(np.array(spec.head_dim**-0.5, np.float32)))
    scores = ops.concat([ops.matmul(grouped, x, transpose_b=True) for x in (past_key, own_key)], 3)
    cached = ops.constant(np.arange(capacity, dtype=np.int32))
    cached = ops.select(ops.less(cached, ops.slice(at.ids, 0, 1, 0)), cached, number(ops, FAR))
    mask = visible(ops, ops.concat([cached, at.ids], 0), at.ids, window, causal)
    probabilities = ops.softmax(ops.add(scores, mask), 3)
    old, new = ops.slice(probabilities, 0, capacity, 3), ops.slice(probabilities, capacity, (1 << 31) - 1, 3)
    mixed = ops.add(ops.matmul(old, past_value), ops.matmul(new, own_value))
    mixed = ops.reshape(ops.transpose(mixed, [2, 0, 1, 3]), [-1, spec.heads * spec.head_dim])
    return ops.label(f"attention.{layer}.output", mixed)


def _by_key_head(ops: Ops, rows: Value, spec: AttentionSpec, heads: int) -> Value:
    """[T, kv_heads * heads * head_dim] -> [kv_heads, heads, T, head_dim]."""
    return ops.transpose(ops.reshape(rows, [-1, spec.kv_heads, heads, spec.head_dim]), [1, 2, 0, 3])
