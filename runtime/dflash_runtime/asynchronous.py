"""The engine for asyncio programs: a request runs in a thread, its text arrives in the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator

from .engine import Engine, Prompt
from .generation import GenerationConfig, Result


async def stream_async(
    engine: Engine, prompt: Prompt, config: GenerationConfig | None = None, result: Result | None = None
) -> AsyncGenerator[str, None]:
    """Yield text as `Engine.stream` does; closing (`contextlib.aclosing`) or cancelling it ends the request."""
    chunks = engine.stream(prompt, config, result)
    loop, ended = asyncio.get_running_loop(), object()
    try:
        while (chunk := await loop.run_in_executor(None, next, chunks, ended)) is not ended:
            assert isinstance(chunk, str)
            yield chunk
    except (GeneratorExit, asyncio.CancelledError):
        engine.cancel()
        raise
    finally:
        # the thread may still be inside a round: wait for it, then close the request
        await asyncio.shield(loop.run_in_executor(None, _close, chunks))


def _close(chunks: Generator[str, None, None]) -> None:
    while True:
        try:
            chunks.close()
        except ValueError:  # still executing in the other thread
            time.sleep(0.01)
        else:
            return
