"""How many tokens to draft and how many of them to verify in the coming round.

Knows measured costs and the drafter's record so far. Does not know models: whatever it decides, the emitted tokens stay
the same, only the time they take changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .loop import Round
    from .protocols import Proposal


class WidthPolicy(Protocol):
    """Decides widths; any decision leaves the emitted text the same."""

    def draft_tokens(self) -> int:
        """Return how many tokens to draft now; 0 skips the drafter."""
        ...

    def verify_tokens(self, proposal: Proposal) -> int:
        """Return how many of the proposed tokens to verify; not called when there are none."""
        ...

    def record(self, done: Round) -> None:
        """Learn from a finished round."""
        ...


class FixedWidth:
    """The same block size every round, anchor included."""

    def __init__(self, block_size: int) -> None:
        self._count = block_size - 1

    def draft_tokens(self) -> int:
        return self._count

    def verify_tokens(self, proposal: Proposal) -> int:
        return self._count

    def record(self, done: Round) -> None:
        pass


class Costs:
    """Seconds by row count: measured where a row count was seen, interpolated in between; refined as rounds finish."""

    _RATE = 0.1  # weight of a new observation
    _SHARED = 0.5  # of it that goes to the other row counts
    _OUTLIER = 2.0  # a longer time counts as this, or one hiccup of the machine would outweigh many rounds

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = dict(seconds)

    def curve(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the estimate for each row count, never falling: noise only ever adds, so the lower value is right."""
        known = sorted(self.seconds)
        values = np.array([self.seconds[n] for n in known], np.float64)
        values = np.minimum.accumulate(values[::-1])[::-1]
        return np.interp(rows, known, values)

    def observe(self, rows: int, seconds: float) -> None:
        if not self.seconds:
            self.seconds[rows] = seconds
            return
        estimate = self.seconds.get(rows, float(self.curve(np.array([rows]))[0]))
        change = 1.0 + self._RATE * (min(seconds / estimate, self._OUTLIER) - 1.0)
        for n in self.seconds:  # a machine that slows down does so at every width
            self.seconds[n] *= 1.0 + self._SHARED * (change - 1.0)
        self.seconds[rows] = estimate * change


class Calibration:
    """Chances of acceptance, learnt online: by the drafter's own probability, and by position in the block."""

    _BINS = 8
    _MEMORY = 0.97  # per round, of positions: about the last 30 rounds count
    _BIN_MEMORY = 0.98  # per round, of probabilities
    _PRIOR = 2.0  # rounds

    def __init__(self, block_size: int) -> None:
        centers = (np.arange(self._BINS) + 0.5) / self._BINS
        # drafters are right more often than they say; what is learnt soon outweighs this
        self._prior = 2 * self._PRIOR * np.stack((np.sqrt(centers), np.ones(self._BINS)))
        self._hits, self._tries = self._prior.copy()
        self._accepted, self._reached = np.zeros(block_size - 1), np.zeros(block_size - 1)

    @property
    def survival(self) -> NDArray[np.float64]:
        """Mean chance that each draft position is accepted; one rarely reached follows the one before it."""
        conditional, chance = np.empty(len(self._reached)), 0.85
        for j, (accepted, reached) in enumerate(zip(self._accepted, self._reached, strict=True)):
            chance = (accepted + self._PRIOR * chance) / (reached + self._PRIOR)
            conditional[j] = chance
        return np.cumprod(conditional, dtype=np.float64)

    def new_text(self) -> None:
        """Trust what other texts taught about positions less; what a probability is worth stays."""
        self._accepted *= 0.1
        self._reached *= 0.1

    def expect(self, probabilities: Sequence[float], count: int) -> NDArray[np.float64]:
        """Return the chance that each of `count` drafted positions is accepted, all before it included."""
        if not probabilities:
            return self.survival[:count]
        bins = self._bin(probabilities)
        return np.cumprod(self._hits[bins] / self._tries[bins])

    def learn(self, probabilities: Sequence[float], expected: NDArray[np.float64], drafted: int, accepted: int) -> None:
        """Take in a round: `expected` of all proposed tokens, of which `drafted` were verified and `accepted` right."""
        reached = min(accepted + 1, drafted)
        self._accepted *= self._MEMORY
        self._reached *= self._MEMORY
        self._reached[:reached] += 1.0
        self._accepted[:accepted] += 1.0
        if accepted == drafted:  # what was proposed beyond the verify counts as expected
            chances = np.concatenate(([1.0], expected))[drafted:] / (expected[drafted - 1] if drafted else 1.0)
            self._reached[drafted : len(expected)] += chances[:-1]
            self._accepted[drafted : len(expected)] += chances[1:]
        if probabilities:
            for count, prior in zip((self._hits, self._tries), self._prior, strict=True):
                count += (1.0 - self._BIN_MEMORY) * (prior - count)
            tried = self._bin(probabilities)[:reached]
            np.add.at(self._tries, tried, 1.0)
            np.add.at(self._hits, tried[:accepted], 1.0)

    def _bin(self, probabilities: Sequence[float]) -> NDArray[np.int64]:
        bins: NDArray[np.int64] = np.minimum(np.asarray(probabilities) * self._BINS, self._BINS - 1).astype(np.int64)
        return bins


class AdaptiveWidth:
    """Picks the widths with the most expected tokens per second; stops drafting while that does not pay.

    Drafting n tokens and verifying w of them costs draft(n + 1) + verify(w + 1) seconds and emits one token plus those
    that survive, E(w) in all. With r the best rate, verifying w is worth E(w) - r * verify(w + 1), and n is the number
    whose best w <= n leaves most after r * draft(n + 1), on average over recent drafts; r then is what that n yields.
    While drafting loses to plain decoding it is tried rarely, and ever more so.

    Few row counts are used, and another one than the last call's only where it pays its price: a graph with open shapes
    is set up anew for it.

    One policy serves all requests, as a text is often over before much is learnt about it. Copies come unasked and for
    free: they are weighed by a record of their own and say nothing about drafting.
    """

    _PATIENCE = (4, 96)  # rounds between trials while parked: first, most
    _RECORD, _FADING = 16, 0.9  # drafts remembered, and what each counts beside the next one
    _ROWS = (1, 2, 4, 8, 12, 16)
    _CHANGE = 1.08  # what another row count than the last one's multiplies the cost of a verify with

    def __init__(
        self, calibration: Calibration, copies: Calibration, minimum_rows: int, verify: Costs, draft: Costs
    ) -> None:
        self._verify, self._draft, self._calibration, self._copies = verify, draft, calibration, copies
        self._most = len(calibration.survival)
        self._tokens = np.unique(np.minimum(self._ROWS, self._most + 1)) - 1  # numbers to choose from
        self._rows = np.maximum(self._tokens + 1, minimum_rows)
        self._proposal: tuple[Proposal, NDArray[np.float64]] | None = None
        self._record: deque[NDArray[np.float64]] = deque(maxlen=self._RECORD)
        self._weights = self._FADING ** np.arange(self._RECORD, dtype=np.float64)
        self._count, self._rate, self._pays = self._most, float(1 / verify.curve(self._rows[:1])[0]), True
        self._patience, self._waited, self._last_rows = self._PATIENCE[0], 0, minimum_rows
        self._minimum = minimum_rows

    def new_text(self) -> None:
        """Another text begins, and may be one that drafts well."""
        self._calibration.new_text()
        self._patience = self._waited = self._PATIENCE[0]

    def draft_tokens(self) -> int:
        self._proposal = None
        if self._pays:
            return self._count
        self._waited += 1
        if self._waited < self._patience:
            return 0
        self._waited, self._patience = 0, min(3 * self._patience, self._PATIENCE[1])
        return self._count

    def verify_tokens(self, proposal: Proposal) -> int:
        calibration = self._copies if proposal.is_copy else self._calibration
        expected = calibration.expect(proposal.probabilities, len(proposal.tokens))
        self._proposal = (proposal, expected)
        if not proposal.is_copy and len(expected):
            self._record.appendleft(_emitted(self._extended(expected))[self._tokens])
            self._plan()
        tokens = self._tokens[self._tokens < len(expected)]
        tokens = np.append(tokens, len(expected))
        rows = np.maximum(tokens + 1, self._minimum)
        costs = self._verify.curve(rows) * np.where(rows == self._last_rows, 1.0, self._CHANGE)
        return int(tokens[np.argmax(_emitted(expected)[tokens] - self._rate * costs)])

    def record(self, done: Round) -> None:
        rows = max(done.rows, self._minimum)
        self._verify.observe(rows, done.verify_seconds / (1.0 if rows == self._last_rows else self._CHANGE))
        self._last_rows = rows
        if self._proposal is None:
            return
        proposal, expected = self._proposal
        calibration = self._copies if proposal.is_copy else self._calibration
        calibration.learn(proposal.probabilities, expected, done.drafted, done.accepted)
        if not proposal.is_copy:
            self._draft.observe(len(expected) + 1, done.draft_seconds)

    def _plan(self) -> None:
        """Choose the draft length and the rate for the coming rounds from the recorded drafts."""
        emitted = np.stack(self._record)  # [record, choice], the latest first
        weights = self._weights[: len(emitted)] / self._weights[: len(emitted)].sum()
        verify, draft = self._verify.curve(self._rows), self._draft.curve(self._tokens + 1)
        left = emitted - self._rate * verify
        most_left = weights @ np.maximum.accumulate(left, axis=1) - self._rate * draft
        choice = 1 + int(np.argmax(most_left[1:]))
        best = np.argmax(left[:, : choice + 1], axis=1)  # of the numbers to verify
        seconds = draft[choice] + weights @ verify[best]
        rate, plain = float(weights @ emitted[np.arange(len(best)), best] / seconds), 1.0 / float(verify[0])
        self._count, self._rate, self._pays = int(self._tokens[choice]), max(rate, plain), rate > plain
        if self._pays:
            self._patience = self._PATIENCE[0]

    def _extended(self, expected: NDArray[np.float64]) -> NDArray[np.float64]:
        """Chances of all positions, those not drafted as position alone would have it."""
        survival, count = self._calibration.survival, len(expected)
        return np.concatenate((expected, survival[count:] * (expected[-1] / survival[count - 1])))


def _emitted(survival: NDArray[np.float64]) -> NDArray[np.float64]:
    """Expected tokens of a round that verifies 0, 1, 2, … drafted tokens."""
    return 1.0 + np.concatenate(([0.0], np.cumsum(survival)))
