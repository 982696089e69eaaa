"""A small store and its pages: in this process for their content, and served by the real command for Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_store
from served_pages import Pages, Served, pages_of, start_browse, stop

from stages.artifacts import open_store


@pytest.fixture(scope="session")
def _small(tmp_path_factory: pytest.TempPathFactory) -> small_store.SmallStore:
    folder = tmp_path_factory.mktemp("browser")
    return small_store.build(open_store(folder / "store"), folder / "files")


@pytest.fixture(scope="session")
def pages(_small: small_store.SmallStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """The pages of the small store; no test changes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield pages_of(_small)


@pytest.fixture
def own_pages(_small: small_store.SmallStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    """The pages of a copy of the small store that the test may change."""
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copytree(_small.store.url, tmp_path / "store")
    small = small_store.SmallStore(
        open_store(tmp_path / "store"),
        tmp_path / "files",
        _small.source,
        {run: dict(made) for run, made in _small.made.items()},
        dict(_small.keys),
    )
    return pages_of(small)


@pytest.fixture(scope="session")
def served(_small: small_store.SmallStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A copy of the small store, served; tests may add to it."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(_small.store.url, folder / "store")
    made = {run: dict(steps) for run, steps in _small.made.items()}  # what a test adds is not in the others' store
    small = small_store.SmallStore(open_store(folder / "store"), folder / "files", _small.source, made)
    process, url = start_browse(folder / "store", folder / "cache")
    try:
        yield Served(url, small)
    finally:
        stop(process)
