"""Charts of a benchmark, as SVG text.

Knows numbers and where they go on the page. Does not know how they were measured.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .simulate import Width, best

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by colour-blind readers
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 300, 220, 50, 40, 120  # of a panel; the gap holds the legend

Series = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class _Panel:
    """A plot area whose axes begin at (`first`, 0) and end at (`last`, `top`)."""

    left: float
    title: str
    x_label: str
    first: float
    last: float
    top: float

    def x(self, value: float) -> float:
        return self.left + (value - self.first) / (self.last - self.first) * _WIDTH

    def y(self, value: float) -> float:
        return _TOP + _HEIGHT * (1 - value / self.top)


def chart(survival: Mapping[str, Sequence[float]], widths: Sequence[Width], speedups: Mapping[str, float]) -> str:
    """Return charts side by side: speed-up by data set (if any), survival by draft position, cost and gain by width."""
    curves = {name: list(enumerate(values, 1)) for name, values in survival.items()}
    bars = [list(_bars(speedups))] if speedups else []
    panels = [*bars, list(_survival(curves, len(bars))), list(_widths(widths, len(bars) + 1))]
    size = f'width="{len(panels) * (_WIDTH + _LEFT + _GAP)}" height="{_TOP + _HEIGHT + 50}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="#fff"/>',
            *(element for panel in panels for element in panel),
            "</svg>\n",
        ]
    )


def _bars(values: Mapping[str, float]) -> Iterator[str]:
    panel = _Panel(_at(0), "Speed-up over plain decoding", "", 0, len(values), 1.15 * max([1.0, *values.values()]))
    yield from _axes(panel, [])
    for i, (name, value) in enumerate(values.items()):
        left, right = panel.x(i + 0.2), panel.x(i + 0.8)
        outline = f"M{left:.1f} {panel.y(0):.1f} V{panel.y(value):.1f} H{right:.1f} V{panel.y(0):.1f}"
        yield f'<path d="{outline}" fill="{_COLORS[0]}"/>'
        yield _text((left + right) / 2, panel.y(value) - 5, f"{value:.2f}x")
        yield _text((left + right) / 2, panel.y(0) + 16, name)
    yield _dashed(panel.left, panel.y(1), panel.left + _WIDTH, panel.y(1))


def _survival(curves: Series, place: int) -> Iterator[str]:
    last = max((len(points) for points in curves.values()), default=1)
    panel = _Panel(_at(place), "Drafts accepted at least this far", "draft position", 1, max(2, last), 1.0)
    yield from _axes(panel, range(1, last + 1, max(1, last // 7)))
    yield from _lines(panel, curves)


def _widths(widths: Sequence[Width], place: int) -> Iterator[str]:
    plain, chosen = widths[0].verify_seconds, best(widths)
    curves = {
        "cost of a round": [(w.rows, (w.verify_seconds + w.draft_seconds) / plain) for w in widths],
        "tokens of a round": [(w.rows, w.emitted) for w in widths],
        "speed-up": [(w.rows, w.speedup) for w in widths],
    }
    top = 1.1 * max(y for points in curves.values() for _, y in points)
    panel = _Panel(_at(place), "By width, plain decoding = 1", "rows of a verify", 1, max(2, len(widths)), top)
    yield from _axes(panel, range(1, len(widths) + 1, max(1, len(widths) // 7)))
    yield from _lines(panel, curves)
    x, y = panel.x(chosen.rows), panel.y(chosen.speedup)
    yield _dashed(x, panel.y(0), x, _TOP)
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_COLORS[2]}"/>'
    yield _text(x, y - 9, f"{chosen.speedup:.2f}x at {chosen.rows}")


def _lines(panel: _Panel, curves: Series) -> Iterator[str]:
    for i, (name, points) in enumerate(curves.items()):
        color = _COLORS[i % len(_COLORS)]
        path = " ".join(f"{panel.x(x):.1f},{panel.y(y):.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        yield _text(panel.left + _WIDTH + 4, _TOP + 14 * i + 10, name, "start", color)


def _axes(panel: _Panel, ticks: Iterable[int]) -> Iterator[str]:
    left, bottom = panel.left, panel.y(0)
    yield _text(left + _WIDTH / 2, _TOP - 16, panel.title)
    yield _text(left + _WIDTH / 2, bottom + 34, panel.x_label)
    yield f'<path d="M{left:.1f} {_TOP} V{bottom:.1f} H{left + _WIDTH:.1f}" fill="none" stroke="#333"/>'
    step = _round_up(panel.top / 5)
    for i in range(int(panel.top / step) + 1):
        yield _text(left - 6, panel.y(i * step) + 4, f"{i * step:g}", "end")
    for tick in ticks:
        yield _text(panel.x(tick), bottom + 16, str(tick))


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= value)


def _dashed(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f} L{x2:.1f} {y2:.1f}" stroke="#888" stroke-dasharray="4 3"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", color: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


def _at(place: int) -> float:
    return _LEFT + place * (_WIDTH + _LEFT + _GAP)
