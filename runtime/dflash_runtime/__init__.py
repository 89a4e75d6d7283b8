"""Exact speculative decoding of a bundle: `load` it, then `generate`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .asynchronous import stream_async
    from .engine import Engine, load
    from .generation import GenerationConfig, Result
    from .session import ChatSession
    from .structured import StructuredOutput

_HOMES = {
    "ChatSession": "session",
    "Engine": "engine",
    "GenerationConfig": "generation",
    "Result": "generation",
    "StructuredOutput": "structured",
    "load": "engine",
    "stream_async": "asynchronous",
}
__all__ = ["ChatSession", "Engine", "GenerationConfig", "Result", "StructuredOutput", "load", "stream_async"]


def __getattr__(name: str) -> Any:
    """Import on first use: `import dflash_runtime` alone loads no inference library."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
