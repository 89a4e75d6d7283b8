"""`dflash generate`: one prompt in, its continuation out.

Knows how to phrase a request and how to report its figures. Decoding is the engine's.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from dflash_graphs.manifest import read_manifest

from .. import statistics
from ..chat import ChatTemplate
from ..engine import Engine, GenerationConfig, Result, load

_POSITIVE = click.IntRange(min=1)


@click.command("generate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Put the prompt through the chat template, as the message of a user.")
@click.option("--system", metavar="TEXT", help="System message ahead of it; needs --chat.")
@click.option("-n", "--max-new-tokens", type=_POSITIVE, default=256, show_default=True)
@click.option("--draft/--no-draft", default=True, help="Decode with the drafter, or plainly: the text is the same.")
@click.option("--block-size", type=_POSITIVE, help="Rows of every verify, instead of a choice made each round.")
@click.option("--threads", type=_POSITIVE, help="Default: one per physical core.")
@click.option("--max-context", type=_POSITIVE, help="Tokens of prompt and output together.")
@click.option("--precision", type=click.Choice(["f32", "bf16"]), help="Default: as the weights, where the CPU can.")
@click.option("--ignore-eos", is_flag=True, help="Go on after a stop token.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@click.option("--quiet", is_flag=True, help="No figures on stderr.")
def command(
    bundle: Path,
    prompt: str,
    chat: bool,
    system: str | None,
    threads: int | None,
    max_context: int | None,
    precision: str | None,
    as_json: bool,
    quiet: bool,
    **config: Any,
) -> None:
    """Continue a prompt with a bundle.

    PROMPT is taken as it stands; "-" reads it from stdin.
    """
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat: without a chat template there is no place for it.")
    read_manifest(bundle)  # a folder that is no bundle is better told so than blamed for its lack of a template
    # stdin that is not UTF-8 becomes surrogates, which the tokenizer refuses with a message
    text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if prompt == "-" else prompt
    rendered = _rendered(bundle, text, system) if chat else None
    engine = load(bundle, threads=threads, max_context=max_context, precision=precision)
    request = text if rendered is None else engine.tokenizer.encode(rendered, add_special_tokens=False)
    result = Result()
    for chunk in engine.stream(request, GenerationConfig(**config), result):
        if not as_json:
            click.echo(chunk, nl=False)
    click.echo(json.dumps(_report(engine, result), ensure_ascii=False) if as_json else "")
    if not quiet:
        click.echo(_figures(engine, result), err=True)


def _rendered(bundle: Path, text: str, system: str | None) -> str:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return ChatTemplate(bundle).render(messages)


def _report(engine: Engine, result: Result) -> dict[str, Any]:
    rounds = result.rounds
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "timings": asdict(result.timings) | {"tokens_per_second": result.tokens_per_second},
        "speculation": {
            "rounds": len(rounds),
            "drafted": statistics.drafted(rounds),
            "accepted": statistics.accepted(rounds),
            "acceptance_rate": statistics.acceptance_rate(rounds),
            "acceptance_length": statistics.acceptance_length(rounds),
            "survival": statistics.survival(rounds),
        },
        "settings": asdict(engine.models.settings),
    }


def _figures(engine: Engine, result: Result) -> str:
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(engine.models.settings).items())
    return (
        f"{len(result.token_ids)} tokens, {result.tokens_per_second:.1f} tokens/s, "
        f"first token after {result.timings.first_token:.3f} s, "
        f"acceptance length {statistics.acceptance_length(result.rounds):.2f} ({settings})"
    )
