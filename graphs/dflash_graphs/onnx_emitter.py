"""Turns the operation vocabulary into nodes of ONNX.

Knows the standard operators and the contrib ones of ONNX Runtime (com.microsoft) that have no counterpart among them:
FusedMatMul (products of transposed operands), MatMulNBits (products with 4- and 8-bit weights), GroupQueryAttention
and LinearAttention (recurrent layers). Does not know any architecture. The numbers of token rows and of cached
positions stay symbolic: one session serves every size.
"""

from collections.abc import Sequence

import numpy as np

from .onnx_graph import TYPES, OnnxGraph
from .specs import AttentionSpec, DeltaSpec
from .vocabulary import Value
from .weights import Array, Matrix

_ACCURACY = 4  # activations in int8, a scale per block: 10 to 100 times as fast as floats, and as exact


class OnnxOps(OnnxGraph):
    """Emitter for ONNX; implements `dflash_graphs.vocabulary.Emitter` and `KernelOps`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._reshaped: dict[Value, tuple[Value, tuple[int, ...] | None]] = {}  # its source and the shape of that

    @property
    def kernels(self) -> "OnnxOps":
        return self

    # layers

    def linear(self, x: Value, weight: Matrix, bias: Array | None = None) -> Value:
        y = self._quantized(x, weight) if weight.scale is not None else self._dense(x, weight)
        self._reshaped[y] = (y, (-1, weight.shape[0]))
        return y if bias is None else self.add(y, self.constant(bias))

    def _dense(self, x: Value, weight: Matrix) -> Value:
        values = self._external(weight.values, weight.shape)
        if weight.values.dtype != np.float32:  # folded when a session is made: the CPU has no other products
            values = self.convert(values, "f32")
        return self._emit("Gemm", [x, values], transB=1)[0]

    def _quantized(self, x: Value, weight: Matrix) -> Value:
        (out, width), block = weight.shape, weight.group_size
        assert weight.scale is not None and block is not None and not weight.signed and weight.zero_point is None
        values = self._external(weight.values, (out, width // block, block * weight.bits // 8))
        scale = self._external(weight.scale, (out, width // block))
        sizes = {"K": width, "N": out, "bits": weight.bits, "block_size": block, "accuracy_level": _ACCURACY}
        return self._emit("MatMulNBits", [x, values, scale], domain="com.microsoft", **sizes)[0]

    def rms_norm(self, x: Value, weight: Array, eps: float) -> Value:
        return self._emit("RMSNormalization", [x, self.constant(weight)], axis=-1, epsilon=eps)[0]

    # elementwise

    def add(self, a: Value, b: Value) -> Value:
        return self._emit("Add", [a, b])[0]

    def subtract(self, a: Value, b: Value) -> Value:
        return self._emit("Sub", [a, b])[0]

    def multiply(self, a: Value, b: Value) -> Value:
        return self._emit("Mul", [a, b])[0]

    def exp(self, x: Value) -> Value:
        return self._emit("Exp", [x])[0]

    def cos(self, x: Value) -> Value:
        return self._emit("Cos", [x])[0]

    def sin(self, x: Value) -> Value:
        return self._emit("Sin", [x])[0]

    def sigmoid(self, x: Value) -> Value:
        return self._emit("Sigmoid", [x])[0]

    def silu(self, x: Value) -> Value:
        return self.multiply(x, self.sigmoid(x))

    def softplus(self, x: Value) -> Value:
        return self._emit("Softplus", [x])[0]

    def minimum(self, a: Value, b: Value) -> Value:
        return self._emit("Min", [a, b])[0]

    def less(self, a: Value, b: Value) -> Value:
        return self._emit("Less", [a, b])[0]

    def logical_and(self, a: Value, b: Value) -> Value:
        return self._emit("And", [a, b])[0]

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return self._emit("Where", [condition, a, b])[0]

    def convert(self, x: Value, dtype: str) -> Value:
        return self._emit("Cast", [x], to=TYPES[dtype])[0]

    # products, reductions, movement

    def matmul(self, a: Value, b: Value, *, transpose_a: bool = False, transpose_b: bool = False) -> Value:
        if not transpose_a and not transpose_b:
            return self._emit("MatMul", [a, b])[0]
        flags = {"transA": int(transpose_a), "transB": int(transpose_b)}
        return self._emit("FusedMatMul", [a, b], domain="com.microsoft", **flags)[0]

    def softmax(self, x: Value, axis: int) -> Value:
        return self._emit("Softmax", [x], axis=axis)[0]

    def reduce_max(self, x: Value) -> Value:
        return self._emit("ReduceMax", [x, self._index([-1])], keepdims=0)[0]

    def cumsum(self, x: Value, axis: int) -> Value:
        return self._emit("CumSum", [x, self._index([axis])])[0]

    def rows(self, x: Value) -> Value:
        return self.convert(self._emit("Shape", [x], start=0, end=1)[0], "i32")

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        source, before = self._reshaped.get(x, (x, None))  # one step instead of two, and none back again
        if before == tuple(shape):
            return source
        y = self._emit("Reshape", [source, self._index(shape)])[0]
        self._reshaped[y] = (source, before)
        return y

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        return self._emit("Transpose", [x], perm=list(order))[0]

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        return values[0] if len(values) == 1 else self._emit("Concat", list(values), axis=axis)[0]

    def split(self, x: Value, lengths: Sequence[int], axis: int) -> list[Value]:
        return list(self._emit("Split", [x, self._index(lengths)], len(lengths), axis=axis))

    def slice(self, x: Value, start: int, stop: int, axis: int) -> Value:
        return self._emit("Slice", [x, *(self._index([n]) for n in (start, stop, axis))])[0]

    def gather(self, x: Value, indices: Value) -> Value:
        return self._emit("Gather", [x, indices], axis=0)[0]

    def store(self, cache: Value, rows: Value, start: Value) -> Value:
        return self._emit("TensorScatter", [cache, rows, self.convert(start, "i64")], axis=2)[0]

    # kernels

    def rotary(self, x: Value, cos: Value, sin: Value, dim: int, shape: tuple[int, int]) -> Value:
        tables = [self.reshape(table, [1, -1, dim // 2]) for table in (cos, sin)]
        inputs, part = [self.reshape(x, [1, -1, shape[0] * shape[1]]), *tables], 0 if dim == shape[1] else dim
        rotated = self._emit("RotaryEmbedding", inputs, num_heads=shape[0], rotary_embedding_dim=part)[0]
        self._reshaped[rotated] = (rotated, (1, -1, shape[0] * shape[1]))
        return self.reshape(rotated, [-1, *shape])

    def causal_attention(
        self, query: Value, key: Value, value: Value, past: tuple[Value, Value], ids: Value, spec: AttentionSpec
    ) -> tuple[Value, Value, Value]:
        """A row alone has other bits: in a call of its own, and behind the last full tile of rows (129 of them, say).

        So an odd number of rows gets one more, a copy of the last, at the position after it; tiles have even sizes.
        """
        rows, one = self._emit("Shape", [ids], start=0, end=1)[0], self._index([1])
        count = self.add(rows, self._emit("Mod", [rows, self._index([2])])[0])
        total = self.add(self.convert(self.slice(ids, 0, 1, 0), "i64"), count)
        places = self._batch(self.minimum(self._range(count), self.subtract(rows, one)))  # [1, count]
        widths = (spec.heads * spec.head_dim, spec.kv_width, spec.kv_width)
        columns = [self.reshape(x, [-1, width]) for x, width in zip((query, key, value), widths, strict=True)]
        positions = self.reshape(self.convert(self._range(total), "f32"), [-1, 1])
        angles = self.multiply(positions, self.constant(spec.rope.inverse_frequencies()))  # of all: the kernel wants so
        ends = [self.convert(n, "i32") for n in (self.subtract(total, one), total)]
        packed = self.gather(self.concat(columns, 1), places)
        inputs = [packed, "", "", *past, *ends, self.cos(angles), self.sin(angles)]
        heads = {"num_heads": spec.heads, "kv_num_heads": spec.kv_heads, "do_rotary": 1}
        out, *present = self._emit("GroupQueryAttention", inputs, 3, domain="com.microsoft", **heads)
        return self._emit("GatherND", [out, self._row_places(rows)])[0], present[0], present[1]

    def _row_places(self, rows: Value) -> Value:
        """Where the first `rows` rows of the only batch stand, i64 [rows, 2]: they come out without the batch axis."""
        row = self.reshape(self._range(rows), [-1, 1])
        return self.concat([self.multiply(row, self._index([0])), row], 1)

    def _range(self, stop: Value) -> Value:
        bounds = [self._emit("Squeeze", [n, self._index([0])])[0] for n in (self._index([0]), stop, self._index([1]))]
        return self._emit("Range", bounds)[0]

    def _batch(self, x: Value) -> Value:
        return self._emit("Unsqueeze", [x, self._index([0])])[0]

    def recurrence(self, rows: Sequence[Value], state: Value, spec: DeltaSpec) -> tuple[Value, Value]:
        inputs = [*rows[:3], state, *rows[3:]]
        attributes = {"q_num_heads": spec.key_heads, "kv_num_heads": spec.value_heads, "update_rule": "gated_delta"}
        out, after = self._emit("LinearAttention", inputs, 2, domain="com.microsoft", scale=1.0, **attributes)
        return out, after

    def between(self, x: Value, start: Value, stop: Value) -> Value:
        return self._emit("Slice", [x, start, stop, self.constant(np.zeros(1, np.int32))])[0]
