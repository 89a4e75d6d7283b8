"""The examples run as their docstrings say."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest
from dflash_runtime import GenerationConfig, load
from dflash_runtime.chat import FROZEN_FLAG


@pytest.fixture(scope="module")
def bundle(small_bundle: Callable[[str], Path]) -> Path:
    return small_bundle("f32")


@pytest.fixture
def run(repo: Path) -> Callable[..., str]:
    def call(name: str, *args: str | Path, stdin: str | None = None) -> str:
        command = [sys.executable, repo / "examples" / name, *args]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, input=stdin, encoding="utf-8").stdout

    return call


@pytest.fixture
def example(repo: Path) -> Callable[[str], types.ModuleType]:
    def read(name: str) -> types.ModuleType:
        spec = importlib.util.spec_from_file_location(name, repo / "examples" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return read


def test_minimal(run: Callable[..., str], bundle: Path) -> None:
    expected = load(bundle).chat().say("What is a set?", GenerationConfig(max_new_tokens=128)).text
    assert run("minimal.py", bundle, "What is a set?") == expected + "\n"


def test_async_two_consumers(run: Callable[..., str], bundle: Path) -> None:
    lines = run("async_two_consumers.py", bundle).splitlines()
    assert [line for line in lines if line.endswith("?")] == ["What is a set?", "Why do birds sing?"]
    assert sum(line.endswith(".") for line in lines) == 2


def test_batch_goes_on_where_it_was_killed(run: Callable[..., str], bundle: Path, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    messages = [{"role": "user", "content": "What is a set?"}]
    requests = [{"id": "first", "prompt": "def add(a, b):"}, {"messages": messages}, {"id": 7, "prompt": "Once"}]
    prompts.write_text("\n".join(map(json.dumps, requests)) + "\n\n", encoding="utf-8")
    run("batch_jsonl.py", bundle, prompts, answers)
    whole = answers.read_text("utf-8")
    assert [json.loads(line)["id"] for line in whole.splitlines()] == ["first", 2, 7]
    assert all(json.loads(line)["new_tokens"] > 0 for line in whole.splitlines())

    first = whole.splitlines(keepends=True)[0]
    kept = first.replace('"text": "', '"text": "kept ')
    answers.write_text(kept + whole[len(first) : len(first) + 20], encoding="utf-8")  # killed in the second line
    run("batch_jsonl.py", bundle, prompts, answers)
    assert answers.read_text("utf-8") == kept + whole[len(first) :]


def test_tk_answers_and_stops(example: Callable[[str], types.ModuleType], bundle: Path) -> None:
    pytest.importorskip("tkinter")
    module, chunks = example("stream_to_tk"), SimpleQueue[str | None]()
    session = load(bundle, max_context=1024).chat()
    module.answer(session, "What is a set?", chunks)
    assert "".join(iter(chunks.get, None)) == session.last.text != ""

    module.CONFIG = GenerationConfig(max_new_tokens=900, ignore_eos=True, draft=False)
    thread = threading.Thread(target=module.answer, args=(session, "And a list?", chunks))
    thread.start()
    chunks.get()
    session.engine.cancel()
    thread.join()
    assert session.last.finish_reason == "cancelled"
    assert list(iter(chunks.get, None))[-1:] != [None]

    module.answer(session, "word " * 2000, chunks)
    assert "exceed the context" in "".join(iter(chunks.get, None))


@pytest.mark.skipif(sys.platform == "linux" and not os.environ.get("DISPLAY"), reason="no display")
def test_tk_window(example: Callable[[str], types.ModuleType], bundle: Path) -> None:
    pytest.importorskip("tkinter")
    window = example("stream_to_tk").Window(load(bundle).chat())
    window.entry.insert(0, "What is a set?")
    window.submit()
    while str(window.stop["state"]) == "normal":
        window.update()
    assert window.session.last.text in window.text.get("1.0", "end")
    window.close()


def test_a_frozen_app_renders_chat_templates(run: Callable[..., str]) -> None:
    request = {"template": "{{ messages[0] }}!", "context": {"messages": ["hi"]}, "seconds": 10}
    assert json.loads(run("app_hook.py", FROZEN_FLAG, stdin=json.dumps(request) + "\n")) == {"text": "hi!"}
    assert run("app_hook.py") == ""
