"""`headrace up` as a person has it: server, worker and lineage browser; a run from the form; links from its answers to
the browser; Ctrl-C; and all of it there again."""

from __future__ import annotations

import re
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from clicks import add_setting, choose, open_form, open_run, submitted
from installed import Installed, children, command_line, copy_mini, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # it starts all of it twice


def listens(url: str) -> bool:
    place = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((str(place.hostname), int(place.port or 0))) == 0


def test_a_run_from_the_form_leads_to_the_lineage_browser_and_all_survives_a_restart(own: Installed, page: Any) -> None:
    copy_mini(own.folder)
    (own.folder / "headrace.yaml").write_text("store: store\nrecipes: [mini.yaml]\n")
    own.start()
    assert own.process is not None
    for part in ("flows.service.local_server", "prefect worker start", "flows.lineage.browser"):
        assert own.child(part)
    addresses = own.addresses
    for url in (addresses["pages"], addresses["browser"]):
        assert f" {url}" in own.said
        assert urlsplit(url).hostname == "127.0.0.1"

    open_form(page, own)
    choose(page, "Only up to", "sft")
    add_setting(page, "steps=5")
    flow_run = submitted(page)
    run = own.ended(flow_run, 900)
    assert run.state_name == "Completed", run.state
    document = own.document(run.name)
    assert document is not None
    model = document["steps"]["sft"]["artifact"]

    open_run(page, own, flow_run)
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("mini-run").first.wait_for()
    page.goto(f"{addresses['pages']}/v2/artifacts/artifact/{own.pages(flow_run)['mini-run'].id}")
    follow(page, re.compile(model.removeprefix("sha256:")[:12]), f"{addresses['browser']}/artifact/{model}")
    assert "sft" in page.get_by_role("heading", level=1).inner_text()
    page.go_back()
    follow(page, run.name, f"{addresses['browser']}/run/{run.name}")
    assert run.name in page.get_by_role("heading", level=1).inner_text()

    left = children(own.process.pid)
    assert own.stop() == 0
    assert "Stopped." in own.said
    assert not [pid for pid in left if command_line(pid)]
    assert not listens(addresses["pages"])
    assert not listens(addresses["browser"])

    ports = [url.rpartition(":")[2] for url in (addresses["pages"], addresses["browser"])]
    own.start("--port", ports[0], "--browser-port", ports[1])
    assert own.addresses | {"pid": 0} == addresses | {"pid": 0}
    assert own.read(flow_run).state_name == "Completed"
    answer = str(own.pages(flow_run)["mini-run"].data)
    links = set(re.findall(r"\]\((http[^)]+)\)", answer))
    assert f"{addresses['browser']}/artifact/{model}" in links
    for link in links:
        assert httpx.get(link, follow_redirects=True, timeout=120).status_code == 200, link
    again = own.run("headrace/pipeline", recipe="mini.yaml", until=["sft"], overrides=["steps=5"])
    assert again.state is not None
    assert again.state.message == "4 steps: 4 cached"


def follow(page: Any, name: Any, address: str) -> None:
    """Click on a link; it leads to the address, whether in this page or a new one."""
    link = page.get_by_role("link", name=name).first
    link.wait_for()
    assert link.get_attribute("href") == address
    link.evaluate("link => { link.removeAttribute('target'); link.click(); }")
    page.wait_for_url(f"{address}**")
    until(lambda: page.locator("h1").count() > 0, 60, "the page of the browser")
