"""`headrace up`, `deploy` and the form: a real server, worker and deployments; runs are triggered as the pages do."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import httpx
import pytest
from installed import Installed
from receiver import Receiver


def headrace(installed: Installed, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(
        command, cwd=installed.folder, env=installed.environment, capture_output=True, text=True, timeout=400
    )


def test_a_triggered_run_ends_well_and_its_page_answers_what_ran_and_where_the_model_is(installed: Installed) -> None:
    recipe = "toy.yaml"
    run = installed.run("headrace/pipeline", recipe=recipe, overrides=["better.rate=0.31"])
    assert run.state_name == "Completed", run.state
    tasks = installed.tasks(run.id, 4)
    assert tasks["better"].state_name == "Completed"
    assert {task.state_name for task in tasks.values()} <= {
        "Completed",
        "Cached",
    }  # other tests run the first steps too
    pages = installed.pages(run.id)
    assert {"toy-run", "toy-metrics", "toy-loss", "toy-evaluation", "toy-lineage"} <= pages.keys()
    assert pages["toy-better-progress"].data == 100.0
    assert "loss 0.333" in str(pages["toy-better-progress"].description)
    document = installed.document(run.name)
    assert document is not None
    answer = str(pages["toy-run"].data)
    assert re.search(r"\*\*[1-4] ran\*\*", answer)
    made = document["steps"]["better"]["artifact"]
    assert f"The model** is better: [`{made[:19]}`](" in answer
    assert f"/artifact/{made})" in answer
    assert document["steps"]["better"]["artifact"] in str(pages["toy-metrics"].data)
    assert "| better | 50.0% |" in answer

    again = installed.run("headrace/pipeline", recipe=recipe, overrides=["better.rate=0.31"])
    assert {task.state_name for task in installed.tasks(again.id, 4).values()} == {"Cached"}
    answer = str(installed.pages(again.id)["toy-run"].data)
    assert "**4 reused**" in answer
    assert "same inputs, settings and code as a result in the store" in answer


def test_the_form_offers_recipes_and_steps_and_refuses_what_is_not_there(installed: Installed) -> None:
    with installed.client() as client:
        deployment = client.read_deployment_by_name("headrace/pipeline")
    shape = deployment.parameter_openapi_schema["properties"]
    assert shape["recipe"]["enum"] == ["toy.yaml", "quickstart"]
    assert {"words", "better", "grpo"} <= set(shape["until"]["items"]["enum"])
    assert shape["workers"]["minimum"] == 1
    assert [name for name, _ in sorted(shape.items(), key=lambda item: item[1]["position"])][:4] == [
        "recipe",
        "until",
        "force",
        "overrides",
    ]
    assert all(field["title"][0].isupper() and field["description"] for field in shape.values())
    for wrong in ({"recipe": "no-such"}, {"until": ["no-such"]}, {"overrides": ["no equals sign"]}, {"workers": 0}):
        with pytest.raises(httpx.HTTPError):
            installed.submit("headrace/pipeline", **wrong)


def test_a_wrong_setting_fails_the_run_with_the_sentence_of_the_command_and_tells_the_webhook(
    installed: Installed, receiver: Receiver
) -> None:
    recipe = "toy.yaml"
    run = installed.run("headrace/pipeline", recipe=recipe, overrides=["better.rat=1"])
    assert run.state_name == "Failed"
    said = headrace(installed, "run", recipe, "--set", "better.rat=1").stderr
    sentence = said.removeprefix("headrace: ").strip()
    assert "Did you mean rate?" in sentence
    assert sentence in str(run.state.message)
    notice = receiver.notice(lambda notice: run.name in notice["subject"])
    assert notice["subject"] == f"headrace {run.name}: Failed"
    told = notice["text"].splitlines()
    assert told[0] == notice["subject"]
    assert sentence in notice["text"]
    assert told[-1] == f"{installed.addresses['pages']}/v2/runs/flow-run/{run.id}"


def test_run_in_another_terminal_uses_the_server_that_is_up(installed: Installed) -> None:
    done = headrace(installed, "run", "toy.yaml", "--store", "store", "--set", "better.rate=0.32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Starting a Prefect server" not in done.stdout
    link = re.search(r"Prefect: (\S+)/v2/runs/flow-run/(\S+)", done.stdout)
    assert link is not None, done.stdout
    assert link[1] == installed.addresses["pages"]
    assert installed.read(link[2]).state_name == "Completed"  # type: ignore[arg-type]


def test_deploying_again_changes_nothing(installed: Installed) -> None:
    def everything() -> tuple[object, ...]:
        with installed.client() as client:
            deployments = {
                item.name: (str(item.id), item.tags, item.parameters, item.concurrency_options)
                for item in client.read_deployments()
            }
            limits = {item.name: item.limit for item in client.read_global_concurrency_limits(limit=200)}
            automations = client.request("POST", "/automations/filter", json={}).json()
        return deployments, limits, sorted((item["id"], item["name"]) for item in automations)

    before = everything()
    done = headrace(installed, "deploy", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["deployments"] == [
        "headrace/pipeline",
        "promote/promote",
        "verify/verify",
        "gc/gc",
        "nightly/production",
    ]
    assert everything() == before


def test_a_second_up_in_the_same_home_says_where_the_first_is(installed: Installed) -> None:
    done = headrace(installed, "up")
    assert done.returncode == 2
    assert f"`headrace up` runs already at {installed.addresses['pages']}" in done.stderr
