"""Prompt lookup against a search that looks at every earlier place, and the width policy's treatment of copies."""

import random
from collections.abc import Sequence

import pytest
from dflash_runtime.lookup import LookupProposer, OverrideProposer
from dflash_runtime.loop import Round
from dflash_runtime.protocols import Proposal, Rows
from dflash_runtime.width import AdaptiveWidth, Calibration, Costs

ROWS: Rows = None  # type: ignore[assignment]  # lookup reads none


def lookup(tokens: Sequence[int], minimum_match: int = 2) -> LookupProposer:
    proposer = LookupProposer(minimum_match)
    proposer.observe(tokens, ROWS)
    return proposer


def longest_latest(text: Sequence[int], longest: int) -> tuple[int, int]:
    """Where the best earlier match of the end of `text` ends and its length, by looking everywhere."""
    found = (0, 0)
    for at in range(1, len(text) - 1):
        length = 0
        while length < min(longest, at + 1) and text[at - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= max(2, found[1]):
            found = (at, length)
    return found


@pytest.mark.parametrize("vocabulary", [2, 4, 12])
def test_finds_the_longest_and_among_those_the_latest_match(vocabulary: int) -> None:
    draw = random.Random(vocabulary)
    proposer = LookupProposer()
    proposer._CANDIDATES = 1000  # type: ignore[misc]  # all of them
    text: list[int] = []
    for _ in range(300):
        anchor = draw.randrange(vocabulary)
        at, length = longest_latest([*text, anchor], proposer._LONGEST)
        proposal = proposer.propose(anchor, 5)
        assert len(proposal.tokens) == (5 if length else 0)
        if length:
            continued = [*text, anchor]
            for _ in range(5):
                continued.append(continued[at + 1])
                at += 1
            assert proposal.tokens == continued[-5:]
        text.append(anchor)
        proposer.observe([anchor], ROWS)


def test_no_match_proposes_nothing() -> None:
    for tokens, anchor in (([], 1), ([1], 1), ([1, 2, 3], 9), ([1, 2, 3], 2)):
        assert lookup(tokens).propose(anchor, 8) == Proposal(())
    assert lookup([1, 2, 3, 1]).propose(2, 0) == Proposal(())


def test_the_anchor_is_part_of_the_match_and_a_loop_goes_on() -> None:
    assert lookup([1, 2, 3, 4, 5, 1]).propose(2, 3).tokens == [3, 4, 5]
    assert lookup([7, 7, 7]).propose(7, 4).tokens == [7, 7, 7, 7]
    assert lookup([1, 2, 1, 2, 1]).propose(2, 5).tokens == [1, 2, 1, 2, 1]


def test_minimum_match() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2]
    assert lookup(tokens, 3).propose(3, 1).tokens == [4]
    assert lookup(tokens, 4).propose(3, 1).tokens == ()


def test_longer_matches_are_surer() -> None:
    weak, strong = lookup([1, 2, 3, 9, 1]).propose(2, 3), lookup([1, 2, 3, 9, 1, 2, 3, 9, 1]).propose(2, 3)
    assert list(weak.probabilities) == sorted(weak.probabilities)
    assert weak.is_copy and weak.probabilities[0] < strong.probabilities[0] < 1


def test_rewind_leaves_what_a_fresh_lookup_would_know() -> None:
    draw = random.Random(1)
    proposer, text = LookupProposer(), list[int]()
    for _ in range(60):
        new = [draw.randrange(5) for _ in range(draw.randrange(12))]
        proposer.observe(new, ROWS)
        length = draw.randrange(len(text) + len(new) + 1)
        text = [*text, *new][:length]
        proposer.rewind(length)
        fresh = lookup(text)
        assert vars(proposer) == vars(fresh)


class Counting:
    """A drafter that counts its calls."""

    def __init__(self) -> None:
        self.drafted, self.seen = 0, 0

    def observe(self, tokens: Sequence[int], rows: Rows) -> None:
        self.seen += len(tokens)

    def propose(self, anchor: int, count: int) -> Proposal:
        self.drafted += count
        return Proposal([0] * count)

    def rewind(self, length: int) -> None:
        self.seen = length


def test_override_only_by_long_matches_and_then_without_the_drafter() -> None:
    drafter = Counting()
    proposer = OverrideProposer(drafter, LookupProposer(4))
    proposer.observe([1, 2, 3, 4, 5, 6, 1, 2, 3], ROWS)
    assert proposer.propose(9, 2) == Proposal([0, 0]) and drafter.drafted == 2
    copy = proposer.propose(4, 0)
    assert copy.is_copy and copy.tokens[:2] == [5, 6] and drafter.drafted == 2
    proposer.rewind(7)
    assert drafter.seen == 7 and not proposer.propose(4, 1).is_copy


# the width policy


def policy(copies: Calibration) -> AdaptiveWidth:
    return AdaptiveWidth(Calibration(16), copies, Costs({2: 1.0, 16: 2.0}), Costs({2: 5.0, 16: 5.0}))


def run(widths: AdaptiveWidth, proposal: Proposal, accepted: int) -> int:
    """One round; return how many tokens were verified."""
    drafted = widths.verify_tokens(proposal) if proposal.tokens else 0
    right = min(accepted, drafted)
    seconds = 1.0 + max(0, drafted - 1) / 14
    widths.record(Round(drafted, right, (0,) * (right + 1), 0.0 if proposal.is_copy else 5.0, seconds))
    return drafted


def test_copies_are_taken_while_drafting_is_parked_and_do_not_touch_it() -> None:
    widths = policy(Calibration(16))
    for _ in range(8):
        count = widths.draft_tokens()
        run(widths, Proposal([0] * count), 0)
    assert widths.draft_tokens() == 0
    copy = Proposal([0] * 15, [0.9] * 15, is_copy=True)
    verified = [run(widths, copy, 15) for _ in range(5) if widths.draft_tokens() == 0]
    assert verified and min(verified) > 5
    assert widths._draft.seconds == {2: 5.0, 16: 5.0}


def test_copies_that_never_hold_are_soon_verified_only_where_that_is_free() -> None:
    widths = policy(Calibration(16))
    copy = Proposal([0] * 15, [0.9] * 15, is_copy=True)
    verified = []
    for _ in range(100):
        widths.draft_tokens()
        verified.append(run(widths, copy, 0))
    assert verified[0] > 5 and verified[-1] == 1  # two rows cost what one does


def test_rounds_without_any_proposal() -> None:
    widths = policy(Calibration(16))
    for _ in range(50):
        assert widths.draft_tokens() == 15  # nothing was ever drafted, so nothing speaks against it
        run(widths, Proposal(()), 0)
    assert run(widths, Proposal([0, 0], [0.9, 0.9], is_copy=True), 2) == 2
