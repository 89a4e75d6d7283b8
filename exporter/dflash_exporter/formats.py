"""Weight formats: how many bits every matrix of a graph gets, and how they lie in a file.

Knows the rules (`Format.layout`). Does not know files and does not compress (`compress`).
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from dflash_graphs.errors import ExportError
from dflash_graphs.manifest import Int4
from dflash_graphs.weights import Array, Matrix

from .checkpoint import DTYPES

FORMATS = ("f32", "bf16", "f16", "int8", "int4")
GROUPS = (128, 64, 32)  # columns that may share a 4-bit scale
_BLOCKS = {8: 64, 4: 32}  # most columns that share a scale in blocks: longer ones are not exact at odd row counts
_USUAL = Int4()


@dataclass(frozen=True)
class Layout:
    """How a matrix is stored: as floats of a type, or as integers with scales."""

    bits: int  # 8 or 4; for floats 16, whatever their type
    dtype: str = "int"  # of floats
    group_size: int | None = None  # columns that share a scale; None: a whole row
    symmetric: bool = True  # without zero points

    def __str__(self) -> str:
        if self.bits == 16:
            return self.dtype
        scheme = "sym" if self.symmetric else "asym"
        return f"int{self.bits} {scheme}, {'per row' if self.group_size is None else f'groups of {self.group_size}'}"

    def parts(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the bits per row of each array of a matrix [out, in]: values, scale, zero_point."""
        if self.bits == 16:
            return {"values": shape[1] * DTYPES[self.dtype].itemsize * 8}
        groups = 1 if self.group_size is None else shape[1] // self.group_size
        zero_point = {} if self.symmetric else {"zero_point": groups * self.bits}
        return {"values": shape[1] * self.bits, "scale": groups * 32} | zero_point

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a matrix of this shape in a file."""
        return sum(-(-shape[0] * bits // 8) for bits in self.parts(shape).values())

    def blank(self, shape: tuple[int, ...], *, signed: bool) -> Matrix:
        """Return a matrix of zeros that are not in memory before they are touched."""
        out, width = shape
        if self.bits == 16:
            return Matrix(np.zeros(shape, DTYPES[self.dtype]), (out, width))
        packed = {part: -(-out * bits // 8) for part, bits in self.parts(shape).items()}
        dtype: Any = np.uint8 if self.bits == 4 or not signed else np.int8
        values = np.zeros(packed["values"], dtype)
        if self.group_size is None:
            values, scale = values.reshape(shape), np.zeros((out, 1), np.float32)
        else:
            scale = np.zeros((out, width // self.group_size, 1), np.float32)
        zero: Array | None = None if self.symmetric else np.zeros(packed["zero_point"], np.uint8)
        return Matrix(values, (out, width), self.bits, self.group_size, signed and self.symmetric, scale, zero)


@dataclass(frozen=True)
class Format:
    """How the matrices of a graph are stored; `blocked` asks for groups and unsigned integers at 8 bits, too."""

    name: str
    int4: Int4 = _USUAL
    at_8_bits: frozenset[str] = frozenset()  # tensors that int4 leaves at 8 bits for its ratio
    blocked: bool = False

    def layout(self, name: str, shape: tuple[int, ...]) -> Layout:
        """Return the layout of the matrix `name` [out, in].

        int4 leaves at 8 bits: the recurrent layers, where errors would accumulate; widths that are no multiple of a
        group size; what its ratio says. In blocks such a width stays in floats.
        """
        if self.name in DTYPES:
            return Layout(16, self.name)
        group = next((size for size in GROUPS if size <= self.int4.group_size and shape[1] % size == 0), None)
        if self.blocked and group is None:
            return Layout(16, "f32")
        bits = 4 if self.may_be_4_bits(name, shape) and name not in self.at_8_bits else 8
        if self.blocked and group is not None:
            group = min(group, _BLOCKS[bits])
        if bits == 4:
            return Layout(4, group_size=group, symmetric=self.int4.symmetric)
        return Layout(8, group_size=group if self.blocked else None)

    def may_be_4_bits(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether int4 stores the matrix at 4 bits if its ratio is 1."""
        values = prod(shape)
        return (
            self.name == "int4"
            and ".linear_attn." not in name
            and shape[1] % min(GROUPS) == 0
            # zero points have to fill the 8 bytes by which `weights` finds their place
            and (self.int4.symmetric or values >= 16 * max(GROUPS))
        )


def check_int4(options: Int4 | None, formats: tuple[str, ...]) -> None:
    """Raise ExportError for options of int4 that make no sense or nothing would heed; `formats` starts with the
    target's."""
    if options is None:
        return
    if "int4" not in formats:
        raise ExportError("options of int4 were given, but no weight format is int4.")
    if options.group_size not in GROUPS:
        raise ExportError(f"the group size is {options.group_size}; choose one of {', '.join(map(str, GROUPS))}.")
    if (options.awq or options.scale_estimation) != (options.dataset is not None):
        raise ExportError("AWQ and scale estimation need a data set, and a data set serves nothing else; give both.")
    if options.dataset is not None and formats[0] != "int4":
        raise ExportError("a data set serves the target, whose weight format is not int4.")
    if not 0 < options.ratio <= 1:
        raise ExportError(f"the ratio of int4 is {options.ratio}; give a share above 0 and at most 1.")
