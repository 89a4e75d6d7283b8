"""Loads a bundle and generates from it: the entry point for programs that embed the runtime."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from dflash_graphs.errors import RequestError

from .backends import backend_for
from .bundle import Bundle, open_bundle
from .chat import ChatTemplate
from .context import Context
from .device import Settings
from .generation import GenerationConfig, Result, default_config, stop_ids
from .loading import Drafting, default_context, load_models
from .lookup import BLOCK_SIZE
from .loop import Decoder
from .recommended import recommended_here
from .sampling import SpeculativeSampler
from .stop import StopStrings
from .structured import Grammars
from .tokenizer import Tokenizer
from .width import AdaptiveWidth, Calibration, FixedWidth, WidthPolicy

if TYPE_CHECKING:
    from .session import ChatSession

__all__ = ["Engine", "GenerationConfig", "Result", "load"]

Message = Mapping[str, Any]  # as chat templates take it: role, content, …
Prompt = str | Sequence[int] | Sequence[Message]
Progress = Callable[[int, int], None]


class _CancelledError(Exception):
    """Leaves the prefill between two pieces of the prompt."""


class Engine:
    """A loaded bundle, for one request at a time; `cancel` may be called from another thread.

    What a request leaves in the caches serves the next one: only the part of a prompt that is new is computed, and the
    output is bitwise that of a fresh engine.
    """

    def __init__(
        self,
        bundle: Bundle,
        settings: Settings,
        max_context: int,
        proposer: Drafting | None = None,
        huge_pages: bool | None = None,
    ) -> None:
        start = time.perf_counter()
        self.bundle, self.max_context = bundle, max_context
        self.tokenizer, self.defaults = Tokenizer(bundle.folder), default_config(bundle.folder)
        self.models, tuning = load_models(bundle, settings, max_context, proposer, huge_pages)
        self.verify_costs, self.draft_costs = tuning.costs()
        self.context = Context(self.models.target, self.models.proposer)
        drafter = bundle.manifest.drafter
        self._widths = AdaptiveWidth(
            Calibration(drafter.block_size if drafter else BLOCK_SIZE),
            Calibration(BLOCK_SIZE),
            self.verify_costs,
            self.draft_costs,
        )
        self._busy, self._cancelled = threading.Lock(), threading.Event()
        self.load_seconds = time.perf_counter() - start

    @property
    def is_exact(self) -> bool:
        """Whether drafts cannot change a bit of any logit; if not, `models.difference` says by how much they can."""
        return self.models.difference == 0.0 and self.models.settings.can_be_exact

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The bundle's chat template; raises ChatTemplateError when it has none."""
        return ChatTemplate(self.bundle.folder)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer.to_json(), self.bundle.manifest.target.vocab_size, self.tokenizer.stop_token_ids)

    def generate(self, prompt: Prompt, config: GenerationConfig | None = None) -> Result:
        """Run a request to its end. `config` defaults to `defaults`, what the model's publisher recommends."""
        result = Result()
        for _ in self.stream(prompt, config, result):
            pass
        return result

    def generate_several(self, prompt: Prompt, count: int, config: GenerationConfig | None = None) -> list[Result]:
        """Run a request `count` times, one after the other, with seeds counting up from the given one."""
        config = config or self.defaults
        seeds = [None if config.seed is None else config.seed + i for i in range(count)]
        return [self.generate(prompt, replace(config, seed=seed)) for seed in seeds]

    def stream(
        self,
        prompt: Prompt,
        config: GenerationConfig | None = None,
        result: Result | None = None,
        progress: Progress | None = None,
    ) -> Generator[str, None, None]:
        """Yield text as it is decided, and fill `result` along the way.

        `prompt` is ready-made text, token ids, or chat messages. `progress` gets the prompt tokens done and their
        total. Closing the iterator early ends the request; the engine can be used again at once.
        """
        config, result = config or self.defaults, result if result is not None else Result()
        ids = self._fit(self.encode(prompt, **config.template_options), config)
        if not self._busy.acquire(blocking=False):
            raise RequestError("the engine is busy with another request; wait for it or load a second engine")
        try:
            yield from self._text(ids, config, result, progress)
        except GeneratorExit:  # closed between two rounds
            raise
        except BaseException:  # an interrupt may have struck in the middle of a commit
            self.context.clear()
            raise
        finally:
            self._cancelled.clear()
            self._busy.release()

    def cancel(self) -> None:
        """End the running request after its current round, or its current piece of the prompt."""
        if self._busy.locked():
            self._cancelled.set()

    def chat(self, system: str | None = None, **options: Any) -> ChatSession:
        """Return a new conversation; `options` as for `encode`."""
        from .session import ChatSession

        return ChatSession(self, system, **options)

    def encode(self, prompt: Prompt, /, **options: Any) -> list[int]:
        """Return the ids of a prompt; `options` (tools, enable_thinking, …) go to the chat template of messages."""
        if prompt and isinstance(prompt[0], Mapping):
            text = self.chat_template.render(cast(Sequence[Message], prompt), **options)
            return self.tokenizer.encode(text, add_special_tokens=False)
        if options:
            raise RequestError(f"{', '.join(options)}: options of a chat template need a prompt of messages")
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(cast(Sequence[int], prompt))

    def _text(
        self, ids: list[int], config: GenerationConfig, result: Result, progress: Progress | None
    ) -> Iterator[str]:
        """Detokenize, and hold back what could become a stop string."""
        stops = stop_ids(config, self.tokenizer.stop_token_ids)
        detokenizer, matcher, matched = self.tokenizer.stream(), StopStrings(config.stop), None
        for tokens in self._tokens(ids, config, stops, result, progress):
            result.token_ids += tokens
            chunk, matched = matcher.feed(detokenizer.push(t for t in tokens if t not in stops))
            result.text += chunk
            if chunk:
                yield chunk
            if matched is not None:
                break
        if matched is None:
            chunk, matched = matcher.feed(detokenizer.flush())
            chunk += "" if matched is not None else matcher.flush()
            result.text += chunk
            if chunk:
                yield chunk
        if matched is not None:
            result.finish_reason = "stop"

    def _tokens(
        self, ids: list[int], config: GenerationConfig, stops: frozenset[int], result: Result, progress: Progress | None
    ) -> Iterator[Sequence[int]]:
        start = time.perf_counter()
        sampler = self._sampler(ids, config)
        decoder = Decoder(self.context, self.models.head, self._policy(config), self.models.minimum_rows)
        result.prompt_tokens, result.timings.load = len(ids), self.load_seconds
        result.cached_tokens = known = self.context.resume(ids)

        def report(done: int) -> None:
            if progress is not None:
                progress(known + done, len(ids))
            if self._cancelled.is_set():
                raise _CancelledError

        try:
            anchor = decoder.prefill(ids[known:], sampler, report)
        except _CancelledError:
            result.finish_reason = "cancelled"
            return
        first = time.perf_counter()
        result.timings.first_token = first - start
        result.logprobs = sampler.logprobs[:1]
        yield [anchor]
        for done in decoder.rounds(anchor, config.max_new_tokens - 1, sampler, stops):
            anchor = done.tokens[-1]
            result.rounds.append(done)
            result.timings.decode = time.perf_counter() - first
            result.logprobs = sampler.logprobs[: len(result.token_ids) + len(done.tokens)]
            yield done.tokens
            if self._cancelled.is_set():
                result.finish_reason = "cancelled"
                return
        result.finish_reason = "stop" if anchor in stops else "length"
        self.context.keep()

    def _sampler(self, ids: Sequence[int], config: GenerationConfig) -> SpeculativeSampler:
        constraint = self._grammars.compile(config.structured) if config.structured is not None else None
        vocabulary = self.bundle.manifest.target.vocab_size
        sampler = SpeculativeSampler(config, vocabulary, self.tokenizer.stop_token_ids, constraint)
        sampler.start(ids)
        return sampler

    def _policy(self, config: GenerationConfig) -> WidthPolicy | None:
        if not config.draft:
            return None
        if config.block_size is not None:
            return FixedWidth(config.block_size)
        self._widths.new_text()
        return self._widths

    def _fit(self, ids: list[int], config: GenerationConfig) -> list[int]:
        """Check the prompt, and cut it where the request says so."""
        vocabulary = self.bundle.manifest.target.vocab_size
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        if bad := [t for t in ids if not 0 <= t < vocabulary]:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary of {vocabulary}")
        room = self.max_context - config.max_new_tokens
        if len(ids) > room and (config.truncate == "never" or room < 1):
            raise RequestError(
                f"{len(ids)} prompt tokens and {config.max_new_tokens} new ones exceed the context of "
                f"{self.max_context}; shorten the prompt, load with a larger max_context, or use truncate=left"
            )
        return ids[-room:]


def load(
    bundle: str | os.PathLike[str],
    *,
    device: str = "CPU",
    threads: int | None = None,
    max_context: int | None = None,
    precision: str | None = None,
    kv_precision: str | None = None,
    proposer: Drafting | None = None,
    huge_pages: bool | None = None,
) -> Engine:
    """Open a bundle folder and return an engine.

    `device` must be CPU; `threads` defaults to one per physical core; `max_context` (tokens of prompt and output
    together) to what a quarter of the memory holds, at most 32768; `precision` (f32 or bf16) to what the weights are
    stored in and the CPU can do; `kv_precision` (f32, f16 or bf16) to the same, and u8 saves memory at the price of
    results that are not bit-exact; `proposer` to the bundle's drafter ("dflash"), in a bundle without one to copies of
    what followed earlier in the text ("lookup"). "dflash+lookup" lets long copies override the drafter. `huge_pages`
    moves the weights to huge pages (Linux 6.1 and later), which takes from a tenth of a second to some seconds per GB;
    left out, a load for ONNX Runtime spends up to 2 seconds on it, one for OpenVINO none.

    Where `threads` and both precisions are left out, those that `dflash tune --write` found on this machine count.
    """
    if device != "CPU":
        raise RequestError(f"device {device!r} is not supported; this runtime is exact on CPU only")
    opened = open_bundle(bundle)
    target = opened.manifest.graphs["target"]
    if (threads, precision, kv_precision) == (None, None, None) and (tuned := recommended_here(opened)) is not None:
        threads, precision, kv_precision = tuned.threads, tuned.precision, tuned.kv_precision
    settings = backend_for(opened.manifest).choose_settings(target.weight_format, threads, precision, kv_precision)
    if max_context is not None and max_context < 2:
        raise RequestError(f"max_context must be at least 2, not {max_context}")
    context = max_context or default_context(opened.manifest, settings)
    return Engine(opened, settings, context, proposer, huge_pages)
