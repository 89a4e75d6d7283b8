"""`dflash verify` and the golden comparison: clean bundles pass, and every injected fault is caught."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from dflash_exporter import ExportRequest, export
from dflash_runtime import Engine, load, openvino_models, recurrent
from dflash_runtime.certificate import CERTIFICATE, Certificate, Finding, read_certificate
from dflash_runtime.cli import main
from dflash_runtime.cli import verify as command
from dflash_runtime.verify import certify, draft_independence, self_tests

Departures = Callable[[Engine], list[str]]


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.fixture
def bundle(small_bundle: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_bundle("f32"), tmp_path / "bundle"))


def _prove(engine: Engine, prompt: list[int]) -> list[Finding]:
    return [*self_tests(engine), *draft_independence(engine, "a", prompt, 64, seed=3)]


def _certify(engine: Engine, prompt: list[int]) -> Certificate:
    return certify(engine, "", _prove(engine, prompt), is_complete=True)


# the command


def test_a_clean_bundle_passes_and_is_certified(bundle: Path) -> None:
    assert read_certificate(bundle) is None
    shown = run("verify", bundle, "--tokens", "24", "--certify")
    assert shown.exit_code == 0, shown.stderr
    for check in ("row counts", "alignments", "dflash", "random", "adversarial", "true"):
        assert f"\n{check} " in shown.stdout
    assert "smallest exact row count: 1" in shown.stdout
    certificate = read_certificate(bundle)
    assert certificate is not None and certificate.is_exact and certificate.is_complete
    assert certificate.tokens == 4 * 4 * 24
    assert certificate.settings["precision"] == "f32" and len(certificate.prompts_sha256) == 64
    assert "exact over 384 tokens" in run("show", bundle).stdout
    assert run("generate", bundle, "x", "-n", "1").exit_code == 0  # the bundle is still what it was


def test_a_certificate_of_other_contents_counts_for_nothing(bundle: Path, small_bundle: Callable[[str], Path]) -> None:
    assert run("verify", bundle, "--tokens", "2", "--certify").exit_code == 0
    other = Path(shutil.copytree(small_bundle("bf16"), bundle.parent / "other"))
    shutil.copy(bundle / CERTIFICATE, other)
    assert "for other contents" in run("show", other).stdout
    (other / CERTIFICATE).write_text("{")
    assert run("show", other).exit_code == 1


def test_own_prompts_and_json(bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "own.jsonl"
    prompts.write_text(json.dumps({"prompt": "def f(x):"}) + "\n" + json.dumps({"turns": ["What is a set?"]}))
    report = json.loads(run("verify", bundle, "--tokens", "8", "--prompts", prompts, "--json").stdout)
    assert report["certificate"]["is_exact"] and report["certificate"]["tokens"] == 2 * 4 * 8
    assert report["certificate"]["findings"][2]["check"] == "dflash"


def test_compression_is_judged_by_another_bundle(bundle: Path, small_bundle: Callable[[str], Path], repo: Path) -> None:
    text = repo / "README.md"
    args = ("verify", bundle, "--tokens", "2", "--quality", text, "--against", small_bundle("int8"), "--json")
    quality = json.loads(run(*args).stdout)["quality"]
    assert 0.8 < quality["top1_agreement"] < 1.0
    assert quality["perplexity"] == pytest.approx(quality["other_perplexity"], rel=0.1)
    assert quality["predictions"] > 500
    assert "int8 weights cost" in run("verify", small_bundle("int8"), "--tokens", "2").stdout
    assert run("verify", bundle, "--against", bundle).exit_code == 2


def test_the_reference_agrees(bundle: Path, pair_folder: Path) -> None:
    pytest.importorskip("transformers")
    args = ("verify", bundle, "--tokens", "16", "--reference", pair_folder / "target", "--json")
    for judged in json.loads(run(*args).stdout)["reference"]:
        assert judged["first_divergence"] is None and judged["kl_divergence"] < 1e-9
    assert "cannot load" in run("verify", bundle, "--reference", bundle.parent).stderr


def test_interrupt_prints_what_was_checked(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Iterator[Finding]:
        yield next(draft_independence(*args, **kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "draft_independence", interrupted)
    shown = run("verify", bundle, "--tokens", "8", "--certify")
    assert shown.exit_code == 130 and read_certificate(bundle) is None  # an earlier one is worth more
    assert "\ndflash " in shown.stdout and "\nrandom " not in shown.stdout and "interrupted" in shown.stdout


# injected faults


def _leave_a_rejected_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recurrent layers keep the row after the last accepted one in its place, whenever there is one."""
    commit = recurrent.WindowLayers.commit

    def faulty(self: Any, count: int) -> None:
        commit(self, count)
        last = self.pending[0] - 1
        rejected = self._graph.layers_rows("k", (len(self.recent), self.kept["k"].shape[2]), count, count + 1)
        if rejected.shape[1] and last >= 0:
            self.kept["k"][:, last] = rejected[:, 0]

    monkeypatch.setattr(recurrent.WindowLayers, "commit", faulty)


def _shift_verified_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifies wider than plain decoding's write keys and values one position early."""
    place = openvino_models._PagedCache.place
    monkeypatch.setattr(
        openvino_models._PagedCache, "place", lambda self, past, rows: place(self, past - (past > 0 and rows > 4), rows)
    )


def _shift_drafter_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's context rows are written one position late."""
    write = openvino_models._PagedCache.write
    monkeypatch.setattr(
        openvino_models._PagedCache, "write", lambda self, name, start, rows: write(self, name, start + 1, rows)
    )


@pytest.mark.parametrize("inject", [_leave_a_rejected_row, _shift_verified_keys])
def test_a_fault_of_the_target_is_found(
    engine: Engine, golden: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, inject: Callable[..., None]
) -> None:
    prompt = golden[0]["prompt_ids"]
    assert _certify(engine, prompt).is_exact
    with monkeypatch.context() as patch:
        inject(patch)
        found = _certify(engine, prompt)
    assert not found.is_exact
    first = next(finding.first for finding in found.findings if finding.check == "random")
    assert first is not None and first.position > len(prompt) and first.largest > 0 and first.top2_gap > 0


def test_a_fault_ends_the_command_with_1(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _shift_verified_keys(monkeypatch)
    shown = run("verify", bundle, "--tokens", "24")
    assert shown.exit_code == 1 and "drafting changed the result" in shown.stderr
    assert "NOT exact" in shown.stdout and "top-2 gap" in shown.stdout and "position" in shown.stdout


def test_a_shifted_drafter_context_changes_no_output_but_the_recorded_acceptance(
    engine: Engine, departures: Departures, golden: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _shift_drafter_context(monkeypatch)
    engine.context.clear()
    assert _certify(engine, golden[0]["prompt_ids"]).is_exact
    found = departures(engine)
    assert found and not any(departure.startswith("tokens") for departure in found)
    engine.context.clear()


def test_features_of_one_layer_late_change_no_output_but_the_recorded_acceptance(
    pair_folder: Path, departures: Departures, tmp_path: Path
) -> None:
    drafter = Path(shutil.copytree(pair_folder / "drafter", tmp_path / "drafter"))
    config = json.loads((drafter / "config.json").read_text())
    late = [layer + 1 for layer in config["dflash_config"]["target_layer_ids"]]
    config["dflash_config"]["target_layer_ids"] = late
    (drafter / "config.json").write_text(json.dumps(config))
    request = ExportRequest(
        target=pair_folder / "target", drafter=drafter, output=tmp_path / "bundle", weight_format="f32"
    )
    engine = load(export(request), max_context=1024)
    assert np.array_equal(engine.bundle.manifest.drafter and engine.bundle.manifest.drafter.taps, late)
    found = departures(engine)
    assert found and not any(departure.startswith("tokens") for departure in found)
