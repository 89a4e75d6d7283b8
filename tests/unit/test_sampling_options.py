"""Sampling options one at a time: what each does to a row chosen by hand, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dflash_graphs.errors import RequestError
from dflash_runtime.protocols import Logits
from dflash_runtime.sampling import SamplingConfig, SpeculativeSampler, uniform
from scipy import stats
from scipy.special import log_softmax, softmax

ALARM = 1e-6


def rows(*values: list[float]) -> Logits:
    array = np.array(values, np.float32)
    return Logits([array])


def drawn(row: list[float], seeds: int = 300, **options: Any) -> set[int]:
    """Every token that comes up."""
    samplers = [SpeculativeSampler(SamplingConfig(seed=seed, **options), len(row)) for seed in range(seeds)]
    return {sampler.choose(rows(row), (), 0)[0] for sampler in samplers}


def test_greedy_takes_the_likeliest_of_each_row_up_to_the_first_wrong_draft() -> None:
    sampler = SpeculativeSampler(SamplingConfig(), 4)
    logits = Logits([np.eye(4, dtype=np.float32)[[3, 1, 2, 0]]])
    assert sampler.choose(logits, [3, 1, 0], 0) == [3, 1, 2]
    assert sampler.choose(logits, [3, 1, 2], 3) == [3, 1, 2, 0]
    assert sampler.choose(logits, [], 7) == [3]


def test_greedy_with_penalties_takes_the_lowest_of_equal_tokens() -> None:
    sampler = SpeculativeSampler(SamplingConfig(logit_bias={1: 2.0, 3: 2.0}), 4)
    assert sampler.choose(rows([1.0, 0.0, 0.0, 0.0]), (), 0) == [1]


def test_penalties_see_drafts_of_the_same_block() -> None:
    row = [1.0, 0.9, 0.8]
    sampler = SpeculativeSampler(SamplingConfig(presence_penalty=0.5), 3)
    sampler.start([1, 2])  # the prompt is not output
    assert sampler.choose(rows(row, row, row), [0, 1], 2) == [0, 1, 2]
    sampler.start([])
    assert sampler.choose(rows(row), (), 0) == [0]


def test_frequency_counts_and_repetition_includes_the_prompt() -> None:
    frequent = SpeculativeSampler(SamplingConfig(frequency_penalty=0.4), 2)
    assert frequent.choose(rows(*[[1.0, 0.0]] * 4), [0, 0, 0], 0) == [0, 0, 0, 1]
    repeated = SpeculativeSampler(SamplingConfig(repetition_penalty=2.0), 3)
    repeated.start([0])
    assert repeated.choose(rows([1.0, 0.6, 0.0]), (), 1) == [1]
    repeated.start([0])
    assert repeated.choose(rows([-1.0, -1.5, -3.0]), (), 1) == [1]  # a negative logit is multiplied


def test_bad_words_match_across_prompt_and_block() -> None:
    row = [3.0, 2.0, 1.0, 0.0]
    sampler = SpeculativeSampler(SamplingConfig(bad_words_ids=[[2, 0], [1, 0, 0], [3]]), 4, [3])
    sampler.start([2])
    assert sampler.choose(rows(row, row, row), [1, 0], 1) == [1, 0, 1]
    sampler.start([])
    assert sampler.choose(rows([0.0, 0.0, 0.0, 1.0]), (), 0) == [3]  # a stop token alone is no bad word


def test_stop_tokens_wait_for_the_minimum() -> None:
    row = [0.0, 1.0, 3.0, 2.0]
    sampler = SpeculativeSampler(SamplingConfig(min_new_tokens=2), 4, [2, 3])
    sampler.start([0] * 5)
    assert sampler.choose(rows(row, row, row), [1, 1], 5) == [1, 1, 2]


def test_truncations_keep_what_they_say() -> None:
    row = np.log([0.4, 0.3, 0.15, 0.15]).tolist()
    assert drawn(row, temperature=1.0) == {0, 1, 2, 3}
    assert drawn(row, temperature=1.0, top_k=-1) == {0, 1, 2, 3}
    assert drawn(row, temperature=1.0, top_k=2) == {0, 1}
    assert drawn(row, temperature=1.0, top_k=3) == {0, 1, 2, 3}  # equals of the third likeliest stay
    assert drawn(row, temperature=1.0, top_p=0.8) == {0, 1, 2}  # of equals, the lowest ids are enough
    assert drawn(row, temperature=1.0, top_p=0.0) == {0}
    assert drawn(row, temperature=1.0, min_p=0.7) == {0, 1}
    assert drawn(row, temperature=1.0, min_p=1.0) == {0}
    assert drawn([1.0, 1.0, 1.0], temperature=1.0, top_p=0.0) == {0}
    assert drawn(row, temperature=1e-6) == {0}


def test_every_draft_is_accepted_that_equals_the_draw() -> None:
    table = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)
    logits = Logits([table])
    config = SamplingConfig(temperature=1.0, seed=1)
    one, block = SpeculativeSampler(config, 50), SpeculativeSampler(config, 50)
    alone = [one.choose(Logits([table[i : i + 1]]), (), i)[0] for i in range(40)]
    assert block.choose(logits, alone[:-1], 0) == alone
    assert len(set(alone)) > 10


def test_rare_tokens_of_a_large_vocabulary_are_drawn_exactly() -> None:
    size = 3000  # more than one partial sum of the draw
    row = np.random.default_rng(5).normal(0, 2, (1, size)).astype(np.float32)
    row[0, 100:2200] = -np.inf
    sampler, logits = SpeculativeSampler(SamplingConfig(temperature=1.0, seed=6), size), Logits([row])
    tokens = [sampler.choose(logits, (), position)[0] for position in range(20_000)]
    observed, expected = np.bincount(tokens, minlength=size), 20_000 * softmax(row[0].astype(np.float64))
    assert not observed[expected == 0].any()
    rare = expected < 10
    pooled = [np.append(x[~rare], x[rare].sum()) for x in (observed, expected)]
    assert stats.chisquare(*pooled).pvalue > ALARM


def test_random_numbers_are_uniform_and_stay_what_they_are() -> None:
    assert stats.kstest([uniform(3, position) for position in range(20_000)], "uniform").pvalue > ALARM
    assert stats.kstest([uniform(seed, 3) for seed in range(20_000)], "uniform").pvalue > ALARM
    known = [0.011546754286331562, 0.9719207784869555, 0.46292535650502586]
    assert [uniform(0, 0), uniform(1, 5), uniform(-1, 5)] == known  # a change would change every sampled text


def test_a_seed_is_drawn_and_can_be_used_again() -> None:
    config, logits = SamplingConfig(temperature=1.0), rows(*[[0.0] * 50] * 1)
    first, second = SpeculativeSampler(config, 50), SpeculativeSampler(config, 50)
    assert first.seed != second.seed
    again = SpeculativeSampler(SamplingConfig(temperature=1.0, seed=first.seed), 50)
    assert [first.choose(logits, (), i) for i in range(20)] == [again.choose(logits, (), i) for i in range(20)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_raw_logits(temperature: float) -> None:
    table = np.random.default_rng(1).normal(0, 3, (5, 30)).astype(np.float32)
    table[:, 7] = table[:, 3]
    config = SamplingConfig(temperature=temperature, seed=0, logprobs=4, presence_penalty=1.0, logit_bias={5: 4.0})
    sampler = SpeculativeSampler(config, 30)
    tokens = []
    for i in range(5):
        tokens += sampler.choose(Logits([table[i : i + 1]]), (), i)
    assert [entry.token for entry in sampler.logprobs] == tokens
    for entry, row in zip(sampler.logprobs, table, strict=True):
        expected = log_softmax(row.astype(np.float64))
        assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-12)
        assert [token for token, _ in entry.top] == np.argsort(-row, kind="stable")[:4].tolist()
        assert [value for _, value in entry.top] == pytest.approx([expected[token] for token, _ in entry.top])
    sampler.start([])
    assert sampler.logprobs == []


def test_logprobs_need_no_top_list() -> None:
    sampler = SpeculativeSampler(SamplingConfig(logprobs=0), 2)
    assert sampler.choose(rows([0.0, 0.0], [9.0, 0.0]), [0], 0) == [0, 0]
    assert [entry.top for entry in sampler.logprobs] == [(), ()]
    assert sampler.logprobs[0].logprob == pytest.approx(math.log(0.5))


def test_options_that_ban_everything_are_refused() -> None:
    sampler = SpeculativeSampler(SamplingConfig(bad_words_ids=[[0]], min_new_tokens=1), 2, [1])
    with pytest.raises(RequestError, match="ban every token"):
        sampler.choose(rows([0.0, 1.0]), (), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -2}, "top_k must be"),
        ({"top_p": 1.1}, "top_p must be from 0 to 1, not 1.1"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"presence_penalty": math.nan}, "presence_penalty must be finite"),
        ({"frequency_penalty": math.inf}, "frequency_penalty must be finite"),
        ({"logit_bias": {0: -math.inf}}, "ban a token with bad_words_ids"),
        ({"bad_words_ids": [[]]}, "at least one token id"),
        ({"min_new_tokens": -1}, "min_new_tokens must be at least 0"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"logit_bias": {8: 1.0}}, "logit_bias must be token ids below the vocabulary of 8, not 8"),
        ({"bad_words_ids": [[0, -1]]}, "bad_words_ids must be token ids below the vocabulary"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SpeculativeSampler(SamplingConfig(**options), 8)
