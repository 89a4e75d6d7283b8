"""The table of published pairs."""

import re

import pytest
from dflash_exporter.models import PAIRS, drafter_for
from dflash_graphs.errors import UnsupportedError


def test_the_table_is_sound() -> None:
    assert len({pair.drafter for pair in PAIRS}) == len(PAIRS)
    for pair in PAIRS:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", pair.target) and re.fullmatch(r"[\w.-]+/[\w.-]+", pair.drafter)
        assert pair.kind in ("dflash", "dflash2", "dspark")
        assert pair.block_size is None or 2 <= pair.block_size <= 16
        assert pair.supported or pair.obstacle
        assert pair.kind == "dflash" or not pair.supported


def test_what_is_supported() -> None:
    assert {pair.target for pair in PAIRS if pair.supported} == {
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3.5-4B",
        "Qwen/Qwen3.5-9B",
        "Qwen/Qwen3.5-27B",
        "Qwen/Qwen3.6-27B",
        "meta-llama/Llama-3.1-8B-Instruct",
    }


def test_a_supported_drafter_is_found() -> None:
    assert drafter_for("Qwen/Qwen3.5-9B").drafter == "z-lab/Qwen3.5-9B-DFlash"
    assert drafter_for("qwen/qwen3-8b@main").drafter == "z-lab/Qwen3-8B-DFlash-b16"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Qwen/Qwen3.5-35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash: mixture-of-experts target"),
        ("openai/gpt-oss-20b", "gpt-oss architecture"),
        ("Qwen/Qwen3.8-27B", "DFlash 2 drafter.*DSpark drafter"),
        ("Qwen/Qwen3-0.6B", "no drafter is known for Qwen/Qwen3-0.6B.*dflash models.*--draft OWNER/NAME.*--draft none"),
    ],
)
def test_why_there_is_none(target: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        drafter_for(target)
