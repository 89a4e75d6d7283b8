"""One request: its end, its limits, its interruption, its options."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dflash_exporter import ExportRequest, export
from dflash_graphs.errors import RequestError
from dflash_runtime import Engine, GenerationConfig, Result, StructuredOutput, load

PROMPT = "def add(a, b):\n"
LONG = GenerationConfig(max_new_tokens=200, ignore_eos=True)
SHORT = replace(LONG, max_new_tokens=24)
DRAFTING: tuple[dict[str, Any], ...] = ({"draft": False}, {"block_size": 2}, {"block_size": 16}, {})


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Result:
    """What the prompt gives on an engine that has seen nothing else."""
    engine.context.clear()
    return engine.generate(PROMPT, SHORT)


# the end


def test_result(engine: Engine, expected: Result) -> None:
    chunks = list(engine.stream(PROMPT, SHORT, result := Result()))
    assert "".join(chunks) == result.text == engine.tokenizer.decode(result.token_ids)
    assert result.token_ids == expected.token_ids and len(result.token_ids) == 24
    assert result.finish_reason == "length"
    assert result.prompt_tokens == len(engine.encode(PROMPT))
    assert sum(len(r.tokens) for r in result.rounds) == 23
    assert result.timings.load > 0 < result.timings.first_token and result.tokens_per_second > 0


def test_max_new_tokens(engine: Engine, expected: Result) -> None:
    for count in (1, 2, 3, 17):
        result = engine.generate(PROMPT, replace(SHORT, max_new_tokens=count))
        assert (result.token_ids, result.finish_reason) == (expected.token_ids[:count], "length")


def test_stop_ids(engine: Engine, golden: list[dict[str, Any]]) -> None:
    stops = engine.tokenizer.stop_token_ids
    prompt = next(p["prompt_ids"] for p in golden if p["greedy_ids"][-1] in stops)
    for how in DRAFTING:
        stopped = engine.generate(prompt, GenerationConfig(max_new_tokens=200, **how))
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids[-1] in stops and not stops & set(stopped.token_ids[:-1])
        assert stopped.text == engine.tokenizer.decode(stopped.token_ids[:-1])
        ignored = engine.generate(prompt, GenerationConfig(max_new_tokens=200, ignore_eos=True, **how))
        assert ignored.finish_reason == "length" and len(ignored.token_ids) == 200
        assert ignored.token_ids[: len(stopped.token_ids)] == stopped.token_ids


def test_min_new_tokens(engine: Engine, golden: list[dict[str, Any]]) -> None:
    stops = engine.tokenizer.stop_token_ids
    prompt = next(p for p in golden if p["greedy_ids"][-1] in stops)
    count = len(prompt["greedy_ids"]) + 5
    result = engine.generate(prompt["prompt_ids"], GenerationConfig(max_new_tokens=200, min_new_tokens=count))
    assert len(result.token_ids) > count and not stops & set(result.token_ids[:count])


def test_stop_strings_lie_across_chunks(engine: Engine, expected: Result) -> None:
    text = expected.text
    for how in DRAFTING:
        for start in range(0, len(text) - 6, 5):
            stop = text[start : start + 6]
            chunks = list(engine.stream(PROMPT, replace(SHORT, stop=["never there", stop], **how), result := Result()))
            assert "".join(chunks) == result.text == text[: text.index(stop)]
            assert result.finish_reason == "stop"


def test_n_answers_have_seeds_of_their_own(engine: Engine) -> None:
    config = replace(SHORT, temperature=1.0, seed=5)
    answers = engine.generate_several(PROMPT, 3, config)
    alone = [engine.generate(PROMPT, replace(config, seed=seed)).token_ids for seed in (5, 6, 7)]
    assert [answer.token_ids for answer in answers] == alone and alone[0] != alone[1]


# limits


def test_too_long_is_said_before_anything_is_computed(engine: Engine) -> None:
    engine.context.clear()
    ids = engine.encode(PROMPT) * 100
    with pytest.raises(RequestError, match="exceed the context of 512"):
        next(engine.stream(ids, SHORT))
    with pytest.raises(RequestError, match="exceed the context of 512"):
        next(engine.stream(PROMPT, replace(SHORT, max_new_tokens=512, truncate="left")))
    assert engine.context.tokens == []


def test_a_context_of_a_few_tokens(small_bundle: Callable[[str], Path]) -> None:
    engine = load(small_bundle("f32"), max_context=8)
    assert len(engine.generate([1, 2, 3], GenerationConfig(max_new_tokens=5, ignore_eos=True)).token_ids) == 5


def test_truncate_left_keeps_the_end(engine: Engine) -> None:
    ids = [*engine.encode("x y z ") * 300, *engine.encode(PROMPT)]
    cut = engine.generate(ids, replace(SHORT, truncate="left"))
    assert cut.prompt_tokens == 512 - 24
    assert cut.token_ids == engine.generate(ids[-(512 - 24) :], SHORT).token_ids
    assert len(engine.generate(ids[-512 + 24 :], SHORT).token_ids) == 24  # to the last place


@pytest.mark.parametrize("prompt", ["", [], [-1], [10**9]])
def test_impossible_prompts(engine: Engine, prompt: Any) -> None:
    with pytest.raises(RequestError):
        engine.generate(prompt, SHORT)


# interruption


def test_closing_a_stream_early_leaves_the_engine_ready(engine: Engine, expected: Result) -> None:
    for chunks_taken in (0, 1, 3):
        stream = engine.stream(PROMPT, LONG)
        for _ in range(chunks_taken):
            next(stream)
        stream.close()
        assert engine.generate(PROMPT, SHORT).token_ids == expected.token_ids


def test_one_request_at_a_time(engine: Engine, expected: Result) -> None:
    stream = engine.stream(PROMPT, LONG)
    next(stream)
    with pytest.raises(RequestError, match="busy"):
        engine.generate(PROMPT, SHORT)
    stream.close()
    assert engine.generate(PROMPT, SHORT).token_ids == expected.token_ids


def test_cancel_from_another_thread(engine: Engine, expected: Result) -> None:
    for _ in engine.stream(PROMPT, LONG, result := Result()):
        canceller = threading.Thread(target=engine.cancel)
        canceller.start()
        canceller.join()
    assert result.finish_reason == "cancelled" and len(result.token_ids) < 40
    engine.cancel()  # nothing runs, so this means nothing
    assert engine.generate(PROMPT, SHORT).token_ids == expected.token_ids


def test_cancel_during_the_prompt(engine: Engine, expected: Result) -> None:
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        engine.cancel()

    engine.context.clear()
    ids = engine.encode(PROMPT) * 8
    assert list(engine.stream(ids, LONG, result := Result(), progress)) == []
    assert len(seen) == 1 and seen[0][0] < seen[0][1] == len(ids)
    assert (result.finish_reason, result.token_ids) == ("cancelled", [])
    assert engine.generate(PROMPT, SHORT).token_ids == expected.token_ids


def test_progress_reaches_the_total(engine: Engine) -> None:
    engine.context.clear()
    ids, seen = engine.encode(PROMPT) * 16, list[tuple[int, int]]()
    for _ in engine.stream(ids, SHORT, progress=lambda *counts: seen.append(counts)):
        pass
    assert seen == sorted(seen) and len(seen) > 2 and seen[-1] == (len(ids), len(ids))


def test_an_interrupt_within_a_commit_spoils_nothing(
    engine: Engine, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, calls = engine.models.target.commit, [0]

    def interrupted(count: int) -> None:
        commit(count)
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt  # the target has the tokens, the drafter and the record of them have not

    monkeypatch.setattr(engine.models.target, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, LONG)
    monkeypatch.undo()
    assert engine.generate(PROMPT, SHORT).token_ids == expected.token_ids


# options


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 1.3, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    ],
)
def test_same_seed_same_text_however_it_is_drafted(engine: Engine, options: dict[str, Any]) -> None:
    texts = {engine.generate(PROMPT, replace(SHORT, seed=11, **options, **how)).text for how in DRAFTING}
    assert len(texts) == 1
    assert engine.generate(PROMPT, replace(SHORT, seed=12, **options)).text not in texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_structured_output_is_valid_with_drafts(engine: Engine, temperature: float) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["a", "b"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
    form = StructuredOutput("json_schema", json.dumps(schema))
    config = GenerationConfig(max_new_tokens=300, temperature=temperature, seed=1, structured=form)
    drafted, plain = (engine.generate(PROMPT, replace(config, **how)) for how in ({"block_size": 8}, {"draft": False}))
    assert drafted.token_ids == plain.token_ids and sum(r.drafted for r in drafted.rounds) > 0
    assert drafted.finish_reason == "stop"
    found = json.loads(drafted.text)
    assert set(found) == {"name", "kind"} and found["kind"] in ("a", "b") and len(found["name"]) <= 12


def test_regular_expression(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    config = GenerationConfig(max_new_tokens=60, structured=StructuredOutput("regex", "[a-c]{3}-[0-9]{2}"))
    text = engine.generate(PROMPT, config).text
    assert len(text) == 6 and text[3] == "-" and set(text[:3]) <= set("abc") and text[4:].isdigit()


def test_defaults_are_what_the_publisher_recommends(pair_folder: Path, tmp_path: Path) -> None:
    target = Path(shutil.copytree(pair_folder / "target", tmp_path / "target"))
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    path = target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | recommended))
    bundle = export(ExportRequest(target=target, output=tmp_path / "bundle", weight_format="f32"))
    engine = load(bundle, max_context=128)
    assert engine.defaults == GenerationConfig(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    answers = [engine.generate("Once", replace(engine.defaults, max_new_tokens=8)) for _ in range(4)]
    assert len({answer.text for answer in answers}) > 1


def test_without_recommendations_decoding_is_greedy(small_bundle: Callable[[str], Path], engine: Engine) -> None:
    assert engine.defaults == GenerationConfig()


def test_what_a_request_teaches_about_widths_serves_the_next(engine: Engine) -> None:
    config = GenerationConfig(max_new_tokens=8)
    assert engine._policy(config) is engine._policy(config)
    assert engine._policy(replace(config, draft=False)) is not engine._policy(config)
