"""`dflash cache`: what this program keeps in the user's cache folder, and how to make it smaller.

Knows how to print sizes and ages. Downloads are not here: they lie in the Hub's cache, which `hf cache` manages.
"""

import json
import re
import time
from collections.abc import Sequence

import click

from ..bundle import cache_folder
from ..cache import Entry, clear, entries, prune

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def _bytes(text: str) -> int:
    """Read a size such as 500M, 2.5G or 1TB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.upper())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; give a number with K, M, G or T, as in 2.5G.")
    return int(float(match[1]) * _UNITS[match[2]])


@click.group("cache")
def command() -> None:
    """List or shrink what is kept in the cache folder.

    Measurements and checks of bundles; all of it is made again when needed. DFLASH_CACHE names another
    folder.
    """


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_entries(as_json: bool) -> None:
    """List what is kept, the longest unused first."""
    found = entries()
    if as_json:
        rows = [{"path": str(e.path), "kind": e.kind, "size": e.size, "used": e.used} for e in found]
        click.echo(json.dumps(rows, indent=1))
        return
    for entry in found:
        click.echo(f"{entry.kind:<9}{_size(entry.size):>10}  {_age(entry.used):>12}  {entry.path.name}")
    click.echo(f"{_size(sum(entry.size for entry in found))} in {cache_folder()}")


@command.command("prune")
@click.option("--max-size", type=_bytes, metavar="SIZE", required=True, help="What may stay, as in 500M or 2G.")
def prune_entries(max_size: int) -> None:
    """Remove the longest unused entries until the rest is small enough."""
    _report(prune(max_size))


@command.command("clear")
def clear_entries() -> None:
    """Remove everything."""
    _report(clear())


def _report(removed: Sequence[Entry]) -> None:
    click.echo(f"Removed {len(removed)} entries, {_size(sum(entry.size for entry in removed))}.")


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _age(used: float) -> str:
    seconds = max(0.0, time.time() - used)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
