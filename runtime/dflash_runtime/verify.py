"""Proves on this machine that drafting changes nothing.

Knows the models and how to provoke them: hostile drafts, random widths, every alignment. Does not know where prompts
come from or how a report looks. Whether the models compute what their makers meant is another question (`reference`,
`quality`).
"""

import datetime
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

import numpy as np
from dflash_graphs.errors import RequestError
from dflash_graphs.specs import CHUNK, WINDOW
from numpy.typing import NDArray

from .backends import backend_for
from .bundle import bundle_key
from .certificate import Certificate, Finding, merge
from .context import Context
from .engine import Engine
from .loading import Models
from .loop import Decoder, Greedy, Round, Sampler
from .proof import Comparer, Difference, KnowingProposer, RandomWidth, Recorder, comparable_state
from .protocols import Proposer
from .selftest import row_outputs, smallest_exact_rows
from .width import WidthPolicy

_ALIGNED = 4 * CHUNK  # rows of the alignment test: past a chunk of the recurrence and a block of a paged cache


def kinds_of_drafts(engine: Engine) -> tuple[str, ...]:
    """Return what a bundle is tried with: its own drafts, then drafts that are never, partly and always right."""
    return (engine.models.drafting, "random", "adversarial", "true")


def self_tests(engine: Engine) -> Iterator[Finding]:
    """Yield two checks of target and head alone: calls of any number of rows, and calls that begin anywhere."""
    vocabulary = engine.bundle.manifest.target.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, _ALIGNED).tolist()
    engine.context.clear()
    yield _row_counts(engine.models, tokens[:CHUNK])
    yield _alignments(engine.models, tokens)


def draft_independence(engine: Engine, prompt: str, ids: Sequence[int], tokens: int, seed: int) -> Iterator[Finding]:
    """Decode `tokens` tokens after `ids` plainly, then with every kind of draft at random widths; yield a finding each.

    Stop tokens are decoded like any other. Keeps `tokens` rows of logits in memory.
    """
    if (length := len(ids) + tokens) > engine.max_context:
        raise RequestError(f"prompt {prompt} and {tokens} new tokens, {length} in all, exceed {engine.max_context}")
    models, vocabulary = engine.models, engine.bundle.manifest.target.vocab_size
    plain = Recorder()
    truth, _ = _decode(models, None, None, ids, tokens, plain)
    sequence = [*ids, *truth]
    for kind in kinds_of_drafts(engine):
        proposer = models.proposer
        if kind != models.drafting:
            proposer = knowing = KnowingProposer(vocabulary, seed, kind)
            knowing.truth = sequence
        comparer = Comparer(plain.rows)
        found, rounds = _decode(models, proposer, RandomWidth(CHUNK, seed), ids, tokens, comparer)
        yield Finding(
            check=kind,
            prompt=prompt,
            compared=comparer.checked,
            first=comparer.first or _other_token(len(ids), truth, found),
            is_state_equal=_is_state_of(models, [*ids, *found[:-1]]),
            draft_tokens=sum(r.drafted for r in rounds),
            accepted_tokens=sum(r.accepted for r in rounds),
        )
    engine.context.clear()  # it knows nothing of what was decoded here


def certify(engine: Engine, prompts_sha256: str, findings: Sequence[Finding], is_complete: bool) -> Certificate:
    """Put findings together with what they hold for; measures the smallest exact row count."""
    manifest, models = engine.bundle.manifest, engine.models
    backend = backend_for(manifest)
    return Certificate(
        bundle=bundle_key(manifest),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        cpu=backend.cpu_name(),
        platform=platform.platform(),
        versions={name: _version(name) for name in ("dflash-openvino", backend.package, "numpy")},
        settings=asdict(models.settings),
        smallest_exact_rows=smallest_exact_rows(
            models.target,
            models.head,
            manifest.target.vocab_size,
            backend.fewest_rows(manifest.graphs["target"].weight_format),
        ),
        prompts_sha256=prompts_sha256,
        is_complete=is_complete,
        is_exact=bool(findings) and all(f.is_exact for f in findings),
        tokens=sum(f.compared for f in findings if f.prompt is not None),
        findings=merge(findings),
    )


def _row_counts(models: Models, tokens: list[int]) -> Finding:
    """Every row count from the smallest used up to a whole chunk gives the rows of the whole chunk."""
    wide = row_outputs(models.target, models.head, tokens)
    first, counts = None, range(models.minimum_rows, len(tokens))
    for count in counts:
        narrow = row_outputs(models.target, models.head, tokens[:count])
        first = first or _differing_row([out[:count] for out in wide], narrow, 0)
    return Finding(check="row counts", compared=sum(counts), first=first)


def _alignments(models: Models, tokens: list[int]) -> Finding:
    """Calls that begin anywhere give the rows of those that begin at a chunk boundary and fill a window."""
    full = _cut_outputs(models, tokens, WINDOW, WINDOW)
    first, compared = None, 0
    for start in range(1, CHUNK + 1):
        first = first or _differing_row(full, _cut_outputs(models, tokens, start, CHUNK), 0)
        compared += len(tokens)
    return Finding(check="alignments", compared=compared, first=first)


def _cut_outputs(models: Models, tokens: list[int], start: int, step: int) -> list[NDArray[np.float32]]:
    """Outputs of all rows when the first call takes `start` tokens and every later one `step`."""
    target, parts = models.target, []
    target.reset()
    cuts = [0, *range(start, len(tokens), step), len(tokens)]
    for begin, end in pairwise(cuts):
        piece = tokens[begin:end]
        rows = target.verify(piece + [0] * (models.minimum_rows - len(piece)))
        logits = models.head(rows.hidden).copy()
        parts.append([out[: len(piece)].copy() for out in (rows.hidden, rows.features, logits)])
        target.commit(len(piece))
    target.reset()
    return [np.concatenate(outs) for outs in zip(*parts, strict=True)]


def _differing_row(
    expected: Sequence[NDArray[np.float32]], found: Sequence[NDArray[np.float32]], position: int
) -> Difference | None:
    """The first row in which any output differs; the last output holds the logits."""
    equal = np.all([(a == b).all(axis=1) for a, b in zip(expected, found, strict=True)], axis=0)
    if equal.all():
        return None
    row = int(np.argmin(equal))
    logits = expected[-1][row]
    best = np.partition(logits, -2)[-2:]
    return Difference(position + row, float(np.abs(logits - found[-1][row]).max()), float(best[1] - best[0]))


def _decode(
    models: Models,
    proposer: Proposer | None,
    policy: WidthPolicy | None,
    ids: Sequence[int],
    count: int,
    sampler: Sampler,
) -> tuple[list[int], list[Round]]:
    """Emit `count` tokens after `ids` on an empty context."""
    context = Context(models.target, proposer)
    context.clear()
    decoder = Decoder(context, models.head, policy, models.minimum_rows)
    tokens = [decoder.prefill(ids, sampler)]
    rounds = list(decoder.rounds(tokens[0], count - 1, sampler))
    return [*tokens, *(token for this in rounds for token in this.tokens)], rounds


def _is_state_of(models: Models, committed: Sequence[int]) -> bool:
    """Whether the recurrent state is that of a run which saw `committed` and nothing else."""
    warm = comparable_state(models.target)
    context = Context(models.target, None)
    context.clear()
    Decoder(context, models.head, None, models.minimum_rows).prefill(committed, Greedy())
    cold = comparable_state(models.target)
    arrays = zip(warm.arrays, cold.arrays, strict=True)
    return warm.length == cold.length and all(np.array_equal(a, b) for a, b in arrays)


def _other_token(start: int, truth: Sequence[int], found: Sequence[int]) -> Difference | None:
    """The first token that differs though the logits behind it did not."""
    at = next((i for i, (a, b) in enumerate(zip(truth, found, strict=True)) if a != b), None)
    return None if at is None else Difference(start + at, 0.0, 0.0)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources
        return "not installed"
