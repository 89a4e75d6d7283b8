"""What a request asks for and what it gets back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_graphs.errors import RequestError

from .loop import Round


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """One request. Greedy unless a temperature is given; None leaves a choice to the engine."""

    max_new_tokens: int = 256
    draft: bool = True  # False: plain decoding, the same tokens one at a time
    block_size: int | None = None  # rows of every verify, anchor included; None: the width policy chooses
    ignore_eos: bool = False
    stop: Sequence[str] = ()  # strings that end the text and are not part of it

    def check(self) -> None:
        """Raise RequestError for values that make no sense."""
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.block_size is not None and not 1 <= self.block_size <= 16:
            raise RequestError(f"block_size must be between 1 and 16, not {self.block_size}")


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
    finish_reason: str | None = None  # stop, length, or cancelled
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
