"""What the recurrent layers of a call share: their ports, and which rows stand where.

A call computes the rows since the last chunk boundary, the kept ones and its own, in a window of two chunks; where
they are fewer, the last one stands in for the rest, which no row before it sees. A call that fills the window (prefill)
has to be committed as a whole.

Ports, all f32 but where noted, of every recurrent layer. Inputs: `past_rows` [kernel - 1, conv_width], the projected
rows before the call's own; what is kept of the rows since the boundary, oldest first, the rest finite and ignored:
`past_k` [(CHUNK - 1) * key_heads, key_dim], `past_w` [(CHUNK - 1) * value_heads, value_dim], `past_gates` [CHUNK - 1,
2 * value_heads]; `state` [value_heads, key_dim, value_dim]. Outputs: `rows`, `k`, `w`, `gates`, the T rows to keep, and
in place of those of `w` behind the boundary the rows of `w_behind`; `next_state.i` [1, …], the state after the first
chunk, if the rows reach its end.

Ports for all: `pending_rows` i32 [1], the number of kept rows; `rows_before` and `rows_behind` i32, which of the call's
rows stand before and behind the window's boundary. The latter is empty when the rows do not reach it, and then what
lies behind costs next to nothing; when they just do, it is the last row. `full` [1] holds a 1, or nothing when the rows
do not fill the window: `full_state` [layers, …], the state after it, is empty then. A backend with a kernel for the
recurrence has other ports, see `sequential_delta`.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .sequential_delta import Span, span
from .specs import CHUNK, WINDOW, DeltaSpec
from .vocabulary import Dim, Ops, Value


@dataclass(frozen=True)
class Part:
    """Where one chunk finds what its R rows of the call need; i32. n is 1, or 0 if it is not reached.

    A piece is a row's share of one head. Queries and keys are pieces of (kept keys, new rows' queries and keys).
    """

    both: Value  # [1, value_heads, 2 * R]: queries, then keys, of its rows
    decays: Value  # [1, value_heads, 2 * R]: their places in [2, WINDOW / CHUNK, value_heads, CHUNK]
    from_keys: Value  # pieces of the product with the state, for those of `w` or `w_behind`
    from_queries: Value  # [n, value_heads, CHUNK]: the same for each place of the chunk; any where a row is kept
    wanted: Value  # [n, value_heads, CHUNK]: pieces of W, kept rows before new ones, for each place of the chunk
    keys: Value  # [m, value_heads, CHUNK], for each place; m is 1, or 0 if the rows do not reach the chunk's end


@dataclass(frozen=True)
class Window:
    """Index arithmetic shared by all recurrent layers of one call, i32 where not said otherwise."""

    taps: list[Value]  # [T] each: which row of (past_rows, new rows) a tap before the last one reads
    queries: Value  # [WINDOW / CHUNK, key_heads, CHUNK]: for each place; any where a row is kept
    keys: Value  # [WINDOW / CHUNK, key_heads, CHUNK]
    rows: Value  # [WINDOW]: which row of (kept, new rows) stands at each place
    before: Part
    behind: Part
    own: Value  # [R * value_heads]: the pieces of `rows_behind` among those of all rows of the call
    new_keys: Value  # [T * key_heads]: those of the call's rows
    new: Value  # [T * value_heads]: the call's pieces of the window
    crossing: Value  # f32 [n, 1, 1, 1]: 1, or empty when the rows do not reach the window's first boundary
    full: Value  # f32 [m, 1, 1, 1]: 1, or empty when the rows do not fill the window


@dataclass(frozen=True)
class Recurrence:
    """What the recurrent layers of one call share: where rows stand, and their ports by name and layer."""

    place: Window | Span
    inputs: dict[str, dict[int, Value]]
    outputs: dict[str, dict[int, Value]]

    @property
    def has_window(self) -> bool:
        return isinstance(self.place, Window)

    def declare_outputs(self, ops: Ops, spec: DeltaSpec) -> None:
        """To be called once all layers are emitted."""
        with ops.precise():
            for name, layers in self.outputs.items():
                if name == "full_state":
                    sizes = [-1, spec.value_heads, spec.key_dim, spec.value_dim]
                    ops.output(name, ops.concat(list(layers.values()), 0), sizes)
                else:
                    ops.layers_output(name, layers, [-1, _row_widths(spec, self.has_window)[name]])


def recurrence(ops: Ops, spec: DeltaSpec, layers: Sequence[int], rows: Dim, ids: Value) -> Recurrence:
    """Declare the inputs; `ids` i32 [T] are the positions of the call's rows."""
    has_window = ops.kernels is None
    with ops.precise():
        widths = spec.kept_widths(has_window)
        shapes = {"rows": [spec.kernel - 1, spec.conv_width]} | {name: [CHUNK - 1, n] for name, n in widths.items()}
        if has_window:  # in pieces, as one reshape behind another would lose the mark
            shapes["k"] = [(CHUNK - 1) * spec.key_heads, spec.key_dim]
            shapes["w"] = [(CHUNK - 1) * spec.value_heads, spec.value_dim]
        inputs = {f"past_{name}": ops.layers_input(f"past_{name}", layers, shape) for name, shape in shapes.items()}
        inputs["state"] = ops.layers_input("state", layers, [spec.value_heads, spec.key_dim, spec.value_dim])
    pending = ops.input("pending_rows", [1], "i32")
    place = _window(ops, spec, rows, ids, pending) if ops.kernels is None else span(ops.kernels, ids, pending)
    outputs = [*_row_widths(spec, has_window), *(["full_state"] if has_window else [])]
    return Recurrence(place, inputs, {name: {} for name in outputs})


def _row_widths(spec: DeltaSpec, has_window: bool) -> dict[str, int]:
    widths = {"rows": spec.conv_width, **spec.kept_widths(has_window)}
    return widths | {"w_behind": widths["w"]} if has_window else widths


def _window(ops: Ops, spec: DeltaSpec, call_rows: Dim, ids: Value, pending: Value) -> Window:
    keys, heads, repeat = spec.key_heads, spec.value_heads, spec.value_heads // spec.key_heads

    def const(*values: int) -> Value:
        return ops.constant(np.array(values, np.int32))

    def steps(count: int, step: int) -> Value:
        return const(*range(0, count * step, step))

    def outer(*terms: Value) -> Value:
        """The sums of all combinations, an axis for each term."""
        rank = len(terms)
        spread = (ops.reshape(x, [-1 if i == j else 1 for j in range(rank)]) for i, x in enumerate(terms))
        return functools.reduce(ops.add, spread)

    def flat(x: Value) -> Value:
        return ops.reshape(x, [-1])

    def at_least_0(x: Value) -> Value:
        return ops.subtract(x, ops.minimum(x, const(0)))

    def queries(row: Value) -> Value:
        """The first piece of a new row, behind the kept keys; its queries stand before its keys."""
        return ops.add(ops.multiply(row, const(2 * keys)), const((CHUNK - 1) * keys))

    def by_head(x: Value) -> Value:
        """[WINDOW] -> [WINDOW / CHUNK, key_heads, CHUNK]"""
        return ops.add(ops.reshape(x, [WINDOW // CHUNK, 1, CHUNK]), ops.reshape(steps(keys, 1), [1, keys, 1]))

    before, behind = (ops.input(f"rows_{part}", [call_rows], "i32") for part in ("before", "behind"))
    full = ops.input("full", [1])
    nothing = ops.multiply(ops.slice(behind, 0, 1, 0), const(0))  # [n]
    rows, offsets = ops.rows(ids), ops.subtract(ids, ops.slice(ids, 0, 1, 0))  # T; 0, 1, ... T - 1
    border = ops.minimum(ops.subtract(const(CHUNK), pending), ops.subtract(rows, const(1)))  # the first of `behind`

    at, places = steps(WINDOW, 1), ops.add(offsets, pending)
    is_kept, is_before = ops.less(at, pending), ops.less(places, const(CHUNK))
    new = ops.minimum(at_least_0(ops.subtract(at, pending)), ops.subtract(rows, const(1)))
    window_rows = ops.select(is_kept, at, ops.add(new, const(CHUNK - 1)))
    window_keys = ops.select(is_kept, ops.multiply(at, const(keys)), ops.add(queries(new), const(keys)))
    of_value_heads = const(*(head // repeat for head in range(heads)))

    def both(listed: Value) -> Value:
        return ops.reshape(outer(of_value_heads, steps(2, keys), queries(listed)), [1, heads, -1])

    def decays(place: Value) -> Value:
        return ops.reshape(outer(steps(heads, CHUNK), steps(2, WINDOW * heads), place), [1, heads, -1])

    def met(listed: Value, kind: int) -> Value:
        """The first piece of each head in the product of `listed` rows with a state, of queries (0) or keys (1)."""
        return ops.multiply(ops.add(steps(heads, 2), const(kind)), ops.rows(listed))

    def in_before(index: Value) -> Value:
        return ops.minimum(index, ops.subtract(ops.rows(before), const(1)))

    behind_places = at_least_0(ops.subtract(ops.add(behind, pending), const(CHUNK)))
    new_behind = ops.subtract(ops.slice(new, CHUNK, WINDOW, 0), border)
    filled = ops.multiply(ops.convert(full, "i32"), const(0))
    return Window(
        taps=[ops.add(offsets, const(j)) for j in range(spec.kernel - 1)],
        queries=by_head(queries(new)),
        keys=by_head(window_keys),
        rows=window_rows,
        before=Part(
            both=both(before),
            decays=decays(ops.add(before, pending)),
            from_keys=flat(outer(in_before(offsets), met(before, 1))),
            from_queries=outer(const(0), met(before, 0), in_before(ops.slice(new, 0, CHUNK, 0))),
            wanted=outer(const(0), steps(heads, 1), ops.multiply(ops.slice(window_rows, 0, CHUNK, 0), const(heads))),
            keys=outer(nothing, of_value_heads, ops.slice(window_keys, 0, CHUNK, 0)),
        ),
        behind=Part(
            both=both(behind),
            decays=decays(ops.add(behind_places, const(heads * CHUNK))),
            from_keys=flat(outer(ops.subtract(behind, border), met(behind, 1))),
            from_queries=outer(nothing, met(behind, 0), new_behind),
            wanted=outer(nothing, steps(heads, 1), ops.multiply(new_behind, const(heads))),
            keys=outer(filled, of_value_heads, ops.slice(window_keys, CHUNK, WINDOW, 0)),
        ),
        own=flat(outer(ops.multiply(behind, const(heads)), steps(heads, 1))),
        new_keys=flat(outer(ops.add(queries(offsets), const(keys)), steps(keys, 1))),
        new=flat(
            outer(ops.add(places, ops.select(is_before, const(0), const((heads - 1) * CHUNK))), steps(heads, CHUNK))
        ),
        crossing=ops.reshape(ops.convert(ops.add(nothing, const(1)), "f32"), [-1, 1, 1, 1]),
        full=ops.reshape(full, [-1, 1, 1, 1]),
    )
