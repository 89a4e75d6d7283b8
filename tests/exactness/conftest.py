"""What the tests of exactness share: an engine of the small pair, and the recorded greedy decoding of ten prompts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_runtime import Engine, GenerationConfig, load

Golden = list[dict[str, Any]]


@pytest.fixture(scope="session")
def golden(repo: Path) -> Golden:
    """Prompts with their greedy tokens, and the accepted drafts of every round at block size 16 (PyTorch, f32)."""
    prompts: Golden = json.loads((repo / "tests" / "data" / "golden.json").read_text("utf-8"))["prompts"]
    return prompts


@pytest.fixture(scope="module")
def engine(small_bundle: Callable[[str], Path]) -> Engine:
    return load(small_bundle("f32"), max_context=1024)


@pytest.fixture(scope="session")
def departures(golden: Golden) -> Callable[[Engine], list[str]]:
    """Return what of an engine's decoding departs from the recording: tokens, and accepted drafts of every round.

    What would have been accepted behind a stop token, in the last round, is not compared.
    """

    def find(engine: Engine) -> list[str]:
        found = []
        for i, prompt in enumerate(golden):
            result = engine.generate(prompt["prompt_ids"], GenerationConfig(max_new_tokens=128, block_size=16))
            if result.token_ids != prompt["greedy_ids"]:
                found.append(f"tokens of prompt {i}")
            accepted = [done.accepted for done in result.rounds[:-1]]
            emitted = [len(done.tokens) for done in result.rounds]
            if (accepted, emitted) != (prompt["accepted"][:-1], prompt["rounds"]):
                found.append(f"accepted drafts of prompt {i}")
        return found

    return find
