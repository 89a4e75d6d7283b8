"""The drafter against recorded reference logits, and its masks against a plain NumPy forward pass."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_runtime import load

DATA = Path(__file__).parent.parent / "data" / "parity.npz"


@pytest.mark.parametrize("index", [0, 1])
def test_draft_logits_equal_the_recorded_ones(small_bundle: Any, index: int) -> None:
    engine = load(small_bundle("f32"), threads=2, max_context=512)
    recorded = np.load(DATA)
    features, block = recorded[f"ctx_features_{index}"], recorded[f"block_ids_{index}"]
    drafter = engine.models.drafter
    assert drafter is not None
    drafter.rewind(0)
    for piece in np.array_split(features, 3):
        drafter.extend(np.ascontiguousarray(piece))
    assert drafter.length == int(recorded[f"start_{index}"])
    hidden = drafter.block(int(block[0]), len(block))
    found, wanted = engine.models.head(hidden[1:]).values, recorded[f"logits_{index}"]
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
