"""What a runtime library provides: graphs that run on NumPy memory, and key/value caches in the form they want them.

Knows the interface and which library a bundle is for; imports that one alone. Does not know what graphs compute.
"""

import functools
import importlib
from collections.abc import Iterable
from typing import Any, Protocol, cast

from dflash_graphs.errors import BundleError, UnsupportedError
from dflash_graphs.manifest import Manifest
from numpy.typing import NDArray

from .bundle import Bundle
from .device import Settings

_HOMES = {"openvino": "openvino_models", "onnx": "onnx_models"}


class Graph(Protocol):
    """A graph with its memory; ports by name."""

    def bind(self, name: str, array: NDArray[Any]) -> None:
        """Give an input the memory it reads; an input with token rows is bound once its values stand there."""
        ...

    def bind_output(self, name: str, array: NDArray[Any]) -> None:
        """Give an output the memory it is written to."""
        ...

    def bind_layers(self, name: str, array: NDArray[Any]) -> None:
        """Give the inputs `name.i` of the recurrent layers the memory array[0], array[1], …"""
        ...

    def bind_layers_output(self, name: str, array: NDArray[Any]) -> None:
        """Give the outputs `name.i` of the recurrent layers the memory array[0], array[1], …"""
        ...

    def run(self) -> None: ...

    def twin(self) -> "Graph":
        """Return the same graph with ports of its own; only one of them can run at a time."""
        ...

    def output(self, name: str) -> NDArray[Any]:
        """A view of the output, valid until the next run."""
        ...

    def layers_rows(self, name: str, sizes: tuple[int, int], start: int, stop: int) -> NDArray[Any]:
        """Rows of an output of several layers, [layers, rows, width] with `sizes` layers and width.

        Valid until the next run.
        """
        ...


class Cache(Protocol):
    """Keys and values of every attention layer of a graph."""

    def place(self, past: int, rows: int) -> None:
        """Say where the next run stands: after `past` cached positions; what stood behind them is lost."""
        ...

    def write(self, name: str, start: int, rows: NDArray[Any]) -> None:
        """Store rows [layers, T, kv_heads, head_dim] at positions start, start + 1, …; `name` is `key` or `value`."""
        ...


class Backend(Protocol):
    """A runtime library."""

    package: str
    is_strict: bool  # whether a bundle that is not bit-exact is refused rather than reported
    huge_pages_seconds: float  # at most, that a load spends on them unless asked

    def fewest_rows(self, weight_format: str) -> int:
        """Return the fewest rows of a call that may be as exact as wider ones; the self-test tries from there."""
        ...

    def version(self) -> str: ...

    def cpu_name(self) -> str: ...

    def precisions(self) -> dict[str, tuple[str, ...]]:
        """Return the precisions of products on this CPU, each with those of its caches, the default first."""
        ...

    def choose_settings(
        self, weight_format: str, threads: int | None, precision: str | None = None, kv_precision: str | None = None
    ) -> Settings:
        """Return the settings that keep results exact for weights of this format on this CPU, but for what is asked."""
        ...

    def attempts(self, settings: Settings) -> tuple[Settings, ...]:
        """Return the settings to try, one after the other, until results are exact."""
        ...

    def graph(self, bundle: Bundle, name: str, settings: Settings) -> Graph:
        """Load a graph without attention."""
        ...

    def attention_graph(self, bundle: Bundle, name: str, settings: Settings, capacity: int) -> tuple[Graph, Cache]:
        """Load the target or the drafter with a cache for `capacity` positions."""
        ...


def is_same_memory(before: NDArray[Any] | None, array: NDArray[Any]) -> bool:
    """Whether `array` is what a port reads or writes already, so that it need not be bound again."""
    if before is array:
        return True  # seen sooner than below: Python is slow right after a graph has run
    if before is None or before.shape != array.shape or before.dtype != array.dtype:
        return False
    return bool(before.__array_interface__["data"] == array.__array_interface__["data"])


def layer_ports(ports: Iterable[str], name: str) -> list[str]:
    """Return those of `ports` that are `name.i` of some layer i, in order of i."""
    found = (port for port in ports if port.rpartition(".")[0] == name)
    return sorted(found, key=lambda port: int(port.rpartition(".")[2]))


def backend_for(manifest: Manifest) -> Backend:
    """Return the library a bundle was exported for; raises BundleError and, where it is missing, UnsupportedError."""
    if manifest.backend not in _HOMES:
        raise BundleError(f"the bundle is for the backend {manifest.backend!r}; known: {', '.join(_HOMES)}")
    try:
        return _load(manifest.backend)
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is missing; run: pip install 'dflash-openvino[onnxruntime]'"
        raise UnsupportedError(message) from error


@functools.cache
def _load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f".{_HOMES[name]}", __package__).backend())
