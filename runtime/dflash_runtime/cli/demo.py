"""`dflash demo`: the built-in pair, exported and decoded with and without its drafter.

Knows what to show of the pair. The prompts are the first of each domain; none is picked.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
from dflash_graphs.errors import DFlashError

from ..bench import Comparison, compare, pooled
from ..engine import Engine, GenerationConfig, load
from ..prompts import BUILT_IN, Dataset, Encoder, Sample
from .export import run_export
from .race import race as side_by_side

_PAIR = BUILT_IN.parent
_RUNS = 4  # the first warms up
_CONFIG = GenerationConfig(max_new_tokens=128)


@click.command("demo")
@click.option("--keep", type=click.Path(path_type=Path), metavar="DIR", help="Write the bundle to DIR and leave it.")
@click.option("--race", is_flag=True, help="Let both write the same answers side by side instead.")
def command(keep: Path | None, race: bool) -> None:
    """Compare plain and DFlash decoding of a small built-in pair.

    The pair knows little; judge exactness and speed by it, not wisdom. Exits with 1 if drafting changed any output.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # Windows keeps mapped files
        bundle = keep or Path(scratch) / "bundle"
        run_export(target=_PAIR / "target", drafter=_PAIR / "drafter", output=bundle, weight_format="f32")
        if race:
            side_by_side(bundle, list(first_prompts().values()))
            return
        engine = load(bundle)
        found = {domain: _runs(engine, domain, prompt) for domain, prompt in first_prompts().items()}
    click.echo("\n".join(_table(found)))
    if not all(run.is_identical for runs in found.values() for run in runs):
        raise DFlashError("drafting changed the output, which it never may; please report it with the table above")


def first_prompts() -> dict[str, str]:
    """Return the first chat prompt of each domain."""
    lines = [json.loads(line) for line in BUILT_IN.read_text("utf-8").splitlines()]
    return {line["domain"]: line["prompt"] for line in reversed(lines) if line["kind"] == "chatml"}


def _runs(engine: Engine, domain: str, prompt: str) -> list[Comparison]:
    click.echo(f"Decoding {domain}", err=True)
    samples = (Sample(domain, (prompt,), is_text=True),) * _RUNS
    encoder = Encoder(engine.bundle.folder, engine.tokenizer)
    return list(compare(engine, Dataset(domain, samples), encoder, _CONFIG))


def _table(found: Mapping[str, Sequence[Comparison]]) -> Iterator[str]:
    yield "domain  tokens  plain tok/s  DFlash tok/s  speed-up  acceptance length  identical"
    drafts = max(r.drafted for runs in found.values() for run in runs for r in run.drafted.rounds)
    figures = {domain: pooled(runs[1:], drafts) for domain, runs in found.items()}
    for domain, of in figures.items():
        yield (
            f"{domain:<6}  {of.tokens // of.requests:>6}  {of.plain_tokens_per_second:>11.1f}"
            f"  {of.tokens_per_second:>12.1f}  {of.speedup:>7.2f}x  {of.acceptance_length:>17.2f}"
            f"  {'yes' if all(run.is_identical for run in found[domain]) else 'NO'}"
        )
    yield "\nsurvival per position: the share of drafts accepted at least that far"
    for domain, of in figures.items():
        yield f"{domain:<6}  {' '.join(f'{share:.2f}' for share in of.survival)}"
