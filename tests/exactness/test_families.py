"""Draft independence of every target family, on tiny random pairs in every kind of weights."""

from pathlib import Path

import numpy as np
import pytest
from dflash_exporter import ExportRequest, export
from dflash_runtime import Engine, load
from dflash_runtime.verify import draft_independence

pytest.importorskip("torch")

from tests.parity.checkpoints import VOCABULARY, write_drafter, write_target

TOKENS = 48
FORMATS = pytest.mark.parametrize(
    ("weight_format", "backend"),
    [("f32", "openvino"), ("bf16", "openvino"), ("int8", "openvino"), ("f32", "onnx"), ("int8", "onnx")],
)


@pytest.fixture
def engine(name: str, weight_format: str, backend: str, tmp_path: Path, pair_folder: Path) -> Engine:
    model = write_target(name, tmp_path / "target", pair_folder / "target")
    write_drafter(tmp_path / "drafter", model.config.num_hidden_layers, [0, 1, 2])
    folders = {part: tmp_path / part for part in ("target", "drafter")}
    request = ExportRequest(**folders, output=tmp_path / "bundle", weight_format=weight_format, backend=backend)
    return load(export(request), threads=2, max_context=256)


@FORMATS
@pytest.mark.parametrize("name", ["qwen3_5-untied", "qwen3-bias", "llama3-rope"])
def test_no_draft_changes_a_token_or_a_logit(engine: Engine, name: str) -> None:
    prompt = np.random.default_rng(7).integers(3, VOCABULARY, 37).tolist()
    found = list(draft_independence(engine, name, prompt, TOKENS, seed=3))
    assert [finding for finding in found if not finding.is_exact] == []
    assert {finding.check for finding in found} == {"dflash", "random", "adversarial", "true"}
    assert all(finding.compared == TOKENS for finding in found)


@FORMATS
@pytest.mark.parametrize("name", ["qwen3-bias", "llama3-rope"])
def test_a_call_of_any_size_has_the_rows_of_the_widest(engine: Engine, name: str) -> None:
    target = engine.models.target
    tokens = np.random.default_rng(8).integers(3, VOCABULARY, target.prefill_rows).tolist()
    expected = target.verify(tokens).hidden.copy()
    differ = [
        rows
        for rows in range(engine.models.minimum_rows, len(tokens))
        if not np.array_equal(target.verify(tokens[:rows]).hidden, expected[:rows])
    ]
    assert differ == []
