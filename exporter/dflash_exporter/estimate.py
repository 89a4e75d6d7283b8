"""What an export will download, write and need, told before any weights are here.

Knows sizes: of files on the Hub, and of every matrix in every weight format. Does not know the Hub (`hub`) and does not
build graphs (`plan` does, once the checkpoints are on this machine). Refuses a pair that could not be exported.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_graphs.errors import ExportError
from dflash_graphs.manifest import Int4
from dflash_graphs.memory import available_memory, cache_bytes
from dflash_graphs.specs import DrafterSpec, TargetSpec

from .calibration import RECORDED_BYTES
from .checkpoint import DTYPES
from .drafter_config import drafter_spec
from .formats import FORMATS, Format
from .hf_config import target_spec
from .hub import HubOptions, Listing, inspect
from .plan import ExportRequest, formats_of
from .repository import free_space
from .shapes import EMBEDDING, expected_shapes, head_name

_MOST_MEMORY = 3_000_000_000  # bytes of memory an export takes; it streams, so this holds for any size
_LAYERS = 3  # times its size that the work on an MLP takes in memory
_LEAST_MEMORY = 500_000_000  # of them for Python, OpenVINO and NNCF themselves


@dataclass(frozen=True)
class Estimate:
    """Sizes in bytes; those of bundles are right within a few percent."""

    request: ExportRequest
    target: Listing
    drafter: Listing | None
    bundles: dict[str, int]  # weight format of the target -> size of the bundle
    copy: int  # of them on the disk for a while: an int8 copy of the target that reads a data set
    calibration: int  # memory for that copy, what is recorded and the work on a layer; 0 without a data set
    loaded: int  # memory the bundle takes when loaded for `request.capacity` tokens: weights and caches
    cache: Path  # where downloads go

    @property
    def download(self) -> int:
        return self.target.missing + (self.drafter.missing if self.drafter else 0)

    @property
    def bundle(self) -> int:
        return self.bundles[self.request.weight_format]

    @property
    def memory(self) -> int:
        """Memory the export takes at most."""
        streaming = _LEAST_MEMORY + self.target.size + (self.drafter.size if self.drafter else 0)
        return max(min(_MOST_MEMORY, streaming), self.calibration)

    def check(self) -> None:
        """Raise ExportError when the disks or the memory of this machine do not suffice for the export."""
        output = Path(self.request.output)
        written = self.bundle + self.copy
        places = [(self.cache, self.download, "the download"), (output, written, "the bundle")]
        if _device(self.cache) == _device(output):
            places = [(output, self.download + written, "download and bundle")]
        for folder, need, what in places:
            if need > (free := free_space(folder)):
                raise ExportError(
                    f"Not enough space for {what} at {folder}: {_gb(need)} are needed, {_gb(free)} are free. "
                    "Free some, choose another disk (OUT, --cache-dir) or a smaller --weight-format."
                )
        available = available_memory()
        if available is not None and available < self.memory:
            raise ExportError(
                f"The export needs {_gb(self.memory)} of memory, {_gb(available)} are available. Close other programs."
            )

    def lines(self) -> Iterator[str]:
        """Yield the estimate as text."""
        for role, listing in (("target", self.target), ("drafter", self.drafter)):
            if listing is not None:
                commit = f" at {listing.source.revision}" if listing.source.revision else ""
                yield f"{role:<9}{listing.source.name}{commit}: {_gb(listing.size)}, {_gb(listing.missing)} to download"
        yield f"download {_gb(self.download)} to {self.cache}, {_gb(free_space(self.cache))} free"
        output = Path(self.request.output)
        copy = f", {_gb(self.copy)} more for a while" if self.copy else ""
        yield f"bundle   {_gb(self.bundle)} to {output}{copy}, {_gb(free_space(output))} free"
        yield f"formats  {', '.join(f'{name} {_gb(size)}' for name, size in self.bundles.items())}"
        available = available_memory()
        left = "" if available is None else f"; {_gb(available)} available"
        yield (
            f"memory   {_gb(self.memory)} at most to export, about {_gb(self.loaded)} to run it with "
            f"{self.request.capacity} tokens of context{left}"
        )


def estimate(request: ExportRequest, options: HubOptions | None = None) -> Estimate:
    """Inspect both checkpoints of a request, whose `target` and `drafter` may be folders or Hub ids.

    Downloads no more than configurations. A revision in the options is the target's. Raises CheckpointError and
    UnsupportedError when the pair cannot be had or exported.
    """
    options = options or HubOptions()
    target, drafter = inspect(request.target, options), None
    spec, draft_spec = target_spec(target.config, f"{target.source.name}/config.json"), None
    if request.drafter is not None:
        drafter = inspect(request.drafter, options.at(None))
        draft_spec = drafter_spec(drafter.config, spec, f"{drafter.source.name}/config.json")
    embeddings = spec.vocab_size * spec.hidden_size * DTYPES[_stored(target.config)].itemsize
    graphs = {chosen: _graph_bytes(spec, draft_spec, request, chosen) for chosen in FORMATS}
    copy = _trunk_bytes(spec, Format("int8")) if request.int4 is not None and request.int4.dataset is not None else 0
    return Estimate(
        request=request,
        copy=copy,
        calibration=_calibration_bytes(spec, copy) if copy else 0,
        target=target,
        drafter=drafter,
        bundles={chosen: embeddings + size for chosen, size in graphs.items()},
        loaded=graphs[request.weight_format] + cache_bytes(spec, draft_spec, request.capacity, "f32"),
        cache=options.cache,
    )


def _stored(config: Mapping[str, Any]) -> str:
    """The float type of a checkpoint by its configuration, which calls it `dtype` or, older, `torch_dtype`."""
    config = config.get("text_config") or config
    names = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    return names.get(str(config.get("dtype", config.get("torch_dtype"))), "bf16")


def _graph_bytes(target: TargetSpec, drafter: DrafterSpec | None, request: ExportRequest, weight_format: str) -> int:
    """Bytes of all graphs, with a target in `weight_format`."""
    asked = request
    if weight_format != request.weight_format:
        asked = replace(request, weight_format=weight_format, int4=None)
    trunk, head, draft = (Format(name, asked.int4 or Int4()) for name in formats_of(asked))
    total = _matrix_bytes("", (target.vocab_size, target.hidden_size), head)
    total += _trunk_bytes(target, trunk)
    if drafter is not None:
        for name, shape in expected_shapes(drafter).items():
            twice = ".k_proj." in name or ".v_proj." in name  # used for the context and for the block
            total += (1 + twice) * _matrix_bytes(name, shape, draft)
    return total


def _trunk_bytes(target: TargetSpec, weight_format: Format) -> int:
    """Bytes of the target's graph, which holds neither embeddings nor head."""
    shapes = expected_shapes(target)
    return sum(_matrix_bytes(n, s, weight_format) for n, s in shapes.items() if n not in (EMBEDDING, head_name(target)))


def _calibration_bytes(target: TargetSpec, copy: int) -> int:
    """Memory for the int8 copy, mapped and packed, or NNCF's work on a layer in f32, beside what was recorded."""
    attention = target.attention.heads * target.attention.head_dim + target.hidden_size
    width = len(target.layers) * target.hidden_size + len(target.attention_layers) * attention
    layer = 12 * target.hidden_size * target.intermediate_size
    return _LEAST_MEMORY + RECORDED_BYTES * width + max(2 * copy, _LAYERS * layer)


def _matrix_bytes(name: str, shape: tuple[int, ...], weight_format: Format) -> int:
    """Bytes of a matrix as `weights` stores it; vectors count as nothing."""
    if len(shape) != 2:
        return 0
    size = weight_format.layout(name, shape).nbytes(shape)
    if name and weight_format.may_be_4_bits(name, shape):  # which layers keep 8 bits, their values will tell
        size += round((1 - weight_format.int4.ratio) * shape[0] * shape[1] / 2)
    return size


def _device(folder: Path) -> int:
    folder = folder.absolute()
    return next(f for f in (folder, *folder.parents) if f.exists()).stat().st_dev


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
