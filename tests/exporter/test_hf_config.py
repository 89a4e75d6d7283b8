"""Configurations of every supported family and generation, and the ones that are refused, by name."""

from typing import Any

import pytest
from dflash_exporter.hf_config import target_spec
from dflash_graphs.errors import CheckpointError, UnsupportedError
from dflash_graphs.specs import AttentionSpec, DeltaSpec, Llama3Scaling, RopeSpec

from tests.exporter.checkpoints import LLAMA, QWEN3, QWEN3_5

_TEXT_9B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "output_gate_type": "swish",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
_QWEN3_5_9B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": _TEXT_9B,
    "vision_config": {"hidden_size": 1152},
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_qwen3_5_multimodal_is_unwrapped() -> None:
    spec = target_spec(_QWEN3_5_9B)
    assert spec.family == "qwen3_5"
    assert spec.layers == ("delta", "delta", "delta", "attention") * 8
    assert not spec.tied_head
    assert spec.attention == AttentionSpec(
        heads=16, kv_heads=4, head_dim=256, rope=RopeSpec(theta=1e7, dim=64), qk_norm=True, output_gate=True
    )
    assert spec.delta == DeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
    assert spec.delta.conv_width == 8192


@pytest.mark.parametrize(("outer", "inner", "tied"), [(True, None, True), (None, True, True), (None, None, False)])
def test_tied_head_may_be_stated_at_either_level(outer: bool | None, inner: bool | None, tied: bool) -> None:
    config = _QWEN3_5_9B | {"tie_word_embeddings": outer, "text_config": _TEXT_9B | {"tie_word_embeddings": inner}}
    assert target_spec(config).tied_head is tied


def test_qwen3_5_text_only() -> None:
    spec = target_spec(QWEN3_5)
    assert spec.layers == ("delta", "delta", "delta", "attention")
    assert spec.attention.rope == RopeSpec(theta=1e7, dim=8)


def test_layer_types_outrank_the_interval() -> None:
    kinds = ["full_attention", "linear_attention"] * 16
    assert target_spec(_QWEN3_5_9B | {"text_config": _TEXT_9B | {"layer_types": kinds}}).layers[0] == "attention"


def test_qwen3_4b() -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 36,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
    spec = target_spec(config)
    assert (spec.family, spec.tied_head, spec.delta) == ("qwen3", True, None)
    assert spec.attention == AttentionSpec(
        heads=32, kv_heads=8, head_dim=128, rope=RopeSpec(theta=1e6, dim=128), qk_norm=True
    )


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_in_both_spellings(key: str) -> None:
    config = LLAMA | {"rope_theta": 500000.0, key: _LLAMA3_ROPE}
    scaling = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    assert target_spec(config).attention.rope == RopeSpec(theta=5e5, dim=16, scaling=scaling)


def test_rope_parameters_carry_theta() -> None:
    config = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}, "rope_theta": 1.0}
    assert target_spec(config).attention.rope.theta == 7e4


def test_defaults_of_old_llama_files() -> None:
    attention = target_spec(LLAMA).attention
    assert (attention.kv_heads, attention.head_dim, attention.rope.theta) == (4, 16, 10000.0)
    assert not attention.qk_norm
    assert not attention.bias
    assert target_spec(LLAMA | {"head_dim": None, "attention_bias": True}).attention.bias


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": (LLAMA | {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*Supported: Qwen3_5.*Llama"),
    "moe": (QWEN3 | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}, "mixture of experts"),
    "experts": (QWEN3 | {"num_experts": 8}, "num_experts = 8"),
    "quantised": (QWEN3 | {"quantization_config": {"quant_method": "fp8"}}, "quantised .fp8."),
    "quantised text": (
        _QWEN3_5_9B | {"text_config": _TEXT_9B | {"quantization_config": {"quant_method": "awq"}}},
        "quantised .awq.",
    ),
    "yarn": (QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
    "linear": (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
    "dynamic": (LLAMA | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
    "mrope": (QWEN3 | {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}}, "mrope"),
    "partial rotary": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "activation": (LLAMA | {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "mlp bias": (LLAMA | {"mlp_bias": True}, "mlp_bias"),
    "sliding": (QWEN3 | {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
    "sliding layers": (QWEN3 | {"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
    "ungated": (QWEN3_5 | {"attn_output_gate": False}, "attn_output_gate"),
    "hybrid bias": (QWEN3_5 | {"attention_bias": True}, "attention_bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_reason(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        target_spec(config, "somewhere/config.json")


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "linear_num_value_heads",
        "rope_parameters",
    ],
)
def test_missing_keys_are_named_with_the_file(key: str) -> None:
    config = {k: v for k, v in QWEN3_5.items() if k != key}
    named = "rope_theta" if key == "rope_parameters" else key
    with pytest.raises(CheckpointError, match=f"somewhere/config.json.*'{named}' is missing"):
        target_spec(config, "somewhere/config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "64"}, "'hidden_size' is '64', expected a positive whole number"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"rms_norm_eps": -1.0}, "'rms_norm_eps' is -1.0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot be shared by 3"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers, num_hidden_layers says 4"),
    ],
)
def test_senseless_values_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        target_spec(QWEN3_5 | change)
