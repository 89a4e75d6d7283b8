"""What the matrices of a target are multiplied with, recorded while it reads texts.

Knows how to drive the portable target graph: its ports and what it carries from call to call. Does not know what the
records are for (`data_aware`). The target runs as an int8 copy, written to a folder that is lent: half the memory of
the checkpoint, and for statistics as good.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
from dflash_graphs import graphs
from dflash_graphs.errors import ExportError
from dflash_graphs.openvino_emitter import OpenVinoOps
from dflash_graphs.specs import CHUNK, TargetSpec
from dflash_graphs.vocabulary import Value
from dflash_graphs.weights import Array, Matrix
from numpy.typing import NDArray

from .checkpoint import DTYPES, Tensor
from .formats import Format
from .shapes import EMBEDDING
from .weights import CheckpointWeights

LENGTH = 128  # tokens the target reads from nothing; a multiple of CHUNK
SAMPLES = 128  # such windows, from all over the texts
_STRIDE = 8  # of the rows of a window, every so many-th is kept
RECORDED_BYTES = SAMPLES * LENGTH // _STRIDE * 2  # per column of what is recorded, at most

Records = dict[str, Array]  # tensor name -> bf16 [samples, LENGTH / _STRIDE, width]; some tensors share an array


def windows(ids: Sequence[int]) -> NDArray[np.int32]:
    """Cut the tokens of texts to int32 [samples, LENGTH], from all over them; raises ExportError for too few."""
    count = len(ids) // LENGTH
    if count == 0:
        raise ExportError(f"the data set has {len(ids)} tokens; give at least {LENGTH}, better {SAMPLES * LENGTH}.")
    samples = min(count, SAMPLES)
    whole = np.asarray(ids[: count * LENGTH], np.int32).reshape(count, LENGTH)
    return whole[np.arange(samples) * count // samples]


class _Tap(OpenVinoOps):
    """Makes outputs of what the matrices `wanted` are multiplied with."""

    def __init__(self, wanted: Mapping[str, Matrix]) -> None:
        super().__init__("target")
        self._wanted, self._seen = {id(matrix): name for name, matrix in wanted.items()}, dict[str, str]()
        self.names: dict[str, str] = {}  # tensor -> output

    def linear(self, x: Value, weight: Matrix, bias: Array | None = None) -> Value:
        tensor = self._wanted.get(id(weight))
        if tensor is not None:
            source = x.get_node().get_friendly_name()
            if source not in self._seen:
                self._seen[source] = f"into.{tensor}"
                self.output(f"into.{tensor}", x)
            self.names[tensor] = self._seen[source]
        return super().linear(x, weight, bias)


def record(
    spec: TargetSpec,
    tensors: Mapping[str, Tensor],
    wanted: Sequence[str],
    texts: NDArray[np.int32],
    folder: Path,
    progress: Callable[[], None],
    weight_format: str = "int8",
) -> Records:
    """Run a copy of the target over `texts` [samples, LENGTH] and return what goes into the matrices `wanted`.

    The copy is written to `folder`. `progress` is called after each sample.
    """
    weights = CheckpointWeights(tensors, Format(weight_format))
    ops = _Tap({name: weights.matrix(name) for name in wanted})
    graphs.target(ops, spec, weights, (), rows=CHUNK, capacity=LENGTH)
    path = folder / ops.FILE
    ops.save(path)
    weights.fill(*ops.constants(path), lambda count: None)
    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    target = _Target(spec, compiled, tensors[EMBEDDING])
    widths = {output: tensors[tensor].shape[1] for tensor, output in ops.names.items()}
    records = {
        output: np.zeros((len(texts), LENGTH // _STRIDE, width), ml_dtypes.bfloat16) for output, width in widths.items()
    }
    for sample, tokens in enumerate(texts):
        target.reset()
        for at in range(0, LENGTH, CHUNK):
            outputs = target.read(tokens[at : at + CHUNK], at)
            for output, array in records.items():
                array[sample, at // _STRIDE : (at + CHUNK) // _STRIDE] = outputs[output][::_STRIDE]
        progress()
    return {tensor: records[output] for tensor, output in ops.names.items()}


class _Target:
    """The portable graph and its caches. Reads whole chunks from nothing on, so nothing is ever pending."""

    def __init__(self, spec: TargetSpec, compiled: ov.CompiledModel, embeddings: Tensor) -> None:
        self._spec, self._request = spec, compiled.create_infer_request()
        self._embeddings = np.memmap(
            embeddings.file, DTYPES[embeddings.dtype], "r", embeddings.offset, embeddings.shape
        )
        ports = [port for port in compiled.inputs if port.any_name not in ("embeddings", "position_ids")]
        kinds = {"i32": np.int32, "f32": np.float32}
        self._carried = {p.any_name: np.zeros(tuple(p.shape), kinds[p.element_type.get_type_name()]) for p in ports}

    def reset(self) -> None:
        fills = {"rows_before": np.arange(CHUNK), "rows_behind": CHUNK - 1, "full": 1}
        for name, array in self._carried.items():
            array[...] = fills.get(name, 0)

    def read(self, tokens: NDArray[np.int32], at: int) -> dict[str, Any]:
        """Read a chunk at the position `at`; return the outputs by name."""
        inputs = {
            "embeddings": self._embeddings[tokens].astype(np.float32),
            "position_ids": np.arange(at, at + CHUNK, dtype=np.int32),
        }
        found = self._request.infer(inputs | self._carried, share_inputs=True)
        outputs = {port.any_name: array for port, array in found.items()}
        attention = self._spec.attention
        for i in self._spec.attention_layers:
            for part in ("key", "value"):
                rows = outputs[f"{part}.{i}"].reshape(CHUNK, attention.kv_heads, attention.head_dim)
                self._carried[f"past_{part}.{i}"][:, at : at + CHUNK] = rows.transpose(1, 0, 2)
        if self._spec.delta is not None:
            rows = outputs["rows"].reshape(-1, CHUNK, self._spec.delta.conv_width)
            self._carried["past_rows"][...] = rows[:, CHUNK + 1 - self._spec.delta.kernel :]
            self._carried["state"][...] = np.concatenate([outputs[f"next_state.{i}"] for i in self._spec.delta_layers])
        return outputs
