"""What a target and a drafter are: plain numbers, already free of Hub configuration keys.

Knows every figure a graph needs. Does not know files, weights or configuration formats: the exporter reads those and
builds a spec (`dflash_exporter.hf_config`), the bundle manifest stores it, and the runtime reads it back from there.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LayerKind = Literal["attention", "delta"]
CHUNK = 16  # rows of one aligned chunk of the recurrent layers (ARCHITECTURE.md, "aligned chunks")
WINDOW = 2 * CHUNK  # what a verify looks at: pending rows (< CHUNK) and at most CHUNK new ones


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """The `rope_type: llama3` frequency scaling of Llama 3.1 and later."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding over the first `dim` entries of each head, halves rotated against each other (NeoX)."""

    theta: float
    dim: int
    scaling: Llama3Scaling | None = None

    def inverse_frequencies(self) -> NDArray[np.float32]:
        """Return f32 [dim / 2], radians per position."""
        inverse = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        if self.scaling is None:
            return inverse.astype(np.float32)
        scale, wavelength = self.scaling, 2 * math.pi / inverse
        ratio = scale.original_max_positions / wavelength
        smooth = (ratio - scale.low_freq_factor) / (scale.high_freq_factor - scale.low_freq_factor)
        blend = np.clip(smooth, 0.0, 1.0)  # 0: fully scaled (long waves), 1: untouched (short waves)
        return ((1 - blend) * inverse / scale.factor + blend * inverse).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Grouped-query attention: query head `h` reads key/value head `h // (heads // kv_heads)`."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    qk_norm: bool
    bias: bool = False  # on q, k, v and o projections
    output_gate: bool = False  # Qwen3.5: q_proj carries a per-head gate behind each query head

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """Gated DeltaNet: value head `h` reads key head `h // (value_heads // key_heads)`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int  # taps of the causal convolution

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    def kept_widths(self, has_window: bool) -> dict[str, int]:
        """Values per row, by port, of what is kept of the rows since the state; see `recurrence.py`."""
        widths = {"k": self.key_width, "w": self.value_width, "gates": 2 * self.value_heads}
        return widths if has_window else {"kept": sum(widths.values())}


@dataclass(frozen=True, kw_only=True)
class TargetSpec:
    """A decoder-only target language model."""

    family: str  # a key of dflash_graphs.targets.FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerKind, ...]
    rms_eps: float
    tied_head: bool
    max_positions: int
    attention: AttentionSpec
    delta: DeltaSpec | None = None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layers) if kind == "attention")

    @property
    def delta_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layers) if kind == "delta")


@dataclass(frozen=True, kw_only=True)
class DrafterLayer:
    """Mask of one drafter layer inside the block and towards the context."""

    window: int | None  # sliding window in tokens, None for full attention
    causal: bool  # False: every row of the block sees every other


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """A DFlash v1 block-diffusion drafter."""

    kind: str  # "dflash"
    hidden_size: int
    intermediate_size: int
    layers: tuple[DrafterLayer, ...]
    rms_eps: float
    attention: AttentionSpec
    block_size: int  # anchor included
    mask_token_id: int
    taps: tuple[int, ...]  # 0-based target layers whose output feeds the drafter
    target_hidden_size: int
    embedding_scale: float = 1.0

    @property
    def feature_width(self) -> int:
        return len(self.taps) * self.target_hidden_size
