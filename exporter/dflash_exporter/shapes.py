"""Every tensor a graph will ask for, with the shape the configuration implies.

Knows tensor names of the published checkpoints (prefix removed). Does not know files.
"""

from dflash_graphs.specs import AttentionSpec, DeltaSpec, DrafterSpec, TargetSpec

Shapes = dict[str, tuple[int, ...]]
EMBEDDING = "embed_tokens.weight"


def head_name(spec: TargetSpec) -> str:
    """Name of the matrix of the language model head: the embedding table where the two are tied."""
    return EMBEDDING if spec.tied_head else "lm_head.weight"


def expected_shapes(spec: TargetSpec | DrafterSpec) -> Shapes:
    """Return name -> shape ([out, in] for matrices) of all tensors of a target or a drafter."""
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    shapes: Shapes = {"norm.weight": (hidden,)}
    if isinstance(spec, DrafterSpec):
        shapes |= {"fc.weight": (hidden, spec.feature_width), "hidden_norm.weight": (hidden,)}
    else:
        shapes |= {EMBEDDING: (spec.vocab_size, hidden), head_name(spec): (spec.vocab_size, hidden)}
    for i, kind in enumerate(spec.layers):
        layer: Shapes = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        delta = spec.delta if isinstance(spec, TargetSpec) and kind == "delta" else None
        layer |= _attention(spec.attention, hidden) if delta is None else _delta(delta, hidden)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention(attn: AttentionSpec, hidden: int) -> Shapes:
    width = attn.heads * attn.head_dim
    matrices: Shapes = {
        "q_proj": (width * (2 if attn.output_gate else 1), hidden),
        "k_proj": (attn.kv_width, hidden),
        "v_proj": (attn.kv_width, hidden),
        "o_proj": (hidden, width),
    }
    shapes: Shapes = {f"self_attn.{name}.weight": shape for name, shape in matrices.items()}
    if attn.bias:
        shapes |= {f"self_attn.{name}.bias": shape[:1] for name, shape in matrices.items()}
    if attn.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (attn.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _delta(delta: DeltaSpec, hidden: int) -> Shapes:
    values = delta.value_heads * delta.value_dim
    return {
        "linear_attn.in_proj_qkv.weight": (delta.conv_width, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_a.weight": (delta.value_heads, hidden),
        "linear_attn.in_proj_b.weight": (delta.value_heads, hidden),
        "linear_attn.conv1d.weight": (delta.conv_width, 1, delta.kernel),
        "linear_attn.A_log": (delta.value_heads,),
        "linear_attn.dt_bias": (delta.value_heads,),
        "linear_attn.norm.weight": (delta.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }
