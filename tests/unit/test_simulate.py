"""Survival curves, predictions and rooflines against values worked out by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dflash_graphs.errors import RequestError
from dflash_graphs.manifest import File, Graph, Manifest, read_manifest
from dflash_runtime.simulate import (
    Machine,
    Profile,
    Work,
    best,
    bundle_work,
    predict,
    read_machine,
    read_profile,
    roofline,
    survival_curve,
)
from msgspec.structs import replace

# survival curves


def test_the_article_goes_through_its_points_smoothly_and_has_its_mean() -> None:
    curve = survival_curve(read_profile("article"))
    assert len(curve) == 15
    assert curve[[0, 4, 14]] == pytest.approx([0.8583, 0.5144, 0.1181])
    assert curve.sum() == pytest.approx(5.93)
    assert np.all(np.diff(curve) < 0)
    conditional = curve[1:] / curve[:-1]
    assert np.all(np.abs(np.diff(conditional)) < 0.01)  # no kink at the known points


def test_a_whole_curve_is_taken_as_it_is() -> None:
    shares = [0.9, 0.5, 0.5, 0.2]
    assert survival_curve(Profile(positions=4, survival=dict(enumerate(shares)))) == pytest.approx(shares)
    assert survival_curve(Profile(positions=1, survival={0: 0.7})) == pytest.approx([0.7])


def test_without_a_mean_equal_steps_are_equal_factors() -> None:
    curve = survival_curve(Profile(positions=5, survival={0: 0.8, 4: 0.05}))
    assert curve == pytest.approx(0.8 * (0.05 / 0.8) ** (np.arange(5) / 4))


@pytest.mark.parametrize("mean", [3.0, 4.0, 5.0, 6.0])
def test_any_possible_mean_is_met_by_a_falling_curve(mean: float) -> None:
    profile = Profile(positions=10, survival={0: 0.9, 5: 0.4, 9: 0.05}, mean_accepted=mean)
    if mean in (3.0, 6.0):
        with pytest.raises(RequestError, match="are possible"):
            survival_curve(profile)
    else:
        curve = survival_curve(profile)
        assert curve.sum() == pytest.approx(mean) and np.all(np.diff(curve) <= 0)


@pytest.mark.parametrize(
    "survival", [{}, {0: 0.9}, {1: 0.9, 3: 0.5}, {0: 0.5, 3: 0.6}, {0: 1.1, 3: 0.6}, {0: 0.5, 3: 0.0}]
)
def test_what_is_no_survival_curve_is_refused(survival: dict[int, float]) -> None:
    with pytest.raises(RequestError, match=r"position|survival"):
        survival_curve(Profile(positions=4, survival=survival))


def test_profiles_and_machines_from_files(tmp_path: Path) -> None:
    profile = tmp_path / "own.json"
    profile.write_text(json.dumps({"positions": 2, "survival": {"0": 0.5, "1": 0.25}}))
    assert read_profile(str(profile)).survival == {0: 0.5, 1: 0.25}
    with pytest.raises(RequestError, match="built-in profiles are: article"):
        read_profile("nonsense")
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps({"cores": 2, "peak_gflops_per_core": 50, "bandwidth_gb_per_second": 10}))
    assert read_machine(machine).cores == 2
    for text in ("{", '{"cores": 2}', '{"positions": 2, "survival": {}, "mean": 3}'):
        machine.write_text(text)
        with pytest.raises(RequestError, match=r"machine.json cannot be used"):
            read_machine(machine)


# predictions


def test_prediction_by_hand() -> None:
    widths = predict([0.8, 0.5, 0.1], verify=[10.0, 10.0, 12.0, 20.0], draft=[9.9, 2.0, 3.0, 4.0])
    assert [width.rows for width in widths] == [1, 2, 3, 4]
    assert [width.emitted for width in widths] == pytest.approx([1.0, 1.8, 2.3, 2.4])
    assert [width.speedup for width in widths] == pytest.approx([1.0, 1.8 / 1.2, 2.3 / 1.5, 2.4 / 2.4])
    assert best(widths).rows == 3


def test_where_drafting_cannot_pay_plain_decoding_is_best() -> None:
    assert best(predict([0.1, 0.01], verify=[1.0, 2.0, 3.0], draft=[0.0, 1.0, 1.0])).rows == 1


# rooflines


def test_roofline_is_bound_by_bytes_then_by_products() -> None:
    machine = Machine(cores=2, peak_gflops_per_core=50.0, bandwidth_gb_per_second=10.0)
    work = [Work(weight_bytes=1_000_000_000, parameters=1_000_000_000), Work(500_000_000, 1_000_000_000)]
    assert roofline(work, machine, 1) == pytest.approx(0.1 + 0.05)
    assert roofline(work, machine, 4) == pytest.approx(0.1 + 0.08)
    assert roofline(work, machine, 10) == pytest.approx(0.2 + 0.2)


def test_work_of_a_bundle(small_bundle: Callable[[str], Path]) -> None:
    for weight_format, size in (("f32", 4.0), ("bf16", 2.0), ("int8", 1.0)):
        manifest = read_manifest(small_bundle(weight_format))
        verifying, drafting = bundle_work(manifest)
        assert len(verifying) == 2 and len(drafting) == 3
        head = verifying[1]
        assert drafting[2] == head  # all ids of so small a vocabulary are drafted
        assert head.parameters == pytest.approx(4096 * 256, rel=0.03)
        assert head.weight_bytes == pytest.approx(4096 * 256 * size, rel=0.03)


def test_work_of_a_bundle_without_a_drafter(small_bundle: Callable[[str], Path]) -> None:
    manifest: Manifest = read_manifest(small_bundle("f32"))
    graph = Graph(file="target/model.xml", weight_format="int4", inputs=(), outputs=())
    graphs = {"target": graph, "head": graph}
    files = {"target/model.bin": File(size=50, sha256="")}
    assert bundle_work(replace(manifest, drafter=None, graphs=graphs, files=files)) == (
        [Work(50, 100), Work(50, 100)],
        [],
    )
