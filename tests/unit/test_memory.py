"""Huge pages: what is stored stays, and where the system can, they are used."""

import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from dflash_runtime.memory import use_huge_pages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _on_huge_pages() -> int:
    """KiB of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def test_memory_moves_to_huge_pages_and_keeps_its_values() -> None:
    values = np.arange(1 << 23, dtype=np.float32)  # 32 MiB
    use_huge_pages(10.0)
    assert np.array_equal(values, np.arange(1 << 23, dtype=np.float32))
    version = platform.release().split(".")
    if not sys.platform.startswith("linux") or not _SETTING.exists() or tuple(map(int, version[:2])) < (6, 1):
        pytest.skip("this system has no huge pages on demand")
    assert _on_huge_pages() >= 30 << 10
