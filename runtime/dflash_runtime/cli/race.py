"""`dflash demo --race`: plain and DFlash decoding of one prompt, side by side in the terminal.

Knows the screen. Both sides run in one process, so they take turns: the one with less time on its own clock goes next,
and every rate shown is by that clock.
"""

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from pathlib import Path

import click
from dflash_graphs.errors import DFlashError

from ..engine import Engine, GenerationConfig, Result, load

_Cell = tuple[str, bool]  # a character, and whether it was drafted
_TOKENS = 160
_RULE = " │ "
_MARGIN = 3  # lines of the terminal around the text


class _Lane:
    """One side: what it wrote so far, and the time that took."""

    def __init__(self, title: str, engine: Engine, prompt: str, draft: bool) -> None:
        self.title, self.result = title, Result()
        self._stream = engine.stream(prompt, GenerationConfig(max_new_tokens=_TOKENS, draft=draft), self.result)
        self._detokenizer = engine.tokenizer.stream()
        self.cells: list[_Cell] = []
        self.seconds, self.is_done, self._shown = 0.0, False, 0
        self._first = (0, 0.0)  # tokens and seconds when the first tokens were there

    @property
    def rate(self) -> float:
        """Tokens per second, the prompt's time left out."""
        tokens, seconds = len(self.result.token_ids) - self._first[0], self.seconds - self._first[1]
        return tokens / seconds if seconds else 0.0

    def advance(self) -> None:
        """Let the engine decode its next piece of text."""
        start = time.perf_counter()
        self.is_done = next(self._stream, None) is None
        self.seconds += time.perf_counter() - start
        if self._first[0] == 0:
            self._first = (len(self.result.token_ids), self.seconds)
        was_drafted = [False, *(i < r.accepted for r in self.result.rounds for i in range(len(r.tokens)))]
        for token in range(self._shown, len(self.result.token_ids)):
            text = self._detokenizer.push([self.result.token_ids[token]]).replace("\t", "    ")
            self.cells += [(character, was_drafted[token]) for character in text]
        self._shown = len(self.result.token_ids)

    def lines(self, width: int) -> list[str]:
        """What was written, in lines of `width` characters with drafted ones coloured."""
        rows: list[list[_Cell]] = [[]]
        for cell in self.cells:
            if cell[0] == "\n" or len(rows[-1]) == width:
                rows.append([])
            if cell[0] != "\n":
                rows[-1].append(cell)
        return [_styled(row) + " " * (width - len(row)) for row in rows]

    def head(self, width: int) -> str:
        return f"{self.title:<8}{len(self.result.token_ids):>4} tokens  {self.rate:>7.1f} tok/s"[:width].ljust(width)


def _styled(row: Sequence[_Cell]) -> str:
    runs = [(drafted, "".join(c for c, _ in cells)) for drafted, cells in groupby(row, lambda cell: cell[1])]
    return "".join(click.style(text, fg="green") if drafted else text for drafted, text in runs)


def race(bundle: Path, prompts: Sequence[str]) -> None:
    """Stream every prompt's answer in two columns; raise DFlashError if they ever differ."""
    click.echo(f"Left plain, right DFlash; {click.style('drafted and accepted', fg='green')}. Both loading …", err=True)
    engines = load(bundle), load(bundle)
    for prompt in prompts:
        lanes = [_Lane("plain", engines[0], prompt, False), _Lane("DFlash", engines[1], prompt, True)]
        _run(lanes)
        if lanes[0].result.token_ids != lanes[1].result.token_ids:
            raise DFlashError("drafting changed the output, which it never may; `dflash verify` says where")
        click.echo(f"the same text, {lanes[1].rate / lanes[0].rate:.2f}x as fast\n")


def _run(lanes: Sequence[_Lane]) -> None:
    is_live, drawn = sys.stdout.isatty(), 0
    while running := [lane for lane in lanes if not lane.is_done]:
        min(running, key=lambda lane: lane.seconds).advance()
        if is_live:
            drawn = _draw(lanes, drawn)
    if not is_live:
        _draw(lanes, 0, sys.maxsize)


def _draw(lanes: Sequence[_Lane], drawn: int, height: int | None = None) -> int:
    """Draw over the `drawn` lines of the last time; return how many there are now."""
    size = shutil.get_terminal_size()
    frame = list(_frame(lanes, (size.columns - len(_RULE)) // 2, height or max(1, size.lines - _MARGIN)))
    up = f"\x1b[{drawn}A\x1b[J" if drawn else ""
    click.echo(up + "\n".join(frame))
    return len(frame)


def _frame(lanes: Sequence[_Lane], width: int, height: int) -> Iterator[str]:
    yield _RULE.join(lane.head(width) for lane in lanes)
    columns = (lane.lines(width)[-height:] for lane in lanes)
    for cells in zip_longest(*columns, fillvalue=" " * width):
        yield _RULE.join(cells).rstrip()
