"""What the decode loop needs of a backend: NumPy arrays in, NumPy arrays out.

The loop is written against these protocols only; `models.py` implements them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FloatRows = NDArray[np.float32]
Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Logits:
    """Head outputs of T rows; views that stay valid until the head's next call."""

    parts: Sequence[FloatRows]  # [T, ids of the part], the lowest ids first

    def likeliest(self, row: int) -> int:
        """The token of the highest logit, lowest id among equals."""
        token, highest, first = 0, -np.inf, 0
        for part in self.parts:
            best = int(part[row].argmax())  # 40 us for 248,320; rows behind a wrong draft are not looked at
            if part[row, best] > highest:
                token, highest = first + best, part[row, best]
            first += part.shape[1]
        return token

    def row(self, row: int) -> NDArray[np.float32]:
        """Return a copy of a row, [vocabulary]."""
        return np.concatenate([part[row] for part in self.parts])

    def copy(self) -> FloatRows:
        """Return a copy of all rows, [T, vocabulary]."""
        return np.concatenate(self.parts, axis=1)

    def since(self, row: int) -> "Logits":
        """Return the rows from `row` on."""
        return Logits([part[row:] for part in self.parts])


@dataclass(frozen=True)
class Rows:
    """Target outputs of T rows; views that stay valid until the target's next call."""

    hidden: FloatRows  # [T, hidden]
    features: FloatRows  # [T, taps * hidden]; [T, 0] without taps


@dataclass(frozen=True)
class Snapshot:
    """What a target needs, beside its keys and values, to go back to its first `length` tokens."""

    length: int
    arrays: tuple[FloatRows, ...]


class Target(Protocol):
    """The target with its caches. `verify` leaves no trace of a row until `commit` accepts it."""

    @property
    def length(self) -> int:
        """Committed tokens: the position of the next row."""
        ...

    @property
    def max_rows(self) -> int:
        """Most rows of a call of `verify` that may be committed in part."""
        ...

    @property
    def prefill_rows(self) -> int:
        """Most rows of a call of `verify`, all of them to be committed."""
        ...

    def prefill_piece(self, left: int) -> int:
        """Return how many of the `left` tokens of a prompt the next call takes; the last call takes few."""
        ...

    def verify(self, tokens: Sequence[int]) -> Rows:
        """Run the rows `tokens` at positions length, length + 1, …"""
        ...

    def commit(self, count: int) -> None:
        """Keep the first `count` rows of the last `verify`."""
        ...

    def reset(self) -> None:
        """Forget everything committed."""
        ...

    def rewind(self, length: int) -> bool:
        """Go back to the first `length` committed tokens; False when only a snapshot can do that."""
        ...

    def snapshot(self) -> Snapshot: ...

    def restore(self, snapshot: Snapshot) -> None: ...


class Head(Protocol):
    """The language model head; it serves target and drafter rows alike."""

    def __call__(self, hidden: FloatRows) -> Logits: ...


@dataclass(frozen=True)
class Proposal:
    """Draft tokens and, where known, the proposer's own probability of each; both of the same length."""

    tokens: Sequence[int]
    probabilities: Sequence[float] = ()
    is_copy: bool = False  # found in the text so far, at no cost


class Proposer(Protocol):
    """Source of draft tokens. Nothing it proposes can change what is emitted, only how fast."""

    def observe(self, tokens: Sequence[int], rows: Rows) -> None:
        """Take note of newly committed tokens and their target rows (the first `len(tokens)` of `rows`)."""
        ...

    def propose(self, anchor: int, count: int) -> Proposal:
        """Propose tokens to follow `anchor`, the last emitted and not yet committed token.

        None at all is a proposal too. More than `count` (0: draft nothing) may come only as a copy.
        """
        ...

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` committed tokens."""
        ...


Properties = dict[str, Any]
