"""Opens a bundle: checks every file against its recorded hash and hands out paths and the embedding table.

Knows the layout of the folder. Does not compile graphs.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dflash_graphs.errors import BundleError
from dflash_graphs.manifest import EMBEDDINGS, MANIFEST, Manifest, read_manifest
from numpy.typing import NDArray

_DTYPES = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16}


@dataclass(frozen=True)
class Bundle:
    """A bundle folder whose files are as they were written."""

    folder: Path
    manifest: Manifest

    def graph(self, name: str) -> Path:
        return self.folder / self.manifest.graphs[name].file


def open_bundle(folder: str | os.PathLike[str]) -> Bundle:
    """Read the manifest and check all files; raise BundleError naming the first that is missing or changed."""
    path = Path(folder)
    manifest = read_manifest(path)
    for name, file in manifest.files.items():
        found = path / name
        if not found.is_file():
            raise BundleError(f"{found} is missing. Export the bundle again.")
        if found.stat().st_size != file.size:
            raise BundleError(f"{found} has {found.stat().st_size} bytes instead of {file.size}. Export it again.")
    _check_hashes(path, manifest)
    return Bundle(path, manifest)


def cache_folder() -> Path:
    """The user's cache folder for this program; `DFLASH_CACHE` overrides the platform's usual place."""
    if folder := os.environ.get("DFLASH_CACHE"):
        return Path(folder)
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "dflash"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dflash"


def bundle_key(manifest: Manifest) -> str:
    """A short name for the bundle's content, the same wherever the folder lies."""
    return hashlib.sha256(manifest.encode()).hexdigest()[:16]


def _check_hashes(folder: Path, manifest: Manifest) -> None:
    """Hash every file, unless none was touched since it last passed on this machine."""
    stats = {name: (folder / name).stat() for name in manifest.files}
    seen = {name: [s.st_size, s.st_mtime_ns, s.st_ino] for name, s in stats.items()}
    seen[MANIFEST] = [bundle_key(manifest)]  # type: ignore[list-item]
    stamp = cache_folder() / "checked" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    try:
        if json.loads(stamp.read_text()) == seen:
            return
    except (OSError, ValueError):
        pass
    with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter lock
        digests = dict(zip(manifest.files, pool.map(lambda name: _sha256(folder / name), manifest.files), strict=True))
    for name, file in manifest.files.items():
        if digests[name] != file.sha256:
            raise BundleError(f"{folder / name} differs from what was exported (sha256). Export the bundle again.")
    try:
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(json.dumps(seen))
    except OSError:
        pass  # a read-only home only means hashing again next time


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(path)


def _digest(path: Path) -> str:  # Python 3.10
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


class Embeddings:
    """The input embedding table, memory-mapped; one row is read per token."""

    def __init__(self, bundle: Bundle) -> None:
        spec, dtype = bundle.manifest.target, bundle.manifest.embedding_dtype
        shape = (spec.vocab_size, spec.hidden_size)
        self._rows = np.asarray(np.memmap(bundle.folder / EMBEDDINGS, _DTYPES[dtype], "r", shape=shape))
        self._is_bf16 = dtype == "bf16"

    def place(self, zeros: NDArray[np.float32]) -> NDArray[Any]:
        """Return where `lookup` is to write so that `zeros` [T, hidden] hold the rows: bf16 is f32's upper half."""
        return zeros.view(np.uint16)[:, 1::2] if self._is_bf16 else zeros

    def lookup(self, tokens: Sequence[int], out: NDArray[Any]) -> None:
        """Write the rows of `tokens` [T] to `out`, a result of `place`."""
        for row, token in zip(out, tokens, strict=True):  # for the single row of plain decoding a third of indexing
            row[...] = self._rows[token]
