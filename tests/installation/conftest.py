"""One `headrace up` for a test run: started by the first test that asks for it. Toy stages keep its runs short."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "pipeline"))

from installed import Installed, copy_mini, prepared
from receiver import Receiver

LONG = 120_000  # milliseconds; the pages are large, and the machine may be busy


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    """Where the shared installation sends its notices."""
    running = Receiver()
    yield running
    running.close()


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Installed]:
    """A running installation that tests share; each uses settings of its own, so that nothing is cached for it."""
    installation = prepared(tmp_path_factory.mktemp("installed"))
    installation.environment["HEADRACE_WEBHOOK_URL"] = receiver.url
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


@pytest.fixture(scope="module")
def mini(installed: Installed) -> Iterator[Installed]:
    """The shared installation, where every step of the quickstart in miniature (`mini.yaml`) has been run."""
    copy_mini(installed.folder)
    run = installed.run_recipe("mini.yaml", limit=1500)
    assert run.state_name == "Completed", run.state
    yield installed
    Path(installed.folder / "mini.yaml").unlink()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, Debian's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page of it."""
    page = browser.new_page(viewport={"width": 1280, "height": 1120})
    page.set_default_timeout(LONG)
    yield page
    page.close()
