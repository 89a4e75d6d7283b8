"""Parts every architecture of the Qwen and Llama line shares."""

import numpy as np
from numpy.typing import NDArray

from .attention import attention
from .positions import Positions
from .specs import AttentionSpec
from .vocabulary import Dim, Ops, Value
from .weights import Weights


def swiglu(ops: Ops, x: Value, weights: Weights, prefix: str) -> Value:
    """`down(silu(gate(x)) * up(x))`, [T, hidden] -> [T, hidden]."""
    gate = ops.linear(x, weights.matrix(f"{prefix}.gate_proj.weight"))
    up = ops.linear(x, weights.matrix(f"{prefix}.up_proj.weight"))
    return ops.linear(ops.multiply(ops.silu(gate), up), weights.matrix(f"{prefix}.down_proj.weight"))


def bias(weights: Weights, spec: AttentionSpec, name: str) -> NDArray[np.float32] | None:
    return weights.array(f"{name}.bias") if spec.bias else None


def heads(
    ops: Ops, x: Value, weights: Weights, name: str, count: int, spec: AttentionSpec, eps: float, norm: str | None
) -> Value:
    """Project [T, hidden] to [T, count, head_dim] and apply the per-head norm `norm` when the family has one."""
    y = ops.linear(x, weights.matrix(f"{name}.weight"), bias(weights, spec, name))
    y = ops.reshape(y, [-1, count, spec.head_dim])
    return y if norm is None else ops.rms_norm(y, weights.array(f"{norm}.weight"), eps)


def self_attention(
    ops: Ops,
    layer: int,
    x: Value,
    weights: Weights,
    spec: AttentionSpec,
    eps: float,
    at: Positions,
    capacity: Dim,
    *,
    window: int | None = None,
    causal: bool = True,
) -> Value:
    """Plain grouped-query self-attention of Qwen3 (per-head norms) and Llama (none), [T, hidden] -> [T, hidden]."""
    prefix = f"layers.{layer}.self_attn"
    norms = (f"{prefix}.q_norm", f"{prefix}.k_norm") if spec.qk_norm else (None, None)
    query = heads(ops, x, weights, f"{prefix}.q_proj", spec.heads, spec, eps, norms[0])
    key = heads(ops, x, weights, f"{prefix}.k_proj", spec.kv_heads, spec, eps, norms[1])
    value = heads(ops, x, weights, f"{prefix}.v_proj", spec.kv_heads, spec, eps, None)
    mixed = attention(ops, layer, query, key, value, spec, at, capacity, window=window, causal=causal)
    return ops.linear(mixed, weights.matrix(f"{prefix}.o_proj.weight"), bias(weights, spec, f"{prefix}.o_proj"))
