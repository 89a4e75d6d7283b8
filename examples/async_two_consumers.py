"""Two tasks share an engine without blocking the event loop; each leaves as soon as it has read enough.

An engine serves one request at a time, so a lock lets them take turns. `aclosing` ends a request whose text nobody
reads any more: without it the next task would find the engine busy.

python async_two_consumers.py BUNDLE
"""

import asyncio
import sys
from contextlib import aclosing

from dflash_runtime import Engine, GenerationConfig, load, stream_async

QUESTIONS = ("What is a set?", "Why do birds sing?")
CONFIG = GenerationConfig(max_new_tokens=256)


async def first_sentence(engine: Engine, turn: asyncio.Lock, question: str) -> str:
    """Return the answer up to its first full stop."""
    text = ""
    async with turn, aclosing(stream_async(engine, [{"role": "user", "content": question}], CONFIG)) as chunks:
        async for chunk in chunks:
            text += chunk
            if "." in text:
                break
    return text.partition(".")[0] + "."


async def main(bundle: str) -> None:
    engine, turn = await asyncio.to_thread(load, bundle), asyncio.Lock()
    answers = await asyncio.gather(*(first_sentence(engine, turn, question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n    {answer}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
