"""`dflash bench`, `dflash tune` and `dflash demo --race` as a user meets them."""

import csv
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from dflash_runtime import load
from dflash_runtime.bench import Comparison
from dflash_runtime.bundle import open_bundle
from dflash_runtime.cli import bench, main, race, tune
from dflash_runtime.device import Settings
from dflash_runtime.generation import Result as Generated
from dflash_runtime.loop import Round
from dflash_runtime.prompts import BUILT_IN
from dflash_runtime.recommended import RECOMMENDED, recommend, write_recommended
from dflash_runtime.tuning import Seconds, Tuning
from msgspec.structs import replace


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def bundle(small_bundle: Callable[[str], Path]) -> Path:
    return small_bundle("f32")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"cores": 8, "peak_gflops_per_core": 60.0, "bandwidth_gb_per_second": 40.0}))
    return path


# bench


def test_bench_prints_tables_and_writes_csv_and_charts(bundle: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk.jsonl"
    talk.write_text(json.dumps({"id": "t", "turns": ["What is a set?", "And a list?"]}))
    csv_file, plot = tmp_path / "out.csv", tmp_path / "out.svg"
    args = ("bench", bundle, "--dataset", BUILT_IN, "--dataset", talk, "--max-samples", "2", "-n", "24")
    shown = run(*args, "--csv", csv_file, "--plot", plot)
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert [sum(line.startswith(name) for line in lines) for name in ("prompts ", "talk ", "average ")] == [4, 4, 4]
    rows = list(csv.DictReader(csv_file.open()))
    assert [(row["dataset"], row["request"]) for row in rows] == [
        ("prompts", "1"), ("prompts", "2"), ("talk", "t/1"), ("talk", "t/2")
    ]  # fmt: skip
    assert all(float(row["speedup"]) > 0 and row["differing"] == "0" for row in rows)
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_bench_json_at_a_fixed_width(bundle: Path) -> None:
    args = ("bench", bundle, "--dataset", BUILT_IN, "--max-samples", "2", "-n", "24", "--ignore-eos")
    found = json.loads(run(*args, "--block-size", "8", "--json").stdout)
    pooled = found["datasets"]["prompts"]["pooled"]
    assert found["is_complete"] and found["block_size"] == 8 and found["settings"]["precision"] == "f32"
    assert pooled["requests"] == 2 and pooled["tokens"] == 48 and pooled["differing"] == 0
    assert pooled["accepted_tokens"] <= pooled["draft_tokens"] <= 7 * pooled["drafts"]
    assert pooled["acceptance_length"] == pytest.approx(1 + pooled["accepted_tokens"] / pooled["drafts"])
    assert len(pooled["survival"]) == 15 and pooled["survival"][7:] == [0.0] * 8
    assert pooled["cost_saved"] == pytest.approx(1 - 1 / pooled["speedup"])


def test_bench_of_a_bundle_without_a_drafter_drafts_by_lookup(pair_folder: Path, tmp_path: Path) -> None:
    assert run("export", pair_folder / "target", tmp_path / "out", "--draft", "none").exit_code == 0
    repetitive = tmp_path / "repetitive.jsonl"
    repetitive.write_text(json.dumps({"prompt": "x = [1, 2, 3]\n" * 12}))
    args = ("bench", tmp_path / "out", "--dataset", repetitive, "-n", "24", "--ignore-eos", "--json")
    found = json.loads(run(*args).stdout)
    assert found["drafting"] == "lookup" and found["average"]["differing"] == 0
    assert found["average"]["accepted_tokens"] > 0
    refused = run(*args, "--drafting", "dflash")
    assert refused.exit_code == 1 and "no drafter" in refused.stderr


@pytest.mark.parametrize("drafting", ["dflash", "lookup", "dflash+lookup"])
def test_bench_drafts_as_asked(bundle: Path, drafting: str) -> None:
    args = ("bench", bundle, "--dataset", BUILT_IN, "--max-samples", "1", "-n", "24", "--drafting", drafting)
    shown = run(*args)
    assert shown.exit_code == 0 and f"\ndrafts by {drafting}\n" in shown.stdout


def test_bench_reports_settings_that_are_not_exact(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "compare", _changed)
    shown = run("bench", bundle, "--dataset", BUILT_IN, "--max-samples", "1", "--kv-precision", "u8")
    assert shown.exit_code == 0 and "not bit-exact with these settings" in shown.stdout


def _changed(engine: Any, dataset: Any, encoder: Any, config: Any) -> Iterator[Comparison]:
    plain = Generated(token_ids=[1, 2], rounds=[Round(0, 0, (2,), 0.0, 0.0)])
    yield Comparison(dataset.name, "x", plain, Generated(token_ids=[1, 3], rounds=plain.rounds))


def _interrupted(engine: Any, dataset: Any, encoder: Any, config: Any) -> Iterator[Comparison]:
    plain = Generated(token_ids=[1, 2], rounds=[Round(0, 0, (2,), 0.0, 0.0)])
    yield Comparison(dataset.name, "x", plain, plain)
    raise KeyboardInterrupt


def test_a_changed_text_and_an_interrupt_both_print_what_was_measured(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ("bench", bundle, "--dataset", BUILT_IN, "--max-samples", "1", "--json")
    monkeypatch.setattr(bench, "compare", _changed)
    shown = run(*args)
    assert shown.exit_code == 1 and "changed a text" in shown.stderr
    assert json.loads(shown.stdout)["average"]["differing"] == 1
    monkeypatch.setattr(bench, "compare", _interrupted)
    shown = run(*args)
    assert shown.exit_code == 130
    assert not json.loads(shown.stdout)["is_complete"]


def test_a_prompt_too_long_ends_the_run_with_what_was_measured(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "short"}) + "\n" + json.dumps({"prompt": "word " * 300}))
    shown = run("bench", bundle, "--dataset", path, "-n", "8", "--max-context", "128")
    assert shown.exit_code == 1 and "exceed the context of 128" in shown.stderr
    assert "\naverage " in shown.stdout


def test_bench_wants_prompts(bundle: Path) -> None:
    assert run("bench", bundle).exit_code == 2
    missing = run("bench", bundle, "--dataset", "nothing.jsonl")
    assert missing.exit_code == 1 and "neither a file nor one of" in missing.stderr


# simulation


def test_simulation_on_this_machine(bundle: Path, tmp_path: Path) -> None:
    shown = run("bench", bundle, "--simulate", "article", "--plot", tmp_path / "out.svg")
    assert shown.exit_code == 0, shown.stderr
    assert len(shown.stdout.splitlines()) == 1 + 16 + 1
    assert "of a token's cost" in shown.stdout.splitlines()[-1]
    assert ElementTree.parse(tmp_path / "out.svg").getroot().tag.endswith("svg")


def test_simulation_of_a_described_machine(bundle: Path, machine: Path) -> None:
    found = json.loads(run("bench", bundle, "--simulate", "article", "--machine", machine, "--json").stdout)
    assert sum(found["survival"]) == pytest.approx(5.93)
    assert found["widths"][-1]["emitted"] == pytest.approx(6.93)
    seconds = [width["verify_seconds"] for width in found["widths"]]
    assert seconds == sorted(seconds)
    assert found["best_width"] == max(found["widths"], key=lambda width: width["speedup"])["rows"]
    assert run("bench", bundle, "--simulate", "nonsense").exit_code == 1


# tune


def test_tune_prints_costs_and_keeps_the_best_settings(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "_REPEATS", 1)
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    shown = run("tune", copy, "--threads", "1", "--precision", "f32", "--kv-precision", "f16,u8", "--write")
    assert shown.exit_code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["milliseconds", "by", "rows", "1", "2", "3", "4", "6", "8", "12", "16", "change"]
    tried = ("f32, KV f16, 1 threads", "f32, KV u8, 1 threads (not bit-exact)")
    for line, (label, part) in zip(lines[1:5], product(tried, ("verify", "draft")), strict=True):
        assert line.startswith(f"{label}, {part} ")
    assert "recommended: f32, KV f16, 1 threads; " in shown.stdout  # never what is not exact, however fast
    settings = load(copy).models.settings
    assert (settings.threads, settings.kv_precision) == (1, "f16")
    assert load(copy, threads=2).models.settings.kv_precision == "f32"  # what is asked for comes first
    assert "\ntuned    precision f32, kv precision f16, threads 1" in run("show", copy).stdout


def test_recommended_settings_of_another_machine_count_for_nothing(
    bundle: Path, small_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    here = recommend(open_bundle(copy), 1, "f32", "f16", 9.0)
    for other in (replace(here, cpu="another"), replace(here, cores=999), replace(here, version="0")):
        write_recommended(copy, other)
        assert load(copy).models.settings.kv_precision == "f32"
    write_recommended(copy, replace(here, bundle="another"))
    assert "for other contents" in run("show", copy).stdout
    (copy / RECOMMENDED).write_text("{")
    damaged = run("generate", copy, "x", "-n", "1")
    assert damaged.exit_code == 1 and "dflash tune --write" in damaged.stderr


def test_tune_recommends_nothing_that_is_not_exact(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tune, "_REPEATS", 1)
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    shown = run("tune", copy, "--kv-precision", "u8", "--write")
    assert shown.exit_code == 1 and "nothing was written" in shown.stderr
    assert "none are bit-exact" in shown.stdout and not (copy / RECOMMENDED).exists()
    shown = run("tune", copy, "--precision", "f32", "--kv-precision", "bf16")
    assert shown.exit_code == 1 and "f32 with KV f32, f16, u8" in shown.stderr


def test_tune_recommends_what_is_clearly_faster_and_exact() -> None:
    settings = Settings(precision="f32", kv_precision="f32", quantization_group=0, threads=1)
    tuning = Tuning(settings=settings, minimum_rows=2, verify=Seconds({2: 1.0}, 0.0), draft=Seconds({}, 0.0))

    def chosen(*rates: float) -> int:
        exact = [tune._Trial((i, "f32", "f32"), rate > 0, tuning, [9.0, abs(rate)]) for i, rate in enumerate(rates)]
        return exact.index(tune._chosen(exact))  # type: ignore[arg-type]

    assert chosen(1.0, 1.04, 0.9) == 0 and chosen(1.0, 1.2, 1.21) == 1
    assert chosen(-5.0, 1.0, -9.0) == 1  # below 0: not exact
    assert tune._chosen([]) is None


def test_tune_sweeps_block_sizes_on_prompts(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_REPEATS", 1)
    monkeypatch.setattr(tune, "_SAMPLES", 1)
    shown = run("tune", bundle, "--prompts", BUILT_IN, "--kv-precision", "f32", "--drafting", "dflash+lookup")
    assert re.search(r"tokens/s by block size +plain ", shown.stdout) and "measured on the prompts" in shown.stdout
    assert run("tune", bundle, "--threads", "0").exit_code == 2
    assert run("tune", bundle, "--precision", "f31").exit_code == 2


# race


def test_race(bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "81")
    prompt = json.loads(BUILT_IN.read_text("utf-8").split("\n")[0])["prompt"]
    race.race(bundle, [prompt])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plain ") and "DFlash " in lines[0] and lines[0].count("tok/s") == 2
    text = [line.split(" │ ") for line in lines[1:-2]]
    assert len(text) > 3 and all(left.rstrip() == right.rstrip() for left, right in text)
    assert lines[-2].startswith("the same text, ")


def test_lanes_colour_what_was_drafted_and_wrap(bundle: Path) -> None:
    lane = race._Lane("plain", load(bundle), "x", draft=False)
    lane.cells = [("a", False), ("b", True), ("c", True), ("d", True), ("\n", True), ("e", False)]
    assert lane.lines(3) == ["a\x1b[32mbc\x1b[0m", "\x1b[32md\x1b[0m  ", "e  "]
