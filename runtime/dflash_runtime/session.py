"""A conversation: keeps the messages, and lets the engine compute only what is new in each turn."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from dflash_graphs.errors import RequestError

from .engine import Engine
from .generation import GenerationConfig, Result


class ChatSession:
    """Messages and the last result. `options` (tools, enable_thinking, …) go to the chat template each turn."""

    def __init__(self, engine: Engine, system: str | None = None, **options: Any) -> None:
        self.engine, self.options = engine, options
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.last = Result()

    def stream(self, text: str, config: GenerationConfig | None = None) -> Generator[str, None, None]:
        """Say `text` and yield the answer; an answer cut short stays in the conversation as far as it came.

        A message that is refused, for instance because the conversation outgrows the context, is not kept.
        """
        yield from self._answer([*self.messages, {"role": "user", "content": text}], config)

    def say(self, text: str, config: GenerationConfig | None = None) -> Result:
        """Say `text` and return the whole answer."""
        for _ in self.stream(text, config):
            pass
        return self.last

    def regenerate(self, config: GenerationConfig | None = None) -> Result:
        """Answer the last message once more, in place of the last answer."""
        self._expect_answer()
        for _ in self._answer(self.messages[:-1], config):
            pass
        return self.last

    def undo(self) -> str:
        """Take back the last message and its answer; return the message, to be said in other words."""
        self._expect_answer()
        message, _ = self.messages[-2:]
        del self.messages[-2:]
        return str(message["content"])

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def _expect_answer(self) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise RequestError("there is no answer yet; say something first")

    def _answer(self, messages: list[dict[str, Any]], config: GenerationConfig | None) -> Generator[str, None, None]:
        self.last = Result()
        config = config or self.engine.defaults
        config = replace(config, template_options={**self.options, **config.template_options})
        try:
            yield from self.engine.stream(messages, config, self.last)
        finally:
            if self.last.prompt_tokens:  # else the request was refused: as if nothing had been said
                self.messages[:] = [*messages, {"role": "assistant", "content": self.last.text}]
