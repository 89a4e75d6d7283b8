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
    kv_precision: str  # of the key/value caches: as the products, or f16 or u8
    quantization_group: int  # dynamic quantization of activations before integer weights; 0: off
    threads: int  # 0: the plugin's choice, one per physical core

    @property
    def can_be_exact(self) -> bool:
        """Whether rejected drafts leave no trace: in a u8 cache, tokens of a block share a scale."""
        return self.kv_precision != "u8"

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


def precisions(core: ov.Core) -> dict[str, tuple[str, ...]]:
    """Return the precisions of products this CPU has, each with those its caches can have, the default first."""
    has_bf16 = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {"f32": ("f32", "f16", "u8"), **({"bf16": ("bf16", "u8")} if has_bf16 else {})}


def choose_settings(
    core: ov.Core,
    weight_format: str,
    threads: int | None = None,
    precision: str | None = None,
    kv_precision: str | None = None,
) -> Settings:
    """Return the settings that keep results exact for weights of this format on this CPU, but for what is asked."""
    possible = precisions(core)
    if threads is not None and threads < 1:
        raise RequestError(f"threads must be at least 1, not {threads}")
    if precision == "bf16" and "bf16" not in possible:
        raise RequestError("this CPU has no bf16 products; use precision f32")
    chosen = precision or ("bf16" if weight_format == "bf16" and "bf16" in possible else "f32")
    if chosen not in possible:
        raise RequestError(f"precision must be f32 or bf16, not {chosen!r}")
    if kv_precision not in (None, *possible[chosen]):
        known = ", ".join(possible[chosen])
        raise RequestError(f"kv_precision must be one of {known} at precision {chosen}, not {kv_precision!r}")
    return Settings(
        precision=chosen,
        kv_precision=kv_precision or possible[chosen][0],
        quantization_group=_QUANTIZATION_GROUP if weight_format.startswith("int") else 0,
        threads=min(threads, os.cpu_count() or threads) if threads else 0,
    )


def default_format(core: ov.Core) -> str:
    """The 16-bit weight format that is fast on this CPU: where it has no bf16 products, OpenVINO multiplies with f16
    weights several times as fast as with bf16 ones."""
    return "bf16" if "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f16"


def cpu_name() -> str:
    """The model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
