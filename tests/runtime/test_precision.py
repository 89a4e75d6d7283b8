"""What the plugin makes of the graphs: it must not merge marked nodes into unmarked ones, but has to see rotations."""

from collections.abc import Callable
from pathlib import Path

import openvino as ov
import pytest
from dflash_graphs.manifest import read_manifest
from dflash_runtime.device import precisions

_KEYS = ("layerType", "outputPrecisions", "originalLayersNames")
_MAY_ROUND = ("FullyConnected", "Reorder", "RMS", "RoPE")  # the last two compute in f32 for products in bf16


def test_no_marked_node_runs_in_bf16(small_bundle: Callable[[str], Path]) -> None:
    core = ov.Core()
    if "bf16" not in precisions(core):
        pytest.skip("this CPU has no products in bf16")
    model = core.read_model(small_bundle("bf16") / "target" / "openvino_model.xml")
    marked = {
        node.get_friendly_name()
        for node in model.get_ops()
        if any(key.startswith("DisablePrecisionConversion") for key in dict(node.get_rt_info()))
    }
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    rounded, products = set(), 0
    for node in compiled.get_runtime_model().get_ops():
        kind, types, names = (str(node.get_rt_info()[key].value) for key in _KEYS)
        if "BF16" in types.upper():
            products += kind == "FullyConnected"
            if kind not in _MAY_ROUND:
                rounded |= marked & set(names.split(","))
    assert products > 0
    assert not rounded


def test_rotations_and_norms_are_one_node_each(small_bundle: Callable[[str], Path]) -> None:
    bundle = small_bundle("f32")
    target = read_manifest(bundle).target
    delta, attention = len(target.delta_layers), len(target.attention_layers)
    nodes = {  # rotations, norms: two of the stream in each layer, two inside of it
        "target": (2 * attention, 4 * (delta + attention) + 1),
        "drafter": (2 * 3, 4 * 3 + 1),
        "drafter_context": (3, 3 + 1),
    }
    for graph, (rotations, norms) in nodes.items():
        compiled = ov.Core().compile_model(bundle / graph / "openvino_model.xml", "CPU")
        kinds = [str(node.get_rt_info()["layerType"].value) for node in compiled.get_runtime_model().get_ops()]
        assert kinds.count("RoPE") == rotations, graph
        assert kinds.count("RMS") == norms, graph
