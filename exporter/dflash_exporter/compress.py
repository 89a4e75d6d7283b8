"""Compression of matrices to 8 or 4 bits by NNCF.

Knows how to get integers and scales out of NNCF. Does not know checkpoints or graphs. Works on blocks of whole rows:
scales belong to rows, or to groups inside a row, so a matrix may be compressed piece by piece.
"""

import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np
import openvino as ov
from dflash_graphs.errors import ExportError
from dflash_graphs.weights import Array
from openvino import opset15 as op


def compress(blocks: Sequence[Array], bits: int, group_size: int | None) -> list[tuple[Array, Array]]:
    """Compress f32 blocks [rows, in] symmetrically in one call (a call has a fixed cost of 0.2 s).

    Returns per block the integers, int8 [rows, in] or packed 4-bit values (two a byte, low nibble first, flat), and the
    scales, f32 [rows, 1] or [rows, in / group_size, 1].
    """
    with _nncf() as nncf:
        if bits == 8:
            options = {"mode": nncf.CompressWeightsMode.INT8_SYM}
        else:
            mode = nncf.CompressWeightsMode.INT4_SYM
            options = {"mode": mode, "group_size": group_size, "ratio": 1.0, "all_layers": True}
        compressed = nncf.compress_weights(_products(blocks), **options)
    constants = {node.get_friendly_name(): node for node in compressed.get_ops() if node.get_type_name() == "Constant"}
    return [
        (constants[f"w{i}"].get_data().copy(), constants[f"w{i}/scale"].get_data().astype(np.float32))
        for i in range(len(blocks))
    ]


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
def _nncf() -> Iterator[Any]:
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
