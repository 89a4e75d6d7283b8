"""Weights of a graph in the format of the bundle, written straight to their final place.

Knows weight formats. Does not know architectures. A graph is built over blank arrays that are never touched, so they
take no memory; once the file stands, `CheckpointWeights.fill` finds every blank in it by a mark and streams the real
values there, block by block. So an export needs neither the memory nor the scratch space of a second copy.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from dflash_graphs.errors import ExportError, UnsupportedError
from dflash_graphs.weights import Array, Matrix
from numpy.typing import NDArray

from .checkpoint import DTYPES, Tensor
from .compress import compress

FORMATS = ("f32", "bf16", "f16", "int8", "int4")
GROUPS = (128, 64, 32)  # columns that share a 4-bit scale: the largest that divides the width
_BLOCKS = {8: 64, 4: 32}  # most columns that share a scale in blocks: longer ones are not exact at odd row counts
_MARK = 0xD1F1A5B1  # first of the two 32-bit words at the head of a blank; the second counts the blanks
_BATCH = 1 << 25  # values compressed at once: 128 MiB as f32


def _blank_matrix(name: str, shape: tuple[int, ...], weight_format: str, blocked: bool) -> Matrix:
    """Lay out a matrix of `shape` in `weight_format`.

    4-bit formats keep the recurrent layers, where errors would accumulate, and widths that are no multiple of a group
    size at 8 bits. In blocks such a width stays in floats.
    """
    out, width = shape
    group = next((size for size in GROUPS if width % size == 0), None)
    if weight_format in DTYPES or (blocked and group is None):
        return Matrix(_blank(shape, DTYPES.get(weight_format, DTYPES["f32"])), (out, width))
    if blocked and group is not None:
        bits = 8 if weight_format == "int8" or ".linear_attn." in name else 4
        group = min(group, _BLOCKS[bits])
        values, scale = _blank((out * width * bits // 8,), np.dtype(np.uint8)), _blank_scale(out, width // group)
        return Matrix(values, (out, width), bits, group, signed=False, scale=scale)
    if weight_format == "int8" or ".linear_attn." in name or group is None:
        return Matrix(_blank(shape, np.dtype(np.int8)), (out, width), 8, scale=_blank((out, 1), DTYPES["f32"]))
    values, scale = _blank((out * width // 2,), np.dtype(np.uint8)), _blank_scale(out, width // group)
    return Matrix(values, (out, width), 4, group, scale=scale)


def _blank_scale(out: int, groups: int) -> Array:
    return _blank((out, groups, 1), DTYPES["f32"])


def _blank(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.zeros(shape, dtype)  # the system maps it on first touch


def stored_bytes(matrix: Matrix) -> int:
    """Bytes of the matrix in a file."""
    return matrix.values.nbytes + (0 if matrix.scale is None else matrix.scale.nbytes)


_Place = tuple[str, str]  # tensor name; "values" or "scale"
_Block = tuple[str, int, Array]  # tensor name; first row; rows


class CheckpointWeights:
    """`dflash_graphs.weights.Weights` over the selected tensors of a checkpoint.

    Arrays and precise matrices (small) come with their values, the others blank: a graph must use them as they are.
    `blocked` asks for unsigned integers with a scale for every block of columns, at 8 bits, too.
    """

    def __init__(self, tensors: Mapping[str, Tensor], weight_format: str, *, blocked: bool = False) -> None:
        self._tensors = tensors
        self._format, self._blocked = weight_format, blocked
        self._matrices: dict[str, Matrix] = {}
        self._marks: list[_Place] = []

    def array(self, name: str) -> NDArray[np.float32]:
        return self._tensors[name].read().astype(np.float32)

    def matrix(self, name: str, *, precise: bool = False) -> Matrix:
        tensor = self._tensors[name]
        if precise:  # f16 to f32: a device that computes in bf16 would round it
            values = tensor.read() if tensor.dtype != "f16" else self.array(name)
            return Matrix(values, (values.shape[0], values.shape[1]))
        if name not in self._matrices:
            matrix = _blank_matrix(name, tensor.shape, self._format, self._blocked)
            for part, blank in (("values", matrix.values), ("scale", matrix.scale)):
                if blank is not None:
                    mark = struct.pack("<II", _MARK, len(self._marks))
                    blank.reshape(-1).view(np.uint8)[:8] = np.frombuffer(mark, np.uint8)
                    self._marks.append((name, part))
            self._matrices[name] = matrix
        return self._matrices[name]

    @property
    def nbytes(self) -> int:
        """Bytes that `fill` will write."""
        return sum(stored_bytes(matrix) for matrix in self._matrices.values())

    def fill(self, data: Path, constants: Iterable[tuple[int, int]], progress: Callable[[int], None]) -> None:
        """Write the values of every matrix asked for into the file `data`; `progress` takes bytes written.

        `constants` lists offset and size in bytes of everything that may be a blank of this. Raises CheckpointError for
        damaged tensors and UnsupportedError for values the format cannot hold.
        """
        with data.open("r+b") as file:
            places = self._find(file, constants)
            for batch in self._batches():
                for place, offset, values in self._converted(batch):
                    file.seek(places[place] + offset)
                    file.write(np.ascontiguousarray(values).view(np.uint8).data)
                    progress(values.nbytes)

    def _find(self, file: BinaryIO, constants: Iterable[tuple[int, int]]) -> dict[_Place, int]:
        """Return where in the file each blank lies."""
        found = {}
        for offset, size in constants:
            file.seek(offset)
            mark, number = struct.unpack("<II", file.read(8).ljust(8, b"\0"))
            if size >= 8 and mark == _MARK and number < len(self._marks):
                found[self._marks[number]] = offset
        if len(found) != len(self._marks):
            lost = ", ".join(name for name, part in self._marks if (name, part) not in found)
            raise ExportError(f"{file.name} does not hold {lost} unchanged; please report this defect.")
        return found

    def _batches(self) -> Iterator[list[_Block]]:
        """Group blocks of one layout for compression; float blocks go one by one."""
        batch: list[_Block] = []
        for name, matrix in sorted(self._matrices.items(), key=lambda item: item[1].bits):
            for row, values in self._tensors[name].blocks():
                if batch and (self._layout(name) != self._layout(batch[0][0]) or _values(batch) + values.size > _BATCH):
                    yield batch
                    batch = []
                if matrix.bits == 16:
                    yield [(name, row, values)]
                else:
                    batch.append((name, row, values.astype(np.float32)))
        if batch:
            yield batch

    def _layout(self, name: str) -> tuple[int, int | None]:
        return self._matrices[name].bits, self._matrices[name].group_size

    def _converted(self, batch: list[_Block]) -> Iterator[tuple[_Place, int, Array]]:
        """Yield (place, byte offset inside it, values) of a batch in the format of its matrices."""
        bits, group = self._layout(batch[0][0])
        if bits == 16:
            ((name, row, values),) = batch
            converted = _cast(name, values, self._matrices[name].values.dtype)
            yield (name, "values"), row * converted[0].nbytes, converted
            return
        compressed = compress([values for _, _, values in batch], bits, group)
        for (name, row, rows), (integers, scale) in zip(batch, compressed, strict=True):
            if self._blocked and group is not None:
                integers, scale = _in_blocks(integers, scale, bits, rows.shape[1] // group)
            yield (name, "values"), row * rows.shape[1] * bits // 8, integers
            yield (name, "scale"), row * scale[0].nbytes, scale


def _in_blocks(integers: Array, scale: Array, bits: int, blocks: int) -> tuple[Array, Array]:
    """Move signed integers up by half their range, and give every block of a row the row's scale if it has but one."""
    unsigned = integers.view(np.uint8) ^ np.uint8(0x80 if bits == 8 else 0x88)
    return unsigned, scale if bits == 4 else np.repeat(scale, blocks, axis=1)


def _values(batch: list[_Block]) -> int:
    return sum(values.size for _, _, values in batch)


def _cast(name: str, values: Array, dtype: np.dtype[Any]) -> Array:
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        converted = values.astype(dtype)
    if dtype == np.float16 and not np.isfinite(converted).all():
        raise UnsupportedError(f"{name} holds values beyond 65504, too large for f16. Export with bf16 or f32.")
    return converted
