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
from .width import Costs

_BUDGET = 0.2  # seconds after which the calls of one width are not repeated
_LEAST = 0.03  # seconds before which they are
_OUTLIER = 1.7  # of the shortest time; how much of a longer one counts
_STEP = 3  # tokens between two calls that are measured
_TURNS = 8  # pairs of calls of each of two row counts in turn
WIDTHS = (2, 3, 4, 6, 8, 12, 16)  # and 1


class Seconds(msgspec.Struct, frozen=True):
    """What a call takes by its row count, and what it takes longer if the call before had another one."""

    by_rows: dict[int, float]
    change: float


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """`verify` is of target and head, one row being a plain round; `draft` of drafter and its head, or of nothing."""

    settings: Settings
    minimum_rows: int
    difference: float = 0.0  # of logits between row counts, at most; above 0 where no row count is exact
    verify: Seconds
    draft: Seconds

    def costs(self) -> tuple[Costs, Costs]:
        """Return what verifying and drafting cost, for a policy to refine."""
        verify = Costs(self.verify.by_rows, self.verify.change, self.minimum_rows)
        return verify, Costs(self.draft.by_rows, self.draft.change)


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


def measure_costs(
    target: Target, head: Head, dflash: DFlashProposer | None, minimum_rows: int, repeats: int
) -> tuple[Seconds, Seconds]:
    """Typical seconds of verifying and of drafting; one row is a plain round.

    Both are measured in turn, as decoding has them: each drives the other's weights out of the processor's caches. The
    widths are gone through up and down, since a machine's speed drifts; `repeats` are the calls of one width each time.
    The price of another row count is how much longer the first of two calls takes where two row counts take turns.
    """

    def once(rows: int) -> tuple[float, float]:
        if target.length > 4 * CHUNK:
            target.reset()
        start = time.perf_counter()
        if dflash is not None and 1 < rows <= dflash.block_size:
            dflash.rewind(0)
            dflash.observe([0] * len(features), Rows(features, features))
            dflash.propose(0, rows - 1)
        middle = time.perf_counter()
        head(target.verify([0] * max(rows, minimum_rows)).hidden)
        end = time.perf_counter()
        target.commit(min(rows, _STEP))
        return middle - start, end - middle

    features = np.zeros((_STEP, 0 if dflash is None else dflash.feature_width), np.float32)
    _repeated(partial(once, 1), round(_BUDGET / sum(once(1))))  # a program that has just begun is slower
    counts = (1, *(n for n in WIDTHS if n >= max(2, minimum_rows)))
    times: dict[int, list[tuple[float, float]]] = {n: [] for n in counts}
    for n in (*counts, *reversed(counts)):
        once(n)  # sets up
        times[n] += _repeated(partial(once, n), repeats)
    pairs = [(once(n), once(n)) for n in _TURNS * counts[2:0:-1]]  # the first is behind another row count
    changes = [max(0.0, float(np.median([first[i] - second[i] for first, second in pairs]))) for i in range(2)]
    target.reset()
    verify = Seconds({n: _typical([seconds for _, seconds in times[n]]) for n in counts}, changes[1])
    if dflash is None:
        return verify, Seconds({}, 0.0)
    dflash.rewind(0)
    drafted = [n for n in counts[1:] if n <= dflash.block_size]
    return verify, Seconds({n: _typical([seconds for seconds, _ in times[n]]) for n in drafted}, changes[0])


def _repeated(call: Callable[[], tuple[float, float]], repeats: int) -> list[tuple[float, float]]:
    times, spent = [call()], 0.0
    while spent < _BUDGET and (len(times) < repeats or spent < _LEAST):
        times.append(call())
        spent += sum(times[-1])
    return times


def _typical(times: Sequence[float]) -> float:
    """The mean, as crossing a chunk boundary costs more; far longer times are another program's and cut."""
    return float(np.mean(np.minimum(times, _OUTLIER * min(times))))
