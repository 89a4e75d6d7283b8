"""Checkpoints in, bundles out: reads a target and its DFlash drafter and writes the graphs a runtime needs."""

from .bundle_writer import export
from .plan import ExportRequest

__all__ = ["ExportRequest", "export"]
