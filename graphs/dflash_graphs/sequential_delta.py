"""Gated DeltaNet by a kernel that goes token by token, for backends that have one.

Such a kernel gives the same bits however its rows are cut into calls, so a state may stand anywhere. A call first takes
the rows that the call before it left, which are known to stay by now, into the state, and then runs its own rows from
there; of these it returns the last state, for calls that are committed as a whole.

Ports of layer `i`, f32: inputs `past_rows.i` as in `recurrence.py`, `past_kept.i` [CHUNK, width], the rows to take in,
oldest first (keys, values, log decays, betas; what stands behind them is ignored), `state.i` [1, value_heads, key_dim,
value_dim], the one before them; outputs `rows.i` and `kept.i`, the T rows to keep, `next_state.i`, the state after the
rows taken in, which may have the memory of `state.i`, and `final_state.i`, after the call's own. For all layers:
`pending_rows` i32 [1], the number of rows to take in.
"""

from dataclasses import dataclass

import numpy as np

from .specs import DeltaSpec
from .vocabulary import KernelOps, Value


@dataclass(frozen=True)
class Span:
    """What all recurrent layers of one call share."""

    ops: KernelOps
    pending: Value  # i32 [1], rows to take in


def sequential_delta(
    layer: int, kept: Value, state: Value, qk: Value, rest: tuple[Value, ...], spec: DeltaSpec, at: Span
) -> tuple[Value, Value]:
    """Return the outputs of the call's rows [1, T, value_heads * value_dim] and what is to be kept of them [T, width].

    `qk` [T * 2 * key_heads, key_dim] are their unit queries and keys, `rest` their values [T, value_heads * value_dim],
    log decays and betas [T, value_heads].
    """
    ops, keys, heads = at.ops, spec.key_width, spec.value_heads
    others = [spec.value_width, heads, heads]
    shape = [1, spec.value_heads, spec.key_dim, spec.value_dim]
    taken = ops.between(kept, ops.constant(np.zeros(1, np.int32)), at.pending)
    key, *old = ops.split(ops.reshape(taken, [1, -1, keys + sum(others)]), [keys, *others], 2)
    _, state = ops.recurrence([key, key, *old], state, spec)  # nobody reads what queries would have got
    ops.output(f"next_state.{layer}", state, shape)
    query, key = ops.split(ops.reshape(qk, [1, -1, 2 * keys]), [keys, keys], 2)
    new = [ops.reshape(x, [1, -1, width]) for x, width in zip(rest, others, strict=True)]
    out, final = ops.recurrence([query, key, *new], state, spec)
    ops.output(f"final_state.{layer}", final, shape)
    return out, ops.concat([ops.reshape(key, [-1, keys]), *rest], 1)
