"""Replaces the portable attention of a graph by OpenVINO's PagedAttention, which follows the real context length and
writes the cache in place.

Knows the labels `dflash_graphs.attention` leaves in a graph and the 28 inputs of the extension operator. The portable
ports `past_key.i`, `past_value.i`, `key.i`, `value.i` disappear; `key_cache.i` and `value_cache.i` take their place,
[blocks, kv_heads, BLOCK, head_dim] in the cache precision, used in order: position `p` lives in block `p // BLOCK`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from dflash_graphs.specs import AttentionSpec
from openvino import opset15 as op
from openvino.op import _PagedAttentionExtension

BLOCK = 32  # tokens per cache block of the CPU kernel

_NONE_I32, _NONE_F32 = np.zeros(0, np.int32), np.zeros(0, np.float32)


@dataclass(frozen=True)
class PagedLayer:
    """Mask of one attention layer: sliding window in tokens (0: none) and whether rows of the call see later rows."""

    index: int
    window: int = 0
    bidirectional: bool = False


class _Controls:
    """Inputs shared by all layers of a graph: where the call stands and which blocks it may touch."""

    def __init__(self, takes_single_rows: bool) -> None:
        names = ("attended_rows", "own_rows")
        rows = [_parameter(name, [-1], np.int32) if takes_single_rows else None for name in names]
        self.attended_rows, self.own_rows = rows
        self.past_lens = _parameter("past_lens", [1], np.int32)
        self.subsequence_begins = _parameter("subsequence_begins", [2], np.int32)
        self.block_indices = _parameter("block_indices", [-1], np.int32)
        self.block_indices_begins = _parameter("block_indices_begins", [2], np.int32)
        self.max_context_len = _parameter("max_context_len", [], np.int32)
        self.token_type_ids: Any = None

    def token_types(self) -> Any:
        if self.token_type_ids is None:
            self.token_type_ids = _parameter("token_type_ids", [-1], np.int32)
        return self.token_type_ids

    def parameters(self) -> list[Any]:
        return [value for value in vars(self).values() if value is not None]


def use_paged_attention(
    model: ov.Model, spec: AttentionSpec, layers: Sequence[PagedLayer], takes_single_rows: bool
) -> None:
    """Rewrite `model` in place; its token axis may be static or open.

    The operator computes a single row with other bits than several. A graph that `takes_single_rows` gives it the rows
    `attended_rows` of its own, the only one twice, and goes on with the rows `own_rows` of the result.
    """
    nodes = {node.get_friendly_name(): node for node in model.get_ops()}
    controls = _Controls(takes_single_rows)
    caches: list[Any] = []
    for layer in layers:
        rows = [nodes[f"attention.{layer.index}.{part}"].output(0) for part in ("query", "key", "value")]
        query, key, value = (_gathered(x, controls.attended_rows) for x in rows)
        shape = [-1, spec.kv_heads, -1, spec.head_dim]
        cache = [_parameter(f"{part}_cache.{layer.index}", shape, np.float32) for part in ("key", "value")]
        attended = _gathered(_paged(query, key, value, cache, controls, spec, layer), controls.own_rows)
        for consumer in nodes[f"attention.{layer.index}.output"].output(0).get_target_inputs():
            consumer.replace_source_output(attended)
        caches += cache
    gone = {f"{name}.{layer.index}" for layer in layers for name in ("past_key", "past_value", "key", "value")}
    for result in [r for r in model.get_results() if r.output(0).get_names() & gone]:
        model.remove_result(result)
    for parameter in [p for p in model.get_parameters() if p.output(0).get_names() & gone]:
        model.remove_parameter(parameter)
    model.add_parameters(controls.parameters() + caches)
    model.validate_nodes_and_infer_types()


def _paged(
    query: Any, key: Any, value: Any, cache: list[Any], controls: _Controls, spec: AttentionSpec, layer: PagedLayer
) -> Any:
    number, empty = _constant, (_constant(_NONE_I32), _constant(_NONE_F32))
    types = controls.token_types() if layer.bidirectional else empty[0]
    inputs = [
        query, key, value, *cache,
        controls.past_lens, controls.subsequence_begins, controls.block_indices, controls.block_indices_begins,
        number(np.array(spec.head_dim**-0.5, np.float32)), number(np.array(layer.window, np.int32)),
        empty[1],  # ALiBi slopes
        controls.max_context_len,
        empty[0], empty[0], number(np.zeros((0, 0), np.int32)), empty[1],  # score window, cache rotation
        empty[1], number(np.array(64, np.int32)), number(np.array(8, np.int32)),  # XAttention
        number(np.zeros((0, 0, 0, 0), np.float32)),  # sinks
        number(np.array(0, np.int32)), empty[0], empty[0], empty[0],  # adaptive eviction
        types,
        number(np.zeros(0, np.uint8)), empty[0],  # tree mask of the queries
    ]  # fmt: skip
    node = _PagedAttentionExtension([x if isinstance(x, ov.Output) else x.output(0) for x in inputs])
    info = node.get_rt_info()
    for name in ("k", "v"):  # the plugin reads the head geometry here
        info[f"num_{name}_heads"], info[f"{name}_head_size"] = spec.kv_heads, spec.head_dim
    return node.output(0)


def _gathered(x: ov.Output, rows: Any) -> ov.Output:
    return x if rows is None else op.gather(x, rows, _constant(np.array(0, np.int32))).output(0)


def _parameter(name: str, shape: Sequence[int], dtype: Any) -> Any:
    node = op.parameter(list(shape), dtype, name=name)
    node.output(0).set_names({name})
    return node


def _constant(array: np.ndarray[Any, Any]) -> Any:
    return op.constant(array)
