"""Small checkpoints in the test's own folder."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dflash_exporter import ExportRequest

from tests.exporter.checkpoints import DRAFTER, QWEN3_5, Config, write_checkpoint

Writer = Callable[..., Path]


@pytest.fixture
def target(tmp_path: Path, pair_folder: Path) -> Writer:
    """Write a target with a tokenizer to `target/` of the test's folder; arguments as `write_checkpoint`."""

    def write(config: Config = QWEN3_5, **options: Any) -> Path:
        folder = write_checkpoint(tmp_path / "target", config, **options)
        shutil.copy(pair_folder / "target" / "tokenizer.json", folder)
        return folder

    return write


@pytest.fixture
def drafter(tmp_path: Path) -> Writer:
    """Write a drafter of `QWEN3_5` to `drafter/`; arguments as `write_checkpoint`."""

    def write(config: Config = DRAFTER, **options: Any) -> Path:
        return write_checkpoint(tmp_path / "drafter", config, target=QWEN3_5, **options)

    return write


@pytest.fixture
def request_(target: Writer, drafter: Writer, tmp_path: Path) -> ExportRequest:
    return ExportRequest(target=target(), drafter=drafter(), output=tmp_path / "out" / "bundle", weight_format="f32")
