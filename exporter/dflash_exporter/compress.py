"""Compression of matrices to 8 or 4 bits by NNCF.

Knows how to get integers and scales out of NNCF. Does not know checkpoints or graphs. Works on blocks of whole rows:
scales belong to rows, or to groups inside a row, so a matrix may be compressed piece by piece.
"""

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
import openvino as ov
from dflash_graphs.errors import ExportError
from dflash_graphs.weights import Array
from openvino import opset15 as op

from .formats import Layout


def compress(blocks: Sequence[Array], layout: Layout) -> list[dict[str, Array]]:
    """Compress f32 blocks [rows, in] to 8 or 4 bits in one call (a call has a fixed cost of 0.2 s).

    Returns per block `values`, int8 [rows, in] or packed 4-bit integers (two a byte, low nibble first, flat), `scale`,
    f32 [rows, 1] or [rows, in / group_size, 1], and where the layout has them `zero_point`, packed like 4-bit values.
    """
    with lend_nncf() as nncf:
        if layout.bits == 8:
            options = {"mode": nncf.CompressWeightsMode.INT8_SYM}
        else:
            mode = int4_mode(nncf, layout.symmetric)
            options = {"mode": mode, "group_size": layout.group_size, "ratio": 1.0, "all_layers": True}
        compressed = nncf.compress_weights(_products(blocks), **options)
    constants = constants_of(compressed)
    return [integers(constants, f"w{i}") for i in range(len(blocks))]


def int4_mode(nncf: Any, symmetric: bool) -> Any:
    return nncf.CompressWeightsMode.INT4_SYM if symmetric else nncf.CompressWeightsMode.INT4_ASYM


def constants_of(model: ov.Model) -> dict[str, Any]:
    return {node.get_friendly_name(): node for node in model.get_ops() if node.get_type_name() == "Constant"}


def integers(constants: Mapping[str, Any], name: str) -> dict[str, Array]:
    """Take what NNCF made of the constant `name`; arrays as `compress` returns them."""
    found = {"values": constants[name].get_data().copy()}
    found["scale"] = constants[f"{name}/scale"].get_data().astype(np.float32)
    if f"{name}/zero_point" in constants:
        found["zero_point"] = constants[f"{name}/zero_point"].get_data().copy()
    return found


def _products(blocks: Sequence[Array]) -> ov.Model:
    """A model with one product per block; the constant of block `i` is named `w{i}`."""
    inputs, outputs = [], []
    for i, block in enumerate(blocks):
        weight = op.constant(block, shared_memory=True)
        weight.set_friendly_name(f"w{i}")
        inputs.append(op.parameter([1, block.shape[1]], ov.Type.f32))
        outputs.append(op.matmul(inputs[-1], weight, False, True))
    return ov.Model(outputs, inputs, "blocks")


@contextmanager
def lend_nncf() -> Iterator[Any]:
    """Lend NNCF: silent on stdout (which is for data), without telemetry, and without its import of PyTorch.

    NNCF imports PyTorch wherever it is installed, only to find that an OpenVINO model is not a PyTorch one: 2 s and
    200 MB. A `None` in `sys.modules` makes it look absent.
    """
    hidden = [] if "torch" in sys.modules else ["torch"]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    os.environ.setdefault("NNCF_CI", "1")  # its documented way to send nothing
    try:
        with redirect_stdout(io.StringIO()):
            import nncf

            nncf.set_log_level(logging.ERROR)
            yield nncf
    except ImportError as error:
        raise ExportError(
            f"int8 and int4 need NNCF ({error}). Install dflash-openvino[export], or export bf16."
        ) from error
    finally:
        for name in hidden:
            del sys.modules[name]
