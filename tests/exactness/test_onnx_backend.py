"""What is particular to ONNX Runtime: valid files, imports, growing caches, and what is said of bundles not exact."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from dflash_exporter import ExportRequest, export, formats
from dflash_graphs.errors import RequestError
from dflash_graphs.manifest import read_manifest
from dflash_runtime import GenerationConfig, load, onnx_models
from dflash_runtime.cli import main

Bundles = Callable[..., Path]


@pytest.mark.parametrize("weight_format", ["f32", "bf16", "f16", "int8", "int4"])
def test_every_graph_is_valid_and_has_the_ports_of_the_manifest(small_bundle: Bundles, weight_format: str) -> None:
    bundle = small_bundle(weight_format, "onnx")
    manifest = read_manifest(bundle)
    assert manifest.backend == "onnx"
    assert manifest.versions["ai.onnx opset"] == "24" and manifest.versions["com.microsoft opset"] == "1"
    for graph in manifest.graphs.values():
        onnx.checker.check_model(bundle / graph.file)
        session = ort.InferenceSession(bundle / graph.file, providers=["CPUExecutionProvider"])
        for ports, found in ((graph.inputs, session.get_inputs()), (graph.outputs, session.get_outputs())):
            assert [(port.name, list(port.shape)) for port in ports] == [(port.name, port.shape) for port in found]


@pytest.mark.parametrize(("backend", "absent"), [("onnx", "openvino"), ("openvino", "onnxruntime")])
def test_a_backend_imports_no_other(small_bundle: Bundles, backend: str, absent: str) -> None:
    program = f"""
import sys
from dflash_runtime import GenerationConfig, load
load({str(small_bundle("f32", backend))!r}).generate([1, 2, 3], GenerationConfig(max_new_tokens=4))
assert not {{{absent!r}, "onnx", "torch"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_bundle_that_is_not_exact_says_so(pair_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(formats, "_BLOCKS", {8: 128})
    request = ExportRequest(
        target=pair_folder / "target", output=tmp_path / "bundle", weight_format="int8", backend="onnx"
    )
    bundle = export(request)
    engine = load(bundle, max_context=64)
    if engine.is_exact:
        pytest.skip("kernels of this CPU are exact with long blocks, too")
    assert 0 < engine.models.difference < 0.5  # 1e-5, or 0.05 to 0.2 where an activation rounds to the next step
    assert len(engine.generate([1, 2, 3], GenerationConfig(max_new_tokens=8, ignore_eos=True)).token_ids) == 8
    shown = CliRunner().invoke(main, ["generate", str(bundle), "a", "-n", "2", "--json"])
    assert json.loads(shown.stdout)["is_exact"] is False and "not bit-exact" in shown.stderr


def test_plain_decoding_computes_single_rows(small_bundle: Bundles) -> None:
    assert load(small_bundle("f32", "onnx"), max_context=64).models.minimum_rows == 1


def test_a_context_of_a_few_tokens(small_bundle: Bundles) -> None:
    engine = load(small_bundle("f32", "onnx"), max_context=8)
    assert len(engine.generate([1, 2, 3], GenerationConfig(max_new_tokens=5, ignore_eos=True)).token_ids) == 5


def test_the_cache_grows_and_shrinks_with_the_context(small_bundle: Bundles) -> None:
    engine = load(small_bundle("f32", "onnx"), max_context=700)
    cache = engine.models.target._cache
    assert isinstance(cache, onnx_models.DenseCache)
    config = GenerationConfig(max_new_tokens=4, ignore_eos=True)
    short, long = list(range(3, 30)), [5 + i % 90 for i in range(620)]
    before = engine.generate(short, config).token_ids
    assert cache._size == 128
    engine.generate(long, config)
    assert cache._size == 640
    assert engine.generate(short, config).token_ids == before
    assert cache._size == 128


def test_precision_other_than_f32_is_refused(small_bundle: Bundles) -> None:
    with pytest.raises(RequestError, match="f32"):
        load(small_bundle("f32", "onnx"), precision="bf16")


def test_a_round_by_hand_emits_what_the_engine_emits(
    small_bundle: Bundles, repo: Path, golden: list[dict[str, Any]]
) -> None:
    one_round = runpy.run_path(str(repo / "examples" / "onnx_by_hand.py"))["one_round"]
    bundle = small_bundle("f32", "onnx")
    for prompt in golden[:3]:
        ids = prompt["prompt_ids"][:13]  # the round crosses a boundary of the recurrent state
        drafts, tokens = one_round(bundle, ids)
        config = GenerationConfig(max_new_tokens=len(tokens), ignore_eos=True)
        assert load(bundle, max_context=64).generate(ids, config).token_ids == tokens
        assert drafts[: len(tokens) - 2] == tokens[1:-1]


def test_the_other_commands_take_the_bundle(small_bundle: Bundles) -> None:
    bundle = str(small_bundle("int8", "onnx"))
    for command in (["show"], ["doctor"], ["tune"], ["verify", "--tokens", "4"]):
        done = CliRunner().invoke(main, [*command, bundle])
        assert done.exit_code == 0, done.output
