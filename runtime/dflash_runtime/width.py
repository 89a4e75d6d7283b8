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

    _BINS = 12
    _MEMORY = 0.97  # per round; about the last 30 rounds count
    _PRIOR = 2.0  # rounds

    def __init__(self, block_size: int) -> None:
        centers = (np.arange(self._BINS) + 0.5) / self._BINS
        # drafters are right more often than they say; what is learnt soon outweighs this
        self._hits, self._tries = 2 * self._PRIOR * np.sqrt(centers), np.full(self._BINS, 2 * self._PRIOR)
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
            tried = self._bin(probabilities)[:reached]
            np.add.at(self._tries, tried, 1.0)
            np.add.at(self._hits, tried[:accepted], 1.0)

    def _bin(self, probabilities: Sequence[float]) -> NDArray[np.int64]:
        bins: NDArray[np.int64] = np.minimum(np.asarray(probabilities) * self._BINS, self._BINS - 1).astype(np.int64)
        return bins


class AdaptiveWidth:
    """Picks the widths with the most expected tokens per second; stops drafting while that does not pay.

    Drafting n tokens and verifying w of them costs draft(n + 1) + verify(w + 1) seconds and emits one token plus those
    that survive, E(w) in all. With r the best tokens per second over recent rounds, verifying w is worth
    E(w) - r * verify(w + 1), and n is chosen so that the best such w, over recent drafts, leaves most after
    r * draft(n + 1). A full draft every few rounds shows what lies beyond. While drafting loses to plain decoding it
    is tried rarely, and ever more so.

    Few row counts are used: for another one than the last call's, a graph with open shapes is set up anew, which costs
    a twelfth of a verify.

    Copies come unasked and for free: they are weighed by a record of their own and say nothing about drafting.
    """

    _PATIENCE = (4, 96)  # rounds between trials while parked: first, most
    _REFRESH = 12  # rounds between full drafts
    _RECORD = 12  # drafts remembered
    _ROWS = (1, 2, 4, 8, 12, 16)
    _NEW = 1.08  # what another row count than the last one's multiplies the cost of a verify with
    _REPLAN = 3  # rounds between two plans

    def __init__(
        self, calibration: Calibration, copies: Calibration, minimum_rows: int, verify: Costs, draft: Costs
    ) -> None:
        calibration.new_text()
        self._verify, self._draft, self._calibration, self._copies = verify, draft, calibration, copies
        self._minimum, self._most = minimum_rows, len(calibration.survival)
        self._proposal: tuple[Proposal, NDArray[np.float64]] | None = None
        self._record: deque[NDArray[np.float64]] = deque(maxlen=self._RECORD)
        self._count, self._rate, self._pays = self._most, float(1 / self._verify_curve(0)[0]), True
        self._patience, self._waited, self._trials = self._PATIENCE[0], 0, 1
        self._verified, self._planned = minimum_rows, 0  # rows of the last round, rounds since the last plan
        self._usual = self._most  # tokens to verify, were it the same number each round

    def draft_tokens(self) -> int:
        self._proposal = None
        self._waited += 1
        if self._trials == 0 and self._waited >= (self._REFRESH if self._pays else self._patience):
            self._trials, self._waited = 1, 0
            if not self._pays:
                self._patience = min(3 * self._patience, self._PATIENCE[1])
        if self._trials > 0:
            return self._most
        return self._count if self._pays else 0

    def verify_tokens(self, proposal: Proposal) -> int:
        calibration = self._copies if proposal.is_copy else self._calibration
        expected = calibration.expect(proposal.probabilities, len(proposal.tokens))
        self._proposal = (proposal, expected)
        if not proposal.is_copy and len(expected):
            self._record.append(_emitted(self._extended(expected)))
            self._planned += 1
            if self._trials > 0 or self._planned >= self._REPLAN:
                self._plan()
                self._planned = 0
        costs = self._leaving()[: len(expected) + 1] * self._verify_curve(len(expected))
        return int(np.argmax(_emitted(expected) - self._rate * costs))

    def record(self, done: Round) -> None:
        rows = max(done.rows, self._minimum)
        self._verify.observe(rows, done.verify_seconds / (1.0 if rows == self._verified else self._NEW))
        self._verified = rows
        if self._proposal is None:
            return
        proposal, expected = self._proposal
        calibration = self._copies if proposal.is_copy else self._calibration
        calibration.learn(proposal.probabilities, expected, done.drafted, done.accepted)
        if not proposal.is_copy:
            if self._trials == 0:  # a trial also catches up with the context
                self._draft.observe(len(expected) + 1, done.draft_seconds)
            self._trials = max(0, self._trials - 1)

    def _plan(self) -> None:
        """Choose the draft length and the rate for the coming rounds from the recorded drafts."""
        emitted = np.stack(self._record)  # [record, w]
        verify = self._verify_curve(self._most)
        rows = np.arange(1, self._most + 2)
        draft = np.where(np.isin(rows, self._ROWS), self._draft.curve(rows), np.inf)  # [n]
        plain = rate = 1.0 / verify[0]
        for _ in range(3):  # the rate that leaves nothing over is the best one (Dinkelbach)
            self._usual = int(np.argmax(emitted.mean(axis=0) - rate * verify))
            costs = self._leaving() * verify
            value = np.maximum.accumulate(emitted - rate * costs, axis=1)  # of the best w <= n
            count = 1 + int(np.argmax(value.mean(axis=0)[1:] - rate * draft[1:]))
            best = np.argmax((emitted - rate * costs)[:, : count + 1], axis=1)
            tokens = np.take_along_axis(emitted, best[:, None], axis=1).mean()
            rate = max(plain, tokens / (draft[count] + costs[best].mean()))
        self._count, self._rate, self._pays = count, rate, rate > plain
        if self._pays:
            self._patience = self._PATIENCE[0]
        else:  # what made it park must not outweigh what the next trials show
            self._record = deque(list(self._record)[-2:], self._RECORD)

    def _leaving(self) -> NDArray[np.float64]:
        """What the cost of verifying 0, 1, … tokens is multiplied with: leaving the usual rows costs twice."""
        rows = np.maximum(np.arange(1, self._most + 2), self._minimum)
        return np.where(rows == rows[self._usual], 1.0, 2 * self._NEW - 1)

    def _extended(self, expected: NDArray[np.float64]) -> NDArray[np.float64]:
        """Chances of all positions, those not drafted as position alone would have it."""
        survival, count = self._calibration.survival, len(expected)
        return np.concatenate((expected, survival[count:] * (expected[-1] / survival[count - 1])))

    def _verify_curve(self, most: int) -> NDArray[np.float64]:
        """Seconds of verifying 0, 1, … `most` drafted tokens; infinite for row counts that are not used."""
        rows = np.arange(1, most + 2)
        used = np.isin(rows, self._ROWS) | (rows == most + 1)
        return np.where(used, self._verify.curve(np.maximum(rows, self._minimum)), np.inf)


def _emitted(survival: NDArray[np.float64]) -> NDArray[np.float64]:
    """Expected tokens of a round that verifies 0, 1, 2, … drafted tokens."""
    return 1.0 + np.concatenate(([0.0], np.cumsum(survival)))
