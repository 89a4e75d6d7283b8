"""`dflash cache`: listing, pruning and clearing, in a folder of the test's own."""

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from dflash_runtime.cache import entries
from dflash_runtime.cli import main

SIZES = {"tuning/old.json": 100, "checked/large": 5000, "checked/folder/a": 3000, "checked/stamp": 10}


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["cache", *args])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache whose entries were used 4, 3, 2 and 1 days ago, beside something that is not ours."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    for days, (name, size) in zip((4, 3, 2, 1), SIZES.items(), strict=True):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (time.time() - days * 86400 - 60,) * 2)
    (tmp_path / "not-ours").write_text("precious")
    return tmp_path


def names() -> list[str]:
    return [entry.path.name for entry in entries()]


@pytest.mark.usefixtures("folder")
def test_list() -> None:
    lines = run("list").stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["tuning", "checked", "checked", "checked"]
    assert lines[1].split() == ["checked", "5", "kB", "3", "days", "large"]
    assert lines[-1].startswith("8 kB in ")
    rows = json.loads(run("list", "--json").stdout)
    assert [(row["kind"], row["size"]) for row in rows] == [(e.kind, e.size) for e in entries()]


def test_list_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "absent"))
    assert run("list").stdout == f"0 B in {tmp_path / 'absent'}\n"
    assert run("clear").stdout == "Removed 0 entries, 0 B.\n"


@pytest.mark.usefixtures("folder")
def test_prune_takes_the_longest_unused_first() -> None:
    assert run("prune", "--max-size", "9k").stdout == "Removed 0 entries, 0 B.\n"
    assert run("prune", "--max-size", "8.05k").stdout == "Removed 1 entries, 100 B.\n"
    assert names() == ["large", "folder", "stamp"]
    assert run("prune", "--max-size", "4k").exit_code == 0
    assert names() == ["folder", "stamp"]
    assert run("prune", "--max-size", "0").exit_code == 0
    assert names() == []


def test_clear_leaves_what_is_not_ours(folder: Path) -> None:
    outside = folder / "not-ours"
    (folder / "checked" / "link").symlink_to(outside)
    assert run("clear").stdout == "Removed 5 entries, 8 kB.\n"
    assert names() == [] and outside.read_text() == "precious"


@pytest.mark.parametrize("size", ["5X", "-1", "G", "1.2.3G", ""])
def test_sizes_that_are_none(size: str) -> None:
    failed = run("prune", "--max-size", size)
    assert failed.exit_code == 2 and "is no size" in failed.stderr
