"""What several test folders share: where things lie, and small bundles exported once per session."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import dflash_runtime
import pytest
from dflash_exporter import ExportRequest, export

REPO = Path(__file__).parents[1]
SHARED = REPO.parent / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if SHARED.is_dir():
        return
    for item in items:
        if item.get_closest_marker("shared"):
            item.add_marker(pytest.mark.skip(reason=f"{SHARED} is absent"))


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def repo() -> Path:
    return REPO


@pytest.fixture(scope="session")
def shared() -> Path:
    return SHARED


@pytest.fixture(scope="session")
def pair_folder() -> Path:
    return Path(dflash_runtime.__file__).parent / "data" / "pair"  # of the wheel, where that is what is installed


@pytest.fixture(scope="session")
def small_bundle(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Export the small pair in a weight format for a backend, once; copy the folder before changing it."""

    @functools.cache
    def make(weight_format: str = "f32", backend: str = "openvino") -> Path:
        output = tmp_path_factory.mktemp("bundles") / weight_format
        target, drafter = pair_folder / "target", pair_folder / "drafter"
        request = ExportRequest(
            target=target, drafter=drafter, output=output, weight_format=weight_format, backend=backend
        )
        return export(request)

    return make
