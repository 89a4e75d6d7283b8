"""Target, head and drafter: what to put into the graphs of a bundle and what to make of their outputs.

Knows positions, caches and commits. Does not know which library runs the graphs (`backends`). A commit moves counters
and at most one pointer per recurrent layer.
"""

import functools
from collections.abc import Sequence

import numpy as np
from dflash_graphs.errors import RequestError
from dflash_graphs.specs import CHUNK, WINDOW

from .backends import Backend, Graph
from .bundle import Bundle, Embeddings
from .device import Settings
from .protocols import FloatRows, Logits, Rows, Snapshot, Tokens
from .recurrent import RecurrentLayers, recurrent_form

_PREFILL_ROWS = 256
CONTEXT_ROWS = 64  # of features, at most, that wait for the next draft


class _TokenInputs:
    """The ports `embeddings` and `position_ids` of a graph and the memory bound to them."""

    def __init__(self, graph: Graph, embeddings: Embeddings, most: int, hidden: int) -> None:
        self._graph, self._embeddings = graph, embeddings
        rows, positions = np.zeros((most, hidden), np.float32), np.zeros(most, np.int32)
        places = embeddings.place(rows)
        self._first = functools.cache(lambda count: (rows[:count], positions[:count], places[:count]))

    def place(self, tokens: Sequence[int], start: int) -> None:
        """The next call runs `tokens` at positions start, start + 1, …"""
        rows, positions, places = self._first(len(tokens))  # the same views each time: what is bound is seen at once
        self._embeddings.lookup(tokens, places)
        positions[:] = np.arange(start, start + len(tokens))
        self._graph.bind("embeddings", rows)
        self._graph.bind("position_ids", positions)


class CachedTarget:
    """Implements `protocols.Target`."""

    def __init__(
        self, backend: Backend, bundle: Bundle, embeddings: Embeddings, settings: Settings, capacity: int
    ) -> None:
        spec = bundle.manifest.target
        ports = {port.name for port in bundle.manifest.graphs["target"].inputs}
        self.prefill_rows = self.max_rows = _PREFILL_ROWS
        form = recurrent_form(ports)
        if spec.delta is not None:  # fewer rows may be committed in part than the widest call has
            self.prefill_rows, self.max_rows = form.most_rows, CHUNK
        self._graph, self._cache = backend.attention_graph(bundle, "target", settings, capacity + self.prefill_rows)
        self._inputs = _TokenInputs(self._graph, embeddings, self.prefill_rows, spec.hidden_size)
        self._capacity, self.length = capacity, 0
        self._recurrent: RecurrentLayers | None = None
        if spec.delta is not None:
            self._recurrent = form(self._graph, len(spec.delta_layers), spec.delta)
        self._has_features = bundle.manifest.drafter is not None
        # weights are packed at the first call, if not before; buffers that grow with each wider one would leave holes
        self.verify([0] * WINDOW)

    def prefill_piece(self, left: int) -> int:
        if self._recurrent is None:
            return min(left, self.prefill_rows)
        taken = self._recurrent.taken
        if taken + left < WINDOW:
            return left
        return min(left - CHUNK, self.prefill_rows - taken)  # with nothing taken any more

    def verify(self, tokens: Sequence[int]) -> Rows:
        rows = len(tokens)
        if self.length + rows > self._capacity + self.prefill_rows:
            raise RequestError(f"the context of {self._capacity} tokens is full; load with a larger max_context")
        self._inputs.place(tokens, self.length)
        self._cache.place(self.length, rows)
        if self._recurrent is not None:
            self._recurrent.place(rows)
        self._graph.run()
        if self._recurrent is not None:
            self._recurrent.has_run()
        hidden = self._graph.output("hidden")
        return Rows(hidden, self._graph.output("features") if self._has_features else hidden[:, :0])

    def commit(self, count: int) -> None:
        if self._recurrent is not None:
            self._recurrent.commit(count)
        self.length += count

    def reset(self) -> None:
        self.length = 0
        if self._recurrent is not None:
            self._recurrent.reset()

    def snapshot(self) -> Snapshot:
        """Copy what the recurrent layers carry; keys and values stay where they are."""
        carried = () if self._recurrent is None else self._recurrent.carried()
        return Snapshot(self.length, tuple(carried))

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of a prefix of what is committed."""
        self.length = snapshot.length
        if self._recurrent is not None:
            self._recurrent.put(snapshot.arrays)

    def rewind(self, length: int) -> bool:
        """Go back to the first `length` tokens, if no recurrent state stands in the way."""
        if self._recurrent is not None and length != self.length:
            return False
        self.length = length
        return True


class LanguageModelHead:
    """Implements `protocols.Head`; `draft` serves the drafter from the same weights."""

    def __init__(self, backend: Backend, bundle: Bundle, settings: Settings) -> None:
        self._target = backend.graph(bundle, "head", settings)
        outputs = {port.name: port.shape for port in bundle.manifest.graphs["head"].outputs}
        self._parts = [name for name in outputs if name.startswith("logits.")]
        self.draft_vocabulary = int(outputs["logits.0"][1])  # `draft` names the ids below
        width = bundle.manifest.target.hidden_size
        if bundle.manifest.drafter is not None:
            self._drafter = self._target.twin()
            self._drafter.bind("hidden", np.zeros((0, width), np.float32))
            self._target.bind("drafted", np.zeros((0, width), np.float32))
            self.draft(np.zeros((CHUNK, width), np.float32))
        self(np.zeros((CHUNK, width), np.float32))

    def __call__(self, hidden: FloatRows) -> Logits:
        self._target.bind("hidden", hidden)
        self._target.run()
        return Logits([self._target.output(name) for name in self._parts])

    def draft(self, hidden: FloatRows) -> tuple[Tokens, FloatRows]:
        """Return the likeliest token of each row and its probability, both [T]."""
        self._drafter.bind("drafted", hidden)
        self._drafter.run()
        tokens: Tokens = self._drafter.output("draft_logits").argmax(axis=1)  # the plugin's TopK takes far longer
        probabilities: FloatRows = self._drafter.output("probability")
        return tokens, probabilities


class Drafter:
    """The drafter with its context cache: features in, hidden rows of a drafted block out."""

    def __init__(
        self, backend: Backend, bundle: Bundle, embeddings: Embeddings, settings: Settings, capacity: int
    ) -> None:
        spec = bundle.manifest.drafter
        assert spec is not None
        self.spec, self.length = spec, 0
        self._graph, self._cache = backend.attention_graph(bundle, "drafter", settings, capacity + spec.block_size)
        self._context = backend.graph(bundle, "drafter_context", settings)
        self._inputs = _TokenInputs(self._graph, embeddings, spec.block_size, spec.hidden_size)
        self.extend(np.zeros((CONTEXT_ROWS, spec.feature_width), np.float32))
        self.block(0, spec.block_size)
        self.rewind(0)

    def extend(self, features: FloatRows) -> None:
        """Add the context rows of newly committed positions; features [T, taps * hidden]."""
        rows, attention = len(features), self.spec.attention
        self._context.bind("features", features)
        self._context.bind("position_ids", np.arange(self.length, self.length + rows, dtype=np.int32))
        self._context.run()
        for name in ("key", "value"):
            new = self._context.layers_rows(name, (len(self.spec.layers), attention.kv_width), 0, rows)
            self._cache.write(name, self.length, new.reshape(-1, rows, attention.kv_heads, attention.head_dim))
        self.length += rows

    def block(self, anchor: int, rows: int) -> FloatRows:
        """Run the block [anchor, mask, …] of `rows` rows; hidden rows [rows, hidden], the anchor's own first."""
        self._inputs.place([anchor] + (rows - 1) * [self.spec.mask_token_id], self.length)
        self._cache.place(self.length, rows)
        self._graph.run()
        hidden: FloatRows = self._graph.output("hidden")
        return hidden

    def rewind(self, length: int) -> None:
        """Keep the context of the first `length` positions."""
        self.length = min(length, self.length)
