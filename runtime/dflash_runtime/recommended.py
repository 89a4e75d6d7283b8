"""The settings `dflash tune` found best, in a file beside a bundle; `load` takes them when it is asked for none.

Knows the file and the machine it holds for. Does not know how the settings were found.
"""

import os
from pathlib import Path

import msgspec
from dflash_graphs.errors import BundleError
from dflash_graphs.manifest import Manifest

from .backends import backend_for
from .bundle import Bundle, bundle_key

RECOMMENDED = "recommended.json"


class Recommended(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of `load`, and what they were found for."""

    bundle: str  # key of the manifest
    cpu: str
    cores: int | None
    version: str  # of the library that runs the graphs
    threads: int | None  # None: its choice
    precision: str
    kv_precision: str
    tokens_per_second: float

    def summary(self, manifest: Manifest) -> str:
        """Say in a line what this means for the bundle of `manifest`."""
        if self.bundle != bundle_key(manifest):
            return "for other contents than these; run `dflash tune --write` again"
        settings = f"precision {self.precision}, kv precision {self.kv_precision}, threads {self.threads or 'default'}"
        return f"{settings}, for {self.cpu} with {self.cores} cores: {self.tokens_per_second:.1f} tokens/s"


def recommend(
    bundle: Bundle, threads: int | None, precision: str, kv_precision: str, tokens_per_second: float
) -> Recommended:
    """Return these settings for this bundle on this machine."""
    backend = backend_for(bundle.manifest)
    return Recommended(
        bundle=bundle_key(bundle.manifest),
        cpu=backend.cpu_name(),
        cores=os.cpu_count(),
        version=backend.version(),
        threads=threads,
        precision=precision,
        kv_precision=kv_precision,
        tokens_per_second=tokens_per_second,
    )


def write_recommended(folder: Path, recommended: Recommended) -> Path:
    """Write it into the bundle's folder but not into its manifest: the bundle stays what it was."""
    path = folder / RECOMMENDED
    path.write_bytes(msgspec.json.format(msgspec.json.encode(recommended), indent=1))
    return path


def read_recommended(folder: Path) -> Recommended | None:
    """Read the file of a bundle folder, None where there is none; raise BundleError for a damaged one."""
    path = folder / RECOMMENDED
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recommended)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise BundleError(f"{path} is damaged: {error}. Delete it, or run `dflash tune --write` again.") from error


def recommended_here(bundle: Bundle) -> Recommended | None:
    """Return what was found for this bundle's content with this machine and software, None where nothing was."""
    found = read_recommended(bundle.folder)
    if found is None:
        return None
    here = recommend(bundle, found.threads, found.precision, found.kv_precision, found.tokens_per_second)
    return found if found == here else None
