"""The operations an architecture may use: what stands between the model files and the backends.

An emitter (`openvino_emitter.OpenVinoOps`, `onnx_emitter.OnnxOps`) turns each call into nodes of its format. Shapes
follow one rule: the number of token rows T is the leading axis wherever it occurs, and beside the number of cached
positions the only size that may be left open, here (a name instead of a number) or later.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from numpy.typing import NDArray

from .manifest import Port
from .specs import AttentionSpec, DeltaSpec
from .weights import Matrix

Value: TypeAlias = Any  # a node output of the emitter's format; opaque to the architectures
Dim: TypeAlias = int | str  # a size, or the name of one that is left open


class Ops(Protocol):
    """Operation vocabulary. Arrays are constants; a `Value` comes from an earlier call."""

    @property
    def kernels(self) -> "KernelOps | None":
        """This emitter with kernels that only some backends have; None: the portable forms are to be emitted."""
        ...

    # ports and constants
    def input(self, name: str, shape: Sequence[Dim], dtype: str = "f32") -> Value:
        """Declare an input, or return the one already declared under this name."""
        ...

    def output(self, name: str, value: Value, shape: Sequence[Dim]) -> None:
        """Declare an output f32 of this shape, -1 for T."""
        ...

    def layers_input(self, name: str, layers: Sequence[int], shape: Sequence[int]) -> dict[int, Value]:
        """Declare an f32 input of several layers; returns it by layer.

        Its ports are either `name` [layers, *shape] or `name.i` of every layer i, whichever costs the backend less.
        """
        ...

    def layers_output(self, name: str, values: Mapping[int, Value], shape: Sequence[int]) -> None:
        """Declare an f32 output of several layers, values of `shape`, -1 for T or a multiple.

        Ports as those of `layers_input`; in one port the values of a layer follow those of the one before.
        """
        ...

    def constant(self, array: NDArray[Any]) -> Value: ...
    def label(self, name: str, value: Value) -> Value:
        """Give the producer of `value` a name by which a reader of the file can find it."""
        ...

    def precise(self) -> AbstractContextManager[None]:
        """Keep everything emitted inside in f32, whatever precision the device prefers."""
        ...

    # layers
    def linear(self, x: Value, weight: Matrix, bias: NDArray[Any] | None = None) -> Value:
        """Return `x @ weight.T + bias`, [T, in] -> [T, out]."""
        ...

    def rms_norm(self, x: Value, weight: NDArray[Any], eps: float) -> Value:
        """Return `x / sqrt(mean(x^2) + eps) * weight` over the last axis, in f32."""
        ...

    # elementwise; operands broadcast as in NumPy
    def add(self, a: Value, b: Value) -> Value: ...
    def subtract(self, a: Value, b: Value) -> Value: ...
    def multiply(self, a: Value, b: Value) -> Value: ...
    def exp(self, x: Value) -> Value: ...
    def cos(self, x: Value) -> Value: ...
    def sin(self, x: Value) -> Value: ...
    def sigmoid(self, x: Value) -> Value: ...
    def silu(self, x: Value) -> Value: ...
    def softplus(self, x: Value) -> Value: ...
    def minimum(self, a: Value, b: Value) -> Value: ...
    def less(self, a: Value, b: Value) -> Value: ...
    def logical_and(self, a: Value, b: Value) -> Value: ...
    def select(self, condition: Value, a: Value, b: Value) -> Value: ...
    def convert(self, x: Value, dtype: str) -> Value: ...

    # products, reductions, movement
    def matmul(self, a: Value, b: Value, *, transpose_a: bool = False, transpose_b: bool = False) -> Value: ...
    def softmax(self, x: Value, axis: int) -> Value: ...
    def reduce_max(self, x: Value) -> Value:
        """Return the largest entry along the last axis, which disappears."""
        ...

    def cumsum(self, x: Value, axis: int) -> Value: ...
    def rows(self, x: Value) -> Value:
        """Return the size of the leading axis, i32 [1]."""
        ...

    def reshape(self, x: Value, shape: Sequence[int]) -> Value: ...
    def transpose(self, x: Value, order: Sequence[int]) -> Value: ...
    def concat(self, values: Sequence[Value], axis: int) -> Value: ...
    def split(self, x: Value, lengths: Sequence[int], axis: int) -> list[Value]: ...
    def slice(self, x: Value, start: int, stop: int, axis: int) -> Value: ...
    def gather(self, x: Value, indices: Value) -> Value:
        """Return the rows `indices` (i32 [N]) of the leading axis."""
        ...


class KernelOps(Ops, Protocol):
    """Operations of a backend that runs files as they stand. Sizes and positions among the arguments are i32 [1]."""

    def store(self, cache: Value, rows: Value, start: Value) -> Value:
        """Return `cache` [1, N, P, D] with `rows` [1, N, T, D] at positions from `start` on.

        Works in place when a program binds input and output to the same memory.
        """
        ...

    def rotary(self, x: Value, cos: Value, sin: Value, dim: int, shape: tuple[int, int]) -> Value:
        """Rotate the first `dim` entries of every head; `x` is [T, *shape] (heads, entries), tables [T, 1, dim / 2]."""
        ...

    def causal_attention(
        self, query: Value, key: Value, value: Value, past: tuple[Value, Value], ids: Value, spec: AttentionSpec
    ) -> tuple[Value, Value, Value]:
        """Rotate queries and keys, store keys and values at `ids` i32 [T], attend to all positions up to a row's own.

        What stands at the position after the last row may be lost. Rows are [T, heads, head_dim], caches [1, kv_heads,
        P, head_dim]. Returns [T, heads * head_dim] and the caches.
        """
        ...

    def recurrence(self, rows: Sequence[Value], state: Value, spec: DeltaSpec) -> tuple[Value, Value]:
        """Run the gated delta rule over N rows, which may be 0; return its output, as values, and the state after it.

        `rows` are unit queries and keys [1, N, key_heads * key_dim], values [1, N, value_heads * value_dim], log decays
        and betas [1, N, value_heads]; `state` is [1, value_heads, key_dim, value_dim].
        """
        ...

    def between(self, x: Value, start: Value, stop: Value) -> Value:
        """Return the rows from `start` to before `stop` of the leading axis."""
        ...


class Emitter(Ops, Protocol):
    """An `Ops` with what becomes of the nodes: a file of its format, here called graph, and one with its constants."""

    FILE: ClassVar[str]  # the usual name of a graph
    VERSIONS: ClassVar[dict[str, str]]  # of the operator sets

    def __init__(self, name: str) -> None: ...

    def save(self, path: Path) -> None:
        """Write the graph to `path` and its constants beside it."""
        ...

    def constants(self, path: Path) -> tuple[Path, list[tuple[int, int]]]:
        """Return the file with the constants of the graph just written, and (offset, size) in bytes of each."""
        ...

    @staticmethod
    def ports(path: Path) -> tuple[list[Port], list[Port]]:
        """Return the inputs and outputs that a reader of a written graph finds."""
        ...
