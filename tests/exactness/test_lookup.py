"""Prompt lookup, alone and overriding the drafter: the tokens, logits and state of plain decoding."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from dflash_exporter import ExportRequest, export
from dflash_graphs.errors import RequestError
from dflash_runtime import Engine, GenerationConfig, load
from dflash_runtime.loading import Drafting
from dflash_runtime.verify import draft_independence

CONFIG = GenerationConfig(max_new_tokens=80, ignore_eos=True, logprobs=3)


def repetitive(prompt: dict[str, Any]) -> list[int]:
    """The prompt with its answer and once more, so that there is something to copy."""
    return [*prompt["prompt_ids"], *prompt["greedy_ids"][:60], *prompt["prompt_ids"]]


@pytest.fixture(scope="module", params=["lookup", "dflash+lookup"])
def copying(request: pytest.FixtureRequest, small_bundle: Callable[[str], Path]) -> Engine:
    return load(small_bundle("f32"), max_context=1024, proposer=request.param)


@pytest.fixture(scope="module")
def without_drafter(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("plain") / "bundle"
    return export(ExportRequest(target=pair_folder / "target", output=output, weight_format="f32"))


def test_logits_and_state_at_random_widths(copying: Engine, golden: list[dict[str, Any]]) -> None:
    for i in (0, 2, 6):
        found = list(draft_independence(copying, str(i), repetitive(golden[i]), 64, seed=i))
        assert [finding for finding in found if not finding.is_exact] == []
        assert found[0].check == copying.models.drafting and found[0].compared == 64
        assert found[0].accepted_tokens > 0


@pytest.mark.parametrize("changes", [{}, {"block_size": 5}, {"temperature": 0.8, "seed": 7}])
def test_tokens_and_logprobs_whatever_the_policy(
    copying: Engine, golden: list[dict[str, Any]], changes: dict[str, Any]
) -> None:
    config = replace(CONFIG, **changes)
    for i in (1, 4, 7):
        prompt = repetitive(golden[i])
        copying.context.clear()
        drafted = copying.generate(prompt, config)
        copying.context.clear()
        plain = copying.generate(prompt, replace(config, draft=False, block_size=None))
        assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)
        assert sum(r.drafted for r in plain.rounds) == 0 < sum(r.accepted for r in drafted.rounds)
        assert all(r.rows <= 5 for r in drafted.rounds) or config.block_size is None


def test_every_way_of_drafting_gives_the_same(
    small_bundle: Callable[[str], Path], golden: list[dict[str, Any]]
) -> None:
    found = []
    for proposer in get_args(Drafting):
        engine = load(small_bundle("f32"), max_context=1024, proposer=proposer)
        result = engine.generate(repetitive(golden[0]), CONFIG)
        again = engine.generate([*repetitive(golden[0]), *result.token_ids, 5], CONFIG)  # copies follow a rewind
        found.append((result.token_ids, result.logprobs, again.token_ids, again.logprobs))
    assert found[0] == found[1] == found[2]


def test_a_bundle_without_drafter_copies(without_drafter: Path, golden: list[dict[str, Any]]) -> None:
    engine = load(without_drafter, max_context=1024)
    assert engine.models.drafting == "lookup" and engine.models.drafter is None
    drafted = engine.generate(repetitive(golden[0]), CONFIG)
    plain = engine.generate(repetitive(golden[0]), replace(CONFIG, draft=False))
    assert drafted.token_ids == plain.token_ids and drafted.logprobs == plain.logprobs
    assert drafted.acceptance_length > 1.5 and plain.acceptance_length == 1
    for proposer in ("dflash", "dflash+lookup"):
        with pytest.raises(RequestError, match="no drafter"):
            load(without_drafter, proposer=proposer)


def test_unknown_ways_of_drafting_are_refused(small_bundle: Callable[[str], Path]) -> None:
    with pytest.raises(RequestError, match="dflash, lookup"):
        load(small_bundle("f32"), proposer="guess")  # type: ignore[arg-type]
