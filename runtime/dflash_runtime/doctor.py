"""Whether this machine can run bundles, and how it will: versions, CPU, kernels, precision of products, memory.

Knows how to ask the system and OpenVINO. Does not load a bundle and does not print.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import openvino as ov
from dflash_graphs.errors import DFlashError
from dflash_graphs.manifest import read_manifest
from dflash_graphs.memory import available_memory, cache_bytes
from dflash_graphs.openvino_emitter import OpenVinoOps
from dflash_graphs.weights import Matrix
from numpy.typing import NDArray

from .backends import backend_for
from .device import Settings, choose_settings
from .loading import default_context

FORMATS = ("f32", "bf16", "f16", "int8", "int4")
_PACKAGES = ("dflash-openvino", "openvino", "numpy", "tokenizers", "nncf", "huggingface-hub", "onnxruntime")
# what makes products faster, by the names of /proc/cpuinfo (x86-64, then ARM)
_FEATURES = (
    ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "amx_fp16"),
    ("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_GEOMETRIES = ((1024, 512), (1536, 1000))  # in, out; the second is no multiple of a tile
_ROWS = (1, 2, 5, 16)
_GROUP = 128

State = Literal["ok", "warning", "broken"]


@dataclass(frozen=True)
class Finding:
    """One thing found out; `values` holds the same for machines, `advice` what to do unless all is well."""

    name: str
    state: State
    text: str
    values: Mapping[str, Any] = field(default_factory=dict)
    advice: str = ""


def examine(bundle: Path | None = None, max_context: int | None = None) -> Iterator[Finding]:
    """Examine the machine, and whether `bundle` fits it with `max_context` tokens of context; takes a few seconds."""
    core = ov.Core()
    yield _versions()
    yield _command()
    yield _cpu(core)
    for weight_format in FORMATS:
        yield _product(core, weight_format)
    yield _memory() if bundle is None else _fit(bundle, max_context)


def _versions() -> Finding:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    found |= {package: _version(package) for package in _PACKAGES}
    return Finding("versions", "ok", ", ".join(f"{name} {number}" for name, number in found.items()), found)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _command() -> Finding:
    """Find which `dflash` a shell would start: z-lab's package of that name installs one, too."""
    path = shutil.which("dflash")
    values = {"path": path, "ours": path is not None and b"dflash_runtime" in Path(path).read_bytes()}
    if path is None:
        advice = "Start it as `python -m dflash_runtime`, or put its folder on PATH."
        return Finding("command", "warning", "no `dflash` on PATH", values, advice)
    if not values["ours"]:
        advice = "Start this one as `dflash-openvino` or `python -m dflash_runtime`."
        return Finding("command", "warning", f"{path} belongs to another package", values, advice)
    return Finding("command", "ok", path, values)


def _cpu(core: ov.Core) -> Finding:
    flags = _cpu_flags()
    features = None if flags is None else {name: name in flags for names in _FEATURES for name in names}
    name, cores = str(core.get_property("CPU", "FULL_DEVICE_NAME")).strip(), os.cpu_count()
    capabilities = sorted(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))
    here = "features unknown" if features is None else " ".join(feature for feature, has in features.items() if has)
    text = f"{name}, {cores} logical cores; {here}; OpenVINO: {' '.join(capabilities)}"
    values = {"name": name, "logical_cores": cores, "features": features, "openvino_capabilities": capabilities}
    return Finding("cpu", "ok", text, values)


def _cpu_flags() -> set[str] | None:
    """The feature names of the first core, None where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith(("flags", "Features"))), None)


def _product(core: ov.Core, weight_format: str) -> Finding:
    """Compare products with weights of a format against f64, and see by which kernel they were computed."""
    name = f"{weight_format} weights"
    settings = choose_settings(core, weight_format)
    allowed = _allowed_error(settings)
    try:
        kernels, errors = zip(*(_try(core, weight_format, settings, *shape) for shape in _GEOMETRIES), strict=True)
    except RuntimeError as failure:
        advice = "Use another weight format on this machine."
        return Finding(name, "broken", f"OpenVINO fails: {failure}", {"settings": settings.properties()}, advice)
    kernel, error = "/".join(dict.fromkeys(kernels)), max(errors)
    values = {"kernel": kernel, "error": error, "allowed_error": allowed, "settings": settings.properties()}
    dynamic = (
        f", activations quantised in groups of {settings.quantization_group}" if settings.quantization_group else ""
    )
    text = f"products in {settings.precision} by {kernel}{dynamic}; error {error:.1e}"
    if error <= allowed:  # NaN is not
        return Finding(name, "ok", text, values)
    advice = "Use another weight format or `--precision f32`, and report the CPU to OpenVINO."
    return Finding(name, "broken", f"{text}, more than {allowed:.0e}: products are wrong", values, advice)


def _allowed_error(settings: Settings) -> float:
    """Largest error, relative to the root mean square of the results, that rounding explains many times over."""
    if settings.quantization_group:
        return 0.1
    return 0.03 if settings.precision == "bf16" else 1e-4


def _try(core: ov.Core, weight_format: str, settings: Settings, width: int, out: int) -> tuple[str, float]:
    """Multiply by random weights [out, width]; return the kernel and the largest error over all row counts."""
    random = np.random.default_rng(0)
    matrix, exact = _weights(random.standard_normal((out, width)).astype(np.float32), weight_format)
    compiled = _compiled(core, matrix, settings)
    rows = random.standard_normal((max(_ROWS), width)).astype(np.float32)
    seen = rows.astype(ml_dtypes.bfloat16) if settings.precision == "bf16" else rows
    expected = seen.astype(np.float64) @ exact.T
    results = [compiled(rows[:count])[0] for count in _ROWS]
    worst = np.max([np.abs(result - expected[: len(result)]).max() for result in results])
    return _kernel(compiled), float(worst / np.sqrt(np.mean(expected**2)))


def _weights(values: NDArray[np.float32], weight_format: str) -> tuple[Matrix, NDArray[np.float64]]:
    """Round values [out, in] to a weight format; return the matrix and exactly what it stands for."""
    out, width = values.shape
    if not weight_format.startswith("int"):
        dtype = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}[weight_format]
        rounded = values.astype(dtype)
        return Matrix(rounded, (out, width)), rounded.astype(np.float64)
    bits, group = (8, width) if weight_format == "int8" else (4, _GROUP)
    grouped = values.reshape(out, -1, group)
    scale = np.abs(grouped).max(2, keepdims=True) / (2 ** (bits - 1) - 1)
    integers = np.round(grouped / scale).astype(np.int8)
    exact = (integers * scale.astype(np.float64)).reshape(out, width)
    if bits == 8:
        return Matrix(integers.reshape(out, width), (out, width), 8, scale=scale.reshape(out, 1)), exact
    nibbles = integers.reshape(-1).view(np.uint8) & 15
    return Matrix(nibbles[::2] | nibbles[1::2] << 4, (out, width), 4, _GROUP, scale=scale), exact


def _compiled(core: ov.Core, matrix: Matrix, settings: Settings) -> ov.CompiledModel:
    """Compile a product as bundles have it: written, read back, its token axis opened."""
    ops = OpenVinoOps("product")
    ops.output("y", ops.linear(ops.input("x", [max(_ROWS), matrix.shape[1]]), matrix))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Windows keeps mapped files
        path = Path(folder) / "product.xml"
        ops.save(path)
        model = core.read_model(path)
        model.reshape(ov.PartialShape([-1, matrix.shape[1]]))
        return core.compile_model(model, "CPU", settings.properties())


def _kernel(compiled: ov.CompiledModel) -> str:
    """The primitive the plugin chose for the product, known once it has run."""
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        if info["layerType"].astype(str) in ("FullyConnected", "MatMul"):
            return str(info["primitiveType"].astype(str))
    return "an unknown kernel"


def _memory() -> Finding:
    available = available_memory()
    text = "unknown" if available is None else f"{available / 1e9:.1f} GB available"
    return Finding("memory", "ok", text, {"available": available})


def _fit(bundle: Path, max_context: int | None) -> Finding:
    """Compare what a bundle takes when loaded, its weights and caches, with the memory of this machine."""
    try:
        manifest = read_manifest(bundle)
        weights = _weight_bytes(bundle, [graph.file for graph in manifest.graphs.values()])
        settings = backend_for(manifest).choose_settings(manifest.graphs["target"].weight_format, None)
    except (DFlashError, OSError) as error:
        return Finding("bundle", "broken", str(error), advice="Export the bundle again.")
    context = max_context or default_context(manifest, settings)
    caches = cache_bytes(manifest.target, manifest.drafter, context, settings.kv_precision)
    available = available_memory()
    values = {"weights": weights, "caches": caches, "max_context": context, "available": available}
    text = f"{weights / 1e9:.2f} GB of weights and {caches / 1e9:.2f} GB of caches for {context} tokens of context"
    if available is None or weights + caches <= available:
        left = "" if available is None else f", {available / 1e9:.1f} GB available"
        return Finding("bundle", "ok", text + left, values)
    advice = "Close other programs, give a smaller --max-context, or export with a smaller --weight-format."
    return Finding("bundle", "broken", f"{text}, but only {available / 1e9:.2f} GB available", values, advice)


def _weight_bytes(bundle: Path, graphs: Sequence[str]) -> int:
    """Size of the constants, which stand beside a graph."""
    suffixes = {".xml": ".bin", ".onnx": ".onnx.data"}
    files = (bundle / graph for graph in graphs)
    return sum(file.with_suffix(suffixes.get(file.suffix, file.suffix)).stat().st_size for file in files)
