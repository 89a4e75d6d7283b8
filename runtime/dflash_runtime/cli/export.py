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
import openvino as ov
from dflash_graphs.errors import ExportError
from dflash_graphs.manifest import Int4
from tqdm import tqdm

from ..device import default_format
from ..prompts import Encoder, load_dataset
from ..tokenizer import Tokenizer

_FORMAT = click.Choice(["f32", "bf16", "f16", "int8", "int4"])


@click.command("export")
@click.argument("target")
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--draft", metavar="DRAFTER|none", help="Default: the one published for the target (`dflash models`).")
@click.option("--weight-format", type=_FORMAT, help="Default: bf16 where the CPU has bf16 products, else f16.")
@click.option("--head-format", type=_FORMAT, help="Format of the head; default: as the rest, int8 for int4.")
@click.option("--draft-format", type=_FORMAT, help="Format of the drafter; default: as the rest.")
@click.option("--sym/--asym", "symmetric", default=None, help="int4 without or with zero points; default: without.")
@click.option("--group-size", type=int, help="Columns that share an int4 scale: 128 (default), 64 or 32.")
@click.option("--ratio", type=float, help="Share of the weights that int4 brings to 4 bits; the others have 8.")
@click.option(
    "--dataset",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Texts (a text file, or JSONL with `prompt` or `turns`) for --awq and --scale-estimation.",
)
@click.option("--awq", is_flag=True, default=None, help="int4: scale MLP columns by their activations. See --dataset.")
@click.option("--scale-estimation", is_flag=True, default=None, help="int4: fit scales to activations. See --dataset.")
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
    dataset: Path | None,
    **options: Any,
) -> None:
    """Turn a target and its drafter into a bundle.

    TARGET and DRAFTER are Hub ids or checkpoint folders; OUT is the folder to write, by default named after target and
    format. Prints the path of the bundle.

    \b
    --awq and --scale-estimation look at what the matrices of a target are
    multiplied with. They run an int8 copy of it over 128 windows of 128 tokens
    of the data set. That takes its size on the disk for a while, and twice its
    size in memory beside 1 to 3 GB for the rest; --dry-run says how much.
    """
    options["weight_format"] = options["weight_format"] or default_format(ov.Core())
    output = out or Path(f"{Path(target).name}-DFlash-{options['weight_format']}")
    hub = {"revision": revision, "cache_dir": cache_dir, "token": token, "offline": offline}
    int4 = {name: options.pop(name) for name in ("symmetric", "group_size", "ratio", "awq", "scale_estimation")}
    bundle = run_export(hub, dry_run, dataset, int4, target=target, drafter=draft, output=output, **options)
    if bundle is not None:
        click.echo(bundle)


def run_export(
    hub: dict[str, Any] | None = None,
    dry_run: bool = False,
    dataset: Path | None = None,
    int4: dict[str, Any] | None = None,
    **request: Any,
) -> Path | None:
    """Download and export with progress bars; `request` holds the fields of `dflash_exporter.ExportRequest`.

    Its target and drafter may be Hub ids; drafter "none" exports the target alone, None means the published one.
    `int4` holds the fields of `Int4`, None where an option was not given.
    """
    with _needing_the_extra():
        from dflash_exporter import ExportRequest, export
        from dflash_exporter.estimate import estimate
        from dflash_exporter.hub import HubOptions, resolve
        from dflash_exporter.models import drafter_for

        options = HubOptions(**hub or {})
        drafter = request.pop("drafter") or drafter_for(str(request["target"])).drafter
        wanted = ExportRequest(drafter=None if drafter == "none" else drafter, int4=_int4(int4, dataset), **request)
        planned = estimate(wanted, options)
        if dry_run:
            click.echo("\n".join(planned.lines()))
            return None
        planned.check()
        wanted = replace(wanted, target=resolve(str(wanted.target), options).path)
        if wanted.drafter is not None:
            wanted = replace(wanted, drafter=resolve(str(wanted.drafter), options.at(None)).path)
        if dataset is not None:
            wanted = replace(wanted, calibration=_token_ids(Path(wanted.target), dataset))
        with tqdm(disable=None, unit="B", unit_scale=True, leave=False) as bar:  # None: only on a terminal

            def progress(step: str, done: int, total: int) -> None:
                bar.set_description(step, refresh=False)
                bar.total = total
                bar.update(done - bar.n)

            return export(wanted, progress)


def _int4(options: dict[str, Any] | None, dataset: Path | None) -> Int4 | None:
    given = {name: value for name, value in (options or {}).items() if value is not None}
    if dataset is not None:
        given["dataset"] = dataset.name
    return Int4(**given) if given else None


def _token_ids(checkpoint: Path, dataset: Path) -> list[int]:
    """Return the tokens of a data set, one text after the other, with the tokenizer of a checkpoint."""
    tokenizer = Tokenizer(checkpoint)
    if dataset.suffix != ".jsonl":
        try:
            return tokenizer.encode(dataset.read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise ExportError(f"{dataset} is not UTF-8 text ({error}); give a text file or JSONL.") from error
    encoder = Encoder(checkpoint, tokenizer)
    return [token for sample in load_dataset(str(dataset)).samples for token in encoder.encode(sample)]


@contextmanager
def _needing_the_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is missing; run: pip install 'dflash-openvino[export]'"
        raise ExportError(message) from error
