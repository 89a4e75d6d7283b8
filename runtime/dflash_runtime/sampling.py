"""Chooses tokens from logits: penalties, bans and constraints, temperature, top-k, top-p, min-p, one random draw.

Knows logits, token ids and positions. Does not know drafters: a draft is accepted if it equals the token that is drawn
anyway, and the draw at a position depends on the seed, the position and the tokens before it alone. So what is emitted
follows the target's distribution exactly, is the same whatever was drafted, and a draft d is accepted with chance p(d).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from dflash_graphs.errors import RequestError
from numpy.typing import NDArray

from .protocols import Logits
from .structured import Constraint

_Scores = NDArray[np.float32]  # [vocabulary]
_SEEDS = 1 << 64
_BLOCK = 1024  # weights per partial sum of a draw


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How to choose tokens; the default is greedy. Applied in this order, with the meaning transformers gives each:

    1. `logit_bias` is added to the logit of each given token id.
    2. `repetition_penalty` divides the positive logits of tokens in prompt or output, and multiplies the negative.
    3. `frequency_penalty` is subtracted once per occurrence in the output, `presence_penalty` once if there is any
       (as vLLM defines them).
    4. `bad_words_ids`: the last token of a sequence is banned wherever prompt and output end with the others. A stop
       token alone is no bad word. Stop tokens are banned from the first `min_new_tokens` tokens.
    5. `temperature` divides the logits; 0 takes the likeliest token, lowest id among equals, and ends here.
    6. `top_k` keeps the k likeliest and their equals; 0 or -1 keeps all.
    7. `top_p` keeps the fewest likeliest tokens that reach this probability together, at least one.
    8. `min_p` keeps what is at least this fraction as likely as the likeliest.

    `seed` None takes a random one. `logprobs` n records the log probability of each token and the n likeliest.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_ids: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raise RequestError naming the first option that is out of range."""
        _require(0 <= self.temperature < math.inf, "temperature", "at least 0 and finite", self.temperature)
        _require(self.top_k >= -1, "top_k", "at least 1, or 0 or -1 to keep all", self.top_k)
        _require(0 <= self.top_p <= 1, "top_p", "from 0 to 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "from 0 to 1", self.min_p)
        penalty = self.repetition_penalty
        _require(0 < penalty < math.inf, "repetition_penalty", "above 0 and finite", penalty)
        _require(math.isfinite(self.presence_penalty), "presence_penalty", "finite", self.presence_penalty)
        _require(math.isfinite(self.frequency_penalty), "frequency_penalty", "finite", self.frequency_penalty)
        for bias in self.logit_bias.values():
            _require(math.isfinite(bias), "logit_bias", "finite; ban a token with bad_words_ids", bias)
        for sequence in self.bad_words_ids:
            _require(len(sequence) > 0, "bad_words_ids", "sequences of at least one token id", list(sequence))
        _require(self.min_new_tokens >= 0, "min_new_tokens", "at least 0", self.min_new_tokens)
        _require((self.logprobs or 0) >= 0, "logprobs", "at least 0", self.logprobs)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log probabilities by the target's own logits, before any option of the sampler applies (as in vLLM)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens and theirs, best first, lowest id among equals


class SpeculativeSampler:
    """Samples one sequence. Give each request its own."""

    def __init__(
        self,
        config: SamplingConfig,
        vocabulary: int,
        stop_token_ids: Collection[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """`vocabulary` is the width of the logits; `stop_token_ids` are those `min_new_tokens` suppresses.

        Raises:
            RequestError: an option names a token outside the vocabulary.
        """
        self.config, self.constraint = config, constraint
        self.seed = secrets.randbits(64) if config.seed is None else config.seed
        self.logprobs: list[TokenLogprobs] = []  # one for each token chosen since `start`, if the config asks for them
        self._stops = list(stop_token_ids)
        self._bad_words = [list(w) for w in config.bad_words_ids if len(w) > 1 or w[0] not in self._stops]
        _check_ids("logit_bias", config.logit_bias, vocabulary)
        for sequence in config.bad_words_ids:
            _check_ids("bad_words_ids", sequence, vocabulary)
        self._biased = np.array(list(config.logit_bias), np.int64)
        self._bias = np.array(list(config.logit_bias.values()), np.float32)
        self._all_ids = np.arange(vocabulary)
        self._penalizes = (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) != (1, 0, 0)
        self._alters = bool(config.logit_bias) or self._penalizes or constraint is not None
        self._bans = bool(self._bad_words) or config.min_new_tokens > 0
        self.start(())

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Begin a new output after `prompt_ids`."""
        self.logprobs = []
        self._tokens, self._prompt_length = list(prompt_ids), len(prompt_ids)
        self._seen = np.zeros(len(self._all_ids), np.bool_)  # in prompt or output
        self._seen[self._tokens] = True
        self._counts = np.zeros(len(self._all_ids), np.int32)  # in the output
        if self.constraint is not None:
            self.constraint.reset()

    def choose(self, logits: Logits, drafts: Sequence[int], position: int) -> list[int]:
        """Return the tokens that follow, up to and including the first that differs from its draft.

        Raises:
            RequestError: the options ban every token, or the constraint became too complex to follow.
        """
        chosen = []
        for row, draft in enumerate([*drafts, None]):
            token = self._choose(logits, row, position + row)
            chosen.append(token)
            self._append(token)  # before the next row is looked at: its draft was right, so this is its prefix
            if token != draft or token in self._stops:
                break
        return chosen

    def _choose(self, logits: Logits, row: int, position: int) -> int:
        banned = self._banned() if self._bans else []
        alters = self._alters or bool(banned)
        if not alters and self.config.temperature == 0 and self.config.logprobs is None:
            return logits.likeliest(row)  # spares the copy
        raw = logits.row(row)
        scores = self._scores(raw, banned) if alters else raw
        if self.config.temperature > 0:
            ids, weights = self._candidates(scores)
            token = int(ids[_invert(weights, uniform(self.seed, position))])
        else:
            token = int(scores.argmax())
        if self.config.logprobs is not None:
            self.logprobs.append(_logprobs(raw, token, self.config.logprobs))
        return token

    def _append(self, token: int) -> None:
        if not (self._alters or self._bans):
            return  # nothing will ask
        self._tokens.append(token)
        self._seen[token] = True
        self._counts[token] += 1
        if self.constraint is not None:
            self.constraint.advance(token)

    def _scores(self, raw: _Scores, banned: list[int]) -> _Scores:
        """Steps 1 to 4 and the constraint."""
        scores = raw.copy()
        scores[self._biased] += self._bias
        if self._penalizes:
            self._penalize(scores)
        scores[banned] = -np.inf
        if self.constraint is not None:
            allowed = self.constraint.mask()
            scores[~allowed] = -np.inf
            if scores.max() == -np.inf:  # valid output comes before bans, so that a complete one can stop
                return np.where(allowed, raw, np.float32(-np.inf))
        elif banned and scores.max() == -np.inf:
            raise RequestError("bad_words_ids and min_new_tokens ban every token; relax them")
        return scores

    def _penalize(self, scores: _Scores) -> None:
        c = self.config
        if c.repetition_penalty != 1:
            ids = np.flatnonzero(self._seen)
            old = scores[ids]
            scores[ids] = np.where(old > 0, old / c.repetition_penalty, old * c.repetition_penalty)
        ids = np.flatnonzero(self._counts)
        scores[ids] -= c.frequency_penalty * self._counts[ids] + c.presence_penalty

    def _banned(self) -> list[int]:
        tokens, banned = self._tokens, []
        for sequence in self._bad_words:
            if tokens[len(tokens) - len(sequence) + 1 :] == sequence[:-1]:
                banned.append(sequence[-1])
        if len(tokens) - self._prompt_length < self.config.min_new_tokens:
            banned += self._stops
        return banned

    def _candidates(self, scores: _Scores) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps 5 to 8: the ids left, ascending, and their weights, in proportion to their probabilities."""
        c, ids = self.config, self._all_ids
        if 0 < c.top_k < len(scores):
            ids = np.flatnonzero(scores >= np.partition(scores, -c.top_k)[-c.top_k])
            scores = scores[ids]
        weights = scores.astype(np.float64)
        weights -= weights.max()
        weights /= c.temperature
        np.exp(weights, out=weights)
        total = weights.sum()
        # tokens below (1 - top_p) / n each do not reach 1 - top_p together, so top-p keeps none of them: spare the sort
        floor = max(c.min_p, (1 - c.top_p) * total / len(weights))
        if floor > 0:
            kept = np.flatnonzero(weights >= floor)
            ids, weights = ids[kept], weights[kept]
        if c.top_p < 1:
            kept = _nucleus(weights, c.top_p * total)
            ids, weights = ids[kept], weights[kept]
        return ids, weights


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of a position: 53 bits of Philox-4x64, key `seed`, counter `position`."""
    raw = int(np.random.Philox(key=seed % _SEEDS, counter=position).random_raw())
    return (raw >> 11) * 2.0**-53


def _nucleus(weights: NDArray[np.float64], needed: float) -> NDArray[np.int64]:
    """Ascending indices of the fewest largest weights that reach `needed` together, lowest index among equals."""
    ordered = np.sort(weights)[::-1]
    count = min(int(np.searchsorted(np.cumsum(ordered), needed)) + 1, len(ordered))
    least = ordered[count - 1]
    above = np.flatnonzero(weights > least)
    return np.sort(np.concatenate([above, np.flatnonzero(weights == least)[: count - len(above)]]))


def _invert(weights: NDArray[np.float64], share: float) -> int:
    """Index at which the running sum of the weights first exceeds `share` of their total; its weight is not 0.

    In two steps, because a running sum over a whole vocabulary is slower than all the rest.
    """
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
    aim = share * sums[-1]
    block = int(np.searchsorted(sums, aim, side="right"))
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK])
    # the two sums of a block are rounded differently; the index must stay within it
    rest = min(aim - (sums[block - 1] if block else 0.0), np.nextafter(inside[-1], 0.0))
    return block * _BLOCK + int(np.searchsorted(inside, rest, side="right"))


def _logprobs(raw: _Scores, token: int, count: int) -> TokenLogprobs:
    logits = raw.astype(np.float64)
    peak = logits.max()
    normalizer = peak + math.log(np.exp(logits - peak).sum())
    count = min(count, len(raw))
    best = np.flatnonzero(raw >= np.partition(raw, -count)[-count]) if count else np.array([], np.int64)
    best = best[np.argsort(-logits[best], kind="stable")][:count]
    top = tuple((int(i), float(logits[i] - normalizer)) for i in best)
    return TokenLogprobs(token, float(logits[token] - normalizer), top)


def _check_ids(option: str, ids: Iterable[int], vocabulary: int) -> None:
    for token in ids:
        _require(0 <= token < vocabulary, option, f"token ids below the vocabulary of {vocabulary}", token)


def _require(holds: bool, option: str, wanted: str, value: object) -> None:
    if not holds:
        raise RequestError(f"{option} must be {wanted}, not {value}")
