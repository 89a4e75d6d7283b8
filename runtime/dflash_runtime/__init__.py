"""Exact speculative decoding of a bundle: `load` it, then `generate`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, GenerationConfig, Result, load

__all__ = ["Engine", "GenerationConfig", "Result", "load"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
