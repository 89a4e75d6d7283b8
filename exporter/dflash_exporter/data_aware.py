"""Compression of a target to 4 bits with an eye on what its matrices are multiplied with: AWQ, scale estimation.

Knows how to show NNCF one layer at a time, so that memory does not grow with the model, and that AWQ moves a factor
from the columns of down_proj to the rows of up_proj, both of one MLP. Does not know how inputs were recorded
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
from .compress import compress, constants_of, integers, lend_nncf
from .formats import Layout

_GATE, _UP, _DOWN = (f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


def recorded(layouts: Mapping[str, Layout]) -> list[str]:
    """Return the matrices whose inputs have to be recorded; those of down_proj follow from those of gate_proj."""
    names = {name.replace(_DOWN, _GATE).replace(_UP, _GATE) for name, layout in layouts.items() if layout.bits == 4}
    return sorted(names)


def compress_layers(
    tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], records: Records, options: Int4
) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield the name and the arrays (as `compress` returns them) of each matrix in a layer that has some at 4 bits."""
    layers: dict[str, list[str]] = {}
    for name in layouts:
        layers.setdefault(_layer(name), []).append(name)
    for names in layers.values():
        yield from _compress_layer({n: layouts[n] for n in names}, tensors, records, options)


def _layer(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _compress_layer(
    layouts: Mapping[str, Layout], tensors: Mapping[str, Tensor], records: Records, options: Int4
) -> Iterator[tuple[str, dict[str, Array]]]:
    is_mlp = any(layout.bits == 4 for name, layout in layouts.items() if ".mlp." in name)
    names = [name for name, layout in layouts.items() if layout.bits == 4 or (is_mlp and ".mlp." in name)]
    if not names:
        return
    values = {name: tensors[name].read().astype(np.float32) for name in names}
    whole = [name for name in names if layouts[name].bits == 8]  # to be computed with, but not brought to 4 bits
    samples = _samples({name: records[name] for name in names if name in records})
    with lend_nncf() as nncf:
        mode = nncf.CompressWeightsMode.INT4_SYM if options.symmetric else nncf.CompressWeightsMode.INT4_ASYM
        adjust = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
        compressed = nncf.compress_weights(
            _layer_model(values),
            mode=mode,
            group_size=options.group_size,
            ratio=1.0,
            all_layers=True,
            ignored_scope=nncf.IgnoredScope(names=[f"{name}/product" for name in whole]),
            dataset=nncf.Dataset(samples),
            subset_size=len(samples),
            awq=options.awq,
            scale_estimation=options.scale_estimation,
            advanced_parameters=adjust,
        )
    constants = constants_of(compressed)
    for name in names:
        if name in whole:  # AWQ may have changed its rows
            yield name, compress([constants[name].get_data()], layouts[name])[0]
        else:
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
