"""Weights of a graph in the format of the bundle, written straight to their final place.

Knows weight formats. Does not know architectures. A graph is built over blank arrays that are never touched, so they
take no memory; once the file stands, `CheckpointWeights.fill` finds every blank in it by a mark and streams the real
values there, block by block. So an export needs neither the memory nor the scratch space of a second copy.
"""

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from dflash_graphs.errors import ExportError, UnsupportedError
from dflash_graphs.weights import Array, Matrix
from numpy.typing import NDArray

from .checkpoint import Tensor
from .compress import compress
from .formats import Format, Layout

_MARK = 0xD1F1A5B1  # first of the two 32-bit words at the head of a blank; the second counts the blanks
_BATCH = 1 << 25  # values compressed at once: 128 MiB as f32


_Place = tuple[str, str]  # tensor name; "values" or "scale"
_Block = tuple[str, int, Array]  # tensor name; first row; rows


class CheckpointWeights:
    """`dflash_graphs.weights.Weights` over the selected tensors of a checkpoint.

    Arrays and precise matrices (small) come with their values, the others blank: a graph must use them as they are.
    """

    def __init__(self, tensors: Mapping[str, Tensor], weight_format: Format) -> None:
        self.tensors, self._format = tensors, weight_format
        self._matrices: dict[str, Matrix] = {}
        self._marks: list[_Place] = []

    def array(self, name: str) -> NDArray[np.float32]:
        return self.tensors[name].read().astype(np.float32)

    def matrix(self, name: str, *, precise: bool = False) -> Matrix:
        tensor = self.tensors[name]
        if precise:  # f16 to f32: a device that computes in bf16 would round it
            values = tensor.read() if tensor.dtype != "f16" else self.array(name)
            return Matrix(values, (values.shape[0], values.shape[1]))
        if name not in self._matrices:
            matrix = self._layout(name).blank(tensor.shape, signed=not self._format.blocked)
            for part, blank in (("values", matrix.values), ("scale", matrix.scale), ("zero_point", matrix.zero_point)):
                if blank is not None:
                    mark = struct.pack("<II", _MARK, len(self._marks))
                    blank.reshape(-1).view(np.uint8)[:8] = np.frombuffer(mark, np.uint8)
                    self._marks.append((name, part))
            self._matrices[name] = matrix
        return self._matrices[name]

    @property
    def nbytes(self) -> int:
        """Bytes that `fill` will write."""
        return sum(self._layout(name).nbytes(self.tensors[name].shape) for name in self._matrices)

    def layouts(self) -> dict[str, Layout]:
        """Return how each matrix asked for is stored."""
        return {name: self._layout(name) for name in self._matrices}

    def summary(self) -> dict[str, int]:
        """Return the layouts of the matrices asked for, with the number of values each applies to."""
        found: Counter[str] = Counter()
        for name, matrix in self._matrices.items():
            found[str(self._layout(name))] += prod(matrix.shape)
        return dict(found)

    def fill(
        self,
        data: Path,
        constants: Iterable[tuple[int, int]],
        progress: Callable[[int], None],
        compressed: Iterable[tuple[str, Mapping[str, Array]]] = (),
    ) -> None:
        """Write the values of every matrix asked for into the file `data`; `progress` takes bytes written.

        `constants` lists offset and size in bytes of everything that may be a blank of this; `compressed` yields
        matrices that are compressed already, as `compress` returns them. Raises CheckpointError for damaged tensors and
        UnsupportedError for values the format cannot hold.
        """
        with data.open("r+b") as file:
            places = self._find(file, constants)

            def write(name: str, row: int, arrays: Mapping[str, Array]) -> None:
                for place, offset, values in self._placed(name, row, arrays):
                    file.seek(places[place] + offset)
                    file.write(np.ascontiguousarray(values).view(np.uint8).data)
                    progress(values.nbytes)

            done = set()
            for name, arrays in compressed:
                write(name, 0, arrays)
                done.add(name)
            for batch in self._batches(self._matrices.keys() - done):
                for (name, row, _), arrays in zip(batch, self._converted(batch), strict=True):
                    write(name, row, arrays)

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

    def _batches(self, names: Set[str]) -> Iterator[list[_Block]]:
        """Group blocks of one layout for compression; float blocks go one by one."""
        batch: list[_Block] = []
        for name in sorted((n for n in self._matrices if n in names), key=lambda name: self._layout(name).bits):
            for row, values in self.tensors[name].blocks():
                if batch and (self._layout(name) != self._layout(batch[0][0]) or _values(batch) + values.size > _BATCH):
                    yield batch
                    batch = []
                if self._layout(name).bits == 16:
                    yield [(name, row, values)]
                else:
                    batch.append((name, row, values.astype(np.float32)))
        if batch:
            yield batch

    def _layout(self, name: str) -> Layout:
        return self._format.layout(name, self.tensors[name].shape)

    def _converted(self, batch: list[_Block]) -> list[dict[str, Array]]:
        """Return the arrays of each block of a batch in the format of its matrix."""
        layout = self._layout(batch[0][0])
        if layout.bits == 16:
            ((name, _, values),) = batch
            return [{"values": _cast(name, values, self._matrices[name].values.dtype)}]
        return compress([values for _, _, values in batch], layout)

    def _placed(self, name: str, row: int, arrays: Mapping[str, Array]) -> Iterator[tuple[_Place, int, Array]]:
        """Yield (place, byte offset inside it, values) of compressed rows, the first of which is `row`."""
        layout, shape = self._layout(name), self.tensors[name].shape
        for part, array in self._as_stored(layout, shape, arrays).items():
            yield (name, part), row * layout.parts(shape)[part] // 8, array

    def _as_stored(self, layout: Layout, shape: tuple[int, ...], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """In blocks, move signed integers up by half their range and give every block of a row a scale."""
        if not self._format.blocked or layout.bits == 16:
            return arrays
        assert layout.group_size is not None
        unsigned = arrays["values"].view(np.uint8) ^ np.uint8(0x80 if layout.bits == 8 else 0x88)
        scale = arrays["scale"]
        if layout.bits == 8:
            scale = np.repeat(scale, shape[1] // layout.group_size, axis=1)
        return {"values": unsigned, "scale": scale}


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
