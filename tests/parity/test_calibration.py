"""What is recorded for data-aware compression against transformers: the states are carried from chunk to chunk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_exporter.calibration import LENGTH, record, windows
from dflash_exporter.checkpoint import Checkpoint
from dflash_exporter.hf_config import target_spec
from dflash_exporter.shapes import expected_shapes

pytest.importorskip("torch")
import torch

from tests.parity.checkpoints import VOCABULARY, write_target


@pytest.mark.parametrize("name", ["qwen3_5-untied", "qwen3-bias", "llama"])
def test_inputs_of_matrices(name: str, tmp_path: Path, pair_folder: Path) -> None:
    model = write_target(name, tmp_path / "target", pair_folder / "target")
    checkpoint = Checkpoint(tmp_path / "target")
    spec = target_spec(checkpoint.config)
    layer = spec.attention_layers[-1]
    wanted = [f"layers.{layer}.{part}.weight" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj")]
    texts = windows(np.random.default_rng(0).integers(3, VOCABULARY, 2 * LENGTH).tolist())
    found = record(spec, checkpoint.select(expected_shapes(spec)), wanted, texts, tmp_path, lambda: None, "f32")

    seen: dict[str, Any] = {}
    modules = dict(model.model.named_modules())
    for tensor in wanted:
        modules[tensor.removesuffix(".weight")].register_forward_pre_hook(
            lambda _, inputs, tensor=tensor: seen.update({tensor: inputs[0].numpy()})
        )
    with torch.no_grad():
        model(torch.tensor(texts))
    for tensor in wanted:
        expected = seen[tensor][:, ::8]
        error = np.sqrt(np.mean((found[tensor].astype(np.float32) - expected) ** 2) / np.mean(expected**2))
        assert error < 0.003, tensor  # they are kept in bf16
