"""AWQ and scale estimation: that they help where they should, and that what cannot work is refused."""

from pathlib import Path

import numpy as np
import pytest
from dflash_exporter.calibration import LENGTH, SAMPLES, windows
from dflash_exporter.checkpoint import Checkpoint
from dflash_exporter.data_aware import compress_layers, recorded
from dflash_exporter.formats import Format, check_int4
from dflash_graphs.errors import ExportError
from dflash_graphs.manifest import Int4
from dflash_graphs.weights import Array
from safetensors.numpy import save_file

HIDDEN, FFN = 128, 256
SHAPES = {
    "layers.0.mlp.gate_proj.weight": (FFN, HIDDEN),
    "layers.0.mlp.up_proj.weight": (FFN, HIDDEN),
    "layers.0.mlp.down_proj.weight": (HIDDEN, FFN),
    "layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
}
GATE, UP, DOWN, OUT = SHAPES
DATASET = "texts.txt"


def outliers(width: int) -> Array:
    """Activations f32 [samples, rows, width], a few columns of which are much larger than the others."""
    generator = np.random.default_rng(1)
    values = generator.standard_normal((32, 16, width), dtype=np.float32)
    values[..., ::50] = values[..., ::50] * 2 + 30
    return values


@pytest.fixture
def checkpoint(tmp_path: Path) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    values = {name: generator.standard_normal(shape, dtype=np.float32) * 0.1 for name, shape in SHAPES.items()}
    values[UP][::50] *= 20  # so that some columns of down_proj meet large activations
    save_file(values, tmp_path / "model.safetensors")
    return values


def compressed(folder: Path, options: Int4, at_8_bits: frozenset[str] = frozenset()) -> dict[str, Array]:
    """Compress the layer; return its weights as a reader gets them."""
    tensors, chosen = Checkpoint(folder).tensors, Format("int4", options, at_8_bits)
    layouts = {name: chosen.layout(name, shape) for name, shape in SHAPES.items()}
    records = {name: outliers(SHAPES[name][1]) for name in recorded(layouts)}
    found = {}
    for name, arrays in compress_layers(tensors, layouts, records, options):
        values, scale = arrays["values"].reshape(-1), arrays["scale"].astype(np.float32)
        if layouts[name].bits == 4:
            packed = values.view(np.uint8)
            values = np.stack([packed & 15, packed >> 4], 1).reshape(-1).astype(np.int8)
            values = values if "zero_point" in arrays else (values ^ 8) - 8
        zero = np.zeros_like(scale)
        if "zero_point" in arrays:
            packed = arrays["zero_point"].reshape(-1).view(np.uint8)
            zero = np.stack([packed & 15, packed >> 4], 1).reshape(scale.shape).astype(np.float32)
        grouped = values.reshape(*scale.shape[:-1], -1).astype(np.float32)
        found[name] = ((grouped - zero) * scale).reshape(SHAPES[name])
    return found


def mlp(weights: dict[str, Array], x: Array) -> Array:
    gate = x @ weights[GATE].T
    return (gate / (1 + np.exp(-gate)) * (x @ weights[UP].T)) @ weights[DOWN].T


@pytest.mark.parametrize("symmetric", [True, False])
def test_scale_estimation_lowers_the_error_of_products(
    tmp_path: Path, checkpoint: dict[str, Array], symmetric: bool
) -> None:
    x = outliers(HIDDEN).mean(1)
    errors = []
    for awq, scale_estimation in ((True, False), (True, True)):  # AWQ does not touch o_proj: plain against estimated
        options = Int4(symmetric=symmetric, awq=awq, scale_estimation=scale_estimation, dataset=DATASET)
        found = compressed(tmp_path, options)
        assert set(found) == set(SHAPES)
        errors.append(np.mean((x @ (found[OUT] - checkpoint[OUT]).T) ** 2))
    assert errors[1] < errors[0] / 2


def test_awq_moves_factors_from_columns_to_rows(tmp_path: Path, checkpoint: dict[str, Array]) -> None:
    x = outliers(HIDDEN).reshape(-1, HIDDEN)
    expected, errors = mlp(checkpoint, x), {}
    for awq in (False, True):
        found = compressed(tmp_path, Int4(awq=awq, scale_estimation=True, dataset=DATASET))
        errors[awq] = np.mean((mlp(found, x) - expected) ** 2)
    assert errors[True] < errors[False]
    rows, columns = (
        np.sum(found[n] * checkpoint[n], i) / np.sum(checkpoint[n] ** 2, i) for n, i in ((UP, 1), (DOWN, 0))
    )
    large = slice(0, 128, 50)  # NNCF looks at the groups with the largest activations only
    assert np.all(columns[large] > 2)
    assert np.allclose(rows[large] * columns[large], 1, atol=0.1)


@pytest.mark.parametrize("name", [UP, DOWN])
def test_awq_spares_an_mlp_that_is_partly_at_8_bits(tmp_path: Path, checkpoint: dict[str, Array], name: str) -> None:
    plain, awq = (
        compressed(tmp_path, Int4(awq=awq, scale_estimation=True, dataset=DATASET), frozenset({name}))
        for awq in (False, True)
    )
    assert plain.keys() == awq.keys() == set(SHAPES) - {name}
    assert all(np.array_equal(plain[key], awq[key]) for key in plain)


def test_layers_without_4_bits_are_left_to_the_plain_way(tmp_path: Path, checkpoint: dict[str, Array]) -> None:
    options = Int4(awq=True, dataset=DATASET)
    assert compressed(tmp_path, options, frozenset(SHAPES) - {OUT}).keys() == {OUT}
    assert compressed(tmp_path, options, frozenset(SHAPES)) == {}


def test_windows_come_from_all_over_the_texts() -> None:
    many = windows(range(5 * SAMPLES * LENGTH + 7))
    assert many.shape == (SAMPLES, LENGTH) and many.dtype == np.int32
    assert many[0, 0] == 0 and many[-1, 0] > 4.9 * SAMPLES * LENGTH and np.all(np.diff(many, axis=1) == 1)
    assert windows(range(3 * LENGTH)).shape == (3, LENGTH)
    with pytest.raises(ExportError, match="has 127 tokens"):
        windows(range(LENGTH - 1))


@pytest.mark.parametrize(
    ("options", "formats", "message"),
    [
        (Int4(), ("bf16", "int8", "bf16"), "no weight format is int4"),
        (Int4(group_size=100), ("int4", "int8", "int4"), "group size is 100; choose one of 128, 64, 32"),
        (Int4(ratio=0), ("int4", "int8", "int4"), "ratio of int4 is 0"),
        (Int4(ratio=1.5), ("int4", "int8", "int4"), "ratio of int4 is 1.5"),
        (Int4(awq=True), ("int4", "int8", "int4"), "need a data set"),
        (Int4(dataset=DATASET), ("int4", "int8", "int4"), "give both"),
        (Int4(awq=True, dataset=DATASET), ("bf16", "int8", "int4"), "serves the target"),
    ],
)
def test_options_of_int4_that_make_no_sense(options: Int4, formats: tuple[str, ...], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        check_int4(options, formats)
