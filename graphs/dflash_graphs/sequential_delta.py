"""Gated DeltaNet by a kernel that goes token by token, for backends that have one.

Such a kernel gives the same bits however its rows are cut into calls, so nothing is padded: the window is the kept rows
and the call's own, cut at the chunk boundary alone, where the state is an output. Ports as in `delta.py`.
"""

from dataclasses import dataclass

import numpy as np

from .specs import CHUNK, DeltaSpec
from .vocabulary import KernelOps, Value
from .weights import Weights


@dataclass(frozen=True)
class Span:
    """Row counts shared by all recurrent layers of one call, i32 [1]."""

    ops: KernelOps
    zero: Value
    before: Value  # rows the convolution reaches back
    pending: Value  # rows kept since the boundary
    kept: Value  # both of these
    total: Value  # rows since the boundary, the call's own included
    chunk: Value  # those of them before the next boundary
    beyond: Value  # and from there on


def span(ops: KernelOps, spec: DeltaSpec, ids: Value) -> Span:
    """Declare the port `pending_rows` i32 [1], the number of kept rows since the boundary."""

    def number(n: int) -> Value:
        return ops.constant(np.array([n], np.int32))

    pending, before = ops.input("pending_rows", [1], "i32"), number(spec.kernel - 1)
    total = ops.add(pending, ops.rows(ids))
    chunk = ops.minimum(total, number(CHUNK))
    return Span(ops, number(0), before, pending, ops.add(pending, before), total, chunk, ops.subtract(total, chunk))


def sequential_delta(layer: int, mixed: Value, gates: Value, spec: DeltaSpec, at: Span, weights: Weights) -> Value:
    """As `delta.gated_delta`."""
    ops, kernel = at.ops, weights.array(f"layers.{layer}.linear_attn.conv1d.weight")
    past = ops.input(f"past_rows.{layer}", [spec.history, spec.conv_width])
    rows = ops.concat([ops.between(past, at.zero, at.kept), mixed], 0)
    rows = ops.causal_convolution(rows, kernel.reshape(spec.conv_width, 1, spec.kernel))
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    both, value = ops.split(rows, [2 * keys, values], 1)
    scale = np.array([spec.key_dim**-0.5, 1.0], np.float32).reshape(2, 1, 1)
    both = ops.l2_norm(ops.reshape(both, [-1, 2, spec.key_heads, spec.key_dim]), 1e-6, scale)
    query, key = ops.split(ops.reshape(both, [-1, 2 * keys]), [keys, keys], 1)
    decay, beta = _gates(layer, gates, spec, at, weights)
    state = ops.input(f"state.{layer}", [spec.value_heads, spec.key_dim, spec.value_dim])
    chunks = zip(*(ops.cut(x, at.chunk, at.beyond) for x in (query, key, value, decay, beta)), strict=True)
    outs, states = [], [state]
    for q, k, v, d, b in chunks:
        out, after = ops.recurrence(q, k, v, d, b, states[-1], spec)
        outs.append(out)
        states.append(after)
    ops.output(f"next_state.{layer}", states[1], [spec.value_heads, spec.key_dim, spec.value_dim])
    return ops.between(ops.concat(outs, 0), at.pending, at.total)


def _gates(layer: int, gates: Value, spec: DeltaSpec, at: Span, weights: Weights) -> tuple[Value, Value]:
    """Log decay and strength beta, [rows, value_heads]."""
    ops, prefix = at.ops, f"layers.{layer}.linear_attn"
    past = ops.input(f"past_gates.{layer}", [spec.history, 2 * spec.value_heads])
    gates = ops.concat([ops.between(past, at.before, at.kept), gates], 0)
    decay, beta = ops.split(gates, [spec.value_heads, spec.value_heads], 1)
    decay = ops.softplus(ops.add(decay, ops.constant(weights.array(f"{prefix}.dt_bias").reshape(-1))))
    rate = ops.constant(-np.exp(weights.array(f"{prefix}.A_log")).reshape(-1))
    return ops.multiply(decay, rate), ops.sigmoid(beta)
