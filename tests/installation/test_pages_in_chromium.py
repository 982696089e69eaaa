"""The pages as a person uses them, in a headless Chromium: the form by clicks, a running and a finished run, Cancel.

With HEADRACE_SCREENSHOTS set to a folder, the pages are photographed into it (`docs/images` shows them).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from clicks import add_setting, choose, click_cancel, open_form, open_run, submitted
from installed import Installed, gone, until

pytestmark = pytest.mark.slow


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
    open_run(page, installed, flow_run)
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("toy-better-progress").first.wait_for()
    photograph(page, installed, "prefect-running")
    click_cancel(page)
    run = installed.ended(flow_run)
    assert run.state is not None
    assert run.state.is_cancelled()
    gone(flow_run)

    run = installed.run("headrace/pipeline", recipe="toy.yaml", overrides=["better.rate=0.63"])
    open_run(page, installed, run.id)
    page.get_by_role("tab", name="Artifacts").click()
    photograph(page, installed, "prefect-finished")
    answer = installed.pages(run.id)["toy-run"]
    page.goto(f"{pages}/v2/artifacts/artifact/{answer.id}")
    page.get_by_text("The model").first.wait_for()
    photograph(page, installed, "prefect-answers")

    picture = installed.pages(run.id)["toy-loss"]
    page.goto(f"{pages}/v2/artifacts/artifact/{picture.id}")
    drawn = page.locator("img[src^='data:image/svg']").first
    drawn.wait_for()
    assert drawn.evaluate("image => image.decode().then(() => image.naturalWidth)") == 680  # two panels of 340
    photograph(page, installed, "prefect-curves")
