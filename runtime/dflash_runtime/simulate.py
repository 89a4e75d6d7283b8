"""Predicts the speed-up of drafting from a survival curve and from what each width costs.

Knows curves, and plain figures of a machine and a bundle. Loads no model: the costs are handed in, as measured, or
follow from a roofline over the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from dflash_graphs.errors import RequestError
from dflash_graphs.manifest import Manifest
from numpy.typing import NDArray

Curve = NDArray[np.float64]
Numbers = Sequence[float] | Curve
_Described = TypeVar("_Described", "Profile", "Machine")

PROFILES = Path(__file__).with_name("data") / "profiles"
_BITS = {"f32": 32, "bf16": 16, "f16": 16, "int8": 8, "int4": 4}


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far drafts survive: known points of the curve, first and last position among them, and maybe its sum."""

    name: str = ""
    positions: int  # draft tokens of a block
    survival: dict[int, float]  # position, from 0: share of drafts accepted at least that far
    mean_accepted: float | None = None  # draft tokens per block


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a roofline needs of a CPU."""

    name: str = ""
    cores: int
    peak_gflops_per_core: float  # of products in the bundle's precision, a multiply-add counting as two
    bandwidth_gb_per_second: float  # of reading weights, all cores together


@dataclass(frozen=True)
class Work:
    """A graph as a roofline sees it: `weight_bytes` are read once a call, `parameters` multiplied once a row."""

    weight_bytes: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Width:
    """What a round of `rows` verified rows (anchor included) costs and yields; one row is plain decoding."""

    rows: int
    emitted: float  # expected tokens, bonus included
    verify_seconds: float
    draft_seconds: float
    speedup: float  # over plain decoding


def read_profile(source: str) -> Profile:
    """Read a profile by the name of a built-in one, or from a JSON file."""
    built_in = PROFILES / f"{source}.json"
    return _read(built_in if built_in.is_file() else Path(source), Profile)


def read_machine(path: Path) -> Machine:
    """Read the description of a machine from a JSON file."""
    return _read(path, Machine)


def survival_curve(profile: Profile) -> Curve:
    """Return the whole curve [positions]: smooth, never rising, through the known points, with the known sum.

    Between the points runs a monotone cubic of s^p, p chosen for the sum (0, of log s, without one). Raises
    RequestError for points that are no survival curve and for a sum no such curve has.
    """
    at, known = np.array(sorted(profile.survival)), np.array([profile.survival[i] for i in sorted(profile.survival)])
    if not len(at) or at[0] != 0 or at[-1] != profile.positions - 1:
        raise RequestError(f"a survival profile needs its first and last position, 0 and {profile.positions - 1}")
    if known[-1] <= 0 or known[0] > 1 or np.any(np.diff(known) > 0):
        raise RequestError("survival must lie in (0, 1] and never rise from one position to the next")
    if profile.mean_accepted is None:
        return _interpolate(at, known, 0.0)
    low, high = -8.0, 8.0
    bounds = [float(_interpolate(at, known, power).sum()) for power in (low, high)]
    if not bounds[0] - 1e-9 <= profile.mean_accepted <= bounds[1] + 1e-9:
        raise RequestError(
            f"no smooth curve through these points accepts {profile.mean_accepted:g} tokens; "
            f"between {bounds[0]:.2f} and {bounds[1]:.2f} are possible"
        )
    while high - low > 1e-9:  # the sum grows with the power
        middle = (low + high) / 2
        low, high = (middle, high) if _interpolate(at, known, middle).sum() < profile.mean_accepted else (low, middle)
    return _interpolate(at, known, (low + high) / 2)


def predict(survival: Numbers, verify: Numbers, draft: Numbers) -> list[Width]:
    """Return every width from 1 to `len(verify)` rows, a fixed one in all rounds.

    `verify` and `draft` are seconds by rows, `draft[0]` unused. A round of n rows drafts and verifies n - 1 tokens.
    """
    found = []
    for rows in range(1, len(verify) + 1):
        emitted = 1.0 + float(np.sum(survival[: rows - 1]))
        drafting = float(draft[rows - 1]) if rows > 1 else 0.0
        speedup = emitted * float(verify[0]) / (float(verify[rows - 1]) + drafting)
        width = Width(
            rows=rows,
            emitted=emitted,
            verify_seconds=float(verify[rows - 1]),
            draft_seconds=drafting,
            speedup=speedup,
        )
        found.append(width)
    return found


def best(widths: Sequence[Width]) -> Width:
    """Return the width with the most tokens per second, the narrowest among equals."""
    return max(widths, key=lambda width: width.speedup)


def roofline(work: Sequence[Work], machine: Machine, rows: int) -> float:
    """Return the seconds of one call of graphs with `rows` rows, each bound by its weights' bytes or by its products.

    Attention, recurrences and the host's time are left out: short contexts come close, long ones do not.
    """
    flops = machine.cores * machine.peak_gflops_per_core * 1e9
    read = machine.bandwidth_gb_per_second * 1e9
    return sum(max(one.weight_bytes / read, 2.0 * one.parameters * rows / flops) for one in work)


def bundle_work(manifest: Manifest) -> tuple[list[Work], list[Work]]:
    """Return what a verify and what a draft of a bundle have to do, from the sizes of its files."""

    def work(name: str) -> Work:
        graph = manifest.graphs[name]
        size = manifest.files[graph.file.removesuffix(".xml") + ".bin"].size
        return Work(size, size * 8 // _BITS[graph.weight_format])

    target, head = work("target"), work("head")
    if manifest.drafter is None:
        return [target, head], []
    ids = next(port.shape[1] for port in manifest.graphs["head"].outputs if port.name == "draft_logits")
    share = int(ids) / manifest.target.vocab_size
    drafted = Work(round(head.weight_bytes * share), round(head.parameters * share))
    return [target, head], [work("drafter_context"), work("drafter"), drafted]


def _read(path: Path, kind: type[_Described]) -> _Described:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        names = ", ".join(sorted(found.stem for found in PROFILES.glob("*.json")))
        raise RequestError(f"{path} does not exist; the built-in profiles are: {names}") from error
    except msgspec.DecodeError as error:
        raise RequestError(f"{path} cannot be used: {error}") from error


def _interpolate(at: NDArray[np.int64], known: Curve, power: float) -> Curve:
    """Monotone cubic (Fritsch and Carlson) through (s^power - 1) / power at integer positions, in terms of s."""
    if len(at) == 1:
        return known
    is_log = abs(power) < 1e-6
    y = np.log(known) if is_log else (known**power - 1) / power
    step, slope = np.diff(at), np.diff(y) / np.diff(at)
    # at a knot the harmonic mean of both slopes, which never overshoots; at the ends the slope itself
    inner = [2 * a * b / (a + b) if a * b > 0 else 0.0 for a, b in pairwise(slope)]
    tangent = np.array([slope[0], *inner, slope[-1]])
    x = np.arange(at[-1] + 1)
    i = np.minimum(np.searchsorted(at, x, side="right") - 1, len(step) - 1)
    t, h = (x - at[i]) / step[i], step[i]
    value = (
        (1 + 2 * t) * (1 - t) ** 2 * y[i]
        + t * (1 - t) ** 2 * h * tangent[i]
        + t**2 * (3 - 2 * t) * y[i + 1]
        + t**2 * (t - 1) * h * tangent[i + 1]
    )
    return np.asarray(np.exp(value) if is_log else (1 + power * value) ** (1 / power))
