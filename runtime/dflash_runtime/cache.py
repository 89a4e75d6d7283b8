"""The user's cache folder: lists what this program keeps there and makes it smaller.

Knows the kinds of entries, each a subfolder. Does not know what is in them; all of it is made again when needed.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .bundle import cache_folder

KINDS = {
    "tuning": "measured cost of widths",
    "checked": "bundles whose hashes were found right",
}


@dataclass(frozen=True)
class Entry:
    """A file or folder of the cache."""

    path: Path
    kind: str
    size: int  # bytes
    used: float  # when it was last read or written, seconds since the epoch (as exact as the file system keeps it)


def entries() -> list[Entry]:
    """Return all entries, the longest unused first."""
    found = []
    for kind in KINDS:
        folder = cache_folder() / kind
        for path in folder.iterdir() if folder.is_dir() else ():
            stats = [f.stat() for f in (path, *path.rglob("*")) if f.is_file()]
            used = max((max(s.st_atime, s.st_mtime) for s in stats), default=0.0)
            found.append(Entry(path, kind, sum(s.st_size for s in stats), used))
    return sorted(found, key=lambda entry: entry.used)


def prune(limit: int) -> list[Entry]:
    """Remove the longest unused entries until the cache takes at most `limit` bytes; return what was removed."""
    found = entries()
    total, removed = sum(entry.size for entry in found), []
    for entry in found:
        if total <= limit:
            break
        removed.append(entry)
        total -= entry.size
    _remove(removed)
    return removed


def clear() -> list[Entry]:
    """Remove all entries; return them."""
    found = entries()
    _remove(found)
    return found


def _remove(unwanted: Iterable[Entry]) -> None:
    for entry in unwanted:
        if entry.path.is_dir() and not entry.path.is_symlink():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink(missing_ok=True)  # another process may have been here
