"""What the models have committed, and how far a new request can build on it.

Attention caches can be cut at any length. A recurrent state exists only where it is now and where a snapshot was taken:
shortly before the end of each prompt and at the end of each answer, the last few of which are kept.
"""

from collections import deque
from collections.abc import Sequence

from .protocols import Proposer, Rows, Snapshot, Target

_SNAPSHOTS = 4


class Context:
    """A target and its proposer, kept in step, and the tokens they have committed."""

    def __init__(self, target: Target, proposer: Proposer | None) -> None:
        self.target, self.proposer = target, proposer
        self.tokens: list[int] = []
        self._snapshots: deque[Snapshot] = deque(maxlen=_SNAPSHOTS)

    def commit(self, tokens: Sequence[int], rows: Rows) -> None:
        """Keep `tokens`, the first of the target's last `rows`."""
        self.target.commit(len(tokens))
        self.tokens += tokens
        if self.proposer is not None:
            self.proposer.observe(tokens, rows)

    def resume(self, prompt: Sequence[int]) -> int:
        """Go back to the longest usable prefix of `prompt`, short of its last token; return its length."""
        common, most = 0, min(len(self.tokens), len(prompt) - 1)
        while common < most and self.tokens[common] == prompt[common]:
            common += 1
        self._snapshots = deque((s for s in self._snapshots if s.length <= common), maxlen=_SNAPSHOTS)
        if not self.target.rewind(common):
            if self._snapshots:
                self.target.restore(self._snapshots[-1])
            else:
                self.target.reset()
        del self.tokens[self.target.length :]
        if self.proposer is not None:
            self.proposer.rewind(self.target.length)
        return self.target.length

    def keep(self) -> None:
        """Take a snapshot here, for a later request to come back to."""
        if all(s.length != self.target.length for s in self._snapshots):
            self._snapshots.append(self.target.snapshot())

    def clear(self) -> None:
        """Forget everything."""
        self._snapshots.clear()
        self.tokens.clear()
        self.target.reset()
        if self.proposer is not None:
            self.proposer.rewind(0)
