"""Memory: what the caches of a loaded pair take, and what this machine has left.

Knows sizes. Does not allocate anything.
"""

import ctypes
import os
from pathlib import Path

from .specs import CHUNK, DrafterSpec, TargetSpec

_F32 = 4  # bytes; recurrent states and their pending rows are always f32
KV_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


def cache_bytes(target: TargetSpec, drafter: DrafterSpec | None, context: int, kv_precision: str) -> int:
    """Bytes of all caches for `context` tokens: keys and values of both models, recurrent states of the target."""
    rows = context + CHUNK
    widths = len(target.attention_layers) * target.attention.kv_width
    if drafter is not None:
        widths += len(drafter.layers) * drafter.attention.kv_width
    total = 2 * rows * widths * KV_BYTES[kv_precision]
    if target.delta is not None:
        delta = target.delta
        state = delta.value_heads * delta.key_dim * delta.value_dim
        pending = (delta.kernel - 1) * delta.conv_width + CHUNK * sum(delta.kept_widths(has_window=True).values())
        total += len(target.delta_layers) * (3 * state + pending) * _F32  # current, at the next boundary, at the last
    return total


def available_memory() -> int | None:
    """Bytes a program may still take without swapping; all physical memory on systems that tell no more, else None."""
    if os.name == "nt":
        return _available_on_windows()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of the Windows API; its fourth field is the available physical memory."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def _available_on_windows() -> int | None:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    kernel = ctypes.CDLL("kernel32")  # WinDLL, which this asks for, is unknown to type checkers elsewhere
    return int(status.available) if kernel.GlobalMemoryStatusEx(ctypes.byref(status)) else None
