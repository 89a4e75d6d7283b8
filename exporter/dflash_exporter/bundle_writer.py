"""Writing a bundle: graphs, embeddings, tokenizer files, manifest.

Knows the order of things and what a bundle contains. Does not know configurations or weight formats (`plan`).
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from dflash_graphs.manifest import EMBEDDINGS, MANIFEST, File, Graph, Manifest, Source
from dflash_graphs.weights import Array

from .calibration import record
from .data_aware import compress_layers, recorded
from .partial import partial_folder, sync
from .plan import COPIED, ExportRequest, Part, Plan, make_plan

Progress = Callable[[str, int, int], None]
_OTHER_FILES = 64 << 20  # bytes allowed for graphs without weights, tokenizer files, the manifest


def export(request: ExportRequest, progress: Progress | None = None) -> Path:
    """Write the bundle `request.output` and return its path.

    `progress(part, done, total)` is told bytes written so far and in all. Memory stays below 1 GB whatever the size of
    the pair; the disk needs the size of the bundle. Nothing is left under the final name unless all is well.
    Raises CheckpointError and UnsupportedError for the checkpoints, ExportError for the request and the disk.
    """
    plan = make_plan(request)
    total = plan.embeddings.nbytes + sum(part.weights.nbytes for part in plan.parts)
    output = Path(request.output).absolute()
    with partial_folder(output, total + plan.copy + _OTHER_FILES, MANIFEST, overwrite=request.overwrite) as folder:
        meter = _Meter(progress, total)
        _write_embeddings(plan, folder, meter)
        compressed = {"target": _data_aware(plan, folder, meter)}
        written = {part.name: _write_graph(part, folder, meter, compressed.get(part.name, ())) for part in plan.parts}
        for name in COPIED:
            if (plan.target_folder / name).is_file():
                shutil.copyfile(plan.target_folder / name, folder / name)
        (folder / "README.md").write_text(_readme(output.name, plan, written), encoding="utf-8")
        manifest = _manifest(plan, folder, written)
        (folder / MANIFEST).write_bytes(manifest.encode())
        sync(folder / MANIFEST)
        sync(folder)
    return output


class _Meter:
    """Adds up the bytes written and reports them."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def add(self, part: str, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(part, self._done, self._total)


def _write_embeddings(plan: Plan, folder: Path, meter: _Meter) -> None:
    with (folder / EMBEDDINGS).open("wb") as file:
        for _, rows in plan.embeddings.blocks():
            file.write(rows.view(np.uint8).data)
            meter.add("embeddings", rows.nbytes)


_Compressed = Iterable[tuple[str, dict[str, Array]]]


def _data_aware(plan: Plan, folder: Path, meter: _Meter) -> _Compressed:
    """Record what the target's matrices are multiplied with, and return those to be compressed accordingly."""
    if plan.texts is None or plan.int4 is None:
        return ()
    weights = plan.parts[0].weights
    layouts = weights.layouts()
    with TemporaryDirectory(dir=folder) as scratch:
        records = record(
            plan.target,
            weights.tensors,
            recorded(layouts),
            plan.texts,
            Path(scratch),
            lambda: meter.add("reading the data set", 0),
        )
    return compress_layers(weights.tensors, layouts, records, plan.int4)


def _write_graph(part: Part, folder: Path, meter: _Meter, compressed: _Compressed) -> Graph:
    """Write one graph, then its weights; the ports are those a reader of the file finds."""
    path = folder / part.name / part.ops.FILE
    path.parent.mkdir()
    part.ops.save(path)
    part.weights.fill(*part.ops.constants(path), lambda count: meter.add(part.name, count), compressed)
    inputs, outputs = part.ops.ports(path)
    return Graph(
        file=f"{part.name}/{part.ops.FILE}",
        weight_format=part.weight_format.name,
        weights=part.weights.summary(),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


def _manifest(plan: Plan, folder: Path, written: dict[str, Graph]) -> Manifest:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    packages = ("dflash-openvino", "numpy", *plan.backend.packages)
    return Manifest(
        backend=plan.backend.name,
        target=plan.target,
        drafter=plan.drafter,
        target_source=_source(plan.target_folder),
        drafter_source=None if plan.drafter_folder is None else _source(plan.drafter_folder),
        int4=plan.int4,
        embedding_dtype=plan.embeddings.dtype,
        graphs=written,
        files={path.relative_to(folder).as_posix(): _hashed(path) for path in files},
        versions={name: _version(name) for name in packages} | plan.backend.emitter.VERSIONS,
    )


def _hashed(path: Path) -> File:
    """Hash a finished file and force it to the disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    sync(path)
    return File(size=path.stat().st_size, sha256=digest.hexdigest())


def _source(folder: Path) -> Source:
    """Name a checkpoint; a folder of the Hub's cache (models--owner--name/snapshots/revision) carries its id."""
    folder = folder.absolute()
    cached = folder.parent.parent.name
    if folder.parent.name == "snapshots" and cached.startswith("models--"):
        return Source(name=cached.removeprefix("models--").replace("--", "/"), revision=folder.name)
    return Source(name=folder.name)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _readme(name: str, plan: Plan, written: dict[str, Graph]) -> str:
    drafter = "" if plan.drafter_folder is None else f" with its drafter {_source(plan.drafter_folder).name}"
    rows = "\n".join(f"| `{graph.file}` | {graph.weight_format} |" for graph in written.values())
    return f"""# {name}

{_source(plan.target_folder).name}{drafter}, exported by dflash-openvino for exact speculative decoding on CPUs.

| graph | weights |
| --- | --- |
{rows}

`embeddings.bin` is the embedding table, one row per token ({plan.embeddings.dtype}, row-major).
`dflash.json` lists the ports of every graph, the sources and the SHA-256 of every file.
The licences of the source models apply.
"""
