"""Draft independence of every target family, on tiny random pairs in every kind of weights."""

from pathlib import Path

import numpy as np
import pytest
from dflash_exporter import ExportRequest, export
from dflash_runtime import load
from dflash_runtime.verify import draft_independence

pytest.importorskip("torch")

from tests.parity.checkpoints import VOCABULARY, write_drafter, write_target

TOKENS = 48


@pytest.mark.parametrize(
    ("weight_format", "backend"),
    [("f32", "openvino"), ("bf16", "openvino"), ("int8", "openvino"), ("f32", "onnx"), ("int8", "onnx")],
)
@pytest.mark.parametrize("name", ["qwen3_5-untied", "qwen3-bias", "llama3-rope"])
def test_no_draft_changes_a_token_or_a_logit(
    name: str, weight_format: str, backend: str, tmp_path: Path, pair_folder: Path
) -> None:
    model = write_target(name, tmp_path / "target", pair_folder / "target")
    write_drafter(tmp_path / "drafter", model.config.num_hidden_layers, [0, 1, 2])
    folders = {part: tmp_path / part for part in ("target", "drafter")}
    output = tmp_path / "bundle"
    bundle = export(ExportRequest(**folders, output=output, weight_format=weight_format, backend=backend))
    engine = load(bundle, threads=2, max_context=256)
    prompt = np.random.default_rng(7).integers(3, VOCABULARY, 37).tolist()
    found = list(draft_independence(engine, name, prompt, TOKENS, seed=3))
    assert [finding for finding in found if not finding.is_exact] == []
    assert {finding.check for finding in found} == {"dflash", "random", "adversarial", "true"}
    assert all(finding.compared == TOKENS for finding in found)
