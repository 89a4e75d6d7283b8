"""What the recurrent layers carry from call to call: a state and the rows since.

Knows the ports of `dflash_graphs.recurrence` and `sequential_delta`. Does not know which library runs the graph.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence

import numpy as np
from dflash_graphs.specs import CHUNK, WINDOW, DeltaSpec
from numpy.typing import NDArray

from .backends import Graph

Arrays = Sequence[NDArray[np.float32]]
_FLAGS = [np.ones(n, np.float32) for n in (0, 1)]


class RecurrentLayers(ABC):
    """All recurrent layers of a target."""

    most_rows: int  # of a call where nothing is taken

    def __init__(
        self, graph: Graph, layers: int, spec: DeltaSpec, states: int, kept: dict[str, tuple[int, int]]
    ) -> None:
        """`kept` are the sizes, rows and width, of what is kept by port."""
        self._graph = graph
        self.pending = np.zeros(1, np.int32)  # rows kept since the state
        shape = (layers, 1, spec.value_heads, spec.key_dim, spec.value_dim)
        self.states = [np.zeros(shape, np.float32) for _ in range(states)]  # the current one first
        self.recent = np.zeros((layers, spec.kernel - 1, spec.conv_width), np.float32)  # what the convolution reaches
        self.kept = {name: np.zeros((layers, *sizes), np.float32) for name, sizes in kept.items()}
        for name, array in (("rows", self.recent), *self.kept.items()):
            graph.bind_layers(f"past_{name}", array)
        graph.bind("pending_rows", self.pending)
        self._bind_states()

    @property
    @abstractmethod
    def taken(self) -> int:
        """By how many rows the next call has to be shorter than `most_rows`."""

    @abstractmethod
    def _bind_states(self) -> None: ...

    def place(self, rows: int) -> None:
        """Say how many rows the next call has."""
        if rows > self.most_rows - self.taken:
            raise ValueError(f"a call takes {self.most_rows - self.taken} rows here at most, not {rows}")

    def has_run(self) -> None:  # noqa: B027
        """Take note that the call placed last has run."""

    @abstractmethod
    def commit(self, count: int) -> None:
        """Keep the first `count` rows of the last call."""

    def _reach(self, count: int) -> None:
        """Keep for the convolution what it reaches of the first `count` rows of the last call."""
        new = min(count, self.recent.shape[1])
        self.recent[:, :-new] = self.recent[:, new:]
        self.recent[:, -new:] = self._rows("rows", self.recent, count - new, count)

    def _rows(self, name: str, like: NDArray[np.float32], start: int, stop: int) -> NDArray[np.float32]:
        return self._graph.layers_rows(name, (len(like), like.shape[2]), start, stop)

    def carried(self) -> Arrays:
        """Copies of the state and of the kept rows."""
        pending = int(self.pending[0])
        return [self.states[0].copy(), self.recent.copy(), *(kept[:, :pending].copy() for kept in self.kept.values())]

    def put(self, carried: Arrays) -> None:
        """Take back what `carried` copied."""
        self.states[0][...], self.recent[...] = carried[0], carried[1]
        self.pending[0] = pending = carried[2].shape[1]
        for kept, rows in zip(self.kept.values(), carried[2:], strict=True):
            kept[:, :pending] = rows

    def reset(self) -> None:
        self.pending[0] = 0
        for array in (self.states[0], self.recent, *self.kept.values()):
            array[...] = 0


@functools.cache  # the same arrays each time: what is bound is seen at once
def _listed(pending: int, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Which of a call's rows stand before and behind the window's boundary; of the latter one at least, if reached."""
    border, all_rows = CHUNK - pending, np.arange(rows, dtype=np.int32)
    return all_rows[:border], all_rows[min(border, rows - 1) :] if rows >= border else all_rows[:0]


class WindowLayers(RecurrentLayers):
    """In aligned chunks: states stand at chunk boundaries (now, the next one, the one after that)."""

    most_rows = WINDOW

    def __init__(self, graph: Graph, layers: int, spec: DeltaSpec) -> None:
        widths = spec.kept_widths(has_window=True)
        super().__init__(graph, layers, spec, 3, {name: (CHUNK - 1, width) for name, width in widths.items()})
        self._is_full = False  # whether the last call filled the window
        self.place(0)

    @property
    def taken(self) -> int:
        return int(self.pending[0])

    def _bind_states(self) -> None:
        self._graph.bind_layers("state", self.states[0])
        self._graph.bind_layers_output("next_state", self.states[1])
        self._graph.bind_output("full_state", self.states[2][:, 0])

    def place(self, rows: int) -> None:
        """As above; rows that do not reach a chunk's end spare the work behind it."""
        super().place(rows)
        before, behind = _listed(self.taken, rows)
        self._is_full = self.taken + rows == WINDOW
        self._graph.bind("rows_before", before)
        self._graph.bind("rows_behind", behind)
        self._graph.bind("full", _FLAGS[self._is_full])

    def commit(self, count: int) -> None:
        """Append the rows to the pending ones; past a boundary, take the state there instead."""
        pending, added = self.taken, count
        boundaries = (pending + count) // CHUNK
        if self._is_full and boundaries < 2:
            raise ValueError(f"{count} rows of a call that fills the window cannot be committed alone")
        if boundaries > 0:
            self.states[0], self.states[boundaries] = self.states[boundaries], self.states[0]
            self._bind_states()
            added = pending + count - boundaries * CHUNK
            pending = 0
        for name, kept in self.kept.items():
            is_behind = name == "w" and boundaries > 0
            first = 0 if is_behind else count - added
            new = self._rows("w_behind" if is_behind else name, kept, first, first + added)
            kept[:, pending : pending + added] = new
        self.pending[0] = pending + added
        self._reach(count)


class SpanLayers(RecurrentLayers):
    """By a kernel that goes token by token: a call takes the kept rows into the state before it runs its own."""

    most_rows = 4 * CHUNK
    taken = 0

    def __init__(self, graph: Graph, layers: int, spec: DeltaSpec) -> None:
        widths = spec.kept_widths(has_window=False)
        super().__init__(graph, layers, spec, 2, {name: (CHUNK, width) for name, width in widths.items()})
        self._placed = 0
        # final states that nobody reads go to one place, which stays in the processor's caches
        self._nowhere = np.broadcast_to(np.zeros_like(self.states[0][0]), self.states[0].shape)
        self._final: NDArray[np.float32] | None = None  # where the last call's went

    def _bind_states(self) -> None:
        self._graph.bind_layers("state", self.states[0])
        self._graph.bind_layers_output("next_state", self.states[0])

    def place(self, rows: int) -> None:
        super().place(rows)
        self._placed = rows
        final = self.states[1] if rows > CHUNK else self._nowhere
        if final is not self._final:
            self._graph.bind_layers_output("final_state", final)
        self._final = final

    def has_run(self) -> None:
        self.pending[0] = 0

    def commit(self, count: int) -> None:
        """Keep the rows for the next call; of a longer call than that takes, which is committed whole, the state."""
        if count <= CHUNK:
            for name, kept in self.kept.items():
                kept[:, :count] = self._rows(name, kept, 0, count)
            self.pending[0] = count
        elif count == self._placed:
            self.states.reverse()
            self._bind_states()
        else:
            raise ValueError(f"{count} of {self._placed} rows cannot be committed alone")
        self._reach(count)


def recurrent_form(ports: Container[str]) -> type[WindowLayers | SpanLayers]:
    """Return the form that the inputs `ports` of a target are for."""
    return WindowLayers if "rows_behind" in ports else SpanLayers
