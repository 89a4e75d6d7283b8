"""Turns the operation vocabulary into an `openvino.Model` and writes it as IR.

Knows OpenVINO's opset and the patterns its CPU plugin recognises (compressed products, RMS, rotary). Does not know any
architecture.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import openvino as ov
from openvino import opset15 as op
from openvino.op import Constant

from .manifest import STATES, Port
from .vocabulary import Dim, Value
from .weights import Array, Matrix

_TYPES = {"f32": ov.Type.f32, "f16": ov.Type.f16, "bf16": ov.Type.bf16, "i32": ov.Type.i32, "bool": ov.Type.boolean}


class OpenVinoOps:
    """Emitter for OpenVINO; implements `dflash_graphs.vocabulary.Emitter`."""

    FILE: ClassVar[str] = "openvino_model.xml"
    VERSIONS: ClassVar[dict[str, str]] = {}

    def __init__(self, name: str) -> None:
        self._name = name
        self._inputs: dict[str, Any] = {}
        self._outputs: list[Any] = []
        self._precise: set[str] = set()
        self._decompressed: set[str] = set()
        self._arrays: list[Array] = []
        self._is_precise = False
        self._count = 0

    # ports and constants

    @property
    def kernels(self) -> None:
        return None  # the runtime puts PagedAttention in the place of the portable form

    def input(self, name: str, shape: Sequence[Dim], dtype: str = "f32") -> Value:
        if name not in self._inputs:
            self._inputs[name] = op.parameter(list(shape), _TYPES[dtype], name=name)
            self._inputs[name].output(0).set_names({name})
        return self._inputs[name].output(0)

    def output(self, name: str, value: Value, shape: Sequence[Dim] = ()) -> None:
        node = op.result(value)
        node.set_friendly_name(f"{name}/result")
        node.output(0).set_names({name})
        self._outputs.append(node)

    def layers_input(self, name: str, layers: Sequence[int], shape: Sequence[int]) -> dict[int, Value]:
        stacked = self.input(name, [len(layers), *shape])  # a port of its own would cost each layer 50 us a call
        parts = self.split(stacked, [1] * len(layers), 0)
        return {i: self.reshape(part, shape) for i, part in zip(layers, parts, strict=True)}

    def layers_output(self, name: str, values: Mapping[int, Value], shape: Sequence[int]) -> None:
        self.output(name, self.concat(list(values.values()), 0))  # all of the first layer, then of the second, …

    def constant(self, array: Array) -> Value:
        if array.dtype.name == "bfloat16":
            return self._packed_constant(array, array.shape, ov.Type.bf16)
        raw = np.ascontiguousarray(array)
        return self._shared(Constant(raw, shared_memory=True), raw)

    def _packed_constant(self, array: Array, shape: Sequence[int], dtype: ov.Type) -> Value:
        """A constant of a type NumPy lacks, over the array's own bytes."""
        raw = np.ascontiguousarray(array).view(np.uint16 if dtype == ov.Type.bf16 else np.uint8)
        return self._shared(Constant(ov.Tensor(raw, ov.Shape(list(shape)), dtype), shared_memory=True), raw)

    def _shared(self, node: Any, array: Array) -> Value:
        self._arrays.append(array)  # the node only borrows the memory: a mapped file stays a mapped file
        return node.output(0)

    def label(self, name: str, value: Value) -> Value:
        node = value.get_node()
        if node.get_friendly_name() in self._precise:
            self._precise.add(name)
        node.set_friendly_name(name)
        return value

    @contextmanager
    def precise(self) -> Iterator[None]:
        before, self._is_precise = self._is_precise, True
        try:
            yield
        finally:
            self._is_precise = before

    def _emit(self, node: Any) -> Value:
        """Name the node uniquely (the written file is patched by name) and mark it when inside `precise`."""
        self._count += 1
        name = f"{node.get_type_name()}_{self._count}"
        node.set_friendly_name(name)
        if self._is_precise:
            self._precise.add(name)
        return node.output(0)

    # layers

    def linear(self, x: Value, weight: Matrix, bias: Array | None = None) -> Value:
        y = self._emit(op.matmul(x, self._dequantized(weight), False, True))
        return y if bias is None else self.add(y, self.constant(bias))

    def _dequantized(self, weight: Matrix) -> Value:
        """The chain Constant, Convert, [Subtract], Multiply, [Reshape] which the plugin folds into the product."""
        if weight.scale is None:
            constant = self.constant(weight.values)
            if weight.values.dtype == np.float32:
                return constant
            converted = self._emit(op.convert(constant, "f32"))
            self._decompressed.add(converted.get_node().get_friendly_name())  # else the plugin keeps an f32 copy
            return converted
        out, width = weight.shape
        groups = [out, width] if weight.group_size is None else [out, width // weight.group_size, weight.group_size]
        integer = {8: (ov.Type.u8, ov.Type.i8), 4: (ov.Type.u4, ov.Type.i4)}[weight.bits][weight.signed]
        value = self._emit(op.convert(self._packed_constant(weight.values, groups, integer), "f32"))
        if weight.zero_point is not None:
            zero = self._packed_constant(weight.zero_point, [*groups[:-1], 1], integer)
            value = self._emit(op.subtract(value, op.convert(zero, "f32")))
        value = self._emit(op.multiply(value, self.constant(weight.scale)))
        return value if weight.group_size is None else self.reshape(value, [out, width])

    def rms_norm(self, x: Value, weight: Array, eps: float) -> Value:
        with self.precise():
            squares = self.multiply(x, x)  # a power of 2 would match the pattern of NormalizeL2 and lose the mark
            mean = self._emit(op.reduce_mean(squares, _index([-1]), True))
            shifted = self.add(mean, self.constant(np.array(eps, np.float32)))
            inverse = self._emit(op.power(shifted, self.constant(np.array(-0.5, np.float32))))
            return self.multiply(self.multiply(x, inverse), self.constant(weight))

    # elementwise

    def add(self, a: Value, b: Value) -> Value:
        return self._emit(op.add(a, b))

    def subtract(self, a: Value, b: Value) -> Value:
        return self._emit(op.subtract(a, b))

    def multiply(self, a: Value, b: Value) -> Value:
        return self._emit(op.multiply(a, b))

    def exp(self, x: Value) -> Value:
        return self._emit(op.exp(x))

    def cos(self, x: Value) -> Value:
        return self._emit(op.cos(x))

    def sin(self, x: Value) -> Value:
        return self._emit(op.sin(x))

    def sigmoid(self, x: Value) -> Value:
        return self._emit(op.sigmoid(x))

    def silu(self, x: Value) -> Value:
        return self._emit(op.swish(x))

    def softplus(self, x: Value) -> Value:
        return self._emit(op.softplus(x))

    def minimum(self, a: Value, b: Value) -> Value:
        return self._emit(op.minimum(a, b))

    def less(self, a: Value, b: Value) -> Value:
        return self._emit(op.less(a, b))

    def logical_and(self, a: Value, b: Value) -> Value:
        return self._emit(op.logical_and(a, b))

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return self._emit(op.select(condition, a, b))

    def convert(self, x: Value, dtype: str) -> Value:
        return self._emit(op.convert(x, dtype))

    # products, reductions, movement

    def matmul(self, a: Value, b: Value, *, transpose_a: bool = False, transpose_b: bool = False) -> Value:
        return self._emit(op.matmul(a, b, transpose_a, transpose_b))

    def softmax(self, x: Value, axis: int) -> Value:
        return self._emit(op.softmax(x, axis))

    def reduce_max(self, x: Value) -> Value:
        return self._emit(op.reduce_max(x, _index([-1]), False))

    def cumsum(self, x: Value, axis: int) -> Value:
        return self._emit(op.cum_sum(x, _index(axis)))

    def rows(self, x: Value) -> Value:
        return self._emit(op.gather(op.shape_of(x, "i32"), _index([0]), _index(0)))

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return self._emit(op.reshape(x, _index(shape), False))

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        return self._emit(op.transpose(x, _index(order)))

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        return self._emit(op.concat(list(values), axis))

    def split(self, x: Value, lengths: Sequence[int], axis: int) -> list[Value]:
        node = self._emit(op.variadic_split(x, _index(axis), _index(lengths))).get_node()
        return list(node.outputs())

    def slice(self, x: Value, start: int, stop: int, axis: int) -> Value:
        return self._emit(op.slice(x, _index([start]), _index([stop]), _index([1]), _index([axis])))

    def gather(self, x: Value, indices: Value) -> Value:
        return self._emit(op.gather(x, indices, _index(0)))

    # the finished graph

    def model(self) -> ov.Model:
        return ov.Model(self._outputs, list(self._inputs.values()), self._name)

    def save(self, path: Path) -> None:
        """Write IR to `path` (.xml) and its .bin, with the marks that have no Python setter patched into the XML."""
        try:
            ov.serialize(self.model(), path, path.with_suffix(".bin"))
        except RuntimeError as error:
            raise OSError(f"OpenVINO could not write {path.name}, as when the disk is full ({error})") from error
        xml = path.read_text(encoding="utf-8")
        xml = _mark(_mark(xml, "precise", self._precise), "decompression", self._decompressed)
        path.write_text(xml, encoding="utf-8")

    @staticmethod
    def constants(path: Path) -> tuple[Path, list[tuple[int, int]]]:
        places = re.finditer(r'offset="(\d+)" size="(\d+)"', path.read_text(encoding="utf-8"))
        return path.with_suffix(".bin"), [(int(place[1]), int(place[2])) for place in places]

    @staticmethod
    def ports(path: Path) -> tuple[list[Port], list[Port]]:
        model = ov.Core().read_model(path)
        return [_port(port) for port in model.inputs], [_port(port) for port in model.outputs]


def _port(port: ov.Output) -> Port:
    shape = tuple(size.get_length() if size.is_static else STATES for size in list(port.partial_shape))
    return Port(name=port.any_name, dtype=port.element_type.get_type_name(), shape=shape)


def _mark(xml: str, attribute: str, names: set[str]) -> str:
    """Add the runtime attribute to every layer whose name is listed."""
    entry = f'<attribute name="{attribute}" version="0" />'

    def patched(layer: str) -> str:
        name = re.match(r'<layer id="\d+" name="([^"]*)"', layer)
        if name is None or name[1] not in names:
            return layer
        head, sep, tail = layer.partition("<rt_info>")
        if sep:
            return head + sep + entry + tail
        start = layer.index(">") + 1
        return f"{layer[:start]}<rt_info>{entry}</rt_info>{layer[start:]}"

    return "".join(map(patched, re.split(r"(?=<layer )", xml)))  # those of bodies stand inside others


def _index(values: int | Sequence[int]) -> Any:
    return op.constant(np.asarray(values, np.int64))
