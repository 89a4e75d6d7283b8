"""Every target family against transformers in f32: logits and features, whatever the chunk sizes."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_exporter import ExportRequest, export
from dflash_runtime import Engine, load

pytest.importorskip("torch")
import torch

from tests.parity.checkpoints import MODELS, VOCABULARY, write_drafter, write_target

TAPS = [0, 1, 2]
TOKENS = 90


@pytest.fixture(scope="module", params=list(itertools.product(MODELS, ("openvino", "onnx"))), ids="-".join)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pair_folder: Path
) -> tuple[Any, Engine]:
    name, backend = request.param
    folder = tmp_path_factory.mktemp(name)
    model = write_target(name, folder / "target", pair_folder / "target")
    write_drafter(folder / "drafter", model.config.num_hidden_layers, TAPS)
    paths = {"target": folder / "target", "drafter": folder / "drafter", "output": folder / "bundle"}
    bundle = export(ExportRequest(**paths, weight_format="f32", backend=backend))
    return model, load(bundle, threads=2, max_context=256)


@pytest.mark.parametrize("sizes", [(16,), (2,), (1,), (5, 16, 3, 11), (7, 9, 13)], ids=str)
def test_logits_and_features_equal_transformers(pair: tuple[Any, Engine], sizes: tuple[int, ...]) -> None:
    model, engine = pair
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, TOKENS).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens]), output_hidden_states=True)
    logits = expected.logits[0].numpy()
    features = np.concatenate([expected.hidden_states[t + 1][0].numpy() for t in TAPS], axis=1)
    engine.models.target.reset()
    done, size = 0, itertools.cycle(sizes)
    while done < TOKENS:
        count = min(next(size), TOKENS - done)
        padding = [0] * max(0, engine.models.minimum_rows - count)
        rows = engine.models.target.verify([*tokens[done : done + count], *padding])
        found = engine.models.head(rows.hidden).copy()[:count]
        scale = np.abs(logits).max()
        assert np.abs(found - logits[done : done + count]).max() <= 1e-4 * scale
        wanted = features[done : done + count]
        assert np.abs(rows.features[:count] - wanted).max() <= 1e-4 * np.abs(wanted).max()
        engine.models.target.commit(count)
        done += count


def test_greedy_text_equals_transformers(pair: tuple[Any, Engine]) -> None:
    model, engine = pair
    prompt = np.random.default_rng(4).integers(3, VOCABULARY, 21).tolist()
    with torch.no_grad():
        tokens = list(prompt)
        for _ in range(24):  # a full forward pass each time: no cache of transformers is trusted
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    from dflash_runtime import GenerationConfig

    config = GenerationConfig(max_new_tokens=24, ignore_eos=True)
    assert engine.generate(prompt, config).token_ids == tokens[len(prompt) :]
