"""A checkpoint folder: `config.json` and one or more safetensors files, read piece by piece.

Knows the safetensors layout and the name prefixes in circulation. Does not know what the tensors mean. Values are read
in blocks of rows, so that the largest table never stands in memory, and every value read is checked to be finite.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from dflash_graphs.errors import CheckpointError, UnsupportedError
from dflash_graphs.weights import Array

DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
BLOCK = 1 << 24  # values of one block: 64 MiB as f32
_PREFIXES = ("model.language_model.", "model.", "")
_AGAIN = "Download the checkpoint again."
_WORDS = {"f32": (np.uint32, 0x7F800000), "f16": (np.uint16, 0x7C00), "bf16": (np.uint16, 0x7F80)}  # exponent bits


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies; nothing is read before `blocks` or `read`."""

    name: str  # as in the file
    file: Path
    dtype: str  # f32, bf16, f16, or the safetensors name of any other
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def rows(self, start: int, stop: int) -> "Tensor":
        """Return the rows from `start` to before `stop` as a tensor of their own."""
        row = self.nbytes // self.shape[0]
        return replace(self, shape=(stop - start, *self.shape[1:]), offset=self.offset + start * row)

    def blocks(self, values: int = BLOCK) -> Iterator[tuple[int, Array]]:
        """Yield (first row, block of rows) in the stored float type, at most `values` values or two rows each.

        The first row is even, so that two 4-bit values of different blocks never share a byte.

        Raises CheckpointError at a value that is NaN or infinite and when the file ends early.
        """
        dtype, width = DTYPES[self.dtype], prod(self.shape[1:])
        step = max(2, values // width & ~1)
        with self.file.open("rb") as file:
            file.seek(self.offset)
            for row in range(0, self.shape[0], step):
                rows = min(step, self.shape[0] - row)
                words = np.fromfile(file, _WORDS[self.dtype][0], rows * width)
                if words.size != rows * width:
                    raise CheckpointError(f"{self.file} ends inside {self.name}. {_AGAIN}")
                self._check_finite(words)
                yield row, words.view(dtype).reshape(rows, *self.shape[1:])

    def read(self) -> Array:
        """Return the whole tensor in its stored float type, checked like `blocks`."""
        return np.concatenate([block for _, block in self.blocks()])

    def _check_finite(self, words: Array) -> None:
        exponent = _WORDS[self.dtype][1]
        if np.any((words & words.dtype.type(exponent)) == exponent):
            raise CheckpointError(f"{self.file}: {self.name} holds NaN or infinite values; the checkpoint is damaged.")


class Checkpoint:
    """A folder with `config.json` and safetensors weights (one file, or shards and an index)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder. Give the folder of a downloaded checkpoint.")

    @cached_property
    def config(self) -> dict[str, Any]:
        return _read_json(self.folder / "config.json")

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors under their full names, from the headers alone."""
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if single.is_file():
            return _read_header(single)
        if not index.is_file():
            raise CheckpointError(f"{self.folder} has no model.safetensors and no {index.name}. {_AGAIN}")
        listed = _read_json(index).get("weight_map")
        if not isinstance(listed, Mapping):
            raise CheckpointError(f"{index} has no weight_map. {_AGAIN}")
        found: dict[str, Tensor] = {}
        for shard in sorted({str(file) for file in listed.values()}):
            if not (self.folder / shard).is_file():
                raise CheckpointError(f"{self.folder}: the file {shard} named by {index.name} is missing. {_AGAIN}")
            found |= _read_header(self.folder / shard)
        return found

    def select(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return the tensors named by `shapes` under those names, whatever prefix the files use.

        Raises CheckpointError for a missing tensor or another shape, UnsupportedError for integer or 8-bit values.
        """
        prefix = next((p for p in _PREFIXES if any(p + name in self.tensors for name in shapes)), "")
        return {name: self._check(prefix, name, shape) for name, shape in shapes.items()}

    def _check(self, prefix: str, name: str, shape: tuple[int, ...]) -> Tensor:
        full = name if name == "lm_head.weight" else prefix + name  # the head lies outside the model
        tensor = self.tensors.get(full)
        if tensor is None:
            raise CheckpointError(f"{self.folder}: the tensor {full} is missing (expected shape {list(shape)}).")
        if tensor.dtype not in DTYPES:
            raise UnsupportedError(
                f"{tensor.file}: {full} is stored as {tensor.dtype}: a quantised checkpoint. Export the original one."
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: {full} has the shape {list(tensor.shape)}, config.json implies {list(shape)}."
            )
        return tensor


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}. Give the folder of a downloaded checkpoint.")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}. {_AGAIN}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object. {_AGAIN}")
    return content


def _read_header(path: Path) -> dict[str, Tensor]:
    """Read the header of a safetensors file and check that the file is as long as the header says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise ValueError(f"the header would end at byte {8 + length} of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _tensor(path, name, entry, 8 + length, size) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is truncated or damaged: {error}. {_AGAIN}") from error
    return tensors


def _tensor(path: Path, name: str, entry: Mapping[str, Any], data: int, size: int) -> Tensor:
    dtype, shape, (start, stop) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    dtype = {"F32": "f32", "F16": "f16", "BF16": "bf16"}.get(dtype, dtype)
    if not 0 <= start <= stop <= size - data:
        raise ValueError(f"{name} would lie at bytes {data + start} to {data + stop} of {size}")
    if dtype in DTYPES and stop - start != prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name} has {stop - start} bytes for the shape {list(shape)}")
    return Tensor(name, path, dtype, shape, data + start)
