"""Weight formats: what a reader of the written graph gets back for each tensor of the checkpoint."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import openvino as ov
import pytest
from dflash_exporter.backends import BACKENDS
from dflash_exporter.checkpoint import Checkpoint, Tensor
from dflash_exporter.formats import Format
from dflash_exporter.ratio import with_ratio
from dflash_exporter.weights import CheckpointWeights
from dflash_graphs.errors import CheckpointError, ExportError, UnsupportedError
from dflash_graphs.manifest import Int4
from dflash_graphs.openvino_emitter import OpenVinoOps
from dflash_graphs.weights import Array
from safetensors.numpy import save_file

SHAPES = {
    "a": (64, 256),
    "b": (2, 128),
    "c": (33, 192),  # groups of 64
    "d": (16, 32),
    "e": (7, 40),  # no group size divides it
    "layers.0.linear_attn.out_proj.weight": (48, 128),
}
ERROR = {"f32": 0.0, "bf16": 0.003, "f16": 0.0006, "int8": 0.012, "int4": 0.15}  # relative, root mean square


def write(folder: Path, tensors: dict[str, Array]) -> dict[str, Tensor]:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder).tensors


def random(dtype: Any = np.float32) -> dict[str, Array]:
    generator = np.random.default_rng(1)
    return {n: (generator.standard_normal(s, dtype=np.float32) * 0.05).astype(dtype) for n, s in SHAPES.items()}


def written(
    folder: Path, tensors: dict[str, Tensor], weight_format: str, backend: str = "openvino", int4: Int4 | None = None
) -> tuple[Path, dict[str, Any]]:
    """Write one product per tensor; return the file and the bits of each."""
    ops = BACKENDS[backend]().emitter("test")
    weights = CheckpointWeights(tensors, Format(weight_format, int4 or Int4(), blocked=BACKENDS[backend]().blocked))
    bits = {}
    for name, tensor in tensors.items():
        matrix = weights.matrix(name)
        bits[name] = matrix.bits
        product = ops.linear(ops.input(name, [tensor.shape[1], tensor.shape[1]]), matrix)
        ops.output(f"{name}.out", product, tensor.shape[::-1])
    path = folder / ops.FILE
    ops.save(path)
    counted: list[int] = []
    weights.fill(*ops.constants(path), counted.append)
    assert sum(counted) == weights.nbytes
    return path, bits


def read_back(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """Multiply identities, in f32 and without dynamic quantization: the dequantised weights themselves."""
    if path.suffix == ".onnx":
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        outputs = session.run(None, {name: np.eye(s[1], dtype=np.float32) for name, s in shapes.items()})
        return {name: output.T for name, output in zip(shapes, outputs, strict=True)}
    hints = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    results = ov.compile_model(path, "CPU", hints)({name: np.eye(s[1], dtype=np.float32) for name, s in shapes.items()})
    return {name: results[f"{name}.out"].T for name in shapes}


@pytest.mark.parametrize("weight_format", ERROR)
@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_come_back(tmp_path: Path, weight_format: str, stored: Any, backend: str) -> None:
    original = random(stored)
    path, _ = written(tmp_path, write(tmp_path, original), weight_format, backend)
    for name, found in read_back(path, SHAPES).items():
        wanted = original[name].astype(np.float32)
        error = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))
        assert error <= ERROR[weight_format], name


def test_small_blocks_give_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write(tmp_path, random())
    for weight_format in ("int8", "int4"):
        whole, _ = written(tmp_path, tensors, weight_format)
        expected = whole.with_suffix(".bin").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr("dflash_exporter.weights._BATCH", 600)
            patch.setattr(Tensor.blocks, "__defaults__", (300,))
            assert written(tmp_path, tensors, weight_format)[0].with_suffix(".bin").read_bytes() == expected


def test_what_stays_at_8_bits_in_int4(tmp_path: Path) -> None:
    _, bits = written(tmp_path, write(tmp_path, random()), "int4")
    assert bits == {"a": 4, "b": 4, "c": 4, "d": 4, "e": 8, "layers.0.linear_attn.out_proj.weight": 8}


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_zero_points_help_lopsided_weights(tmp_path: Path, stored: Any) -> None:
    original = {name: np.abs(values) for name, values in random(stored).items()}
    tensors = write(tmp_path, original)
    errors = {}
    for symmetric in (True, False):
        path, bits = written(tmp_path, tensors, "int4", int4=Int4(symmetric=symmetric))
        found = read_back(path, SHAPES)
        errors[symmetric] = {
            n: np.mean((found[n] - original[n].astype(np.float32)) ** 2) for n in SHAPES if bits[n] == 4
        }
    assert set(errors[False]) == {"a", "c"}  # the others are too small for zero points
    assert all(errors[False][name] < errors[True][name] / 2 for name in errors[False])


@pytest.mark.parametrize("size", [128, 64, 32])
def test_group_sizes(tmp_path: Path, size: int) -> None:
    weights = CheckpointWeights(write(tmp_path, random()), Format("int4", Int4(group_size=size)))
    groups = {name: weights.matrix(name).group_size for name in SHAPES}
    assert groups["a"] == groups["b"] == size
    assert (groups["c"], groups["d"], groups["e"]) == (min(size, 64), 32, None)
    summary = weights.summary()
    assert summary["int8 sym, per row"] == 7 * 40 + 48 * 128
    assert sum(summary.values()) == sum(out * width for out, width in SHAPES.values())


@pytest.mark.parametrize(("ratio", "expected"), [(1.0, set()), (0.7, {"narrow"}), (0.34, {"narrow", "middle"})])
def test_ratio_spares_the_most_sensitive(tmp_path: Path, ratio: float, expected: set[str]) -> None:
    """Where all values are small, rounding is finest: as NNCF has it, such layers have most to lose."""
    generator = np.random.default_rng(0)
    scales = {"wide": 4.0, "middle": 2.0, "narrow": 1.0, "layers.0.linear_attn.out_proj.weight": 1.0}
    values = {name: generator.standard_normal((64, 128), dtype=np.float32) * scale for name, scale in scales.items()}
    tensors = write(tmp_path, values | {"norm": np.ones(4, np.float32)})
    chosen = with_ratio(Format("int4", Int4(ratio=ratio)), tensors)
    assert chosen.at_8_bits == expected


@pytest.mark.parametrize(("stored", "kept"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")])
def test_precise_matrices_keep_their_values(tmp_path: Path, stored: str, kept: str) -> None:
    original = random(np.dtype(stored))["a"]
    matrix = CheckpointWeights(write(tmp_path, {"a": original}), Format("int4")).matrix("a", precise=True)
    assert matrix.values.dtype.name == kept
    assert np.array_equal(matrix.values.astype(np.float32), original.astype(np.float32))


def test_arrays_are_f32(tmp_path: Path) -> None:
    values = np.arange(5).astype(ml_dtypes.bfloat16)
    array = CheckpointWeights(write(tmp_path, {"n": values}), Format("bf16")).array("n")
    assert array.dtype == np.float32
    assert array.tolist() == [0, 1, 2, 3, 4]


def test_damage_is_found_while_filling(tmp_path: Path) -> None:
    damaged = random()
    damaged["c"][32, 191] = np.nan
    with pytest.raises(CheckpointError, match="c holds NaN"):
        written(tmp_path, write(tmp_path, damaged), "bf16")


def test_values_too_large_for_f16(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="too large for f16"):
        written(tmp_path, write(tmp_path, {"a": np.full((4, 32), 1e5, ml_dtypes.bfloat16)}), "f16")


def test_a_graph_that_changes_a_blank_is_an_error(tmp_path: Path) -> None:
    weights = CheckpointWeights(write(tmp_path, random()), Format("f32"))
    ops = OpenVinoOps("test")
    ops.output("y", ops.add(ops.input("x", [64, 256]), ops.constant(weights.matrix("a").values + 1)))
    ops.save(tmp_path / "openvino_model.xml")
    with pytest.raises(ExportError, match="does not hold a"):
        weights.fill(*ops.constants(tmp_path / "openvino_model.xml"), lambda count: None)


def test_int8_without_nncf_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nncf", None)
    with pytest.raises(ExportError, match=r"dflash-openvino\[export\]"):
        written(tmp_path, write(tmp_path, random()), "int8")
