"""The built wheel in a clean environment: what it contains, needs and can do without any extra."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

PROMPT = "def add(a, b):\n"


def _clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


def _run(*command: str | Path) -> str:
    environment = None if command[0] == sys.executable else _clean()  # a search path set here must not leak there
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, encoding="utf-8").stdout


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, repo)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel and nothing but what it requires."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    _run(programs / "python", "-m", "pip", "install", "--quiet", wheel)
    return programs


def test_contents(wheel: Path, repo: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("exporter/dflash_exporter", "graphs/dflash_graphs", "runtime/dflash_runtime"):
        paths = [path.relative_to((repo / folder).parent) for path in (repo / folder).rglob("*") if path.is_file()]
        caches = ("__pycache__", ".")  # of tools that ran there
        assert {p.as_posix() for p in paths if not any(part.startswith(caches) for part in p.parts)} <= set(names)
    for data in ("target/model.safetensors", "drafter/model.safetensors", "prompts.jsonl"):
        assert f"dflash_runtime/data/pair/{data}" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "dflash_exporter", "dflash_graphs", "dflash_runtime", "dflash_openvino",
    }  # fmt: skip


@pytest.mark.parametrize("python", ["here", "clean"])
def test_import_takes_no_training_stack(python: str, scripts: Path) -> None:
    code = """
import sys, dflash_runtime.engine, dflash_runtime.cli.generate
print(sorted({"torch", "transformers", "optimum", "nncf", "dflash_exporter"} & set(sys.modules)))
"""
    assert _run(sys.executable if python == "here" else scripts / "python", "-c", code).strip() == "[]"


def test_clean_environment_has_no_training_stack(scripts: Path) -> None:
    listed = json.loads(_run(scripts / "python", "-m", "pip", "list", "--format=json"))
    packages = {package["name"] for package in listed}
    assert "dflash-openvino" in packages
    assert not packages & {"torch", "transformers", "optimum", "nncf", "scipy"}


@pytest.mark.parametrize("program", [["dflash"], ["dflash-openvino"], ["python", "-m", "dflash_runtime"]])
def test_names_of_the_program(program: list[str], scripts: Path) -> None:
    command = [scripts / program[0], *program[1:]]
    assert "generate" in _run(*command, "--help")
    assert "version 0." in _run(*command, "--version")


def test_generates_what_the_test_environment_does(scripts: Path, small_bundle: Callable[[str], Path]) -> None:
    args = ("generate", small_bundle("f32"), PROMPT, "-n", "24", "--block-size", "8", "--json")
    here = json.loads(_run(sys.executable, "-m", "dflash_runtime", *args))
    clean = json.loads(_run(scripts / "dflash", *args))
    assert clean["token_ids"] == here["token_ids"] and len(here["token_ids"]) == 24
    assert clean["speculation"]["drafted"] > 0


def test_structured_output_says_what_to_install(
    wheel: Path, scripts: Path, small_bundle: Callable[[str], Path]
) -> None:
    command = [scripts / "dflash", "generate", small_bundle("f32"), PROMPT, "--regex", "[0-9]{3}", "--quiet"]
    refused = subprocess.run(command, env=_clean(), capture_output=True, encoding="utf-8")
    assert refused.returncode == 1 and "pip install 'dflash-openvino[structured]'" in refused.stderr
    _run(scripts / "python", "-m", "pip", "install", "--quiet", f"{wheel}[structured]")
    assert len(_run(*command).strip()) == 3


@pytest.mark.slow
def test_the_runtime_suite_passes_on_the_wheel(scripts: Path, repo: Path, tmp_path: Path) -> None:
    shutil.copytree(repo / "tests", tmp_path / "tests")  # away from the sources, so that only the wheel can serve
    shutil.copyfile(repo / "pyproject.toml", tmp_path / "pyproject.toml")
    _run(scripts / "python", "-m", "pip", "install", "--quiet", "pytest")
    suites = [tmp_path / "tests" / part for part in ("runtime", "exactness/test_lookup.py", "unit/test_stop.py")]
    where = ("--rootdir", tmp_path, "-c", tmp_path / "pyproject.toml")
    shown = _run(scripts / "python", "-m", "pytest", "-q", *where, *suites)
    assert " passed" in shown and "failed" not in shown
