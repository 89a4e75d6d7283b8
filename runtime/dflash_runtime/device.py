"""How a bundle runs on this CPU: precisions, threads and the plugin properties that follow from them.

Everything that could change a result is set explicitly and can be printed; nothing is left to a default.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_graphs.errors import RequestError

from .protocols import Properties

if TYPE_CHECKING:
    import openvino as ov

# activations that share a scale; with 32, the plugin's default, a verify of 16 rows takes a fifth longer
_QUANTIZATION_GROUP = 128


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Plugin settings of every graph of a bundle."""

    precision: str  # of products and of unmarked elementwise work: f32 or bf16
    kv_precision: str  # of the key/value caches: f32, f16 or bf16
    quantization_group: int  # dynamic quantization of activations before integer weights; 0: off
    threads: int  # 0: the plugin's choice, one per physical core

    def properties(self) -> Properties:
        found: Properties = {
            "INFERENCE_PRECISION_HINT": self.precision,
            "KV_CACHE_PRECISION": self.kv_precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(self.quantization_group),
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
        }
        if self.threads:
            found["INFERENCE_NUM_THREADS"] = str(self.threads)
        return found

    def without_quantization(self) -> Settings:
        return replace(self, quantization_group=0)


def choose_settings(
    core: ov.Core, weight_format: str, threads: int | None = None, precision: str | None = None
) -> Settings:
    """Return the settings that keep results exact for weights of this format on this CPU."""
    capabilities = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if threads is not None and threads < 1:
        raise RequestError(f"threads must be at least 1, not {threads}")
    if precision == "bf16" and "BF16" not in capabilities:
        raise RequestError("this CPU has no bf16 products; use precision f32")
    chosen = precision or ("bf16" if weight_format == "bf16" and "BF16" in capabilities else "f32")
    if chosen not in ("f32", "bf16"):
        raise RequestError(f"precision must be f32 or bf16, not {chosen!r}")
    return Settings(
        precision=chosen,
        kv_precision=chosen,
        quantization_group=_QUANTIZATION_GROUP if weight_format.startswith("int") else 0,
        threads=min(threads, os.cpu_count() or threads) if threads else 0,
    )


def cpu_name() -> str:
    """The model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
