"""The configuration files of DFlash drafters, turned into a `DrafterSpec`.

Knows where DFlash keys lie (nested in `dflash_config`, else at top level, else a default) and what marks the drafter
kinds this version does not draft with. Does not know tensors or graphs.
"""

from collections.abc import Mapping
from typing import Any

from dflash_graphs.errors import CheckpointError, UnsupportedError
from dflash_graphs.specs import CHUNK, AttentionSpec, DrafterLayer, DrafterSpec, TargetSpec

from .hf_config import Keys, refuse_quantised, rope_keys, rope_spec

_ARCHITECTURE = "DFlashDraftModel"
# key, values that are harmless, what any other value means
_OTHER_KINDS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("speculators_model_type", (), "a drafter in speculators packaging"),
    ("conv_kernel_size", (), "a DFlash 2 drafter"),
    ("selector_rank", (), "a DFlash 2 drafter"),
    ("markov_rank", (), "a DSpark / DeepSpec drafter"),
    ("sample_from_anchor", (False,), "an anchor-first drafter"),
    ("attention_sink_bias", (False,), "a MiMo drafter (attention sinks)"),
    ("attention_value_scale", (1, 1.0), "a MiMo drafter (value scale)"),
    ("use_swa", (False,), "a MiMo drafter (sliding window without layer_types)"),
    ("has_own_lm_head", (False,), "a drafter with its own head"),
    ("has_lm_head", (False,), "a drafter with its own head"),
    ("has_embed_tokens", (False,), "a drafter with its own embeddings"),
)


def drafter_spec(config: Mapping[str, Any], target: TargetSpec, where: str = "config.json") -> DrafterSpec:
    """Read a DFlash v1 drafter's `config.json` and check that it fits `target`.

    Raises UnsupportedError for other drafter kinds, by name, and CheckpointError for missing keys and for a drafter
    that was trained for another target.
    """
    nested = config.get("dflash_config") or {}
    keys = Keys({**config, **{key: value for key, value in nested.items() if value is not None}}, where)
    _refuse_other_kinds(keys)
    heads, head_dim = keys.size("num_attention_heads"), keys.size("head_dim", 128)
    spec = DrafterSpec(
        kind="dflash",
        hidden_size=keys.size("hidden_size"),
        intermediate_size=keys.size("intermediate_size"),
        layers=_layers(keys),
        rms_eps=keys.number("rms_norm_eps"),
        attention=AttentionSpec(
            heads=heads,
            kv_heads=keys.size("num_key_value_heads", heads),
            head_dim=head_dim,
            # a partial_rotary_factor here is a copy of the target's; drafters rotate whole heads
            rope=rope_spec(keys, rope_keys(keys), head_dim, None),
            qk_norm=True,
            bias=bool(keys.get("attention_bias", False)),
        ),
        block_size=keys.size("block_size", 16),
        mask_token_id=keys.need("mask_token_id"),
        taps=_taps(keys, target),
        target_hidden_size=keys.size("target_hidden_size", keys.size("hidden_size")),
        embedding_scale=keys.number("input_embedding_scale", 1.0),
    )
    _check_fit(keys, spec, target)
    return spec


def _refuse_other_kinds(keys: Keys) -> None:
    refuse_quantised(keys)
    projector = keys.get("projector_type")
    if projector:
        raise UnsupportedError(f"{keys.where}: a {projector} drafter (projector_type) is not supported yet.")
    for key, harmless, kind in _OTHER_KINDS:
        value = keys.values.get(key)
        if value is not None and value not in harmless:
            raise UnsupportedError(
                f"{keys.where}: {kind} ({key} = {value!r}) is not supported; DFlash v1 drafters are."
            )
    architectures = keys.need("architectures")
    if _ARCHITECTURE not in architectures:
        raise UnsupportedError(
            f"{keys.where}: the architecture {', '.join(architectures)} is not supported as a drafter. "
            f"Supported: {_ARCHITECTURE}."
        )
    keys.refuse_unless("hidden_act", "silu")
    keys.refuse_unless("is_neox_style", True)
    keys.refuse_unless("rope_is_neox_style", True)


def _layers(keys: Keys) -> tuple[DrafterLayer, ...]:
    """Resolve window and in-block causality of every layer.

    The file's own `layer_types` count even where `use_sliding_window` is false: transformers writes that flag and then
    forgets the window the drafter was trained with.
    """
    count = keys.size("num_hidden_layers")
    kinds = keys.get("layer_types")
    if kinds is None:
        full = keys.get("max_window_layers", count) if keys.get("use_sliding_window") else count
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(count)]
    if len(kinds) != count:
        raise CheckpointError(f"{keys.where}: layer_types lists {len(kinds)} layers, num_hidden_layers says {count}.")
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise UnsupportedError(f"{keys.where}: layers of type {', '.join(strange)} are not supported in a drafter.")
    causal = keys.get("is_causal", keys.get("causal"))
    layers = []
    for kind in kinds:
        sliding = kind == "sliding_attention"
        window = keys.size("sliding_window") if sliding else None
        layers.append(DrafterLayer(window=window, causal=sliding if causal is None else bool(causal)))
    return tuple(layers)


def _taps(keys: Keys, target: TargetSpec) -> tuple[int, ...]:
    stated = keys.get("target_layer_ids")
    if stated is not None:
        return tuple(stated)
    count, depth = keys.size("num_hidden_layers"), len(target.layers)
    if count == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (count - 1)) for i in range(count))


def _check_fit(keys: Keys, spec: DrafterSpec, target: TargetSpec) -> None:
    depth = len(target.layers)
    pairs = (
        ("hidden_size", spec.hidden_size, target.hidden_size),
        ("target_hidden_size", spec.target_hidden_size, target.hidden_size),
        ("vocab_size", keys.get("vocab_size", target.vocab_size), target.vocab_size),
        ("draft_vocab_size", keys.get("draft_vocab_size", target.vocab_size), target.vocab_size),
        ("num_target_layers", keys.get("num_target_layers", depth), depth),
    )
    for key, drafter_value, target_value in pairs:
        if drafter_value != target_value:
            raise CheckpointError(
                f"The drafter does not fit the target: its {key} is {drafter_value}, the target has {target_value} "
                f"({keys.where}). Choose the drafter trained for this target."
            )
    wrong = [tap for tap in spec.taps if not 0 <= tap < depth - 1]
    if wrong or not spec.taps:
        raise CheckpointError(
            f"{keys.where}: target_layer_ids {list(spec.taps)} do not fit the target's {depth} layers "
            f"(allowed: 0 to {depth - 2}; the last layer cannot be tapped)."
        )
    if not isinstance(spec.mask_token_id, int) or not 0 <= spec.mask_token_id < target.vocab_size:
        raise CheckpointError(
            f"{keys.where}: mask_token_id {spec.mask_token_id!r} lies outside the target's {target.vocab_size} tokens."
        )
    if not 2 <= spec.block_size <= CHUNK:
        raise UnsupportedError(f"{keys.where}: block_size {spec.block_size} is not supported (2 to {CHUNK} are).")
