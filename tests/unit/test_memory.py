"""Huge pages: what is stored stays, and where the system can, they are used."""

import platform
import sys
from pathlib import Path

import pytest
from dflash_runtime.memory import use_huge_pages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SIZE = 1 << 25  # bytes


def _on_huge_pages() -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def test_memory_moves_to_huge_pages_and_keeps_its_values() -> None:
    version = platform.release().split(".")
    if not sys.platform.startswith("linux") or not _SETTING.exists() or tuple(map(int, version[:2])) < (6, 1):
        pytest.skip("this system has no huge pages on demand")
    if "[madvise]" not in _SETTING.read_text("utf-8"):
        pytest.skip("this system uses huge pages unasked, or never")
    values = bytearray(range(256)) * (_SIZE // 256)  # NumPy would ask for huge pages itself
    before = _on_huge_pages()
    use_huge_pages(0.0)
    assert _on_huge_pages() == before  # no time to move anything
    use_huge_pages(10.0)
    assert _on_huge_pages() >= before + _SIZE // 2  # memory may be too fragmented for all
    assert values == bytearray(range(256)) * (_SIZE // 256)
