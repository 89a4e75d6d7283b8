"""A repository of the Hugging Face Hub at one commit: lists its files and fetches them into the cache folder.

Knows the Hub's API, the layout of its cache folder, and what its errors mean to a user. Does not know checkpoints.
Large files are fetched here rather than by `huggingface_hub`, which since version 2 keeps nothing of an interrupted
download; they end up where it would have put them, so that it finds them, and files it downloaded are found here.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_graphs.errors import CheckpointError
from dflash_graphs.manifest import Source
from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]
from huggingface_hub.utils.sha import sha_fileobj

_PROGRAM = "dflash-openvino"  # how requests name it
_RESUMES = "What was downloaded is kept: the same command goes on from there."
_TRANSPORT_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]  # HTTPError of httpx, of httpx2 since huggingface_hub 2


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """How to reach the Hub; its address is taken from HF_ENDPOINT.

    `revision` is a branch, tag or commit; `cache_dir` defaults to the cache shared with other programs, `token` to that
    of `hf auth login`; `offline` (or HF_HUB_OFFLINE) takes only what the cache holds.
    """

    revision: str | None = None
    cache_dir: Path | None = None
    token: str | None = None
    offline: bool = False

    @property
    def cache(self) -> Path:
        return Path(self.cache_dir or constants.HF_HUB_CACHE).expanduser()

    def at(self, revision: str | None) -> "HubOptions":
        return replace(self, revision=revision)


@dataclass(frozen=True)
class HubFile:
    """A file of a checkpoint; `size` and `present`, how much of it is on this machine, in bytes."""

    name: str
    size: int
    present: int
    sha256: str | None = None  # of files the Hub keeps in large-file storage


@dataclass(frozen=True)
class Repository:
    """A repository at one commit, and its place in the cache folder."""

    api: HfApi
    options: HubOptions
    name: str
    commit: str = ""

    @property
    def source(self) -> Source:
        return Source(name=self.name, revision=self.commit)

    @property
    def snapshot(self) -> Path:
        """The folder of the files at this commit."""
        return self._folder / "snapshots" / self.commit

    @property
    def _folder(self) -> Path:
        return self.options.cache / f"models--{self.name.replace('/', '--')}"

    def _blob(self, sha256: str, suffix: str = "") -> Path:
        return self._folder / "blobs" / (sha256 + suffix)

    def describe(self, sibling: Any) -> HubFile:
        """Read an entry of the Hub's listing and see how much of the file is here."""
        size, sha256 = sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None
        places = [self.snapshot / sibling.rfilename]
        if sha256 is not None:
            places += [self._blob(sha256), self._blob(sha256, ".partial")]
        found = next((place.stat().st_size for place in places if place.exists()), 0)
        return HubFile(sibling.rfilename, size, min(size, found), sha256)

    def fetch(self, file: HubFile) -> None:
        """Bring a file into the snapshot folder, going on where an earlier run stopped."""
        pointer = self.snapshot / file.name
        if file.sha256 is None:
            self.api.hf_hub_download(self.name, file.name, revision=self.options.revision, cache_dir=self.options.cache)
        elif not pointer.exists():
            blob = self._blob(file.sha256)
            lock = self.options.cache / ".locks" / self._folder.name / f"{file.sha256}.lock"
            for needed in (lock, blob, pointer):
                needed.parent.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(lock):
                if not blob.exists():
                    self._download(file, self._blob(file.sha256, ".partial")).rename(blob)
                if not pointer.exists():
                    _link(blob, pointer)

    def _download(self, file: HubFile, partial: Path) -> Path:
        with partial.open("ab") as out:
            if out.tell() > file.size:
                out.seek(0)
                out.truncate()
            http_get(
                hf_hub_url(self.name, file.name, revision=self.commit, endpoint=self.api.endpoint),
                out,
                resume_size=out.tell(),
                headers=build_hf_headers(token=self.api.token, library_name=_PROGRAM),
                expected_size=file.size,
                displayed_filename=file.name,
            )
        with partial.open("rb") as done:
            if sha_fileobj(done).hex() == file.sha256:
                return partial
        partial.unlink()
        raise CheckpointError(
            f"{file.name} of {self.name} arrived damaged (its SHA-256 is not the one the Hub lists) and was removed. "
            "Run the same command again."
        )


def open_repository(name: str, options: HubOptions) -> tuple[Repository, tuple[HubFile, ...]]:
    """Ask the Hub for a repository: its commit and all its files. Raises CheckpointError."""
    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT).rstrip("/")
    api = HfApi(endpoint=endpoint, token=options.token, library_name=_PROGRAM)
    repository = Repository(api, options, name)
    with explained(repository):
        info = api.model_info(name, revision=options.revision, files_metadata=True)
    repository = replace(repository, name=info.id, commit=info.sha or "")
    return repository, tuple(repository.describe(sibling) for sibling in info.siblings or ())


def free_space(folder: Path) -> int:
    """Bytes free on the disk that holds `folder`, or would if it existed."""
    folder = folder.absolute()
    return shutil.disk_usage(next(f for f in (folder, *folder.parents) if f.exists())).free


def _link(blob: Path, pointer: Path) -> None:
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:  # Windows without the right to make links: the layout huggingface_hub uses there, too
        blob.replace(pointer)


@contextmanager
def explained(repository: Repository) -> Iterator[None]:
    """Turn errors of the Hub, the network and the disk into CheckpointErrors that say what to do."""
    try:
        yield
    except HfHubHTTPError as error:
        raise CheckpointError(_refusal(repository, error)) from error
    except (_TRANSPORT_ERROR, LocalEntryNotFoundError, ConnectionError) as error:
        raise CheckpointError(
            f"the connection to {repository.api.endpoint} failed while reading {repository.name}: {error}. {_RESUMES} "
            "A complete copy in the cache is taken with --offline."
        ) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = f"the disk of {repository.options.cache} is full" if full else f"{error}"
        raise CheckpointError(f"downloading {repository.name} failed: {problem}. {_RESUMES}") from error


def _refusal(repository: Repository, error: HfHubHTTPError) -> str:
    name, endpoint = repository.name, repository.api.endpoint
    login = "run `hf auth login` or give --token"
    if isinstance(error, GatedRepoError):
        return f"{name} is gated. Accept its licence at {endpoint}/{name}, then {login}."
    if isinstance(error, RepositoryNotFoundError):
        return f"{name} is neither a folder nor a repository of {endpoint}. Check the name; if it is private, {login}."
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision {repository.options.revision!r}. Give a branch, a tag or a commit."
    reason = error.server_message or f"HTTP status {error.response.status_code}"
    return f"{endpoint} refused {name}: {reason}. Try again later. {_RESUMES}"
