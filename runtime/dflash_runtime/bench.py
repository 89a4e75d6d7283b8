"""Plain and speculative decoding of the same prompts, side by side, and what the difference is worth.

Knows the engine, requests and figures. Does not know where prompts come from or how a report looks.

Counters are vLLM's: a draft is a round that drafted, the acceptance length counts the bonus token, survival is over all
drafts. Rates are of decoding alone, from the first token on.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

from . import statistics
from .engine import Engine, GenerationConfig, Result
from .prompts import Dataset, Encoder

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Comparison:
    """One request, decoded plainly and with drafts."""

    dataset: str
    request: str
    plain: Result
    drafted: Result

    @property
    def is_identical(self) -> bool:
        return self.plain.token_ids == self.drafted.token_ids


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What drafting did to some requests. Times are in seconds."""

    requests: int
    prompt_tokens: int
    tokens: int
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    cost_saved: float  # share of a token's cost, 1 - 1 / speedup
    acceptance_rate: float
    acceptance_length: float
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    survival: tuple[float, ...]  # by draft position
    conditional_acceptance: tuple[float, ...]  # by draft position, given that it was verified and all before it right
    plain_ttft: float  # time to first token
    ttft: float
    plain_tpot: float  # time per output token after the first
    tpot: float
    differing: int  # requests whose two texts differ: none, ever


def compare(engine: Engine, dataset: Dataset, encoder: Encoder, config: GenerationConfig) -> Iterator[Comparison]:
    """Yield each request of `dataset` once it is decoded both ways, in alternating order.

    A conversation's next turn follows the answer to the one before.
    """
    count = 0
    for sample in dataset.samples:
        answers: list[str] = []
        for turn in range(len(sample.turns)):
            prompt = encoder.encode(sample, answers)
            order = (False, True) if count % 2 == 0 else (True, False)
            results = {draft: _run(engine, prompt, config, draft) for draft in order}
            name = sample.name if len(sample.turns) == 1 else f"{sample.name}/{turn + 1}"
            yield Comparison(dataset.name, name, results[False], results[True])
            answers.append(results[False].text)
            count += 1


def warm_up(engine: Engine, dataset: Dataset, encoder: Encoder) -> None:
    """Decode a few tokens both ways, so that the first request measured is like the others."""
    few = GenerationConfig(max_new_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    for draft in (False, True):
        _run(engine, encoder.encode(dataset.samples[0]), few, draft)


def sweep(engine: Engine, prompts: Iterable[Sequence[int]], configs: Sequence[GenerationConfig]) -> list[float]:
    """Return the tokens per second of each config over all prompts; each prompt meets every config in turn."""
    results: list[list[Result]] = [[] for _ in configs]
    for prompt in prompts:
        for config, found in zip(configs, results, strict=True):
            found.append(_run(engine, prompt, config, config.draft))
    return [1 / tpot if (tpot := _tpot(found)) else 0.0 for found in results]


def pooled(found: Sequence[Comparison], positions: int) -> Figures:
    """Return the figures of all requests taken as one; survival for `positions` draft positions."""
    rounds = [this for one in found for this in one.drafted.rounds]
    plain_tpot, tpot = (_tpot([side(one) for one in found]) for side in _SIDES)
    plain_ttft, ttft = (fmean(side(one).timings.first_token for one in found) for side in _SIDES)
    speedup = plain_tpot / tpot if tpot else 0.0
    return Figures(
        requests=len(found),
        prompt_tokens=sum(one.plain.prompt_tokens for one in found),
        tokens=sum(len(one.drafted.token_ids) for one in found),
        plain_tokens_per_second=1 / plain_tpot if plain_tpot else 0.0,
        tokens_per_second=1 / tpot if tpot else 0.0,
        speedup=speedup,
        cost_saved=1 - 1 / speedup if speedup else 0.0,
        acceptance_rate=statistics.acceptance_rate(rounds),
        acceptance_length=statistics.acceptance_length(rounds),
        drafts=statistics.drafts(rounds),
        draft_tokens=statistics.drafted(rounds),
        accepted_tokens=statistics.accepted(rounds),
        survival=tuple(statistics.survival(rounds, positions)),
        conditional_acceptance=tuple(statistics.conditional_acceptance(rounds, positions)),
        plain_ttft=plain_ttft,
        ttft=ttft,
        plain_tpot=plain_tpot,
        tpot=tpot,
        differing=sum(not one.is_identical for one in found),
    )


def average(parts: Sequence[Figures]) -> Figures:
    """Return figures in which counts add up and everything else is the mean over `parts`, each counting alike."""
    columns: dict[str, Any] = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Figures)}
    return Figures(**{name: _combine(values) for name, values in columns.items()})


def peak_memory() -> int | None:
    """Return the most memory this process ever held, in bytes; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_SIDES: tuple[Callable[[Comparison], Result], ...] = (lambda one: one.plain, lambda one: one.drafted)


def _run(engine: Engine, prompt: Sequence[int], config: GenerationConfig, draft: bool) -> Result:
    engine.context.clear()  # each computes its whole prompt, or the second would owe its first token to the first
    return engine.generate(prompt, replace(config, draft=draft))


def _tpot(results: Sequence[Result]) -> float:
    tokens = sum(len(result.token_ids) - 1 for result in results)
    return sum(result.timings.decode for result in results) / tokens if tokens else 0.0


def _combine(values: Sequence[Any]) -> Any:
    if isinstance(values[0], int):
        return sum(values)
    if isinstance(values[0], tuple):
        return tuple(fmean(column) for column in zip(*values, strict=True))
    return fmean(values)
