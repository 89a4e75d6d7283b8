"""The decode loop: draft, verify, accept. Knows token ids only; no backend, no file, no text.

The emitted tokens are a function of the target, the sampler and the committed tokens alone. What the proposer drafts
and how many rows are verified decides only how many rounds it takes.
"""

import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from .context import Context
from .protocols import Head, Logits
from .width import WidthPolicy

_PADDING = 0  # fills a verify up to the smallest exact row count; its rows are never committed
_REOPENED = 8  # tokens: chat templates open an answer (`<think>`) with some that are gone once it is history


@dataclass(frozen=True)
class Round:
    """One verify: `drafted` tokens went in, `accepted` of them were right, `tokens` came out (one more unless cut)."""

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
    """Decodes one sequence on a context, drafting and verifying as much as the policy says; without one, plainly."""

    def __init__(self, context: Context, head: Head, policy: WidthPolicy | None, minimum_rows: int) -> None:
        self.context, self.head, self.policy, self.minimum_rows = context, head, policy, minimum_rows
        self.target, self.proposer = context.target, context.proposer

    def prefill(self, tokens: Sequence[int], sampler: Sampler, progress: Callable[[int], None] | None = None) -> int:
        """Commit the prompt's remaining tokens and return the first new one; `progress` gets the tokens done so far."""
        done = 0
        while done < len(tokens):
            left = len(tokens) - done
            piece = tokens[done : done + self.target.prefill_piece(left)]
            if len(piece) == left > _REOPENED:
                self.context.keep()  # the same prompt, or one with another end, resumes here
            rows = self.target.verify(self._padded(piece))
            done += len(piece)
            if done == len(tokens):
                first = max(0, len(piece) - self.minimum_rows)
                logits = self.head(rows.hidden[first : first + self.minimum_rows]).since(len(piece) - 1 - first)
            self.context.commit(piece, rows)
            if progress is not None:
                progress(done)
        return sampler.choose(logits, (), self.target.length)[0]

    def rounds(self, anchor: int, limit: int, sampler: Sampler, stops: Set[int] = frozenset()) -> Iterator[Round]:
        """Yield rounds until `limit` tokens have followed `anchor` or a token of `stops` came."""
        while limit > 0 and anchor not in stops:
            this = self.round(anchor, limit, sampler, stops)
            yield this
            anchor, limit = this.tokens[-1], limit - len(this.tokens)

    def round(self, anchor: int, limit: int, sampler: Sampler, stops: Set[int] = frozenset()) -> Round:
        """Draft, verify, accept, commit."""
        start = time.perf_counter()
        drafts = self._draft(anchor, limit, stops)
        drafted = time.perf_counter()
        rows = self.target.verify(self._padded([anchor, *drafts]))
        chosen = sampler.choose(self.head(rows.hidden), drafts, self.target.length + 1)
        tokens = _cut(chosen, limit, stops)
        self.context.commit([anchor, *tokens[:-1]], rows)
        end = time.perf_counter()
        this = Round(len(drafts), len(chosen) - 1, tuple(tokens), drafted - start, end - drafted)
        if self.policy is not None:
            self.policy.record(this)
        return this

    def _draft(self, anchor: int, limit: int, stops: Set[int]) -> Sequence[int]:
        if self.proposer is None or self.policy is None:
            return ()
        most = min(limit, self.target.max_rows) - 1  # the verify adds a token of its own
        proposal = self.proposer.propose(anchor, min(self.policy.draft_tokens(), most))
        if not proposal.tokens:
            return ()
        drafts = proposal.tokens[: min(self.policy.verify_tokens(proposal), most)]
        # a drafted stop needs no row: if it is right, it is what follows the tokens before it
        return drafts[: next((i for i, token in enumerate(drafts) if token in stops), len(drafts))]

    def _padded(self, tokens: Sequence[int]) -> Sequence[int]:
        missing = self.minimum_rows - len(tokens)
        return tokens if missing <= 0 else [*tokens, *[_PADDING] * missing]


def _cut(tokens: list[int], limit: int, stops: Set[int]) -> list[int]:
    """The tokens up to the limit and the first stop, which is kept."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: min(end, limit)]


class Greedy:
    """Always the likeliest token."""

    def choose(self, logits: Logits, drafts: Sequence[int], position: int) -> list[int]:
        chosen = [logits.likeliest(0)]
        while len(chosen) <= len(drafts) and chosen[-1] == drafts[len(chosen) - 1]:
            chosen.append(logits.likeliest(len(chosen)))
        return chosen
