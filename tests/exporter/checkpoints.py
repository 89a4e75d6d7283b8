"""Small checkpoints written without PyTorch: configurations as the Hub has them, random weights of matching shapes."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (registers bfloat16 with safetensors)
import numpy as np
from dflash_exporter.drafter_config import drafter_spec
from dflash_exporter.hf_config import target_spec
from dflash_exporter.shapes import expected_shapes
from safetensors.numpy import save_file

Config = dict[str, Any]
QWEN3_5: Config = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}
LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
QWEN3: Config = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "rope_theta": 1e6}
DRAFTER: Config = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "block_size": 8,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2]},
}


def write_checkpoint(
    folder: Path,
    config: Config,
    *,
    target: Config | None = None,
    dtype: Any = np.float32,
    prefix: str = "",
    change: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """Write `config` and random tensors; `change` maps full names to arrays, or to None to leave the tensor out.

    With `target` the folder is a drafter of that target.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    spec = target_spec(config) if target is None else drafter_spec(config, target_spec(target))
    generator = np.random.default_rng(len(prefix) + shards)
    tensors: dict[str, Any] = {}
    for name, shape in expected_shapes(spec).items():
        full = name if name == "lm_head.weight" else prefix + name
        tensors[full] = (generator.standard_normal(shape, dtype=np.float32) * 0.1).astype(dtype)
    tensors.update(change or {})
    tensors = {name: value for name, value in tensors.items() if value is not None}
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def listing(folder: Path) -> dict[str, str]:
    """Names and hashes of everything below `folder`."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
