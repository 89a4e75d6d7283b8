"""Reading checkpoint folders: prefixes, shards, dtypes, and every way in which they come damaged."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dflash_exporter.checkpoint import Checkpoint
from dflash_exporter.hf_config import target_spec
from dflash_exporter.shapes import Shapes, expected_shapes
from dflash_graphs.errors import CheckpointError, UnsupportedError
from safetensors.numpy import save_file

from tests.exporter.checkpoints import LLAMA, QWEN3_5
from tests.exporter.conftest import Writer

NORM = "layers.0.input_layernorm.weight"


def shapes(config: dict[str, Any]) -> Shapes:
    return expected_shapes(target_spec(config))


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model."])
@pytest.mark.parametrize("shards", [1, 3])
def test_prefixes_and_shards(target: Writer, prefix: str, shards: int) -> None:
    strangers = {
        "model.visual.blocks.0.attn.qkv.weight": np.ones((2, 2), np.float16),
        "mtp.fc.weight": np.ones(3, np.int8),
    }
    folder = target(LLAMA, prefix=prefix, shards=shards, change=strangers)
    found = Checkpoint(folder).select(shapes(LLAMA))
    assert found[NORM].name == prefix + NORM
    assert found["lm_head.weight"].name == "lm_head.weight"
    assert set(found) == set(shapes(LLAMA))


def test_a_tied_head_needs_no_tensor(target: Writer) -> None:
    assert "lm_head.weight" not in Checkpoint(target(QWEN3_5)).select(shapes(QWEN3_5))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        Checkpoint(target(QWEN3_5)).select(shapes(QWEN3_5 | {"tie_word_embeddings": False}))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_blocks_are_the_rows_as_stored(tmp_path: Path, dtype: Any) -> None:
    values = np.random.default_rng(0).standard_normal((37, 5), dtype=np.float32).astype(dtype)
    save_file({"other": np.zeros(3, np.float32), "x": values}, tmp_path / "model.safetensors")
    tensor = Checkpoint(tmp_path).tensors["x"]
    starts, blocks = zip(*tensor.blocks(values=50), strict=True)
    assert starts == (0, 10, 20, 30)
    assert np.array_equal(np.concatenate(blocks), values)
    assert np.array_equal(tensor.read(), values)
    assert [len(rows) for _, rows in tensor.blocks(values=1)] == [2] * 18 + [1]


def test_missing_tensor(target: Writer) -> None:
    folder = target(prefix="model.", change={"model." + NORM: None})
    with pytest.raises(CheckpointError, match=rf"model\.{NORM} is missing"):
        Checkpoint(folder).select(shapes(QWEN3_5))


def test_wrong_shape_names_both(target: Writer) -> None:
    folder = target(change={NORM: np.ones(65, np.float32)})
    with pytest.raises(CheckpointError, match=rf"{NORM} has the shape \[65\], config.json implies \[64\]"):
        Checkpoint(folder).select(shapes(QWEN3_5))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, ml_dtypes.float8_e4m3fn])
def test_integers_and_fp8_are_refused_as_quantised(target: Writer, dtype: Any) -> None:
    folder = target(change={NORM: np.ones(64).astype(dtype)})
    with pytest.raises(UnsupportedError, match="quantised"):
        Checkpoint(folder).select(shapes(QWEN3_5))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(target: Writer, dtype: Any, value: float) -> None:
    damaged = np.zeros(64, dtype)
    damaged[63] = value
    folder = target(change={NORM: damaged})
    tensor = Checkpoint(folder).select(shapes(QWEN3_5))[NORM]
    with pytest.raises(CheckpointError, match=f"{NORM} holds NaN or infinite"):
        tensor.read()


def test_missing_shard(target: Writer) -> None:
    folder = target(shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors named by .* is missing"):
        Checkpoint(folder).select(shapes(QWEN3_5))


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_file(target: Writer, keep: int) -> None:
    path = target() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        Checkpoint(path.parent).select(shapes(QWEN3_5))


def test_file_that_shrinks_while_it_is_read(target: Writer) -> None:
    path = target() / "model.safetensors"
    tensors = Checkpoint(path.parent).select(shapes(QWEN3_5))
    path.write_bytes(path.read_bytes()[:-8])
    last = max(tensors.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(CheckpointError, match="ends inside"):
        last.read()


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b'{"x": 3}', b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}']
)
def test_damaged_header(target: Writer, header: bytes) -> None:
    path = target() / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        Checkpoint(path.parent).select(shapes(QWEN3_5))


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Checkpoint(tmp_path).config  # noqa: B018
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        Checkpoint(tmp_path).tensors  # noqa: B018
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Checkpoint(tmp_path).config  # noqa: B018
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match="no weight_map"):
        Checkpoint(tmp_path).tensors  # noqa: B018
