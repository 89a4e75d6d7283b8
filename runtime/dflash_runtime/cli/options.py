"""Options that several commands share: how to load a bundle, and what to ask of it.

Knows the names of the options and where their values belong. Options not given stay what the bundle recommends.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import click
from dflash_graphs.errors import RequestError

from ..engine import Engine, GenerationConfig, load
from ..loading import Drafting
from ..structured import StructuredOutput

_Command = TypeVar("_Command", bound=Callable[..., Any])
_POSITIVE = click.IntRange(min=1)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

_FORMS: tuple[Literal["json_schema", "regex", "grammar"], ...] = ("json_schema", "regex", "grammar")
PRECISIONS = ("f32", "bf16")
KV_PRECISIONS = ("f32", "f16", "bf16", "u8")

_SETTINGS = ("threads", "max_context", "precision", "kv_precision", "huge_pages")
_LOADING = (
    click.option("--threads", type=_POSITIVE, help="Default: one per physical core."),
    click.option("--max-context", type=_POSITIVE, help="Tokens of prompt and output together."),
    click.option("--precision", type=click.Choice(PRECISIONS), help="Default: as the weights, where the CPU can."),
    click.option(
        "--kv-precision",
        type=click.Choice(KV_PRECISIONS),
        help="Of the key/value cache. Default: the precision. u8 saves memory, and is not bit-exact.",
    ),
    click.option(
        "--drafting",
        type=click.Choice(get_args(Drafting)),
        help="Where drafts come from: the drafter, copies of earlier text, or both. Default: the drafter, if any.",
    ),
    click.option(
        "--huge-pages/--no-huge-pages",
        default=None,
        help="Move weights to huge pages: a longer load, a faster run. Default: with ONNX Runtime, for up to 2 s.",
    ),
)
_TEMPLATE = (
    click.option("--thinking/--no-thinking", default=None, help="The chat template's switch for reasoning."),
    click.option(
        "--template-option",
        "template_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="A variable of the chat template; VALUE is JSON, or else a text.",
    ),
)
_REQUEST = (
    click.option("-n", "--max-new-tokens", type=_POSITIVE, help=f"Default: {GenerationConfig.max_new_tokens}."),
    click.option("--min-new-tokens", type=click.IntRange(min=0), help="No stop token before so many."),
    click.option("--temperature", type=float, help="0 takes the likeliest token."),
    click.option("--top-k", type=int, help="Keep the K likeliest tokens; 0 keeps all."),
    click.option("--top-p", type=float, help="Keep the fewest tokens that reach this probability together."),
    click.option("--min-p", type=float, help="Keep tokens at least this fraction as likely as the likeliest."),
    click.option("--repetition-penalty", type=float, help="Divides the logits of tokens in prompt or output."),
    click.option("--presence-penalty", type=float, help="Subtracted from the logits of tokens in the output."),
    click.option("--frequency-penalty", type=float, help="Subtracted once for every time in the output."),
    click.option("--seed", type=int, help="Same seed, same text. Default: a random one."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."),
    click.option("--json-schema", type=_FILE, metavar="FILE", help="Answer with JSON of this schema."),
    click.option("--regex", metavar="PATTERN", help="Answer with a text this matches."),
    click.option("--grammar", type=_FILE, metavar="FILE", help="Answer with a text of this grammar: Lark or GBNF."),
    click.option("--truncate", type=click.Choice(["never", "left"]), help="What to do with a prompt too long."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on after a stop token."),
    click.option("--draft/--no-draft", default=None, help="Decode with drafts, or plainly: the text is the same."),
    click.option("--block-size", type=_POSITIVE, help="Rows of every verify, instead of a choice made each round."),
)


def engine_options(command: _Command) -> _Command:
    """Give a command the options of `load_engine`; they arrive among those of the request."""
    return _with(_LOADING, command)


def request_options(command: _Command) -> _Command:
    """Give a command the options of `requested`."""
    return _with(_REQUEST, command)


def template_options(command: _Command) -> _Command:
    """Give a command the options of `for_template`."""
    return _with(_TEMPLATE, command)


def for_template(options: dict[str, Any]) -> dict[str, Any]:
    """Take the chat template's variables out of `options`."""
    thinking = options.pop("thinking")
    found: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    for assignment in options.pop("template_options"):
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--template-option wants NAME=VALUE, not {assignment!r}.")
        found[name] = value
        with suppress(ValueError):
            found[name] = json.loads(value)
    return found


def load_engine(bundle: Path, options: dict[str, Any]) -> Engine:
    """Load a bundle as `options` say, and take what was used out of them."""
    if sys.stderr.isatty():
        click.echo("Loading; the first time also measures …", err=True)
    settings = {name: options.pop(name) for name in _SETTINGS}
    return load(bundle, proposer=options.pop("drafting"), **settings)


def requested(defaults: GenerationConfig, options: dict[str, Any]) -> GenerationConfig:
    """Return `defaults` with the options given.

    Raises:
        RequestError: an option is out of range, or two of them contradict each other.
    """
    names = {field.name for field in fields(GenerationConfig)}
    given = {name: value for name, value in options.items() if name in names and value not in (None, ())}
    forms = [
        StructuredOutput(kind, value if isinstance(value, str) else value.read_text("utf-8"))
        for kind in _FORMS
        if (value := options[kind]) is not None
    ]
    if len(forms) > 1:
        raise RequestError("--json-schema, --regex and --grammar cannot be met together; give one of them")
    if forms:
        given["structured"] = forms[0]
    return replace(defaults, **given)


def _with(options: Sequence[Callable[[_Command], _Command]], command: _Command) -> _Command:
    for option in reversed(options):  # click lists the last one applied first
        command = option(command)
    return command
