"""Evidence that drafting changes nothing: hostile drafts, random widths, and a bitwise comparison of every logit.

The proposers here know the true continuation, so they can be right or wrong on purpose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .loop import Greedy, Round
from .protocols import Logits, Proposal, Rows, Snapshot, Target


class Recorder:
    """A greedy sampler that keeps the logits behind every token it emits, by position."""

    def __init__(self) -> None:
        self.rows: dict[int, NDArray[np.float32]] = {}

    def choose(self, logits: Logits, drafts: Sequence[int], position: int) -> list[int]:
        tokens = Greedy().choose(logits, drafts, position)
        for i in range(len(tokens)):
            self.rows[position + i] = logits.row(i)
        return tokens


def comparable_state(target: Target) -> Snapshot:
    """What the target carries, whatever calls brought it here: one more takes the last one's rows into the state."""
    target.verify([0, 0])
    return target.snapshot()


@dataclass(frozen=True)
class Difference:
    """Where a run first departs from plain decoding, and how close the two best tokens were there."""

    position: int
    largest: float  # absolute difference of the logits
    top2_gap: float


class Comparer:
    """A greedy sampler that checks its logits against a recording, bit for bit."""

    def __init__(self, recording: dict[int, NDArray[np.float32]]) -> None:
        self._recording = recording
        self.checked = 0
        self.first: Difference | None = None

    def choose(self, logits: Logits, drafts: Sequence[int], position: int) -> list[int]:
        tokens = Greedy().choose(logits, drafts, position)
        for i in range(len(tokens)):
            expected = self._recording.get(position + i)
            if expected is None:  # past the recording's end
                continue
            self.checked += 1
            if self.first is None and not np.array_equal(expected, logits.row(i)):
                best = np.partition(expected, -2)[-2:]
                gap = float(best[1] - best[0])
                self.first = Difference(position + i, float(np.abs(expected - logits.row(i)).max()), gap)
        return tokens


class KnowingProposer:
    """Drafts from the known continuation: a prefix of `right()` true tokens, the rest wrong on purpose."""

    def __init__(self, vocabulary: int, seed: int, kind: str) -> None:
        """`kind` is `true`, `random` or `adversarial`."""
        self.truth: Sequence[int] = ()  # the sequence from position 0, prompt included
        self._vocabulary, self._kind, self._seen = vocabulary, kind, 0
        self._random = np.random.default_rng(seed)

    def observe(self, tokens: Sequence[int], rows: Rows) -> None:
        self._seen += len(tokens)

    def propose(self, anchor: int, count: int) -> Proposal:
        wrong = self._random.integers(0, self._vocabulary, count).tolist()
        if self._kind == "random":
            return Proposal(wrong)
        right = count if self._kind == "true" else int(self._random.integers(0, count + 1))
        ahead = list(self.truth[self._seen + 1 : self._seen + 1 + right])
        return Proposal([*ahead, *wrong[len(ahead) :]])

    def rewind(self, length: int) -> None:
        self._seen = length


class RandomWidth:
    """A width policy that draws the block size anew every round, from 2 to `largest`, anchor included."""

    def __init__(self, largest: int, seed: int) -> None:
        self._largest, self._random = largest, np.random.default_rng(seed)

    def draft_tokens(self) -> int:
        return int(self._random.integers(1, self._largest))

    def verify_tokens(self, proposal: Proposal) -> int:
        return len(proposal.tokens)

    def record(self, done: Round) -> None:
        pass
