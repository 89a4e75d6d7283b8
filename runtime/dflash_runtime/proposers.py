"""Sources of draft tokens."""

from collections.abc import Sequence

import numpy as np

from .models import CONTEXT_ROWS, Drafter, LanguageModelHead
from .protocols import FloatRows, Proposal, Rows


class DFlashProposer:
    """The drafter fills a block of masks in one pass; a head names the tokens.

    Features wait until the next draft, so plain rounds in between cost a copy and no inference. A draft looks at the
    first ids of a large vocabulary only; where the text keeps leaving them, at all of it.
    """

    _MISSES = 0.02  # share of emitted tokens outside the draft vocabulary that calls for all ids

    def __init__(self, drafter: Drafter, head: LanguageModelHead) -> None:
        self._drafter, self._head = drafter, head
        self.block_size, self.feature_width = drafter.spec.block_size, drafter.spec.feature_width
        self._waiting: list[FloatRows] = []
        self._missing = 0.0

    def observe(self, tokens: Sequence[int], rows: Rows) -> None:
        self._waiting.append(rows.features[: len(tokens)].copy())
        for token in tokens:
            self._missing += 0.02 * ((token >= self._head.draft_vocabulary) - self._missing)
        if sum(map(len, self._waiting)) >= CONTEXT_ROWS:
            self._extend()

    def propose(self, anchor: int, count: int) -> Proposal:
        if count < 1:
            return Proposal(())
        self._extend()
        hidden = self._drafter.block(anchor, min(count + 1, self.block_size))[1:]
        if self._missing > self._MISSES:
            logits = self._head(hidden)
            return Proposal([logits.likeliest(row) for row in range(len(hidden))])
        tokens, probabilities = self._head.draft(hidden)
        return Proposal(tokens.tolist(), probabilities.tolist())

    def rewind(self, length: int) -> None:
        self._extend()
        self._drafter.rewind(length)

    def _extend(self) -> None:
        if self._waiting:
            self._drafter.extend(np.concatenate(self._waiting) if len(self._waiting) > 1 else self._waiting[0])
            self._waiting.clear()
