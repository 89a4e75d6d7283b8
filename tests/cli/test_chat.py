"""`dflash chat`: what is typed, what is answered, and Ctrl-C."""

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from dflash_runtime import Engine, GenerationConfig, load
from dflash_runtime.cli import main

CONFIG = GenerationConfig(max_new_tokens=12)


def chat(bundle: Path, typed: str, *args: str) -> Result:
    return CliRunner().invoke(main, ["chat", str(bundle), "-n", "12", *args], input=typed)


@pytest.fixture(scope="module")
def bundle(small_bundle: Callable[[str], Path]) -> Path:
    return small_bundle("f32")


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Engine:
    return load(bundle)


def test_answers_go_to_stdout_and_the_conversation_goes_on(bundle: Path, engine: Engine) -> None:
    session = engine.chat("Be brief.")
    expected = [session.say(text, CONFIG).text for text in ("What is a set?", "And a list?")]
    done = chat(bundle, "What is a set?\n\nAnd a list?\n", "--system", "Be brief.")
    assert done.exit_code == 0 and done.stdout == "".join(text + "\n" for text in expected)
    assert "> " in done.stderr


@pytest.mark.parametrize(
    "typed",
    ["one\\\ntwo\\\nthree\n", '"""one\ntwo\nthree"""\n', '"""\none\ntwo\nthree\n"""\n'],
    ids=["backslash", "quotes", "quotes apart"],
)
def test_several_lines(bundle: Path, engine: Engine, typed: str) -> None:
    message = typed.strip("\n").replace("\\", "").replace('"""', "")
    assert chat(bundle, typed).stdout == engine.chat().say(message, CONFIG).text + "\n"


def test_commands(bundle: Path, engine: Engine) -> None:
    first = engine.chat().say("What is a set?", CONFIG).text + "\n"
    done = chat(bundle, "What is a set?\n/stats\n/reset\n/help\n/nothing now\nWhat is a set?\n/exit\nnever read\n")
    assert done.exit_code == 0 and done.stdout == first * 2
    for words in ("12 tokens", "of context in use", "starts anew", "/reset  forget", "There is no /nothing"):
        assert words in done.stderr


def test_options_are_those_of_generate(bundle: Path, engine: Engine) -> None:
    config = GenerationConfig(max_new_tokens=12, temperature=1.2, top_k=40, seed=3, stop=["e"])
    expected = engine.chat().say("Hello", config).text + "\n"
    args = ("--temperature", "1.2", "--top-k", "40", "--seed", "3", "--stop", "e")
    assert chat(bundle, "Hello\n", *args, "--drafting", "lookup").stdout == expected
    assert "top_p must be from 0 to 1" in chat(bundle, "", "--top-p", "2").stderr


def test_variables_of_the_chat_template(bundle: Path, engine: Engine) -> None:
    expected = [engine.chat(enable_thinking=on).say("Hello", CONFIG).text + "\n" for on in (True, False)]
    assert expected[0] != expected[1]
    for option, text in zip(("--thinking", "--no-thinking"), expected, strict=True):
        assert chat(bundle, "Hello\n", option, "--template-option", "system=unused").stdout == text


def test_a_message_too_long_is_refused_and_the_conversation_goes_on(bundle: Path, engine: Engine) -> None:
    done = chat(bundle, f"{'word ' * 300}\nHello\n", "--max-context", "64")
    assert done.exit_code == 0 and "exceed the context of 64" in done.stderr
    assert done.stdout == engine.chat().say("Hello", CONFIG).text + "\n"


def test_without_chat_template(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    (copy / "tokenizer_config.json").write_text("{}")
    failed = chat(copy, "Hello\n")
    assert failed.exit_code == 1 and "no chat template" in failed.stderr and failed.stdout == ""
    assert "is not a bundle" in chat(tmp_path, "").stderr


class Terminal:
    """A program on a pseudo terminal."""

    def __init__(self, *command: str) -> None:
        import pty

        self._shown = ""
        self.process, self.fd = pty.fork()
        if self.process == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in what a shell runs in the background
            os.execv(command[0], command)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Read up to and including `text`."""
        end = time.monotonic() + 60
        while text not in self._shown:
            assert time.monotonic() < end, f"{text!r} did not come, but: {self._shown}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self._shown += os.read(self.fd, 4096).decode(errors="replace")
        self._shown = self._shown.partition(text)[2]

    def exit_code(self) -> int:
        """Wait for the end of the program, reading what it still says."""
        with contextlib.suppress(OSError):  # how a pseudo terminal tells that nobody holds its other end
            self.wait_for("anything that never comes")
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


@pytest.mark.skipif(os.name == "nt", reason="pseudo terminals of POSIX")
def test_interrupt_stops_the_answer_and_not_the_program(bundle: Path) -> None:
    options = ("-n", "4000", "--ignore-eos", "--no-draft")
    terminal = Terminal(sys.executable, "-m", "dflash_runtime", "chat", str(bundle), *options)
    terminal.wait_for("> ")
    terminal.type("Tell me about chess\n")
    terminal.wait_for("think>")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    terminal.type("half a mess")
    terminal.wait_for("half a mess")
    time.sleep(0.1)  # CPython sees a signal that meets the reading of a key with the next key only
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D to leave")
    terminal.wait_for("> ")  # what is typed ahead of a prompt, line editing does not see as a key: Ctrl-D not at all
    terminal.type("/stats\n")
    terminal.wait_for("context in use")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
