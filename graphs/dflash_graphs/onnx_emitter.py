"""Turns the operation vocabulary into an ONNX model with its weights in a file beside it.

Knows the ONNX opset and the contrib operators of ONNX Runtime (com.microsoft) that have no standard counterpart there:
FusedMatMul (products of transposed operands), MatMulNBits (products with 4- and 8-bit weights), CausalConvWithState and
LinearAttention (recurrent layers). Does not know any architecture. The numbers of token rows and of cached positions
stay symbolic: one session serves every size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from .manifest import TOKENS, Port
from .specs import DeltaSpec
from .vocabulary import Dim, Value
from .weights import Array, Matrix

_OPSETS = {"": 24, "com.microsoft": 1}
_PRODUCER = "dflash-openvino"
_TYPES = {
    "f32": TensorProto.FLOAT,
    "f16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
}
_ARRAYS = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
}
_INLINE = 1024  # bytes up to which a constant stands in the model itself
_ALIGNMENT = 4096  # of weights in their file, so that they can be mapped
_ACCURACY = 4  # activations in int8, a scale per block: 10 to 100 times as fast as floats, and as exact


class OnnxOps:
    """Emitter for ONNX; implements `dflash_graphs.vocabulary.Emitter` and `KernelOps`."""

    FILE: ClassVar[str] = "model.onnx"
    VERSIONS: ClassVar[dict[str, str]] = {f"{domain or 'ai.onnx'} opset": str(n) for domain, n in _OPSETS.items()}

    def __init__(self, name: str) -> None:
        self._name = name
        self._inputs: dict[str, Any] = {}
        self._outputs: list[Any] = []
        self._renamed: dict[str, str] = {}
        self._nodes: list[Any] = []
        self._known: dict[Any, list[str]] = {}
        self._small: list[Any] = []
        self._large: list[tuple[str, Array]] = []

    @property
    def kernels(self) -> "OnnxOps":
        return self

    # ports and constants

    def input(self, name: str, shape: Sequence[Dim], dtype: str = "f32") -> Value:
        self._inputs.setdefault(name, helper.make_tensor_value_info(name, _TYPES[dtype], list(shape)))
        return name

    def output(self, name: str, value: Value, shape: Sequence[Dim]) -> None:
        dims = [TOKENS if size == -1 else size for size in shape]
        assert value not in self._renamed and value not in self._inputs
        self._renamed[value] = name
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))

    def constant(self, array: Array) -> Value:
        if array.nbytes > _INLINE:
            return self._external(array, array.shape)
        key = (array.tobytes(), array.dtype.name, array.shape)
        if key not in self._known:
            name = f"constant_{len(self._known)}"
            kind = _ARRAYS[array.dtype.name]
            self._small.append(helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True))
            self._known[key] = [name]
        return self._known[key][0]

    def _external(self, array: Array, shape: Sequence[int]) -> Value:
        name = f"weight_{len(self._large)}"
        self._large.append((name, array.reshape(shape)))
        return name

    def label(self, name: str, value: Value) -> Value:
        next(node for node in reversed(self._nodes) if value in node.output).name = name
        return value

    @contextmanager
    def precise(self) -> Iterator[None]:
        yield  # ONNX Runtime computes in the types of the graph

    def _emit(
        self, kind: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **attributes: Any
    ) -> list[str]:
        """Add a node unless there is one that computes the same."""
        key = (kind, tuple(inputs), repr(attributes))
        if key not in self._known:
            name = f"{kind}_{len(self._nodes)}"
            self._known[key] = [name] if outputs == 1 else [f"{name}.{i}" for i in range(outputs)]
            node = helper.make_node(kind, inputs, self._known[key], name=name, domain=domain, **attributes)
            self._nodes.append(node)
        return self._known[key]

    # layers

    def linear(self, x: Value, weight: Matrix, bias: Array | None = None) -> Value:
        y = self._quantized(x, weight) if weight.scale is not None else self._dense(x, weight)
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

    def l2_norm(self, x: Value, eps: float, scale: Array) -> Value:
        squares = self._emit("ReduceSumSquare", [x, self._index([-1])], keepdims=1)[0]
        length = self._emit("Sqrt", [self.add(squares, self.constant(np.array(eps, np.float32)))])[0]
        return self.multiply(self._emit("Div", [x, length])[0], self.constant(scale))

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
        return self._emit("Cast", [x], to=_TYPES[dtype])[0]

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
        return self._emit("Reshape", [x, self._index(shape)])[0]

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

    def causal_convolution(self, x: Value, kernel: NDArray[np.float32]) -> Value:
        before = kernel.shape[2] - 1
        past, new = self.slice(self._batch(x), 0, before, 1), self.slice(self._batch(x), before, 1 << 30, 1)
        inputs, flags = [new, self.constant(kernel), "", past], {"channels_last": 1, "activation": "silu"}
        out = self._emit("CausalConvWithState", inputs, 2, domain="com.microsoft", **flags)[0]
        return self.reshape(out, [-1, kernel.shape[0]])

    def _batch(self, x: Value) -> Value:
        return self._emit("Unsqueeze", [x, self._index([0])])[0]

    def recurrence(
        self, query: Value, key: Value, value: Value, decay: Value, beta: Value, state: Value, spec: DeltaSpec
    ) -> tuple[Value, Value]:
        inputs = [self._batch(x) for x in (query, key, value, state, decay, beta)]
        heads = {"q_num_heads": spec.key_heads, "kv_num_heads": spec.value_heads}
        zero, rule = self._index([0]), {"update_rule": "gated_delta", "scale": 1.0}
        both = self._emit("LinearAttention", inputs, 2, domain="com.microsoft", **heads, **rule)
        return self._emit("Squeeze", [both[0], zero])[0], self._emit("Squeeze", [both[1], zero])[0]

    def between(self, x: Value, start: Value, stop: Value) -> Value:
        return self._emit("Slice", [x, start, stop, self.constant(np.zeros(1, np.int32))])[0]

    def cut(self, x: Value, first: Value, second: Value) -> list[Value]:
        lengths = self.convert(self.concat([first, second], 0), "i64")
        return list(self._emit("Split", [x, lengths], 2, axis=0))

    def _index(self, values: Sequence[int]) -> Value:
        return self.constant(np.asarray(values, np.int64))

    # the finished graph

    def save(self, path: Path) -> None:
        """Write the model to `path` (.onnx) and its large constants, one after the other, to `path`.data."""
        data = path.with_name(f"{path.name}.data")
        for node in self._nodes:
            node.input[:] = [self._renamed.get(name, name) for name in node.input]
            node.output[:] = [self._renamed.get(name, name) for name in node.output]
        with data.open("wb") as file:
            large = [self._write(file, data.name, name, array) for name, array in self._large]
        ports = (list(self._inputs.values()), self._outputs)
        graph = helper.make_graph(self._nodes, self._name, *ports, [*self._small, *large])
        opsets = [helper.make_opsetid(domain, version) for domain, version in _OPSETS.items()]
        version = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=version, producer_name=_PRODUCER)
        path.write_bytes(model.SerializeToString())

    @staticmethod
    def _write(file: Any, location: str, name: str, array: Array) -> Any:
        file.seek(-file.tell() % _ALIGNMENT, 1)
        tensor = TensorProto(name=name, data_type=_ARRAYS[array.dtype.name], dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, entry in (("location", location), ("offset", str(file.tell())), ("length", str(array.nbytes))):
            tensor.external_data.add(key=key, value=entry)
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return tensor

    @staticmethod
    def constants(path: Path) -> tuple[Path, list[tuple[int, int]]]:
        model = onnx.load(path, load_external_data=False)
        entries = [{entry.key: entry.value for entry in tensor.external_data} for tensor in model.graph.initializer]
        return path.with_name(f"{path.name}.data"), [(int(e["offset"]), int(e["length"])) for e in entries if e]

    @staticmethod
    def ports(path: Path) -> tuple[list[Port], list[Port]]:
        graph = onnx.load(path, load_external_data=False).graph
        return [_port(port) for port in graph.input], [_port(port) for port in graph.output]


def _port(port: Any) -> Port:
    kinds, tensor = {kind: name for name, kind in _TYPES.items()}, port.type.tensor_type
    shape = tuple(size.dim_param or size.dim_value for size in tensor.shape.dim)
    return Port(name=port.name, dtype=kinds[tensor.elem_type], shape=shape)
