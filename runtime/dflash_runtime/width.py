"""How many tokens to draft and how many of them to verify in the coming round.

Knows measured costs and the drafter's record so far. Does not know models: whatever it decides, the emitted tokens stay
the same, only the time they take changes. Plain Python: a few dozen numbers are handled sooner than an array is made.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Protocol

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
    """Seconds by row count: measured where a row count was seen, interpolated in between; refined as rounds finish.

    Another row count than the last call's takes `change` seconds more, as a graph with open shapes is set up anew for
    it. Calls of fewer than `least` rows are padded to that.
    """

    _RATE = 0.1  # weight of a new observation
    _SHARED = 0.5  # of it that goes to the other row counts
    _OUTLIER = 2.0  # a longer time counts as this, or one hiccup of the machine would outweigh many rounds

    def __init__(self, seconds: dict[int, float], change: float = 0.0, least: int = 1) -> None:
        self.seconds, self.change = dict(sorted(seconds.items())), change
        self._least, self._last = least, least

    def at(self, rows: int) -> float:
        """Return the estimate for a row count, never falling: noise only ever adds, so the lower value is right."""
        known = list(self.seconds)
        above = bisect_left(known, rows)
        high = min((self.seconds[n] for n in known[above:]), default=self.seconds[known[-1]])
        if above == 0 or above == len(known) or known[above] == rows:
            return high
        low = min(self.seconds[known[above - 1]], high)
        return low + (high - low) * (rows - known[above - 1]) / (known[above] - known[above - 1])

    def changing(self, rows: int) -> float:
        """Return the seconds that a call takes longer if its row count is not the last one's."""
        return 0.0 if max(rows, self._least) == max(self._last, self._least) else self.change

    def observe(self, rows: int, seconds: float) -> None:
        seconds = max(seconds - self.changing(rows), seconds / 2)  # whatever that price was measured to be
        self._last = rows
        if not self.seconds:
            self.seconds[rows] = seconds
            return
        estimate = self.seconds.get(rows) or self.at(rows)
        change = 1.0 + self._RATE * (min(seconds / estimate, self._OUTLIER) - 1.0)
        shared = 1.0 + self._SHARED * (change - 1.0)  # a machine that slows down does so at every width
        refined = {n: x * shared for n, x in self.seconds.items()} | {rows: estimate * change}
        self.seconds = dict(sorted(refined.items()))
        self.change *= shared


class Calibration:
    """Chances of acceptance, learnt online: by the drafter's own probability, and by position in the block."""

    _BINS = 8
    _MEMORY = 0.97  # per round, of positions: about the last 30 rounds count
    _BIN_MEMORY = 0.98  # per round, of probabilities
    _PRIOR = 2.0  # rounds
    _BIN_PRIOR = 4.0  # tokens

    def __init__(self, block_size: int) -> None:
        # drafters are right more often than they say; what is learnt soon outweighs this
        self._usual = [self._BIN_PRIOR * math.sqrt((b + 0.5) / self._BINS) for b in range(self._BINS)]
        self._hits, self._tries = list(self._usual), [self._BIN_PRIOR] * self._BINS
        self._accepted, self._reached = [0.0] * (block_size - 1), [0.0] * (block_size - 1)

    @property
    def survival(self) -> list[float]:
        """Mean chance that each draft position is accepted; one rarely reached follows the one before it."""
        survival, chance, alive = [], 0.85, 1.0
        for accepted, reached in zip(self._accepted, self._reached, strict=True):
            chance = (accepted + self._PRIOR * chance) / (reached + self._PRIOR)
            alive *= chance
            survival.append(alive)
        return survival

    def new_text(self) -> None:
        """Trust what other texts taught about positions less; what a probability is worth stays."""
        self._accepted = [0.1 * x for x in self._accepted]
        self._reached = [0.1 * x for x in self._reached]

    def expect(self, probabilities: Sequence[float], count: int) -> list[float]:
        """Return the chance that each of `count` drafted positions is accepted, all before it included."""
        if not probabilities:
            return self.survival[:count]
        return list(accumulate((self._hits[b] / self._tries[b] for b in map(self._bin, probabilities)), mul))

    def learn(self, probabilities: Sequence[float], expected: Sequence[float], drafted: int, accepted: int) -> None:
        """Take in a round: `expected` of all proposed tokens, of which `drafted` were verified and `accepted` right."""
        self._accepted = [self._MEMORY * x for x in self._accepted]
        self._reached = [self._MEMORY * x for x in self._reached]
        alive = 1.0  # up to the end of the verify it is known which were right; beyond it counts what was expected
        for j in range(len(expected) if accepted == drafted else accepted + 1):
            self._reached[j] += alive
            if j >= drafted:
                alive *= expected[j] / (expected[j - 1] if j else 1.0)
            elif j == accepted:
                alive = 0.0
            self._accepted[j] += alive
        keep = self._BIN_MEMORY
        self._hits = [keep * x + (1.0 - keep) * prior for x, prior in zip(self._hits, self._usual, strict=True)]
        self._tries = [keep * x + (1.0 - keep) * self._BIN_PRIOR for x in self._tries]
        for j, b in enumerate(map(self._bin, probabilities[: min(accepted + 1, drafted)])):
            self._tries[b] += 1.0
            self._hits[b] += float(j < accepted)

    def _bin(self, probability: float) -> int:
        return min(int(probability * self._BINS), self._BINS - 1)


class AdaptiveWidth:
    """Picks the widths with the most expected tokens per second; stops drafting while that does not pay.

    Drafting n tokens and verifying w of them costs draft(n + 1) + verify(w + 1) seconds and emits one token plus those
    that survive, E(w) in all. With r the best rate, verifying w is worth E(w) - r * verify(w + 1). For each n, what its
    best w <= n would have emitted and cost in recent rounds gives a rate; the best n is drafted next, and its rate is
    r. While drafting loses to plain decoding, trials of it may lose no more than a small share of the time.

    Few row counts are used, and another one than the last call's only where it pays its price.

    One policy serves all requests, as a text is often over before much is learnt about it. Copies come unasked and for
    free: they are weighed by a record of their own and say nothing about drafting.
    """

    _TRIALS = 0.03  # share of the time that trials may lose
    _SAVED = 2.0  # trials that this share may be saved for
    _MEMORY = 0.9  # per draft, of what each number of draft tokens yields
    _ROWS = (1, 2, 4, 8, 12, 16)

    def __init__(self, calibration: Calibration, copies: Calibration, verify: Costs, draft: Costs) -> None:
        self._verify, self._draft, self._calibration, self._copies = verify, draft, calibration, copies
        most = len(calibration.survival)
        self._choices = sorted({min(rows - 1, most) for rows in self._ROWS})  # of tokens to draft or to verify
        self._tokens, self._seconds = dict.fromkeys(self._choices, 0.0), dict.fromkeys(self._choices, 0.0)
        self._count, self._rate, self._pays = most, 1.0 / verify.at(1), True
        self._trial = self._credit = self._trial_seconds()
        self._is_trial = False
        self._proposal: tuple[Proposal, list[float]] | None = None

    def new_text(self) -> None:
        """Another text begins."""
        self._calibration.new_text()

    def draft_tokens(self) -> int:
        self._proposal = None
        self._is_trial = not self._pays and self._credit >= self._trial
        return self._count if self._pays or self._is_trial else 0

    def _trial_seconds(self) -> float:
        """Seconds that a draft costs, 0 where there is no drafter."""
        return self._draft.at(self._count + 1) if self._draft.seconds else 0.0

    def verify_tokens(self, proposal: Proposal) -> int:
        calibration, count = self._copies if proposal.is_copy else self._calibration, len(proposal.tokens)
        expected = calibration.expect(proposal.probabilities, count)
        self._proposal = (proposal, expected)
        if not proposal.is_copy:
            self._plan(expected)
        emitted = _emitted(expected)
        return max(
            (*(w for w in self._choices if w < count), count),
            key=lambda w: emitted[w] - self._rate * (self._verify.at(w + 1) + self._verify.changing(w + 1)),
        )

    def record(self, done: Round) -> None:
        self._verify.observe(done.rows, done.verify_seconds)
        seconds = done.draft_seconds + done.verify_seconds
        self._credit = min(self._credit + self._TRIALS * seconds, self._SAVED * self._trial)
        if self._proposal is None:
            return
        proposal, expected = self._proposal
        calibration = self._copies if proposal.is_copy else self._calibration
        calibration.learn(proposal.probabilities, expected, done.drafted, done.accepted)
        if not proposal.is_copy:
            self._draft.observe(len(expected) + 1, done.draft_seconds)
            if self._is_trial:
                back = self._verify.changing(1)
                self._credit -= max(seconds + back - len(done.tokens) * self._verify.at(1), 0.0)
            self._trial = self._trial_seconds()

    def _plan(self, expected: list[float]) -> None:
        """Choose the draft length and the rate for the coming rounds, given the chances of one more draft."""
        survival, count = self._calibration.survival, len(expected)
        # positions not drafted as position alone would have it
        emitted = _emitted(expected + [expected[-1] * s / survival[count - 1] for s in survival[count:]])
        verify = {n: self._verify.at(n + 1) for n in self._choices}
        for n in self._choices:
            best = max((w for w in self._choices if w <= n), key=lambda w: emitted[w] - self._rate * verify[w])
            self._tokens[n] = self._MEMORY * self._tokens[n] + emitted[best]
            spent = verify[best] + (self._draft.at(n + 1) if n else 0.0)
            self._seconds[n] = self._MEMORY * self._seconds[n] + spent
        plain, *rates = ((self._tokens[n] / self._seconds[n], n) for n in self._choices)
        rate, self._count = max(rates)
        self._rate, self._pays = max(rate, plain[0]), rate > plain[0]


def _emitted(survival: list[float]) -> list[float]:
    """Expected tokens of a round that verifies 0, 1, 2, … drafted tokens."""
    return list(accumulate(survival, initial=1.0))
