"""What to know about a bundle on this machine before decoding: the smallest exact row count and the cost of widths.

Measured when a bundle is first loaded with given settings and kept in the user's cache folder, so that later loads
start at once. `dflash tune` measures again, with more repetitions.
"""

import hashlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from dflash_graphs.specs import CHUNK

from .backends import backend_for
from .bundle import Bundle, bundle_key, cache_folder
from .device import Settings
from .proposers import DFlashProposer
from .protocols import Head, Rows, Target

_BUDGET = 0.3  # seconds after which the calls of one width are not repeated
_OUTLIER = 1.7  # of the shortest time; how much of a longer one counts
_STEP = 3  # tokens between two calls that are measured
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 11, 16)


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by row count: `verify` for target and head, `draft` for drafter and draft head."""

    settings: Settings
    minimum_rows: int
    difference: float = 0.0  # of logits between row counts, at most; above 0 where no row count is exact
    verify: dict[int, float]
    draft: dict[int, float]


def tuning_path(bundle: Bundle, settings: Settings) -> Path:
    """Where the tuning of this bundle, machine and software is kept."""
    backend = backend_for(bundle.manifest)
    machine = (platform.machine(), backend.cpu_name(), os.cpu_count(), backend.version(), repr(settings))
    digest = hashlib.sha256(repr((bundle_key(bundle.manifest), machine)).encode()).hexdigest()
    return cache_folder() / "tuning" / f"{digest[:16]}.json"


def read_tuning(path: Path) -> Tuning | None:
    """Return what was measured before, or None; an unreadable file counts as nothing measured."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Tuning)
    except (OSError, msgspec.DecodeError):
        return None


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Keep `tuning`; a cache folder that cannot be written only means measuring again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(tuning))
        temporary.replace(path)
    except OSError:
        pass


def measure_verify(target: Target, head: Head, rows: Sequence[int], repeats: int) -> dict[int, float]:
    """Typical seconds of target and head by row count, over positions in a chunk; the first call is not counted."""

    def once(count: int) -> None:
        if target.length > CHUNK:
            target.reset()
        head(target.verify([0] * count).hidden)
        target.commit(min(count, _STEP))

    found = {}
    for n in rows:
        target.reset()
        found[n] = _typical(partial(once, n), repeats)
    return found


def measure_draft(proposer: DFlashProposer, feature_width: int, repeats: int) -> dict[int, float]:
    """Typical seconds of drafting, by row count of the block, anchor included."""
    features = np.zeros((4, feature_width), np.float32)

    def once(rows: int) -> None:
        proposer.rewind(0)
        proposer.observe([0] * len(features), Rows(features, features))
        proposer.propose(0, rows - 1)

    found = {n: _typical(partial(once, n), repeats) for n in WIDTHS if 1 < n <= proposer.block_size}
    proposer.rewind(0)
    return found


def _typical(call: Callable[[], object], repeats: int) -> float:
    """The mean, as crossing a chunk boundary costs more; far longer times are another program's and cut."""
    call()
    times: list[float] = []
    while len(times) < repeats and (not times or sum(times) < _BUDGET):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.mean(np.minimum(times, _OUTLIER * min(times))))
