"""The decode loop: draft, verify, accept. Knows token ids only; no backend, no file, no text.

The emitted tokens are a function of the target, the sampler and the committed tokens alone. What the proposer drafts
and how many rows are verified decides only how many rounds it takes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .protocols import Head, Logits, Proposal, Proposer, Target
from .width import WidthPolicy

_PADDING = 0  # fills a verify up to the smallest exact row count; its rows are never committed


@dataclass(frozen=True)
class Round:
    """One verify: `drafted` tokens went in, the first `accepted` were right, `tokens` came out (one more, unless cut)."""

    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float

    @property
    def rows(self) -> int:
        return self.drafted + 1


class Sampler(Protocol):
    """Chooses tokens from logits; `position` is that of the first chosen token."""

    def choose(self, logits: Logits, drafts: Sequence[int], position: int) -> list[int]:
        """Return the tokens that follow: as long as a token equals its draft, the next row's choice comes after it."""
        ...


class Decoder:
    """A target, its head and a source of draft tokens, decoding one sequence."""

    def __init__(
        self, target: Target, head: Head, proposer: Proposer | None, policy: WidthPolicy, minimum_rows: int
    ) -> None:
        self.target, self.head, self.proposer, self.policy = target, head, proposer, policy
        self.minimum_rows = minimum_rows

    def prefill(self, tokens: Sequence[int], sampler: Sampler) -> int:
        """Commit the prompt's remaining tokens and return the first new one."""
        start = self.target.length
        while (done := self.target.length - start) < len(tokens):
            piece = tokens[done : done + self.target.max_rows]
            rows = self.target.verify(self._padded(piece))
            count = len(piece)
            last = max(0, count - self.minimum_rows)
            if done + count == len(tokens):
                logits = self.head(rows.hidden[last : last + self.minimum_rows])
            self.target.commit(count)
            if self.proposer is not None:
                self.proposer.observe(piece, rows)
        row = count - 1 - last
        return sampler.choose(Logits(logits.values[row:], logits.tokens[row:]), (), self.target.length)[0]

    def rounds(self, anchor: int, limit: int, sampler: Sampler) -> Iterator[Round]:
        """Yield rounds until `limit` tokens have followed `anchor`; the caller stops earlier at a stop token."""
        while limit > 0:
            this = self.round(anchor, limit, sampler)
            yield this
            anchor, limit = this.tokens[-1], limit - len(this.tokens)

    def round(self, anchor: int, limit: int, sampler: Sampler) -> Round:
        """Draft, verify, accept, commit."""
        start = time.perf_counter()
        drafts = self._draft(anchor, limit)
        drafted = time.perf_counter()
        rows = self.target.verify(self._padded([anchor, *drafts]))
        tokens = sampler.choose(self.head(rows.hidden), drafts, self.target.length + 1)
        self.target.commit(len(tokens))
        if self.proposer is not None:
            self.proposer.observe([anchor, *tokens[:-1]], rows)
        end = time.perf_counter()
        # a length limit cuts what is emitted, never what is committed
        this = Round(len(drafts), len(tokens) - 1, tuple(tokens[:limit]), drafted - start, end - drafted)
        self.policy.record(this)
        return this

    def _draft(self, anchor: int, limit: int) -> Sequence[int]:
        count = min(self.policy.draft_tokens(), limit, self.target.max_rows - 1)
        if self.proposer is None or count < 1:
            return ()
        proposal: Proposal = self.proposer.propose(anchor, count)
        return proposal.tokens[: self.policy.verify_tokens(proposal)]

    def _padded(self, tokens: Sequence[int]) -> Sequence[int]:
        missing = self.minimum_rows - len(tokens)
        return tokens if missing <= 0 else [*tokens, *[_PADDING] * missing]


class Greedy:
    """Always the likeliest token."""

    def choose(self, logits: Logits, drafts: Sequence[int], position: int) -> list[int]:
        chosen = logits.tokens[: len(drafts) + 1].tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
            accepted += 1
        return chosen[: accepted + 1]
