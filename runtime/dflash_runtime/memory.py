"""What this process and this machine have of memory."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MADV_DONTNEED = 4
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
    if not sys.platform.startswith("linux"):
        return
    prefix = f"{folder.resolve()}{os.sep}"
    libc = ctypes.CDLL(None)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            span, mode, _, _, _, *name = line.split(maxsplit=5)
            if name and name[0].startswith(prefix) and "w" not in mode:
                start, end = (int(x, 16) for x in span.split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
