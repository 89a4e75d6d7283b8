"""The one error tree of the project: every error a user can cause or meet derives from `DFlashError`.

A message says what is wrong and what to do about it; it is printed as it stands, without a traceback.
"""


class DFlashError(Exception):
    """Base of every error raised on purpose; the command line prints it and exits with `exit_code`."""

    exit_code = 1


class UnsupportedError(DFlashError):
    """An architecture, drafter kind, rope type, format or platform feature this version does not handle."""


class CheckpointError(DFlashError):
    """A checkpoint folder is incomplete, damaged or does not match its configuration."""


class ExportError(DFlashError):
    """Writing a bundle failed (space, permissions, an existing target); nothing is left under its final name."""


class BundleError(DFlashError):
    """A bundle is incomplete, damaged or of an unknown format."""


class RequestError(DFlashError):
    """A generation request cannot be served as stated (too long, bad option, bad template)."""
