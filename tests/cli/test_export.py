"""`dflash export` as a user meets it: paths, options and messages; what it writes is tested in tests/exporter."""

import json
import sys
from pathlib import Path

import openvino as ov
import pytest
from click.testing import CliRunner, Result
from dflash_graphs.manifest import read_manifest
from dflash_runtime.cli import main

PROMPT = "def add(a, b):\n"


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_export_prints_the_path_and_spares_an_existing_bundle(pair_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ("export", pair_folder / "target", out, "--draft", "none", "--weight-format", "bf16", "--max-context", "64")
    done = run(*args)
    assert done.exit_code == 0, done.stderr
    assert Path(done.stdout.strip()) == out
    manifest = read_manifest(out)
    assert manifest.drafter is None and manifest.graphs["target"].weight_format == "bf16"

    again = run(*args)
    assert again.exit_code == 1 and str(out) in again.stderr
    assert run(*args, "--force").exit_code == 0

    report = json.loads(run("generate", out, PROMPT, "-n", "4", "--json").stdout)
    assert report["speculation"]["drafted"] == 0 and len(report["token_ids"]) == 4


def test_export_of_int4_with_a_data_set(pair_folder: Path, tmp_path: Path) -> None:
    out, texts = tmp_path / "out", tmp_path / "texts.jsonl"
    turns = [f"What is {i} plus {i}?" for i in range(60)]
    texts.write_text("\n".join(json.dumps({"turns": [turn]}) for turn in turns))
    pair = (pair_folder / "target", out, "--draft", pair_folder / "drafter", "--weight-format", "int4")
    options = ("--asym", "--group-size", "64", "--ratio", "0.9", "--awq", "--scale-estimation", "--dataset", texts)
    done = run("export", *pair, *options)
    assert done.exit_code == 0, done.stderr

    manifest = read_manifest(out)
    assert manifest.int4 is not None and manifest.int4.dataset == "texts.jsonl"
    layouts = manifest.graphs["target"].weights
    four = layouts["int4 asym, groups of 64"]
    could = 8 * 3 * 256 * 512 + 2 * (512 + 128 + 128 + 256) * 256  # MLPs and attention; the rest is recurrent
    assert 0.7 * could < four < 0.9 * could
    assert four + layouts["int8 sym, per row"] == could + 6 * (1024 + 512) * 256 // 2 + 6 * 256 * 256
    shown = run("show", out).stdout
    assert "asymmetric, groups of at most 64, ratio 0.9, AWQ and scale estimation with texts.jsonl" in shown
    assert f"{four:,} values int4 asym, groups of 64" in shown

    marks = ("DisablePrecisionConversion", "decompression")
    nodes = ov.Core().read_model(out / "target" / "openvino_model.xml").get_ops()
    assert {f"attention.3.{part}" for part in ("query", "output")} <= {node.get_friendly_name() for node in nodes}
    assert sum(any(key.startswith(marks) for key in dict(node.get_rt_info())) for node in nodes) > 100
    args = ("generate", out, PROMPT, "-n", "40", "--ignore-eos", "--json")
    drafted, plain = (json.loads(run(*args, *extra).stdout) for extra in ([], ["--no-draft"]))
    assert drafted["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--asym"], "no weight format is int4"),
        (["--weight-format", "int4", "--group-size", "100"], "choose one of 128, 64, 32"),
        (["--weight-format", "int4", "--ratio", "0"], "the ratio of int4 is 0"),
        (["--weight-format", "int4", "--awq"], "need a data set"),
        (["--weight-format", "int4", "--asym", "--backend", "onnx"], "takes symmetric int4 only"),
        (["--weight-format", "int4", "--awq", "--dataset", "short.txt"], "the data set has 1 tokens"),
        (["--weight-format", "int4", "--awq", "--dataset", "latin1.txt"], "is not UTF-8 text"),
    ],
)
def test_export_refuses_options_of_int4(
    pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("a")
    Path("latin1.txt").write_bytes(b"\xe9" * 1000)
    failed = run("export", pair_folder / "target", "out", "--draft", "none", *options)
    assert failed.exit_code == 1 and failed.stderr.startswith("Error: ") and message in failed.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latin1.txt", "short.txt"]


def test_export_of_nothing(tmp_path: Path) -> None:
    failed = run("export", tmp_path / "absent", tmp_path / "out", "--draft", "none")
    assert failed.exit_code == 1 and "absent" in failed.stderr and failed.stderr.startswith("Error: ")
    assert not list(tmp_path.iterdir())


def test_export_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "dflash_exporter", None)
    failed = run("export", tmp_path, tmp_path / "out", "--draft", "none")
    assert failed.exit_code == 1 and "pip install 'dflash-openvino[export]'" in failed.stderr
