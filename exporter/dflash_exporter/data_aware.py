"""Compression of a target to 4 bits with an eye on what its matrices are multiplied with: AWQ, scale estimation.

Knows how to show NNCF one layer at a time, so that memory does not grow with the model. AWQ moves factors from the
columns of down_proj to the rows of up_proj, where both get 4 bits. Does not know how inputs were recorded
(`calibration`).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import openvino as ov
from dflash_graphs.manifest import Int4
from dflash_graphs.weights import Array
from openvino import opset15 as op

from .calibration import Records
from .checkpoint import Tensor
from .compress import constants_of, int4_mode, integers, lend_nncf
from .formats import Layout

_GATE, _UP, _DOWN = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


def recorded(layouts: Mapping[str, Layout]) -> list[str]:
    """Return the matrices whose inputs have to be recorded; those of down_proj follow from those of gate_proj."""
    names = {name.replace(_DOWN, _GATE).replace(_UP, _GATE) for name, layout in layouts.items() if layout.bits == 4}
    return sorted(names)


def compress_layers(
    tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], records: Records, options: Int4
) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield the name and the arrays (as `compress` returns them) of each matrix that gets 4 bits."""
    layers: dict[str, list[str]] = {}
    for name in layouts:
        layers.setdefault(".".join(name.split(".")[:2]), []).append(name)
    for names in layers.values():
        if wanted := [name for name in names if layouts[name].bits == 4]:
            mlp = [name for name in names if ".mlp." in name] if any(".mlp." in name for name in wanted) else []
            yield from _compress_layer(wanted, list(dict.fromkeys(wanted + mlp)), tensors, records, options)


def _compress_layer(
    wanted: list[str], names: list[str], tensors: Mapping[str, Tensor], records: Records, options: Int4
) -> Iterator[tuple[str, dict[str, Array]]]:
    """Compress the matrices `wanted` of a layer; `names` are those to compute with."""
    values = {name: tensors[name].read().astype(np.float32) for name in names}
    samples = _samples({name: records[name] for name in names if name in records})
    has_pair = sum(name.endswith((_UP, _DOWN)) for name in wanted) == 2
    with lend_nncf() as nncf:
        adjust = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
        compressed = nncf.compress_weights(
            _layer_model(values),
            mode=int4_mode(nncf, options.symmetric),
            group_size=options.group_size,
            ratio=1.0,
            all_layers=True,
            ignored_scope=nncf.IgnoredScope(names=[f"{name}/product" for name in names if name not in wanted]),
            dataset=nncf.Dataset(samples),
            subset_size=len(samples),
            awq=options.awq and has_pair,
            scale_estimation=options.scale_estimation,
            advanced_parameters=adjust,
        )
    constants = constants_of(compressed)
    for name in wanted:
        yield name, integers(constants, name)


def _samples(records: Records) -> list[dict[str, Array]]:
    count = len(next(iter(records.values())))
    return [{name: array[i].astype(np.float32) for name, array in records.items()} for i in range(count)]


def _layer_model(values: Mapping[str, Array]) -> ov.Model:
    """The products of a layer as far as NNCF has to see them; each weight has the name of its tensor."""
    inputs: dict[str, Any] = {}

    def entry(name: str) -> Any:
        inputs[name] = op.parameter([-1, values[name].shape[1]], np.float32, name=f"{name}/input")
        inputs[name].output(0).set_names({name})  # by which a sample goes there
        return inputs[name]

    def product(x: Any, name: str) -> Any:
        weight = op.constant(values[name], shared_memory=True)
        weight.set_friendly_name(name)
        return op.matmul(x, weight, False, True, name=f"{name}/product")

    outputs = [product(entry(name), name) for name in values if ".mlp." not in name]
    gate, up, down = (next((n for n in values if n.endswith(end)), "") for end in (_GATE, _UP, _DOWN))
    if gate:
        h = entry(gate)
        outputs.append(product(op.multiply(op.swish(product(h, gate)), product(h, up)), down))
    return ov.Model(outputs, list(inputs.values()), "layer")
