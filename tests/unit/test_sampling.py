"""Sampling with speculation: chi-square against the exact distribution, and one text per seed whatever is drafted.

A toy target whose logits depend on the last two tokens runs in the real decode loop. The exact distribution of its
outputs is enumerated from a plain reading of each option's definition, which is itself checked against transformers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from dflash_runtime.context import Context
from dflash_runtime.loop import Decoder
from dflash_runtime.proof import KnowingProposer, RandomWidth
from dflash_runtime.protocols import FloatRows, Logits, Proposal, Proposer, Rows, Snapshot, Target
from dflash_runtime.sampling import SamplingConfig, SpeculativeSampler, uniform
from dflash_runtime.width import FixedWidth, WidthPolicy
from numpy.typing import NDArray
from scipy import stats
from scipy.special import softmax

Array = NDArray[Any]
VOCABULARY, STOP, PROMPT = 12, 11, (3, 7, 3, 1)
TABLE = np.random.default_rng(4).normal(0, 1.5, (VOCABULARY,) * 3).astype(np.float32)
SAMPLES, LENGTH = 20_000, 4
ALARM = 1e-6  # p-value that fails a test; with under 100 comparisons, all of them together alarm falsely below 1e-4

CONFIGS = {
    "top_k": SamplingConfig(temperature=1.2, top_k=4),
    "top_p": SamplingConfig(temperature=1.0, top_p=0.7),
    "min_p": SamplingConfig(temperature=1.5, min_p=0.2),
    "penalties": SamplingConfig(temperature=1.0, repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=0.5),
    "bans": SamplingConfig(
        temperature=0.7,
        logit_bias={0: 1.5, 7: -3.0, STOP: 2.0},
        bad_words_ids=[[2], [1, 4], [5, 6], [3, 1, 8], [STOP]],
        min_new_tokens=2,
    ),
    "everything": SamplingConfig(
        temperature=1.3,
        top_k=9,
        top_p=0.9,
        min_p=0.03,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=-0.3,
        logit_bias={4: 0.8},
        bad_words_ids=[[9], [6, 2]],
        min_new_tokens=3,
    ),
}


def reference(logits: Array, output: Sequence[int], c: SamplingConfig) -> Array:
    """The distribution of the token after PROMPT and `output`, by the definition of each option."""
    tokens, z = [*PROMPT, *output], logits.astype(np.float64)
    for token, bias in c.logit_bias.items():
        z[token] += bias
    for token in set(tokens):
        z[token] *= c.repetition_penalty if z[token] < 0 else 1 / c.repetition_penalty
    for token in set(output):
        z[token] -= c.frequency_penalty * output.count(token) + c.presence_penalty
    for *before, last in c.bad_words_ids:
        if tokens[len(tokens) - len(before) :] == before and (before or last != STOP):
            z[last] = -math.inf
    if len(output) < c.min_new_tokens:
        z[STOP] = -math.inf
    z /= c.temperature
    if 0 < c.top_k < len(z):
        z[z < sorted(z)[-c.top_k]] = -math.inf
    p = softmax(z)
    reached = 0.0
    for token in sorted(range(len(p)), key=lambda t: (-p[t], t)):
        dropped = reached >= c.top_p and reached > 0
        reached += p[token]
        p[token] *= not dropped
    p[p < c.min_p * p.max()] = 0.0
    return np.asarray(p / p.sum())


class Toy:
    """A target whose hidden rows are its logits; for one sequence, so it cannot go back."""

    max_rows = prefill_rows = 16
    prefill_piece = staticmethod(lambda left: min(left, 16))

    def __init__(self) -> None:
        self.committed, self._block = [0], [0]

    @property
    def length(self) -> int:
        return len(self.committed) - 1

    def verify(self, tokens: Sequence[int]) -> Rows:
        self._block = list(tokens)
        hidden = TABLE[[self.committed[-1], *tokens[:-1]], tokens]
        return Rows(hidden, np.empty((len(tokens), 0), np.float32))

    def commit(self, count: int) -> None:
        self.committed += self._block[:count]

    def snapshot(self) -> Snapshot:
        return Snapshot(self.length, ())


def head(hidden: FloatRows) -> Logits:
    return Logits([hidden])


class Informed:
    """Drafts the target's likeliest tokens (`rank` -1) or its least likely (`rank` 0)."""

    def __init__(self, rank: int) -> None:
        self._rank, self._last = rank, 0

    def observe(self, tokens: Sequence[int], rows: Rows) -> None:
        self._last = tokens[-1]

    def propose(self, anchor: int, count: int) -> Proposal:
        tokens = [self._last, anchor]
        for _ in range(count):
            tokens.append(int(np.argsort(TABLE[tokens[-2], tokens[-1]])[self._rank]))
        return Proposal(tokens[2:])

    def rewind(self, length: int) -> None:
        pass


def drafters() -> list[Proposer]:
    return [Informed(-1), Informed(0), KnowingProposer(VOCABULARY, 1, "random")]


def decode(sampler: SpeculativeSampler, proposer: Proposer | None, policy: WidthPolicy, count: int) -> list[int]:
    decoder = Decoder(Context(cast(Target, Toy()), proposer), head, policy, minimum_rows=2)
    sampler.start(PROMPT)
    tokens = [decoder.prefill(PROMPT, sampler)]
    for done in decoder.rounds(tokens[0], count - 1, sampler):
        tokens += done.tokens
    return tokens


def exact(config: SamplingConfig) -> Array:
    """The joint distribution of the first LENGTH tokens."""
    joint = np.ones(())
    for step in range(LENGTH):
        rows = []
        for output in itertools.product(range(VOCABULARY), repeat=step):
            last, token = [*PROMPT, *output][-2:]
            rows.append(
                joint[output] * reference(TABLE[last, token], output, config) if joint[output] else np.zeros(12)
            )
        joint = np.reshape(rows, (VOCABULARY,) * (step + 1))
    return joint


def p_value(observed: Array, probabilities: Array) -> float:
    """Pearson's chi-square, rare cells pooled; 0 if something impossible was seen."""
    expected = probabilities * observed.sum()
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 10
    pooled = [np.append(x[~rare], x[rare].sum()) for x in (observed, expected)]
    cells = pooled[1] > 0
    return float(stats.chisquare(pooled[0][cells], pooled[1][cells]).pvalue) if cells.sum() > 1 else 1.0


def marginals(joint: Array) -> Iterator[Array]:
    for kept in [(0,), (1,), (2,), (3,), (0, 1), (2, 3)]:
        yield joint.sum(axis=tuple(axis for axis in range(LENGTH) if axis not in kept)).ravel()


def worst_p_value(
    config: SamplingConfig,
    sampler: type[SpeculativeSampler] = SpeculativeSampler,
    proposers: Sequence[Proposer] = (),
    samples: int = SAMPLES,
) -> float:
    """The smallest p-value of six marginals of many outputs, each with its own seed, widths and drafter."""
    observed = np.zeros((VOCABULARY,) * LENGTH, np.int64)
    proposers, policy = proposers or drafters(), RandomWidth(Toy.max_rows, 1)
    for seed in range(samples):
        one = sampler(replace(config, seed=seed), VOCABULARY, [STOP])
        observed[tuple(decode(one, proposers[seed % len(proposers)], policy, LENGTH))] += 1
    pairs = zip(marginals(observed), marginals(exact(config)), strict=True)
    return min(p_value(seen, wanted) for seen, wanted in pairs)


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_follow_the_exact_distribution(name: str) -> None:
    assert worst_p_value(CONFIGS[name]) > ALARM


class AcceptsLikelyDrafts(SpeculativeSampler):
    """Wrong: takes a draft that is merely likely."""

    def choose(self, logits: Logits, drafts: Sequence[int], position: int) -> list[int]:
        chosen = super().choose(Logits([part[:1] for part in logits.parts]), (), position)
        if drafts and self.takes(logits.row(0), drafts[0], position):
            chosen = [drafts[0]]
        if drafts and chosen[0] == drafts[0]:
            chosen += self.choose(logits.since(1), drafts[1:], position + 1)
        return chosen

    def takes(self, scores: FloatRows, draft: int, position: int) -> bool:
        return bool(softmax(scores)[draft] > 0.3)


class RedrawsTheDraft(AcceptsLikelyDrafts):
    """Wrong: accepts a draft with its probability, but may draw a rejected one again."""

    def takes(self, scores: FloatRows, draft: int, position: int) -> bool:
        return bool(uniform(self.seed + SAMPLES, position) < softmax(scores)[draft])


class ForgetsTheBlock(SpeculativeSampler):
    """Wrong: the penalties of a row do not see the tokens chosen earlier in the same block."""

    def choose(self, logits: Logits, drafts: Sequence[int], position: int) -> list[int]:
        self._waiting: list[int] = []
        chosen = super().choose(logits, drafts, position)
        for token in self._waiting:
            super()._append(token)
        return chosen

    def _append(self, token: int) -> None:
        self._waiting.append(token)


@pytest.mark.parametrize("wrong", [AcceptsLikelyDrafts, RedrawsTheDraft, ForgetsTheBlock])
def test_a_wrong_sampler_is_found_out(wrong: type[SpeculativeSampler]) -> None:
    config = SamplingConfig(temperature=1.0, presence_penalty=1.5 if wrong is ForgetsTheBlock else 0.0)
    assert worst_p_value(config, wrong, [Informed(-1)], samples=4000) < ALARM


def same_texts(config: SamplingConfig, sampler: type[SpeculativeSampler] = SpeculativeSampler) -> bool:
    """Whether plain decoding and every drafter at random widths give the same text."""

    def text(proposer: Proposer | None, policy: WidthPolicy) -> list[int]:
        return decode(sampler(config, VOCABULARY, [STOP]), proposer, policy, 80)

    plain = text(None, FixedWidth(1))
    for seed in range(3):
        knowing = [KnowingProposer(VOCABULARY, seed, kind) for kind in ("true", "random", "adversarial")]
        for each in knowing:
            each.truth = [*PROMPT, *plain]
        proposers: list[Proposer] = [*knowing, Informed(-1), Informed(0)]
        if any(text(proposer, RandomWidth(Toy.max_rows, seed)) != plain for proposer in proposers):
            return False
    return True


@pytest.mark.parametrize("name", [*CONFIGS, "greedy", "greedy with penalties"])
def test_a_seed_gives_one_text_whatever_is_drafted(name: str) -> None:
    config = CONFIGS.get(name, SamplingConfig(frequency_penalty=0.5 if "penalties" in name else 0.0))
    assert all(same_texts(replace(config, seed=seed)) for seed in range(3))


class DrawsByRound(SpeculativeSampler):
    """Wrong: exact, but its random numbers depend on how many rounds there were."""

    rounds = 0

    def choose(self, logits: Logits, drafts: Sequence[int], position: int) -> list[int]:
        self.rounds += 1
        return super().choose(logits, drafts, position + 1000 * self.rounds)


def test_random_numbers_that_depend_on_rounds_are_found_out() -> None:
    assert not same_texts(SamplingConfig(temperature=1.0, seed=0), DrawsByRound)


def test_the_reference_means_what_transformers_means() -> None:
    torch, library = pytest.importorskip("torch"), pytest.importorskip("transformers")
    rng, output = np.random.default_rng(7), [2, 9, 2, 5]
    for config in CONFIGS.values():
        c = replace(config, presence_penalty=0.0, frequency_penalty=0.0)  # which transformers does not have
        biases = {(token,): bias for token, bias in c.logit_bias.items()}
        words = [list(word) for word in c.bad_words_ids] or [[0, 0]]
        processors = library.LogitsProcessorList(
            [
                *([library.SequenceBiasLogitsProcessor(biases)] if biases else []),
                library.RepetitionPenaltyLogitsProcessor(c.repetition_penalty),
                library.NoBadWordsLogitsProcessor(words, STOP),
                library.MinNewTokensLengthLogitsProcessor(len(PROMPT), c.min_new_tokens, STOP, device="cpu"),
                library.TemperatureLogitsWarper(c.temperature),
                library.TopKLogitsWarper(c.top_k or VOCABULARY),
                library.TopPLogitsWarper(c.top_p),
                library.MinPLogitsWarper(c.min_p),
            ]
        )
        for count in range(5):
            row = rng.normal(0, 2, VOCABULARY)
            tokens = torch.tensor([[*PROMPT, *output[:count]]])
            expected = processors(tokens, torch.tensor(row)[None]).softmax(-1)[0].numpy()
            np.testing.assert_allclose(reference(row, output[:count], c), expected, atol=1e-9)
