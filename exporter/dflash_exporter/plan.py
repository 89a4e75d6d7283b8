"""What an export will write, settled before anything is written.

Knows which checks come first and what the parts of a bundle are made of. Does not write. The graphs are already built
here, over blank weights, so that every problem of a checkpoint but a damaged matrix shows before the first byte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from dflash_graphs import graphs
from dflash_graphs.errors import CheckpointError, ExportError
from dflash_graphs.manifest import Int4
from dflash_graphs.specs import CHUNK, DrafterSpec, TargetSpec
from dflash_graphs.vocabulary import Dim, Emitter
from numpy.typing import NDArray

from .backends import BACKENDS, Backend
from .calibration import windows
from .checkpoint import Checkpoint, Tensor
from .drafter_config import drafter_spec
from .formats import FORMATS, Format, Layout, check_int4
from .hf_config import target_spec
from .ratio import with_ratio
from .shapes import EMBEDDING, expected_shapes, head_name
from .weights import CheckpointWeights

TOKENIZER = "tokenizer.json"
COPIED = (
    TOKENIZER,
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
)


@dataclass(frozen=True)
class ExportRequest:
    """A pair of checkpoint folders and how to write them.

    `weight_format` is f32, bf16, f16, int8 or int4. `head_format` defaults to it, except that an int4 target keeps its
    head at int8; `draft_format` defaults to it. `int4` holds the options of that format, `calibration` token ids of
    texts for those that need some. `capacity` is the number of cached positions the files are written
    for, at most the target's own maximum (a runtime may reshape it). `draft_vocabulary` is how many token ids, from 0
    up, drafts are chosen from (where texts need others: all). `overwrite` replaces an existing bundle, at the very end.
    `backend`, openvino or onnx, is the library that will run it.
    """

    target: str | Path
    output: Path
    drafter: str | Path | None = None
    weight_format: str = "bf16"
    head_format: str | None = None
    draft_format: str | None = None
    int4: Int4 | None = None
    calibration: Sequence[int] = ()
    capacity: int = 4096
    draft_vocabulary: int = 98304  # covers 99.9 % of English text and code with the tokenizer of Qwen3.5
    overwrite: bool = False
    backend: str = "openvino"


@dataclass(frozen=True)
class Part:
    """One graph, built over blank weights."""

    name: str
    weight_format: Format
    ops: Emitter
    weights: CheckpointWeights


@dataclass(frozen=True)
class Plan:
    """Everything an export writes."""

    backend: Backend
    target_folder: Path
    target: TargetSpec
    embeddings: Tensor
    parts: tuple[Part, ...]
    drafter_folder: Path | None = None
    drafter: DrafterSpec | None = None
    int4: Int4 | None = None  # where a part has that format
    texts: NDArray[np.int32] | None = None  # windows of tokens to compress the target with

    @property
    def copy(self) -> int:
        """Bytes of the int8 copy of the target that reads the texts."""
        if self.texts is None:
            return 0
        weights = self.parts[0].weights
        return sum(Layout(8).nbytes(weights.tensors[name].shape) for name in weights.layouts())


def make_plan(request: ExportRequest) -> Plan:
    """Read and check both checkpoints and build the graphs; raises CheckpointError, UnsupportedError, ExportError."""
    if request.backend not in BACKENDS:
        raise ExportError(f"the backend {request.backend!r} is unknown; choose one of {', '.join(BACKENDS)}.")
    backend = BACKENDS[request.backend]()
    target_format, head_format, draft_format = _formats(request, backend)
    for key, value in (("capacity", request.capacity), ("draft_vocabulary", request.draft_vocabulary)):
        if value < 1:
            raise ExportError(f"{key} is {value}; give a positive number.")
    source = Checkpoint(Path(request.target))
    spec = target_spec(source.config, str(source.folder / "config.json"))
    if not (source.folder / TOKENIZER).is_file():
        raise CheckpointError(f"{source.folder} has no {TOKENIZER}. Download the tokenizer files of the target, too.")
    tensors = source.select(expected_shapes(spec))
    int4 = target_format.int4 if "int4" in formats_of(request) else None
    texts = windows(request.calibration) if int4 is not None and int4.dataset is not None else None
    plan = Plan(backend, source.folder, spec, tensors[EMBEDDING], parts=(), int4=int4, texts=texts)
    sizes = _Sizes(backend.rows or CHUNK, backend.capacity or min(request.capacity, spec.max_positions))
    if request.drafter is None:
        target = _target_part(plan, tensors, target_format, (), sizes)
        return replace(plan, parts=(target, _head_part(plan, tensors, head_format, sizes)))
    draft_source = Checkpoint(Path(request.drafter))
    drafter = drafter_spec(draft_source.config, spec, str(draft_source.folder / "config.json"))
    draft_tensors = draft_source.select(expected_shapes(drafter))
    sizes = replace(sizes, rows=backend.rows or drafter.block_size, drafted=backend.drafted or drafter.block_size)
    target = _target_part(plan, tensors, target_format, drafter.taps, sizes)
    head = _head_part(plan, tensors, head_format, sizes, request.draft_vocabulary)
    parts = (target, head, *_drafter_parts(backend, drafter, draft_tensors, draft_format, sizes))
    return replace(plan, parts=parts, drafter=drafter, drafter_folder=draft_source.folder)


def formats_of(request: ExportRequest) -> tuple[str, str, str]:
    """Return the names of the formats of target, head and drafter; raises ExportError."""
    head = request.head_format or ("int8" if request.weight_format == "int4" else request.weight_format)
    formats = (request.weight_format, head, request.draft_format or request.weight_format)
    for chosen in formats:
        if chosen not in FORMATS:
            raise ExportError(f"the weight format {chosen!r} is unknown; choose one of {', '.join(FORMATS)}.")
    check_int4(request.int4, formats)
    return formats


def _formats(request: ExportRequest, backend: Backend) -> tuple[Format, Format, Format]:
    int4 = request.int4 or Int4()
    if backend.blocked and not int4.symmetric:
        raise ExportError(f"the backend {backend.name} takes symmetric int4 only.")
    target, head, draft = (Format(name, int4, blocked=backend.blocked) for name in formats_of(request))
    return target, head, draft


_Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Sizes:
    """Token rows and cached positions of the graphs."""

    rows: Dim
    capacity: Dim
    drafted: Dim | None = None  # rows of the drafter that its head takes


def _target_part(plan: Plan, tensors: _Tensors, weight_format: Format, taps: tuple[int, ...], sizes: _Sizes) -> Part:
    layers = {name: tensor for name, tensor in tensors.items() if name.startswith("layers.")}
    part = _part(plan.backend, "target", tensors, with_ratio(weight_format, layers))
    graphs.target(part.ops, plan.target, part.weights, taps, rows=sizes.rows, capacity=sizes.capacity)
    return part


def _head_part(plan: Plan, tensors: _Tensors, weight_format: Format, sizes: _Sizes, first: int | None = None) -> Part:
    """The head, its `first` ids apart: in a byte-pair vocabulary the most frequent tokens have the lowest."""
    whole = tensors[head_name(plan.target)]
    ids = whole.shape[0]
    cuts = sorted({0, min(first or ids, ids), ids})
    part = _part(plan.backend, "head", {f"head.{a}": whole.rows(a, b) for a, b in pairwise(cuts)}, weight_format)
    matrices = [part.weights.matrix(name) for name in part.weights.tensors]
    graphs.head(part.ops, matrices, rows=sizes.rows, drafted=sizes.drafted)
    return part


def _drafter_parts(
    backend: Backend, spec: DrafterSpec, tensors: _Tensors, weight_format: Format, sizes: _Sizes
) -> tuple[Part, ...]:
    weight_format = with_ratio(weight_format, tensors)
    context, block = (_part(backend, name, tensors, weight_format) for name in ("drafter_context", "drafter"))
    graphs.drafter_context(context.ops, spec, context.weights, rows=sizes.rows)
    graphs.drafter(block.ops, spec, block.weights, rows=sizes.rows, capacity=sizes.capacity)
    return context, block


def _part(backend: Backend, name: str, tensors: _Tensors, weight_format: Format) -> Part:
    weights = CheckpointWeights(tensors, weight_format)
    return Part(name, weight_format, backend.emitter(name), weights)
