"""Exports that fail half-way: nothing is left behind, and what stood there before stands there still."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_exporter import ExportRequest, export
from dflash_exporter.checkpoint import Checkpoint
from dflash_graphs.errors import CheckpointError, ExportError
from dflash_graphs.manifest import read_manifest

from tests.exporter.checkpoints import listing
from tests.exporter.conftest import Writer


def left_over(request: ExportRequest) -> list[str]:
    return sorted(path.name for path in request.output.parent.glob("*"))


@pytest.mark.parametrize("name", ["layers.3.mlp.up_proj.weight", "embed_tokens.weight"])
def test_nan_in_a_matrix_leaves_nothing(request_: ExportRequest, target: Writer, name: str) -> None:
    damaged = Checkpoint(Path(request_.target)).tensors[name].read()
    damaged[-1, -1] = np.nan
    target(change={name: damaged})
    with pytest.raises(CheckpointError, match=f"{name} holds NaN"):
        export(request_)
    assert left_over(request_) == []


def test_no_space_is_noticed_before_writing(request_: ExportRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(ExportError, match=r"Not enough space in .*needs 0\.07 GB, 0\.00 GB are free"):
        export(request_)
    assert left_over(request_) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(size: str) -> Path:
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True
        ).returncode:
            pytest.skip("needs the right to mount a file system")
        return disk

    yield mount
    subprocess.run(["umount", disk], capture_output=True)


@pytest.mark.parametrize("size", ["100k", "1500k", "5m", "graphs"])  # in the embeddings, the graphs, the small files
def test_disk_that_fills_up_while_writing(
    pair_folder: Path, small_disk: Any, small_bundle: Any, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    if size == "graphs":
        files = [file for file in small_bundle("bf16").rglob("*") if file.name != "tokenizer.json"]
        size = str(sum(file.stat().st_size for file in files) + 65536)
    disk = small_disk(size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, 10**9))  # type: ignore[attr-defined]
    request = ExportRequest(pair_folder / "target", disk / "bundle", pair_folder / "drafter")
    with pytest.raises(ExportError, match=r"Writing .*bundle failed.*GB are free"):
        export(request)
    assert left_over(request) == []


def test_interrupt_leaves_nothing(request_: ExportRequest) -> None:
    def interrupt(part: str, done: int, total: int) -> None:
        assert left_over(request_) == [f"bundle.partial-{os.getpid()}"]
        if part == "drafter":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(request_, interrupt)
    assert left_over(request_) == []


def test_existing_bundle_is_kept_unless_overwriting_succeeds(request_: ExportRequest) -> None:
    bundle = export(request_)
    before = listing(bundle)
    with pytest.raises(ExportError, match="exists already"):
        export(request_)

    def fail(part: str, done: int, total: int) -> None:
        if part == "drafter":
            raise KeyboardInterrupt

    replacing = replace(request_, weight_format="bf16", overwrite=True)
    with pytest.raises(KeyboardInterrupt):
        export(replacing, fail)
    assert listing(bundle) == before
    assert read_manifest(export(replacing)).graphs["target"].weight_format == "bf16"
    assert left_over(request_) == ["bundle"]


def test_only_bundles_are_overwritten(request_: ExportRequest) -> None:
    request_.output.mkdir(parents=True)
    (request_.output / "thesis.txt").write_text("precious")
    with pytest.raises(ExportError, match="is not a bundle"):
        export(replace(request_, overwrite=True))
    assert listing(request_.output).keys() == {"thesis.txt"}


def test_output_that_cannot_be_made(request_: ExportRequest, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=r"Writing .* failed"):
        export(replace(request_, output=tmp_path / "file" / "bundle"))


_KILLED = """
import sys, time
from pathlib import Path
from dflash_exporter import ExportRequest, export

def stall(part, done, total):
    if part == "target":
        print("writing", flush=True)
        time.sleep(600)

export(ExportRequest(sys.argv[1], Path(sys.argv[3]), sys.argv[2], "f32"), stall)
"""


def test_a_killed_export_is_swept_up_by_the_next(request_: ExportRequest) -> None:
    arguments = [str(request_.target), str(request_.drafter), str(request_.output)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, *arguments], stdout=subprocess.PIPE, env=environment
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"writing\n"
        partial = f"bundle.partial-{killed.pid}"
        export(replace(request_, output=request_.output.with_name("other")))
        assert left_over(request_) == [partial, "other"]  # a running export is left alone
        killed.kill()
    assert left_over(request_) == [partial, "other"]
    export(request_)
    assert left_over(request_) == ["bundle", "other"]


def test_a_bundle_whose_replacement_was_cut_short_comes_back(request_: ExportRequest) -> None:
    bundle = export(request_)
    before = listing(bundle)
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    bundle.rename(bundle.with_name(f"bundle.replaced-{int(dead.stdout)}"))
    with pytest.raises(ExportError, match="exists already"):
        export(request_)
    assert listing(bundle) == before
