"""Target, drafter and head on OpenVINO's CPU plugin.

One compiled graph serves every row count: the files are static, the token axis is opened here before compiling, so
prefill and verify share one packed copy of the weights. Caches are NumPy arrays bound once as tensors; a commit moves
counters and at most one pointer per recurrent layer.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from dflash_graphs.errors import RequestError
from dflash_graphs.specs import CHUNK, AttentionSpec, DeltaSpec
from numpy.typing import NDArray

from .bundle import Bundle, Embeddings
from .memory import release_mapped
from .paged import BLOCK, PagedLayer, use_paged_attention
from .protocols import FloatRows, Logits, Properties, Rows, Snapshot, Tokens

_PREFILL_ROWS = 256
_KV_TYPES = {"f32": (np.float32, ov.Type.f32), "f16": (np.float16, ov.Type.f16), "bf16": (np.uint16, ov.Type.bf16)}


class CompiledGraph:
    """A compiled graph with one request; ports by name."""

    def __init__(self, core: ov.Core, model: ov.Model, properties: Properties) -> None:
        self.compiled = core.compile_model(model, "CPU", properties)
        self._request = self.compiled.create_infer_request()
        self._outputs = {port.get_any_name(): port for port in self.compiled.outputs}

    def bind(self, name: str, tensor: ov.Tensor) -> None:
        self._request.set_tensor(name, tensor)

    def bind_output(self, name: str, tensor: ov.Tensor) -> None:
        self._request.set_tensor(self._outputs[name], tensor)

    def run(self) -> None:
        self._request.infer()

    def output(self, name: str) -> NDArray[Any]:
        """A view of the output, valid until the next run."""
        view: NDArray[Any] = self._request.get_tensor(self._outputs[name]).data
        return view


class _Rows:
    """A preallocated input of up to `capacity` rows; the tensor over its first n rows is made once per n."""

    def __init__(self, capacity: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.array = np.zeros((capacity, *shape), dtype)
        self._tensors: dict[int, ov.Tensor] = {}

    def tensor(self, rows: int) -> ov.Tensor:
        if rows not in self._tensors:
            self._tensors[rows] = ov.Tensor(self.array[:rows], shared_memory=True)
        return self._tensors[rows]


class _PagedCache:
    """Key and value blocks of every attention layer and the control inputs that say where a call stands."""

    def __init__(
        self, graph: CompiledGraph, layers: Sequence[int], spec: AttentionSpec, capacity: int, kv: str
    ) -> None:
        dtype, kind = _KV_TYPES[kv]
        blocks = -(-capacity // BLOCK)
        shape = (blocks, spec.kv_heads, BLOCK, spec.head_dim)
        self.blocks: dict[str, NDArray[Any]] = {}
        for name in (f"{part}_cache.{i}" for i in layers for part in ("key", "value")):
            self.blocks[name] = np.zeros(shape, dtype)
            graph.bind(name, ov.Tensor(self.blocks[name], ov.Shape(list(shape)), kind))
        self._past, self._begins = np.zeros(1, np.int32), np.zeros(2, np.int32)
        self._total = np.zeros((), np.int32)
        controls = {
            "past_lens": self._past,
            "subsequence_begins": self._begins,
            "block_indices": np.arange(blocks, dtype=np.int32),
            "block_indices_begins": np.array([0, blocks], np.int32),
            "max_context_len": self._total,
        }
        self._keep = controls
        for name, array in controls.items():
            graph.bind(name, ov.Tensor(array, shared_memory=True))

    def place(self, past: int, rows: int) -> None:
        self._past[0], self._begins[1], self._total[...] = past, rows, past + rows

    def write(self, name: str, start: int, rows: NDArray[Any]) -> None:
        """Store rows [T, kv_heads, head_dim] at positions start, start + 1, … of the cache `name`."""
        cache, done = self.blocks[name], 0
        while done < len(rows):
            block, offset = divmod(start + done, BLOCK)
            take = min(BLOCK - offset, len(rows) - done)
            cache[block, :, offset : offset + take] = rows[done : done + take].transpose(1, 0, 2)
            done += take


class _RecurrentLayer:
    """State at the last chunk boundary and the rows since; see `dflash_graphs.delta`."""

    def __init__(self, graph: CompiledGraph, index: int, spec: DeltaSpec) -> None:
        self._graph, self._index = graph, index
        self._before = spec.kernel - 1
        shape = (spec.value_heads, spec.key_dim, spec.value_dim)
        self.states = [np.zeros(shape, np.float32) for _ in range(2)]  # current, next
        self._tensors = [ov.Tensor(state, shared_memory=True) for state in self.states]
        widths = {"rows": spec.conv_width, "gates": 2 * spec.value_heads}
        self.past = {name: np.zeros((spec.history, width), np.float32) for name, width in widths.items()}
        for name, array in self.past.items():
            graph.bind(f"past_{name}.{index}", ov.Tensor(array, shared_memory=True))
        self._bind()

    def _bind(self) -> None:
        self._graph.bind(f"state.{self._index}", self._tensors[0])
        self._graph.bind_output(f"next_state.{self._index}", self._tensors[1])

    def commit(self, pending: int, count: int) -> None:
        """Append the first `count` new rows to the `pending` ones; past a boundary, swap states and drop the chunk."""
        dropped = CHUNK if pending + count >= CHUNK else 0
        kept = max(0, self._before + pending - dropped)
        added = self._before + pending + count - dropped - kept
        if dropped:
            self.states.reverse()
            self._tensors.reverse()
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


class OpenVinoTarget:
    """Implements `protocols.Target`."""

    def __init__(
        self, core: ov.Core, bundle: Bundle, embeddings: Embeddings, properties: Properties, kv: str, capacity: int
    ) -> None:
        spec = bundle.manifest.target
        # a call may cross one chunk boundary; without recurrent layers nothing limits the prefill
        self.max_rows = CHUNK if spec.delta is not None else _PREFILL_ROWS
        model = _open_tokens(
            core, bundle.graph("target"), spec.attention, [PagedLayer(i) for i in spec.attention_layers]
        )
        self._graph = CompiledGraph(core, model, properties)
        self._embeddings, self._capacity, self.length = embeddings, capacity, 0
        self._inputs = _Rows(self.max_rows, (spec.hidden_size,), np.float32)
        self._positions = _Rows(self.max_rows, (), np.int32)
        self._cache = _PagedCache(self._graph, spec.attention_layers, spec.attention, capacity + self.max_rows, kv)
        self._pending = np.zeros(1, np.int32)
        self._layers: list[_RecurrentLayer] = []
        if spec.delta is not None:
            self._graph.bind("pending_rows", ov.Tensor(self._pending, shared_memory=True))
            self._layers = [_RecurrentLayer(self._graph, i, spec.delta) for i in spec.delta_layers]
        self._has_features = bundle.manifest.drafter is not None
        self.verify([0] * 2)  # the plugin packs weights at the first call; now, not in the first request
        release_mapped(bundle.folder)

    def verify(self, tokens: Sequence[int]) -> Rows:
        rows = len(tokens)
        if self.length + rows > self._capacity + self.max_rows:
            raise RequestError(f"the context of {self._capacity} tokens is full; load with a larger max_context")
        self._embeddings.lookup(np.asarray(tokens, np.int32), self._inputs.array[:rows])
        self._positions.array[:rows] = np.arange(self.length, self.length + rows)
        self._graph.bind("embeddings", self._inputs.tensor(rows))
        self._graph.bind("position_ids", self._positions.tensor(rows))
        self._cache.place(self.length, rows)
        self._graph.run()
        hidden = self._graph.output("hidden")
        return Rows(hidden, self._graph.output("features") if self._has_features else hidden[:, :0])

    def commit(self, count: int) -> None:
        pending = int(self._pending[0])
        for layer in self._layers:
            layer.commit(pending, count)
        self.length += count
        self._pending[0] = self.length % CHUNK

    def reset(self) -> None:
        self.length, self._pending[0] = 0, 0
        for layer in self._layers:
            layer.reset()

    def snapshot(self) -> Snapshot:
        """Copy what the recurrent layers carry; keys and values stay where they are."""
        pending = int(self._pending[0])
        return Snapshot(self.length, tuple(copy for layer in self._layers for copy in layer.carried(pending)))

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of a prefix of what is committed."""
        self.length = snapshot.length
        self._pending[0] = self.length % CHUNK
        arrays = iter(snapshot.arrays)
        for layer in self._layers:
            layer.put(arrays)

    def rewind(self, length: int) -> bool:
        """Go back to the first `length` tokens, if no recurrent state stands in the way."""
        if self._layers and length != self.length:
            return False
        self.length = length
        return True


class OpenVinoHead:
    """Implements `protocols.Head`."""

    def __init__(self, core: ov.Core, bundle: Bundle, properties: Properties) -> None:
        self._graph = CompiledGraph(core, _open_tokens(core, bundle.graph("head")), properties)
        self(np.zeros((2, bundle.manifest.target.hidden_size), np.float32))
        release_mapped(bundle.folder)

    def __call__(self, hidden: FloatRows) -> Logits:
        self._graph.bind("hidden", ov.Tensor(hidden, shared_memory=True))
        self._graph.run()
        logits = self._graph.output("logits")
        # NumPy's argmax takes 0.2 ms for 16 rows of 248,320; the plugin's TopK took 20
        return Logits(logits, logits.argmax(axis=1).astype(np.int32))


class OpenVinoDraftHead:
    """The head's rows for the ids below `vocabulary`, with the drafter's confidence."""

    def __init__(self, core: ov.Core, bundle: Bundle, properties: Properties) -> None:
        self._graph = CompiledGraph(core, _open_tokens(core, bundle.graph("draft_head")), properties)
        self.vocabulary = self._graph.compiled.output("logits").partial_shape[1].get_length()
        self(np.zeros((2, bundle.manifest.target.hidden_size), np.float32))
        release_mapped(bundle.folder)

    def __call__(self, hidden: FloatRows) -> tuple[Tokens, FloatRows]:
        """Return the likeliest token of each row and its probability, both [T]."""
        self._graph.bind("hidden", ov.Tensor(hidden, shared_memory=True))
        self._graph.run()
        tokens: Tokens = self._graph.output("logits").argmax(axis=1)
        probabilities: FloatRows = self._graph.output("probability")
        return tokens, probabilities


class OpenVinoDrafter:
    """The drafter with its context cache: features in, hidden rows of a drafted block out."""

    def __init__(
        self, core: ov.Core, bundle: Bundle, embeddings: Embeddings, properties: Properties, kv: str, capacity: int
    ) -> None:
        spec = bundle.manifest.drafter
        assert spec is not None
        self.spec, self.length = spec, 0
        self._embeddings, self._attention = embeddings, spec.attention
        layers = [PagedLayer(i, layer.window or 0, not layer.causal) for i, layer in enumerate(spec.layers)]
        model = _open_tokens(core, bundle.graph("drafter"), spec.attention, layers)
        self._graph = CompiledGraph(core, model, properties)
        context = _open_tokens(core, bundle.graph("drafter_context"))
        self._context = CompiledGraph(core, _cast_outputs(context, _KV_TYPES[kv][1]), properties)
        self._cache = _PagedCache(self._graph, range(len(layers)), spec.attention, capacity + spec.block_size, kv)
        self._inputs = _Rows(spec.block_size, (spec.hidden_size,), np.float32)
        self._positions = _Rows(spec.block_size, (), np.int32)
        self._types = _Rows(spec.block_size, (), np.int32) if any(not x.causal for x in spec.layers) else None
        if self._types is not None:
            self._types.array[...] = 1  # one group: rows of the block see each other
        self.extend(np.zeros((2, spec.feature_width), np.float32))
        self.block(0, 2)
        self.rewind(0)
        release_mapped(bundle.folder)

    def extend(self, features: FloatRows) -> None:
        """Add the context rows of newly committed positions; features [T, taps * hidden]."""
        rows = len(features)
        positions = np.arange(self.length, self.length + rows, dtype=np.int32)
        self._context.bind("features", ov.Tensor(features, shared_memory=True))
        self._context.bind("position_ids", ov.Tensor(positions, shared_memory=True))
        self._context.run()
        heads = (rows, self._attention.kv_heads, self._attention.head_dim)
        for part in ("key", "value"):
            for i in range(len(self.spec.layers)):
                new = self._context.output(f"{part}.{i}").reshape(heads)
                self._cache.write(
                    f"{part}_cache.{i}", self.length, new.view(self._cache.blocks[f"{part}_cache.{i}"].dtype)
                )
        self.length += rows

    def block(self, anchor: int, rows: int) -> FloatRows:
        """Run the block [anchor, mask, …] of `rows` rows; hidden rows [rows, hidden], the anchor's own first."""
        tokens: Tokens = np.full(rows, self.spec.mask_token_id, np.int32)
        tokens[0] = anchor
        self._embeddings.lookup(tokens, self._inputs.array[:rows])
        self._positions.array[:rows] = np.arange(self.length, self.length + rows)
        self._graph.bind("embeddings", self._inputs.tensor(rows))
        self._graph.bind("position_ids", self._positions.tensor(rows))
        if self._types is not None:
            self._graph.bind("token_type_ids", self._types.tensor(rows))
        self._cache.place(self.length, rows)
        self._graph.run()
        hidden: FloatRows = self._graph.output("hidden")
        return hidden

    def rewind(self, length: int) -> None:
        """Keep the context of the first `length` positions."""
        self.length = min(length, self.length)


def _open_tokens(
    core: ov.Core, path: Path, spec: AttentionSpec | None = None, layers: Sequence[PagedLayer] = ()
) -> ov.Model:
    """Read a graph, give it paged attention, and open its token axis."""
    model = core.read_model(path)
    if spec is not None:
        use_paged_attention(model, spec, layers)
    open_ports = ("embeddings", "position_ids", "hidden", "features")
    ports = [port for port in model.inputs if port.get_any_name() in open_ports]
    model.reshape({p: ov.PartialShape([-1, *(d.get_length() for d in list(p.partial_shape)[1:])]) for p in ports})
    return model


def _cast_outputs(model: ov.Model, kind: ov.Type) -> ov.Model:
    """Let a graph write its outputs in the cache precision."""
    steps = ov.preprocess.PrePostProcessor(model)
    for i in range(len(model.outputs)):
        steps.output(i).tensor().set_element_type(kind)
    return steps.build()
