"""What a person does on Prefect's pages, by clicks in a browser."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

from installed import Installed


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


def open_run(page: Any, installed: Installed, flow_run: UUID) -> None:
    """Open the page of a run."""
    page.goto(f"{installed.addresses['pages']}/v2/runs/flow-run/{flow_run}")


def click_cancel(page: Any) -> None:
    """On the page of a run: the menu, Cancel, and yes to the question."""
    page.get_by_role("button", name="Actions menu", exact=False).or_(
        page.locator("button:has(svg.lucide-ellipsis-vertical)")
    ).first.click()
    page.get_by_role("menuitem", name="Cancel").click()
    page.get_by_role("button", name=re.compile("Cancel.*")).last.click()
