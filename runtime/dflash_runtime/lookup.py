"""Prompt lookup: drafts copied from where the text so far already had what it ends with now.

Knows token ids only. A copy costs microseconds and is good where the output repeats the prompt or itself: summaries,
edits of code, structured data.
"""

from collections.abc import Sequence
from itertools import cycle, islice

from .protocols import Proposal, Proposer, Rows

BLOCK_SIZE = 16  # rows of the widest verify, anchor included


class LookupProposer:
    """Copies what followed the longest earlier match of the text's end; of equally long ones, the latest.

    Every position is chained to the previous one that ends the same pair of tokens, as in LZ77 compressors. Walking a
    chain finds matches of any length, and taking positions back off the chains is all a rewind needs.
    """

    _CANDIDATES = 32  # earlier places looked at
    _LONGEST = 32  # a match this long is as good as any longer one

    def __init__(self, minimum_match: int = 2) -> None:
        """Leave alone what matches fewer than `minimum_match` tokens, at least 2."""
        self._minimum = minimum_match
        self._tokens: list[int] = []
        self._before: list[int] = []  # of each position: the previous one with its pair, 0 for none
        self._latest: dict[tuple[int, int], int] = {}

    def observe(self, tokens: Sequence[int], rows: Rows | None = None) -> None:
        for token in tokens:
            self._before.append(0)
            self._tokens.append(token)
            if (at := len(self._tokens) - 1) > 0:
                pair = (self._tokens[-2], token)
                self._before[at] = self._latest.get(pair, 0)
                self._latest[pair] = at

    def propose(self, anchor: int, count: int) -> Proposal:
        """Copy `count` tokens or none. A copy that reaches the text's end goes on with itself, as a loop would."""
        at, length = self._match(anchor)
        if count < 1 or length < self._minimum:
            return Proposal(())
        source = [*self._tokens[at + 1 : at + 1 + count], anchor]
        # right so far makes a longer match; 2 tokens of code and prose are worth 0.4, 32 are worth 0.9
        chances = [1 - 3 / (length + i + 3) for i in range(count)]
        return Proposal(list(islice(cycle(source), count)), chances, is_copy=True)

    def rewind(self, length: int) -> None:
        while len(self._tokens) > max(length, 1):
            pair = (self._tokens[-2], self._tokens.pop())
            if before := self._before.pop():
                self._latest[pair] = before
            else:
                del self._latest[pair]
        del self._tokens[length:], self._before[length:]

    def _match(self, anchor: int) -> tuple[int, int]:
        """Return where the best earlier match of the committed tokens and `anchor` ends, and its length."""
        tokens, best, longest = self._tokens, 0, 0
        at = self._latest.get((tokens[-1], anchor), 0) if tokens else 0
        for _ in range(self._CANDIDATES):
            if at == 0 or longest == self._LONGEST:
                break
            length, most = 2, min(self._LONGEST, at + 1)
            while length < most and tokens[at - length] == tokens[-length]:
                length += 1
            if length > longest:
                best, longest = at, length
            at = self._before[at]
        return best, longest


class OverrideProposer:
    """Lets a long verbatim match speak before the drafter does, even when no drafts are asked for: it costs nothing."""

    def __init__(self, drafter: Proposer, lookup: LookupProposer) -> None:
        self._drafter, self._lookup = drafter, lookup

    def observe(self, tokens: Sequence[int], rows: Rows) -> None:
        self._lookup.observe(tokens)
        self._drafter.observe(tokens, rows)

    def propose(self, anchor: int, count: int) -> Proposal:
        copy = self._lookup.propose(anchor, BLOCK_SIZE - 1)
        return copy if copy.tokens else self._drafter.propose(anchor, count)

    def rewind(self, length: int) -> None:
        self._lookup.rewind(length)
        self._drafter.rewind(length)
