"""Exports of whole pairs: what a bundle holds, and that a failed export leaves nothing behind and breaks nothing."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
import pytest
from dflash_exporter import ExportRequest, export
from dflash_exporter.checkpoint import Checkpoint
from dflash_graphs.errors import CheckpointError, DFlashError, ExportError, UnsupportedError
from dflash_graphs.manifest import EMBEDDINGS, GRAPHS, read_manifest

from tests.exporter.checkpoints import DRAFTER, LLAMA, QWEN3, QWEN3_5, Config, listing
from tests.exporter.conftest import Writer


@pytest.mark.parametrize("weight_format", ["f32", "bf16", "int8"])
def test_the_small_pair(pair_folder: Path, tmp_path: Path, weight_format: str) -> None:
    steps: list[tuple[str, int, int]] = []
    request = ExportRequest(pair_folder / "target", tmp_path / "b", pair_folder / "drafter", weight_format)
    bundle = export(request, lambda *step: steps.append(step))
    manifest = read_manifest(bundle)
    assert set(manifest.graphs) == set(GRAPHS)
    assert {name: file.sha256 for name, file in manifest.files.items()} == {
        name: digest for name, digest in listing(bundle).items() if name != "dflash.json"
    }
    for name, graph in manifest.graphs.items():
        model = ov.Core().read_model(bundle / graph.file)
        assert graph.weight_format == weight_format
        assert [port.any_name for port in model.inputs] == [port.name for port in graph.inputs], name
    assert {port.name: port.shape for port in manifest.graphs["target"].inputs}["embeddings"] == (16, 256)
    assert {port.name: port.shape for port in manifest.graphs["target"].inputs}["past_key.3"] == (2, 4096, 64)
    assert (bundle / EMBEDDINGS).stat().st_size == 4096 * 256 * 2
    assert steps[-1][1] == steps[-1][2]
    assert all(before[1] < after[1] for before, after in itertools.pairwise(steps))


def test_the_target_compiles_and_keeps_its_marks(small_bundle: Any) -> None:
    path = small_bundle("bf16") / "target" / "openvino_model.xml"
    core = ov.Core()
    model = core.read_model(path)
    marks = {"DisablePrecisionConversion": 0, "decompression": 0}  # what a reader calls `precise`, and `decompression`
    for node in model.get_ops():
        for mark in marks:
            marks[mark] += any(key.startswith(mark) for key in dict(node.get_rt_info()))
    assert marks["DisablePrecisionConversion"] > 100
    assert marks["decompression"] >= 8 * 3
    core.compile_model(model, "CPU")


def test_embeddings_are_the_rows_as_stored(request_: ExportRequest) -> None:
    bundle = export(request_)
    stored = Checkpoint(Path(request_.target)).tensors["embed_tokens.weight"].read()
    assert np.array_equal(np.fromfile(bundle / EMBEDDINGS, np.float32).reshape(stored.shape), stored)


@pytest.mark.parametrize("config", [QWEN3_5, QWEN3, LLAMA, LLAMA | {"attention_bias": True}])
@pytest.mark.parametrize("weight_format", ["bf16", "int4"])
def test_every_family_with_and_without_a_drafter(
    target: Writer, drafter: Writer, tmp_path: Path, config: Config, weight_format: str
) -> None:
    request = ExportRequest(target(config), tmp_path / "alone", weight_format=weight_format)
    assert set(read_manifest(export(request)).graphs) == {"target", "head"}
    request = replace(request, drafter=drafter(), output=tmp_path / "pair")
    manifest = read_manifest(export(request))
    assert set(manifest.graphs) == set(GRAPHS)
    assert {port.name: port.shape for port in manifest.graphs["target"].inputs}["embeddings"] == (8, 64)
    assert manifest.graphs["head"].weight_format == ("int8" if weight_format == "int4" else weight_format)


def test_options(request_: ExportRequest) -> None:
    request = replace(request_, head_format="int8", draft_format="bf16", capacity=9999, draft_vocabulary=40)
    graphs = read_manifest(export(request)).graphs
    assert [graphs[name].weight_format for name in ("target", "head", "drafter")] == ["f32", "int8", "bf16"]
    assert {port.name: port.shape for port in graphs["target"].inputs}["past_key.3"] == (2, 512, 32)
    logits = {port.name: port.shape for port in graphs["head"].outputs}
    assert (logits["logits.0"], logits["logits.1"], logits["draft_logits"]) == ((8, 40), (8, 56), (8, 40))


def test_sources_of_a_hub_cache(request_: ExportRequest) -> None:
    snapshot = Path(request_.target).parent / "models--owner--name" / "snapshots" / "0123abcd"
    shutil.copytree(request_.target, snapshot)
    source = read_manifest(export(replace(request_, target=snapshot))).target_source
    assert (source.name, source.revision) == ("owner/name", "0123abcd")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_format": "int3"}, "'int3' is unknown; choose one of f32, bf16, f16, int8, int4"),
        ({"head_format": "fp8"}, "'fp8' is unknown"),
        ({"capacity": 0}, "capacity is 0"),
        ({"draft_vocabulary": 0}, "draft_vocabulary is 0"),
    ],
)
def test_options_that_make_no_sense(request_: ExportRequest, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export(replace(request_, **change))
    assert not request_.output.parent.exists()


@pytest.mark.parametrize(
    ("which", "options", "error", "message"),
    [
        ("target", {"config": QWEN3_5, "change": {"norm.weight": None}}, CheckpointError, "norm.weight is missing"),
        ("target", {"config": QWEN3_5, "change": {"norm.weight": np.ones(8, np.int8)}}, UnsupportedError, "quantised"),
        (
            "drafter",
            {"config": DRAFTER, "change": {"fc.weight": np.ones((64, 64), np.float32)}},
            CheckpointError,
            "fc.weight",
        ),
        ("drafter", {"config": DRAFTER, "change": {"fc.weight": None}}, CheckpointError, "fc.weight is missing"),
    ],
)
def test_damage_seen_before_anything_is_written(
    request_: ExportRequest,
    target: Writer,
    drafter: Writer,
    which: str,
    options: dict[str, Any],
    error: type[DFlashError],
    message: str,
) -> None:
    {"target": target, "drafter": drafter}[which](**options)
    with pytest.raises(error, match=re.escape(message)):
        export(request_)
    assert not request_.output.parent.exists()


def test_configurations_refused_before_anything_is_written(request_: ExportRequest) -> None:
    for folder, change in ((request_.target, {"hidden_act": "gelu"}), (request_.drafter, {"markov_rank": 256})):
        path = Path(str(folder)) / "config.json"
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | change))
        with pytest.raises(UnsupportedError, match=re.escape(str(path))):
            export(request_)
        path.write_text(before)
    assert not request_.output.parent.exists()


def test_tokenizer_is_required(request_: ExportRequest) -> None:
    (Path(request_.target) / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        export(request_)


_IMPORTS = """
import sys
from pathlib import Path
import dflash_exporter
assert "nncf" not in sys.modules and "torch" not in sys.modules
for weight_format in ("f32", "bf16", "int8"):
    request = dflash_exporter.ExportRequest(sys.argv[1], Path(sys.argv[3]) / weight_format, sys.argv[2], weight_format)
    dflash_exporter.export(request)
    assert ("nncf" in sys.modules) == (weight_format == "int8")
    assert not {"torch", "transformers", "dflash_runtime"} & set(sys.modules)
"""


def test_no_export_imports_pytorch_or_prints(request_: ExportRequest) -> None:
    arguments = [str(request_.target), str(request_.drafter), str(request_.output)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _IMPORTS, *arguments], capture_output=True, env=environment, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


_PEAK = """
import re, sys
from pathlib import Path
from dflash_exporter import ExportRequest, export
export(ExportRequest(sys.argv[1], Path(sys.argv[2]), weight_format=sys.argv[3]))
# not getrusage: its ru_maxrss starts from what the parent process held
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_stays_bounded(target: Writer, tmp_path: Path) -> None:
    """1 GB of weights, of which the head alone is 268 MB as bf16 and 537 MB as f32."""
    size = {"vocab_size": 131072, "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 12}
    folder = target(LLAMA | size | {"num_attention_heads": 16}, dtype=ml_dtypes.bfloat16)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for weight_format, most in (("bf16", 350), ("int8", 800), ("int4", 800)):
        command = [sys.executable, "-c", _PEAK, str(folder), str(tmp_path / weight_format), weight_format]
        done = subprocess.run(command, capture_output=True, env=environment, text=True, check=True)
        assert int(done.stdout) < most, weight_format
