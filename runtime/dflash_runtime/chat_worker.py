"""Renders untrusted chat templates, as a process of its own which `dflash_runtime.chat` starts by this file's path.

Knows the Jinja dialect of Hugging Face chat templates and the limits of one render. Knows nothing of bundles or models
and imports nothing of the project, so that it starts in well under 0.1 s. Protocol, one JSON object a line: in
`{"template": str, "context": dict, "seconds": float}`, out `{"text": str}` or `{"error": str}`; a process which ends
without an answer ran out of time or crashed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 16 * 2**20  # of rendered text: a prompt of several million tokens
MAX_MEMORY = 2**30  # bytes of address space, where the platform can limit it
_MAX_ERROR = 2000


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's text for training, and only opens a scope when rendering."""

    tags = {"generation"}  # noqa: RUF012 - the attribute of the base class

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Namespace(Namespace):
    """Refuses names which Python itself calls (such as `__html__`), a way around the sandbox."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace cannot hold the private name {name!r}")
        super().__setitem__(name, value)


class _Dict:
    """The `dict` of templates without the type itself, whose unbound methods would pass the sandbox."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    space = _Namespace()
    for name, value in dict(*args, **kwargs).items():
        space[name] = value
    return space


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models never saw.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _namespace,
    }
    return environment.from_string(template)


def render(template: str, context: dict[str, Any]) -> dict[str, str]:
    """One answer of the protocol, within the caller's time and memory limits; never raises for a bad template."""
    try:
        text = _compile(template).render(context)
        if len(text) > MAX_CHARACTERS:
            raise TemplateError(f"the rendered text has {len(text)} characters, more than {MAX_CHARACTERS}")
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"[:_MAX_ERROR]}
    except TemplateError as error:
        return {"error": str(error)[:_MAX_ERROR]}
    except Exception as error:  # a template can raise anything: TypeError, RecursionError, MemoryError, ...
        return {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR]}
    return {"text": text}


def _limit_memory() -> None:
    # Windows has no such module; some systems do not enforce or accept the limit.
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def main() -> None:
    """Answer requests from stdin until it closes, which it does when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts a generation, and is meant for the parent
    _limit_memory()
    with Path(os.devnull).open("w") as nowhere:
        for line in sys.stdin:
            request = json.loads(line)
            # This watchdog is a thread without Python code: it ends even a single long operation such as 9**9**9.
            faulthandler.dump_traceback_later(request["seconds"], exit=True, file=nowhere)
            answer = json.dumps(render(request["template"], request["context"]))
            faulthandler.cancel_dump_traceback_later()
            print(answer, flush=True)


if __name__ == "__main__":
    main()
