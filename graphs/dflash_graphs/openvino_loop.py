"""A Loop inside an If: a Loop alone would copy what goes in even when it does not run.

Knows how OpenVINO nests graphs. Does not know what is repeated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as op

from .vocabulary import Body, Value

Emit = Callable[[Any], Value]  # names a node, and marks it when it has to be precise


def repeat(emit: Emit, times: Value, shared: Sequence[Value], state: Value, body: Body) -> tuple[Value, Value]:
    """Emit `vocabulary.LoopOps.repeat`."""
    outside = [times, *shared, state]
    outer, inner = ([op.parameter(x.partial_shape, x.element_type) for x in outside] for _ in range(2))
    index, goes_on = op.parameter([1], np.int32), op.constant(np.array(True)).output(0)
    part, after = body(index.output(0), [x.output(0) for x in inner[1:-1]], inner[-1].output(0))
    before = emit(op.reshape(inner[-1], op.constant([-1, *_tail(state)]), False))
    results = [op.result(x) for x in (goes_on, part, after, before)]
    loop = op.loop(_scalar(outer[0]), goes_on)
    loop.set_function(ov.Model(results, [index, *inner], "body"))
    loop.set_special_body_ports([0, 0])
    for x, y in zip(outer[:-1], inner[:-1], strict=True):
        loop.set_invariant_input(y, x.output(0))
    loop.set_merged_input(inner[-1], outer[-1].output(0), after)
    parts = loop.get_concatenated_slices(part, 0, 1, 1, -1, 0)
    then = [op.result(x) for x in (parts, loop.get_iter_value(before, -1))]
    otherwise = [op.result(op.constant(np.zeros((0, *_tail(x)), np.float32))) for x in (part, state)]
    branch = op.if_op(_scalar(op.greater(times, _number(0))))
    branch.set_then_body(ov.Model(then, outer, "then"))
    branch.set_else_body(ov.Model(otherwise, [], "else"))
    for x, y in zip(outside, outer, strict=True):
        branch.set_input(x, y, None)
    outputs = [branch.set_output(x, y) for x, y in zip(then, otherwise, strict=True)]
    return _sized(emit, outputs[0], times), _sized(emit, outputs[1], op.minimum(times, _number(1)))


def _sized(emit: Emit, x: Value, size: Any) -> Value:
    """`x`, said to have `size` (i32 [1]) entries along its leading axis.

    The plugin lets tensors of later nodes take the memory of an If's output as soon as they grow, before that is read;
    a shape that is not constant keeps them apart.
    """
    return emit(op.reshape(x, op.concat([size, op.constant(np.array(_tail(x), np.int32))], 0), False))


def _tail(x: Value) -> list[int]:
    """The sizes of all axes but the leading one."""
    return [size.get_length() for size in list(x.get_partial_shape())[1:]]


def _scalar(x: Any) -> Value:
    return op.reshape(x, op.constant(np.zeros(0, np.int64)), False).output(0)


def _number(value: int) -> Any:
    return op.constant(np.array([value], np.int32))
