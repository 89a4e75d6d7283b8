"""`dflash tune`: what every width costs on this machine, and with which settings a bundle is fastest.

Knows the options, the sweep and the table. The costs are measured in `tuning`, the gain is predicted in `simulate`.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from ..backends import backend_for
from ..bench import sweep
from ..bundle import Bundle
from ..engine import GenerationConfig, load
from ..prompts import Dataset, Encoder, load_dataset
from ..simulate import best, predict, read_profile, survival_curve
from ..tuning import Tuning, tuning_path, write_tuning
from ..width import Costs
from .tables import table

_POSITIVE = click.IntRange(min=1)
_REPEATS = 7
_SAMPLES = 4
_BLOCK_SIZES = (2, 4, 8, 12, 16)
_CONFIGS = (
    GenerationConfig(max_new_tokens=96, draft=False),
    *(GenerationConfig(max_new_tokens=96, block_size=size) for size in _BLOCK_SIZES),
    GenerationConfig(max_new_tokens=96),
)


@dataclass(frozen=True)
class _Trial:
    """One combination of settings: as asked for, and what came of it."""

    threads: int | None
    precision: str | None
    tuning: Tuning
    rates: Sequence[float]  # tokens per second of each config, where prompts were given

    @property
    def label(self) -> str:
        settings = self.tuning.settings
        return f"{settings.precision}, {settings.threads or 'default'} threads"

    @property
    def rate(self) -> float:
        """Tokens per second: the best that was measured, else what an average text would give."""
        if self.rates:
            return max(self.rates)
        survival = survival_curve(read_profile("article"))
        rows = np.arange(1, len(survival) + 2)
        verify = Costs(self.tuning.verify).curve(np.maximum(rows, self.tuning.minimum_rows))
        if not self.tuning.draft:
            return float(1 / verify[0])
        chosen = best(predict(survival, verify, Costs(self.tuning.draft).curve(rows)))
        return chosen.emitted / (chosen.verify_seconds + chosen.draft_seconds)


def _several(ctx: click.Context, param: click.Parameter, value: str | None) -> list[Any]:
    """Read a list with commas; without one, the default alone."""
    kind: Any = _POSITIVE if param.name == "threads" else click.Choice(["f32", "bf16"])
    return [None] if value is None else [kind.convert(item, param, ctx) for item in value.split(",")]


@click.command("tune")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", metavar="FILE", help="Decode these as well (JSONL, as for `bench`), with every block size.")
@click.option("--threads", callback=_several, metavar="N,...", help="Thread counts to try.")
@click.option("--precision", callback=_several, metavar="P,...", help="Precisions to try: f32, bf16.")
@click.option("--write", is_flag=True, help="Keep the costs, and use the best settings whenever none are asked for.")
def command(bundle: Path, prompts: str | None, threads: list[Any], precision: list[Any], write: bool) -> None:
    """Measure what widths cost on this machine, and find the best settings.

    Prints milliseconds by number of rows. Without prompts the settings are judged by how an average text would fare.
    Ctrl-C prints what was measured so far.
    """
    dataset = load_dataset(prompts).spread(_SAMPLES) if prompts else None
    trials: list[_Trial] = []
    opened: list[Bundle] = []
    interrupted = False
    try:
        for asked in tqdm(list(product(threads, precision)), unit="setting", disable=None, leave=False):
            trial, opened[:] = _trial(bundle, dataset, *asked)
            trials.append(trial)
    except KeyboardInterrupt:
        interrupted = True
    click.echo("\n".join(_lines(trials)))
    if interrupted:
        raise KeyboardInterrupt
    if write:
        _write(opened[0], trials)


def _trial(
    folder: Path, dataset: Dataset | None, threads: int | None, precision: str | None
) -> tuple[_Trial, list[Bundle]]:
    gc.collect()  # one bundle in memory at a time
    engine = load(folder, threads=threads, precision=precision)
    tuning, rates = engine.models.measure(_REPEATS), []
    engine.context.clear()
    if dataset is not None:
        encoder = Encoder(folder, engine.tokenizer)
        prompts = [encoder.encode(sample) for sample in dataset.samples]
        configs = _CONFIGS if tuning.draft else _CONFIGS[:1]
        rates = sweep(engine, tqdm(prompts, unit="prompt", disable=None, leave=False), configs)
    return _Trial(threads, precision, tuning, rates), [engine.bundle]


def _write(bundle: Bundle, trials: Sequence[_Trial]) -> None:
    """Keep every measurement under what was asked for, and the best also for when nothing is."""
    backend, weights = backend_for(bundle.manifest), bundle.manifest.graphs["target"].weight_format
    chosen = max(trials, key=lambda trial: trial.rate)
    kept = [(trial.threads, trial.precision, trial.tuning) for trial in trials] + [(None, None, chosen.tuning)]
    for threads, precision, tuning in kept:
        write_tuning(tuning_path(bundle, backend.choose_settings(weights, threads, precision)), tuning)


def _lines(trials: Sequence[_Trial]) -> Iterator[str]:
    if not trials:
        return
    rows = sorted({*trials[0].tuning.verify, *trials[0].tuning.draft})
    costs = [
        (f"{trial.label}, {part}", *(_cell(1e3, seconds.get(count)) for count in rows))
        for trial in trials
        for part, seconds in (("verify", trial.tuning.verify), ("draft", trial.tuning.draft))
    ]
    yield from table(("milliseconds by rows", *map(str, rows)), costs)
    if trials[0].rates:
        yield ""
        head = ("tokens/s by block size", "plain", *map(str, _BLOCK_SIZES), "adaptive")[: 1 + len(trials[0].rates)]
        yield from table(head, ((trial.label, *(_cell(1, rate) for rate in trial.rates)) for trial in trials))
    chosen = max(trials, key=lambda trial: trial.rate)
    basis = "measured on the prompts" if chosen.rates else "expected of an average text"
    yield f"\nrecommended: {chosen.label}; {chosen.rate:.1f} tokens/s {basis}"
    yield f"smallest exact row count: {chosen.tuning.minimum_rows}"


def _cell(scale: float, value: float | None) -> str:
    return "" if value is None else f"{scale * value:.2f}"
