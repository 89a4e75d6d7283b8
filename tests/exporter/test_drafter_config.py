"""Drafter configurations of both generations, other kinds refused by name, and drafters of another target."""

from typing import Any

import pytest
from dflash_exporter.drafter_config import drafter_spec
from dflash_exporter.hf_config import target_spec
from dflash_graphs.errors import CheckpointError, UnsupportedError
from dflash_graphs.specs import DrafterLayer, TargetSpec

from tests.exporter.checkpoints import DRAFTER, LLAMA, QWEN3, QWEN3_5

TARGET = target_spec(QWEN3_5)
FULL = DrafterLayer(window=None, causal=False)
SLIDING = ["sliding_attention", "full_attention"]


def nested(**more: Any) -> dict[str, Any]:
    return DRAFTER | {"dflash_config": DRAFTER["dflash_config"] | more}


def deep_target(layers: int) -> TargetSpec:
    return target_spec(LLAMA | {"num_hidden_layers": layers})


def test_legacy_file() -> None:
    spec = drafter_spec(DRAFTER, TARGET)
    assert (spec.block_size, spec.mask_token_id, spec.taps) == (8, 95, (0, 2))
    assert spec.layers == (FULL, FULL)
    assert spec.attention.qk_norm
    assert spec.attention.rope.dim == 16
    assert spec.feature_width == 128


def test_newer_file_nests_everything() -> None:
    config = {k: v for k, v in DRAFTER.items() if k not in ("block_size", "rope_theta")}
    config |= {
        "dflash_config": DRAFTER["dflash_config"] | {"block_size": 10, "input_embedding_scale": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.25},
        "layer_types": SLIDING,
        "sliding_window": 32,
    }
    spec = drafter_spec(config, TARGET)
    assert (spec.block_size, spec.embedding_scale) == (10, 2.0)
    assert (spec.attention.rope.theta, spec.attention.rope.dim) == (5e6, 16)
    assert spec.layers == (DrafterLayer(window=32, causal=True), FULL)


def test_nested_keys_win_and_defaults_fill() -> None:
    assert drafter_spec(nested(block_size=4), TARGET).block_size == 4
    assert drafter_spec(nested(block_size=None), TARGET).block_size == 8
    flat = {k: v for k, v in DRAFTER.items() if k not in ("block_size", "dflash_config")} | DRAFTER["dflash_config"]
    assert drafter_spec(flat, TARGET).block_size == 16
    assert drafter_spec(flat, TARGET).taps == (0, 2)


@pytest.mark.parametrize(
    ("layers", "depth", "taps"), [(5, 36, (1, 9, 17, 25, 33)), (5, 32, (1, 8, 15, 22, 29)), (1, 32, (16,))]
)
def test_default_taps_are_those_of_published_drafters(layers: int, depth: int, taps: tuple[int, ...]) -> None:
    config = DRAFTER | {"num_hidden_layers": layers, "num_target_layers": depth, "dflash_config": {"mask_token_id": 1}}
    assert drafter_spec(config, deep_target(depth)).taps == taps


@pytest.mark.parametrize("flag", [False, None])
def test_listed_windows_survive_the_use_sliding_window_flag(flag: bool | None) -> None:
    config = DRAFTER | {"layer_types": SLIDING, "sliding_window": 2048, "use_sliding_window": flag}
    assert drafter_spec(config, TARGET).layers[0].window == 2048


def test_windows_without_layer_types() -> None:
    config = DRAFTER | {"sliding_window": 64, "max_window_layers": 1}
    assert drafter_spec(config | {"use_sliding_window": False}, TARGET).layers == (FULL, FULL)
    assert drafter_spec(config | {"use_sliding_window": True}, TARGET).layers[1].window == 64


@pytest.mark.parametrize(
    ("top", "inner", "causal"),
    [
        (None, None, (True, False)),
        (False, None, (False, False)),
        (None, True, (True, True)),
        (False, True, (False, False)),
    ],
)
def test_causality(top: bool | None, inner: bool | None, causal: tuple[bool, bool]) -> None:
    config = nested(causal=inner) | {"layer_types": SLIDING, "sliding_window": 64, "is_causal": top}
    assert tuple(layer.causal for layer in drafter_spec(config, TARGET).layers) == causal


def test_attention_bias() -> None:
    assert drafter_spec(DRAFTER | {"attention_bias": True}, TARGET).attention.bias


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dflash 2 convolution": (nested(conv_kernel_size=2, conv_group_size=16), "DFlash 2"),
    "dflash 2 selector": (nested(selector_rank=256), "DFlash 2"),
    "dspark": (DRAFTER | {"markov_rank": 256}, "DSpark"),
    "deepspec without a markov head": (DRAFTER | {"markov_rank": 0}, "DeepSpec"),
    "dspark by projector": (nested(projector_type="dspark"), "dspark"),
    "domino": (nested(projector_type="domino"), "domino"),
    "speculators": (DRAFTER | {"speculators_model_type": "dflash"}, "speculators"),
    "anchor first": (DRAFTER | {"sample_from_anchor": True}, "anchor-first"),
    "mimo sinks": (nested(attention_sink_bias=True), "MiMo"),
    "mimo scale": (nested(attention_value_scale=0.612), "MiMo"),
    "own head": (DRAFTER | {"has_own_lm_head": True}, "its own head"),
    "architecture": (DRAFTER | {"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
    "yarn": (DRAFTER | {"rope_scaling": {"rope_type": "yarn", "factor": 32.0}}, "yarn"),
    "activation": (DRAFTER | {"hidden_act": "gelu"}, "gelu"),
    "quantised": (DRAFTER | {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    "block": (DRAFTER | {"block_size": 17}, "block_size 17"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_are_refused_by_name(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        drafter_spec(config, TARGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "its hidden_size is 128, the target has 64"),
        ({"vocab_size": 100}, "its vocab_size is 100, the target has 96"),
        ({"draft_vocab_size": 50}, "its draft_vocab_size is 50"),
        ({"num_target_layers": 32}, "its num_target_layers is 32, the target has 4"),
        ({"target_hidden_size": 80}, "its target_hidden_size is 80"),
        ({"dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 4]}}, r"target_layer_ids \[0, 4\]"),
        ({"dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 3]}}, "the last layer cannot be tapped"),
        ({"dflash_config": {"mask_token_id": 95, "target_layer_ids": [-1]}}, "allowed: 0 to 2"),
        ({"dflash_config": {"mask_token_id": 95, "target_layer_ids": []}}, "allowed: 0 to 2"),
        ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0]}}, "mask_token_id 96"),
        ({"dflash_config": {"mask_token": "<|mask|>"}}, "'mask_token_id' is missing"),
        ({"layer_types": SLIDING, "sliding_window": None}, "'sliding_window' is missing"),
        ({"rope_theta": None}, "'rope_theta' is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers"),
    ],
)
def test_a_drafter_that_does_not_fit_says_why(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        drafter_spec(DRAFTER | change, TARGET)


def test_vocabulary_may_be_unstated() -> None:
    config = {k: v for k, v in DRAFTER.items() if k != "vocab_size"}
    assert drafter_spec(config, target_spec(QWEN3)).taps == (0, 2)
