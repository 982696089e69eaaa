"""The automations of an installation: runs whose process is gone, failures, and what a night came to.

Invariants:
- Deploying again updates them, by name; there is one of each.
- The webhook's address is a secret: it comes from `HEADRACE_WEBHOOK_URL` and is kept among the secret values of a
  Prefect block, which pages and logs do not show. Without it, no notification is sent, unless a block of that name is
  there already.
"""

from __future__ import annotations

import os
from datetime import timedelta

from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.types import SecretDict

BLOCK = "headrace-webhook"
WEBHOOK = "HEADRACE_WEBHOOK_URL"
HEARTBEAT_SECONDS = 30  # the shortest that Prefect takes; `headrace up` sets it for its worker
SILENCE = timedelta(seconds=120)

ZOMBIES = "headrace: a run whose process is gone"
FAILURES = "headrace: a run failed"
APPROVALS = "headrace: a run asks for an approval"
NIGHTS = "headrace: what a night came to"

_OURS = ResourceSpecification.model_validate(
    {"prefect.resource.id": "prefect.tag.headrace", "prefect.resource.role": "tag"}
)
_NIGHTLY = ResourceSpecification.model_validate(
    {"prefect.resource.id": "prefect.tag.nightly", "prefect.resource.role": "tag"}
)
_RUNS = ResourceSpecification.model_validate({"prefect.resource.id": "prefect.flow-run.*"})
# The link starts at /v2/, as `flows.service.local_server.run_link` does.
_LINK = "{{ flow_run|ui_url|replace('/v2/runs/', '/runs/')|replace('/runs/', '/v2/runs/') }}"
_BODY = "{{ flow_run.state.message }}\n" + _LINK
_ASKED = "Resume on its page asks for yes or no, and shows what is known of the model.\n" + _LINK


async def apply_automations(client: PrefectClient) -> None:
    """Create the automations, or bring them up to date."""
    wanted = [
        AutomationCore(
            name=ZOMBIES,
            description="A run that has sent no heartbeat for two minutes is Crashed; Retry goes on from what is done.",
            trigger=EventTrigger(
                after={"prefect.flow-run.heartbeat"},
                expect={"prefect.flow-run.*"},  # any news counts: our runs end in states with names of their own
                match=_RUNS,
                match_related=_OURS,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=SILENCE,
            ),
            actions=[
                ChangeFlowRunState(
                    state=StateType.CRASHED,
                    message="Nothing was heard of its process for two minutes. Retry goes on from what is done.",
                )
            ],
        )
    ]
    block = await _webhook(client)
    if block is not None:
        wanted += [
            _notice(
                block,
                FAILURES,
                "Tells the webhook of every run that failed, crashed or ran out of time.",
                ("Failed", "Crashed", "TimedOut"),
                _OURS,
                "{{ flow.name }} {{ flow_run.name }}: {{ flow_run.state.name }}",
            ),
            _notice(
                block,
                APPROVALS,
                "Tells the webhook of every run that waits for a person's approval.",
                ("Paused",),
                _OURS,
                "{{ flow.name }} {{ flow_run.name }} waits for an approval",
                _ASKED,
            ),
            _notice(
                block,
                NIGHTS,
                "Tells the webhook what a night came to: promoted, refused, not approved.",
                ("Promoted", "Refused", "Not approved", "Unchanged"),
                _NIGHTLY,
                "{{ flow_run.name }}: {{ flow_run.state.name }}",
            ),
        ]
    for automation in wanted:
        known = await client.read_automations_by_name(automation.name)
        if known:
            await client.update_automation(known[0].id, automation)
            for double in known[1:]:
                await client.delete_automation(double.id)
        else:
            await client.create_automation(automation)


async def _webhook(client: PrefectClient) -> object:
    """The id of the block with the webhook: of what the environment says, or of one that is there; else None."""
    if url := os.environ.get(WEBHOOK):
        block = CustomWebhookNotificationBlock(
            name="Headrace",
            url="{{address}}",  # a field that everybody sees
            secrets=SecretDict({"address": url}),
            json_data={"subject": "{{subject}}", "text": "{{subject}}\n{{body}}"},
        )
        return await block.save(BLOCK, overwrite=True, client=client)
    try:
        return (await client.read_block_document_by_name(BLOCK, "custom-webhook")).id
    except ObjectNotFound:
        return None


def _notice(
    block: object,
    name: str,
    description: str,
    states: tuple[str, ...],
    related: ResourceSpecification,
    subject: str,
    body: str = _BODY,
) -> AutomationCore:
    """Tells the webhook of each run among `related` that enters one of the states."""
    return AutomationCore(
        name=name,
        description=description,
        trigger=EventTrigger(
            expect={f"prefect.flow-run.{state}" for state in states},
            match=_RUNS,
            match_related=related,
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[SendNotification(block_document_id=block, subject=subject, body=body)],
    )
