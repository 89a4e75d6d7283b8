"""Speculation figures against values worked out by hand."""

from dflash_runtime import statistics
from dflash_runtime.loop import Round


def _round(drafted: int, accepted: int, emitted: int) -> Round:
    return Round(drafted=drafted, accepted=accepted, tokens=(0,) * emitted, draft_seconds=0.0, verify_seconds=0.0)


ROUNDS = [
    _round(3, 3, 4),
    _round(3, 1, 2),
    _round(0, 0, 1),  # nothing drafted: not a draft
    _round(1, 0, 1),
    _round(3, 2, 1),  # cut by a stop token: what was accepted still counts
]


def test_counts_and_means() -> None:
    assert statistics.drafts(ROUNDS) == 4
    assert statistics.drafted(ROUNDS) == 10
    assert statistics.accepted(ROUNDS) == 6
    assert statistics.acceptance_rate(ROUNDS) == 0.6
    assert statistics.acceptance_length(ROUNDS) == 2.5


def test_survival_is_over_all_drafts_however_short() -> None:
    assert statistics.survival(ROUNDS) == [0.75, 0.5, 0.25]
    assert statistics.survival(ROUNDS, 1) == [0.75]
    assert statistics.survival(ROUNDS, 4) == [0.75, 0.5, 0.25, 0.0]


def test_plain_decoding_has_neutral_figures() -> None:
    for rounds in ([], [_round(0, 0, 1)]):
        assert statistics.acceptance_rate(rounds) == 0.0
        assert statistics.acceptance_length(rounds) == 1.0
        assert statistics.survival(rounds) == []
