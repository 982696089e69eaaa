"""The pages as a person uses them, in a headless Chromium: the form by clicks, a running and a finished run, Cancel.

With HEADRACE_SCREENSHOTS set to a folder, the pages are photographed into it (`docs/images` shows them).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from installed import Installed, gone, until

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium (apt-get install chromium)"),
]
LONG = 120_000  # milliseconds; the pages are large, and the machine may be busy


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1280, "height": 1120})
    page.set_default_timeout(LONG)
    yield page
    page.close()


# A photograph shows a folder that could be anybody's in place of the test's own.
RENAME = """([from, to]) => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode()); ) node.nodeValue = node.nodeValue.replaceAll(from, to);
  for (const area of document.querySelectorAll("textarea")) area.value = area.value.replaceAll(from, to);
}"""


def photograph(page: Any, installed: Installed, name: str) -> None:
    if folder := os.environ.get("HEADRACE_SCREENSHOTS"):
        page.wait_for_timeout(15_000)  # the graph of tasks is drawn slowly
        page.evaluate(RENAME, [str(installed.folder), "/srv/headrace"])
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def open_form(page: Any, installed: Installed) -> None:
    """From the list of deployments to the form of `pipeline`, as a person goes."""
    page.goto(f"{installed.addresses['pages']}/v2/deployments")
    link = page.get_by_role("link", name="pipeline", exact=True).first
    link.wait_for()
    link.evaluate("link => link.click()")  # the table redraws itself, and is never still on a busy machine
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Custom run").click()
    page.get_by_text("Changed settings").wait_for()


def choose(page: Any, title: str, *options: str) -> None:
    """Choose in the select or multi-select of a field."""
    page.get_by_role("button", name=f"Select {title}", exact=True).click()
    for option in options:
        page.get_by_role("option", name=option, exact=True).click()
    page.keyboard.press("Escape")


def add_setting(page: Any, text: str) -> None:
    page.get_by_role("button", name="Add item").click()
    page.locator("textarea").first.fill(text)


def submitted(page: Any) -> UUID:
    """Press Submit; the id of the run that this made."""
    with page.expect_response(lambda answer: "create_flow_run" in answer.url) as made:
        page.get_by_role("button", name="Submit").click()
    return UUID(made.value.json()["id"])


def test_a_run_is_started_from_the_form_by_clicks_with_changed_fields_and_finishes(
    page: Any, installed: Installed
) -> None:
    open_form(page, installed)
    choose(page, "Only up to", "better")
    choose(page, "Run again", "model")
    add_setting(page, "better.rate=0.61")
    photograph(page, installed, "prefect-form")
    flow_run = submitted(page)
    run = installed.ended(flow_run)
    assert run.state_name == "Completed", run.state
    assert run.parameters["until"] == ["better"]
    assert run.parameters["force"] == ["model"]
    assert run.parameters["overrides"] == ["better.rate=0.61"]
    assert set(installed.tasks(flow_run, 3)) == {"words", "model", "better"}


def test_a_line_that_is_no_setting_is_refused_in_the_form(page: Any, installed: Installed) -> None:
    open_form(page, installed)
    add_setting(page, "faster please")
    with page.expect_response(re.compile("validate|create_flow_run")) as answer:
        page.get_by_role("button", name="Submit").click()
    refused = answer.value
    assert refused.status >= 400 or refused.json()["valid"] is False
    page.get_by_text("Changed settings").wait_for()  # the form is still there


def test_a_running_pipeline_is_cancelled_from_its_page_and_a_finished_one_shows_its_answers(
    page: Any, installed: Installed
) -> None:
    pages = installed.addresses["pages"]
    flow_run = installed.submit(
        "headrace/pipeline",
        recipe="toy.yaml",
        overrides=["better.rate=0.62", "better.max_steps=3000", "better.pause=0.2"],
    )
    until(lambda: installed.running_step(installed.read(flow_run).name, "better"), 300, "better runs")
    until(lambda: "toy-better-progress" in installed.pages(flow_run), 120, "progress")
    page.goto(f"{pages}/v2/runs/flow-run/{flow_run}")
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("toy-better-progress").first.wait_for()
    photograph(page, installed, "prefect-running")
    page.get_by_role("button", name="Actions menu", exact=False).or_(
        page.locator("button:has(svg.lucide-ellipsis-vertical)")
    ).first.click()
    page.get_by_role("menuitem", name="Cancel").click()
    page.get_by_role("button", name=re.compile("Cancel.*")).last.click()
    run = installed.ended(flow_run)
    assert run.state is not None
    assert run.state.is_cancelled()
    gone(flow_run)

    run = installed.run("headrace/pipeline", recipe="toy.yaml", overrides=["better.rate=0.63"])
    page.goto(f"{pages}/v2/runs/flow-run/{run.id}")
    page.get_by_role("tab", name="Artifacts").click()
    photograph(page, installed, "prefect-finished")
    answer = installed.pages(run.id)["toy-run"]
    page.goto(f"{pages}/v2/artifacts/artifact/{answer.id}")
    page.get_by_text("The model").first.wait_for()
    photograph(page, installed, "prefect-answers")
