"""The graphs of a bundle on ONNX Runtime's CPU provider.

One session per graph serves every row count. All memory is NumPy's, bound once: nothing is allocated per call and no
output is copied. Caches grow with the context, because attention costs what the cache is long.
"""

import os
from typing import Any

import numpy as np
import onnxruntime as ort
from dflash_graphs.errors import RequestError
from dflash_graphs.manifest import DRAFTED, TOKENS, Graph
from numpy.typing import NDArray

from .backends import is_same_memory, layer_ports
from .bundle import Bundle
from .device import Settings, cpu_name

_ROWS = (TOKENS, DRAFTED)
_STEP = 128  # cached positions a cache grows by
_BLOCK = 64  # columns at most that share a scale, also that of the activations, in integer products


class SessionGraph:
    """A session with its bound memory; implements `backends.Graph`."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session, self._binding = session, session.io_binding()
        self._inputs = {port.name: port.shape[0] for port in session.get_inputs() if port.shape[0] in _ROWS}
        self._outputs: dict[tuple[Any, ...], list[str]] = {}  # with rows: those of all layers by name and shape
        for port in session.get_outputs():
            if port.shape[0] in _ROWS:
                self._outputs.setdefault((port.name.rpartition(".")[0], *port.shape), []).append(port.name)
        ports = [port.name for port in (*session.get_inputs(), *session.get_outputs())]
        names = {port.rpartition(".")[0] for port in ports if "." in port}
        self._layers = {name: layer_ports(ports, name) for name in names}
        self._bound: dict[str, NDArray[Any]] = {}
        self._memory: dict[str, NDArray[np.float32]] = {}  # by the first port: [layers, most rows so far, …]
        self._rows: dict[str, int] = {}
        self._run_rows: dict[str, int] = {}

    def bind(self, name: str, array: NDArray[Any]) -> None:
        if name in self._inputs:
            self._rows[self._inputs[name]] = len(array)
        self._bind(self._binding.bind_input, name, array)

    def bind_output(self, name: str, array: NDArray[Any]) -> None:
        self._bind(self._binding.bind_output, name, array)

    def _bind(self, method: Any, name: str, array: NDArray[Any]) -> None:
        before, self._bound[name] = self._bound.get(name), array
        if not is_same_memory(before, array):  # a binding costs 15 us
            method(name, "cpu", 0, array.dtype.type, array.shape, array.__array_interface__["data"][0])

    def bind_layers(self, name: str, array: NDArray[Any]) -> None:
        for port, part in zip(self._layers[name], array, strict=True):
            self.bind(port, part)

    def bind_layers_output(self, name: str, array: NDArray[Any]) -> None:
        for port, part in zip(self._layers[name], array, strict=True):
            self.bind_output(port, part)

    def twin(self) -> "SessionGraph":
        return SessionGraph(self._session)

    def run(self) -> None:
        if self._rows != self._run_rows:
            for (_, size, *shape), ports in self._outputs.items():
                rows, memory = self._rows[size], self._memory.get(ports[0])
                if memory is None or memory.shape[1] < rows:
                    memory = self._memory[ports[0]] = np.empty((len(ports), rows, *shape), np.float32)
                for port, part in zip(ports, memory, strict=True):
                    self.bind_output(port, part[:rows])
            self._run_rows = dict(self._rows)
        self._session.run_with_iobinding(self._binding)

    def output(self, name: str) -> NDArray[Any]:
        return self._bound[name]

    def layers_rows(self, name: str, sizes: tuple[int, int], start: int, stop: int) -> NDArray[Any]:
        layers, width = sizes
        return self._memory[self._layers[name][0]][:, start:stop].reshape(layers, -1, width)


class DenseCache:
    """Keys and values in the layout of `dflash_graphs.cached_attention`, updated in place by the graph."""

    def __init__(self, graph: SessionGraph, ports: Graph) -> None:
        self._graph, self._size = graph, 0
        self._has_positions = any(port.name == "cache_positions" for port in ports.inputs)
        names = {port.name: port.shape for port in ports.inputs if port.name.startswith(("past_key.", "past_value."))}
        self._arrays = {
            name.removeprefix("past_"): np.zeros((1, int(shape[1]), 0, int(shape[3])), np.float32)
            for name, shape in names.items()
        }

    def place(self, past: int, rows: int) -> None:
        needed = past + rows + 1  # an odd number of rows is run with a copy of the last
        size = -(-needed // _STEP) * _STEP
        if size > self._size or size < self._size // 4:
            self._resize(size)

    def _resize(self, size: int) -> None:
        kept = min(size, self._size)
        for name, old in self._arrays.items():
            new = np.zeros((*old.shape[:2], size, old.shape[3]), np.float32)
            new[:, :, :kept] = old[:, :, :kept]
            self._arrays[name] = new
            self._graph.bind(f"past_{name}", new)
            self._graph.bind_output(f"present_{name}", new)
        if self._has_positions:
            self._graph.bind("cache_positions", np.arange(size, dtype=np.int32))
        self._size = size

    def write(self, name: str, start: int, rows: NDArray[Any]) -> None:
        self.place(start, rows.shape[1])
        for layer, new in enumerate(rows):
            cache = self._arrays[f"{name}.{layer}"][0]  # [parts * kv_heads, P, head_dim / parts]
            split = new.reshape(*new.shape[:2], -1, cache.shape[2]).transpose(2, 1, 0, 3)
            cache[:, start : start + len(new)] = split.reshape(len(cache), len(new), -1)


class OnnxBackend:
    """Implements `backends.Backend`."""

    package = "onnxruntime"
    is_strict = False
    huge_pages_seconds = 2.0  # small models gain 15 to 20 %

    def fewest_rows(self, weight_format: str) -> int:
        return 1

    def version(self) -> str:
        return str(ort.__version__)

    def cpu_name(self) -> str:
        return cpu_name()

    def precisions(self) -> dict[str, tuple[str, ...]]:
        return {"f32": ("f32",)}

    def choose_settings(
        self, weight_format: str, threads: int | None, precision: str | None = None, kv_precision: str | None = None
    ) -> Settings:
        for asked in (precision, kv_precision):
            if asked not in (None, "f32"):
                raise RequestError(f"ONNX Runtime computes and caches in f32 here; {asked!r} needs an OpenVINO bundle")
        if threads is not None and threads < 1:
            raise RequestError(f"threads must be at least 1, not {threads}")
        return Settings(
            precision="f32",
            kv_precision="f32",
            quantization_group=_BLOCK if weight_format.startswith("int") else 0,
            threads=min(threads, os.cpu_count() or threads) if threads else 0,
        )

    def attempts(self, settings: Settings) -> tuple[Settings, ...]:
        return (settings,)  # the graphs say how to compute

    def graph(self, bundle: Bundle, name: str, settings: Settings) -> SessionGraph:
        options = ort.SessionOptions()
        options.intra_op_num_threads = settings.threads
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")  # threads of other sessions need the cores
        return SessionGraph(ort.InferenceSession(bundle.graph(name), options, providers=["CPUExecutionProvider"]))

    def attention_graph(
        self, bundle: Bundle, name: str, settings: Settings, capacity: int
    ) -> tuple[SessionGraph, DenseCache]:
        graph = self.graph(bundle, name, settings)
        return graph, DenseCache(graph, bundle.manifest.graphs[name])


def backend() -> OnnxBackend:
    return OnnxBackend()
