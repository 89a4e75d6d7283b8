"""Chat messages to prompt text, with the chat template of a bundle.

Knows which template a folder holds and how transformers prepares messages for it. Knows nothing of tokens or models.

A template is a program by whoever published the model. Jinja's sandbox keeps it from the interpreter, but cannot bound
it: one expression (`9**9**9`, a padded format, a recursive macro) takes hours or all memory without yielding, and no
check of the template's form or its loops catches every one. So templates render in a child process under hard limits of
time, memory and output. It stays alive between renders: 0.06 s once, then well below a millisecond each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_graphs.errors import BundleError, RequestError

from dflash_runtime.tokenizer import read_json, read_text, special_tokens

FROZEN_FLAG = "--render-chat-templates"  # starts a frozen app as the worker: it has no interpreter to start

_WORKER = Path(__file__).with_name("chat_worker.py")
# Started by path with the search path of this process: importing the package would load the inference libraries too.
_START = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"
# Names under which programs pass a message's reasoning; templates read the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(RequestError):
    """The chat template is missing or malformed, refused the messages, or exceeded its limits."""


class ChatTemplate:
    """The chat template of a bundle; renders what `apply_chat_template(tokenize=False)` of transformers does."""

    def __init__(self, folder: Path, time_limit: float = 10.0) -> None:
        """Find the template: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.

        Args:
            time_limit: seconds one render may take.

        Raises:
            ChatTemplateError: the folder has no chat template.
            BundleError: a file is damaged.
        """
        self._templates = _load_templates(folder)
        self._special_tokens = special_tokens(folder)
        self._worker = _Worker(time_limit)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The prompt text, special tokens spelled out: encode it with `add_special_tokens=False`.

        Args:
            messages: `{"role": ..., "content": ...}` and whatever else the template reads, as plain JSON data.
            tools: JSON schemas of the functions on offer.
            documents: `{"title": ..., "text": ...}` for templates which cite.
            add_generation_prompt: end with the header of the assistant's turn.
            options: variables of the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: the template refuses the messages, has an error or exceeds its limits.
            RequestError: no messages, or data which is not plain JSON.
        """
        if not messages:
            raise RequestError("there are no messages; pass at least one")
        for name, items in (("messages", messages), ("tools", tools or ()), ("documents", documents or ())):
            if not isinstance(items, Sequence) or not all(isinstance(item, Mapping) for item in items):
                raise RequestError(f"{name} must be a list of objects with named fields")
        context = {
            **self._special_tokens,
            **options,
            "messages": [_prepare(message) for message in messages],
            "tools": tools if tools is None else list(tools),
            "documents": documents if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._worker.render(self._choose(tools), context)

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        for name in ("default",) if tools is None else ("tool_use", "default"):
            if name in self._templates:
                return self._templates[name]
        raise ChatTemplateError(f"no chat template is named 'default', only {sorted(self._templates)}")


class _Worker:
    """One child process which renders one template at a time, started at need and after every failure."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, template: str, context: Mapping[str, Any]) -> str:
        try:
            request = json.dumps({"template": template, "context": context, "seconds": self._time_limit})
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages, tools and options must be plain JSON data: {error}") from error
        with self._lock:
            line = self._ask(request)
        if not line:
            raise ChatTemplateError(
                f"the chat template did not finish within its limits ({self._time_limit:g} s, memory); "
                "if the messages are of ordinary size, the template is faulty or hostile"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ChatTemplateError(f"chat template: {answer['error']}")
        return str(answer["text"])

    def _ask(self, request: str) -> str:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process and self._process.stdin and self._process.stdout
        line = ""
        try:
            print(request, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except OSError:
            pass  # it ended while it was being asked
        finally:
            if not line:  # ended or interrupted: its answer must not reach the next request
                self._stop()
                self._process = None
        return line

    def _start(self) -> None:
        command = [sys.executable, "-I", "-c", _START, str(_WORKER), *sys.path]
        if getattr(sys, "frozen", False):  # the app itself, with a hook as in examples/app_hook.py
            command = [sys.executable, FROZEN_FLAG]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
        self._stop = weakref.finalize(self, _end, self._process)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _load_templates(folder: Path) -> dict[str, str]:
    template = read_text(folder / "chat_template.jinja")
    if template is None:
        template = read_json(folder / "tokenizer_config.json").get("chat_template")
    if not template:
        raise ChatTemplateError(f"{folder} has no chat template; pass a ready-made prompt instead of messages")
    if isinstance(template, str):
        return {"default": template}
    try:
        return {entry["name"]: entry["template"] for entry in template}
    except (KeyError, TypeError) as error:
        raise BundleError(f"chat_template in {folder / 'tokenizer_config.json'} is malformed") from error


def _prepare(message: Mapping[str, Any]) -> dict[str, Any]:
    # As transformers does: a field which is null counts as absent, and reasoning is found under each of its names.
    present = {key: value for key, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}
