"""Sources of draft tokens."""

from collections.abc import Sequence

from .openvino_models import OpenVinoDrafter
from .protocols import Head, Proposal, Rows


class DFlashProposer:
    """The drafter fills a block of masks in one pass; the target's head names the tokens."""

    def __init__(self, drafter: OpenVinoDrafter, head: Head) -> None:
        self._drafter, self._head = drafter, head

    def observe(self, tokens: Sequence[int], rows: Rows) -> None:
        self._drafter.extend(rows.features[: len(tokens)])

    def propose(self, anchor: int, count: int) -> Proposal:
        hidden = self._drafter.block(anchor, min(count + 1, self._drafter.spec.block_size))
        return Proposal(self._head(hidden[1:]).tokens.tolist())

    def reset(self) -> None:
        self._drafter.reset()
