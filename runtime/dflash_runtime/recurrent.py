"""What a recurrent layer carries from call to call: the state at the last chunk boundary and the rows since.

Knows the ports of `dflash_graphs.delta`. Does not know which library runs the graph.
"""

from collections.abc import Iterator

import numpy as np
from dflash_graphs.specs import CHUNK, DeltaSpec
from numpy.typing import NDArray

from .backends import Graph


class RecurrentLayer:
    """One layer; `pending` below is the number of rows kept since the boundary."""

    def __init__(self, graph: Graph, index: int, spec: DeltaSpec) -> None:
        self._graph, self._index = graph, index
        self._before = spec.kernel - 1
        shape = (spec.value_heads, spec.key_dim, spec.value_dim)
        self.states = [np.zeros(shape, np.float32) for _ in range(2)]  # current, next
        widths = {"rows": spec.conv_width, "gates": 2 * spec.value_heads}
        self.past = {name: np.zeros((spec.history, width), np.float32) for name, width in widths.items()}
        for name, array in self.past.items():
            graph.bind(f"past_{name}.{index}", array)
        self._bind()

    def _bind(self) -> None:
        self._graph.bind(f"state.{self._index}", self.states[0])
        self._graph.bind_output(f"next_state.{self._index}", self.states[1])

    def commit(self, pending: int, count: int) -> None:
        """Append the first `count` new rows to the `pending` ones; past a boundary, swap states and drop the chunk."""
        dropped = CHUNK if pending + count >= CHUNK else 0
        kept = max(0, self._before + pending - dropped)
        added = self._before + pending + count - dropped - kept
        if dropped:
            self.states.reverse()
            self._bind()
        for name, past in self.past.items():
            if dropped:
                past[:kept] = past[dropped : dropped + kept]
            past[kept : kept + added] = self._graph.output(f"{name}.{self._index}")[count - added : count]

    def carried(self, pending: int) -> list[NDArray[np.float32]]:
        """Copies of the state and of the kept rows."""
        return [self.states[0].copy(), *(past[: self._before + pending].copy() for past in self.past.values())]

    def put(self, arrays: Iterator[NDArray[np.float32]]) -> None:
        """Take back what `carried` copied."""
        self.states[0][...] = next(arrays)
        for past in self.past.values():
            kept = next(arrays)
            past[: len(kept)] = kept

    def reset(self) -> None:
        for array in (self.states[0], *self.past.values()):
            array[...] = 0
