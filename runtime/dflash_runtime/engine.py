"""Loads a bundle and generates from it: the entry point for programs that embed the runtime."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import openvino as ov
from dflash_graphs.errors import RequestError

from .bundle import Bundle, open_bundle
from .context import Context
from .device import Settings, choose_settings
from .generation import GenerationConfig, Result
from .loading import default_context, load_models
from .loop import Decoder, Greedy
from .stop import StopStrings
from .tokenizer import Tokenizer
from .width import AdaptiveWidth, Calibration, Costs, FixedWidth, WidthPolicy

__all__ = ["Engine", "GenerationConfig", "Result", "load"]

Prompt = str | Sequence[int]
Progress = Callable[[int, int], None]


class Engine:
    """A loaded bundle, for one request at a time; `cancel` may be called from another thread.

    What a request leaves in the caches serves the next one: only the part of a prompt that is new is computed, and the
    output is bitwise that of a fresh engine.
    """

    def __init__(self, bundle: Bundle, settings: Settings, max_context: int) -> None:
        start = time.perf_counter()
        self.bundle, self.max_context = bundle, max_context
        self.tokenizer = Tokenizer(bundle.folder)
        self.models, tuning = load_models(bundle, settings, max_context)
        self.verify_costs, self.draft_costs = Costs(tuning.verify), Costs(tuning.draft)
        self.context = Context(self.models.target, self.models.proposer)
        self._calibration = Calibration(bundle.manifest.drafter.block_size) if bundle.manifest.drafter else None
        self._busy, self._cancelled = threading.Lock(), threading.Event()
        self.load_seconds = time.perf_counter() - start

    def generate(self, prompt: Prompt, config: GenerationConfig | None = None) -> Result:
        """Run a request to its end."""
        result = Result()
        for _ in self.stream(prompt, config, result):
            pass
        return result

    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        result: Result | None = None,
        progress: Progress | None = None,
    ) -> Iterator[str]:
        """Yield text as it is decided, and fill `result` along the way.

        `progress` gets the prompt tokens done and their total. Closing the iterator early ends the request.
        """
        config, result = config or GenerationConfig(), result if result is not None else Result()
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(ids, config)
        if not self._busy.acquire(blocking=False):
            raise RequestError("the engine is busy with another request; wait for it or load a second engine")
        try:
            yield from self._text(ids, config, result, progress)
        finally:
            self._cancelled.clear()
            self._busy.release()

    def cancel(self) -> None:
        """End the running request after its current round."""
        if self._busy.locked():
            self._cancelled.set()

    def _text(
        self, ids: list[int], config: GenerationConfig, result: Result, progress: Progress | None
    ) -> Iterator[str]:
        """Detokenize, and hold back what could become a stop string."""
        stops = frozenset() if config.ignore_eos else self.tokenizer.stop_token_ids
        detokenizer, matcher = self.tokenizer.stream(), StopStrings(config.stop)
        for tokens in self._tokens(ids, config, stops, result, progress):
            result.token_ids += tokens
            chunk, matched = matcher.feed(detokenizer.push(t for t in tokens if t not in stops))
            result.text += chunk
            if chunk:
                yield chunk
            if matched is not None:
                result.finish_reason = "stop"
                return
        chunk, matched = matcher.feed(detokenizer.flush())
        chunk += "" if matched is not None else matcher.flush()
        result.text += chunk
        if chunk:
            yield chunk

    def _tokens(
        self, ids: list[int], config: GenerationConfig, stops: frozenset[int], result: Result, progress: Progress | None
    ) -> Iterator[Sequence[int]]:
        start = time.perf_counter()
        decoder = Decoder(self.context, self.models.head, self._policy(config), self.models.minimum_rows)
        sampler = Greedy()
        result.prompt_tokens, result.timings.load = len(ids), self.load_seconds
        result.cached_tokens = known = self.context.resume(ids)
        report = None if progress is None else lambda done: progress(known + done, len(ids))
        anchor = decoder.prefill(ids[known:], sampler, report)
        self.context.keep()
        first = time.perf_counter()
        result.timings.first_token = first - start
        result.finish_reason = "stop" if anchor in stops else "length"
        yield [anchor]
        for done in decoder.rounds(anchor, config.max_new_tokens - 1, sampler, stops):
            result.rounds.append(done)
            result.timings.decode = time.perf_counter() - first
            if done.tokens[-1] in stops:
                result.finish_reason = "stop"
            yield done.tokens
            if self._cancelled.is_set():
                result.finish_reason = "cancelled"
                return
        self.context.keep()

    def _policy(self, config: GenerationConfig) -> WidthPolicy:
        if not config.draft or self._calibration is None:
            return FixedWidth(1)
        if config.block_size is not None:
            return FixedWidth(config.block_size)
        return AdaptiveWidth(self._calibration, self.models.minimum_rows, self.verify_costs, self.draft_costs)

    def _check(self, ids: Sequence[int], config: GenerationConfig) -> None:
        config.check()
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        vocabulary = self.bundle.manifest.target.vocab_size
        if bad := [t for t in ids if not 0 <= t < vocabulary]:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary of {vocabulary}")
        if len(ids) + config.max_new_tokens > self.max_context:
            raise RequestError(
                f"{len(ids)} prompt tokens and {config.max_new_tokens} new ones exceed the context of "
                f"{self.max_context}; shorten the prompt or load with a larger max_context"
            )


def load(
    bundle: str | os.PathLike[str],
    *,
    threads: int | None = None,
    max_context: int | None = None,
    precision: str | None = None,
) -> Engine:
    """Open a bundle folder and return an engine.

    `threads` defaults to one per physical core; `max_context` (tokens of prompt and output together) to what a quarter
    of the memory holds, at most 32768; `precision` (f32 or bf16) to what the weights are stored in and the CPU can do.
    """
    opened = open_bundle(bundle)
    settings = choose_settings(ov.Core(), opened.manifest.graphs["target"].weight_format, threads, precision)
    if max_context is not None and max_context < 2:
        raise RequestError(f"max_context must be at least 2, not {max_context}")
    return Engine(opened, settings, max_context or default_context(opened.manifest, settings))
