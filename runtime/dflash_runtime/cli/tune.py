"""`dflash tune`: what every width costs on this machine, and with which settings a bundle is fastest.

Knows the options, the sweep and the table. The costs are measured in `tuning`, the gain is predicted in `simulate`.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
from dflash_graphs.errors import RequestError
from dflash_graphs.manifest import read_manifest
from tqdm import tqdm

from ..backends import backend_for
from ..bench import sweep
from ..bundle import Bundle
from ..engine import GenerationConfig, load
from ..loading import Drafting
from ..prompts import Dataset, Encoder, load_dataset
from ..recommended import recommend, write_recommended
from ..simulate import best, predict, read_profile, survival_curve
from ..tuning import Tuning, tuning_path, write_tuning
from .options import KV_PRECISIONS, PRECISIONS
from .tables import table

_POSITIVE = click.IntRange(min=1)
_REPEATS = 4
_SAMPLES = 4
_CLEARLY = 1.05  # times as fast
_BLOCK_SIZES = (2, 4, 8, 12, 16)
_CONFIGS = (
    GenerationConfig(max_new_tokens=96, draft=False),
    *(GenerationConfig(max_new_tokens=96, block_size=size) for size in _BLOCK_SIZES),
    GenerationConfig(max_new_tokens=96),
)


_Asked = tuple[int | None, str, str]  # threads, precision, KV precision


@dataclass(frozen=True)
class _Trial:
    """One combination of settings: as asked for, and what came of it."""

    asked: _Asked
    is_exact: bool
    tuning: Tuning
    rates: Sequence[float]  # tokens per second of each config, where prompts were given

    @property
    def label(self) -> str:
        threads, precision, kv_precision = self.asked
        exact = "" if self.is_exact else " (not bit-exact)"
        return f"{precision}, KV {kv_precision}, {threads or 'default'} threads{exact}"

    @property
    def rate(self) -> float:
        """Tokens per second: measured with widths chosen each round, else what an average text would give."""
        if self.rates:
            return self.rates[-1]
        survival = survival_curve(read_profile("article"))
        verify, draft = self.tuning.costs()
        if not draft.seconds:
            return 1 / verify.at(1)
        rows = range(1, len(survival) + 2)
        costs = (np.array([part.at(n) for n in rows]) for part in (verify, draft))
        chosen = best(predict(survival, *costs))
        return chosen.emitted / (chosen.verify_seconds + chosen.draft_seconds)


def _several(ctx: click.Context, param: click.Parameter, value: str | None) -> list[Any] | None:
    """Read a list with commas."""
    kinds = {"precision": click.Choice(PRECISIONS), "kv_precision": click.Choice(KV_PRECISIONS)}
    kind: Any = kinds.get(param.name or "", _POSITIVE)
    return None if value is None else [kind.convert(item, param, ctx) for item in value.split(",")]


@click.command("tune")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", metavar="FILE", help="Decode these as well (JSONL, as for `bench`), with every block size.")
@click.option("--threads", callback=_several, metavar="N,...", help="Thread counts to try. Default: one a core.")
@click.option("--precision", callback=_several, metavar="P,...", help="To try: f32, bf16. Default: that of `generate`.")
@click.option("--kv-precision", callback=_several, metavar="P,...", help="f32, f16, bf16, u8. Default: all there are.")
@click.option("--drafting", type=click.Choice(get_args(Drafting)), help="Where drafts come from, as for `generate`.")
@click.option("--write", is_flag=True, help="Keep the best settings beside the bundle, for when none are asked for.")
def command(
    bundle: Path,
    prompts: str | None,
    threads: list[int] | None,
    precision: list[str] | None,
    kv_precision: list[str] | None,
    drafting: Drafting | None,
    write: bool,
) -> None:
    """Measure what widths cost on this machine, and find the best settings.

    Tries every combination of what is given that this machine can run. Prints milliseconds by number of
    rows, and how many more a call takes when the one before had another number. Without prompts the settings
    are judged by how an average text would fare. Settings that are not bit-exact are measured and never
    recommended. Ctrl-C prints what was measured so far.
    """
    combinations = _combinations(bundle, threads, precision, kv_precision)
    dataset = load_dataset(prompts).spread(_SAMPLES) if prompts else None
    trials: list[_Trial] = []
    opened: list[Bundle] = []
    interrupted = False
    try:
        for asked in tqdm(combinations, unit="setting", disable=None, leave=False):
            trial, opened[:] = _trial(bundle, dataset, drafting, asked)
            trials.append(trial)
    except KeyboardInterrupt:
        interrupted = True
    if trials:
        click.echo("\n".join(_lines(trials)))
    if interrupted:
        raise KeyboardInterrupt
    if write:
        _write(opened[0], trials)


def _combinations(
    bundle: Path, threads: list[int] | None, precision: list[str] | None, kv_precision: list[str] | None
) -> list[_Asked]:
    manifest = read_manifest(bundle)
    backend, counts = backend_for(manifest), threads or (None,)
    known = backend.precisions()
    wanted = precision or [backend.choose_settings(manifest.graphs["target"].weight_format, None).precision]
    found = [
        (count, products, cache)
        for count, products in product(counts, wanted)
        for cache in known.get(products, ())
        if cache in (kv_precision or known[products])
    ]
    if not found:
        possible = "; ".join(f"{products} with KV {', '.join(caches)}" for products, caches in known.items())
        raise RequestError(f"none of these precisions go together here; possible: {possible}")
    return found


def _trial(
    folder: Path, dataset: Dataset | None, drafting: Drafting | None, asked: _Asked
) -> tuple[_Trial, list[Bundle]]:
    gc.collect()  # one bundle in memory at a time
    threads, precision, kv_precision = asked
    engine = load(folder, threads=threads, precision=precision, kv_precision=kv_precision, proposer=drafting)
    tuning, rates = engine.models.measure(_REPEATS), []
    engine.context.clear()
    if dataset is not None:
        encoder = Encoder(folder, engine.tokenizer)
        prompts = [encoder.encode(sample) for sample in dataset.samples]
        rates = sweep(engine, tqdm(prompts, unit="prompt", disable=None, leave=False), _CONFIGS)
    return _Trial(asked, engine.is_exact, tuning, rates), [engine.bundle]


def _write(bundle: Bundle, trials: Sequence[_Trial]) -> None:
    """Keep every measurement for the next load with the same settings, and the best settings beside the bundle."""
    backend, weights = backend_for(bundle.manifest), bundle.manifest.graphs["target"].weight_format
    for trial in trials:
        write_tuning(tuning_path(bundle, backend.choose_settings(weights, *trial.asked)), trial.tuning)
    chosen = _chosen(trials)
    if chosen is None:
        raise RequestError("nothing was written: none of these settings are bit-exact; add another --kv-precision")
    path = write_recommended(bundle.folder, recommend(bundle, *chosen.asked, chosen.rate))
    click.echo(f"Written to {path}", err=True)


def _chosen(trials: Sequence[_Trial]) -> _Trial | None:
    """The exact settings that are fastest; what was tried earlier stays where the difference could be noise."""
    chosen: _Trial | None = None
    for trial in trials:
        if trial.is_exact and (chosen is None or trial.rate > _CLEARLY * chosen.rate):
            chosen = trial
    return chosen


def _lines(trials: Sequence[_Trial]) -> Iterator[str]:
    rows = sorted({*trials[0].tuning.verify.by_rows, *trials[0].tuning.draft.by_rows})
    costs = [
        (f"{trial.label}, {part}", *(_cell(1e3, x) for x in (*map(seconds.by_rows.get, rows), seconds.change)))
        for trial in trials
        for part, seconds in (("verify", trial.tuning.verify), ("draft", trial.tuning.draft))
        if seconds.by_rows
    ]
    yield from table(("milliseconds by rows", *map(str, rows), "change"), costs)
    if trials[0].rates:
        yield ""
        head = ("tokens/s by block size", "plain", *map(str, _BLOCK_SIZES), "adaptive")
        yield from table(head, ((trial.label, *(_cell(1, rate) for rate in trial.rates)) for trial in trials))
    chosen = _chosen(trials)
    if chosen is None:
        yield "\nrecommended: none of these, because none are bit-exact"
        return
    basis = "measured on the prompts" if chosen.rates else "expected of an average text"
    yield f"\nrecommended: {chosen.label}; {chosen.rate:.1f} tokens/s {basis}"
    yield f"smallest exact row count: {chosen.tuning.minimum_rows}"


def _cell(scale: float, value: float | None) -> str:
    return "" if value is None else f"{scale * value:.2f}"
