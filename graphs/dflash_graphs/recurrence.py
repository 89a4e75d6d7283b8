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

from .sequential_delta import Span
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
    taps: list[Value]  # i32 [T] each: which row of (past_rows, new rows) a tap before the last one reads
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
    shapes = {"past_rows": [spec.kernel - 1, spec.conv_width]}
    state = [spec.value_heads, spec.key_dim, spec.value_dim]
    if has_window:  # in pieces, as one reshape behind another would lose the mark
        shapes |= {
            "past_k": [(CHUNK - 1) * spec.key_heads, spec.key_dim],
            "past_w": [(CHUNK - 1) * spec.value_heads, spec.value_dim],
            "past_gates": [CHUNK - 1, 2 * spec.value_heads],
            "state": state,
        }
    else:
        shapes |= {"past_kept": [CHUNK, *spec.kept_widths(has_window).values()], "state": [1, *state]}
    with ops.precise():
        inputs = {name: ops.layers_input(name, layers, shape) for name, shape in shapes.items()}
    pending = ops.input("pending_rows", [1], "i32")
    offsets = ops.subtract(ids, ops.slice(ids, 0, 1, 0))  # 0, 1, …
    taps = [ops.add(offsets, ops.constant(np.array([j], np.int32))) for j in range(spec.kernel - 1)]
    place = Span(ops.kernels, pending) if ops.kernels else _window(ops, spec, rows, offsets, pending)
    outputs = [*_row_widths(spec, has_window), *(["full_state"] if has_window else [])]
    return Recurrence(place, taps, inputs, {name: {} for name in outputs})


def _row_widths(spec: DeltaSpec, has_window: bool) -> dict[str, int]:
    widths = {"rows": spec.conv_width, **spec.kept_widths(has_window)}
    return widths | {"w_behind": widths["w"]} if has_window else widths


class _Indices:
    """Arithmetic with i32 indices of rows, places and pieces."""

    def __init__(self, ops: Ops, spec: DeltaSpec) -> None:
        self.ops, self.keys, self.heads = ops, spec.key_heads, spec.value_heads
        repeat = spec.value_heads // spec.key_heads
        self.key_of_value_head = self.const(*(head // repeat for head in range(self.heads)))

    def const(self, *values: int) -> Value:
        return self.ops.constant(np.array(values, np.int32))

    def steps(self, count: int, step: int) -> Value:
        return self.const(*range(0, count * step, step))

    def outer(self, *terms: Value) -> Value:
        """The sums of all combinations, an axis for each term."""
        rank = len(terms)
        spread = (self.ops.reshape(x, [-1 if i == j else 1 for j in range(rank)]) for i, x in enumerate(terms))
        return functools.reduce(self.ops.add, spread)

    def flat(self, *terms: Value) -> Value:
        return self.ops.reshape(self.outer(*terms), [-1])

    def queries(self, row: Value) -> Value:
        """The first piece of a new row, behind the kept keys; its queries stand before its keys."""
        return self.ops.add(self.ops.multiply(row, self.const(2 * self.keys)), self.const((CHUNK - 1) * self.keys))

    def by_head(self, x: Value) -> Value:
        """[WINDOW] -> [WINDOW / CHUNK, key_heads, CHUNK]"""
        heads = self.ops.reshape(self.steps(self.keys, 1), [1, self.keys, 1])
        return self.ops.add(self.ops.reshape(x, [WINDOW // CHUNK, 1, CHUNK]), heads)

    def met(self, listed: Value, kind: int) -> Value:
        """The first piece of each head in the product of `listed` rows with a state, of queries (0) or keys (1)."""
        return self.ops.multiply(self.ops.add(self.steps(self.heads, 2), self.const(kind)), self.ops.rows(listed))

    def halves(self, x: Value) -> list[Value]:
        return [self.ops.slice(x, start, start + CHUNK, 0) for start in (0, CHUNK)]

    def standing(self, pending: Value, last: Value) -> tuple[Value, Value, Value]:
        """For each place of the window the new row there, any where one is kept; the row of (kept, new); its keys."""
        ops, at = self.ops, self.steps(WINDOW, 1)
        is_kept, new = ops.less(at, pending), ops.subtract(at, pending)
        new = ops.minimum(ops.select(is_kept, self.const(0), new), last)
        rows = ops.select(is_kept, at, ops.add(new, self.const(CHUNK - 1)))
        new_keys = ops.add(self.queries(new), self.const(self.keys))
        return new, rows, ops.select(is_kept, ops.multiply(at, self.const(self.keys)), new_keys)

    def part(
        self, listed: Value, places: Value, *, rows: Value, new: Value, wanted: Value, keys: Value, n: Value, m: Value
    ) -> Part:
        """Of the rows `listed`, at `places` of the window.

        `rows` and `new` say where in the list a row of W, or the row at a place of the chunk, stands; `wanted` and
        `keys` what stands at each place; `n` and `m` hold a 0 each, or nothing where a chunk, or its end, is not met.
        """
        heads, shape = self.heads, [1, self.heads, -1]
        both = self.outer(self.key_of_value_head, self.steps(2, self.keys), self.queries(listed))
        decays = self.outer(self.steps(heads, CHUNK), self.steps(2, WINDOW * heads), places)
        return Part(
            both=self.ops.reshape(both, shape),
            decays=self.ops.reshape(decays, shape),
            from_keys=self.flat(rows, self.met(listed, 1)),
            from_queries=self.outer(n, self.met(listed, 0), new),
            wanted=self.outer(n, self.steps(heads, 1), self.ops.multiply(wanted, self.const(heads))),
            keys=self.outer(m, self.key_of_value_head, keys),
        )


def _window(ops: Ops, spec: DeltaSpec, call_rows: Dim, offsets: Value, pending: Value) -> Window:
    """Minima keep indices of what nothing reads inside their lists: backends differ in what they do beyond."""
    index, heads, full = _Indices(ops, spec), spec.value_heads, ops.input("full", [1])
    const, zero = index.const, index.const(0)
    before, behind = (ops.input(f"rows_{part}", [call_rows], "i32") for part in ("before", "behind"))
    reached, filled = ops.multiply(ops.slice(behind, 0, 1, 0), zero), ops.multiply(ops.convert(full, "i32"), zero)
    last = ops.subtract(ops.rows(offsets), const(1))
    border = ops.minimum(ops.subtract(const(CHUNK), pending), last)  # the first of `behind`
    places, to_second = ops.add(offsets, pending), const((heads - 1) * CHUNK)
    new, rows, keys = index.standing(pending, last)
    (new_before, new_behind), (keys_before, keys_behind) = index.halves(new), index.halves(keys)
    new_behind = ops.subtract(new_behind, border)
    first = index.part(
        before,
        ops.add(before, pending),
        rows=ops.minimum(offsets, ops.subtract(ops.rows(before), const(1))),
        new=new_before,
        wanted=index.halves(rows)[0],
        keys=keys_before,
        n=zero,
        m=reached,
    )
    second = index.part(
        behind,
        ops.add(ops.add(behind, pending), to_second),
        rows=ops.subtract(behind, border),
        new=new_behind,
        wanted=new_behind,
        keys=keys_behind,
        n=reached,
        m=filled,
    )
    moved = ops.select(ops.less(places, const(CHUNK)), zero, to_second)
    return Window(
        queries=index.by_head(index.queries(new)),
        keys=index.by_head(keys),
        rows=rows,
        before=first,
        behind=second,
        own=index.flat(ops.multiply(behind, const(heads)), index.steps(heads, 1)),
        new_keys=index.flat(ops.add(index.queries(offsets), const(index.keys)), index.steps(index.keys, 1)),
        new=index.flat(ops.add(places, moved), index.steps(heads, CHUNK)),
        crossing=ops.reshape(ops.convert(ops.add(reached, const(1)), "f32"), [-1, 1, 1, 1]),
        full=ops.reshape(full, [-1, 1, 1, 1]),
    )
