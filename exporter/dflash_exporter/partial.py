"""A folder that appears under its name complete or not at all.

Knows how to write beside the final name, swap at the end, and sweep up after exports that were killed. Does not know
what is in the folder.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from dflash_graphs.errors import ExportError


@contextmanager
def partial_folder(output: Path, need: int, marker: str, *, overwrite: bool) -> Iterator[Path]:
    """Lend an empty folder beside `output` that is renamed to `output` when the block ends, removed when it raises.

    `need` is the number of bytes about to be written; `marker` names the file by which a folder that may be
    overwritten is known. Raises ExportError when `output` stands in the way and when writing fails.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _sweep(output)
        _check(output, need, marker, overwrite)
        partial = output.with_name(f"{output.name}.partial-{os.getpid()}")
        partial.mkdir()
        try:
            yield partial
            _swap(partial, output, overwrite)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ExportError(f"Writing {output} failed: {error}. {_space(output, need)}") from error


def _check(output: Path, need: int, marker: str, overwrite: bool) -> None:
    if output.exists() and not overwrite:
        raise ExportError(f"{output} exists already. Choose another name or allow overwriting.")
    if output.exists() and not (output / marker).is_file():
        raise ExportError(f"{output} is not a bundle and is not overwritten. Choose another name.")
    if shutil.disk_usage(output.parent).free < need:
        raise ExportError(f"Not enough space in {output.parent}. {_space(output, need)} Choose another disk.")


def _space(output: Path, need: int) -> str:
    free = shutil.disk_usage(output.parent).free
    return f"The bundle needs {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free there."


def _swap(partial: Path, output: Path, overwrite: bool) -> None:
    replaced = output.with_name(f"{output.name}.replaced-{os.getpid()}")
    if overwrite and output.exists():
        output.rename(replaced)
    try:
        partial.rename(output)
    except BaseException:
        if replaced.exists():
            replaced.rename(output)
        raise
    sync(output.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Force a file or a folder to the disk."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(output: Path) -> None:
    """Remove what killed exports of the same output left; bring back a bundle that was about to be replaced."""
    for kind in ("replaced", "partial"):
        for left in output.parent.glob(f"{escape(output.name)}.{kind}-*"):
            pid = left.name.rpartition("-")[2]
            if not pid.isdigit() or _is_running(int(pid)):
                continue
            if kind == "replaced" and not output.exists():
                left.rename(output)
            else:
                shutil.rmtree(left)


def _is_running(pid: int) -> bool:
    """Whether another process has this number (the own number was some earlier process's, as in a container)."""
    if pid == os.getpid():
        return False
    if os.name == "nt":  # no harmless probe in the standard library
        return True
    try:
        with suppress(PermissionError):  # it runs, as somebody else
            os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True
