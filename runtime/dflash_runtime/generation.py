"""What a request asks for and what it gets back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dflash_graphs.errors import RequestError

from . import statistics
from .loop import Round
from .sampling import SamplingConfig, TokenLogprobs
from .structured import StructuredOutput
from .tokenizer import read_json


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(SamplingConfig):
    """One request: how to choose tokens (see `SamplingConfig`; greedy by default) and when to end.

    What concerns drafting changes how long the same text takes, never the text.
    """

    max_new_tokens: int = 256
    ignore_eos: bool = False
    stop: Sequence[str] = ()  # strings that end the text and are not part of it
    truncate: Literal["never", "left"] = "never"  # what to do with a prompt that does not fit the context
    structured: StructuredOutput | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)  # for chat messages: enable_thinking, tools, …
    draft: bool = True  # False: plain decoding, one token a round
    block_size: int | None = None  # rows of every verify, anchor included; None: the width policy chooses

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.block_size is not None and not 1 <= self.block_size <= 16:
            raise RequestError(f"block_size must be from 1 to 16, not {self.block_size}")
        if self.truncate not in ("never", "left"):
            raise RequestError(f"truncate must be never or left, not {self.truncate!r}")


def default_config(folder: Path) -> GenerationConfig:
    """The request the publisher of the model recommends, from the bundle's `generation_config.json`."""
    found: Mapping[str, Any] = read_json(folder / "generation_config.json")
    names = {f.name for f in fields(SamplingConfig)} - {"seed", "logprobs", "logit_bias", "min_new_tokens"}
    options = {name: found[name] for name in names if found.get(name) is not None}
    if not found.get("do_sample", False):
        options = {k: v for k, v in options.items() if k not in ("temperature", "top_k", "top_p", "min_p")}
    elif "temperature" not in options:
        options["temperature"] = 1.0
    return GenerationConfig(**options)


@dataclass(kw_only=True)
class Timings:
    """Seconds."""

    load: float = 0.0
    first_token: float = 0.0  # from the request to its first token
    decode: float = 0.0  # from the first token to the last


@dataclass(kw_only=True)
class Result:
    """What a request produced so far. `rounds` holds every verify after the prefill."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, still in the caches from earlier requests
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: Literal["stop", "length", "cancelled"] | None = None  # None: not finished
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, if asked for
    timings: Timings = field(default_factory=Timings)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round that drafted, bonus included; `statistics` has more figures of `rounds`."""
        return statistics.acceptance_length(self.rounds)

    @property
    def tokens_per_second(self) -> float:
        """Decode rate after the first token."""
        return (len(self.token_ids) - 1) / self.timings.decode if self.timings.decode else 0.0


def stop_ids(config: GenerationConfig, eos: Collection[int]) -> frozenset[int]:
    """The tokens that end this request."""
    return frozenset() if config.ignore_eos else frozenset(eos)
