"""What compression costs: how well a bundle predicts a text, and how often it agrees with another format of the model.

Knows the target's logits over a text. Says nothing about drafting, which changes none of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from dflash_graphs.errors import RequestError
from dflash_graphs.specs import CHUNK
from numpy.typing import NDArray

from .engine import Engine

WINDOW = 512  # tokens that are scored together; each window starts from nothing


@dataclass(frozen=True)
class Score:
    """A bundle's predictions over a text: one for every token but the first of each window."""

    loss: float  # natural log, summed
    choices: NDArray[np.int32]  # the likeliest token each time

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss / len(self.choices)))

    def agreement(self, other: "Score") -> float:
        """Return the share of predictions with the same likeliest token."""
        return float(np.mean(self.choices == other.choices))


def score(engine: Engine, ids: Sequence[int], progress: Callable[[int], object] | None = None) -> Score:
    """Predict `ids` token by token; `progress` gets the number of tokens done since its last call."""
    if len(ids) < 2:
        raise RequestError("the text has fewer than two tokens; give a longer one")
    loss, choices = 0.0, []
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        engine.context.clear()
        for at in range(0, len(window), CHUNK):
            piece = window[at : at + CHUNK]
            logits = _logits(engine, piece)[: len(window) - 1 - at]
            following = window[at + 1 : at + 1 + len(logits)]
            peak = logits.max(axis=1, keepdims=True)
            total = np.log(np.exp(logits - peak).sum(axis=1)) + peak[:, 0]
            loss += float((total - logits[np.arange(len(following)), following]).sum())
            choices.append(logits.argmax(axis=1))
            if progress is not None:
                progress(len(piece))
    engine.context.clear()
    return Score(loss, np.concatenate(choices).astype(np.int32))


def _logits(engine: Engine, piece: Sequence[int]) -> NDArray[np.float64]:
    """Logits after each token of `piece`, which is committed."""
    models = engine.models
    rows = models.target.verify([*piece, *[0] * (models.minimum_rows - len(piece))])
    logits = models.head(rows.hidden).copy()[: len(piece)].astype(np.float64)
    models.target.commit(len(piece))
    return logits
