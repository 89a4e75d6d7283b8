"""An engine of the small pair, and prompts whose greedy answers are recorded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_runtime import Engine, load


@pytest.fixture(scope="session")
def golden(repo: Path) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = json.loads((repo / "tests" / "data" / "golden.json").read_text("utf-8"))["prompts"]
    return prompts


@pytest.fixture(scope="module")
def engine(small_bundle: Callable[[str], Path]) -> Engine:
    return load(small_bundle("f32"), max_context=512)
