"""`dflash show`: what a bundle holds, from its manifest alone.

Knows the manifest. Reads no graph and no weight, and does not check the files; loading does.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from dflash_graphs.manifest import Graph, Int4, Manifest, Port, Source, read_manifest
from dflash_graphs.specs import AttentionSpec, DrafterSpec, TargetSpec

from ..certificate import read_certificate
from ..recommended import read_recommended


@click.command("show")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def command(bundle: Path, as_json: bool) -> None:
    """List what is inside a bundle.

    Sources, figures of the models, graphs with their ports, and file sizes.
    """
    manifest = read_manifest(bundle)
    click.echo(manifest.encode() if as_json else "\n".join(_describe(bundle, manifest)))


def _describe(bundle: Path, manifest: Manifest) -> Iterator[str]:
    yield f"bundle   {bundle} (format {manifest.format_version}, {manifest.backend})"
    yield f"target   {_source(manifest.target_source)}"
    yield from (f"         {line}" for line in _target(manifest.target))
    if manifest.drafter is not None:
        yield f"drafter  {_source(manifest.drafter_source)}"
        yield from (f"         {line}" for line in _drafter(manifest.drafter))
    yield f"written  with {', '.join(f'{name} {version}' for name, version in manifest.versions.items())}"
    if manifest.int4 is not None:
        yield f"int4     {_int4(manifest.int4)}"
    if (certificate := read_certificate(bundle)) is not None:
        yield f"verified {certificate.summary(manifest)}"
    if (tuned := read_recommended(bundle)) is not None:
        yield f"tuned    {tuned.summary(manifest)}"
    for name, graph in manifest.graphs.items():
        yield f"\ngraph {name}, {graph.weight_format} weights"
        yield from (f"  {count:>13,} values {layout}" for layout, count in graph.weights.items())
        yield from _ports(graph)
    yield f"\nembeddings {manifest.embedding_dtype} [{manifest.target.vocab_size}, {manifest.target.hidden_size}]\n"
    yield from (f"{file.size:>16,}  {name}" for name, file in manifest.files.items())
    yield f"{sum(file.size for file in manifest.files.values()):>16,}  bytes in all"


def _source(source: Source | None) -> str:
    if source is None:
        return "unknown source"
    return source.name if source.revision is None else f"{source.name} at {source.revision}"


def _int4(options: Int4) -> str:
    methods = [name for name, on in (("AWQ", options.awq), ("scale estimation", options.scale_estimation)) if on]
    fitted = f", {' and '.join(methods)} with {options.dataset}" if methods else ""
    scheme = "symmetric" if options.symmetric else "asymmetric"
    return f"{scheme}, groups of at most {options.group_size}, ratio {options.ratio:g}{fitted}"


def _target(spec: TargetSpec) -> Iterator[str]:
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(spec.layers).items())
    yield f"{spec.family}, {len(spec.layers)} layers ({kinds}), hidden {spec.hidden_size}, mlp {spec.intermediate_size}"
    yield _attention(spec.attention)
    if spec.delta is not None:
        delta = spec.delta
        yield (
            f"delta: {delta.value_heads} value heads of {delta.value_dim}, {delta.key_heads} key heads of "
            f"{delta.key_dim}, convolution over {delta.kernel} tokens"
        )
    head = "tied to the embeddings" if spec.tied_head else "of its own"
    yield f"vocabulary {spec.vocab_size}, head {head}, at most {spec.max_positions} positions"


def _drafter(spec: DrafterSpec) -> Iterator[str]:
    yield f"{spec.kind}, {len(spec.layers)} layers, hidden {spec.hidden_size}, mlp {spec.intermediate_size}"
    yield _attention(spec.attention)
    windows = ", ".join(str(layer.window) if layer.window else "full" for layer in spec.layers)
    yield f"windows {windows}; causal layers {sum(layer.causal for layer in spec.layers)}"
    taps = ", ".join(map(str, spec.taps))
    yield f"block size {spec.block_size}, mask token {spec.mask_token_id}, fed by target layers {taps}"


def _attention(spec: AttentionSpec) -> str:
    return f"attention: {spec.heads} heads of {spec.head_dim}, {spec.kv_heads} key/value heads"


def _ports(graph: Graph) -> Iterator[str]:
    for direction, ports in (("in ", graph.inputs), ("out", graph.outputs)):
        for name, count, port in _alike(ports):
            shape = ", ".join(map(str, port.shape))
            yield f"  {direction} {name:<16} {port.dtype:<4} [{shape}]" + (f" in {count} layers" if count > 1 else "")


def _alike(ports: Iterable[Port]) -> Iterator[tuple[str, int, Port]]:
    """Merge the ports that differ in the layer number alone (`key.3`, `key.7`)."""
    merged: dict[tuple[str, str, tuple[int | str, ...]], list[Port]] = {}
    for port in ports:
        merged.setdefault((port.name.partition(".")[0], port.dtype, port.shape), []).append(port)
    for (stem, _, _), same in merged.items():
        yield (same[0].name if len(same) == 1 else f"{stem}.*"), len(same), same[0]
