"""Qwen3.5: three Gated DeltaNet layers to one full attention layer with an output gate.

Norm weights are stored as `w` and used as `1 + w`, except the gated norm of the recurrent layers.
"""

import numpy as np

from .attention import attention
from .delta import gated_delta
from .layers import heads, swiglu
from .positions import Positions, positions
from .recurrence import Recurrence, recurrence
from .specs import TargetSpec
from .vocabulary import Dim, Ops, Value
from .weights import Matrix, Weights


def hidden_states(
    ops: Ops, spec: TargetSpec, weights: Weights, rows: Dim, capacity: Dim, x: Value
) -> tuple[list[Value], Value]:
    """Return the residual stream after every layer and the final normed rows, each [T, hidden]."""
    assert spec.delta is not None

    def norm(value: Value, name: str) -> Value:
        return ops.rms_norm(value, weights.array(f"{name}.weight") + 1, spec.rms_eps)

    at = positions(ops, spec.attention.rope, rows)
    recurrent = recurrence(ops, spec.delta, spec.delta_layers, rows, at.ids)
    states = []
    for i, kind in enumerate(spec.layers):
        h = norm(x, f"layers.{i}.input_layernorm")
        if kind == "attention":
            x = ops.add(x, _gated_attention(ops, i, h, spec, weights, at, capacity))
        else:
            x = ops.add(x, _delta_layer(ops, i, h, spec, weights, recurrent))
        x = ops.add(x, swiglu(ops, norm(x, f"layers.{i}.post_attention_layernorm"), weights, f"layers.{i}.mlp"))
        states.append(x)
    recurrent.declare_outputs(ops, spec.delta)
    return states, norm(x, "norm")


def _gated_attention(
    ops: Ops, i: int, h: Value, spec: TargetSpec, weights: Weights, at: Positions, capacity: Dim
) -> Value:
    attn, prefix = spec.attention, f"layers.{i}.self_attn"
    both = ops.linear(h, weights.matrix(f"{prefix}.q_proj.weight"))  # per head: query, then gate
    query, gate = ops.split(ops.reshape(both, [-1, attn.heads, 2 * attn.head_dim]), [attn.head_dim, attn.head_dim], 2)
    query = ops.rms_norm(query, weights.array(f"{prefix}.q_norm.weight") + 1, spec.rms_eps)
    key = heads(ops, h, weights, f"{prefix}.k_proj", attn.kv_heads, attn, spec.rms_eps, None)
    key = ops.rms_norm(key, weights.array(f"{prefix}.k_norm.weight") + 1, spec.rms_eps)
    value = heads(ops, h, weights, f"{prefix}.v_proj", attn.kv_heads, attn, spec.rms_eps, None)
    mixed = attention(ops, i, query, key, value, attn, at, capacity)
    mixed = ops.multiply(mixed, ops.sigmoid(ops.reshape(gate, [-1, attn.heads * attn.head_dim])))
    return ops.linear(mixed, weights.matrix(f"{prefix}.o_proj.weight"))


def _delta_layer(ops: Ops, i: int, h: Value, spec: TargetSpec, weights: Weights, at: Recurrence) -> Value:
    assert spec.delta is not None
    delta, prefix = spec.delta, f"layers.{i}.linear_attn"
    mixed = ops.linear(h, weights.matrix(f"{prefix}.in_proj_qkv.weight"))
    gate = ops.linear(h, weights.matrix(f"{prefix}.in_proj_z.weight"))
    # errors here would accumulate in the recurrence: these two stay in floats
    floats = [weights.matrix(f"{prefix}.in_proj_{x}.weight", precise=True).values for x in "ab"]
    stacked = np.concatenate(floats)
    gates = ops.linear(h, Matrix(stacked, (len(stacked), spec.hidden_size)))
    out = gated_delta(ops, i, mixed, gates, delta, at, weights)
    eps = spec.rms_eps * delta.key_dim  # instead of a scale for the queries
    out = ops.rms_norm(out, weights.array(f"{prefix}.norm.weight"), eps)
    out = ops.multiply(ops.reshape(out, [-1, delta.value_heads * delta.value_dim]), ops.silu(gate))
    return ops.linear(out, weights.matrix(f"{prefix}.out_proj.weight"))
