"""Under a bf16 hint the recurrence stays in f32: the plugin must not merge marked nodes into unmarked ones."""

from collections.abc import Callable
from pathlib import Path

import openvino as ov
import pytest
from dflash_runtime.device import precisions

_KEYS = ("layerType", "outputPrecisions", "originalLayersNames")
_MAY_ROUND = ("FullyConnected", "Reorder", "RMS")  # the last one adds up in f32; its result goes into a product


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
