"""Gated DeltaNet over aligned chunks: the recurrence as a function of absolute positions only.

The sequence is cut at multiples of CHUNK. A call recomputes the window of two chunks that starts at the last boundary:
first the kept rows since then, then the call's own rows, then padding that changes nothing (beta 0, decay 1). So a row's
result never depends on where a call began, and a rejected row never reaches a state.

Ports of layer `i`: inputs `past_rows.i` [history, row_width] (the convolution's past, then the rows since the boundary,
oldest first, the rest ignored) and `state.i` [value_heads, key_dim, value_dim]; outputs `rows.i` [T, row_width], the
rows to keep, and `next_state.i`, the state after the window's first chunk. All f32.

The chunk form (WY) with decays c = cumsum(g), D = exp(c_i - c_j) for j <= i:
    (I + tril(beta K K' * D, -1)) N = beta (V - e^c K S),  O = e^c Q S + (Q K' * D) N,
    S' = e^c_last S + (e^(c_last - c) K)' N
"""

from dataclasses import dataclass

import numpy as np

from .specs import CHUNK, WINDOW, DeltaSpec
from .vocabulary import Ops, Value
from .weights import Weights


@dataclass(frozen=True)
class Window:
    """Index arithmetic shared by all recurrent layers of one call."""

    source: Value  # i32 [kernel - 1 + WINDOW]: which row of (past_rows, new rows) stands at each place
    valid: Value  # f32 [WINDOW, 1]: 1 where a real token stands
    new: Value  # i32 [T]: the window places of the call's own rows


def window(ops: Ops, spec: DeltaSpec, ids: Value) -> Window:
    """Declare the port `pending_rows` i32 [1], the number of kept rows since the boundary, and place the rows."""
    pending = ops.input("pending_rows", [1], "i32")

    def number(n: int) -> Value:
        return ops.constant(np.array([n], np.int32))

    rows, before = ops.rows(ids), spec.kernel - 1
    place = ops.constant(np.arange(before + WINDOW, dtype=np.int32))
    kept = ops.add(pending, number(before))
    shifted = ops.add(ops.subtract(place, kept), number(spec.history))
    last = ops.add(rows, number(spec.history - 1))
    source = ops.select(ops.less(place, kept), place, ops.minimum(shifted, last))
    place = ops.constant(np.arange(WINDOW, dtype=np.int32).reshape(-1, 1))
    valid = ops.convert(ops.less(place, ops.add(pending, rows)), "f32")
    first = ops.slice(ids, 0, 1, 0)
    return Window(source, valid, ops.add(ops.subtract(ids, first), pending))


def gated_delta(
    ops: Ops, layer: int, mixed: Value, decay: Value, beta: Value, spec: DeltaSpec, at: Window, weights: Weights
) -> Value:
    """Run the layer's convolution and recurrence on its projected rows.

    `mixed` [T, conv_width], `decay` and `beta` [T, value_heads] are the outputs of in_proj_qkv, in_proj_a and in_proj_b;
    `weights` is read at `layers.i.linear_attn.*`. Returns [T, value_heads * value_dim], before the gated norm.
    """
    prefix = f"layers.{layer}.linear_attn"
    with ops.precise():
        rows = ops.concat([mixed, decay, beta], 1)
        ops.output(f"rows.{layer}", rows)
        past = ops.input(f"past_rows.{layer}", [spec.history, spec.row_width])
        placed = ops.gather(ops.concat([past, rows], 0), at.source)
        mixed, decay, beta = ops.split(placed, [spec.conv_width, spec.value_heads, spec.value_heads], 1)
        query, key, value = _convolve(ops, mixed, weights.array(f"{prefix}.conv1d.weight"), spec)
        rate = -np.exp(weights.array(f"{prefix}.A_log"))
        bias = weights.array(f"{prefix}.dt_bias")
        decay, beta = (ops.slice(x, spec.kernel - 1, spec.kernel - 1 + WINDOW, 0) for x in (decay, beta))
        decay = ops.multiply(ops.softplus(ops.add(decay, ops.constant(bias))), ops.constant(rate))
        log_decay = _by_chunk(ops, ops.multiply(decay, at.valid), spec.value_heads, 1)
        strength = _by_chunk(ops, ops.multiply(ops.sigmoid(beta), at.valid), spec.value_heads, 1)
        chunks = _chunks(ops, query, key, value, log_decay, strength, spec)
        state = ops.input(f"state.{layer}", [spec.value_heads, spec.key_dim, spec.value_dim])
        first, state = _advance(ops, chunks[0], state)
        ops.output(f"next_state.{layer}", state)
        second, _ = _advance(ops, chunks[1], state)
        out = ops.concat([ops.transpose(x, [1, 0, 2]) for x in (first, second)], 0)
        out = ops.reshape(out, [WINDOW, spec.value_heads * spec.value_dim])
        return ops.gather(out, at.new)


def _convolve(ops: Ops, mixed: Value, taps: np.ndarray, spec: DeltaSpec) -> tuple[Value, Value, Value]:
    """Causal depthwise convolution and SiLU; queries, keys (unit length), values as [2, heads, CHUNK, dim]."""
    total = None
    for j in range(spec.kernel):
        weight = np.ascontiguousarray(taps.reshape(spec.conv_width, spec.kernel)[:, j])
        term = ops.multiply(ops.slice(mixed, j, j + WINDOW, 0), ops.constant(weight))
        total = term if total is None else ops.add(total, term)
    keys = spec.key_heads * spec.key_dim
    query, key, value = ops.split(ops.silu(total), [keys, keys, spec.value_heads * spec.value_dim], 1)
    query = ops.l2_norm(_by_chunk(ops, query, spec.key_heads, spec.key_dim), 1e-6, spec.key_dim**-0.5)
    key = ops.l2_norm(_by_chunk(ops, key, spec.key_heads, spec.key_dim), 1e-6)
    return query, key, _by_chunk(ops, value, spec.value_heads, spec.value_dim)


def _by_chunk(ops: Ops, x: Value, heads: int, width: int) -> Value:
    """[WINDOW, heads * width] -> [2, heads, CHUNK, width]."""
    return ops.transpose(ops.reshape(x, [2, CHUNK, heads, width]), [0, 2, 1, 3])


@dataclass(frozen=True)
class _Chunk:
    """One chunk, everything that does not depend on the state; leading axis value heads."""

    keys_queries: Value  # [2 * CHUNK, key_dim], scaled by the decay since the chunk's start
    values: Value  # [CHUNK, value_dim]
    strength: Value  # beta [CHUNK, 1]
    solve: Value  # [2 * CHUNK, CHUNK]: rows to N, then rows to (Q K' * D) N
    keys: Value  # [CHUNK, key_dim], scaled by the decay until the chunk's end
    decay: Value  # [1, 1], over the whole chunk


def _chunks(
    ops: Ops, query: Value, key: Value, value: Value, log_decay: Value, strength: Value, spec: DeltaSpec
) -> list[_Chunk]:
    lower = np.tril(np.ones((CHUNK, CHUNK), np.float32))
    total = ops.cumsum(log_decay, 2)
    difference = ops.subtract(total, ops.transpose(total, [0, 1, 3, 2]))
    # the masked difference is what is exponentiated: above the diagonal it would overflow
    decays = ops.multiply(ops.exp(ops.multiply(difference, ops.constant(lower))), ops.constant(lower))
    both = ops.concat([key, query], 2)
    gram = _per_value_head(ops, ops.matmul(both, key, transpose_b=True), spec, [2 * CHUNK, CHUNK])
    both = _per_value_head(ops, both, spec, [2 * CHUNK, spec.key_dim])
    gram_keys, gram_queries = ops.split(gram, [CHUNK, CHUNK], 2)
    below = ops.constant(np.tril(lower, -1))
    inverse = _unit_lower_inverse(ops, ops.multiply(ops.multiply(ops.multiply(gram_keys, decays), strength), below))
    solve = ops.concat([inverse, ops.matmul(ops.multiply(gram_queries, decays), inverse)], 2)
    last = ops.slice(total, CHUNK - 1, CHUNK, 2)
    keys = ops.multiply(ops.split(both, [CHUNK, CHUNK], 2)[0], ops.exp(ops.subtract(last, total)))
    grown = ops.exp(total)
    both = ops.multiply(both, ops.concat([grown, grown], 2))
    parts = [ops.split(x, [1, 1], 0) for x in (both, value, strength, solve, keys, ops.exp(last))]
    return [_Chunk(*(ops.reshape(part[i], _tail(spec, j)) for j, part in enumerate(parts))) for i in (0, 1)]


def _tail(spec: DeltaSpec, field: int) -> list[int]:
    key, value = spec.key_dim, spec.value_dim
    sizes = [[2 * CHUNK, key], [CHUNK, value], [CHUNK, 1], [2 * CHUNK, CHUNK], [CHUNK, key], [1, 1]]
    return [spec.value_heads, *sizes[field]]


def _per_value_head(ops: Ops, x: Value, spec: DeltaSpec, tail: list[int]) -> Value:
    """Repeat [2, key_heads, *tail] for the value heads that share each key head."""
    repeat = spec.value_heads // spec.key_heads
    if repeat == 1:
        return x
    spread = ops.multiply(ops.reshape(x, [2, spec.key_heads, 1, *tail]), ops.constant(np.ones((repeat, 1, 1), np.float32)))
    return ops.reshape(spread, [2, spec.value_heads, *tail])


def _unit_lower_inverse(ops: Ops, lower: Value) -> Value:
    """(I + lower)^-1 for strictly lower triangles, by divide and conquer (the nilpotent product is unstable in f32)."""

    def block(size: int) -> np.ndarray:
        index = np.arange(CHUNK) // size
        return ((index[:, None] % 2 == 1) & (index[:, None] == index[None, :] + 1)).astype(np.float32)

    inverse = ops.subtract(ops.constant(np.eye(CHUNK, dtype=np.float32)), ops.multiply(lower, ops.constant(block(1))))
    size = 2
    while size < CHUNK:
        corner = ops.multiply(lower, ops.constant(block(size)))
        inverse = ops.subtract(inverse, ops.matmul(ops.matmul(inverse, corner), inverse))
        size *= 2
    return inverse


def _advance(ops: Ops, chunk: _Chunk, state: Value) -> tuple[Value, Value]:
    """Return the chunk's outputs [value_heads, CHUNK, value_dim] and the state after it."""
    from_keys, from_queries = ops.split(ops.matmul(chunk.keys_queries, state), [CHUNK, CHUNK], 1)
    wanted = ops.multiply(chunk.strength, ops.subtract(chunk.values, from_keys))
    news, inside = ops.split(ops.matmul(chunk.solve, wanted), [CHUNK, CHUNK], 1)
    after = ops.add(ops.multiply(state, chunk.decay), ops.matmul(chunk.keys, news, transpose_a=True))
    return ops.add(from_queries, inside), after
