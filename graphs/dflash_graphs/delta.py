"""Gated DeltaNet over aligned chunks: the recurrence as a function of absolute positions only.

The sequence is cut at multiples of CHUNK, see `recurrence.py` for the ports and for which rows stand where. A row's
result never depends on where a call began, and a rejected row never reaches a state.

The chunk form (WY) with decays c = cumsum(g), D = exp(c_i - c_j) for j <= i:
    (I + tril(beta K K' * D, -1)) N = beta (V - e^c K S),  O = e^c Q S + (Q K' * D) N,
    S' = e^c_last S + (e^(c_last - c) K)' N

A backend with a kernel for the recurrence gets `sequential_delta` instead.

Layout: chunks stand outermost, since only there a split is free; queries and keys of a head stand side by side, so one
product reads its state once. An elementwise product whose first operand is read elsewhere too costs a copy of it.

Some steps look roundabout because OpenVINO rewrites subtractions, elementwise work behind data movement, products of
unequal rank and one reshape behind another into nodes of its own, which lose the `precise` mark and then run in bf16.
So nothing is subtracted here (signs come with constants), gates are computed before they are moved, and products have
operands of one rank.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .recurrence import Recurrence, Window
from .sequential_delta import Span, sequential_delta
from .specs import CHUNK, DeltaSpec
from .vocabulary import Ops, Value
from .weights import Weights


def gated_delta(
    ops: Ops, layer: int, mixed: Value, gates: Value, spec: DeltaSpec, at: Recurrence, weights: Weights
) -> Value:
    """Run the layer's convolution and recurrence on its projected rows.

    `mixed` [T, conv_width] is the output of in_proj_qkv, `gates` [T, 2 * value_heads] those of in_proj_a and in_proj_b;
    `weights` is read at `layers.i.linear_attn.*`. Returns [T, value_heads * value_dim], before the gated norm.
    """
    with ops.precise():
        qk, values = _convolve(ops, at.inputs["past_rows"][layer], mixed, layer, spec, at.place, weights)
        gates = _gates(ops, gates, layer, spec, weights)
        for name, rows in (("rows", mixed), ("qk", qk), ("v", values), ("gates", gates)):
            at.outputs[name][layer] = rows
        kept = {name: at.inputs[f"past_{name}"][layer] for name in spec.kept_widths}
        new = {name: at.outputs[name][layer] for name in spec.kept_widths}
        state = at.inputs["state"][layer]
        if isinstance(at.place, Span):
            return sequential_delta(layer, kept, new, state, spec, at.place)
        out, full_state = _window(ops, layer, kept, new, state, spec, at.place)
        at.full_states.append(full_state)
        return out


def _window(
    ops: Ops, layer: int, kept: Mapping[str, Value], new: Mapping[str, Value], state: Value, spec: DeltaSpec, at: Window
) -> tuple[Value, Value]:
    """Run the recurrence over the kept and the new rows of `qk`, `v` and `gates`.

    Returns the new rows' outputs and the state after a full window.
    """
    sizes = [-1, spec.value_heads, spec.key_dim, spec.value_dim]
    rows = [ops.concat([kept[name], new[name]], 0) for name in new]
    first, second = _chunks(ops, rows, at.rows, 2, spec)
    state = ops.reshape(state, [1, *sizes[1:]])
    out, news = _outputs(ops, first, state, spec)
    state = _advance(ops, first, state, news, at.crossing, spec)
    ops.output(f"next_state.{layer}", state, sizes)
    behind, news = _outputs(ops, second, state, spec)
    out = ops.transpose(ops.concat([out, behind], 0), [0, 2, 1, 3])
    out = ops.gather(ops.reshape(out, [-1, spec.value_heads * spec.value_dim]), at.new)
    return out, _advance(ops, second, state, news, at.full, spec)


def _convolve(
    ops: Ops, past: Value, own: Value, layer: int, spec: DeltaSpec, place: Window | Span, weights: Weights
) -> tuple[Value, Value]:
    """Causal depthwise convolution and SiLU of the rows `own` [T, conv_width], after those of `past` [kernel - 1, …].

    Returns unit queries (scaled) and keys [T, 2 * key_heads * key_dim], and values [T, value_heads * value_dim].
    """
    kernel = weights.array(f"layers.{layer}.linear_attn.conv1d.weight").reshape(spec.conv_width, spec.kernel)
    rows = ops.concat([past, own], 0)
    if isinstance(place, Span):
        rows = place.ops.causal_convolution(rows, kernel[:, None])
    else:
        tapped = [*(ops.gather(rows, tap) for tap in place.taps), own]
        constants = (ops.constant(np.ascontiguousarray(tap)) for tap in kernel.T)
        terms = [ops.multiply(x, tap) for x, tap in zip(tapped, constants, strict=True)]
        rows = ops.silu(functools.reduce(ops.add, terms))
    keys = spec.key_heads * spec.key_dim
    qk, values = ops.split(rows, [2 * keys, spec.value_heads * spec.value_dim], 1)
    scale = np.array([spec.key_dim**-0.5, 1.0], np.float32).reshape(1, 2, 1, 1)
    qk = ops.l2_norm(ops.reshape(qk, [-1, 2, spec.key_heads, spec.key_dim]), 1e-6, scale)
    return ops.reshape(qk, [-1, 2 * keys]), values


def _gates(ops: Ops, gates: Value, layer: int, spec: DeltaSpec, weights: Weights) -> Value:
    """Log decay and strength beta of each row, [T, 2 * value_heads], from the outputs of in_proj_a and in_proj_b."""
    prefix, heads = f"layers.{layer}.linear_attn", spec.value_heads
    rate = ops.constant(-np.exp(weights.array(f"{prefix}.A_log").reshape(-1)))
    bias = ops.constant(weights.array(f"{prefix}.dt_bias").reshape(-1))
    decay, beta = ops.split(gates, [heads, heads], 1)
    return ops.concat([ops.multiply(ops.softplus(ops.add(decay, bias)), rate), ops.sigmoid(beta)], 1)


@dataclass(frozen=True)
class _Chunk:
    """One chunk, everything that does not depend on the state."""

    both: Value  # [1, value_heads, 2 * CHUNK, key_dim], queries and keys scaled by the decay so far, keys negative
    values: Value  # [1, value_heads, CHUNK, value_dim]
    beta: Value  # [1, value_heads, CHUNK, 1]
    solve: Value  # [1, value_heads, 2 * CHUNK, CHUNK]: to (Q K' * D) N, to N
    keys: Value  # [1, value_heads, CHUNK, key_dim], scaled by the decay until the chunk's end
    decay: Value  # [1, value_heads, 1, 1], over the whole chunk


def _chunks(ops: Ops, kept_and_new: Sequence[Value], places: Value, n: int, spec: DeltaSpec) -> list[_Chunk]:
    """Take the rows `places` i32 [n * CHUNK] of `qk`, `v` and `gates`."""
    qk, values, gates = (ops.gather(rows, places) for rows in kept_and_new)
    qk = ops.transpose(ops.reshape(qk, [n, CHUNK, 2, spec.key_heads, spec.key_dim]), [0, 3, 2, 1, 4])
    values = ops.transpose(ops.reshape(values, [n, CHUNK, spec.value_heads, spec.value_dim]), [0, 2, 1, 3])
    gates = ops.transpose(ops.reshape(gates, [n, CHUNK, 2, spec.value_heads]), [2, 0, 3, 1])
    rows = ops.reshape(qk, [n, spec.key_heads, 2 * CHUNK, spec.key_dim])
    heads, repeat = spec.value_heads, spec.value_heads // spec.key_heads
    lower = np.tril(np.ones((CHUNK, CHUNK), np.float32))
    log_decay, beta = (ops.reshape(x, [n, heads, CHUNK, 1]) for x in ops.split(gates, [1, 1], 0))
    total = ops.cumsum(log_decay, 2)
    minus_total = ops.multiply(total, ops.constant(np.full((1, 1, 1, 1), -1, np.float32)))
    difference = ops.add(total, ops.reshape(minus_total, [n, heads, 1, CHUNK]))
    # the masked difference is what is exponentiated: above the diagonal it would overflow
    decays = ops.multiply(ops.exp(ops.multiply(difference, ops.constant(lower))), ops.constant(lower))
    keys = ops.slice(rows, CHUNK, 2 * CHUNK, 2)
    gram = ops.matmul(rows, keys, transpose_b=True)

    def scaled(per_key_head: Value, per_value_head: Value, kinds: int, width: int, last: int) -> Value:
        """Product of [n, key_heads, kinds * CHUNK, width] and [n, value_heads, 1 or kinds, CHUNK, last], by head.

        Returns [n, value_heads, kinds * CHUNK, width].
        """
        a = ops.reshape(per_key_head, [n, spec.key_heads, 1, kinds, CHUNK, width])
        b = ops.reshape(per_value_head, [n, spec.key_heads, repeat, -1, CHUNK, last])
        return ops.reshape(ops.multiply(b, a), [n, heads, -1, width])

    inside, within = ops.split(scaled(gram, decays, 2, CHUNK, CHUNK), [CHUNK, CHUNK], 2)
    below = ops.multiply(beta, ops.constant(-np.tril(lower, -1)))
    inverse = _unit_lower_inverse(ops, ops.multiply(within, below), n)
    solve = ops.concat([ops.matmul(inside, inverse), inverse], 2)
    last = ops.slice(total, CHUNK - 1, CHUNK, 2)
    ending = scaled(keys, ops.slice(decays, CHUNK - 1, CHUNK, 2), 1, spec.key_dim, 1)
    signs = ops.constant(np.array([1, -1], np.float32).reshape(1, 1, 2, 1, 1))
    grown = ops.multiply(ops.reshape(ops.exp(total), [n, heads, 1, CHUNK, 1]), signs)
    growing = scaled(rows, grown, 2, spec.key_dim, 1)
    parts = [ops.split(x, [1] * n, 0) for x in (growing, values, beta, solve, ending, ops.exp(last))]
    return [_Chunk(*values) for values in zip(*parts, strict=True)]


def _unit_lower_inverse(ops: Ops, minus_lower: Value, n: int) -> Value:
    """(I + lower)^-1 for strictly lower triangles, by divide and conquer (the nilpotent product is unstable in f32)."""
    index, sizes = np.arange(CHUNK), (2, 4, 8)

    def block(size: int) -> NDArray[np.bool_]:
        half = index // size
        below: NDArray[np.bool_] = (half[:, None] % 2 == 1) & (half[:, None] == half[None, :] + 1)
        return below

    inverse = ops.add(ops.constant(np.eye(CHUNK, dtype=np.float32)), _masked(ops, minus_lower, block(1)))
    masks = np.stack([block(size) for size in sizes]).reshape(len(sizes), 1, 1, CHUNK, CHUNK)
    for corner in ops.split(_masked(ops, minus_lower, masks), [1] * len(sizes), 0):
        corner = ops.reshape(corner, [n, -1, CHUNK, CHUNK])
        inverse = ops.add(inverse, ops.matmul(ops.matmul(inverse, corner), inverse))
    return inverse


def _masked(ops: Ops, x: Value, mask: NDArray[np.bool_]) -> Value:
    return ops.multiply(x, ops.constant(mask.astype(np.float32)))


def _outputs(ops: Ops, chunk: _Chunk, state: Value, spec: DeltaSpec) -> tuple[Value, Value]:
    """Return the chunk's outputs and N, both [n, value_heads, CHUNK, value_dim] for n states, 1 or none."""

    def pair(x: Value, y: Value) -> list[Value]:
        return ops.split(ops.matmul(x, y), [CHUNK, CHUNK], 2)

    from_queries, minus_from_keys = pair(chunk.both, state)
    # no sum of a product: whether that is one rounding or two would depend on whether n is fixed
    wanted = ops.multiply(chunk.beta, ops.add(chunk.values, minus_from_keys))
    inside, news = pair(chunk.solve, wanted)
    return ops.add(from_queries, inside), news


def _advance(ops: Ops, chunk: _Chunk, state: Value, news: Value, crossing: Value, spec: DeltaSpec) -> Value:
    """Return the state after the chunk, or none of it (a leading axis of 0) when the rows do not reach its end."""
    decay, news = ops.multiply(chunk.decay, crossing), ops.multiply(news, crossing)
    return ops.add(ops.multiply(state, decay), ops.matmul(chunk.keys, news, transpose_a=True))
