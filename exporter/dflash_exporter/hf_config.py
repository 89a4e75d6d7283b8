"""The configuration files of target checkpoints, turned into a `TargetSpec`.

Knows the key names, defaults and historical spellings of Hub `config.json` files (with `drafter_config`, the only
reader of them). Does not know tensors or graphs. Whatever a graph would compute wrongly is refused here, by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_graphs.errors import CheckpointError, UnsupportedError
from dflash_graphs.specs import AttentionSpec, DeltaSpec, LayerKind, Llama3Scaling, RopeSpec, TargetSpec


@dataclass(frozen=True)
class Keys:
    """A configuration with the name of the file it came from, for messages."""

    values: Mapping[str, Any]
    where: str

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, `default` where the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str, default: Any = None) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.where}: the key {key!r} is missing. Download the checkpoint again.")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.need(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.where}: {key!r} is {value!r}, expected a positive whole number.")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.need(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{self.where}: {key!r} is {value!r}, expected a positive number.")
        return float(value)

    def refuse_unless(self, key: str, *accepted: Any) -> None:
        """Refuse any value of `key` outside `accepted`; an absent or null key passes."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            known = ", ".join(repr(a) for a in accepted)
            raise UnsupportedError(f"{self.where}: {key} = {value!r} is not supported (supported: {known}).")


@dataclass(frozen=True)
class _Family:
    """What the configuration files of a family leave unsaid."""

    name: str
    qk_norm: bool
    head_dim: int | None  # None: hidden_size / num_attention_heads
    rope_theta: float | None  # None: the key is required
    rotary: float  # rotated part of a head; another value is refused where this is 1


_QWEN3_5 = _Family("qwen3_5", True, 256, None, 0.25)
_QWEN3 = _Family("qwen3", True, 128, None, 1.0)
_LLAMA = _Family("llama", False, None, 10000.0, 1.0)
_ARCHITECTURES = {
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3ForCausalLM": _QWEN3,
    "LlamaForCausalLM": _LLAMA,
}


def target_spec(config: Mapping[str, Any], where: str = "config.json") -> TargetSpec:
    """Read a target's `config.json`; a multimodal file is unwrapped to its `text_config`.

    Raises UnsupportedError for what this version does not handle and CheckpointError for missing or senseless keys;
    both name the key and `where`.
    """
    family = _family(Keys(config, where))
    nested = config.get("text_config")
    keys = Keys(nested, f"{where} (text_config)") if isinstance(nested, Mapping) else Keys(config, where)
    refuse_quantised(keys)
    keys.refuse_unless("hidden_act", "silu")
    for count in ("num_experts", "num_local_experts", "n_routed_experts"):
        keys.refuse_unless(count, 0)
    keys.refuse_unless("mlp_bias", False)
    layers = _layers(keys, family)
    return TargetSpec(
        family=family.name,
        vocab_size=keys.size("vocab_size"),
        hidden_size=keys.size("hidden_size"),
        intermediate_size=keys.size("intermediate_size"),
        layers=layers,
        rms_eps=keys.number("rms_norm_eps"),
        tied_head=bool(keys.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        max_positions=keys.size("max_position_embeddings"),
        attention=_attention(keys, family),
        delta=_delta(keys) if "delta" in layers else None,
    )


def _family(keys: Keys) -> _Family:
    refuse_quantised(keys)
    names = keys.need("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    if "moe" in str(name).lower() or "mixtral" in str(name).lower():
        raise UnsupportedError(f"{keys.where}: {name} is a mixture of experts; only dense targets are supported.")
    raise UnsupportedError(
        f"{keys.where}: the architecture {name!r} is not supported as a target. Supported: {', '.join(_ARCHITECTURES)}."
    )


def refuse_quantised(keys: Keys) -> None:
    """Raise UnsupportedError for a checkpoint that was stored quantised."""
    found = keys.get("quantization_config") or keys.get("compression_config")
    if found:
        method = found.get("quant_method", "unknown method") if isinstance(found, Mapping) else found
        raise UnsupportedError(
            f"{keys.where}: the checkpoint is quantised ({method}). Export the original bf16, f16 or f32 checkpoint; "
            "weights are compressed during the export."
        )


def _layers(keys: Keys, family: _Family) -> tuple[LayerKind, ...]:
    count = keys.size("num_hidden_layers")
    if family is not _QWEN3_5:
        keys.refuse_unless("use_sliding_window", False)
        kinds = keys.get("layer_types", ["full_attention"] * count)
        known: dict[str, LayerKind] = {"full_attention": "attention"}
    else:
        interval = keys.size("full_attention_interval", 4)
        alternating = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]
        kinds = keys.get("layer_types", alternating)
        known = {"full_attention": "attention", "linear_attention": "delta"}
    if len(kinds) != count:
        raise CheckpointError(f"{keys.where}: layer_types lists {len(kinds)} layers, num_hidden_layers says {count}.")
    strange = sorted(set(kinds) - set(known))
    if strange:
        raise UnsupportedError(f"{keys.where}: layers of type {', '.join(strange)} are not supported in a target.")
    return tuple(known[kind] for kind in kinds)


def _attention(keys: Keys, family: _Family) -> AttentionSpec:
    hybrid = family is _QWEN3_5
    if hybrid:
        keys.refuse_unless("attention_bias", False)
        keys.refuse_unless("attn_output_gate", True)
        keys.refuse_unless("output_gate_type", "swish")  # the gate of the recurrent layers' norm
    heads = keys.size("num_attention_heads")
    head_dim = keys.size("head_dim", family.head_dim or keys.size("hidden_size") // heads)
    return AttentionSpec(
        heads=heads,
        kv_heads=_kv_heads(keys, heads),
        head_dim=head_dim,
        rope=_rope(keys, family, head_dim),
        qk_norm=family.qk_norm,
        bias=bool(keys.get("attention_bias", False)),
        output_gate=hybrid,
    )


def _kv_heads(keys: Keys, heads: int) -> int:
    kv_heads = keys.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{keys.where}: {heads} attention heads cannot be shared by {kv_heads} key/value heads.")
    return kv_heads


def _rope(keys: Keys, family: _Family, head_dim: int) -> RopeSpec:
    rope = rope_keys(keys)
    rotary = rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", family.rotary))
    if family.rotary == 1.0 and rotary != 1.0:
        raise UnsupportedError(f"{keys.where}: partial_rotary_factor = {rotary} is not supported for {family.name}.")
    if family is not _QWEN3_5 and rope.get("mrope_section"):
        raise UnsupportedError(f"{keys.where}: the rope type 'mrope' is not supported for {family.name}.")
    # on text all axes of the multimodal rope of Qwen3.5 carry the same position: plain rope is exact
    return rope_spec(keys, rope, int(head_dim * rotary), family.rope_theta)


def rope_keys(keys: Keys) -> Keys:
    """Return the rotary parameters: `rope_parameters` (2026 spelling), else `rope_scaling`, else nothing."""
    for key in ("rope_parameters", "rope_scaling"):
        found = keys.get(key)
        if isinstance(found, Mapping):
            return Keys(found, f"{keys.where} ({key})")
    return Keys({}, keys.where)


def rope_spec(keys: Keys, rope: Keys, dim: int, theta: float | None) -> RopeSpec:
    """Build the RopeSpec over `dim` entries of a head; `theta` is the default, None where the key is required."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedError(f"{rope.where}: the rope type {kind!r} is not supported (supported: default, llama3).")
    if dim < 2 or dim % 2:
        raise CheckpointError(f"{keys.where}: rotary embedding over {dim} entries of a head makes no sense.")
    scaling = None
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_positions=rope.size(
                "original_max_position_embeddings", keys.get("original_max_position_embeddings")
            ),
        )
    return RopeSpec(theta=rope.number("rope_theta", keys.get("rope_theta", theta)), dim=dim, scaling=scaling)


def _delta(keys: Keys) -> DeltaSpec:
    spec = DeltaSpec(
        key_heads=keys.size("linear_num_key_heads"),
        value_heads=keys.size("linear_num_value_heads"),
        key_dim=keys.size("linear_key_head_dim"),
        value_dim=keys.size("linear_value_head_dim"),
        kernel=keys.size("linear_conv_kernel_dim"),
    )
    if spec.value_heads % spec.key_heads:
        raise CheckpointError(
            f"{keys.where}: {spec.value_heads} linear value heads cannot share {spec.key_heads} linear key heads."
        )
    return spec
