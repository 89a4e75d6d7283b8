"""`dflash verify`: proof, on this machine, that a bundle decodes with drafts exactly as without.

Knows the options and the report. What is checked, and how, is said in `verify`, `reference` and `quality`.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from dflash_graphs.errors import DFlashError
from dflash_graphs.manifest import Manifest, read_manifest
from tqdm import tqdm

from ..certificate import Certificate, Finding, write_certificate
from ..engine import Engine, load
from ..prompts import BUILT_IN, Encoder, load_dataset
from ..quality import Score, score
from ..reference import Agreement, Reference
from ..verify import certify, draft_independence, kinds_of_drafts, self_tests
from .options import engine_options, load_engine
from .tables import table

_POSITIVE = click.IntRange(min=1)
_FOLDER = click.Path(path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_BUILT_IN_PROMPTS = 4


@dataclass
class _Report:
    """What was found; parts that were not asked for, or not reached, stay None."""

    certificate: Certificate
    reference: list[Agreement] | None = None
    score: Score | None = None
    other: Score | None = None


@click.command("verify")
@click.argument("bundle", type=_FOLDER)
@click.option("--prompts", metavar="FILE", help="JSONL with `prompt` or `turns`; default: four built-in prompts.")
@click.option("--tokens", type=_POSITIVE, default=128, show_default=True, help="Per prompt and kind of drafts.")
@click.option("--certify", "keep", is_flag=True, help="Keep the result in the bundle's folder, for `dflash show`.")
@click.option("--reference", metavar="CHECKPOINT", type=_FOLDER, help="Compare with transformers in f32, too.")
@click.option("--quality", metavar="TEXT", type=_FILE, help="Measure the perplexity of a text file, too.")
@click.option("--against", metavar="BUNDLE", type=_FOLDER, help="Another format of the model, to compare with.")
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    bundle: Path, keep: bool, quality: Path | None, against: Path | None, as_json: bool, **options: Any
) -> None:
    """Prove that drafting changes nothing on this machine.

    Decodes prompts plainly and then with the bundle's drafter, with random drafts, with drafts that are right for a
    while, and with drafts that are always right, at a random width every round. Tokens, every logit and the recurrent
    state must be equal bit for bit. Exits with 1 if anything differs. Ctrl-C prints what was checked so far.
    """
    if against is not None and quality is None:
        raise click.UsageError("--against needs --quality: it compares what both bundles make of a text.")
    manifest = read_manifest(bundle)
    text = None if quality is None else quality.read_text("utf-8")
    report, ids = _prove(bundle, text, **options)
    if not report.certificate.findings:  # interrupted before anything was checked
        raise KeyboardInterrupt
    if against is not None and report.score is not None and text is not None:
        report.other = _other_score(against, text, ids)
    if keep and report.certificate.is_complete:
        write_certificate(bundle, report.certificate)
    click.echo(_json(report) if as_json else "\n".join(_lines(report, manifest)))
    if not report.certificate.is_complete:
        raise KeyboardInterrupt
    if report.certificate.is_exact:
        return
    if report.certificate.settings["kv_precision"] == "u8":
        raise DFlashError("drafting changed the result, as it may with a u8 cache; any other --kv-precision is exact")
    raise DFlashError("drafting changed the result on this machine, which it never may; please report the above")


def _prove(
    bundle: Path,
    text: str | None,
    prompts: str | None,
    tokens: int,
    reference: Path | None,
    **options: Any,
) -> tuple[_Report, Sequence[int]]:
    """Everything that needs this bundle loaded; it is let go before another is."""
    oracle = None if reference is None else Reference(reference)
    engine = load_engine(bundle, options)
    dataset = load_dataset(prompts) if prompts else load_dataset(str(BUILT_IN)).spread(_BUILT_IN_PROMPTS)
    encoder = Encoder(bundle, engine.tokenizer)
    encoded = [(sample.name, encoder.encode(sample)) for sample in dataset.samples]
    findings, is_complete = _check(engine, encoded, tokens)
    report = _Report(certify(engine, dataset.sha256, findings, is_complete))
    if is_complete and oracle is not None:
        report.reference = [oracle.compare(engine, name, ids, tokens) for name, ids in _bar(encoded, "reference")]
    ids = engine.tokenizer.encode(text) if text is not None else []
    if is_complete and text is not None:
        report.score = _score(engine, ids)
    return report, ids


def _check(engine: Engine, prompts: Sequence[tuple[str, list[int]]], tokens: int) -> tuple[list[Finding], bool]:
    """Run all checks; False when Ctrl-C ended them early."""

    def findings() -> Iterator[Finding]:
        yield from self_tests(engine)
        for seed, (name, ids) in enumerate(prompts):
            yield from draft_independence(engine, name, ids, tokens, seed)

    found: list[Finding] = []
    try:
        for finding in _bar(findings(), "checks", 2 + len(prompts) * len(kinds_of_drafts(engine))):
            found.append(finding)
    except KeyboardInterrupt:
        return found, False
    return found, True


def _other_score(bundle: Path, text: str, ids: Sequence[int]) -> Score:
    gc.collect()
    engine = load(bundle)
    if engine.tokenizer.encode(text) != ids:
        raise DFlashError(f"{bundle} has another tokenizer; --against wants the same model in another format")
    return _score(engine, ids)


def _score(engine: Engine, ids: Sequence[int]) -> Score:
    with tqdm(total=len(ids), desc="quality", unit="token", disable=None, leave=False) as bar:
        return score(engine, ids, bar.update)


def _bar(items: Any, what: str, total: int | None = None) -> Any:
    return tqdm(items, desc=what, total=total, disable=None, leave=False, file=sys.stderr)


def _json(report: _Report) -> str:
    found: dict[str, Any] = {"certificate": report.certificate, "reference": report.reference}
    if report.score is not None:
        found["quality"] = {"predictions": len(report.score.choices), "perplexity": report.score.perplexity}
        if report.other is not None:
            found["quality"]["other_perplexity"] = report.other.perplexity
            found["quality"]["top1_agreement"] = report.score.agreement(report.other)
    return msgspec.json.encode(found).decode()


def _lines(report: _Report, manifest: Manifest) -> Iterator[str]:
    certificate = report.certificate
    yield from table(
        ("check", "compared", "draft tokens", "accepted", "state", "first difference"), map(_row, certificate.findings)
    )
    yield f"\nsmallest exact row count: {certificate.smallest_exact_rows or 'none'}"
    yield certificate.summary(manifest)
    formats = {graph.weight_format for graph in manifest.graphs.values()} & {"int8", "int4"}
    if formats and report.score is None:
        yield f"Exact means: as without drafts. What {' and '.join(sorted(formats))} weights cost, --quality measures."
    for judged in report.reference or ():
        first = "none" if judged.first_divergence is None else str(judged.first_divergence)
        margin = "" if judged.top2_margin is None else f" (margin {judged.top2_margin:.4f})"
        kl = f"mean KL {judged.kl_divergence:.2e} nats"
        yield f"reference    prompt {judged.prompt}, {judged.tokens} tokens: first divergence {first}{margin}, {kl}"
    if report.score is not None:
        yield f"perplexity   {report.score.perplexity:.4f} over {len(report.score.choices):,} tokens"
        if report.other is not None:
            agreement = report.score.agreement(report.other)
            yield f"against      {report.other.perplexity:.4f}, same likeliest token {agreement:.2%}"


def _row(one: Finding) -> tuple[str, ...]:
    state = "equal" if one.is_state_equal else "OTHER"
    return one.check, str(one.compared), str(one.draft_tokens), str(one.accepted_tokens), state, _difference(one)


def _difference(found: Finding) -> str:
    if found.first is None:
        return "none"
    where = "" if found.prompt is None else f" of prompt {found.prompt}"
    return f"position {found.first.position}{where}, by {found.first.largest:.3g}, top-2 gap {found.first.top2_gap:.3g}"
