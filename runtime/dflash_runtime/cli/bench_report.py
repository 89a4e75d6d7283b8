"""The forms of a benchmark's result: tables, JSON and CSV.

Knows figures and how to print them. Measures nothing.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Any

from ..bench import Comparison, Figures, average, pooled
from ..engine import Engine, GenerationConfig
from ..simulate import Width, best, predict
from .tables import table

_MIB = 1 << 20


@dataclass(frozen=True)
class Report:
    """A run: what was measured, with what, and everything that follows from it."""

    engine: Engine
    config: GenerationConfig
    thinking: bool
    found: Sequence[Comparison]
    costs: tuple[Sequence[float], Sequence[float]] = field(repr=False)  # seconds of verify and draft by rows
    peak_memory: int | None
    is_complete: bool

    @property
    def positions(self) -> int:
        return len(self.costs[0]) - 1

    @cached_property
    def by_dataset(self) -> dict[str, Figures]:
        names = dict.fromkeys(one.dataset for one in self.found)
        return {name: pooled(self.of(name), self.positions) for name in names}

    @cached_property
    def average(self) -> Figures:
        return average(list(self.by_dataset.values()))

    @cached_property
    def widths(self) -> list[Width]:
        """What each fixed width would gain, by the acceptance and the costs met in this run."""
        # survival itself falls where drafts were cut short on purpose; what was reached tells of any width
        chances = pooled(self.found, self.positions).conditional_acceptance
        return predict(list(accumulate(chances, mul)), *self.costs)

    def of(self, dataset: str) -> list[Comparison]:
        return [one for one in self.found if one.dataset == dataset]

    def each(self, dataset: str) -> list[Figures]:
        """Figures of every request by itself."""
        return [pooled([one], self.positions) for one in self.of(dataset)]


def report_lines(report: Report) -> Iterator[str]:
    """The tables for people: speed, acceptance, acceptance by position, and the best fixed width."""
    rows = {**report.by_dataset, "average": report.average}
    yield from _conditions(report)
    yield ""
    yield from table(_SPEED, ((name, *_speed(one)) for name, one in rows.items()))
    yield ""
    yield from table(_ACCEPTANCE, ((name, *_acceptance(one)) for name, one in rows.items()))
    positions = [str(i + 1) for i in range(report.positions)]
    for title, curve in (("survival, %", "survival"), ("conditional, %", "conditional_acceptance")):
        yield ""
        shares = ((name, *(f"{100 * share:.1f}" for share in getattr(one, curve))) for name, one in rows.items())
        yield from table([title, *positions], shares)
    chosen = best(report.widths)
    yield f"\nbest fixed width by these figures: {chosen.rows} rows, {chosen.speedup:.2f}x"
    yield "Pairs are plain and drafted. Rates are pooled over requests; the acceptance length includes the bonus token."


_SPEED = ("speed", "requests", "tokens", "tok/s", "tok/s", "speed-up", "cost saved", "TTFT ms", "ms", "TPOT ms", "ms")
_ACCEPTANCE = ("acceptance", "drafts", "draft tokens", "accepted", "rate", "length", "texts that differ")


def _conditions(report: Report) -> Iterator[str]:
    block = "adaptive width" if report.config.block_size is None else f"block size {report.config.block_size}"
    thinking = "on" if report.thinking else "off"
    yield f"{report.config.max_new_tokens} new tokens at most, greedy, {block}, thinking {thinking}"
    yield f"drafts by {report.engine.models.drafting}"
    settings = asdict(report.engine.models.settings)
    yield ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
    if not report.engine.is_exact:
        yield "not bit-exact with these settings: drafts may change texts"
    if report.peak_memory is not None:
        yield f"peak memory {report.peak_memory / _MIB:,.0f} MiB"


def _speed(one: Figures) -> Iterator[str]:
    yield from (str(one.requests), str(one.tokens))
    yield from (f"{one.plain_tokens_per_second:.1f}", f"{one.tokens_per_second:.1f}")
    yield from (f"{one.speedup:.2f}x", f"{one.cost_saved:.1%}")
    yield from (f"{1e3 * seconds:.1f}" for seconds in (one.plain_ttft, one.ttft, one.plain_tpot, one.tpot))


def _acceptance(one: Figures) -> Iterator[str]:
    yield from (str(one.drafts), str(one.draft_tokens), str(one.accepted_tokens))
    yield from (f"{one.acceptance_rate:.1%}", f"{one.acceptance_length:.2f}", str(one.differing))


def report_json(report: Report) -> str:
    """Everything, as one JSON object."""
    engine = report.engine
    found = {
        "bundle": str(engine.bundle.folder),
        "settings": asdict(engine.models.settings),
        "drafting": engine.models.drafting,
        "is_exact": engine.is_exact,
        "max_new_tokens": report.config.max_new_tokens,
        "block_size": report.config.block_size,
        "thinking": report.thinking,
        "is_complete": report.is_complete,
        "peak_memory": report.peak_memory,
        "datasets": {name: _dataset(report, name) for name in report.by_dataset},
        "average": asdict(report.average),
        "widths": [asdict(width) for width in report.widths],
        "best_width": best(report.widths).rows,
    }
    return json.dumps(found, ensure_ascii=False)


def report_csv(report: Report) -> str:
    """One row for every request; what is given by position is separated by spaces."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["dataset", "request", *(field.name for field in fields(Figures) if field.name != "requests")])
    for name in report.by_dataset:
        for comparison, figures in zip(report.of(name), report.each(name), strict=True):
            values = {key: value for key, value in asdict(figures).items() if key != "requests"}
            cells = (" ".join(map(str, v)) if isinstance(v, tuple) else v for v in values.values())
            writer.writerow([name, comparison.request, *cells])
    return out.getvalue()


def prediction_lines(widths: Sequence[Width]) -> Iterator[str]:
    """The table of a simulation."""
    yield from table(("rows", "tokens a round", "verify ms", "draft ms", "speed-up"), map(_width, widths))
    chosen = best(widths)
    yield f"best: {chosen.rows} rows, {chosen.speedup:.2f}x, saves {1 - 1 / chosen.speedup:.1%} of a token's cost"


def _width(width: Width) -> tuple[str, ...]:
    costs = (f"{1e3 * width.verify_seconds:.3f}", f"{1e3 * width.draft_seconds:.3f}")
    return str(width.rows), f"{width.emitted:.2f}", *costs, f"{width.speedup:.2f}x"


def prediction_json(survival: Sequence[float], widths: Sequence[Width]) -> str:
    """A simulation as one JSON object."""
    rows = [asdict(width) for width in widths]
    return json.dumps({"survival": survival, "widths": rows, "best_width": best(widths).rows})


def _dataset(report: Report, name: str) -> dict[str, Any]:
    each = report.each(name)
    names = [one.request for one in report.of(name)]
    return {
        "pooled": asdict(report.by_dataset[name]),
        "mean_of_requests": asdict(average(each)),
        "requests": [{"request": n, **asdict(one)} for n, one in zip(names, each, strict=True)],
    }
