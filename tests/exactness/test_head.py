"""A head in parts, the first of which serves the drafter, too: what it names, and that nothing else changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from dflash_exporter import ExportRequest, export
from dflash_graphs import graphs
from dflash_graphs.manifest import DRAFTED, TOKENS
from dflash_graphs.onnx_emitter import OnnxOps
from dflash_graphs.weights import Matrix
from dflash_runtime import Engine, GenerationConfig, load
from dflash_runtime.protocols import Logits
from dflash_runtime.verify import self_tests

DRAFT_VOCABULARY = 1000  # of 4096, so that texts leave it all the time


@pytest.fixture(scope="module", params=[("f32", "openvino"), ("int8", "openvino"), ("int8", "onnx")], ids="-".join)
def engines(
    request: pytest.FixtureRequest,
    pair_folder: Path,
    small_bundle: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Engine, Engine]:
    """The small pair with its head in one part and in two."""
    weight_format, backend = request.param
    parted = ExportRequest(
        target=pair_folder / "target",
        drafter=pair_folder / "drafter",
        output=tmp_path_factory.mktemp("bundles") / "parted",
        weight_format=weight_format,
        backend=backend,
        draft_vocabulary=DRAFT_VOCABULARY,
    )
    whole, parts = (load(bundle, max_context=512) for bundle in (small_bundle(weight_format, backend), export(parted)))
    return whole, parts


def test_parts_give_the_logits_of_the_whole(engines: tuple[Engine, Engine]) -> None:
    hidden = np.random.default_rng(0).standard_normal((16, 256), np.float32)
    whole, parts = (engine.models.head(hidden).copy() for engine in engines)
    assert parts.shape == (16, 4096)
    assert np.array_equal(whole, parts)
    assert [finding for finding in self_tests(engines[1]) if not finding.is_exact] == []


def test_drafts_are_the_likeliest_of_the_first_part(engines: tuple[Engine, Engine]) -> None:
    random, head = np.random.default_rng(1), engines[1].models.head
    for rows in (15, 3, 7):  # more and fewer than before, the target's in between
        hidden = random.standard_normal((rows, 256), np.float32)
        first = head(hidden).copy()[:, :DRAFT_VOCABULARY].astype(np.float64)
        tokens, probabilities = head.draft(hidden)
        assert tokens.tolist() == first.argmax(axis=1).tolist()
        expected = 1 / np.exp(first - first.max(axis=1, keepdims=True)).sum(axis=1)
        assert probabilities == pytest.approx(expected, rel=1e-4)
        assert head._target.output("draft_logits").size == head._drafter.output("logits.1").size == 0  # nothing twice


def test_texts_outside_the_first_part_are_drafted_too(
    engines: tuple[Engine, Engine], golden: list[dict[str, Any]]
) -> None:
    options = GenerationConfig(max_new_tokens=96, ignore_eos=True, block_size=8)
    for prompt in golden[:3]:
        whole, parts = (engine.generate(prompt["prompt_ids"], options) for engine in engines)
        assert whole.token_ids == parts.token_ids
        drafted = [token for done in parts.rounds for token in done.tokens[: done.accepted]]
        assert max(drafted) >= DRAFT_VOCABULARY


def test_the_likeliest_token_of_several_parts() -> None:
    parts = [
        np.array([[0, 2, 2], [1, 0, 0], [-3, -2, -2]], np.float32),
        np.array([[2, 2], [0, 3], [-1, -1]], np.float32),
    ]
    logits = Logits(parts)
    assert [logits.likeliest(row) for row in range(3)] == [1, 4, 3]  # the lowest of equals
    assert logits.row(1).tolist() == [1, 0, 0, 0, 3]
    assert logits.since(1).likeliest(0) == 4 and np.array_equal(logits.since(2).copy(), logits.copy()[2:])
    assert not np.shares_memory(logits.copy(), parts[0]) and not np.shares_memory(logits.row(0), parts[0])


def test_narrow_parts_on_onnx_runtime(tmp_path: Path) -> None:
    random, ops = np.random.default_rng(2), OnnxOps("head")
    parts = [random.standard_normal((ids, 64), np.float32) for ids in (40, 56)]
    graphs.head(ops, [Matrix(part, (len(part), 64)) for part in parts], rows=TOKENS, drafted=DRAFTED)
    ops.save(tmp_path / ops.FILE)
    session = ort.InferenceSession(tmp_path / ops.FILE, providers=["CPUExecutionProvider"])
    rows = [random.standard_normal((n, 64), np.float32) for n in (3, 5)]
    names = ["logits.0", "logits.1", "draft_logits"]
    found = session.run(names, dict(zip(("hidden", "drafted"), rows, strict=True)))
    wanted = [rows[0] @ parts[0].T, rows[0] @ parts[1].T, rows[1] @ parts[0].T]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
