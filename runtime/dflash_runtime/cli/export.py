"""`dflash export`: a checkpoint pair in, a bundle out.

Knows the options and the progress bar. The exporter is an extra: it is imported when the command runs, and where one of
its packages is missing this says how to get it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from dflash_graphs.errors import ExportError
from tqdm import tqdm

_FORMAT = click.Choice(["f32", "bf16", "f16", "int8", "int4"])


@click.command("export")
@click.argument("target")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--draft", metavar="DRAFTER|none", help="Default: the one published for the target (`dflash models`).")
@click.option("--weight-format", type=_FORMAT, default="bf16", show_default=True)
@click.option("--head-format", type=_FORMAT, help="Format of the head; default: as the rest, int8 for int4.")
@click.option("--draft-format", type=_FORMAT, help="Format of the drafter; default: as the rest.")
@click.option("--max-context", "capacity", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens.")
@click.option("--backend", type=click.Choice(["openvino", "onnx"]), default="openvino", show_default=True)
@click.option("--force", "overwrite", is_flag=True, help="Replace OUT if it exists.")
@click.option("--dry-run", is_flag=True, help="Print sizes and needs; download and write nothing.")
@click.option("--revision", help="Branch, tag or commit of the target; pin a drafter with --draft owner/name@REV.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Where downloads go; default: the Hub's own cache.")
@click.option("--token", help="Hub token for gated repositories; default: that of `hf auth login`.")
@click.option("--offline", is_flag=True, help="Use what was downloaded before.")
def command(
    target: str,
    out: Path | None,
    draft: str | None,
    dry_run: bool,
    revision: str | None,
    cache_dir: Path | None,
    token: str | None,
    offline: bool,
    **options: Any,
) -> None:
    """Turn a target and its drafter into a bundle.

    TARGET and DRAFTER are Hub ids or checkpoint folders; OUT is the folder to write, by default named after target and
    format. Prints the path of the bundle.
    """
    output = out or Path(f"{Path(target).name}-DFlash-{options['weight_format']}")
    hub = {"revision": revision, "cache_dir": cache_dir, "token": token, "offline": offline}
    bundle = run_export(hub, dry_run, target=target, drafter=draft, output=output, **options)
    if bundle is not None:
        click.echo(bundle)


def run_export(hub: dict[str, Any] | None = None, dry_run: bool = False, **request: Any) -> Path | None:
    """Download and export with progress bars; `request` holds the fields of `dflash_exporter.ExportRequest`.

    Its target and drafter may be Hub ids; drafter "none" exports the target alone, None means the published one.
    """
    with _needing_the_extra():
        from dflash_exporter import ExportRequest, export
        from dflash_exporter.estimate import estimate
        from dflash_exporter.hub import HubOptions, resolve
        from dflash_exporter.models import drafter_for

        options = HubOptions(**hub or {})
        drafter = request.pop("drafter") or drafter_for(str(request["target"])).drafter
        wanted = ExportRequest(drafter=None if drafter == "none" else drafter, **request)
        planned = estimate(wanted, options)
        if dry_run:
            click.echo("\n".join(planned.lines()))
            return None
        planned.check()
        wanted = replace(wanted, target=resolve(str(wanted.target), options).path)
        if wanted.drafter is not None:
            wanted = replace(wanted, drafter=resolve(str(wanted.drafter), options.at(None)).path)
        with tqdm(disable=None, unit="B", unit_scale=True, leave=False) as bar:  # None: only on a terminal

            def progress(step: str, done: int, total: int) -> None:
                bar.set_description(step, refresh=False)
                bar.total = total
                bar.update(done - bar.n)

            return export(wanted, progress)


@contextmanager
def _needing_the_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is missing; run: pip install 'dflash-openvino[export]'"
        raise ExportError(message) from error
