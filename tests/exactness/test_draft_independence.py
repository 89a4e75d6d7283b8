"""Whatever is drafted, however wide: the same tokens, the same logits bit for bit, the same state."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_runtime import Engine, GenerationConfig, load
from dflash_runtime.context import Context
from dflash_runtime.loop import Decoder, Greedy
from dflash_runtime.models import CachedTarget
from dflash_runtime.proof import KnowingProposer, RandomWidth, comparable_state
from dflash_runtime.verify import draft_independence, self_tests
from dflash_runtime.width import FixedWidth

BACKENDS = ("openvino", "onnx")
FORMATS = [
    ("f32", "openvino"),
    ("bf16", "openvino"),
    ("int8", "openvino"),
    ("f32", "onnx"),
    ("f16", "onnx"),
    ("int8", "onnx"),
    ("int4", "onnx"),
]
PROMPTS, TOKENS = (0, 2, 6), 64  # one prompt of each domain


@pytest.fixture(scope="module", params=FORMATS, ids="-".join)
def any_engine(request: pytest.FixtureRequest, small_bundle: Callable[..., Path]) -> Engine:
    return load(small_bundle(*request.param), max_context=1024)


def test_every_kind_of_draft_gives_the_tokens_logits_and_state_of_plain_decoding(
    any_engine: Engine, golden: list[dict[str, Any]]
) -> None:
    found = [
        finding
        for i in PROMPTS
        for finding in draft_independence(any_engine, str(i), golden[i]["prompt_ids"], TOKENS, seed=i)
    ]
    assert [finding for finding in found if not finding.is_exact] == []
    assert all(finding.compared == TOKENS for finding in found)
    assert len(FORMATS) * sum(finding.compared for finding in found) >= 2000
    accepted = {check: sum(f.accepted_tokens for f in found if f.check == check) for check in ("dflash", "true")}
    assert accepted["dflash"] > 0 and accepted["true"] > 0
    assert all(0 < f.accepted_tokens < f.draft_tokens for f in found if f.check == "adversarial")


def test_rows_do_not_depend_on_their_number_or_on_where_a_call_begins(any_engine: Engine) -> None:
    assert [finding for finding in self_tests(any_engine) if not finding.is_exact] == []


def test_state_after_every_partial_acceptance_is_that_of_a_cold_run(
    any_engine: Engine, golden: list[dict[str, Any]]
) -> None:
    models, prompt = any_engine.models, golden[0]["prompt_ids"]
    truth = any_engine.generate(prompt, GenerationConfig(max_new_tokens=96, draft=False, ignore_eos=True)).token_ids
    any_engine.context.clear()
    proposer = KnowingProposer(any_engine.bundle.manifest.target.vocab_size, seed=1, kind="adversarial")
    proposer.truth = [*prompt, *truth]
    context = Context(models.target, proposer)
    decoder = Decoder(context, models.head, RandomWidth(16, seed=1), models.minimum_rows)
    anchor, partial = decoder.prefill(prompt, Greedy()), 0
    for this in decoder.rounds(anchor, 64, Greedy()):
        partial += this.accepted < this.drafted
        warm = comparable_state(models.target)
        cold = Context(models.target, None)
        cold.clear()
        Decoder(cold, models.head, FixedWidth(1), models.minimum_rows).prefill(context.tokens, Greedy())
        found = comparable_state(models.target)
        assert found.length == warm.length
        for a, b in zip(found.arrays, warm.arrays, strict=True):
            assert np.array_equal(a, b)
        models.target.restore(warm)
    assert context.tokens == [*prompt, *truth][: len(context.tokens)]
    assert partial >= 5


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_request_that_is_cut_short_spoils_no_later_one(
    any_engine: Engine, golden: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    prompt, target = golden[0]["prompt_ids"], any_engine.models.target
    assert isinstance(target, CachedTarget)
    plainly = GenerationConfig(max_new_tokens=24, draft=False, ignore_eos=True)
    later = GenerationConfig(max_new_tokens=14, ignore_eos=True)
    any_engine.context.clear()
    expected = any_engine.generate(prompt, plainly).token_ids
    any_engine.context.clear()
    any_engine.generate([*prompt, *expected[:10]], later)
    carried = comparable_state(target).arrays
    run, calls = target._graph.run, itertools.count()

    def cut_short() -> None:
        run()
        if next(calls) == 4:  # states have moved on, and nobody knows
            raise error

    any_engine.context.clear()
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(target._graph, "run", cut_short)
        any_engine.generate(prompt, plainly)
    assert any_engine.generate([*prompt, *expected[:10]], later).token_ids == expected[10:]
    for a, b in zip(comparable_state(target).arrays, carried, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_tokens_and_acceptance(
    backend: str, small_bundle: Callable[..., Path], departures: Callable[[Engine], list[str]]
) -> None:
    assert departures(load(small_bundle("f32", backend), max_context=1024)) == []
