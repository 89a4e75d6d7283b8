"""What an export is said to need, against what it does, and the way from two ids to a bundle."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from dflash_exporter import ExportRequest, export
from dflash_exporter import estimate as module
from dflash_exporter.estimate import Estimate, estimate
from dflash_exporter.hub import HubOptions, resolve
from dflash_exporter.models import drafter_for
from dflash_graphs.errors import CheckpointError, ExportError, UnsupportedError
from dflash_graphs.manifest import Int4, read_manifest
from dflash_graphs.memory import available_memory, cache_bytes

from tests.exporter.hub_stand_in import COMMIT, StandIn, serving

TARGET, DRAFTER = "Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash"  # the small pair under the names of a large one


@pytest.fixture
def hub(pair_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    folders = {TARGET: pair_folder / "target", DRAFTER: pair_folder / "drafter"}
    stand_in = StandIn({name: {f.name: f.read_bytes() for f in folder.iterdir()} for name, folder in folders.items()})
    with serving(stand_in) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield stand_in


@pytest.fixture
def local(pair_folder: Path, tmp_path: Path) -> Estimate:
    request = ExportRequest(pair_folder / "target", tmp_path / "out", pair_folder / "drafter", weight_format="bf16")
    return estimate(request, HubOptions(cache_dir=tmp_path / "cache"))


@pytest.mark.parametrize("weight_format", ["f32", "bf16", "int8", "int4"])
def test_the_size_of_the_bundle(local: Estimate, small_bundle: Callable[[str], Path], weight_format: str) -> None:
    files = [path for path in small_bundle(weight_format).rglob("*.bin") if path.is_file()]
    written = sum(
        path.stat().st_size for path in files
    )  # vectors and masks, left out, weigh more here than in any other
    assert written - 400_000 < local.bundles[weight_format] <= written


def test_an_estimate_of_folders(local: Estimate, pair_folder: Path) -> None:
    assert local.download == 0
    assert local.target.size >= (pair_folder / "target" / "model.safetensors").stat().st_size
    assert local.bundle == local.bundles["bf16"] > local.bundles["int8"] > local.bundles["int4"]
    assert local.loaded > 4096 * 1000
    text = "\n".join(local.lines())
    assert "target: 0.0" in text and "to download" in text and "bf16 0.02 GB" in text and "4096 tokens" in text
    assert estimate(replace(local.request, drafter=None)).bundle < local.bundle


def test_a_data_set_takes_memory_and_disk(local: Estimate) -> None:
    options = Int4(awq=True, dataset="texts.txt")
    planned = estimate(replace(local.request, weight_format="int4", int4=options))
    plain = estimate(replace(local.request, weight_format="int4"))
    assert plain.copy == plain.calibration == 0 and planned.bundles == plain.bundles
    assert 0 < planned.copy < plain.bundles["int8"]
    assert planned.memory >= planned.calibration > planned.copy
    assert "more for a while" in "\n".join(planned.lines())
    with pytest.raises(ExportError, match="need a data set"):
        estimate(replace(local.request, weight_format="int4", int4=Int4(awq=True)))


@pytest.mark.parametrize(
    "options", [Int4(symmetric=False), Int4(group_size=32), Int4(ratio=0.5), Int4(symmetric=False, group_size=64)]
)
def test_the_size_of_an_int4_bundle(local: Estimate, tmp_path: Path, options: Int4) -> None:
    request = replace(local.request, weight_format="int4", int4=options, output=tmp_path / "bundle")
    written = sum(path.stat().st_size for path in export(request).rglob("*.bin"))
    assert abs(estimate(request).bundle - written) < 500_000


def test_ids_to_bundle(hub: StandIn, tmp_path: Path) -> None:
    options = HubOptions(cache_dir=tmp_path / "cache")
    request = ExportRequest(TARGET, tmp_path / "out", drafter_for(TARGET).drafter)
    planned = estimate(request, options)
    assert set(hub.downloads()) == {"config.json"}
    assert 0 < planned.download == planned.target.missing + planned.drafter.missing  # type: ignore[union-attr]
    planned.check()

    target, drafter = resolve(TARGET, options), resolve(DRAFTER, options)
    bundle = export(replace(request, target=target.path, drafter=drafter.path))
    manifest = read_manifest(bundle)
    assert manifest.target_source == target.source and manifest.drafter_source == drafter.source
    assert (target.source.name, target.source.revision) == (TARGET, COMMIT)
    assert estimate(request, options).download == 0


def test_a_revision_is_the_targets(hub: StandIn, tmp_path: Path) -> None:
    request = ExportRequest(TARGET, tmp_path / "out", DRAFTER)
    with pytest.raises(CheckpointError, match=f"{TARGET} has no revision 'v9'"):
        estimate(request, HubOptions(cache_dir=tmp_path, revision="v9"))
    with pytest.raises(CheckpointError, match=f"{DRAFTER} has no revision 'v9'"):
        estimate(replace(request, drafter=f"{DRAFTER}@v9"), HubOptions(cache_dir=tmp_path, revision=COMMIT))


def test_what_cannot_be_exported_is_refused_before_the_download(hub: StandIn, tmp_path: Path) -> None:
    hub.repositories[TARGET]["config.json"] = b'{"architectures": ["Qwen3_5MoeForConditionalGeneration"]}'
    with pytest.raises(UnsupportedError, match=r"Qwen/Qwen3\.5-9B/config\.json.*mixture of experts"):
        estimate(ExportRequest(TARGET, tmp_path / "out"), HubOptions(cache_dir=tmp_path))
    assert set(hub.downloads()) == {"config.json"}


def test_too_little_space_or_memory(local: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    local.check()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ExportError, match=r"Not enough space for download and bundle.*0\.02 GB are needed, 0\.00 GB"):
        local.check()
    monkeypatch.setattr(module, "_device", {local.cache: 1, local.request.output: 2}.get)
    with pytest.raises(ExportError, match=r"Not enough space for the bundle at .*out"):
        local.check()
    monkeypatch.undo()
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    with pytest.raises(ExportError, match=r"needs 0\.52 GB of memory"):
        local.check()


def test_memory_of_caches(small_bundle: Callable[[str], Path]) -> None:
    manifest = read_manifest(small_bundle("f32"))
    spec, drafter = manifest.target, manifest.drafter
    assert drafter is not None
    short, long = (cache_bytes(spec, None, context, "f32") for context in (100, 101))
    assert long - short == 2 * len(spec.attention_layers) * spec.attention.kv_width * 4
    halved = cache_bytes(spec, drafter, 101, "bf16") - cache_bytes(spec, drafter, 100, "bf16")
    assert halved * 2 == long - short + 2 * len(drafter.layers) * drafter.attention.kv_width * 4
    assert (available_memory() or 0) > 1 << 20
