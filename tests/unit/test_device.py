"""Choices that depend on what the CPU can do."""

from types import SimpleNamespace

import openvino as ov
import pytest
from dflash_runtime.device import default_format


@pytest.mark.parametrize(("capabilities", "expected"), [(["FP32", "BF16", "INT8"], "bf16"), (["FP32", "FP16"], "f16")])
def test_the_default_format_follows_the_cpu(capabilities: list[str], expected: str) -> None:
    core = SimpleNamespace(get_property=lambda device, name: capabilities)
    assert default_format(core) == expected


def test_the_property_exists() -> None:
    assert default_format(ov.Core()) in ("bf16", "f16")
