"""The round on a target that counts: after token t comes t + 1."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pytest
from dflash_runtime.context import Context
from dflash_runtime.loop import Decoder, Greedy
from dflash_runtime.protocols import FloatRows, Logits, Proposal, Rows, Snapshot
from dflash_runtime.tuning import measure_costs
from dflash_runtime.width import FixedWidth

VOCABULARY = 32
STOP = 5


class CountingTarget:
    """Hidden rows are the tokens that follow."""

    max_rows = prefill_rows = 16

    def prefill_piece(self, left: int) -> int:
        return min(left, 20)

    def __init__(self) -> None:
        self.length, self.calls = 0, list[list[int]]()

    def verify(self, tokens: Sequence[int]) -> Rows:
        self.calls.append(list(tokens))
        hidden = np.array(tokens, np.float32)[:, None] + 1
        return Rows(hidden, hidden[:, :0])

    def commit(self, count: int) -> None:
        self.length += count

    def reset(self) -> None:
        self.length = 0

    def rewind(self, length: int) -> bool:
        self.length = length
        return True

    def snapshot(self) -> Snapshot:
        return Snapshot(self.length, ())

    def restore(self, snapshot: Snapshot) -> None:
        self.length = snapshot.length


class Proposes:
    """Always the same tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def observe(self, tokens: Sequence[int], rows: Rows) -> None: ...

    def propose(self, anchor: int, count: int) -> Proposal:
        return Proposal(self.tokens[:count])

    def rewind(self, length: int) -> None: ...


def head(hidden: FloatRows) -> Logits:
    return Logits([np.eye(VOCABULARY, dtype=np.float32)[hidden[:, 0].astype(int)]])


@pytest.mark.parametrize(
    ("drafts", "stops", "verified", "emitted"),
    [
        ([1, 2, 3, 4, 5, 6], {STOP}, [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),  # the stop is what follows the row of 4
        ([1, 2, 3, 4, 5, 6], set(), [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]),
        ([1, 5, 3, 4], {STOP}, [0, 1], [1, 2]),  # a wrong stop: nothing behind it could have been right
        ([5, 1, 2], {STOP}, [0, 0], [1]),  # padded to the fewest rows
    ],
)
def test_a_drafted_stop_and_what_follows_take_no_rows(
    drafts: list[int], stops: set[int], verified: list[int], emitted: list[int]
) -> None:
    target = CountingTarget()
    decoder = Decoder(Context(target, Proposes(drafts)), head, FixedWidth(16), 2)
    this = decoder.round(0, 100, Greedy(), stops)
    assert target.calls == [verified]
    assert list(this.tokens) == emitted
    assert this.drafted == (0 if drafts[0] == STOP else len(verified) - 1)
    assert target.length == len(emitted)


@pytest.mark.parametrize(("limit", "verified"), [(1, [0, 0]), (2, [0, 1]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3, 4])])
def test_no_more_is_drafted_than_the_limit_lets_out(limit: int, verified: list[int]) -> None:
    target = CountingTarget()
    decoder = Decoder(Context(target, Proposes([1, 2, 3, 4])), head, FixedWidth(16), 2)
    assert list(decoder.round(0, limit, Greedy()).tokens) == list(range(1, min(limit, 5) + 1))
    assert target.calls == [verified]


@pytest.mark.parametrize(
    ("prompt", "pieces"),
    [(8, [8]), (9, [9]), (20, [20]), (29, [20, 9]), (48, [20, 20, 8])],
)
def test_a_prompt_is_cut_as_the_target_says(prompt: int, pieces: list[int]) -> None:
    target = CountingTarget()
    context = Context(target, None)
    Decoder(context, head, None, 1).prefill([1] * prompt, Greedy())
    assert [len(call) for call in target.calls] == pieces
    assert [s.length for s in context._snapshots] == ([prompt - pieces[-1]] if pieces[-1] > 8 else [])


class TimedTarget(CountingTarget):
    """Takes a second a row on a clock of its own, and five more where the call before had another row count."""

    clock = 0.0

    def verify(self, tokens: Sequence[int]) -> Rows:
        self.clock += len(tokens) + 5.0 * (not self.calls or len(self.calls[-1]) != len(tokens))
        return super().verify(tokens)


def test_costs_of_a_target_without_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TimedTarget()
    monkeypatch.setattr("time.perf_counter", lambda: target.clock)
    verify, draft = measure_costs(target, head, None, minimum_rows=3, repeats=2)
    assert verify.by_rows == {1: 3.0, 3: 3.0, 4: 4.0, 6: 6.0, 8: 8.0, 12: 12.0, 16: 16.0} and draft.by_rows == {}
    assert verify.change == 5.0
    rows = [count for count, _ in groupby(len(call) for call in target.calls)]
    up_and_down = [3, 4, 6, 8, 12, 16, 12, 8, 6, 4, 3]  # a plain round has the fewest rows
    assert rows == [*up_and_down, *[4, 3] * 8]
    assert target.length == 0
