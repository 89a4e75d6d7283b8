"""Caches in another precision than the products: f16 is exact, and u8, which is not, is reported as such."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dflash_graphs.errors import RequestError
from dflash_runtime import GenerationConfig, load
from dflash_runtime.cli import main
from dflash_runtime.verify import draft_independence, self_tests


def test_f16_is_exact(small_bundle: Callable[[str], Path], golden: list[dict[str, Any]]) -> None:
    engine = load(small_bundle("f32"), kv_precision="f16", max_context=1024)
    found = [*self_tests(engine), *draft_independence(engine, "a", golden[2]["prompt_ids"], 64, seed=2)]
    assert engine.is_exact and [finding for finding in found if not finding.is_exact] == []


def test_u8_is_reported(small_bundle: Callable[[str], Path], golden: list[dict[str, Any]]) -> None:
    bundle, prompt = small_bundle("f32"), golden[2]["prompt_ids"]
    engine, exact = load(bundle, kv_precision="u8", max_context=1024), load(bundle, max_context=1024)
    assert exact.is_exact and not engine.is_exact and 0 < engine.models.difference < 0.1
    few = GenerationConfig(max_new_tokens=4)
    assert engine.generate(prompt, few).token_ids == exact.generate(prompt, few).token_ids  # close all the same
    shown = CliRunner().invoke(main, ["generate", str(bundle), "x", "-n", "2", "--kv-precision", "u8"])
    assert shown.exit_code == 0 and "kv precision u8" in shown.stderr and "not bit-exact" in shown.stderr
    shown = CliRunner().invoke(main, ["verify", str(bundle), "--tokens", "2", "--kv-precision", "u8"])
    assert shown.exit_code == 1 and "as it may with a u8 cache" in shown.stderr and "NOT exact" in shown.stdout


@pytest.mark.parametrize(("backend", "known"), [("openvino", "f32, f16, u8"), ("onnx", "in f32")])
def test_a_cache_the_products_do_not_take_is_refused(
    small_bundle: Callable[..., Path], backend: str, known: str
) -> None:
    with pytest.raises(RequestError, match=known):
        load(small_bundle("f32", backend), precision="f32", kv_precision="bf16")
