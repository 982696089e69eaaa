"""The miniature, run whole once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from mini_runs import RUN, copy_project, headrace


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the whole miniature has been run once. Tests that change it take a copy."""
    folder = copy_project(tmp_path_factory.mktemp("finished"))
    headrace(folder, *RUN)
    return folder
