"""The commands as a user meets them: output, figures, messages and exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from dflash_graphs.manifest import MANIFEST, read_manifest
from dflash_runtime import Engine, GenerationConfig, load
from dflash_runtime import Result as Generated
from dflash_runtime.bundle import open_bundle
from dflash_runtime.chat import ChatTemplate
from dflash_runtime.cli import COMMANDS, demo, main

PROMPT = "def add(a, b):\n"
MODULE = [sys.executable, "-m", "dflash_runtime"]


def run(*args: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)


@pytest.fixture(scope="module")
def bundle(small_bundle: Callable[[str], Path]) -> Path:
    return small_bundle("f32")


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return load(bundle)


# the group


def test_help_and_show_load_no_engine(bundle: Path) -> None:
    code = """
import sys
from dflash_runtime.cli import main
main(sys.argv[1:], standalone_mode=False)
assert not {"openvino", "tokenizers", "dflash_exporter", "tqdm"} & set(sys.modules)
"""
    for args in (["--help"], ["show", bundle]):
        subprocess.run([sys.executable, "-c", code, *args], check=True, stdout=subprocess.DEVNULL)


def test_help_repeats_what_the_commands_say_of_themselves() -> None:
    listing = " ".join(run("--help").stdout.split())
    for name, text in COMMANDS.items():
        assert f"{name} {text}" in listing
        assert text in " ".join(run(name, "--help").stdout.split())


@pytest.mark.parametrize("line", ["nonsense", "generate", "generate bundle", "show", "export"])
def test_wrong_usage_exits_with_2(line: str) -> None:
    assert run(*line.split()).exit_code == 2


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    plain, debug = (subprocess.run([*MODULE, *o, "show", tmp_path], capture_output=True) for o in ([], ["--debug"]))
    assert plain.returncode == debug.returncode == 1
    assert plain.stderr.startswith(b"Error: ") and b"Traceback" not in plain.stderr
    assert b"Traceback" in debug.stderr and debug.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]


# generate


def test_text_goes_to_stdout_and_figures_to_stderr(bundle: Path, engine: Engine) -> None:
    expected = engine.generate(PROMPT, GenerationConfig(max_new_tokens=24))
    shown = run("generate", bundle, PROMPT, "-n", "24")
    assert shown.exit_code == 0
    assert shown.stdout == expected.text + "\n"
    assert "24 tokens" in shown.stderr and "acceptance length" in shown.stderr and "precision f32" in shown.stderr
    assert run("generate", bundle, PROMPT, "-n", "24", "--quiet").stderr == ""


def test_json_has_everything(bundle: Path, engine: Engine) -> None:
    expected = engine.generate(PROMPT, GenerationConfig(max_new_tokens=24, block_size=8))
    report = json.loads(run("generate", bundle, PROMPT, "-n", "24", "--block-size", "8", "--json").stdout)
    assert report["text"] == expected.text
    assert report["token_ids"] == expected.token_ids
    assert report["finish_reason"] == "length"
    assert report["prompt_tokens"] == expected.prompt_tokens
    assert set(report["timings"]) >= {"load", "first_token", "decode", "tokens_per_second"}
    speculation = report["speculation"]
    assert speculation["rounds"] == len(expected.rounds)
    assert speculation["drafted"] == sum(r.drafted for r in expected.rounds)
    assert speculation["accepted"] == sum(r.accepted for r in expected.rounds)
    assert len(speculation["survival"]) == max(r.drafted for r in expected.rounds)
    assert speculation["acceptance_length"] >= 1
    assert report["settings"]["precision"] == "f32"


def test_without_drafts_the_tokens_are_the_same(bundle: Path) -> None:
    args = ("generate", bundle, PROMPT, "-n", "40", "--ignore-eos", "--json")
    drafted, plain = (json.loads(run(*args, *extra).stdout) for extra in (["--block-size", "8"], ["--no-draft"]))
    assert drafted["token_ids"] == plain["token_ids"] and len(plain["token_ids"]) == 40
    assert drafted["speculation"]["drafted"] > 0 == plain["speculation"]["drafted"]
    assert plain["speculation"]["acceptance_length"] == 1.0 and plain["speculation"]["rounds"] == 39


def test_prompt_from_stdin_is_read_as_it_stands(bundle: Path) -> None:
    args = ("generate", bundle, "-n", "8", "--quiet")
    assert run(*args, "-", stdin=PROMPT.encode()).stdout == run(*args, PROMPT).stdout
    refused = run(*args, "-", stdin=b"\xff")
    assert refused.exit_code == 1 and "Unicode" in refused.stderr


def test_chat_template(bundle: Path, engine: Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a set?"}]
    prompt = engine.tokenizer.encode(ChatTemplate(bundle).render(messages), add_special_tokens=False)
    expected = engine.generate(prompt, GenerationConfig(max_new_tokens=16))
    args = ("generate", bundle, "What is a set?", "-n", "16", "--quiet")
    assert run(*args, "--chat", "--system", "Be brief.").stdout == expected.text + "\n"
    assert run(*args, "--system", "Be brief.").exit_code == 2


def test_missing_chat_template_is_said(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    (copy / "tokenizer_config.json").write_text("{}")
    failed = run("generate", copy, "Hello", "--chat")
    assert failed.exit_code == 1 and "no chat template" in failed.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "5000"], "exceed the context"),
        (["--max-context", "16", "-n", "16"], "exceed the context of 16"),
    ],
)
def test_impossible_requests_are_refused(bundle: Path, args: list[str], message: str) -> None:
    failed = run("generate", bundle, PROMPT, *args)
    assert failed.exit_code == 1 and failed.stderr.startswith("Error: ") and message in failed.stderr
    assert failed.stdout == ""


def _no_manifest(folder: Path) -> str:
    (folder / MANIFEST).unlink()
    return "is not a bundle"


def _damaged_manifest(folder: Path) -> str:
    (folder / MANIFEST).write_text("{")
    return "is damaged"


def _other_version(folder: Path) -> str:
    (folder / MANIFEST).write_text('{"format_version": 99}')
    return "format version 99"


def _changed_byte(folder: Path) -> str:
    with (folder / "target" / "openvino_model.bin").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))
    return "differs from what was exported"


def _cut_file(folder: Path) -> str:
    os.truncate(folder / "embeddings.bin", 1000)
    return "has 1000 bytes"


@pytest.mark.parametrize("damage", [_no_manifest, _damaged_manifest, _other_version, _changed_byte, _cut_file])
def test_broken_bundles_are_refused(copy: Path, damage: Callable[[Path], str]) -> None:
    open_bundle(copy)  # an earlier check must not vouch for what changes after it
    message = damage(copy)
    failed = run("generate", copy, PROMPT, "-n", "1")
    assert failed.exit_code == 1 and failed.stderr.startswith("Error: ") and message in failed.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")
def test_interrupt_and_closed_pipe(bundle: Path) -> None:
    command = [*MODULE, "generate", bundle, PROMPT, "--ignore-eos", "--no-draft", "-n", "4000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # a test run in the background of a shell hands down a SIGINT that is ignored
    process = subprocess.Popen(command, **pipes, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout is not None and process.stdout.read(1)  # it is decoding
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and stderr == b"Interrupted.\n"

    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None and process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) != 0


# show


def test_show(bundle: Path) -> None:
    shown = run("show", bundle)
    assert shown.exit_code == 0
    for words in ("6 delta, 2 attention", "block size 16, mask token 4095", "layers 1, 3, 5", "graph drafter, f32"):
        assert words in shown.stdout
    for name, file in read_manifest(bundle).files.items():
        assert f"{file.size:,}  {name}" in shown.stdout
    assert "past_rows" in shown.stdout and "next_state.*" in shown.stdout and "in 6 layers" in shown.stdout


def test_show_json_is_the_manifest(bundle: Path) -> None:
    assert json.loads(run("show", bundle, "--json").stdout) == json.loads((bundle / MANIFEST).read_text())


# demo


def test_demo(tmp_path: Path) -> None:
    start = time.perf_counter()
    shown = run("demo", "--keep", tmp_path / "kept")
    assert shown.exit_code == 0, shown.stderr
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert [row[0] for row in rows[1:4]] == list(demo.first_prompts())
    assert all(row[-1] == "yes" for row in rows[1:4])
    assert [row[0] for row in rows[6:9]] == list(demo.first_prompts())
    assert all(0 < float(row[1]) <= 1 for row in rows[6:9])
    assert read_manifest(tmp_path / "kept").drafter is not None
    assert time.perf_counter() - start < 60


def test_demo_fails_when_an_output_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Engine.generate

    def lie(engine: Engine, prompt: Sequence[int], config: GenerationConfig) -> Generated:
        result = honest(engine, prompt, config)
        result.token_ids[-1] += config.draft
        return result

    monkeypatch.setattr(demo, "_RUNS", 2)
    monkeypatch.setattr(Engine, "generate", lie)
    shown = run("demo")
    assert shown.exit_code == 1 and "changed the output" in shown.stderr
    assert shown.stdout.count("NO") == 3
