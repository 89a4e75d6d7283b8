"""Tiny random checkpoints of every target family, written by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config

VOCABULARY = 160
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def _qwen3_5(**more: Any) -> Any:
    config = Qwen3_5TextConfig(
        **_COMMON,
        head_dim=32,
        num_hidden_layers=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        **more,
    )
    return Qwen3_5ForCausalLM(config)


def _qwen3(**more: Any) -> Any:
    return transformers.Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=32, num_hidden_layers=4, **more))


def _llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(LlamaConfig(**_COMMON, num_hidden_layers=4, **more))


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, Any] = {
    "qwen3_5-tied": lambda: _qwen3_5(tie_word_embeddings=True),
    "qwen3_5-untied": lambda: _qwen3_5(tie_word_embeddings=False),
    "qwen3": lambda: _qwen3(tie_word_embeddings=False),
    "qwen3-bias": lambda: _qwen3(tie_word_embeddings=True, attention_bias=True),
    "llama": lambda: _llama(tie_word_embeddings=True),
    "llama3-rope": lambda: _llama(tie_word_embeddings=False, rope_parameters=_LLAMA3),
}


def write_target(name: str, folder: Path, tokenizer_from: Path) -> Any:
    """Save the random model `name` to `folder` with some tokenizer files; return it in f32 evaluation mode."""
    torch.manual_seed(sum(map(ord, name)))
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2:  # larger than the default initialisation, so that logits differ clearly
                parameter.normal_(0, 0.3 if "conv1d" in parameter_name else 0.08)
            elif parameter_name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tokenizer_from / file).read_bytes())
    return model


def write_drafter(folder: Path, target_layers: int, taps: list[int], **config: Any) -> None:
    """Save a random DFlash drafter for a target of `write_target`."""
    import json

    from safetensors.torch import save_file

    hidden, heads, kv, dim, inner, layers = 96, 4, 2, 32, 128, 3
    shapes = {"fc.weight": (hidden, hidden * len(taps)), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(layers):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"layers.{i}.self_attn.q_proj.weight": (heads * dim, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (kv * dim, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (kv * dim, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, heads * dim),
            f"layers.{i}.self_attn.q_norm.weight": (dim,),
            f"layers.{i}.self_attn.k_norm.weight": (dim,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    torch.manual_seed(5)
    tensors = {n: torch.ones(s) if len(s) == 1 else torch.randn(s) * 0.1 for n, s in shapes.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    body = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 512,
        "layer_types": ["full_attention"] * layers,
        "rope_theta": 1e6,
        "block_size": 16,
        "num_target_layers": target_layers,
        "dflash_config": {"mask_token_id": VOCABULARY - 1, "target_layer_ids": taps},
    }
    (folder / "config.json").write_text(json.dumps(body | config))
