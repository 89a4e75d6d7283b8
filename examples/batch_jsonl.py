"""Answer a file of prompts, with progress; started again, it goes on where it stopped.

Each line of PROMPTS is an object with `prompt` (text) or `messages`, and perhaps an `id` (else: the line's number).
Each line of ANSWERS gets the id, the text, the finish reason and the token counts.

python batch_jsonl.py BUNDLE PROMPTS.jsonl ANSWERS.jsonl
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_runtime import GenerationConfig, load
from tqdm import tqdm

CONFIG = GenerationConfig(max_new_tokens=256)


def read_prompts(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield {"id": number, **json.loads(line)}


def finished_ids(path: Path) -> set[Any]:
    """Read the ids answered so far, and cut off a last line that was not finished."""
    if not path.exists():
        return set()
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    return {json.loads(line)["id"] for line in whole.splitlines()}


def main(bundle: str, prompts: Path, answers: Path) -> None:
    done = finished_ids(answers)
    waiting = [request for request in read_prompts(prompts) if request["id"] not in done]
    engine = load(bundle)
    with answers.open("a", encoding="utf-8") as output:
        for request in tqdm(waiting, initial=len(done), total=len(done) + len(waiting), unit="prompt"):
            result = engine.generate(request.get("messages") or request["prompt"], CONFIG)
            answer = {
                "id": request["id"],
                "text": result.text,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.prompt_tokens,
                "new_tokens": len(result.token_ids),
            }
            print(json.dumps(answer, ensure_ascii=False), file=output, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
