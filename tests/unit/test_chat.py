"""Chat templates: the text transformers renders, and errors which name their cause."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from dflash_graphs.errors import BundleError, RequestError
from dflash_runtime import chat as module
from dflash_runtime.chat import ChatTemplate, ChatTemplateError

PAIR = Path(module.__file__).parent / "data" / "pair" / "target"
QWEN3_5 = Path(__file__).resolve().parents[3] / "shared" / "tokenizers" / "qwen3.5"

USER = {"role": "user", "content": "Grüße <b>&</b> 👩‍👩‍👧"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Température à un lieu <place>",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Åre", "days": [1, 2], "hi": True}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "Be brief. "}, USER],
    "turns": [
        USER,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello "},
        {"role": "user", "content": " and now?"},
    ],
    "null fields": [{**USER, "tool_calls": None, "name": None}],
    "reasoning": [USER, {"role": "assistant", "content": "a", "reasoning": "because"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    "tools": [
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": '{"celsius": -3}'},
        {"role": "tool", "content": '{"celsius": -4}'},
        {"role": "assistant", "content": "-3"},
        USER,
    ],
}
TEXT_ONLY = [name for name in CONVERSATIONS if name not in ("parts", "tools")]
# as one package carries them, which `make test` installs for nothing else
PUBLISHED = ("qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "llama3_1", "llama3_2")
SINGLE_CALLS: dict[str, list[dict[str, Any]]] = {  # Llama's templates refuse several calls at once
    "call": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "-3"}, USER],
    "structured result": [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "weather", "content": {"celsius": -3}},
    ],
    "arguments as text": [
        USER,
        {"role": "assistant", "content": "wait", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": [1, "two"]},
    ],
    "no user": [{"role": "system", "content": "Be brief."}],
}

# Template, variables, text. The messages are those of "turns".
TRICKY: dict[str, tuple[str, dict[str, Any], str]] = {
    "loop controls": (
        "{% for n in range(9) %}{% if n == 1 %}{% continue %}{% endif %}{% if n == 4 %}{% break %}{% endif %}"
        "{{ n }}{% endfor %}",
        {},
        "023",
    ),
    "namespace": (
        "{% set ns = namespace(n=0, self='s') %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}"
        "{{ ns.n }}{{ ns.self }}{{ ns.other is defined }}",
        {},
        "6sFalse",
    ),
    "macro and call": (
        "{% macro turn(role, mark='#') %}[{{ mark }}{{ role }}:{{ caller() if caller else '-' }}]{% endmacro %}"
        "{% call turn('u') %}body{% endcall %}{{ turn('a', mark='!') }}",
        {},
        "[#u:body][!a:-]",
    ),
    "tojson": (
        "{{ data | tojson }}\n{{ data | tojson(indent=1, sort_keys=true) }}\n"
        "{{ data | tojson(separators=(',', ':'), ensure_ascii=true) }}",
        {"data": {"z": "ü<&>'", "a": [1, 2.5, None, True]}},
        '{"z": "ü<&>\'", "a": [1, 2.5, null, true]}\n'
        '{\n "a": [\n  1,\n  2.5,\n  null,\n  true\n ],\n "z": "ü<&>\'"\n}\n'
        '{"z":"\\u00fc<&>\'","a":[1,2.5,null,true]}',
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}\n"
        "<{{ loop.index }}>{% endgeneration %}{{ x is defined }}{% else %}.{% endif %}{% endfor %}",
        {},
        ".<2>False.",
    ),
    "whitespace": (
        "  {% if true %}\n    a\n  {%- endif %}\n\n  {{- ' b' -}}  \n c  \n   {# gone #}\nd\n"
        "{%+ if true %} e{% endif %}\n",
        {},
        "    a bc  \nd\n e",
    ),
    "lines in literals": (
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<s>\nname\n'}}{% endif %}\n"
        "{{m['role'] + '\n' + m['content'][-3:] + '</s>' + '\n'}}{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<s>\n' }}{% endif %}",
        {},
        "<s>\nname\nuser\n👩‍👧</s>\nassistant\nlo </s>\nuser\now?</s>\n<s>\n",
    ),
    "special tokens": (
        "{{ bos_token is defined }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}",
        {},
        "False<|im_end|><|endoftext|>False",
    ),
    "option over special token": (
        "{{ eos_token }}{{ enable_thinking }}",
        {"eos_token": "E", "enable_thinking": False},
        "EFalse",
    ),
    "strings": (
        "{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}|{x}'.format('b', x=1) }}{{ 'a<b'.split('<')[-1] ~ 'x' * 2 }}"
        "{{ messages[0].content[:5].upper() }}{{ messages[::-1] | map(attribute='role') | join(',') }}",
        {},
        "a-007   b|1bxxGRÜSSEuser,assistant,user",
    ),
    "tests and filters": (
        "{{ messages is sequence }}{{ messages[0] is mapping }}{{ none is none }}{{ 'é' | length }}{{ '<' | safe }}"
        "{{ dict(a=1, **{'b': 2}) | items | list }}{{ dict.fromkeys('ab', 0) }}{{ missing.__class__ is defined }}",
        {"missing": "x"},
        "TrueTrueTrue1<[('a', 1), ('b', 2)]{'a': 0, 'b': 0}False",
    ),
    "no tools": (
        "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ tools }}",
        {},
        "TrueTrueTrueNone",
    ),
    "reasoning names": (
        "{{ messages[1].reasoning_content is defined }}{{ 'thinking' in messages[1] }}{{ messages | length }}",
        {},
        "FalseFalse3",
    ),
}


def folder_with(folder: Path, template: Any, **names: str) -> Path:
    """The pair's tokenizer with another template, and maybe more named tokens, in `tokenizer_config.json`."""
    config = json.loads((PAIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes((PAIR / "tokenizer.json").read_bytes())
    config |= {"chat_template": template, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@functools.cache
def load_reference(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def reference(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"add_generation_prompt": True, **options}
    return str(load_reference(folder).apply_chat_template(messages, tokenize=False, **options))


def assert_equals_transformers(folder: Path, messages: list[dict[str, Any]]) -> None:
    template = ChatTemplate(folder)
    for options in (
        {},
        {"add_generation_prompt": False},
        {"enable_thinking": True},
        {"enable_thinking": False},
        {"tools": [WEATHER, WEATHER], "enable_thinking": False},
        {"documents": [{"title": "t", "text": "x"}]},
    ):
        assert template.render(messages, **options) == reference(folder, messages, **options), options


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_text_equals_transformers(name: str) -> None:
    assert_equals_transformers(PAIR, CONVERSATIONS[name])


@pytest.mark.shared
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_text_equals_transformers_for_qwen3_5(name: str) -> None:
    assert_equals_transformers(QWEN3_5, CONVERSATIONS[name])


def outcome(render: Callable[..., str], messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The text, or with what words the messages are refused."""
    try:
        return render(messages, **options)
    except ChatTemplateError as error:
        return str(error).removeprefix("chat template: ")
    except Exception as error:  # transformers lets through whatever Jinja and Python raise
        return str(error) if type(error).__name__ == "TemplateError" else f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_equals_transformers_for_published_templates(tmp_path: Path, name: str) -> None:
    try:
        file = Path(str(distribution("trl").locate_file(f"trl/chat_templates/{name}.jinja")))
    except PackageNotFoundError:
        pytest.skip("the published templates are not installed; `make test` does it")
    folder = folder_with(tmp_path, file.read_text(encoding="utf-8"), bos_token="<|begin_of_text|>")
    template = ChatTemplate(folder)
    offers: tuple[dict[str, Any], ...] = (
        {},
        {"tools": []},
        {"tools": [WEATHER]},
        {"tools": [WEATHER, WEATHER], "tools_in_user_message": False},
    )
    switches = ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"add_generation_prompt": False})
    for (conversation, messages), offer, switch in product((CONVERSATIONS | SINGLE_CALLS).items(), offers, switches):
        options = {**offer, **switch}
        expected = outcome(functools.partial(reference, folder), messages, options)
        assert outcome(template.render, messages, options) == expected, (conversation, options)


def test_thinking_switch_of_the_pair() -> None:
    template = ChatTemplate(PAIR)
    turn = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == turn
    assert template.render(messages, enable_thinking=False) == turn + "\n</think>\n\n"


@pytest.mark.parametrize("name", TRICKY)
def test_tricky_template(tmp_path: Path, name: str) -> None:
    source, options, expected = TRICKY[name]
    folder = folder_with(tmp_path, source)
    assert ChatTemplate(folder).render(CONVERSATIONS["turns"], **options) == expected
    assert reference(folder, CONVERSATIONS["turns"], **options) == expected


def test_reasoning_is_found_under_each_of_its_names(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "{% for m in messages %}{{ m | tojson }}{% endfor %}")
    for name in ("reasoning", "thinking", "reasoning_content"):
        messages = [USER, {"role": "assistant", "content": "a", name: "because", "tool_calls": None}]
        text = ChatTemplate(folder).render(messages)
        assert text == reference(folder, messages)
        assert text.count('"because"') == (3 if name == "reasoning" else 2)


def test_strftime_now_is_the_local_date(tmp_path: Path) -> None:
    template = ChatTemplate(folder_with(tmp_path, "{{ strftime_now('%d %B %Y') }}"))
    before, text, after = (datetime.now(), template.render([USER]), datetime.now())
    assert text in {moment.strftime("%d %B %Y") for moment in (before, after)}


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    folder = folder_with(tmp_path, named)
    for options, expected in (({}, "plain"), ({"tools": [WEATHER]}, "1 tools"), ({"tools": []}, "0 tools")):
        assert ChatTemplate(folder).render([USER], **options) == expected == reference(folder, [USER], **options)
    only = ChatTemplate(folder_with(tmp_path, [{"name": "rag", "template": "x"}]))
    with pytest.raises(ChatTemplateError, match="rag"):
        only.render([USER])


def test_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "of the configuration")
    (folder / "chat_template.jinja").write_text("of the file é", encoding="utf-8")
    assert ChatTemplate(folder).render([USER]) == "of the file é" == reference(folder, [USER])


@pytest.mark.parametrize("template", [None, "", []])
def test_folder_without_template_is_refused(tmp_path: Path, template: object) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate(folder_with(tmp_path, template))


@pytest.mark.parametrize("template", [["x"], [{"name": "default"}], 3])
def test_damaged_template_list_is_refused(tmp_path: Path, template: object) -> None:
    with pytest.raises(BundleError, match="chat_template"):
        ChatTemplate(folder_with(tmp_path, template))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate: ' ~ messages[0].role) }}", "Roles must alternate: user"),
        ("a\n{% if %}", "line 2"),
        ("{{ messages.nothing.further }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% include 'other' %}", "loader"),
    ],
)
def test_error_of_the_template_is_reported(tmp_path: Path, source: str, message: str) -> None:
    template = ChatTemplate(folder_with(tmp_path, source))
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match=message):
            template.render([USER])


@pytest.mark.parametrize(
    "options",
    [
        {"tools": ["weather"]},
        {"tools": 5},
        {"documents": ["text"]},
        {"tools": [{"name": object()}]},
        {"moment": datetime(2026, 1, 1)},
    ],
)
def test_data_which_is_not_json_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"object|JSON"):
        ChatTemplate(PAIR).render([USER], **options)


@pytest.mark.parametrize("messages", [[], ["text"]])
def test_messages_must_be_objects(messages: list[Any]) -> None:
    with pytest.raises(RequestError, match="messages"):
        ChatTemplate(PAIR).render(messages)


def test_options_cannot_replace_the_messages() -> None:
    options: dict[str, Any] = {"messages": [], "self": 1, "template": "x"}
    assert "hi" in ChatTemplate(PAIR).render([{"role": "user", "content": "hi"}], **options)
