"""Gated DeltaNet by a kernel that goes token by token, for backends that have one.

Such a kernel gives the same bits however its rows are cut into calls, so nothing is padded: it runs over the kept rows
and the call's own, cut at the last chunk boundary, where the state is an output. Ports as in `recurrence.py`, without
`crossing`, `full` and `full_state`, but with `boundaries` i32 [1], how many chunk boundaries the rows reach;
`next_state.i` is the state after the last of them, if there is one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .specs import CHUNK, DeltaSpec
from .vocabulary import KernelOps, Value


@dataclass(frozen=True)
class Span:
    """Row counts shared by all recurrent layers of one call, i32 [1]."""

    ops: KernelOps
    zero: Value
    pending: Value  # rows kept since the boundary
    total: Value  # rows since the boundary, the call's own included
    before: Value  # those of them before the last boundary
    beyond: Value  # and from there on


def span(ops: KernelOps, ids: Value, pending: Value) -> Span:
    """`ids` i32 [T] are the positions of the call's rows, `pending` i32 [1] the number of kept ones."""
    boundaries = ops.input("boundaries", [1], "i32")
    total = ops.add(pending, ops.rows(ids))
    before = ops.multiply(boundaries, ops.constant(np.array([CHUNK], np.int32)))
    zero = ops.constant(np.zeros(1, np.int32))
    return Span(ops, zero, pending, total, before, ops.subtract(total, before))


def sequential_delta(
    layer: int,
    kept: Mapping[str, Value],
    new: Mapping[str, Value],
    state: Value,
    spec: DeltaSpec,
    at: Span,
) -> Value:
    """Run the recurrence over the kept and the new rows of `qk`, `v` and `gates`; returns the new ones' outputs."""
    ops, keys = at.ops, spec.key_heads * spec.key_dim
    qk, value, gates = (ops.concat([ops.between(kept[name], at.zero, at.pending), new[name]], 0) for name in new)
    query, key = ops.split(qk, [keys, keys], 1)
    decay, beta = ops.split(gates, [spec.value_heads, spec.value_heads], 1)
    chunks = zip(*(ops.cut(x, at.before, at.beyond) for x in (query, key, value, decay, beta)), strict=True)
    outs, states = [], [state]
    for q, k, v, d, b in chunks:
        out, after = ops.recurrence(q, k, v, d, b, states[-1], spec)
        outs.append(out)
        states.append(after)
    ops.output(f"next_state.{layer}", states[1], [spec.value_heads, spec.key_dim, spec.value_dim])
    return ops.between(ops.concat(outs, 0), at.pending, at.total)
