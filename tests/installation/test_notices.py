"""What the webhook is told of runs that ask, are refused or are killed, and who may read its address."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import Installed, children, engine_of, kill, until
from receiver import TOKEN, Receiver

NIGHT = "nightly/production"


def test_nobody_reads_the_address_of_the_webhook(installed: Installed) -> None:
    with installed.client() as client:
        blocks = client.request("POST", "/block_documents/filter", json={"include_secrets": False}).text
        automations = client.request("POST", "/automations/filter", json={}).text
    assert "headrace-webhook" in blocks
    assert TOKEN not in blocks
    assert TOKEN not in automations
    for log in (installed.home / "logs").rglob("*.log"):
        assert TOKEN not in log.read_text(errors="replace"), log
    assert installed.process is not None
    for pid in children(installed.process.pid):
        assert TOKEN.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.slow
def test_a_night_tells_the_webhook_that_it_asks_and_what_came_of_it(installed: Installed, receiver: Receiver) -> None:
    def told(name: str, what: str) -> dict[str, str]:
        return receiver.notice(lambda notice: name in notice["subject"] and what in notice["subject"])

    run = installed.run(NIGHT, overrides=["better.rate=0.71"], approve=True, approve_hours=0.003)
    assert run.state_name == "Not approved", run.state
    asked = told(run.name, "waits for an approval")
    assert asked["subject"].startswith("nightly ")
    assert asked["text"].endswith(f"{installed.addresses['pages']}/v2/runs/flow-run/{run.id}")
    assert "nobody answered" in told(run.name, "Not approved")["text"]

    run = installed.run(NIGHT, overrides=["better.rate=0.72"], gate=["exact_match >= 0.9"])
    assert run.state_name == "Refused", run.state
    assert "exact_match 0.500 >= 0.900: does not pass" in told(run.name, "Refused")["text"]

    run = installed.run(NIGHT, overrides=["better.rate=0.73"])
    assert run.state_name == "Promoted", run.state
    assert "exact_match 0.500 >= 0.100: passes" in told(run.name, "Promoted")["text"]

    count = len(receiver.notices)
    run = installed.run(NIGHT, overrides=["better.rate=0.73"])
    assert run.state_name == "Nothing new", run.state
    failed = installed.run(NIGHT, overrides=["better.rat=1"])
    assert failed.state_name == "Failed"
    assert "Did you mean rate?" in told(failed.name, "Failed")["text"]
    assert [notice["subject"] for notice in receiver.notices[count:]] == [f"nightly {failed.name}: Failed"]


@pytest.mark.slow
def test_a_run_whose_process_was_killed_tells_the_webhook(installed: Installed, receiver: Receiver) -> None:
    overrides = ["better.rate=0.74", "better.max_steps=250", "better.pause=0.2"]
    flow_run = installed.submit("headrace/pipeline", recipe="toy.yaml", overrides=overrides)
    name = installed.reached(flow_run, lambda run: run.state_name == "Running").name
    until(lambda: installed.running_step(name, "better"), 300, "better runs")
    kill([engine_of(flow_run)])
    assert installed.ended(flow_run).state_name == "Crashed"
    receiver.notice(lambda notice: notice["subject"] == f"headrace {name}: Crashed")
