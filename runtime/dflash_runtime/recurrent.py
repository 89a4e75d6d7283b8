"""What the recurrent layers carry from call to call: states at the last chunk boundary and the rows since.

Knows the ports of `dflash_graphs.delta`. Does not know which library runs the graph.
"""

from collections.abc import Sequence

import numpy as np
from dflash_graphs.specs import CHUNK, DeltaSpec
from numpy.typing import NDArray

from .backends import Graph

Arrays = Sequence[NDArray[np.float32]]


class RecurrentLayers:
    """All recurrent layers of a target; `pending` below is the number of rows kept since the boundary."""

    def __init__(self, graph: Graph, layers: int, spec: DeltaSpec) -> None:
        self._graph, self._before = graph, spec.kernel - 1
        shape = (layers, spec.value_heads, spec.key_dim, spec.value_dim)
        self.states = [np.zeros(shape, np.float32) for _ in range(2)]  # current, next
        widths = {"rows": spec.conv_width, "gates": 2 * spec.value_heads}
        self.past = {name: np.zeros((layers, spec.history, width), np.float32) for name, width in widths.items()}
        for name, array in self.past.items():
            graph.bind_layers(f"past_{name}", array)
        self._bind()

    def _bind(self) -> None:
        self._graph.bind_layers("state", self.states[0])
        self._graph.bind_layers_output("next_state", self.states[1])

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
                past[:, :kept] = past[:, dropped : dropped + kept]
            past[:, kept : kept + added] = self._graph.layers_output(name)[:, count - added : count]

    def carried(self, pending: int) -> Arrays:
        """Copies of the states and of the kept rows."""
        return [self.states[0].copy(), *(past[:, : self._before + pending].copy() for past in self.past.values())]

    def put(self, carried: Arrays) -> None:
        """Take back what `carried` copied."""
        self.states[0][...] = carried[0]
        for past, kept in zip(self.past.values(), carried[1:], strict=True):
            past[:, : kept.shape[1]] = kept

    def reset(self) -> None:
        for array in (self.states[0], *self.past.values()):
            array[...] = 0
