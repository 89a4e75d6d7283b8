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
from tqdm import tqdm

from .. import statistics
from ..chat import ChatTemplate
from ..engine import Engine, Progress, Result
from .options import engine_options, for_template, load_engine, request_options, requested, template_options


@click.command("generate")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Put the prompt through the chat template, as the message of a user.")
@click.option("--system", metavar="TEXT", help="System message ahead of it; needs --chat.")
@template_options
@request_options
@engine_options
@click.option("--logprobs", type=click.IntRange(min=0), metavar="N", help="Report N likeliest tokens; needs --json.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text.")
@click.option("--quiet", is_flag=True, help="No figures on stderr.")
def command(
    bundle: Path, prompt: str, chat: bool, system: str | None, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Continue a prompt with a bundle.

    PROMPT is taken as it stands; "-" reads it from stdin. Options of sampling default to what the bundle recommends.
    """
    template = for_template(options)
    if (system is not None or template) and not chat:
        raise click.UsageError("Without --chat no chat template is used: there is no place for its options.")
    if options["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json: there is no place for them in the text.")
    read_manifest(bundle)  # a folder that is no bundle is better told so than blamed for its lack of a template
    # stdin that is not UTF-8 becomes surrogates, which the tokenizer refuses with a message
    text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if prompt == "-" else prompt
    rendered = _rendered(bundle, text, system, template) if chat else None
    engine = load_engine(bundle, options)
    request = text if rendered is None else engine.tokenizer.encode(rendered, add_special_tokens=False)
    result = Result()
    for chunk in engine.stream(request, requested(engine.defaults, options), result, _prompt_bar()):
        if not as_json:
            click.echo(chunk, nl=False)
    click.echo(json.dumps(_report(engine, result), ensure_ascii=False) if as_json else "")
    if not quiet:
        click.echo(figures(engine, result), err=True)


def _prompt_bar() -> Progress:
    """A bar for prompts that take more than a second."""
    bar = tqdm(desc="prompt", unit="token", disable=None, leave=False, delay=1)

    def report(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return report


def _rendered(bundle: Path, text: str, system: str | None, template: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return ChatTemplate(bundle).render(messages, **template)


def _report(engine: Engine, result: Result) -> dict[str, Any]:
    rounds = result.rounds
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "logprobs": [asdict(one) for one in result.logprobs],
        "timings": asdict(result.timings) | {"tokens_per_second": result.tokens_per_second},
        "speculation": {
            "rounds": len(rounds),
            "drafted": statistics.drafted(rounds),
            "accepted": statistics.accepted(rounds),
            "acceptance_rate": statistics.acceptance_rate(rounds),
            "acceptance_length": statistics.acceptance_length(rounds),
            "survival": statistics.survival(rounds),
        },
        "is_exact": engine.is_exact,
        "settings": asdict(engine.models.settings),
    }


def figures(engine: Engine, result: Result) -> str:
    """Say in a line how a request went."""
    settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(engine.models.settings).items())
    difference = engine.models.difference
    exact = "" if engine.is_exact else f"; not bit-exact: row counts change logits by up to {difference:.1e}"
    cut = " (as many as were asked for)" if result.finish_reason == "length" else ""
    return (
        f"{len(result.token_ids)} tokens{cut}, {result.tokens_per_second:.1f} tokens/s, "
        f"first token after {result.timings.first_token:.3f} s, "
        f"acceptance length {statistics.acceptance_length(result.rounds):.2f} ({settings}){exact}"
    )
