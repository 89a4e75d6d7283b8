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

from .recurrence import Part, Recurrence, Window
from .sequential_delta import Span, sequential_delta
from .specs import CHUNK, WINDOW, DeltaSpec
from .vocabulary import Ops, Value
from .weights import Weights


def gated_delta(
    ops: Ops, layer: int, mixed: Value, gates: Value, spec: DeltaSpec, at: Recurrence, weights: Weights
) -> Value:
    """Run the layer's convolution and recurrence on its projected rows.

    `mixed` [T, conv_width] is the output of in_proj_qkv, `gates` [T, 2 * value_heads] those of in_proj_a and in_proj_b;
    `weights` is read at `layers.i.linear_attn.*`. Returns [T * value_heads, value_dim], before the gated norm and
    too large by sqrt(key_dim), as queries are not scaled.
    """
    with ops.precise():
        inputs = {name: layers[layer] for name, layers in at.inputs.items()}
        qk, values = _convolve(ops, inputs["past_rows"], mixed, layer, spec, at.taps, weights)
        log_decay, beta = _gates(ops, gates, layer, spec, weights)
        if isinstance(at.place, Span):
            rest = (values, log_decay, beta)
            out, kept = sequential_delta(layer, inputs["past_kept"], inputs["state"], qk, rest, spec, at.place)
            out, made = ops.reshape(out, [-1, spec.value_dim]), {"kept": kept}
        else:
            new_gates = ops.concat([log_decay, beta], 1)
            out, made = _window(ops, layer, inputs, (qk, values, new_gates, beta), spec, at.place)
            made["gates"] = new_gates
        made["rows"] = mixed
        for name, layers in at.outputs.items():
            layers[layer] = made[name]
        return out


def _window(
    ops: Ops,
    layer: int,
    inputs: Mapping[str, Value],
    new: tuple[Value, Value, Value, Value],
    spec: DeltaSpec,
    at: Window,
) -> tuple[Value, dict[str, Value]]:
    """Run the recurrence over the kept and the new rows, `new` queries and keys, values, gates, beta.

    Returns the outputs of the new rows [T * value_heads, value_dim] and what they leave, by port.
    """
    qk, values, gates, beta = new
    sizes = [1, spec.value_heads, spec.key_dim, spec.value_dim]
    pieces = ops.concat([inputs["past_k"], qk], 0)
    first, second = _chunks(ops, pieces, ops.concat([inputs["past_gates"], gates], 0), at, spec)
    values, beta = ops.reshape(values, [-1, spec.value_dim]), ops.reshape(beta, [-1, 1])
    state = ops.reshape(inputs["state"], sizes)
    met, wanted = _meet(ops, first, state, values, beta, at.before, spec)
    placed = ops.gather(ops.concat([inputs["past_w"], wanted], 0), at.before.wanted)
    state = _advance(ops, first, pieces, state, placed, at.before, at.crossing)
    ops.output(f"next_state.{layer}", state, [-1, *sizes[1:]])
    own = [ops.gather(x, at.own) for x in (values, beta)]
    met_behind, wanted_behind = _meet(ops, second, state, own[0], own[1], at.behind, spec)
    placed_behind = ops.gather(wanted_behind, at.behind.wanted)
    outs = [
        ops.add(ops.gather(product, part.from_queries), ops.matmul(chunk.inside, w))
        for product, part, chunk, w in ((met, at.before, first, placed), (met_behind, at.behind, second, placed_behind))
    ]
    made = {
        "k": ops.gather(pieces, at.new_keys),
        "w": wanted,
        "w_behind": wanted_behind,
        "full_state": _advance(ops, second, pieces, state, placed_behind, at.behind, at.full),
    }
    return ops.gather(ops.reshape(ops.concat(outs, 0), [-1, spec.value_dim]), at.new), made


def _convolve(
    ops: Ops, past: Value, own: Value, layer: int, spec: DeltaSpec, taps: Sequence[Value], weights: Weights
) -> tuple[Value, Value]:
    """Causal depthwise convolution and SiLU of the rows `own` [T, conv_width], after those of `past` [kernel - 1, …].

    Returns unit queries and keys [T * 2 * key_heads, key_dim], and values [T, value_heads * value_dim].
    """
    kernel = weights.array(f"layers.{layer}.linear_attn.conv1d.weight").reshape(spec.conv_width, spec.kernel)
    rows = ops.concat([past, own], 0)
    tapped = [*(ops.gather(rows, tap) for tap in taps), own]
    constants = (ops.constant(np.ascontiguousarray(tap)) for tap in kernel.T)
    terms = [ops.multiply(x, tap) for x, tap in zip(tapped, constants, strict=True)]
    rows = ops.silu(functools.reduce(ops.add, terms))
    qk, values = ops.split(rows, [2 * spec.key_width, spec.value_width], 1)
    unit = np.full(spec.key_dim, spec.key_dim**-0.5, np.float32)  # OpenVINO has a kernel for this norm only
    return ops.rms_norm(ops.reshape(qk, [-1, spec.key_dim]), unit, 1e-6 / spec.key_dim), values


def _gates(ops: Ops, gates: Value, layer: int, spec: DeltaSpec, weights: Weights) -> tuple[Value, Value]:
    """Log decay and strength beta of each row, [T, value_heads], from the outputs of in_proj_a and in_proj_b."""
    prefix, heads = f"layers.{layer}.linear_attn", spec.value_heads
    rate = ops.constant(-np.exp(weights.array(f"{prefix}.A_log").reshape(-1)))
    bias = ops.constant(weights.array(f"{prefix}.dt_bias").reshape(-1))
    decay, beta = ops.split(gates, [heads, heads], 1)
    return ops.multiply(ops.softplus(ops.add(decay, bias)), rate), ops.sigmoid(beta)


@dataclass(frozen=True)
class _Chunk:
    """One chunk, everything that does not depend on the state. `R` are the call's rows that may stand in it."""

    both: Value  # [1, value_heads, 2 * R, key_dim], queries and keys scaled by the decay so far, keys negative
    inside: Value  # [1, value_heads, CHUNK, CHUNK]: from W to (Q K' * D) N
    ending: Value  # [1, value_heads, CHUNK, CHUNK]: from W to N scaled by the decay until the chunk's end
    decay: Value  # [1, value_heads, 1, 1], over the whole chunk


def _chunks(ops: Ops, pieces: Value, gates: Value, at: Window, spec: DeltaSpec) -> tuple[_Chunk, _Chunk]:
    """Prepare both chunks of the window."""
    heads, n, repeat = spec.value_heads, WINDOW // CHUNK, spec.value_heads // spec.key_heads
    gates = ops.reshape(ops.gather(gates, at.rows), [n, CHUNK, 2, heads])
    gates = ops.transpose(gates, [2, 0, 3, 1])
    lower = np.tril(np.ones((CHUNK, CHUNK), np.float32))
    log_decay, beta = (ops.reshape(x, [n, heads, CHUNK, 1]) for x in ops.split(gates, [1, 1], 0))
    total = ops.cumsum(log_decay, 2)
    minus_total = ops.multiply(total, ops.constant(np.full((1, 1, 1, 1), -1, np.float32)))
    difference = ops.add(total, ops.reshape(minus_total, [n, heads, 1, CHUNK]))
    # the masked difference is what is exponentiated: above the diagonal it would overflow
    decays = ops.multiply(ops.exp(ops.multiply(difference, ops.constant(lower))), ops.constant(lower))
    queries, keys = ops.gather(pieces, at.queries), ops.gather(pieces, at.keys)

    def gram(rows: Value, factor: Value) -> Value:
        product = ops.reshape(ops.matmul(rows, keys, transpose_b=True), [n, spec.key_heads, 1, CHUNK, CHUNK])
        factor = ops.reshape(factor, [n, spec.key_heads, repeat, CHUNK, CHUNK])
        return ops.reshape(ops.multiply(product, factor), [n, heads, CHUNK, CHUNK])

    below = ops.multiply(ops.multiply(beta, ops.constant(-np.tril(lower, -1))), decays)
    inverse = _unit_lower_inverse(ops, gram(keys, below), n)
    inside = ops.matmul(gram(queries, decays), inverse)
    until_end = ops.reshape(ops.slice(decays, CHUNK - 1, CHUNK, 2), [n, heads, CHUNK, 1])
    so_far = ops.exp(total)
    ends = ops.slice(so_far, CHUNK - 1, CHUNK, 2)
    parts = [ops.split(x, [1] * n, 0) for x in (inside, ops.multiply(until_end, inverse), ends)]
    signs = ops.constant(np.array([1, -1], np.float32).reshape(2, 1, 1, 1, 1))
    signed = ops.reshape(ops.multiply(ops.reshape(so_far, [1, n, heads, CHUNK, 1]), signs), [-1, 1])

    first, second = (
        _Chunk(ops.multiply(ops.gather(pieces, part.both), ops.gather(signed, part.decays)), *values)
        for part, values in zip((at.before, at.behind), zip(*parts, strict=True), strict=True)
    )
    return first, second


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


def _meet(
    ops: Ops, chunk: _Chunk, state: Value, values: Value, beta: Value, part: Part, spec: DeltaSpec
) -> tuple[Value, Value]:
    """Multiply rows of a call with the state, if there is one; return the product and W, both in pieces."""
    product = ops.reshape(ops.matmul(chunk.both, state), [-1, spec.value_dim])
    # no sum of a product: whether that is one rounding or two would depend on whether n is fixed
    return product, ops.multiply(ops.add(ops.gather(product, part.from_keys), values), beta)


def _advance(ops: Ops, chunk: _Chunk, pieces: Value, state: Value, wanted: Value, part: Part, reached: Value) -> Value:
    """Return the state after the chunk, or none of it (a leading axis of 0) when the rows do not reach its end."""
    news = ops.matmul(ops.multiply(chunk.ending, reached), wanted)
    added = ops.matmul(ops.gather(pieces, part.keys), news, transpose_a=True)
    return ops.add(ops.multiply(state, ops.multiply(chunk.decay, reached)), added)
