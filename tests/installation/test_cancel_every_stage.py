"""Every real stage is cancelled while it runs: the run is Cancelled, what was saved is kept, and no process is left."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import pytest
from clicks import click_cancel, open_run
from installed import Installed, gone, until
from prefect.states import Cancelling

pytestmark = pytest.mark.slow

# What makes the step long enough to be caught; steps before it are cached. Training steps save at every step, so that
# some cancellations come during a save.
STAGES = {
    "corpus": ["corpus.generators.0.arguments.count=30000"],
    "base": ["base.max_steps=3000"],
    "sft": ["sft.max_steps=3000"],
    "samples": ["samples.num_generations=64", "samples.max_completion_length=100"],
    "reference": [],  # over the pairs that there are; it is short, and computed again
    "dpo": ["dpo.max_steps=3000"],
    "grpo": ["grpo.max_steps=3000"],
    "report": ["report.sampled=60", "report.max_new_tokens=100"],
}
TRAINING = ("base", "sft", "dpo", "grpo")


def start(mini: Installed, step: str) -> UUID:
    """Start a run that computes a step anew, and wait until it is being computed."""
    flow_run = mini.submit_recipe("mini.yaml", *STAGES[step], until=[step], force=[step])
    name = mini.reached(flow_run, lambda run: run.state_name not in ("Scheduled", "Pending")).name

    def seen() -> bool:
        document = mini.document(name)
        return document is not None and document["steps"][step]["status"] != "waiting"

    until(seen, 300, f"{step} runs")
    if step in TRAINING:
        until(lambda: mini.progress(flow_run, f"mini-{step}-progress") > 0, 300, f"progress of {step}")
    return flow_run


def check_cancelled(mini: Installed, flow_run: UUID, step: str) -> None:
    """The run ends as Cancelled, what a training step has done is saved, and no process is left."""
    begun = time.monotonic()
    run = mini.ended(flow_run)
    print(f"{step}: cancelled in {time.monotonic() - begun:.1f} s")
    assert run.state is not None
    gone(flow_run)
    if run.state_name == "Completed" and step not in TRAINING:
        pytest.skip(f"{step} was over before it could be cancelled")
    assert run.state.is_cancelled()
    document = mini.document(run.name)
    assert document is not None
    ended = document["steps"][step]
    assert ended["status"] in ("stopped", "done")  # a short stage may have ended before it heard
    if step in TRAINING:
        assert ended["status"] == "stopped"
        assert ended["saved_step"] > 0


@pytest.mark.parametrize("step", STAGES)
def test_a_stage_that_is_cancelled_saves_and_leaves_nothing(mini: Installed, step: str) -> None:
    flow_run = start(mini, step)
    with mini.client() as client:
        client.set_flow_run_state(flow_run, Cancelling())
    check_cancelled(mini, flow_run, step)


@pytest.mark.parametrize("step", ["base", "grpo"])
def test_a_stage_is_cancelled_by_clicks_on_the_page_of_its_run(mini: Installed, page: Any, step: str) -> None:
    flow_run = start(mini, step)
    open_run(page, mini, flow_run)
    click_cancel(page)
    check_cancelled(mini, flow_run, step)
