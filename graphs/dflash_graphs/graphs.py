"""The graphs of a bundle: what each computes, port by port.

| graph           | inputs                                          | outputs                                        |
| --------------- | ----------------------------------------------- | ---------------------------------------------- |
| target          | embeddings [T, H], position_ids i32 [T], caches | hidden [T, H], features [T, taps * H], caches  |
| head            | hidden [T, H]                                   | logits.i [T, ids of part i]                    |
|                 | drafted [D, H], beside a drafter                | draft_logits [D, ids of part 0], probability [D] |
| drafter_context | features [T, taps * H], position_ids i32 [T]    | key, value [T, kv_heads, head_dim] by layer     |
| drafter         | embeddings [T, H], position_ids i32 [T], caches | hidden [T, H], caches                          |

f32 unless said otherwise. The caches are the ports of `attention.py` (or `cached_attention.py`) and `recurrence.py`.
The head has its ids in parts, the lowest first: all serve the target, the first one the drafter.
`hidden` is after the final norm; `features` are the residual stream after the tapped layers, before any norm.
"""

from collections.abc import Callable, Sequence

import numpy as np

from . import dense, qwen3_5
from .errors import UnsupportedError
from .layers import heads, self_attention, swiglu
from .positions import positions, rotate
from .specs import DrafterSpec, TargetSpec
from .vocabulary import Dim, Ops, Value
from .weights import Matrix, Weights

HiddenStates = Callable[[Ops, TargetSpec, Weights, Dim, Dim, Value], tuple[list[Value], Value]]
FAMILIES: dict[str, HiddenStates] = {
    "qwen3_5": qwen3_5.hidden_states,
    "qwen3": dense.hidden_states,
    "llama": dense.hidden_states,
}


def target(ops: Ops, spec: TargetSpec, weights: Weights, taps: tuple[int, ...], *, rows: Dim, capacity: Dim) -> None:
    """Emit the target for `rows` token rows and `capacity` cached positions."""
    if spec.family not in FAMILIES:
        raise UnsupportedError(f"target family {spec.family!r} is unknown; known: {', '.join(FAMILIES)}")
    x = ops.input("embeddings", [rows, spec.hidden_size])
    states, final = FAMILIES[spec.family](ops, spec, weights, rows, capacity, x)
    ops.output("hidden", final, [-1, spec.hidden_size])
    if taps:
        ops.output("features", ops.concat([states[t] for t in taps], 1), [-1, len(taps) * spec.hidden_size])


def head(ops: Ops, parts: Sequence[Matrix], *, rows: Dim, drafted: Dim | None) -> None:
    """Emit the language model head; `drafted` rows of a drafter meet part 0 alone.

    A program runs one of the two inputs and leaves the other without rows, so that both share one copy of the weights.
    """
    hidden = ops.input("hidden", [rows, parts[0].shape[1]])
    for i, part in enumerate(parts):
        ops.output(f"logits.{i}", ops.linear(hidden, part), [rows, part.shape[0]])
    if drafted is not None:
        logits = ops.linear(ops.input("drafted", [drafted, parts[0].shape[1]]), parts[0])
        ops.output("draft_logits", logits, [drafted, parts[0].shape[0]])
        ops.output("probability", ops.reduce_max(ops.softmax(logits, 1)), [drafted])  # of the likeliest token


def drafter_context(ops: Ops, spec: DrafterSpec, weights: Weights, *, rows: Dim) -> None:
    """Emit the projection of target features to the keys and values of every drafter layer."""
    attn = spec.attention
    features = ops.input("features", [rows, spec.feature_width])
    at = positions(ops, attn.rope, rows)
    context = ops.linear(features, weights.matrix("fc.weight"))
    context = ops.rms_norm(context, weights.array("hidden_norm.weight"), spec.rms_eps)
    keys, values = {}, {}
    for i in range(len(spec.layers)):
        prefix = f"layers.{i}.self_attn"
        norm = f"{prefix}.k_norm" if attn.qk_norm else None
        key = heads(ops, context, weights, f"{prefix}.k_proj", attn.kv_heads, attn, spec.rms_eps, norm)
        key = rotate(ops, key, at, attn.rope, attn.kv_heads, attn.head_dim)
        value = heads(ops, context, weights, f"{prefix}.v_proj", attn.kv_heads, attn, spec.rms_eps, None)
        keys[i], values[i] = key, value
    ops.layers_output("key", keys, [-1, attn.kv_heads, attn.head_dim])
    ops.layers_output("value", values, [-1, attn.kv_heads, attn.head_dim])


def drafter(ops: Ops, spec: DrafterSpec, weights: Weights, *, rows: Dim, capacity: Dim) -> None:
    """Emit the drafter over one block: anchor and masks in, hidden rows for the head out."""
    x = ops.input("embeddings", [rows, spec.hidden_size])
    if spec.embedding_scale != 1.0:
        x = ops.multiply(x, ops.constant(np.array(spec.embedding_scale, np.float32)))
    at = positions(ops, spec.attention.rope, rows)
    for i, layer in enumerate(spec.layers):
        h = ops.rms_norm(x, weights.array(f"layers.{i}.input_layernorm.weight"), spec.rms_eps)
        mixed = self_attention(
            ops, i, h, weights, spec.attention, spec.rms_eps, at, capacity, window=layer.window, causal=layer.causal
        )
        x = ops.add(x, mixed)
        h = ops.rms_norm(x, weights.array(f"layers.{i}.post_attention_layernorm.weight"), spec.rms_eps)
        x = ops.add(x, swiglu(ops, h, weights, f"layers.{i}.mlp"))
    ops.output("hidden", ops.rms_norm(x, weights.array("norm.weight"), spec.rms_eps), [-1, spec.hidden_size])
