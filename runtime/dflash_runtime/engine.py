"""Loads a bundle and generates from it: the entry point for programs that embed the runtime."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import openvino as ov
from dflash_graphs.errors import BundleError, RequestError

from .bundle import Bundle, Embeddings, open_bundle
from .device import Settings, choose_settings
from .loop import Decoder, Greedy, Round
from .openvino_models import OpenVinoDrafter, OpenVinoDraftHead, OpenVinoHead, OpenVinoTarget
from .proposers import DFlashProposer
from .selftest import smallest_exact_rows
from .tokenizer import Tokenizer
from .tuning import WIDTHS, Tuning, measure_draft, measure_verify, read_tuning, tuning_path, write_tuning
from .width import AdaptiveWidth, Costs, FixedWidth, WidthPolicy

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """What to generate. `block_size` None lets the width policy choose; 1 or `draft=False` is plain decoding."""

    max_new_tokens: int = 256
    draft: bool = True
    block_size: int | None = None
    ignore_eos: bool = False


@dataclass(kw_only=True)
class Timings:
    """Seconds."""

    load: float = 0.0
    first_token: float = 0.0  # from the request to the first token
    decode: float = 0.0  # from the first token to the last


@dataclass(kw_only=True)
class Result:
    """What a request produced. `rounds` holds every verify after the prefill."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"  # or "stop"
    rounds: list[Round] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round, bonus included."""
        return sum(len(r.tokens) for r in self.rounds) / len(self.rounds) if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode rate after the first token."""
        return (len(self.token_ids) - 1) / self.timings.decode if self.timings.decode else 0.0


class Engine:
    """A loaded bundle, for one request at a time. Not safe to call from two threads at once."""

    def __init__(self, bundle: Bundle, settings: Settings, max_context: int) -> None:
        start = time.perf_counter()
        core = ov.Core()
        self.bundle, self.max_context = bundle, max_context
        self.tokenizer = Tokenizer(bundle.folder)
        embeddings = Embeddings(bundle)
        path = tuning_path(bundle, settings)
        tuning = read_tuning(path)
        self.settings, self._target, self._head, self.minimum_rows = _load_exact(
            core, bundle, embeddings, settings, max_context, tuning
        )
        self._drafter = _load_drafter(core, bundle, embeddings, settings, self._head, max_context)
        if tuning is None:
            tuning = self.measure(repeats=1)
            write_tuning(path, tuning)
        self.verify_costs, self.draft_costs = Costs(tuning.verify), Costs(tuning.draft)
        self.load_seconds = time.perf_counter() - start

    def measure(self, repeats: int) -> Tuning:
        """Measure the cost of every width on an empty context, medians of `repeats` calls; forgets any context."""
        widths = [n for n in WIDTHS if self.minimum_rows <= n <= self._target.max_rows]
        verify = measure_verify(self._target, self._head, widths, repeats)
        spec, draft = self.bundle.manifest.drafter, {}
        if self._drafter is not None and spec is not None:
            draft = measure_draft(self._drafter, spec.feature_width, repeats)
        return Tuning(settings=self.settings, minimum_rows=self.minimum_rows, verify=verify, draft=draft)

    def generate(self, prompt: str | Sequence[int], config: GenerationConfig | None = None) -> Result:
        """Run a request to its end."""
        result = Result(prompt_tokens=0)
        for _ in self.stream(prompt, config, result):
            pass
        return result

    def stream(
        self, prompt: str | Sequence[int], config: GenerationConfig | None = None, result: Result | None = None
    ) -> Iterator[str]:
        """Yield text as it is decided; `result` is filled along the way."""
        config = config or GenerationConfig()
        result = result if result is not None else Result(prompt_tokens=0)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(ids, config)
        result.prompt_tokens, result.timings.load = len(ids), self.load_seconds
        stops = frozenset() if config.ignore_eos else self.tokenizer.stop_token_ids
        text = self.tokenizer.stream()
        for tokens in self._tokens(ids, config, stops, result):
            result.token_ids += tokens
            chunk = text.push([t for t in tokens if t not in stops])
            result.text += chunk
            yield chunk
        chunk = text.flush()
        result.text += chunk
        yield chunk

    def _tokens(
        self, ids: Sequence[int], config: GenerationConfig, stops: frozenset[int], result: Result
    ) -> Iterator[list[int]]:
        proposer = self._drafter if config.draft and config.block_size != 1 else None
        decoder = Decoder(self._target, self._head, proposer, self._policy(config), self.minimum_rows)
        sampler, start = Greedy(), time.perf_counter()
        self._target.reset()
        if self._drafter is not None:
            self._drafter.reset()
        anchor = decoder.prefill(ids, sampler)
        first = time.perf_counter()
        result.timings.first_token = first - start
        yield [anchor]
        if anchor in stops:
            result.finish_reason = "stop"
            return
        for done in decoder.rounds(anchor, config.max_new_tokens - 1, sampler):
            end = next((i + 1 for i, token in enumerate(done.tokens) if token in stops), None)
            result.rounds.append(replace(done, tokens=done.tokens[:end]))
            result.timings.decode = time.perf_counter() - first
            yield list(done.tokens[:end])
            if end is not None:
                result.finish_reason = "stop"
                return

    def _policy(self, config: GenerationConfig) -> WidthPolicy:
        if config.block_size is not None or self._drafter is None:
            return FixedWidth(config.block_size or 1)
        return AdaptiveWidth(self._drafter.block_size, self.minimum_rows, self.verify_costs, self.draft_costs)

    def _check(self, ids: Sequence[int], config: GenerationConfig) -> None:
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        vocabulary = self.bundle.manifest.target.vocab_size
        if bad := [t for t in ids if not 0 <= t < vocabulary]:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary of {vocabulary}")
        if config.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, not {config.max_new_tokens}")
        if len(ids) + config.max_new_tokens > self.max_context:
            raise RequestError(
                f"{len(ids)} prompt tokens and {config.max_new_tokens} new ones exceed the context of "
                f"{self.max_context}; shorten the prompt or load with a larger max_context"
            )


def _load_exact(
    core: ov.Core,
    bundle: Bundle,
    embeddings: Embeddings,
    settings: Settings,
    max_context: int,
    tuning: Tuning | None,
) -> tuple[Settings, OpenVinoTarget, OpenVinoHead, int]:
    """Load target and head; when they fail the exactness self-test, once more without dynamic quantization."""
    attempts = (tuning.settings,) if tuning else (settings, settings.without_quantization())
    for attempt in dict.fromkeys(attempts):
        properties = attempt.properties()
        target = OpenVinoTarget(core, bundle, embeddings, properties, attempt.kv_precision, max_context)
        head = OpenVinoHead(core, bundle, properties)
        vocabulary = bundle.manifest.target.vocab_size
        if rows := tuning.minimum_rows if tuning else smallest_exact_rows(target, head, vocabulary):
            return attempt, target, head, rows
    raise BundleError(
        "on this CPU the result of a row depends on how many rows are computed together, so decoding with and without "
        "drafts could differ; load the bundle with precision f32, or export it in another weight format"
    )


def _load_drafter(
    core: ov.Core, bundle: Bundle, embeddings: Embeddings, settings: Settings, head: OpenVinoHead, max_context: int
) -> DFlashProposer | None:
    if bundle.manifest.drafter is None:
        return None
    own = choose_settings(core, bundle.manifest.graphs["drafter"].weight_format, settings.threads or None)
    drafter = OpenVinoDrafter(core, bundle, embeddings, own.properties(), own.kv_precision, max_context)
    own = choose_settings(core, bundle.manifest.graphs["draft_head"].weight_format, settings.threads or None)
    return DFlashProposer(drafter, OpenVinoDraftHead(core, bundle, own.properties()), head)


def load(
    bundle: str | os.PathLike[str],
    *,
    threads: int | None = None,
    max_context: int | None = None,
    precision: str | None = None,
) -> Engine:
    """Open a bundle folder and return an engine.

    `threads` defaults to one per physical core; `max_context` (tokens of prompt and output together) to 4096 or the
    model's own limit; `precision` (f32 or bf16) to what the weights are stored in and the CPU can do.
    """
    opened = open_bundle(bundle)
    settings = choose_settings(ov.Core(), opened.manifest.graphs["target"].weight_format, threads, precision)
    return Engine(opened, settings, max_context or min(4096, opened.manifest.target.max_positions))
