"""The manifest of a bundle, `dflash.json`: what is inside, where it came from, and the hash of every file.

Knows the names of a bundle's parts. Does not open graphs or weights.
"""

from pathlib import Path
from typing import Any

import msgspec

from .errors import BundleError
from .specs import DrafterSpec, TargetSpec

FORMAT_VERSION = 8
MANIFEST = "dflash.json"
GRAPHS = ("target", "head", "drafter_context", "drafter")
EMBEDDINGS = "embeddings.bin"
# names of open sizes: token rows, those of the head's second input, cached positions, states that come out
TOKENS, DRAFTED, POSITIONS, STATES = "T", "D", "P", "S"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint: Hub id or folder name, and the revision where there is one."""

    name: str
    revision: str | None = None


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """An input or output; sizes that are left open have names."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


class Int4(msgspec.Struct, frozen=True, kw_only=True):
    """How matrices are brought to 4 bits."""

    symmetric: bool = True  # without zero points
    group_size: int = 128  # columns that share a scale: 128, 64 or 32; where it does not divide a width, the next one
    ratio: float = 1.0  # share of the weights at 4 bits, of those that could be; the others have 8
    awq: bool = False  # whether columns were scaled by what they are multiplied with
    scale_estimation: bool = False  # whether scales were fitted to what they are multiplied with
    dataset: str | None = None  # name of the texts those two looked at


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """One graph file, its weight format (f32, bf16, f16, int8, int4) and its ports."""

    file: str
    weight_format: str
    weights: dict[str, int] = {}  # how matrices are stored in detail -> number of their values
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


class File(msgspec.Struct, frozen=True, kw_only=True):
    size: int  # bytes
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of `dflash.json`. Paths are relative to the bundle and use forward slashes."""

    format_version: int = FORMAT_VERSION
    backend: str = "openvino"
    target: TargetSpec
    drafter: DrafterSpec | None = None
    target_source: Source
    drafter_source: Source | None = None
    int4: Int4 | None = None
    embedding_dtype: str  # of `embeddings.bin`, row-major [vocab_size, hidden_size]: f32, bf16 or f16
    graphs: dict[str, Graph]
    files: dict[str, File]
    versions: dict[str, str]  # of the packages that wrote the bundle

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder/dflash.json`; raise BundleError that says what is wrong with it."""
    path = folder / MANIFEST
    if not path.is_file():
        raise BundleError(f"{folder} is not a bundle: it has no {MANIFEST}. Make one with `dflash export`.")
    try:
        version = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("format_version")
        if version != FORMAT_VERSION:
            raise BundleError(
                f"{path}: format version {version!r}, but this installation reads version {FORMAT_VERSION}. "
                "Export the bundle again or install the version that wrote it."
            )
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:  # includes validation errors
        raise BundleError(f"{path} is damaged: {error}. Export the bundle again.") from error
