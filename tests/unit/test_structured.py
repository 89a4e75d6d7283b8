"""Structured output: masks against a search over the whole language, and valid texts whatever is drafted."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from dflash_graphs.errors import RequestError
from dflash_runtime.protocols import Logits
from dflash_runtime.sampling import SamplingConfig, SpeculativeSampler
from dflash_runtime.structured import Constraint, Grammars, StructuredOutput

pytest.importorskip("llguidance")

PAIR = Path(__file__).parents[2] / "runtime" / "dflash_runtime" / "data" / "pair" / "target" / "tokenizer.json"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "counts"],
    "additionalProperties": False,
}
GBNF = 'root ::= greeting " " ("world" | "moon")\ngreeting ::= "hello" | "good" " "? "bye"'

# A tokenizer small enough to list everything it can spell; the last two tokens end the text.
SPELLING = ["a", "b", "c", "ab", "bc", "abc", "x", "<s>", "</s>"]
STOPS = (7, 8)


@pytest.fixture(scope="module")
def toy() -> Grammars:
    added = [
        {"id": i, "content": SPELLING[i], "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i in STOPS
    ]
    model = {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(SPELLING[:7])},
        "merges": [["a", "b"], ["b", "c"], ["ab", "c"]],
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    text = {"version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    return Grammars(tokenizers.Tokenizer.from_str(json.dumps(text)).to_str(), 12, STOPS)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(PAIR))


@pytest.fixture(scope="module")
def grammars(tokenizer: tokenizers.Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_str(), VOCABULARY, [END])


VOCABULARY, END = 4100, 4092  # four rows more than the tokenizer has tokens


def random_logits(seed: int, favoured: Sequence[int]) -> Iterator[Logits]:
    """Single rows, in which the favoured tokens stand out so that outputs end at last."""
    rng = np.random.default_rng(seed)
    while True:
        row = rng.normal(0, 2, (1, VOCABULARY)).astype(np.float32)
        row[:, list(favoured)] += 8
        yield Logits([row])


def generate(constraint: Constraint, config: SamplingConfig, favoured: Sequence[int], seed: int) -> list[int]:
    sampler = SpeculativeSampler(config, VOCABULARY, [END], constraint)
    sampler.start([5, 6])
    tokens: list[int] = []
    for position, logits in enumerate(random_logits(seed, favoured)):
        tokens += sampler.choose(logits, (), 2 + position)
        if tokens[-1] == END or position > 200:
            return tokens
    raise AssertionError


def test_masks_are_those_of_a_search_over_the_language(toy: Grammars) -> None:
    language = {"a", "abx", "cab", "cabc", "cc"}
    constraint = toy.compile(StructuredOutput("regex", "abx|a|cabc?|cc"))
    waiting: list[list[int]] = [[]]
    seen = 0
    while waiting:
        tokens = waiting.pop()
        text = "".join(SPELLING[token] for token in tokens)
        constraint.reset()
        for token in tokens:
            constraint.advance(token)
        viable = {i for i in range(7) if any(word.startswith(text + SPELLING[i]) for word in language)}
        expected = viable | (set(STOPS) if text in language else set())
        assert set(np.flatnonzero(constraint.mask())) == expected, text
        waiting += [[*tokens, token] for token in sorted(viable)]
        seen += 1
    assert seen > 10


def test_a_complete_output_can_only_stop(toy: Grammars) -> None:
    constraint = toy.compile(StructuredOutput("choice", '["abc"]'))
    constraint.advance(5)
    assert np.flatnonzero(constraint.mask()).tolist() == list(STOPS)
    constraint.advance(8)
    assert np.flatnonzero(constraint.mask()).tolist() == list(STOPS)  # and goes on so where stops are ignored
    constraint.advance(7)
    constraint.reset()
    assert not constraint.mask()[list(STOPS)].any()


def test_white_space_between_json_tokens_is_bounded(grammars: Grammars, tokenizer: tokenizers.Tokenizer) -> None:
    for text, whole in (('{ "a":\n    []\n}', True), ("{}", True), ("{  }", False), ("{\n\n}", False)):
        constraint = grammars.compile(StructuredOutput("json_schema", '{"type": "object"}'))
        allowed = True
        for token in [tokenizer.encode(character).ids[0] for character in text]:
            allowed = allowed and bool(constraint.mask()[token])
            if allowed:
                constraint.advance(token)
        assert allowed == whole, text


def test_a_token_the_mask_forbids_is_refused(toy: Grammars) -> None:
    constraint = toy.compile(StructuredOutput("regex", "ab"))
    with pytest.raises(RequestError, match="cannot go on"):
        constraint.advance(6)
    with pytest.raises(RequestError, match="cannot go on"):
        constraint.mask()
    constraint.reset()
    assert constraint.mask()[3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_output_is_valid_json_of_the_schema(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer, temperature: float, seed: int
) -> None:
    constraint = grammars.compile(StructuredOutput("json_schema", json.dumps(SCHEMA)))
    config = SamplingConfig(temperature=temperature, seed=seed, top_p=0.9, min_new_tokens=1000, repetition_penalty=1.2)
    tokens = generate(constraint, config, [*tokenizer.encode('"},:[]').ids, 92], seed)
    assert tokens[-1] == END  # though `min_new_tokens` is far: a complete output must be able to stop
    value = json.loads(tokenizer.decode(tokens))
    assert list(value) == ["name", "size", "counts"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert value["size"] in ("small", "large")
    assert len(value["counts"]) <= 3 and all(type(n) is int and 0 <= n <= 99 for n in value["counts"])


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        (StructuredOutput("regex", "[A-F]{3}-[0-9]{2,4}"), "[A-F]{3}-[0-9]{2,4}"),
        (StructuredOutput("grammar", GBNF), "(hello|good ?bye) (world|moon)"),
        (StructuredOutput("grammar", 'start: "x" DIGIT+ "é"\nDIGIT: /[0-9]/'), "x[0-9]+é"),
        (StructuredOutput("choice", '["yes", "no", "dépend"]'), "yes|no|dépend"),
    ],
)
def test_output_has_the_form(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer, wanted: StructuredOutput, pattern: str
) -> None:
    constraint = grammars.compile(wanted)
    for seed in range(5):
        tokens = generate(
            constraint, SamplingConfig(temperature=1.0, seed=seed), [*tokenizer.encode("é").ids, END], seed
        )
        assert tokens[-1] == END
        assert re.fullmatch(pattern, tokenizer.decode(tokens))


def test_the_form_can_begin_after_thinking(grammars: Grammars, tokenizer: tokenizers.Tokenizer) -> None:
    wanted = StructuredOutput("grammar", 'start: /(.|\\n)*/ </think> "\\n\\n" answer\nanswer: %json {"enum": [1, 2]}')
    constraint = grammars.compile(wanted)
    for token in tokenizer.encode("some\nthoughts").ids:
        constraint.advance(token)
    assert not constraint.mask()[END] and constraint.mask()[tokenizer.token_to_id("</think>")]
    for token in tokenizer.encode("</think>\n\n2").ids:
        constraint.advance(token)
    assert np.flatnonzero(constraint.mask()).tolist() == [END]


def test_drafts_change_no_token(grammars: Grammars, tokenizer: tokenizers.Tokenizer) -> None:
    table = np.random.default_rng(0).normal(0, 2, (64, VOCABULARY)).astype(np.float32)
    table[:, tokenizer.encode('"},:[]').ids] += 6
    wanted, config = StructuredOutput("json_schema", json.dumps(SCHEMA)), SamplingConfig(temperature=1.0, seed=3)

    def run(kind: str, truth: list[int]) -> list[int]:
        rng, tokens = np.random.default_rng(1), list[int]()
        sampler = SpeculativeSampler(config, VOCABULARY, [END], grammars.compile(wanted))
        while END not in tokens:
            count = int(rng.integers(0, 9)) if kind else 0
            drafts = [*truth[len(tokens) : len(tokens) + count]]
            if kind == "mixed":
                drafts = [d if rng.random() < 0.7 else int(rng.integers(VOCABULARY)) for d in drafts]
            block = table[len(tokens) : len(tokens) + len(drafts) + 1]
            tokens += sampler.choose(Logits([block]), drafts, len(tokens))
        return tokens

    plain = run("", [])
    assert len(plain) > 10
    # past the end of the truth, drafts go on behind the stop token
    assert run("true", [*plain, 5, 6, 7])[: len(plain)] == run("mixed", [*plain, END, 6])[: len(plain)] == plain


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (StructuredOutput("json_schema", "{"), "json_schema of the structured output cannot be used: "),
        (StructuredOutput("json_schema", '{"type": "thing"}'), "Invalid type: thing"),
        (StructuredOutput("json_schema", '{"unevaluatedItems": false}'), "Unimplemented keys"),
        (StructuredOutput("regex", "(a"), "unclosed group"),
        (StructuredOutput("grammar", 'start: "a" b'), "unknown name"),
        (StructuredOutput("grammar", 'root ::= "a" b'), "Rule 'b' not found"),
        (StructuredOutput("choice", "yes"), "choice of the structured output"),
        (StructuredOutput("choice", "[1]"), "choice of the structured output"),
        (StructuredOutput("poem", "a"), "Unknown grammar type"),  # type: ignore[arg-type]
    ],
)
def test_malformed_forms_are_refused(toy: Grammars, wanted: StructuredOutput, message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        toy.compile(wanted)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tokenizer: tokenizers.Tokenizer) -> None:
    with pytest.raises(RequestError, match="needs a stop token"):
        Grammars(tokenizer.to_str(), VOCABULARY, [])
    with pytest.raises(RequestError, match="cannot use this tokenizer"):
        Grammars(tokenizer.to_str(), 100, [1])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=re.escape("pip install 'dflash-openvino[structured]'")):
        Grammars(tokenizer.to_str(), VOCABULARY, [END])
