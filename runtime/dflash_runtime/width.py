"""How many tokens to draft and how many of them to verify in the coming round."""

from __future__ import annotations

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
