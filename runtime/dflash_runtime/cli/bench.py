"""`dflash bench`: plain and drafted decoding of the same prompts in one run, and the tables that come of it.

Knows the options and in what order things happen. Figures are made in `bench` and `simulate`, their form in
`bench_report`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from dflash_graphs.errors import DFlashError, RequestError
from dflash_graphs.manifest import Manifest, read_manifest
from tqdm import tqdm

from ..bench import Comparison, compare, peak_memory, warm_up
from ..charts import chart
from ..engine import Engine, GenerationConfig
from ..lookup import BLOCK_SIZE
from ..prompts import Dataset, Encoder, load_dataset
from ..simulate import Width, bundle_work, predict, read_machine, read_profile, roofline, survival_curve
from .bench_report import Report, prediction_json, prediction_lines, report_csv, report_json, report_lines
from .options import engine_options, load_engine

_POSITIVE = click.IntRange(min=1)
_FOLDER = click.Path(path_type=Path)
_REPEATS = 3  # of every width, for the costs that predictions start from


@click.command("bench")
@click.argument("bundle", type=_FOLDER)
@click.option("--dataset", "datasets", multiple=True, metavar="NAME|FILE", help="gsm8k, humaneval, mt-bench or JSONL.")
@click.option("--max-samples", type=_POSITIVE, help="First samples of every data set; default: all.")
@click.option("-n", "--max-new-tokens", type=_POSITIVE, default=128, show_default=True)
@click.option("--block-size", type=_POSITIVE, help="Rows of every verify, instead of a choice made each round.")
@click.option("--thinking/--no-thinking", default=False, help="Let the chat template ask for reasoning.")
@click.option("--ignore-eos", is_flag=True, help="Go on after a stop token.")
@engine_options
@click.option("--simulate", metavar="PROFILE", help="Predict from a survival profile: `article`, or a JSON file.")
@click.option("--machine", type=_FOLDER, help="Predict for a machine described in a JSON file, instead of this one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--csv", "csv_file", type=_FOLDER, metavar="FILE", help="Write a row for every request.")
@click.option("--plot", "plot_file", type=_FOLDER, metavar="FILE", help="Write charts as SVG.")
def command(
    bundle: Path,
    datasets: tuple[str, ...],
    max_samples: int | None,
    simulate: str | None,
    machine: Path | None,
    as_json: bool,
    csv_file: Path | None,
    plot_file: Path | None,
    **options: Any,
) -> None:
    """Measure what drafting gains on sets of prompts.

    Every prompt is decoded plainly and with drafts, in alternating order. Exits with 1 if any two texts differ. Ctrl-C
    prints what was measured so far. With --simulate nothing is decoded: the gain follows from how far drafts survive
    and what each width costs.
    """
    manifest = read_manifest(bundle)
    if simulate is not None:
        _simulate(bundle, manifest, simulate, machine, as_json, plot_file, options)
        return
    if not datasets:
        raise click.UsageError("Give at least one --dataset, or a profile to --simulate.")
    loaded = [load_dataset(source, max_samples) for source in datasets]
    engine, config = load_engine(bundle, options), _config(options)
    found, stop = _measure(engine, loaded, Encoder(bundle, engine.tokenizer, options["thinking"]), config)
    if found:
        costs = _costs(engine, None if stop else _REPEATS)  # after Ctrl-C, nothing more that takes time
        report = Report(engine, config, options["thinking"], found, costs, peak_memory(), stop is None)
        click.echo(report_json(report) if as_json else "\n".join(report_lines(report)))
        _write(report, csv_file, plot_file)
    if stop is not None:
        raise stop
    if engine.is_exact and any(not one.is_identical for one in found):
        raise DFlashError("drafting changed a text, which it never may; `dflash verify` says where")


def _config(options: dict[str, Any]) -> GenerationConfig:
    return GenerationConfig(**{name: options[name] for name in ("max_new_tokens", "block_size", "ignore_eos")})


def _measure(
    engine: Engine, datasets: Sequence[Dataset], encoder: Encoder, config: GenerationConfig
) -> tuple[list[Comparison], BaseException | None]:
    """Decode everything; what ended the run early, if anything did, comes back beside what was measured."""

    def comparisons() -> Iterator[Comparison]:
        warm_up(engine, datasets[0], encoder)
        for dataset in datasets:
            bar.set_description(dataset.name)
            yield from compare(engine, dataset, encoder, config)

    found: list[Comparison] = []
    total = sum(len(sample.turns) for dataset in datasets for sample in dataset.samples)
    with tqdm(total=total, unit="request", disable=None, leave=False) as bar:
        try:
            for comparison in comparisons():
                found.append(comparison)
                bar.update()
        except (KeyboardInterrupt, RequestError) as stop:  # a prompt may be too long
            return found, stop
    return found, None


def _write(report: Report, csv_file: Path | None, plot_file: Path | None) -> None:
    if csv_file is not None:
        csv_file.write_text(report_csv(report), encoding="utf-8")
    if plot_file is not None:
        survival = {name: figures.survival for name, figures in report.by_dataset.items()}
        speedups = {name: figures.speedup for name, figures in report.by_dataset.items()}
        plot_file.write_text(chart(survival, report.widths, speedups), encoding="utf-8")


def _costs(engine: Engine, repeats: int | None) -> tuple[list[float], list[float]]:
    """Seconds of verifying and of drafting 1, 2, … rows: measured now, or without `repeats` as known."""
    models, verify, draft = engine.models, engine.verify_costs, engine.draft_costs
    if repeats is not None:
        verify, draft = models.measure(repeats).costs()
    rows = range(1, (models.dflash.block_size if models.drafting == "dflash" and models.dflash else BLOCK_SIZE) + 1)
    drafting = [0.0 if models.dflash is None else draft.at(n) for n in rows]  # copies cost nothing
    return [verify.at(n) for n in rows], drafting


def _simulate(
    bundle: Path,
    manifest: Manifest,
    profile: str,
    machine: Path | None,
    as_json: bool,
    plot_file: Path | None,
    options: dict[str, Any],
) -> None:
    survival: list[float] = survival_curve(read_profile(profile)).tolist()
    widths = _predicted(bundle, manifest, survival, machine, options)
    click.echo(prediction_json(survival, widths) if as_json else "\n".join(prediction_lines(widths)))
    if plot_file is not None:
        plot_file.write_text(chart({"profile": survival}, widths, {}), encoding="utf-8")


def _predicted(
    bundle: Path, manifest: Manifest, survival: Sequence[float], machine: Path | None, options: dict[str, Any]
) -> list[Width]:
    most = len(survival) + 1
    if machine is None:
        verify, draft = _costs(load_engine(bundle, options), _REPEATS)
        return predict(survival, verify[:most], draft[:most])
    verifying, drafting = bundle_work(manifest)
    described, rows = read_machine(machine), range(1, most + 1)
    return predict(
        survival,
        [roofline(verifying, described, count) for count in rows],
        [roofline(drafting, described, count) for count in rows],
    )
