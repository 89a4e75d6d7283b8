"""Qwen3 and Llama: pre-norm decoder layers with full attention."""

from .layers import self_attention, swiglu
from .positions import positions
from .specs import TargetSpec
from .vocabulary import Dim, Ops, Value
from .weights import Weights


def hidden_states(
    ops: Ops, spec: TargetSpec, weights: Weights, rows: Dim, capacity: Dim, x: Value
) -> tuple[list[Value], Value]:
    """Return the residual stream after every layer and the final normed rows, each [T, hidden]."""
    at = positions(ops, spec.attention.rope, rows)
    states = []
    for i in range(len(spec.layers)):
        prefix = f"layers.{i}"
        h = ops.rms_norm(x, weights.array(f"{prefix}.input_layernorm.weight"), spec.rms_eps)
        x = ops.add(x, self_attention(ops, i, h, weights, spec.attention, spec.rms_eps, at, capacity))
        h = ops.rms_norm(x, weights.array(f"{prefix}.post_attention_layernorm.weight"), spec.rms_eps)
        x = ops.add(x, swiglu(ops, h, weights, f"{prefix}.mlp"))
        states.append(x)
    return states, ops.rms_norm(x, weights.array("norm.weight"), spec.rms_eps)
