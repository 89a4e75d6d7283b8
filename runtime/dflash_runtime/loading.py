"""From a bundle to the models that run it: compiles, tests exactness and measures widths unless that is known."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dflash_graphs.errors import BundleError, RequestError
from dflash_graphs.manifest import Manifest
from dflash_graphs.specs import CHUNK

from .backends import Backend, backend_for
from .bundle import Bundle, Embeddings
from .device import Settings
from .lookup import LookupProposer, OverrideProposer
from .memory import physical_memory, releasing_mapped, use_huge_pages
from .models import CachedTarget, Drafter, LanguageModelHead
from .proposers import DFlashProposer
from .protocols import Proposer
from .selftest import largest_difference, smallest_exact_rows
from .tuning import Tuning, measure_costs, read_tuning, tuning_path, write_tuning

Drafting = Literal["dflash", "lookup", "dflash+lookup"]

_KV_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "u8": 1}
_INEXACT_ROWS = 2  # of a verify where no number would make it exact
_OVERRIDING_MATCH = 12  # tokens; what follows so long a match is right four times of five, deep in a block too


@dataclass(frozen=True)
class Models:
    """Everything of a bundle that computes, ready to run on this machine."""

    settings: Settings
    target: CachedTarget
    head: LanguageModelHead
    drafter: Drafter | None
    dflash: DFlashProposer | None
    proposer: Proposer  # `dflash`, prompt lookup or both
    drafting: Drafting  # which of them
    minimum_rows: int  # the fewest rows a verify may have and still be exact
    difference: float  # of logits between row counts, at most; 0: bit-exact

    def measure(self, repeats: int) -> Tuning:
        """Measure every width over twice `repeats` calls or less; leaves target and drafter without context."""
        verify, draft = measure_costs(self.target, self.head, self.dflash, self.minimum_rows, repeats)
        return Tuning(
            settings=self.settings,
            minimum_rows=self.minimum_rows,
            difference=self.difference,
            verify=verify,
            draft=draft,
        )


def load_models(
    bundle: Bundle,
    settings: Settings,
    max_context: int,
    drafting: Drafting | None = None,
    huge_pages: bool | None = None,
) -> tuple[Models, Tuning]:
    """Load a bundle; the first load with given settings also tests and measures, later ones read what was found."""
    drafting = choose_drafting(bundle.manifest, drafting)
    backend, embeddings = backend_for(bundle.manifest), Embeddings(bundle)
    path = tuning_path(bundle, settings)
    tuning = read_tuning(path)
    with releasing_mapped(bundle.folder):
        room = max(max_context, 4 * CHUNK)  # first calls and measuring take some
        exact, target, head, rows, difference = _load_exact(backend, bundle, embeddings, settings, room, tuning)
        drafter, dflash = None, None
        proposer: Proposer = LookupProposer()
        if drafting != "lookup":
            own = _own_settings(backend, bundle, "drafter", exact)
            drafter = Drafter(backend, bundle, embeddings, own, room)
            proposer = dflash = DFlashProposer(drafter, head)
            if drafting == "dflash+lookup":
                proposer = OverrideProposer(dflash, LookupProposer(_OVERRIDING_MATCH))
    if huge_pages is not False:
        use_huge_pages(math.inf if huge_pages else backend.huge_pages_seconds)
    models = Models(exact, target, head, drafter, dflash, proposer, drafting, rows, difference)
    if tuning is None or (dflash is not None and not tuning.draft.by_rows):  # measured without the drafter
        tuning = models.measure(repeats=3)
        write_tuning(path, tuning)
    return models, tuning


def choose_drafting(manifest: Manifest, asked: Drafting | None) -> Drafting:
    """Return what was asked for, by default the bundle's drafter, or prompt lookup in a bundle without one."""
    has_drafter = manifest.drafter is not None
    if asked not in (None, *get_args(Drafting)):
        raise RequestError(f"proposer must be one of {', '.join(get_args(Drafting))}, not {asked!r}")
    if asked not in (None, "lookup") and not has_drafter:
        raise RequestError(f"the bundle has no drafter for {asked}; use lookup, or export it with --draft")
    return asked or ("dflash" if has_drafter else "lookup")


def default_context(manifest: Manifest, settings: Settings) -> int:
    """Tokens of context that fit a quarter of this machine's memory, at most 32768 and the model's own limit."""
    spec = manifest.target
    per_token = 2 * len(spec.attention_layers) * spec.attention.kv_width * _KV_BYTES[settings.kv_precision]
    return max(512, min(32768, spec.max_positions, physical_memory() // 4 // per_token))


def _own_settings(backend: Backend, bundle: Bundle, graph: str, settings: Settings) -> Settings:
    """The settings of a graph that may be stored in another format than the target."""
    return backend.choose_settings(bundle.manifest.graphs[graph].weight_format, settings.threads or None)


def _load_exact(
    backend: Backend,
    bundle: Bundle,
    embeddings: Embeddings,
    settings: Settings,
    max_context: int,
    tuning: Tuning | None,
) -> tuple[Settings, CachedTarget, LanguageModelHead, int, float]:
    """Load target and head; when they fail the exactness self-test, with the backend's next settings."""
    for attempt in (tuning.settings,) if tuning else backend.attempts(settings):
        target = CachedTarget(backend, bundle, embeddings, attempt, max_context)
        own = _own_settings(backend, bundle, "head", attempt)
        head = LanguageModelHead(backend, bundle, own if attempt.quantization_group else own.without_quantization())
        if tuning:
            return attempt, target, head, tuning.minimum_rows, tuning.difference
        vocabulary = bundle.manifest.target.vocab_size
        if not attempt.can_be_exact:
            break
        fewest = backend.fewest_rows(bundle.manifest.graphs["target"].weight_format)
        if rows := smallest_exact_rows(target, head, vocabulary, fewest):
            return attempt, target, head, rows, 0.0
    if not (backend.is_strict and attempt.can_be_exact):
        return attempt, target, head, _INEXACT_ROWS, largest_difference(target, head, vocabulary)
    raise BundleError(
        "on this CPU the result of a row depends on how many rows are computed together, so decoding with and without "
        "drafts could differ; load the bundle with precision f32, or export it in another weight format"
    )
