"""`dflash export`: a checkpoint pair in, a bundle out.

Knows the options and the progress bar. The exporter is an extra: it is imported when the command runs, and where one of
its packages is missing this says how to get it.
"""

from pathlib import Path
from typing import Any

import click
from dflash_graphs.errors import ExportError
from tqdm import tqdm

_FORMAT = click.Choice(["f32", "bf16", "f16", "int8", "int4"])


@click.command("export")
@click.argument("target")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--draft", required=True, metavar="DRAFTER|none", help="The drafter trained for the target.")
@click.option("--weight-format", type=_FORMAT, default="bf16", show_default=True)
@click.option("--head-format", type=_FORMAT, help="Format of the head; default: as the rest, int8 for int4.")
@click.option("--draft-format", type=_FORMAT, help="Format of the drafter; default: as the rest.")
@click.option("--max-context", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
def command(
    target: str,
    out: Path,
    draft: str,
    weight_format: str,
    head_format: str | None,
    draft_format: str | None,
    max_context: int,
    force: bool,
) -> None:
    """Turn a target and its drafter into a bundle.

    TARGET and DRAFTER are checkpoint folders; OUT is the folder to write. Prints the path of the bundle.
    """
    bundle = run_export(
        target=target,
        output=out,
        drafter=None if draft == "none" else draft,
        weight_format=weight_format,
        head_format=head_format,
        draft_format=draft_format,
        capacity=max_context,
        overwrite=force,
    )
    click.echo(bundle)


def run_export(**request: Any) -> Path:
    """Export with a progress bar; `request` holds the fields of `dflash_exporter.ExportRequest`."""
    try:
        from dflash_exporter import ExportRequest, export

        with tqdm(disable=None, unit="B", unit_scale=True, leave=False) as bar:  # None: only on a terminal

            def progress(step: str, done: int, total: int) -> None:
                bar.set_description(step, refresh=False)
                bar.total = total
                bar.update(done - bar.n)

            return export(ExportRequest(**request), progress)
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is missing; run: pip install 'dflash-openvino[export]'"
        raise ExportError(message) from error
