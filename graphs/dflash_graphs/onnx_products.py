"""Joins narrow products of one input, as of queries, keys and values: a product costs a fixed time beside its share.

Knows nodes and the weights behind them. Does not know what they are for.
"""

from typing import Any

from onnx import helper

from .weights import Array

_NARROW = 1024  # columns; of wider products the copies of their parts would cost as much as is gained


def join_products(nodes: list[Any], large: dict[str, list[Array]]) -> list[Any]:
    """Return `nodes` with every group of such products made one, which a Split follows.

    `large` holds the weights by name, in parts that follow each other along the first axis (output columns); those of a
    group are put together under the name of the first.
    """
    groups: dict[Any, list[Any]] = {}
    for node in nodes:
        weights = node.input[1:]
        if node.op_type in ("Gemm", "MatMulNBits") and all(name in large for name in weights):
            layout = [(large[name][0].dtype, large[name][0].shape[1:]) for name in weights]
            attributes = [attribute.SerializeToString() for attribute in node.attribute if attribute.name != "N"]
            if _columns(node, large) < _NARROW:
                groups.setdefault(repr((node.op_type, node.input[0], layout, attributes)), []).append(node)
    joined: dict[str, list[Any]] = {}  # by the name of a node: what takes its place
    for group in groups.values():
        if len(group) > 1:
            joined |= {node.name: [] for node in group}
            joined[group[0].name] = _join(group, large)
    return [new for node in nodes for new in joined.get(node.name, [node])]


def _columns(node: Any, large: dict[str, list[Array]]) -> int:
    return sum(map(len, large[node.input[1]]))


def _join(group: list[Any], large: dict[str, list[Array]]) -> list[Any]:
    first, columns = group[0], [_columns(node, large) for node in group]
    outputs, product, lengths = [node.output[0] for node in group], f"{first.name}.joined", f"{first.name}.columns"
    for node in group[1:]:
        for name, other in zip(first.input[1:], node.input[1:], strict=True):
            large[name] += large.pop(other)
    for attribute in first.attribute:
        if attribute.name == "N":
            attribute.i = sum(columns)
    first.output[:] = [product]
    return [
        first,
        helper.make_node("Constant", [], [lengths], name=lengths, value_ints=columns),
        helper.make_node("Split", [product, lengths], outputs, name=f"{first.name}.split", axis=1),
    ]
