"""The engine under asyncio: same text, early ends, and the event loop stays free."""

import asyncio
from contextlib import aclosing

import pytest
from dflash_graphs.errors import RequestError
from dflash_runtime import Engine, GenerationConfig, Result, stream_async

PROMPT = "def add(a, b):\n"
LONG = GenerationConfig(max_new_tokens=300, ignore_eos=True, draft=False)
SHORT = GenerationConfig(max_new_tokens=24, ignore_eos=True)


async def collect(engine: Engine, config: GenerationConfig, result: Result | None = None) -> str:
    return "".join([chunk async for chunk in stream_async(engine, PROMPT, config, result)])


def test_same_text(engine: Engine) -> None:
    result = Result()
    assert asyncio.run(collect(engine, SHORT, result)) == engine.generate(PROMPT, SHORT).text == result.text


def test_closing_early_leaves_the_engine_ready(engine: Engine) -> None:
    async def run() -> None:
        result = Result()
        async with aclosing(stream_async(engine, PROMPT, LONG, result)) as chunks:
            async for _ in chunks:
                break
        assert 0 < len(result.token_ids) < 300
        assert await collect(engine, SHORT) == engine.generate(PROMPT, SHORT).text

    asyncio.run(run())


def test_cancelling_the_task_ends_the_request(engine: Engine) -> None:
    async def run() -> None:
        result = Result()
        task = asyncio.create_task(collect(engine, LONG, result))
        while not result.token_ids:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(result.token_ids) < 300
        assert await collect(engine, SHORT) == engine.generate(PROMPT, SHORT).text

    asyncio.run(run())


def test_a_refused_request_does_not_end_the_running_one(engine: Engine) -> None:
    async def run() -> None:
        result = Result()
        first = asyncio.create_task(collect(engine, LONG, result))
        while not result.token_ids:
            await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="busy"):
            await collect(engine, SHORT)
        await first
        assert (result.finish_reason, len(result.token_ids)) == ("length", 300)

    asyncio.run(run())


def test_the_event_loop_stays_free(engine: Engine) -> None:
    async def run() -> int:
        task, ticks = asyncio.create_task(collect(engine, LONG)), 0
        while not task.done():
            await asyncio.sleep(0.005)
            ticks += 1
        return ticks

    assert asyncio.run(run()) > 10
