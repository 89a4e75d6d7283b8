"""Checkpoints by name, against a stand-in of the Hub."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from dflash_exporter import repository
from dflash_exporter.hub import HubOptions, inspect, resolve
from dflash_graphs.errors import CheckpointError, UnsupportedError

from tests.exporter.hub_stand_in import COMMIT, StandIn, serving

NAME = "someone/small-model"
WEIGHTS = bytes(range(256)) * 4000
FILES = {
    "config.json": b'{"architectures": ["Qwen3ForCausalLM"]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"not wanted",
    "onnx/model.safetensors": b"not wanted",
    "README.md": b"not wanted",
}
WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn({NAME: dict(FILES)})
    with serving(stand_in) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield stand_in


@pytest.fixture
def options(tmp_path: Path) -> HubOptions:
    return HubOptions(cache_dir=tmp_path / "cache")


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits a second before each of its attempts at a broken connection."""
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None, time=time.time))


def test_downloads_what_an_export_reads_and_nothing_else(hub: StandIn, options: HubOptions) -> None:
    found = resolve(NAME, options)
    assert (found.source.name, found.source.revision) == (NAME, COMMIT)
    assert {path.name: path.read_bytes() for path in found.path.iterdir()} == {name: FILES[name] for name in WANTED}
    assert found.path.parent.name == "snapshots" and found.path.name == COMMIT

    hub.requests.clear()
    assert resolve(f"{NAME}@{COMMIT}", options) == found
    assert not hub.downloads()


def test_folders_are_taken_as_they_stand(hub: StandIn, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(FILES["config.json"])
    found = resolve(tmp_path)
    assert found.path == tmp_path and (found.source.name, found.source.revision) == (tmp_path.name, None)
    assert not hub.requests


def test_inspect_downloads_the_configuration_only(hub: StandIn, options: HubOptions) -> None:
    listing = inspect(NAME, options)
    assert listing.config["architectures"] == ["Qwen3ForCausalLM"]
    assert listing.source.revision == COMMIT
    assert listing.size == listing.missing == sum(len(FILES[name]) for name in WANTED)
    assert set(hub.downloads()) == {"config.json"}

    resolve(NAME, options)
    offline = HubOptions(cache_dir=options.cache_dir, offline=True)
    assert inspect(NAME, options).missing == inspect(NAME, offline).missing == 0


@pytest.mark.usefixtures("no_wait")
def test_a_cut_connection_is_told_and_the_next_run_goes_on(
    hub: StandIn, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)  # it loses the chunk in flight
    hub.cut_after = 350_000
    with pytest.raises(CheckpointError, match=r"connection to http://127.0.0.1:[0-9]+ failed.*goes on from there"):
        resolve(NAME, options)
    assert inspect(NAME, options).missing == len(WEIGHTS) - 300_000

    hub.cut_after = None
    hub.requests.clear()
    found = resolve(NAME, options)
    assert hub.downloads()["model.safetensors"] == "bytes=300000-"
    assert (found.path / "model.safetensors").read_bytes() == WEIGHTS
    assert not list(options.cache.rglob("*.partial"))


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL is a signal of POSIX")
def test_an_interrupted_process_leaves_what_it_has(hub: StandIn, options: HubOptions) -> None:
    code = """
import sys
from dflash_exporter import repository
from dflash_exporter.hub import HubOptions, resolve
class Stop:
    def __init__(self, file): self.file = file
    def write(self, chunk):
        self.file.write(chunk[:1000]); self.file.flush()
        import os, signal; os.kill(os.getpid(), signal.SIGKILL)
    def __getattr__(self, name): return getattr(self.file, name)
original = repository.http_get
repository.http_get = lambda url, out, **rest: original(url, Stop(out), **rest)
resolve(sys.argv[1], HubOptions(cache_dir=sys.argv[2]))
"""
    killed = subprocess.run([sys.executable, "-c", code, NAME, str(options.cache_dir)], env=os.environ)
    assert killed.returncode == -9
    hub.requests.clear()
    assert (resolve(NAME, options).path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads()["model.safetensors"] == "bytes=1000-"


def test_a_file_longer_than_it_should_be_starts_again(hub: StandIn, options: HubOptions) -> None:
    partial = (
        options.cache / "models--someone--small-model" / "blobs" / f"{hashlib.sha256(WEIGHTS).hexdigest()}.partial"
    )
    partial.parent.mkdir(parents=True)
    partial.write_bytes(WEIGHTS + b"more")
    assert (resolve(NAME, options).path / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.downloads()["model.safetensors"] is None


def test_a_damaged_download_is_removed(hub: StandIn, options: HubOptions) -> None:
    hub.served["model.safetensors"] = WEIGHTS[:-1] + b"!"
    with pytest.raises(CheckpointError, match=r"model\.safetensors of someone/small-model arrived damaged"):
        resolve(NAME, options)
    assert not list(options.cache.rglob("*.partial"))
    hub.served.clear()
    assert (resolve(NAME, options).path / "model.safetensors").read_bytes() == WEIGHTS


def test_without_links_the_file_itself_is_moved(
    hub: StandIn, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "symlink_to", _refuse)
    weights = resolve(NAME, options).path / "model.safetensors"
    assert weights.read_bytes() == WEIGHTS and not weights.is_symlink()


def _refuse(*args: object) -> None:
    raise OSError(errno.EPERM, "no right to make links")


def test_offline_takes_the_cache_only(hub: StandIn, options: HubOptions) -> None:
    offline = HubOptions(cache_dir=options.cache_dir, offline=True)
    with pytest.raises(CheckpointError, match=r"neither a folder nor complete in the cache .* without --offline"):
        resolve(NAME, offline)
    assert not hub.requests

    found = resolve(NAME, options)
    hub.requests.clear()
    assert resolve(NAME, offline) == resolve(f"{NAME}@{COMMIT}", offline) == found
    assert not hub.requests


def test_gated_missing_and_mistyped_repositories(hub: StandIn, options: HubOptions) -> None:
    hub.gated = True
    with pytest.raises(
        CheckpointError, match=f"gated. Accept its licence at http://.*/{NAME}, then run `hf auth login`"
    ):
        resolve(NAME, options)
    with pytest.raises(CheckpointError, match="gated"):
        inspect(NAME, options)
    with pytest.raises(CheckpointError, match="someone/else is neither a folder nor a repository of http://"):
        resolve("someone/else", options)
    with pytest.raises(CheckpointError, match="no revision 'nonsense'"):
        resolve(f"{NAME}@nonsense", options)
    for name in ("small-model", "./small-model/x", "/absent/folder", "a/b/c"):
        with pytest.raises(CheckpointError, match="neither a folder nor a Hub id"):
            resolve(name, options)


@pytest.mark.parametrize(
    ("missing", "message"), [("model.safetensors", "no safetensors"), ("config.json", "config.json")]
)
def test_repositories_with_nothing_to_export(hub: StandIn, options: HubOptions, missing: str, message: str) -> None:
    del hub.repositories[NAME][missing]
    with pytest.raises(UnsupportedError, match=message):
        resolve(NAME, options)
    assert not hub.downloads()


@pytest.mark.usefixtures("no_wait")
def test_no_network(options: HubOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard: nobody listens
    with pytest.raises(CheckpointError, match=r"connection to http://127.0.0.1:9 failed.*--offline"):
        resolve(NAME, options)


def test_too_little_space_is_told_before_the_download(
    hub: StandIn, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"not enough space .* 0\.00 GB are free.*--cache-dir"):
        resolve(NAME, options)
    assert not hub.downloads()


def test_a_disk_that_fills_up_is_told(hub: StandIn, options: HubOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **rest: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(repository, "http_get", full)
    with pytest.raises(CheckpointError, match=r"the disk of .* is full.*goes on from there"):
        resolve(NAME, options)


def test_the_token_is_sent(hub: StandIn, tmp_path: Path) -> None:
    resolve(NAME, HubOptions(cache_dir=tmp_path, token="hf_secret"))
    assert {token for *_, token in hub.requests} == {"Bearer hf_secret"}
