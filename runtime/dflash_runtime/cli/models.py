"""`dflash models`: the published pairs and which of them can be exported.

Knows how to print the exporter's table.
"""

import json
from dataclasses import asdict

import click


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def command(as_json: bool) -> None:
    """List published drafters and whether they are supported.

    `dflash export TARGET OUT` takes the drafter of a target from this list.
    """
    from dflash_exporter.models import PAIRS

    if as_json:
        click.echo(json.dumps([asdict(pair) | {"supported": pair.supported} for pair in PAIRS], indent=1))
        return
    targets, drafters = max(len(pair.target) for pair in PAIRS), max(len(pair.drafter) for pair in PAIRS)
    click.echo(f"{'target':<{targets}}  {'drafter':<{drafters}}  {'kind':<7}  block  supported")
    for pair in PAIRS:
        block = pair.block_size or "?"
        verdict = f"no: {pair.obstacle}" if pair.obstacle else "yes"
        click.echo(f"{pair.target:<{targets}}  {pair.drafter:<{drafters}}  {pair.kind:<7}  {block:>5}  {verdict}")
