"""The options of a request: where each value ends up, and that nothing given leaves the bundle's defaults."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from dflash_graphs.errors import RequestError
from dflash_runtime import GenerationConfig, StructuredOutput, load
from dflash_runtime.chat import ChatTemplate
from dflash_runtime.cli import main
from dflash_runtime.cli.options import request_options, requested

DEFAULTS = GenerationConfig(temperature=0.6, top_k=20, top_p=0.95)


def parse(*args: str) -> GenerationConfig:
    found: list[GenerationConfig] = []

    @click.command()
    @request_options
    def command(**options: Any) -> None:
        found.append(requested(DEFAULTS, options))

    done = CliRunner().invoke(command, list(args))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.stderr
    return found[0]


def test_nothing_given_leaves_the_defaults() -> None:
    assert parse() == DEFAULTS


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("-n 7 --min-new-tokens 3", {"max_new_tokens": 7, "min_new_tokens": 3}),
        ("--temperature 0 --top-k 0 --top-p 1 --min-p 0.1", {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0.1}),
        (
            "--repetition-penalty 1.1 --presence-penalty -1 --frequency-penalty 0.5",
            {"repetition_penalty": 1.1, "presence_penalty": -1.0, "frequency_penalty": 0.5},
        ),
        ("--seed 0 --stop a --stop b", {"seed": 0, "stop": ("a", "b")}),
        ("--regex [ab]+", {"structured": StructuredOutput("regex", "[ab]+")}),
        ("--truncate left --ignore-eos --no-draft", {"truncate": "left", "ignore_eos": True, "draft": False}),
        ("--draft --block-size 8", {"draft": True, "block_size": 8}),
    ],
)
def test_values(args: str, expected: dict[str, Any]) -> None:
    config = parse(*args.split())
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.top_k == expected.get("top_k", 20)


def test_schema_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "integer"}')
    assert parse("--json-schema", str(path)).structured == StructuredOutput("json_schema", '{"type": "integer"}')
    assert parse("--grammar", str(path)).structured == StructuredOutput("grammar", '{"type": "integer"}')
    with pytest.raises(RequestError, match="one of them"):
        parse("--json-schema", str(path), "--regex", "a")


def test_a_grammar_is_followed(small_bundle: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    for name, text in (("a.lark", 'start: "<" /[0-9]{4}/ ">"'), ("a.gbnf", 'root ::= "<" [0-9]{4} ">"')):
        (tmp_path / name).write_text(text)
        args = ["generate", str(small_bundle("f32")), "x", "--quiet", "--grammar", str(tmp_path / name)]
        assert re.fullmatch(r"<[0-9]{4}>\n", CliRunner().invoke(main, args).stdout)


def test_variables_of_the_chat_template(small_bundle: Callable[[str], Path]) -> None:
    folder = small_bundle("f32")
    args = ["generate", str(folder), "Hello", "-n", "4", "--json"]

    def prompt_tokens(*options: str) -> int:
        return int(json.loads(CliRunner().invoke(main, [*args, "--chat", *options]).stdout)["prompt_tokens"])

    messages = [{"role": "user", "content": "Hello"}]
    render = ChatTemplate(folder).render
    with_thought, without = (len(load(folder).encode(messages, enable_thinking=on)) for on in (True, False))
    assert render(messages, enable_thinking=True) != render(messages, enable_thinking=False)
    assert prompt_tokens() == prompt_tokens("--thinking") == with_thought < without
    assert prompt_tokens("--no-thinking") == prompt_tokens("--template-option", "enable_thinking=false") == without
    assert prompt_tokens("--template-option", "enable_thinking=no") == with_thought  # a text, which is not false
    assert prompt_tokens("--template-option", "add_generation_prompt=false") < with_thought
    for wrong in (["--no-thinking"], ["--chat", "--template-option", "enable_thinking"]):
        refused = CliRunner().invoke(main, [*args, *wrong])
        assert refused.exit_code == 2 and refused.stdout == ""
    refused = CliRunner().invoke(main, [*args, "--chat", "--template-option", "tools=3"])
    assert refused.exit_code == 1 and "tools must be a list" in refused.stderr


def test_logprobs_are_reported(small_bundle: Callable[[str], Path]) -> None:
    args = ["generate", str(small_bundle("f32")), "def add(a, b):\n", "-n", "5", "--logprobs", "2"]
    report = json.loads(CliRunner().invoke(main, [*args, "--json"]).stdout)
    assert [one["token"] for one in report["logprobs"]] == report["token_ids"]
    assert all(len(one["top"]) == 2 and one["logprob"] <= one["top"][0][1] <= 0 for one in report["logprobs"])
    refused = CliRunner().invoke(main, args)
    assert refused.exit_code == 2 and "--json" in refused.stderr


def test_out_of_range_is_said(small_bundle: Callable[[str], Path]) -> None:
    failed = CliRunner().invoke(main, ["generate", str(small_bundle("f32")), "x", "--min-p", "2"])
    assert failed.exit_code == 1 and failed.stderr.startswith("Error: min_p must be from 0 to 1")
