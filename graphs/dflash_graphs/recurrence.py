"""What the recurrent layers of a call share: their ports, and which rows stand where.

A call computes the rows since the last chunk boundary: the kept ones and its own. Usually these reach one boundary at
most, so a window of two chunks holds them; where they are fewer, the last one stands in for the rest, which no row
before it sees. A wide call (prefill) reaches several boundaries; it has to be committed as a whole.

Ports, all f32 but where noted, of every recurrent layer. Inputs: `past_rows` [kernel - 1, conv_width], the projected
rows before the call's own; `past_qk`, `past_v`, `past_gates` [CHUNK - 1, width], what is kept of the rows since the
boundary, oldest first, the rest finite and ignored; `state` [value_heads, key_dim, value_dim]. Outputs: `rows`, `qk`,
`v`, `gates`, the T rows to keep; `next_state.i` [1, …], the state after the first chunk, if the rows reach its end.

Ports for all: `pending_rows` i32 [1], the number of kept rows; `boundaries` i32 [1], how many chunk boundaries the rows
reach; `crossing` [1] holds a 1, and a reader that opens its axis leaves it empty when the rows reach no boundary: no
state comes out then, and what lies behind it costs nothing. The output `wide_state` [layers, …] of a wide call is the
state after the last boundary; of others it is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .sequential_delta import Span, span
from .specs import CHUNK, WINDOW, DeltaSpec
from .vocabulary import LoopOps, Ops, Value


@dataclass(frozen=True)
class Window:
    """Index arithmetic shared by all recurrent layers of one call."""

    ops: LoopOps
    taps: list[Value]  # i32 [T] each: which row of (past_rows, new rows) a tap before the last one reads
    rows: Value  # i32 [WINDOW]: which row of (kept, new rows) stands at each place
    crossing: Value  # f32 [n, 1, 1, 1]: 1, or empty when the rows do not reach the window's first boundary
    new: Value  # i32 [T]: the places of the call's own rows
    chunks: Value  # i32 [1]: how many chunks a wide call has behind the first one, or 0
    second: Value  # i32 [CHUNK]: which row of (kept, new rows) stands at each place of the second, were there enough
    last: Value  # i32 [1]: the last of these rows


@dataclass(frozen=True)
class Recurrence:
    """What the recurrent layers of one call share: where rows stand, and their ports by name and layer."""

    place: Window | Span
    inputs: dict[str, dict[int, Value]]
    outputs: dict[str, dict[int, Value]]
    wide_states: list[Value]

    def declare_outputs(self, ops: Ops, spec: DeltaSpec) -> None:
        """To be called once all layers are emitted."""
        with ops.precise():
            for name, width in _row_widths(spec).items():
                ops.layers_output(name, self.outputs[name], [-1, width])
            if self.wide_states:
                sizes = [-1, spec.value_heads, spec.key_dim, spec.value_dim]
                ops.output("wide_state", ops.reshape(ops.concat(self.wide_states, 0), sizes), sizes)


def recurrence(ops: Ops, spec: DeltaSpec, layers: Sequence[int], ids: Value) -> Recurrence:
    """Declare the inputs; `ids` i32 [T] are the positions of the call's rows."""
    with ops.precise():
        reach, widths = spec.kernel - 1, _row_widths(spec)
        rows = {name: [reach if name == "rows" else CHUNK - 1, width] for name, width in widths.items()}
        inputs = {f"past_{name}": ops.layers_input(f"past_{name}", layers, shape) for name, shape in rows.items()}
        inputs["state"] = ops.layers_input("state", layers, [spec.value_heads, spec.key_dim, spec.value_dim])
    pending, boundaries = (ops.input(name, [1], "i32") for name in ("pending_rows", "boundaries"))
    if ops.kernels is not None:
        place: Window | Span = span(ops.kernels, ids, pending, boundaries)
    else:
        assert ops.loops is not None
        place = _window(ops.loops, spec, ids, pending, boundaries)
    return Recurrence(place, inputs, {name: {} for name in widths}, [])


def _row_widths(spec: DeltaSpec) -> dict[str, int]:
    return {"rows": spec.conv_width, **spec.kept_widths}


def _window(ops: LoopOps, spec: DeltaSpec, ids: Value, pending: Value, boundaries: Value) -> Window:
    def number(n: int) -> Value:
        return ops.constant(np.array([n], np.int32))

    at = ops.constant(np.arange(WINDOW, dtype=np.int32))
    unlimited, last = ops.add(ops.subtract(at, pending), number(CHUNK - 1)), ops.add(ops.rows(ids), number(CHUNK - 2))
    place = ops.select(ops.less(at, pending), at, ops.minimum(unlimited, last))
    crossing = ops.reshape(ops.input("crossing", [1]), [-1, 1, 1, 1])
    offsets = ops.subtract(ids, ops.slice(ids, 0, 1, 0))
    taps = [ops.add(offsets, number(j)) for j in range(spec.kernel - 1)]
    chunks = ops.select(ops.less(number(1), boundaries), boundaries, number(0))
    second = ops.slice(unlimited, CHUNK, WINDOW, 0)
    return Window(ops, taps, place, crossing, ops.add(offsets, pending), chunks, second, last)
