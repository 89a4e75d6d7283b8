"""What a bundle looks like for each runtime library: one entry per backend.

Knows which emitter writes the graphs and which sizes and weight layouts it takes. Does not know checkpoints.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dflash_graphs.errors import ExportError
from dflash_graphs.manifest import DRAFTED, POSITIONS, TOKENS
from dflash_graphs.vocabulary import Dim, Emitter


@dataclass(frozen=True, kw_only=True)
class Backend:
    """An emitter and what it wants to be given."""

    name: str
    emitter: type[Emitter]
    packages: tuple[str, ...]  # that write its files
    rows: Dim | None = None  # token rows, rows of drafts and cached positions of the graphs; None: as the request says
    drafted: Dim | None = None
    capacity: Dim | None = None
    blocked: bool = False  # whether integers are unsigned, with a scale for every block of columns


def _openvino() -> Backend:
    from dflash_graphs.openvino_emitter import OpenVinoOps

    return Backend(name="openvino", emitter=OpenVinoOps, packages=("openvino", "nncf"))


def _onnx() -> Backend:
    try:
        from dflash_graphs.onnx_emitter import OnnxOps
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is missing; run: pip install 'dflash-openvino[export,onnxruntime]'"
        raise ExportError(message) from error
    return Backend(
        name="onnx",
        emitter=OnnxOps,
        packages=("onnx", "nncf"),
        rows=TOKENS,
        drafted=DRAFTED,
        capacity=POSITIONS,
        blocked=True,
    )


BACKENDS: dict[str, Callable[[], Backend]] = {"openvino": _openvino, "onnx": _onnx}
