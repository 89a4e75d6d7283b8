"""`dflash chat`: a conversation in the terminal.

Knows how messages are typed, the commands in between, and what Ctrl-C means when. The conversation is the session's.
Answers go to stdout; prompts, figures and errors to stderr.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from dflash_graphs.errors import DFlashError
from dflash_graphs.manifest import read_manifest

from ..chat import ChatTemplate
from ..engine import Engine, GenerationConfig
from ..session import ChatSession
from .generate import figures
from .options import engine_options, for_template, load_engine, request_options, requested, template_options

_QUOTES = '"""'
_ENDS = {"cancelled": "(stopped)", "length": "(cut short; -n sets how long answers may be)"}
_HELP = f"""\
End a line with \\ to go on in the next one, or put several between {_QUOTES} and {_QUOTES}.
/reset  forget the conversation, but for the system message
/stats  figures of the last answer
/help   this list
/exit   leave, as Ctrl-D does
Ctrl-C stops an answer; what there is of it stays in the conversation."""


@click.command("chat")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--system", metavar="TEXT", help="System message ahead of the conversation.")
@template_options
@request_options
@engine_options
def command(bundle: Path, system: str | None, **options: Any) -> None:
    """Hold a conversation with a bundle.

    Type /help for the commands in between. Options of sampling default to what the bundle recommends.
    """
    template = for_template(options)
    read_manifest(bundle)  # a folder that is no bundle is better told so than blamed for its lack of a template
    ChatTemplate(bundle)  # what is missing is said before the models are loaded
    with contextlib.suppress(ImportError):  # not on Windows; where it is, lines can be edited and recalled
        import readline  # noqa: F401
    engine = load_engine(bundle, options)
    config = replace(requested(engine.defaults, options), template_options=template)
    session = engine.chat(system)
    for message in _messages():
        if message.startswith("/"):
            if message == "/exit":
                break
            click.echo(_obey(message, session), err=True)
        elif message.strip():
            _answer(session, message, config)


def _messages() -> Iterator[str]:
    """Yield what is typed, up to the end of the input; Ctrl-C discards what is being typed."""
    click.echo("Type a message; /help lists what else there is.", err=True)
    while True:
        try:
            yield _read()
        except KeyboardInterrupt:
            click.echo("\n/exit or Ctrl-D to leave", err=True)
        except EOFError:
            click.echo(err=True)
            return


def _read() -> str:
    line = _line("> ")
    if line.startswith(_QUOTES):
        line = line.removeprefix(_QUOTES)
        while not line.endswith(_QUOTES):
            line += "\n" + _line(". ")
        return line.removesuffix(_QUOTES)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + _line(". ")
    return line


def _line(prompt: str) -> str:
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input(prompt)  # edits lines, and needs to know the prompt for that
    click.echo(prompt, nl=False, err=True)
    return input()


def _answer(session: ChatSession, message: str, config: GenerationConfig) -> None:
    try:
        with _stoppable(session.engine):
            for chunk in session.stream(message, config):
                click.echo(chunk, nl=False)
        click.echo()
    except DFlashError as error:  # such as a conversation that outgrew the context
        click.echo(f"Error: {error}", err=True)
    if note := _ENDS.get(session.last.finish_reason or ""):
        click.echo(note, err=True)


@contextlib.contextmanager
def _stoppable(engine: Engine) -> Iterator[None]:
    """Let Ctrl-C end the answer after its current round; an exception would strike anywhere."""
    before = signal.signal(signal.SIGINT, lambda *_: engine.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _obey(message: str, session: ChatSession) -> str:
    if message == "/help":
        return _HELP
    if message == "/stats":
        return _stats(session)
    if message == "/reset":
        session.reset()
        return "The conversation starts anew."
    return f"There is no {message.split()[0]}; /help lists what there is."


def _stats(session: ChatSession) -> str:
    engine, last = session.engine, session.last
    used = len(engine.context.tokens)
    return (
        f"{figures(engine, last)}\n"
        f"{last.prompt_tokens} prompt tokens, {last.cached_tokens} of them kept from before; "
        f"{used} of {engine.max_context} tokens of context in use"
    )
