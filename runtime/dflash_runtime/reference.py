"""Comparison with the reference implementation: the same checkpoint in transformers, in f32.

Knows PyTorch and transformers, the only module of the runtime that does; both come with the extra `reference` and are
imported when the comparison runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dflash_graphs.errors import RequestError

from .context import Context
from .engine import Engine
from .loop import Decoder
from .proof import Recorder


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Our greedy continuation of a prompt, every token of it judged by the reference."""

    prompt: str
    tokens: int
    first_divergence: int | None  # tokens after the prompt; None where the reference would have written the same
    top2_margin: float | None  # between the reference's two best logits there
    kl_divergence: float  # of our distribution from the reference's, nats, mean over the tokens


class Reference:
    """A checkpoint loaded in transformers."""

    def __init__(self, checkpoint: Path) -> None:
        """Load a checkpoint folder in f32; raise RequestError where the extra is missing or the folder unusable."""
        try:
            import torch
            from transformers import AutoModelForCausalLM

            self._torch: Any = torch
            self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        except ModuleNotFoundError as error:
            message = f"the package {error.name} is missing; run: pip install 'dflash-openvino[reference]'"
            raise RequestError(message) from error
        except (OSError, ValueError) as error:
            raise RequestError(f"transformers cannot load {checkpoint}: {error}") from error

    def compare(self, engine: Engine, prompt: str, ids: Sequence[int], tokens: int) -> Agreement:
        """Decode `tokens` tokens after `ids` with the engine and judge them by the reference, given the same text."""
        recorder, models = Recorder(), engine.models
        engine.context.clear()
        decoder = Decoder(Context(models.target, None), models.head, None, models.minimum_rows)
        found = [decoder.prefill(ids, recorder)]
        found += [token for this in decoder.rounds(found[0], tokens - 1, recorder) for token in this.tokens]
        engine.context.clear()
        ours = np.stack([recorder.rows[len(ids) + i] for i in range(tokens)])
        theirs = self._logits([*ids, *found])[len(ids) - 1 : -1]
        first = next((i for i, token in enumerate(found) if theirs[i].argmax() != token), None)
        best = None if first is None else np.partition(theirs[first], -2)[-2:]
        log_p, log_q = _log_softmax(theirs), _log_softmax(ours)
        return Agreement(
            prompt=prompt,
            tokens=tokens,
            first_divergence=first,
            top2_margin=None if best is None else float(best[1] - best[0]),
            kl_divergence=float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean()),
        )

    def _logits(self, ids: Sequence[int]) -> Any:
        with self._torch.no_grad():
            return self._model(self._torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()


def _log_softmax(logits: Any) -> Any:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
