"""Builds an ONNX model node by node and writes it with its weights in a file beside it.

Knows the file format: operator sets, ports, external data. Does not know which nodes an operation becomes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx import TensorProto, helper

from .manifest import TOKENS, Port
from .onnx_products import join_products
from .vocabulary import Dim, Value
from .weights import Array

_OPSETS = {"": 24, "com.microsoft": 1}
_PRODUCER = "dflash-openvino"
TYPES = {
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


class OnnxGraph:
    """A model in the making; equal nodes and equal small constants are made once."""

    FILE: ClassVar[str] = "model.onnx"
    VERSIONS: ClassVar[dict[str, str]] = {f"{domain or 'ai.onnx'} opset": str(n) for domain, n in _OPSETS.items()}

    def __init__(self, name: str) -> None:
        self._name = name
        self._places: list[tuple[int, int]] = []  # of the written constants: offset, size
        self._inputs: dict[str, Any] = {}
        self._outputs: list[Any] = []
        self._renamed: dict[str, str] = {}
        self._nodes: list[Any] = []
        self._known: dict[Any, list[str]] = {}
        self._small: list[Any] = []
        self._large: dict[str, list[Array]] = {}  # parts that follow each other along the first axis
        self._externals: dict[int, tuple[Array, Value]] = {}  # by id of the array

    def input(self, name: str, shape: Sequence[Dim], dtype: str = "f32") -> Value:
        self._inputs.setdefault(name, helper.make_tensor_value_info(name, TYPES[dtype], list(shape)))
        return name

    def output(self, name: str, value: Value, shape: Sequence[Dim]) -> None:
        dims = [TOKENS if size == -1 else size for size in shape]
        assert value not in self._renamed and value not in self._inputs
        self._renamed[value] = name
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))

    def layers_input(self, name: str, layers: Sequence[int], shape: Sequence[int]) -> dict[int, Value]:
        return {i: self.input(f"{name}.{i}", shape) for i in layers}  # taking a stacked one apart would copy it

    def layers_output(self, name: str, values: Mapping[int, Value], shape: Sequence[int]) -> None:
        for i, value in values.items():
            self.output(f"{name}.{i}", value, shape)

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
        if id(array) not in self._externals:
            name = f"weight_{len(self._large)}"
            self._large[name], self._externals[id(array)] = [array.reshape(shape)], (array, name)
        return self._externals[id(array)][1]

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

    def _index(self, values: Sequence[int]) -> Value:
        return self.constant(np.asarray(values, np.int64))

    def _used_nodes(self) -> list[Any]:
        used, wanted = [], set(self._renamed)
        for node in reversed(self._nodes):
            if wanted.intersection(node.output):
                used.append(node)
                wanted.update(node.input)
        return used[::-1]

    def save(self, path: Path) -> None:
        """Write the model to `path` (.onnx) and its large constants, one after the other, to `path`.data."""
        data = path.with_name(f"{path.name}.data")
        self._nodes = join_products(self._used_nodes(), self._large)
        for node in self._nodes:
            node.input[:] = [self._renamed.get(name, name) for name in node.input]
            node.output[:] = [self._renamed.get(name, name) for name in node.output]
        with data.open("wb") as file:
            large = [self._write(file, data.name, name, parts) for name, parts in self._large.items()]
        ports = (list(self._inputs.values()), self._outputs)
        graph = helper.make_graph(self._nodes, self._name, *ports, [*self._small, *large])
        opsets = [helper.make_opsetid(domain, version) for domain, version in _OPSETS.items()]
        version = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
        model = helper.make_model(graph, opset_imports=opsets, ir_version=version, producer_name=_PRODUCER)
        path.write_bytes(model.SerializeToString())

    def _write(self, file: Any, location: str, name: str, parts: list[Array]) -> Any:
        file.seek(-file.tell() % _ALIGNMENT, 1)
        start, first = file.tell(), parts[0]
        dims = (sum(map(len, parts)), *first.shape[1:]) if first.shape else ()
        tensor = TensorProto(name=name, data_type=_ARRAYS[first.dtype.name], dims=dims)
        for part in parts:
            self._places.append((file.tell(), part.nbytes))
            file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        tensor.data_location = TensorProto.EXTERNAL
        for key, entry in (("location", location), ("offset", str(start)), ("length", str(file.tell() - start))):
            tensor.external_data.add(key=key, value=entry)
        return tensor

    def constants(self, path: Path) -> tuple[Path, list[tuple[int, int]]]:
        return path.with_name(f"{path.name}.data"), self._places

    @staticmethod
    def ports(path: Path) -> tuple[list[Port], list[Port]]:
        graph = onnx.load(path, load_external_data=False).graph
        return [_port(port) for port in graph.input], [_port(port) for port in graph.output]


def _port(port: Any) -> Port:
    kinds, tensor = {kind: name for name, kind in TYPES.items()}, port.type.tensor_type
    shape = tuple(size.dim_param or size.dim_value for size in tensor.shape.dim)
    return Port(name=port.name, dtype=kinds[tensor.elem_type], shape=shape)
