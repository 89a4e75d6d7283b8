"""What the drafter's proposer does between drafts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from dflash_runtime.models import CONTEXT_ROWS
from dflash_runtime.proposers import DFlashProposer
from dflash_runtime.protocols import Rows


def test_features_of_plain_rounds_do_not_pile_up() -> None:
    taken: list[int] = []
    spec = SimpleNamespace(block_size=16, feature_width=4)
    drafter: Any = SimpleNamespace(spec=spec, extend=lambda features: taken.append(len(features)))
    head: Any = SimpleNamespace(draft_vocabulary=100)
    proposer = DFlashProposer(drafter, head)
    row = np.zeros((1, 4), np.float32)
    for _ in range(2 * CONTEXT_ROWS + 1):
        proposer.observe([5], Rows(row, row))
    assert taken == [CONTEXT_ROWS, CONTEXT_ROWS]
