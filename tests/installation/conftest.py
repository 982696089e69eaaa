"""One `headrace up` for a test run: started by the first test that asks for it. Toy stages keep its runs short."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "pipeline"))

from installed import Installed, prepared


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """A running installation that tests share; each uses settings of its own, so that nothing is cached for it."""
    installation = prepared(tmp_path_factory.mktemp("installed"))
    installation.start()
    yield installation
    assert installation.stop() == 0, installation.said


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Installed]:
    """An installation of a test's own, not started yet."""
    installation = prepared(tmp_path / "own")
    yield installation
    if installation.process is not None:
        installation.stop()
