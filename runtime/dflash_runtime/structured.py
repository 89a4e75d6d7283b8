"""Restricts what is generated to a JSON schema, a regular expression, a grammar or a choice, by means of llguidance.

Knows grammars and which tokens may come next. Does not know logits: the sampler asks for a mask before it chooses a
token and reports the token chosen, so there is never anything to take back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from dflash_graphs.errors import RequestError
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Between the tokens of JSON: nothing, a space or an indented new line. Unbounded, weak models never stop indenting.
_WHITESPACE = r" |\n[ \t]{0,20}"


@dataclass(frozen=True)
class StructuredOutput:
    """The form the output must have.

    `text` is a JSON schema (`{"type": "object"}` for any object), a regular expression in the syntax of Rust's regex
    (its digit class holds every Unicode digit), a grammar (llguidance's Lark dialect or llama.cpp's GBNF, told apart by
    their syntax), or a JSON list of strings.
    """

    kind: Literal["json_schema", "regex", "grammar", "choice"]
    text: str


class Constraint:
    """Follows one output through a grammar. `Grammars.compile` makes them.

    The tokens it lets through spell a text of the grammar and then a stop token; only a length limit can cut it short.
    Where the grammar leaves no choice of text, it lets through the tokenizer's own spelling of it alone.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        """`matcher` has consumed nothing yet; `vocabulary` is the width of the logits."""
        self._initial, self._vocabulary = matcher, vocabulary
        self.reset()

    def reset(self) -> None:
        """Go back to the start of the output."""
        self._matcher = self._initial.deep_copy()

    def mask(self) -> NDArray[np.bool_]:
        """Return what may come next, [vocabulary]; nothing but the stop tokens once the output is complete.

        Raises:
            RequestError: the grammar became too complex to follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)

    def advance(self, token: int) -> None:
        """Take note of a token the mask allowed.

        Raises:
            RequestError: the mask did not allow it, or the grammar became too complex to follow.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if error := self._matcher.get_error():
            raise RequestError(f"the structured output cannot go on ({error}); simplify its schema or grammar")


class Grammars:
    """Compiles constraints for one tokenizer. Takes a second to make for 250,000 tokens, so keep it."""

    def __init__(self, tokenizer_json: str, vocabulary: int, stop_token_ids: Collection[int]) -> None:
        """Read the tokens' spelling from a tokenizer in the JSON form of `tokenizers`, truncation and padding off.

        Args:
            vocabulary: width of the logits; ids past the tokenizer's last are never allowed.
            stop_token_ids: what may follow a complete output.

        Raises:
            RequestError: llguidance is not installed, there is no stop token, or the tokenizer does not fit.
        """
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                "structured output needs llguidance; install it with: pip install 'dflash-openvino[structured]'"
            ) from error
        if not stop_token_ids:
            raise RequestError("structured output needs a stop token, and the bundle's tokenizer declares none")
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer_json, vocabulary, sorted(stop_token_ids))
        except ValueError as error:
            raise RequestError(f"structured output cannot use this tokenizer ({error})") from error
        self._vocabulary = vocabulary

    def compile(self, wanted: StructuredOutput) -> Constraint:
        """Return a constraint at the start of its output.

        Raises:
            RequestError: the schema, expression or grammar is malformed or uses what llguidance does not support.
        """
        from llguidance import LLMatcher, LLParserLimits, grammar_from

        try:
            if wanted.kind == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(wanted.text, {"whitespace_pattern": _WHITESPACE})
            else:
                grammar = grammar_from(wanted.kind, wanted.text)
            limits = LLParserLimits(verbose_errors=False)  # else a runtime error drags the parser's state along
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
            problem = matcher.get_error()
        except ValueError as error:  # from the GBNF and JSON readers
            problem = str(error)
        if problem:
            raise RequestError(f"the {wanted.kind} of the structured output cannot be used: {problem.strip()}")
        return Constraint(matcher, self._vocabulary)
