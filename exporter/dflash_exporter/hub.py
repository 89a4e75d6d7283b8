"""Checkpoints by name: a folder as it stands, or a repository of the Hugging Face Hub brought into its cache folder.

Knows which files of a checkpoint an export reads. Does not know what they mean, nor how a file is fetched
(`repository`).
"""

from dataclasses import dataclass
from fnmatch import fnmatch
from operator import attrgetter
from pathlib import Path
from typing import Any

from dflash_graphs.errors import CheckpointError, UnsupportedError
from dflash_graphs.manifest import Source
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import LocalEntryNotFoundError

from .checkpoint import Checkpoint
from .repository import HubFile, HubOptions, Repository, explained, free_space, open_repository

_CONFIG = "config.json"
_WANTED = (
    _CONFIG,
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer*",
    "chat_template.*",
    "*.safetensors",
    "*.safetensors.index.json",
)

__all__ = ["HubFile", "HubOptions", "Listing", "Resolved", "inspect", "resolve"]


@dataclass(frozen=True)
class Listing:
    """What an export reads of a checkpoint, known before its weights are here."""

    source: Source
    config: dict[str, Any]
    files: tuple[HubFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def missing(self) -> int:
        """Bytes still to be downloaded."""
        return sum(file.size - file.present for file in self.files)


@dataclass(frozen=True)
class Resolved:
    """A checkpoint on this machine; `source` holds the Hub id and the commit, or the name of the folder."""

    path: Path
    source: Source


def resolve(name: str | Path, options: HubOptions | None = None) -> Resolved:
    """Return the folder of a checkpoint, downloading what is missing of it.

    `name` is a folder, a Hub id (`owner/name`) or an id with a revision (`owner/name@revision`, which wins over the
    options). Raises CheckpointError with what to do about it, UnsupportedError where there are no safetensors.
    """
    options, folder = options or HubOptions(), Path(name)
    if folder.is_dir():
        return Resolved(folder, Source(name=folder.absolute().name))
    repository_name, options = _split(str(name), options)
    if _is_offline(options):
        return _cached(repository_name, options)
    repository, files = _listed(repository_name, options)
    _check_space(options.cache, sum(file.size - file.present for file in files))
    with explained(repository):
        for file in sorted(files, key=attrgetter("size")):  # a small one tells early that the repository is gated
            repository.fetch(file)
    return Resolved(repository.snapshot, repository.source)


def inspect(name: str | Path, options: HubOptions | None = None) -> Listing:
    """Return what an export reads of a checkpoint, downloading no more than its config.json; errors as `resolve`."""
    options = options or HubOptions()
    if Path(name).is_dir() or _is_offline(options):
        resolved = resolve(name, options)
        paths = [path for path in sorted(resolved.path.iterdir()) if _is_wanted(path.name)]
        files = tuple(HubFile(path.name, path.stat().st_size, path.stat().st_size) for path in paths)
        return Listing(resolved.source, Checkpoint(resolved.path).config, files)
    repository, files = _listed(*_split(str(name), options))
    with explained(repository):
        repository.fetch(next(file for file in files if file.name == _CONFIG))
    return Listing(repository.source, Checkpoint(repository.snapshot).config, files)


def _split(name: str, options: HubOptions) -> tuple[str, HubOptions]:
    """Separate `owner/name@revision`."""
    name, _, revision = name.partition("@")
    if name.count("/") != 1 or name[0] in "./~":
        raise CheckpointError(f"{name} is neither a folder nor a Hub id (owner/name).")
    return name, options.at(revision) if revision else options


def _listed(name: str, options: HubOptions) -> tuple[Repository, tuple[HubFile, ...]]:
    """Ask the Hub for a repository; refuse it if it holds nothing to export."""
    repository, files = open_repository(name, options)
    wanted = tuple(file for file in files if _is_wanted(file.name))
    if not any(file.name.endswith(".safetensors") for file in wanted):
        raise UnsupportedError(f"{name} holds no safetensors weights; other formats (.bin, GGUF) are not read.")
    if not any(file.name == _CONFIG for file in wanted):
        raise UnsupportedError(f"{name} has no {_CONFIG}: it is not a checkpoint in the format of transformers.")
    return repository, wanted


def _is_wanted(name: str) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in _WANTED)


def _is_offline(options: HubOptions) -> bool:
    return options.offline or bool(constants.HF_HUB_OFFLINE)


def _cached(name: str, options: HubOptions) -> Resolved:
    """Find a checkpoint in the cache folder without asking the Hub."""
    try:
        found = HfApi().snapshot_download(
            name,
            revision=options.revision,
            cache_dir=options.cache,
            local_files_only=True,
            allow_patterns=list(_WANTED),
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name} is neither a folder nor complete in the cache {options.cache}. Run once without --offline "
            "(and without HF_HUB_OFFLINE)."
        ) from error
    return Resolved(Path(found), Source(name=name, revision=Path(found).name))


def _check_space(cache: Path, need: int) -> None:
    free = free_space(cache)
    if need > free:
        raise CheckpointError(
            f"not enough space in {cache}: {need / 1e9:.2f} GB are to be downloaded, {free / 1e9:.2f} GB are free. "
            "Free some, or choose a folder on another disk with --cache-dir."
        )
