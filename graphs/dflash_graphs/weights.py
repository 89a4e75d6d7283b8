"""How a graph asks for weights: by checkpoint tensor name, as plain arrays or as (possibly compressed) matrices.

Knows the shape of a compressed matrix. Does not know files or how matrices are compressed: the exporter does.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Matrix:
    """A weight of `y = x @ W.T`.

    `values` is [out, in] in f32, f16 or bf16 (ml_dtypes), or integers to be dequantised as
    `(values - zero_point) * scale`: int8 with `scale` f32 [out, 1], or 4-bit integers with one scale (and zero point)
    per `group_size` columns, `values` [out, in / group_size, group_size], `scale` [out, in / group_size, 1]. 8-bit
    integers may be grouped, too. Unsigned ones without `zero_point` have it in the middle of their range.
    """

    values: Array  # for bits == 4: packed uint8, two values a byte, low nibble first, flat
    shape: tuple[int, int]
    bits: int = 16
    group_size: int | None = None
    signed: bool = True
    scale: Array | None = None
    zero_point: Array | None = None


class Weights(Protocol):
    """Source of weights under the names of the published checkpoint, prefix removed (`layers.0.mlp.up_proj.weight`)."""

    def array(self, name: str) -> NDArray[np.float32]:
        """Return a small tensor (norm, bias, convolution, gate) as f32."""
        ...

    def matrix(self, name: str, *, precise: bool = False) -> Matrix:
        """Return a 2-D weight [out, in] in the format of the bundle; `precise` keeps it in the checkpoint's floats."""
        ...
