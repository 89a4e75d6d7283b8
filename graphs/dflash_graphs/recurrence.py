"""What the recurrent layers of a call share: their ports, and which rows stand where.

A call computes the rows since the last chunk boundary, the kept ones and its own, in a window of two chunks; where
they are fewer, the last one stands in for the rest, which no row before it sees. A call that fills the window (prefill)
has to be committed as a whole.

Ports, all f32 but where noted, of every recurrent layer. Inputs: `past_rows` [kernel - 1, conv_width], the projected
rows before the call's own; `past_qk`, `past_v`, `past_gates` [CHUNK - 1, width], what is kept of the rows since the
boundary, oldest first, the rest finite and ignored; `state` [value_heads, key_dim, value_dim]. Outputs: `rows`, `qk`,
`v`, `gates`, the T rows to keep; `next_state.i` [1, …], the state after the first chunk, if the rows reach its end.

Ports for all: `pending_rows` i32 [1], the number of kept rows; `crossing` and `full` [1] hold a 1 each, and a reader
that opens their axes leaves them empty when the rows reach no boundary, or do not fill the window: no state comes out
then, and what lies behind it costs nothing. The output `full_state` [layers, …] is the state after a full window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .sequential_delta import Span, span
from .specs import CHUNK, WINDOW, DeltaSpec
from .vocabulary import Ops, Value


@dataclass(frozen=True)
class Window:
    """Index arithmetic shared by all recurrent layers of one call."""

    taps: list[Value]  # i32 [T] each: which row of (past_rows, new rows) a tap before the last one reads
    rows: Value  # i32 [WINDOW]: which row of (kept, new rows) stands at each place
    crossing: Value  # f32 [n, 1, 1, 1]: 1, or empty when the rows do not reach the window's first boundary
    full: Value  # f32 [n, 1, 1, 1]: 1, or empty when the rows do not fill the window
    new: Value  # i32 [T]: the places of the call's own rows


@dataclass(frozen=True)
class Recurrence:
    """What the recurrent layers of one call share: where rows stand, and their ports by name and layer."""

    place: Window | Span
    inputs: dict[str, dict[int, Value]]
    outputs: dict[str, dict[int, Value]]
    full_states: list[Value]

    def declare_outputs(self, ops: Ops, spec: DeltaSpec) -> None:
        """To be called once all layers are emitted."""
        with ops.precise():
            for name, width in _row_widths(spec).items():
                ops.layers_output(name, self.outputs[name], [-1, width])
            if self.full_states:
                sizes = [-1, spec.value_heads, spec.key_dim, spec.value_dim]
                ops.output("full_state", ops.concat(self.full_states, 0), sizes)


def recurrence(ops: Ops, spec: DeltaSpec, layers: Sequence[int], ids: Value) -> Recurrence:
    """Declare the inputs; `ids` i32 [T] are the positions of the call's rows."""
    with ops.precise():
        reach, widths = spec.kernel - 1, _row_widths(spec)
        rows = {name: [reach if name == "rows" else CHUNK - 1, width] for name, width in widths.items()}
        inputs = {f"past_{name}": ops.layers_input(f"past_{name}", layers, shape) for name, shape in rows.items()}
        inputs["state"] = ops.layers_input("state", layers, [spec.value_heads, spec.key_dim, spec.value_dim])
    pending = ops.input("pending_rows", [1], "i32")
    place = _window(ops, spec, ids, pending) if ops.kernels is None else span(ops.kernels, ids, pending)
    return Recurrence(place, inputs, {name: {} for name in widths}, [])


def _row_widths(spec: DeltaSpec) -> dict[str, int]:
    return {"rows": spec.conv_width, **spec.kept_widths}


def _window(ops: Ops, spec: DeltaSpec, ids: Value, pending: Value) -> Window:
    def number(n: int) -> Value:
        return ops.constant(np.array([n], np.int32))

    at = ops.constant(np.arange(WINDOW, dtype=np.int32))
    new, last = ops.add(ops.subtract(at, pending), number(CHUNK - 1)), ops.add(ops.rows(ids), number(CHUNK - 2))
    place = ops.select(ops.less(at, pending), at, ops.minimum(new, last))
    crossing, full = (ops.reshape(ops.input(name, [1]), [-1, 1, 1, 1]) for name in ("crossing", "full"))
    offsets = ops.subtract(ids, ops.slice(ids, 0, 1, 0))
    taps = [ops.add(offsets, number(j)) for j in range(spec.kernel - 1)]
    return Window(taps, place, crossing, full, ops.add(offsets, pending))
