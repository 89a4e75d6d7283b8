"""Prefill in pieces of any size: rows and states are those of pieces of one chunk, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dflash_graphs.specs import CHUNK
from dflash_runtime.backends import backend_for
from dflash_runtime.bundle import Embeddings, open_bundle
from dflash_runtime.models import CachedTarget
from dflash_runtime.proof import comparable_state
from numpy.typing import NDArray

TOKENS = 128
# ever wider calls, since memory grows with them; then narrow ones in between, and every place within a chunk to begin
PIECES = [
    [17],
    [24, 24],
    [32],
    [32, 31],
    [32, 32, 32],
    [1, 31, 2, 30],
    [3, 28, 17],
    *([n, 32 - n, 32] for n in range(4, 16)),
]


def _target(bundle: Path) -> CachedTarget:
    opened = open_bundle(bundle)
    backend = backend_for(opened.manifest)
    settings = backend.choose_settings(opened.manifest.graphs["target"].weight_format, 2)
    return CachedTarget(backend, opened, Embeddings(opened), settings, 2 * TOKENS)


def _prefill(target: CachedTarget, tokens: list[int], pieces: list[int]) -> list[NDArray[np.float32]]:
    """Hidden rows, features and what the recurrent layers carry afterwards."""
    target.reset()
    parts: list[list[NDArray[np.float32]]] = []
    for size in pieces:
        piece, tokens = tokens[:size], tokens[size:]
        rows = target.verify([*piece, *[0] * (2 - size)])
        parts.append([rows.hidden[:size].copy(), rows.features[:size].copy()])
        target.commit(size)
    return [*(np.concatenate(outs) for outs in zip(*parts, strict=True)), *comparable_state(target).arrays]


@pytest.mark.parametrize(
    ("weight_format", "backend"),
    [("f32", "openvino"), ("bf16", "openvino"), ("int8", "openvino"), ("f32", "onnx"), ("int8", "onnx")],
)
def test_pieces_of_any_size_give_the_same_bits(
    small_bundle: Callable[..., Path], weight_format: str, backend: str
) -> None:
    target = _target(small_bundle(weight_format, backend))
    tokens = np.random.default_rng(0).integers(3, 4000, TOKENS).tolist()
    expected = {
        count: _prefill(target, tokens[:count], [CHUNK] * (count // CHUNK) + [count % CHUNK] * (count % CHUNK > 0))
        for count in {sum(pieces) for pieces in PIECES}
    }
    for pieces in PIECES:
        found = _prefill(target, tokens, pieces)
        for a, b in zip(expected[sum(pieces)], found, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(pieces))


@pytest.mark.parametrize("backend", ["openvino", "onnx"])
def test_calls_that_nothing_is_kept_of_leave_no_trace(small_bundle: Callable[..., Path], backend: str) -> None:
    target = _target(small_bundle("f32", backend))
    tokens = np.random.default_rng(1).integers(3, 4000, TOKENS).tolist()
    expected = _prefill(target, tokens, [32, 5, 11, 9])
    target.reset()
    for size in (32, 5, 11, 9):
        piece, tokens = tokens[:size], tokens[size:]
        for rejected in (tokens[:16], tokens[16:18], piece):
            target.verify(rejected)
        target.commit(size)
    for a, b in zip(expected[2:], comparable_state(target).arrays, strict=True):
        np.testing.assert_array_equal(a, b)


def test_of_a_call_no_more_is_kept_than_the_next_one_takes_in(small_bundle: Callable[..., Path]) -> None:
    target = _target(small_bundle("f32", "onnx"))
    target.verify([3] * 24)
    for count in (17, 23):
        with pytest.raises(ValueError, match="of 24 rows cannot be committed alone"):
            target.commit(count)
    target.commit(16)
    assert target.length == 16


def test_a_call_that_fills_the_window_is_committed_as_a_whole(small_bundle: Callable[..., Path]) -> None:
    target = _target(small_bundle("f32"))
    target.verify([3] * 32)
    for count in (15, 16, 31):
        with pytest.raises(ValueError, match="cannot be committed alone"):
            target.commit(count)
    target.commit(32)
    assert target.length == 32


def test_a_call_takes_no_more_than_a_window_holds(small_bundle: Callable[..., Path]) -> None:
    target = _target(small_bundle("f32"))
    target.verify([3] * 9)
    target.commit(9)
    with pytest.raises(ValueError, match="takes 23 rows here at most, not 24"):
        target.verify([3] * 24)
    target.verify([3] * 23)


@pytest.mark.parametrize("begin", [1, 9, 16])
def test_a_prompt_is_cut_for_the_next_one_to_resume_shortly_before_its_end(
    small_bundle: Callable[..., Path], begin: int
) -> None:
    target = _target(small_bundle("f32"))
    for prompt in range(1, TOKENS, 3):
        target.reset()
        pieces = [begin]
        while pieces[-1]:  # the last one takes nothing
            target.verify([3] * max(2, pieces[-1]))
            target.commit(pieces[-1])
            pieces.append(target.prefill_piece(prompt + begin - sum(pieces)))
        *wide, last, _ = pieces[1:]
        assert last < 2 * CHUNK and (last >= CHUNK or not wide)
        assert len(wide) <= prompt // target.prefill_rows + 1
