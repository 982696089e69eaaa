"""Fixtures of the tests that run toy stages."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toy_stages import Toys


@pytest.fixture
def toys(tmp_path: Path) -> Toys:
    return Toys(tmp_path)
