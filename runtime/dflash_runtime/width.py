"""How many tokens to draft and how many of them to verify in the coming round.

Knows measured costs and the drafter's record so far. Does not know models: whatever it decides, the emitted tokens stay
the same, only the time they take changes.
"""

from __future__ import annotations

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
        """Return how many of the proposed tokens to verify."""
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
        return len(proposal.tokens)

    def record(self, done: Round) -> None:
        pass


class Costs:
    """Seconds by row count: measured where a row count was seen, interpolated in between; refined as rounds finish."""

    _RATE = 0.1  # weight of a new observation
    _OUTLIER = 2.0  # a longer time says more about the machine than about the row count

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = dict(seconds)

    def curve(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the estimate for each row count, never falling."""
        known = sorted(self.seconds)
        values = np.maximum.accumulate([self.seconds[n] for n in known])
        return np.interp(rows, known, values)

    def observe(self, rows: int, seconds: float) -> None:
        if not self.seconds:
            self.seconds[rows] = seconds
            return
        estimate = self.seconds.get(rows, float(self.curve(np.array([rows]))[0]))
        if seconds < self._OUTLIER * estimate:
            self.seconds[rows] = estimate + self._RATE * (seconds - estimate)


class Calibration:
    """Turns the drafter's own probabilities into chances of acceptance, learnt by probability and by position."""

    _BINS = 12
    _PRIOR = 8.0  # rounds' worth of trust in the drafter's word
    _MEMORY = 0.995

    def __init__(self, block_size: int) -> None:
        centers = (np.arange(self._BINS) + 0.5) / self._BINS
        self._hits, self._tries = self._PRIOR * centers, np.full(self._BINS, self._PRIOR)
        self._survival = 0.7 ** np.arange(1, block_size)  # of each draft position, averaged over rounds

    @property
    def survival(self) -> NDArray[np.float64]:
        """Mean chance that a draft position is accepted, by position."""
        return self._survival

    def expect(self, probabilities: Sequence[float], count: int) -> NDArray[np.float64]:
        """Return the chance of acceptance of each of `count` drafted positions."""
        if not probabilities:
            return self._survival[:count]
        bins = self._bin(probabilities)
        return np.cumprod(self._hits[bins] / self._tries[bins])

    def learn(self, probabilities: Sequence[float], expected: NDArray[np.float64], drafted: int, accepted: int) -> None:
        """`expected` of all proposed positions, `drafted` of which were verified and `accepted` were right."""
        seen = expected.copy()
        seen[:drafted] = np.arange(drafted) < accepted
        if drafted < len(seen):  # what was not verified keeps its expectation, given what came before
            seen[drafted:] *= (accepted == drafted) / max(expected[drafted - 1], 1e-3) if drafted else 1.0
        self._survival[: len(seen)] += 0.05 * (np.minimum(seen, 1.0) - self._survival[: len(seen)])
        if probabilities:
            self._hits *= self._MEMORY
            self._tries *= self._MEMORY
            tried = self._bin(probabilities)[: min(accepted + 1, drafted)]
            np.add.at(self._tries, tried, 1.0)
            np.add.at(self._hits, tried[:accepted], 1.0)

    def _bin(self, probabilities: Sequence[float]) -> NDArray[np.int64]:
        return np.minimum(np.asarray(probabilities) * self._BINS, self._BINS - 1).astype(np.int64)


class AdaptiveWidth:
    """Picks the widths with the most expected tokens per second; stops drafting while that does not pay.

    A round that drafts n tokens and verifies the first w costs draft(n) + verify(w + 1) and emits one token plus the
    drafted ones that survive. While parked, it probes after 16 rounds, then after twice as many each time.
    """

    _PATIENCE = (16, 512)  # rounds between probes: first, most

    def __init__(self, block_size: int, minimum_rows: int, verify: Costs, draft: Costs) -> None:
        self._verify, self._draft = verify, draft
        self._minimum, self._rows = minimum_rows, np.arange(1, block_size + 1)
        self._calibration = Calibration(block_size)
        self._proposal: tuple[Sequence[float], NDArray[np.float64]] | None = None
        self._patience, self._parked_for, self._probing = self._PATIENCE[0], 0, 0

    def draft_tokens(self) -> int:
        self._proposal = None
        count, gain = self._best_draft()
        if gain > 1.0 or self._probing > 0:
            return max(count, 1)
        self._parked_for += 1
        if self._parked_for < self._patience:
            return 0
        self._parked_for, self._probing = 0, 3
        self._patience = min(2 * self._patience, self._PATIENCE[1])
        return len(self._rows) // 2

    def verify_tokens(self, proposal: Proposal) -> int:
        count = len(proposal.tokens)
        expected = self._calibration.expect(proposal.probabilities, count)
        self._proposal = (proposal.probabilities, expected)
        draft = float(self._draft.curve(np.array([count + 1]))[0])
        rates = self._emitted(expected) / (draft + self._verify_curve()[: count + 1])
        return int(np.argmax(rates))

    def record(self, done: Round) -> None:
        self._verify.observe(max(done.rows, self._minimum), done.verify_seconds)
        if self._proposal is None:
            return
        probabilities, expected = self._proposal
        self._draft.observe(len(expected) + 1, done.draft_seconds)
        self._calibration.learn(probabilities, expected, done.drafted, done.accepted)
        self._probing = max(0, self._probing - 1)
        if self._best_draft()[1] > 1.0:
            self._patience = self._PATIENCE[0]

    def _verify_curve(self) -> NDArray[np.float64]:
        return self._verify.curve(np.maximum(self._rows, self._minimum))

    def _emitted(self, survival: NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected tokens of a round that verifies 0, 1, 2, … drafted tokens."""
        return 1.0 + np.concatenate(([0.0], np.cumsum(survival)))

    def _best_draft(self) -> tuple[int, float]:
        """Return how many tokens to draft, and the rate relative to plain decoding."""
        verify = self._verify_curve()
        emitted = self._emitted(self._calibration.survival)
        plain = 1.0 / verify[0]
        drafts = self._draft.curve(self._rows)
        # rate[n, w] of drafting n tokens and verifying w <= n of them
        rates = np.tril(emitted[None, :] / (drafts[:, None] + verify[None, :]))
        rates[0] = 0.0
        count = int(np.argmax(rates.max(axis=1)))
        return count, float(rates.max() / plain)
