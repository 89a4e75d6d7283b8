"""Speculation figures of a run, from its rounds, in vLLM's definitions.

Knows rounds only. A round that drafted nothing is not a draft: it counts towards no figure here.
"""

from collections.abc import Sequence

from .loop import Round


def drafts(rounds: Sequence[Round]) -> int:
    """Return how many rounds drafted at least one token."""
    return sum(r.drafted > 0 for r in rounds)


def drafted(rounds: Sequence[Round]) -> int:
    """Return the number of draft tokens that were verified."""
    return sum(r.drafted for r in rounds)


def accepted(rounds: Sequence[Round]) -> int:
    """Return the number of draft tokens that were right; what lies behind a stop token is never looked at."""
    return sum(r.accepted for r in rounds)


def acceptance_rate(rounds: Sequence[Round]) -> float:
    """Return accepted / drafted, 0 when nothing was drafted."""
    return accepted(rounds) / max(1, drafted(rounds))


def acceptance_length(rounds: Sequence[Round]) -> float:
    """Return the mean tokens per draft, bonus included; 1, as in plain decoding, when nothing was drafted."""
    return 1 + accepted(rounds) / max(1, drafts(rounds))


def survival(rounds: Sequence[Round], positions: int | None = None) -> list[float]:
    """Return for each draft position, the first to `positions`, the share of drafts accepted at least that far.

    `positions` defaults to the longest draft.
    """
    count = max((r.drafted for r in rounds), default=0) if positions is None else positions
    total = max(1, drafts(rounds))
    return [sum(r.accepted > position for r in rounds) / total for position in range(count)]


def conditional_acceptance(rounds: Sequence[Round], positions: int | None = None) -> list[float]:
    """Return for each draft position the share accepted where it was verified and all before it were right.

    0 where that never was so. `positions` defaults to the longest draft.
    """
    count = max((r.drafted for r in rounds), default=0) if positions is None else positions
    reached = [sum(r.drafted > position and r.accepted >= position for r in rounds) for position in range(count)]
    right = [sum(r.accepted > position for r in rounds) for position in range(count)]
    return [a / b if b else 0.0 for a, b in zip(right, reached, strict=True)]
