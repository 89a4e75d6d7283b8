"""The width policy on simulated texts: a virtual clock, known costs, drafters of every quality."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from dflash_runtime.device import Settings
from dflash_runtime.loop import Round
from dflash_runtime.protocols import Proposal
from dflash_runtime.tuning import Seconds, Tuning
from dflash_runtime.width import AdaptiveWidth, Calibration, Costs, FixedWidth, WidthPolicy

BLOCK = 16
TOKENS = 4000


def _costs(slope: float, draft: float) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Verify and draft seconds by row count; one plain round takes a second."""

    def drafting(rows: int) -> float:
        return draft * (1.0 + 0.05 * rows) if rows > 1 else 0.0

    return (lambda rows: 1.0 + slope * max(0, rows - 2)), drafting


def _text(kind: str, random: np.random.Generator, at: int) -> np.ndarray:
    """True chances of acceptance of the 15 positions of a block drafted at token `at`, each given those before it."""
    if kind == "hopeless":
        return np.full(BLOCK - 1, 0.02)
    if kind == "steady":
        return np.full(BLOCK - 1, 0.85)
    if kind == "decaying":
        return 0.8 * 0.85 ** np.arange(BLOCK - 1)
    if kind == "changing":
        return np.full(BLOCK - 1, 0.95 if (at // 400) % 2 else 0.1)
    return np.full(BLOCK - 1, random.choice([0.05, 0.97], p=[0.5, 0.5]))  # mixed: the drafter knows which


def _rate(policy: WidthPolicy, kind: str, slope: float, draft: float, informed: bool = True) -> float:
    """Tokens per virtual second; another row count than the last one's takes 0.08 more."""
    verify_seconds, draft_seconds = _costs(slope, draft)
    random, clock, emitted, last = np.random.default_rng(1), 0.0, 0, 2
    while emitted < TOKENS:
        chances = _text(kind, random, emitted)
        count, verified = min(policy.draft_tokens(), BLOCK - 1), 0
        if count:
            noisy = np.clip(chances[:count] + random.normal(0, 0.05, count), 0.0, 1.0)
            proposal = Proposal([0] * count, noisy.tolist() if informed else ())
            verified = policy.verify_tokens(proposal)
        hits = random.random(verified) < chances[:verified]
        accepted = int(np.argmin(np.append(hits, False)))
        spent = draft_seconds(count + 1) if count else 0.0
        rows = max(2, verified + 1)
        seconds = verify_seconds(rows) + (0.0 if rows == last else 0.08)
        this, last = Round(verified, accepted, (0,) * (accepted + 1), spent, seconds), rows
        policy.record(this)
        clock += spent + this.verify_seconds
        emitted += accepted + 1
    return emitted / clock


def _adaptive(slope: float, draft: float) -> AdaptiveWidth:
    verify_seconds, draft_seconds = _costs(slope, draft)
    rows = (2, 4, 8, 16)
    verify, draft_costs = ({n: seconds(n) for n in rows} for seconds in (verify_seconds, draft_seconds))
    return AdaptiveWidth(Calibration(BLOCK), Calibration(BLOCK), Costs(verify, 0.08, 2), Costs(draft_costs))


# without probabilities nothing tells the rounds of a changing or mixed text apart beforehand
TEXTS = [
    *((kind, True) for kind in ("hopeless", "steady", "decaying", "changing", "mixed")),
    *((kind, False) for kind in ("hopeless", "steady", "decaying")),
]


@pytest.mark.parametrize(("slope", "draft"), [(0.01, 0.1), (0.05, 0.25), (0.2, 0.1), (0.3, 0.5)])
@pytest.mark.parametrize(("kind", "informed"), TEXTS)
def test_never_worse_than_plain_or_the_best_fixed_width(kind: str, slope: float, draft: float, informed: bool) -> None:
    adaptive = _rate(_adaptive(slope, draft), kind, slope, draft, informed)
    fixed = {block: _rate(FixedWidth(block), kind, slope, draft, informed) for block in (1, 2, 3, 4, 6, 8, 11, 16)}
    assert adaptive >= 0.94 * max(fixed.values()), fixed  # few row counts are used, and 3 or 6 may be best


def test_parks_and_comes_back() -> None:
    policy = _adaptive(0.05, 0.25)
    drafted = []
    for i in range(600):
        count = policy.draft_tokens()
        drafted.append(count)
        chance = 0.02 if i < 300 else 0.95
        verified = policy.verify_tokens(Proposal([0] * count, [chance] * count)) if count else 0
        accepted = 0 if i < 300 else verified
        policy.record(Round(verified, accepted, (0,) * (accepted + 1), 0.3 if count else 0.0, 1.0 + 0.05 * verified))
    assert np.count_nonzero(drafted[50:300]) <= 28  # parked: trials that lose 3 % of the time
    assert np.count_nonzero(drafted[450:]) >= 140  # came back


def test_trials_cost_a_small_share_of_the_time_and_are_saved_for_few() -> None:
    policy = _adaptive(0.05, 0.25)

    def lost(rounds: int) -> tuple[float, int]:
        """Seconds beyond those of plain decoding, and the drafts."""
        seconds, drafts = 0.0, 0
        for _ in range(rounds):
            count = policy.draft_tokens()
            verified = policy.verify_tokens(Proposal([0] * count, [0.02] * count)) if count else 0
            this = Round(verified, 0, (0,), 0.3 if count else 0.0, 1.0 + 0.05 * verified)
            policy.record(this)
            seconds += this.draft_seconds + this.verify_seconds - 1.0
            drafts += count > 0
        return seconds, drafts

    lost(100)
    seconds, drafts = lost(1000)
    assert 0.02 * 1000 <= seconds <= 0.035 * 1000  # the share, and a trial begun before
    assert drafts > 50
    for _ in range(1000):  # rounds without a draft save for two trials, not for a hundred
        policy.record(Round(0, 0, (0,), 0.0, 1.0))
    assert 2 <= lost(10)[1] <= 4


def test_costs_interpolate_never_fall_and_limit_outliers() -> None:
    costs = Costs({2: 1.0, 4: 0.9, 8: 2.0})
    assert [costs.at(n) for n in (1, 2, 3, 4, 6, 8, 16)] == pytest.approx([0.9, 0.9, 0.9, 0.9, 1.45, 2.0, 2.0])
    costs.observe(8, 1.0)
    assert costs.seconds == pytest.approx({2: 0.975, 4: 0.8775, 8: 1.9})
    costs.observe(8, 50.0)
    assert costs.seconds[8] == pytest.approx(1.1 * 1.9)
    for _ in range(60):
        costs.observe(8, 50.0)
    assert costs.seconds[8] > 40.0  # what lasts is believed
    costs = Costs({8: 2.0, 2: 1.0})
    assert costs.at(5) == pytest.approx(1.5)
    costs.observe(4, 1.3)
    assert list(costs.seconds) == [2, 4, 8] and 1.0 < costs.at(3) < costs.at(4) < costs.at(6) < 2.0


def test_costs_know_the_price_of_another_row_count() -> None:
    costs = Costs({2: 1.0, 8: 2.0}, change=0.5, least=2)
    assert [costs.changing(n) for n in (1, 2, 8)] == [0.0, 0.0, 0.5]  # one row is padded to two
    costs.observe(8, 2.5)
    assert (costs.seconds, costs.change) == ({2: 1.0, 8: 2.0}, 0.5)  # as expected
    assert [costs.changing(n) for n in (1, 8)] == [0.5, 0.0]
    costs.observe(8, 4.0)
    assert costs.seconds == pytest.approx({2: 1.05, 8: 2.2}) and costs.change == pytest.approx(0.525)
    costs = Costs({2: 1.0, 8: 1.0}, change=50.0)  # measured far too high
    for n in (2, 8) * 50:
        costs.observe(n, 1.0)
    assert all(0.4 < seconds < 1.0 for seconds in costs.seconds.values())


def test_costs_of_a_tuning_know_the_fewest_rows() -> None:
    settings = Settings(precision="f32", kv_precision="f32", quantization_group=0, threads=1)
    seconds = Seconds({1: 1.0, 2: 1.0}, 0.5)
    verify, draft = Tuning(settings=settings, minimum_rows=2, verify=seconds, draft=seconds).costs()
    assert [part.changing(2) for part in (verify, draft)] == [0.0, 0.5]  # a plain verify has two rows as well


def test_a_high_price_of_another_row_count_keeps_the_row_count() -> None:
    def changes(price: float) -> int:
        verify, draft = Costs({2: 1.0, 16: 1.5}, price, least=2), Costs({2: 0.1, 16: 0.1})
        policy = AdaptiveWidth(Calibration(BLOCK), Calibration(BLOCK), verify, draft)
        rows = []
        for i in range(100):  # every other draft is worthless, and the drafter knows it
            count, chance = policy.draft_tokens(), (0.02, 0.97)[i % 2]
            verified = policy.verify_tokens(Proposal([0] * count, [chance] * count)) if count else 0
            accepted = verified if chance > 0.5 else 0
            rows.append(max(2, verified + 1))
            seconds = 1.0 + 0.5 * (rows[-1] - 2) / 14 + price * (i > 0 and rows[-1] != rows[-2])
            policy.record(Round(verified, accepted, (0,) * (accepted + 1), 0.1 if count else 0.0, seconds))
        return sum(a != b for a, b in pairwise(rows))

    assert changes(0.0) > 80 and changes(3.0) < 10
