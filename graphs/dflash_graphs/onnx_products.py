"""Joins narrow products of one input, as of queries, keys and values: a product costs a fixed time beside its share.

Knows nodes and the weights behind them. Does not know what they are for.
"""

from collections import Counter
from typing import Any

from onnx import helper

from .weights import Array

_NARROW = 2048  # columns; the copies of wider parts would cost as much as is gained


def join_products(nodes: list[Any], large: dict[str, list[Array]]) -> list[Any]:
    """Return `nodes` with every group of such products made one, which a Split follows unless it would be undone.

    `large` holds the weights by name, in parts that follow each other along the first axis (output columns); those of a
    group are put together under the name of the first.
    """
    groups: dict[Any, list[Any]] = {}
    readers_of = Counter(name for node in nodes for name in node.input)
    for node in nodes:
        weights = node.input[1:]
        if node.op_type in ("Gemm", "MatMulNBits") and all(name in large and readers_of[name] == 1 for name in weights):
            layout = [(large[name][0].dtype, large[name][0].shape[1:]) for name in weights]
            attributes = [attribute.SerializeToString() for attribute in node.attribute if attribute.name != "N"]
            if _columns(node, large) < _NARROW:
                groups.setdefault(repr((node.op_type, node.input[0], layout, attributes)), []).append(node)
    placed: dict[str, list[Any]] = {}  # by the name of a node: what takes its place
    for group in groups.values():
        if len(group) == 1:
            continue
        outputs, columns = [node.output[0] for node in group], [_columns(node, large) for node in group]
        product = _join(group, large, sum(columns))
        placed |= {node.name: [] for node in group} | {product.name: [product]}
        readers = [node for node in nodes if set(node.input) & set(outputs)]
        if [(node.op_type, list(node.input)) for node in readers] == [("Concat", outputs)]:
            product.output[:] = readers[0].output
            placed[readers[0].name] = []
        else:
            lengths = helper.make_node("Constant", [], [f"{product.name}.columns"], value_ints=columns)
            parts = helper.make_node("Split", [*product.output, *lengths.output], outputs, axis=1)
            placed[product.name] += [lengths, parts]
    return [new for node in nodes for new in placed.get(node.name, [node])]


def _columns(node: Any, large: dict[str, list[Array]]) -> int:
    return sum(map(len, large[node.input[1]]))


def _join(group: list[Any], large: dict[str, list[Array]], columns: int) -> Any:
    """Give the first node of a group the weights of all."""
    first = group[0]
    for node in group[1:]:
        for name, other in zip(first.input[1:], node.input[1:], strict=True):
            large[name] += large.pop(other)
    for attribute in first.attribute:
        if attribute.name == "N":
            attribute.i = columns
    first.output[:] = [f"{first.name}.joined"]
    return first
