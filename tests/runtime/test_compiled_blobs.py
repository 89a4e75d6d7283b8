"""Why nothing compiled is kept in the cache folder: OpenVINO cannot read back what it writes for the target.

Its blobs lose the geometry of PagedAttention, so its compile cache fails without a word and compiles again. The day
this test fails, measure again (ARCHITECTURE.md, "no compile cache").
"""

import io
from collections.abc import Callable
from pathlib import Path

import openvino as ov
import pytest
from dflash_runtime import openvino_models
from dflash_runtime.bundle import open_bundle
from dflash_runtime.device import choose_settings
from dflash_runtime.paged import use_paged_attention


def test_a_compiled_target_cannot_be_imported(small_bundle: Callable[[str], Path]) -> None:
    bundle, core, blob = open_bundle(small_bundle("f32")), ov.Core(), io.BytesIO()
    spec, layers = openvino_models._attention_layers(bundle.manifest, "target")
    model = core.read_model(bundle.graph("target"))
    use_paged_attention(model, spec, layers, takes_single_rows=True)
    model = openvino_models._open_tokens(model)
    properties = choose_settings(core, "f32").properties()
    core.compile_model(model, "CPU", properties).export_model(blob)
    with pytest.raises(RuntimeError, match="k_head_size"):
        core.import_model(blob.getvalue(), "CPU", properties)
