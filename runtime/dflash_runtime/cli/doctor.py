"""`dflash doctor`: what this machine can do, and whether something is wrong with it.

Knows how to print findings.
"""

import json
from dataclasses import asdict
from pathlib import Path

import click

from ..doctor import examine


@click.command("doctor")
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@click.option("--max-context", type=click.IntRange(min=1), help="Tokens for which BUNDLE should fit in memory.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.pass_context
def command(ctx: click.Context, bundle: Path | None, max_context: int | None, as_json: bool) -> None:
    """Examine this machine: CPU, kernels, precision, memory.

    With BUNDLE, also whether it fits in memory. Exits with 1 when something is broken.
    """
    findings = []
    for finding in examine(bundle, max_context):
        findings.append(finding)
        if not as_json:
            advice = f"\n{'':<23}{finding.advice}" if finding.advice else ""
            click.echo(f"{finding.state:<7}  {finding.name:<12}  {finding.text}{advice}")
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    if any(finding.state == "broken" for finding in findings):
        ctx.exit(1)
