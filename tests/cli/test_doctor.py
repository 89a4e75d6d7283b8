"""`dflash doctor` and `dflash models`: what they find and how they end."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from dflash_graphs.manifest import MANIFEST
from dflash_runtime import doctor
from dflash_runtime.cli import main


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture(autouse=True)
def one_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each format takes half a second; the tests that are about them ask for all."""
    monkeypatch.setattr(doctor, "FORMATS", ("f32",))


def finding(name: str, bundle: Path | None = None, max_context: int | None = None) -> doctor.Finding:
    return next(found for found in doctor.examine(bundle, max_context) if found.name == name)


def test_a_sound_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FORMATS", ("f32", "bf16", "f16", "int8", "int4"))
    done = run("doctor", "--json")
    assert done.exit_code == 0, done.stdout
    found = {row["name"]: row for row in json.loads(done.stdout)}
    assert found["versions"]["values"]["python"].startswith(f"{sys.version_info[0]}.")
    assert "FP32" in found["cpu"]["values"]["openvino_capabilities"]
    for weight_format in doctor.FORMATS:
        values = found[f"{weight_format} weights"]["values"]
        assert 0 < values["error"] < values["allowed_error"] / 2
        assert values["kernel"] != "an unknown kernel"
        assert values["settings"]["INFERENCE_PRECISION_HINT"] in ("f32", "bf16")


def test_the_text_says_the_same() -> None:
    done = run("doctor")
    assert done.exit_code == 0
    names = ["versions", "command", "cpu", "f32 weights", "memory"]
    lines = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert [line[9:23].rstrip() for line in lines] == names
    assert "products in f32 by" in done.stdout and "GB available" in done.stdout


class _Corrupt:
    """A compiled product that gets one result in a thousand wrong."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, rows: Any) -> list[Any]:
        result = np.array(self._compiled(rows)[0])
        result.reshape(-1)[::1000] *= 1.1
        return [result]


def test_wrong_products_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = doctor._compiled
    monkeypatch.setattr(doctor, "_compiled", lambda *args: _Corrupt(compiled(*args)))
    done = run("doctor")
    assert done.exit_code == 1
    assert "broken   f32 weights" in done.stdout and "products are wrong" in done.stdout


def test_a_failing_openvino_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(doctor, "_compiled", fail)
    done = run("doctor")
    assert done.exit_code == 1 and "OpenVINO fails: no such kernel" in done.stdout


def test_which_command_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert finding("command").state == "warning" and "python -m dflash_runtime" in finding("command").advice

    script = tmp_path / ("dflash.bat" if sys.platform == "win32" else "dflash")
    script.write_text("from dflash.cli import main\n")
    script.chmod(0o755)
    other = finding("command")
    assert (other.state, other.values["ours"]) == ("warning", False)
    assert f"{script} belongs to another package" in other.text and "dflash-openvino" in other.advice

    script.write_text("from dflash_runtime.cli import main\n")
    assert (finding("command").state, finding("command").text) == ("ok", str(script))


def test_a_bundle_and_the_memory(small_bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = small_bundle("f32")
    found = finding("bundle", bundle, 1000)
    assert found.state == "ok" and "for 1000 tokens" in found.text
    weights = sum(path.stat().st_size for path in bundle.rglob("openvino_model.bin"))
    assert found.values["weights"] == weights
    assert finding("bundle", bundle, 2000).values["caches"] > found.values["caches"]

    monkeypatch.setattr(doctor, "available_memory", lambda: weights)
    assert run("doctor", bundle).exit_code == 1
    small = finding("bundle", bundle, 1000)
    assert small.state == "broken" and "--max-context" in small.advice


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    done = run("doctor", tmp_path)
    assert done.exit_code == 1 and f"has no {MANIFEST}" in done.stdout


def test_models() -> None:
    listing = run("models").stdout
    assert any(line.split()[:2] == ["Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash"] for line in listing.splitlines())
    assert "no: gpt-oss architecture" in listing
    rows = json.loads(run("models", "--json").stdout)
    assert {row["supported"] for row in rows} == {True, False}
    assert len(rows) == len(listing.splitlines()) - 1
