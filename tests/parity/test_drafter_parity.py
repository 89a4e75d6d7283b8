"""The drafter against recorded reference logits, and its masks against a plain NumPy forward pass."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_exporter import ExportRequest, export
from dflash_runtime import load

from tests.parity.checkpoints import VOCABULARY, write_drafter, write_target

DATA = Path(__file__).parent.parent / "data" / "parity.npz"


BACKENDS = ("openvino", "onnx")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", [0, 1])
def test_draft_logits_equal_the_recorded_ones(small_bundle: Any, index: int, backend: str) -> None:
    engine = load(small_bundle("f32", backend), threads=2, max_context=512)
    recorded = np.load(DATA)
    features, block = recorded[f"ctx_features_{index}"], recorded[f"block_ids_{index}"]
    drafter = engine.models.drafter
    assert drafter is not None
    drafter.rewind(0)
    for piece in np.array_split(features, 3):
        drafter.extend(np.ascontiguousarray(piece))
    assert drafter.length == int(recorded[f"start_{index}"])
    hidden = drafter.block(int(block[0]), len(block))
    found, wanted = engine.models.head(hidden[1:]).copy(), recorded[f"logits_{index}"]
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


def _reference(tensors: dict[str, Any], features: Any, block: Any, masks: list[tuple[int | None, bool]]) -> Any:
    """The drafter's forward pass, written plainly: context first, then the block rows `block` [Q, hidden]."""
    context, rows = len(features), len(block)
    positions = np.arange(context + rows)
    angles = positions[:, None] * 1e6 ** -(np.arange(0, 32, 2) / 32)

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * tensors[name]

    def rotated(x: Any, at: Any) -> Any:
        cos, sin = np.cos(angles[at])[:, None], np.sin(angles[at])[:, None]
        a, b = x[..., :16], x[..., 16:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    projected, x = norm(features @ tensors["fc.weight"].T, "hidden_norm.weight"), block
    for i, (window, causal) in enumerate(masks):
        p = f"layers.{i}.self_attn"
        h = norm(x, f"layers.{i}.input_layernorm.weight")
        both = np.concatenate([projected, h])
        query = norm((h @ tensors[f"{p}.q_proj.weight"].T).reshape(rows, 4, 32), f"{p}.q_norm.weight")
        key = norm((both @ tensors[f"{p}.k_proj.weight"].T).reshape(-1, 2, 32), f"{p}.k_norm.weight")
        value = (both @ tensors[f"{p}.v_proj.weight"].T).reshape(-1, 2, 32)
        query, key = rotated(query, positions[context:]), rotated(key, positions)
        q, k = positions[context:, None], positions[None]
        seen = (k <= q if causal else k >= 0) & ((q - k < window) & (k - q < window) if window else k >= 0)
        mixed = np.empty((rows, 4, 32))
        for head in range(4):
            scores = np.where(seen, query[:, head] @ key[:, head // 2].T / np.sqrt(32), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ value[:, head // 2]
        x = x + mixed.reshape(rows, -1) @ tensors[f"{p}.o_proj.weight"].T
        h = norm(x, f"layers.{i}.post_attention_layernorm.weight")
        gate, up = (h @ tensors[f"layers.{i}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ tensors[f"layers.{i}.mlp.down_proj.weight"].T
    return norm(x, "norm.weight")


_SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 12,
    "use_sliding_window": True,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("config", "masks"),
    [
        ({}, [(None, False)] * 3),
        ({"is_causal": True}, [(None, True)] * 3),
        (_SLIDING, [(12, True), (12, True), (None, False)]),
    ],
    ids=["full", "causal", "sliding"],
)
def test_masks_equal_a_plain_forward_pass(
    config: Any, masks: Any, backend: str, tmp_path: Path, pair_folder: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    write_target("llama", tmp_path / "target", pair_folder / "target")
    write_drafter(tmp_path / "drafter", 4, [0, 1, 2], **config)
    paths = {"target": tmp_path / "target", "drafter": tmp_path / "drafter", "output": tmp_path / "bundle"}
    engine = load(export(ExportRequest(**paths, weight_format="f32", backend=backend)), threads=2, max_context=128)
    tensors = {
        n: t.astype(np.float64) for n, t in safetensors.load_file(tmp_path / "drafter/model.safetensors").items()
    }
    embeddings = safetensors.load_file(tmp_path / "target/model.safetensors")["model.embed_tokens.weight"]
    features = np.random.default_rng(0).standard_normal((40, 96 * 3)).astype(np.float32)
    drafter = engine.models.drafter
    assert drafter is not None
    drafter.extend(features)
    hidden = drafter.block(7, 9)
    block = embeddings[[7] + [VOCABULARY - 1] * 8].astype(np.float64)
    wanted = _reference(tensors, features.astype(np.float64), block, masks)
    assert np.abs(hidden - wanted).max() <= 1e-4 * np.abs(wanted).max()
