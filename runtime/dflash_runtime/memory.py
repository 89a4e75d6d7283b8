"""What this process and this machine have of memory."""

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MADV_DONTNEED, _MADV_COLLAPSE = 4, 25
_HUGE_PAGE, _PIECE = 1 << 21, 1 << 24  # bytes; of those that are moved at once
_INTERVAL = 0.1  # seconds


def physical_memory() -> int:
    """Bytes of physical memory; 8 GiB where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


@contextmanager
def releasing_mapped(folder: Path) -> Iterator[None]:
    """Keep giving back the resident pages of files mapped from `folder`; they are read again if ever needed.

    OpenVINO packs the weights in its first call and keeps their file mapped, which doubles the memory for nothing.
    Only Linux needs and supports this; elsewhere it does nothing.
    """
    done = threading.Event()

    def release() -> None:
        while not done.wait(_INTERVAL):
            _release(folder)

    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        _release(folder)


def _release(folder: Path) -> None:
    prefix = f"{folder.resolve()}{os.sep}"
    for mode, name, start, end in _mappings():
        if name.startswith(prefix) and "w" not in mode:
            _advise(start, end, _MADV_DONTNEED)


def use_huge_pages(seconds: float) -> None:
    """Move what this process has allocated to huge pages, large pieces first, until the time is up.

    Every token reads all weights, and for a small model walking page tables is a good part of that. Linux can do it
    from 6.1 on; elsewhere nothing happens. A virtual machine may take some seconds per GB.
    """
    end = time.monotonic() + seconds
    allocated = (
        (start, stop) for mode, name, start, stop in _mappings() if mode[:2] == "rw" and name in ("", "[heap]")
    )
    for start, stop in sorted(allocated, key=lambda span: span[0] - span[1]):
        start, stop = -(-start // _HUGE_PAGE) * _HUGE_PAGE, stop // _HUGE_PAGE * _HUGE_PAGE
        for piece in range(start, stop, _PIECE):
            if time.monotonic() >= end:
                return
            _advise(piece, min(piece + _PIECE, stop), _MADV_COLLAPSE)


def _mappings() -> Iterator[tuple[str, str, int, int]]:
    """Yield mode, name ("" for allocated memory), start and end of what this process has mapped; nothing but on Linux.

    What else runs may map and unmap meanwhile: a mapping that is gone is an error of `madvise`, which does no harm.
    """
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            span, mode, _, _, _, *name = line.split(maxsplit=5)
            start, end = (int(x, 16) for x in span.split("-"))
            yield mode, name[0] if name else "", start, end


def _advise(start: int, end: int, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice)
