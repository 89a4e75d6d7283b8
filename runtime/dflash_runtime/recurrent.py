"""What the recurrent layers carry from call to call: states at the last chunk boundary and the rows since.

Knows the ports of `dflash_graphs.recurrence`. Does not know which library runs the graph.
"""

import functools
from collections.abc import Container, Sequence

import numpy as np
from dflash_graphs.specs import CHUNK, WINDOW, DeltaSpec
from numpy.typing import NDArray

from .backends import Graph

Arrays = Sequence[NDArray[np.float32]]
_FLAGS = [np.ones(n, np.float32) for n in (0, 1)]


@functools.cache  # the same arrays each time: what is bound is seen at once
def _listed(pending: int, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Which of a call's rows stand before and behind the window's boundary; of the latter one at least, if reached."""
    border, all_rows = CHUNK - pending, np.arange(rows, dtype=np.int32)
    return all_rows[:border], all_rows[min(border, rows - 1) :] if rows >= border else all_rows[:0]


def most_rows(ports: Container[str]) -> int:
    """Return the most rows of a call at a chunk boundary, given the graph's inputs; behind one so many fewer."""
    return WINDOW if _has_window(ports) else 4 * CHUNK


def _has_window(ports: Container[str]) -> bool:
    return "rows_behind" in ports


class RecurrentLayers:
    """All recurrent layers of a target; `pending` below is the number of rows kept since the boundary."""

    def __init__(self, graph: Graph, ports: Container[str], layers: int, spec: DeltaSpec) -> None:
        self._graph, self._has_window, self._most_rows = graph, _has_window(ports), most_rows(ports)
        shape = (layers, spec.value_heads, spec.key_dim, spec.value_dim)
        self.states = [np.zeros(shape, np.float32) for _ in range(3)]  # current, next, after a full window
        self.recent = np.zeros((layers, spec.kernel - 1, spec.conv_width), np.float32)  # what the convolution reaches
        widths = spec.kept_widths(self._has_window).items()
        self.kept = {name: np.zeros((layers, CHUNK - 1, width), np.float32) for name, width in widths}
        for name, array in (("rows", self.recent), *self.kept.items()):
            graph.bind_layers(f"past_{name}", array)
        self._boundaries = np.zeros(1, np.int32)  # that the next call reaches
        if not self._has_window:
            graph.bind("boundaries", self._boundaries)
        self._bind()
        self.place(0, 0)

    def _bind(self) -> None:
        self._graph.bind_layers("state", self.states[0])
        self._graph.bind_layers_output("next_state", self.states[1])
        if self._has_window:
            self._graph.bind_output("full_state", self.states[2])

    def place(self, pending: int, rows: int) -> None:
        """Say how many rows the next call has; those that do not reach a chunk's end spare the work behind it."""
        if pending + rows > self._most_rows:
            raise ValueError(f"a call takes {self._most_rows - pending} rows here at most, not {rows}")
        self._boundaries[0] = boundaries = (pending + rows) // CHUNK
        if self._has_window:
            before, behind = _listed(pending, rows)
            self._graph.bind("rows_before", before)
            self._graph.bind("rows_behind", behind)
            self._graph.bind("full", _FLAGS[boundaries > 1])

    def commit(self, pending: int, count: int) -> None:
        """Append the first `count` new rows to the `pending` ones; past a boundary, take the state there instead.

        Only a call that reaches no more than one boundary can be committed in part.
        """
        added, boundaries = count, (pending + count) // CHUNK
        if 1 < self._boundaries[0] != boundaries:
            raise ValueError(f"{count} rows of a call past several chunk boundaries cannot be committed alone")
        if boundaries > 0:
            reached = 2 if boundaries > 1 and self._has_window else 1
            self.states[0], self.states[reached] = self.states[reached], self.states[0]
            self._bind()
            added = pending + count - boundaries * CHUNK
            pending = 0
        for name, kept in self.kept.items():
            is_behind = name == "w" and boundaries > 0
            rows = self._rows("w_behind", 0, added) if is_behind else self._rows(name, count - added, count)
            kept[:, pending : pending + added] = rows
        new = min(count, self.recent.shape[1])
        self.recent[:, :-new] = self.recent[:, new:]
        self.recent[:, -new:] = self._rows("rows", count - new, count)

    def _rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        width = (self.recent if name == "rows" else self.kept[name.removesuffix("_behind")]).shape[2]
        return self._graph.layers_rows(name, (len(self.recent), width), start, stop)

    def carried(self, pending: int) -> Arrays:
        """Copies of the states and of the kept rows."""
        return [self.states[0].copy(), self.recent.copy(), *(kept[:, :pending].copy() for kept in self.kept.values())]

    def put(self, carried: Arrays) -> None:
        """Take back what `carried` copied."""
        self.states[0][...], self.recent[...] = carried[0], carried[1]
        for kept, rows in zip(self.kept.values(), carried[2:], strict=True):
            kept[:, : rows.shape[1]] = rows

    def reset(self) -> None:
        for array in (self.states[0], self.recent, *self.kept.values()):
            array[...] = 0
