"""Prompts to measure and to prove with: from local files and, by name, from the Hub.

Knows file layouts, how published benchmarks word their questions, and how a conversation becomes a prompt. Knows no
models.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from dflash_graphs.errors import RequestError

from .chat import ChatTemplate, ChatTemplateError
from .tokenizer import Tokenizer

BUILT_IN = Path(__file__).with_name("data") / "pair" / "prompts.jsonl"


@dataclass(frozen=True)
class Sample:
    """One conversation: what the user says, turn by turn, or a single text that is to be continued as it stands."""

    name: str
    turns: tuple[str, ...]
    is_text: bool = False


@dataclass(frozen=True)
class Dataset:
    """Samples under one name."""

    name: str
    samples: tuple[Sample, ...]

    @property
    def sha256(self) -> str:
        """Hash of the samples, wherever they came from."""
        return hashlib.sha256(msgspec.json.encode(self.samples)).hexdigest()

    def spread(self, count: int) -> "Dataset":
        """Keep `count` samples from all over the data set, which may be sorted by kind."""
        count = min(count, len(self.samples))
        return Dataset(self.name, tuple(self.samples[len(self.samples) * i // count] for i in range(count)))


@dataclass(frozen=True)
class _HubSet:
    repository: str
    file: str
    turns: Callable[[dict[str, Any]], Sequence[str]]


# worded as in the published figures for DFlash drafters
_HUB = {
    "gsm8k": _HubSet(
        "openai/gsm8k",
        "main/test-00000-of-00001.parquet",
        lambda row: [f"{row['question']}\nPlease reason step by step, and put your final answer within \\boxed{{}}."],
    ),
    "humaneval": _HubSet(
        "openai/openai_humaneval",
        "openai_humaneval/test-00000-of-00001.parquet",
        lambda row: [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"
        ],
    ),
    "mt-bench": _HubSet("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl", lambda row: row["prompt"]),
}


def load_dataset(source: str, limit: int | None = None) -> Dataset:
    """Return the first `limit` samples of a JSONL file, or of gsm8k, humaneval or mt-bench from the Hub.

    A line of a file holds `prompt`, a text to continue, or `turns`, a list of what a user says. Raises RequestError for
    a file that is missing or malformed, and where the Hub is needed but cannot be reached.
    """
    if source in _HUB:
        rows, turns = _hub_rows(source), _HUB[source].turns
        samples = [Sample(f"{source}-{i}", tuple(turns(row))) for i, row in enumerate(rows[:limit])]
        return Dataset(source, tuple(samples))
    path = Path(source)
    if not path.is_file():
        raise RequestError(f"{source} is neither a file nor one of {', '.join(_HUB)}")
    lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()][:limit]
    if not lines:
        raise RequestError(f"{path} holds no prompts")
    return Dataset(path.stem, tuple(_sample(path, i, line) for i, line in enumerate(lines, 1)))


class Encoder:
    """Turns conversations into the token ids of a bundle's prompts."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, thinking: bool = False) -> None:
        """Use the chat template of the bundle `folder`; without one, turns are joined as plain text."""
        self._tokenizer, self._thinking = tokenizer, thinking
        self._template: ChatTemplate | None = None
        with suppress(ChatTemplateError):
            self._template = ChatTemplate(folder)

    def encode(self, sample: Sample, answers: Sequence[str] = ()) -> list[int]:
        """Return the prompt for the turn that follows `answers`."""
        said = [sample.turns[0]]
        for answer, turn in zip(answers, sample.turns[1:], strict=False):
            said += [answer, turn]
        if self._template is None or sample.is_text:
            return self._tokenizer.encode("\n\n".join(said))
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        prompt = self._template.render(messages, enable_thinking=self._thinking)
        return self._tokenizer.encode(prompt, add_special_tokens=False)


def _sample(path: Path, number: int, line: str) -> Sample:
    try:
        row = json.loads(line)
        name = str(next((row[key] for key in ("id", "task_id", "question_id") if key in row), number))
        if isinstance(row.get("prompt"), str):
            return Sample(name, (row["prompt"],), is_text=True)
        turns = row.get("turns", row.get("prompt"))
        if turns and isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
            return Sample(name, tuple(turns))
    except (ValueError, AttributeError, TypeError):
        pass
    raise RequestError(f'{path}, line {number}: not a JSON object with a text "prompt" or a list of texts "turns"')


def _hub_rows(name: str) -> list[dict[str, Any]]:
    wanted = _HUB[name]
    try:
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(wanted.repository, wanted.file, repo_type="dataset"))
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
        from pyarrow import parquet

        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return rows
    except ModuleNotFoundError as error:
        raise RequestError(
            f"the package {error.name} is missing, which data sets of the Hub need; run: "
            "pip install 'dflash-openvino[datasets]', or pass a JSONL file"
        ) from error
    except (OSError, ValueError) as error:
        raise RequestError(
            f"{name} ({wanted.repository}) could not be fetched; go online, or pass a JSONL file. {error}"
        ) from error
