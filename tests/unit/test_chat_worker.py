"""The process chat templates render in: no harm from a hostile template, and no trace of a process which ended."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from dflash_runtime.chat import ChatTemplate, ChatTemplateError

USER = {"role": "user", "content": "hello"}


def folder_with(folder: Path, template: str) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    return folder


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ messages.append(1) }}",
    "{{ dict.update(messages[0], a=1) }}",
    "{{ dict.mro() }}",
    "{% set ns = namespace() %}{% set ns.__html__ = cycler %}{{ ns }}",
    "{{ namespace(__html__=cycler) }}",
    "{{ namespace(_Namespace__attrs=1) }}",
    "{{ self._TemplateReference__context.environment }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_sandbox_holds(tmp_path: Path, source: str) -> None:
    template = ChatTemplate(folder_with(tmp_path, source))
    try:
        assert template.render([USER]) == ""  # an unsafe attribute is undefined, and undefined prints as nothing
    except ChatTemplateError as error:
        assert any(word in str(error) for word in ("unsafe", "private", "no attribute", "undefined")), error


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "one operation": "{{ (3 ** (10 ** 8 + messages | length)) % 7 }}",
    "while compiling": "{{ (3 ** (10 ** 8)) % 7 }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "filters": "{{ range(99999) | map('string') | map('center', 9999) | map('length') | sum }}" * 50,
    "range": "{{ range(10 ** 6) }}",
    "memory": "{{ ('a' * (10 ** 10)) | length }}",
    "doubling": "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "padding": "{{ '%9999999999d' % 1 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep syntax": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 500 }}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_ends_in_an_error_and_the_next_render_works(tmp_path: Path, name: str) -> None:
    source = "{% if messages[0].content == 'good' %}fine{% else %}" + BOMBS[name] + "{% endif %}"
    if name in ("while compiling", "deep syntax"):
        source = BOMBS[name]
    template = ChatTemplate(folder_with(tmp_path, source), time_limit=1.0)
    start = time.monotonic()
    with pytest.raises(ChatTemplateError):
        template.render([USER])
    assert time.monotonic() - start < 60
    if source != BOMBS[name]:
        assert template.render([{"role": "user", "content": "good"}]) == "fine"


def test_time_limit_is_ten_seconds_unless_told_otherwise(tmp_path: Path) -> None:
    template = ChatTemplate(folder_with(tmp_path, BOMBS["nested loops"]))
    start = time.monotonic()
    with pytest.raises(ChatTemplateError, match="10 s"):
        template.render([USER])
    assert 9 < time.monotonic() - start < 60


def test_interrupted_render_does_not_answer_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(folder_with(tmp_path, "{{ messages[0].content }}"))
    assert template.render([{"role": "user", "content": "first"}]) == "first"
    process = template._worker._process
    assert process is not None and process.stdout is not None

    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(process.stdout, "readline", interrupted)
    with pytest.raises(KeyboardInterrupt):
        template.render([{"role": "user", "content": "second"}])
    assert process.poll() is not None
    assert template.render([{"role": "user", "content": "third"}]) == "third"


def test_worker_which_was_killed_is_replaced(tmp_path: Path) -> None:
    template = ChatTemplate(folder_with(tmp_path, "fine"))
    assert template.render([USER]) == "fine"
    process = template._worker._process
    assert process is not None
    process.kill()
    process.wait()
    assert template.render([USER]) == "fine"


def test_worker_ends_with_its_template(tmp_path: Path) -> None:
    template = ChatTemplate(folder_with(tmp_path, "fine"))
    template.render([USER])
    process = template._worker._process
    del template
    assert process is not None and process.poll() is not None


def test_program_ends_at_once_and_needs_no_main_guard(tmp_path: Path) -> None:
    program = (
        "import pathlib; from dflash_runtime.chat import ChatTemplate\n"
        f"template = ChatTemplate(pathlib.Path({str(folder_with(tmp_path, 'fine'))!r}))\n"
        "print(template.render([{'role': 'user', 'content': 'hi'}]))\n"
    )
    search = f"import sys; sys.path[:0] = {sys.path!r}\n"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", search + program], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_threads_share_a_template(tmp_path: Path) -> None:
    template = ChatTemplate(folder_with(tmp_path, "{{ messages[0].content }}"))
    wrong: list[str] = []

    def work(name: str) -> None:
        wrong.extend(name for _ in range(50) if template.render([{"role": "user", "content": name}]) != name)

    threads = [threading.Thread(target=work, args=(str(index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
