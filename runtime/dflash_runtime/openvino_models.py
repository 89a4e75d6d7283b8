"""The graphs of a bundle on OpenVINO's CPU plugin.

One compiled graph serves every row count: the files are static, the token axis is opened here before compiling, so
prefill and verify share one packed copy of the weights. Caches are NumPy arrays bound once as tensors.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
from dflash_graphs.manifest import Manifest
from dflash_graphs.specs import AttentionSpec
from numpy.typing import NDArray

from .backends import is_same_memory, layer_ports
from .bundle import Bundle
from .device import Settings, choose_settings, precisions
from .paged import BLOCK, PagedLayer, use_paged_attention

_KV_TYPES = {
    "f32": (np.float32, ov.Type.f32),
    "f16": (np.float16, ov.Type.f16),
    "bf16": (np.uint16, ov.Type.bf16),
    "u8": (np.uint8, ov.Type.u8),
}


class CompiledGraph:
    """A compiled graph with one request; implements `backends.Graph`."""

    def __init__(self, compiled: ov.CompiledModel) -> None:
        self._compiled = compiled
        self._request = compiled.create_infer_request()
        self._outputs = {port.get_any_name(): port for port in compiled.outputs}
        self.input_shapes = {port.get_any_name(): port.get_partial_shape() for port in compiled.inputs}
        self._bound: dict[str, NDArray[Any]] = {}  # tensors only borrow the memory
        self._taking_turns: dict[int, tuple[NDArray[Any], list[tuple[Any, ov.Tensor]]]] = {}  # by id of the array

    def bind(self, name: str, array: NDArray[Any], kind: ov.Type | None = None) -> None:
        """As the protocol says; `kind` is the type of values that NumPy knows by their bits alone."""
        before, self._bound[name] = self._bound.get(name), array
        if is_same_memory(before, array):
            return  # a tensor costs 50 us
        tensor = ov.Tensor(array, shared_memory=True) if kind is None else ov.Tensor(array, ov.Shape(array.shape), kind)
        self._request.set_tensor(name, tensor)

    def bind_output(self, name: str, array: NDArray[Any]) -> None:
        self.bind(name, array)

    def bind_layers(self, name: str, array: NDArray[Any]) -> None:
        self.bind(name, array.reshape(self.input_shapes[name].to_shape()))  # the ports are stacked

    def bind_layers_output(self, name: str, array: NDArray[Any]) -> None:
        if id(array) not in self._taking_turns:
            ports = zip(layer_ports(self._outputs, name), array, strict=True)  # stacked, these would be copied
            tensors = [(self._outputs[port], ov.Tensor(part, shared_memory=True)) for port, part in ports]
            self._taking_turns[id(array)] = (array, tensors)
        for port, tensor in self._taking_turns[id(array)][1]:
            self._request.set_tensor(port, tensor)

    def twin(self) -> "CompiledGraph":
        return CompiledGraph(self._compiled)

    def run(self) -> None:
        self._request.start_async()  # `infer` would copy every output: states and logits, tens of megabytes
        self._request.wait()

    def output(self, name: str) -> NDArray[Any]:
        view: NDArray[Any] = self._request.get_tensor(self._outputs[name]).data
        return view

    def layers_rows(self, name: str, sizes: tuple[int, int], start: int, stop: int) -> NDArray[Any]:
        layers, width = sizes
        return self.output(name).reshape(layers, -1, width)[:, start:stop]


class _PagedCache:
    """Key and value blocks of every attention layer and the control inputs that say where a call stands."""

    def __init__(self, graph: CompiledGraph, layers: Sequence[PagedLayer], capacity: int, kv: str) -> None:
        self._graph, self._has_types = graph, any(layer.bidirectional for layer in layers)
        self._takes_single_rows = "attended_rows" in graph.input_shapes
        dtype, kind = _KV_TYPES[kv]
        rows, types = np.arange(capacity, dtype=np.int32), np.ones(capacity, np.int32)
        self._rows, self._first_twice = functools.cache(lambda count: rows[:count]), np.zeros(2, np.int32)
        self._types = functools.cache(lambda count: types[:count])  # one group: rows of a block see each other
        blocks = capacity // BLOCK + 1  # a single row may be run with a copy
        self.blocks: dict[str, NDArray[Any]] = {}  # [layers, blocks, kv_heads, BLOCK, head_dim], and with u8 the scales
        for name in ("key", "value"):
            sizes = [size.get_length() for size in list(graph.input_shapes[f"{name}_cache.{layers[0].index}"])[1:]]
            self.blocks[name] = np.zeros((len(layers), blocks, *sizes), dtype)
            for layer, array in zip(layers, self.blocks[name], strict=True):
                graph.bind(f"{name}_cache.{layer.index}", array, kind)
        self._past, self._begins = np.zeros(1, np.int32), np.zeros(2, np.int32)
        self._total = np.zeros((), np.int32)
        controls = {
            "past_lens": self._past,
            "subsequence_begins": self._begins,
            "block_indices": np.arange(blocks, dtype=np.int32),
            "block_indices_begins": np.array([0, blocks], np.int32),
            "max_context_len": self._total,
        }
        for name, array in controls.items():
            graph.bind(name, array)

    def place(self, past: int, rows: int) -> None:
        if self._takes_single_rows:
            self._graph.bind("own_rows", self._rows(rows))
            self._graph.bind("attended_rows", self._rows(rows) if rows > 1 else self._first_twice)
            rows = max(rows, 2)
        self._past[0], self._begins[1], self._total[...] = past, rows, past + rows
        if self._has_types:
            self._graph.bind("token_type_ids", self._types(rows))

    def write(self, name: str, start: int, rows: NDArray[Any]) -> None:
        cache, done, count = self.blocks[name], 0, rows.shape[1]
        rows = rows.view(cache.dtype).transpose(0, 2, 1, 3)
        while done < count:
            block, offset = divmod(start + done, BLOCK)
            take = min(BLOCK - offset, count - done)
            cache[:, block, :, offset : offset + take] = rows[:, :, done : done + take]
            done += take


class OpenVinoBackend:
    """Implements `backends.Backend`."""

    package = "openvino"
    is_strict = True
    huge_pages_seconds = 0.0  # all would gain 2 to 5 %, for a load of twice the time and a tenth more memory

    def __init__(self) -> None:
        self._core = ov.Core()

    def fewest_rows(self, weight_format: str) -> int:
        return 1 if _gains_by_single_rows(weight_format) else 2

    def version(self) -> str:
        return str(ov.get_version())

    def cpu_name(self) -> str:
        return str(self._core.get_property("CPU", "FULL_DEVICE_NAME"))

    def precisions(self) -> dict[str, tuple[str, ...]]:
        return precisions(self._core)

    def choose_settings(
        self, weight_format: str, threads: int | None, precision: str | None = None, kv_precision: str | None = None
    ) -> Settings:
        return choose_settings(self._core, weight_format, threads, precision, kv_precision)

    def attempts(self, settings: Settings) -> tuple[Settings, ...]:
        return tuple(dict.fromkeys((settings, settings.without_quantization())))

    def graph(self, bundle: Bundle, name: str, settings: Settings) -> CompiledGraph:
        model = _open_tokens(self._core.read_model(bundle.graph(name)))
        if name == "drafter_context":
            model = _cast_outputs(model, _KV_TYPES[settings.kv_precision][1])
        return self._compile(model, settings)

    def attention_graph(
        self, bundle: Bundle, name: str, settings: Settings, capacity: int
    ) -> tuple[CompiledGraph, _PagedCache]:
        spec, layers = _attention_layers(bundle.manifest, name)
        single = name == "target" and _gains_by_single_rows(bundle.manifest.graphs[name].weight_format)
        model = self._core.read_model(bundle.graph(name))
        use_paged_attention(model, spec, layers, single)
        graph = self._compile(_open_tokens(model), settings)
        return graph, _PagedCache(graph, layers, capacity, settings.kv_precision)

    def _compile(self, model: ov.Model, settings: Settings) -> CompiledGraph:
        return CompiledGraph(self._core.compile_model(model, "CPU", settings.properties()))


def backend() -> OpenVinoBackend:
    return OpenVinoBackend()


def _attention_layers(manifest: Manifest, graph: str) -> tuple[AttentionSpec, list[PagedLayer]]:
    if graph == "target":
        return manifest.target.attention, [PagedLayer(i) for i in manifest.target.attention_layers]
    assert manifest.drafter is not None
    layers = enumerate(manifest.drafter.layers)
    return manifest.drafter.attention, [PagedLayer(i, layer.window or 0, not layer.causal) for i, layer in layers]


def _gains_by_single_rows(weight_format: str) -> bool:
    """Products with integer weights take as long for two rows as for one."""
    return not weight_format.startswith("int")


def _open_tokens(model: ov.Model) -> ov.Model:
    """Open the token axis of a graph."""
    open_ports = ("embeddings", "position_ids", "hidden", "drafted", "features", "rows_before", "rows_behind", "full")
    ports = [port for port in model.inputs if port.get_any_name() in open_ports]
    model.reshape({p: ov.PartialShape([-1, *(d.get_length() for d in list(p.partial_shape)[1:])]) for p in ports})
    return model


def _cast_outputs(model: ov.Model, kind: ov.Type) -> ov.Model:
    """Let a graph write its outputs in the cache precision."""
    steps = ov.preprocess.PrePostProcessor(model)
    for i in range(len(model.outputs)):
        steps.output(i).tensor().set_element_type(kind)
    return steps.build()
