"""What a proof of exactness found, and the file that keeps it beside a bundle.

Knows findings, and the machine and settings they hold for. Does not know how they were made (`verify`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from dflash_graphs.errors import BundleError
from dflash_graphs.manifest import Manifest

from .bundle import bundle_key
from .proof import Difference

CERTIFICATE = "certificate.json"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check: how many rows or tokens were compared bit for bit, and where the first difference is, if anywhere."""

    check: str  # row counts, alignments, or the kind of drafts
    prompt: str | None = None  # where `first` was found, or the only one
    compared: int
    first: Difference | None = None
    is_state_equal: bool = True  # recurrent state afterwards against that of the emitted tokens alone
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def is_exact(self) -> bool:
        return self.first is None and self.is_state_equal


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked, on which machine, with which result."""

    bundle: str  # key of the manifest
    date: str
    cpu: str
    platform: str
    versions: dict[str, str]
    settings: dict[str, str | int]
    smallest_exact_rows: int | None
    prompts_sha256: str
    is_complete: bool  # False: interrupted
    is_exact: bool
    tokens: int  # decoded with drafts and compared
    findings: tuple[Finding, ...]  # one a check, over all prompts

    def summary(self, manifest: Manifest) -> str:
        """Say in a line what this means for the bundle of `manifest`."""
        if self.bundle != bundle_key(manifest):
            return "for other contents than these; run `dflash verify --certify` again"
        settings = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.settings.items())
        verdict = "exact" if self.is_exact else "NOT exact"
        interrupted = "" if self.is_complete else ", interrupted"
        return f"{verdict} over {self.tokens:,} tokens{interrupted}, {self.date}, on {self.cpu} ({settings})"


def merge(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return one finding for every check, with the first difference of all its prompts."""
    checks = dict.fromkeys(f.check for f in findings)
    return tuple(_merge([f for f in findings if f.check == check]) for check in checks)


def write_certificate(folder: Path, certificate: Certificate) -> Path:
    """Write it into the bundle's folder but not into its manifest: the bundle stays what it was."""
    path = folder / CERTIFICATE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(certificate), indent=1))
    return path


def read_certificate(folder: Path) -> Certificate | None:
    """Read the certificate of a bundle folder, None where there is none; raise BundleError for a damaged one."""
    path = folder / CERTIFICATE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Certificate)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise BundleError(f"{path} is damaged: {error}. Delete it, or run `dflash verify --certify` again.") from error


def _merge(findings: Sequence[Finding]) -> Finding:
    failed = next((f for f in findings if not f.is_exact), None)
    return replace(
        failed or findings[0],
        prompt=None if failed is None else failed.prompt,
        compared=sum(f.compared for f in findings),
        is_state_equal=all(f.is_state_equal for f in findings),
        draft_tokens=sum(f.draft_tokens for f in findings),
        accepted_tokens=sum(f.accepted_tokens for f in findings),
    )
