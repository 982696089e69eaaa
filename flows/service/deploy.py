"""What an installation has in Prefect, made by code and made again without doubles.

The model: `deploy` brings a server to what the settings say: a work pool, the deployments `headrace/pipeline`,
`nightly/REF` for each reference that is retrained, `promote/promote`, `verify/verify` and `gc/gc`, where the settings
name a pool for them `stage/NAME` for each stage, the concurrency limits, and the automations.

Invariants:
- Deploying twice changes nothing; a nightly deployment that the settings no longer have is removed. Limits that a
  person has changed in the UI are changed back.
- Everything made here is tagged `headrace` or named so; nothing else on the server is touched.
- One night of a reference runs at a time: a trigger that comes meanwhile is cancelled at once (CANCEL_NEW), so that
  late runs never pile up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
    WorkPoolCreate,
)
from prefect.client.schemas.filters import DeploymentFilter
from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.flows import Flow

from flows.chores import gc, promote, verify
from flows.flow_run.slots import STEPS, gpu_limit_name
from flows.nightly import nightly
from flows.pipeline import pipeline
from flows.recipe_model import Recipe
from flows.runners.gpus import visible_gpus
from flows.service.automations import apply_automations
from flows.service.deploy_form import form
from flows.service.deploy_settings import DeploySettings
from flows.service.stage_deployments import deploy_stages

TAG = "headrace"


@dataclass(frozen=True)
class Deployment:
    """One deployment as it shall be.

    Attributes:
        parameters: the values it sets; what the form shows first.
        one_at_a_time: whether a run that is triggered while one runs is cancelled at once.
    """

    name: str
    flow: Flow[..., Any]
    description: str
    parameters: dict[str, Any]
    tags: tuple[str, ...] = ()
    cron: str = ""
    timezone: str = "UTC"
    one_at_a_time: bool = False
    recipes: dict[str, Recipe] = field(default_factory=dict)

    @property
    def full_name(self) -> str:
        return f"{self.flow.name}/{self.name}"


def deployments(settings: DeploySettings) -> list[Deployment]:
    """The deployments of an installation.

    Raises:
        RecipeError: a recipe cannot be used.
    """
    recipes = settings.recipes_by_name()
    store = {"store": settings.store}
    first = next(iter(recipes))
    found = [
        Deployment("pipeline", pipeline, PIPELINE, store | {"recipe": first}, recipes=recipes),
        Deployment("promote", promote, PROMOTE, dict(store)),
        Deployment("verify", verify, VERIFY, dict(store)),
        Deployment("gc", gc, GC, dict(store)),
    ]
    for ref, item in settings.nightly.items():
        parameters = store | {"ref": ref, "recipe": item.recipe, "timezone": item.timezone}
        for name in ("overrides", "warm_start", "model", "gate", "approve", "approve_hours", "keep"):
            parameters[name] = getattr(item, name)
        found.append(
            Deployment(
                ref,
                nightly,
                NIGHTLY.replace("REF", ref),
                parameters,
                tags=("nightly",),
                cron=item.cron,
                timezone=item.timezone,
                one_at_a_time=True,
                recipes=recipes,
            )
        )
    return found


async def deploy(settings: DeploySettings) -> list[str]:
    """Bring the configured server to what the settings say. Returns the names of the deployments.

    Raises:
        RecipeError: a recipe cannot be used.
        httpx.HTTPError: the server does not take it.
    """
    wanted = deployments(settings)
    async with get_client() as client:
        pool = await _work_pool(client, settings.work_pool)
        for item in wanted:
            await _apply(client, item, settings, pool)
        await _remove_old(client, {item.full_name for item in wanted})
        await _limits(client, settings)
        await apply_automations(client)
    names = [item.full_name for item in wanted]
    if settings.stage_pool:
        with get_client(sync_client=True) as client:
            names += deploy_stages(client, settings.stage_pool)
    return names


async def _work_pool(client: PrefectClient, name: str) -> str:
    """Have the work pool; returns its type."""
    try:
        return (await client.read_work_pool(name)).type
    except ObjectNotFound:
        pass
    try:
        pool = WorkPoolCreate(name=name, type="process", description="Flows of Headrace as processes of a worker.")
        return (await client.create_work_pool(pool)).type
    except ObjectAlreadyExists:
        return (await client.read_work_pool(name)).type


async def _apply(client: PrefectClient, item: Deployment, settings: DeploySettings, pool_type: str) -> None:
    flow_id = await client.create_flow_from_name(item.flow.name)
    schedules = []
    if item.cron:
        schedules = [
            DeploymentScheduleCreate(
                schedule=CronSchedule(cron=item.cron, timezone=item.timezone), active=True, slug="nightly"
            )
        ]
    deployment_id = await client.create_deployment(
        flow_id,
        item.name,
        entrypoint=f"{item.flow.fn.__module__}.{item.flow.fn.__name__}",
        work_pool_name=settings.work_pool,
        tags=[TAG, *item.tags],
        description=item.description,
        parameters=item.parameters,
        parameter_openapi_schema=form(item.flow, item.recipes, item.parameters),
        enforce_parameter_schema=True,
        concurrency_limit=1 if item.one_at_a_time else None,
        concurrency_options=ConcurrencyOptions(collision_strategy=ConcurrencyLimitStrategy.CANCEL_NEW)
        if item.one_at_a_time
        else None,
        schedules=schedules,
        job_variables=_job_variables(settings, pool_type),
        pull_steps=[],
    )
    if not item.cron:
        for schedule in await client.read_deployment_schedules(deployment_id):
            await client.delete_deployment_schedule(deployment_id, schedule.id)


def _job_variables(settings: DeploySettings, pool_type: str) -> dict[str, Any]:
    """How a worker of the pool starts a flow. In a container the image decides; a process runs in the folder of the
    settings, with the Python that deployed it."""
    if pool_type != "process":
        return {}
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {
        "working_dir": str(settings.folder),
        "command": f"{sys.executable} -P -m flows.service.engine",
        "env": {"PYTHONPATH": path},
    }


async def _remove_old(client: PrefectClient, wanted: set[str]) -> None:
    """Remove nightly deployments that the settings no longer have."""
    found = await client.read_deployments(deployment_filter=DeploymentFilter(tags={"all_": [TAG, "nightly"]}))
    for known in found:
        if known.id is not None and f"{nightly.name}/{known.name}" not in wanted:
            await client.delete_deployment(known.id)


async def _limits(client: PrefectClient, settings: DeploySettings) -> None:
    """The concurrency limits that `flows.flow_run.slots` respects; one that is no longer wanted is switched off."""
    here = len(visible_gpus())
    wanted = {gpu_limit_name(): here} if here else {}
    wanted |= {gpu_limit_name(host): count for host, count in settings.gpus.items()}
    if settings.steps:
        wanted[STEPS] = settings.steps
    known = {limit.name: limit for limit in await client.read_global_concurrency_limits(limit=200)}
    for name, count in wanted.items():
        if name in known:
            await client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(limit=count, active=True))
        else:
            await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=count))
    if STEPS in known and STEPS not in wanted:
        await client.update_global_concurrency_limit(STEPS, GlobalConcurrencyLimitUpdate(active=False))


def lines(names: list[str], settings: DeploySettings) -> Iterator[str]:
    """What was deployed, for people."""
    yield f"{len(names)} deployments on work pool {settings.work_pool}, store {settings.store}"
    for name in names:
        ref = name.partition("/")[2]
        cron = settings.nightly[ref].cron if name.startswith("nightly/") and ref in settings.nightly else ""
        told = f"  {cron} {settings.nightly[ref].timezone}" if cron else ""
        yield f"  {name}{told}"


PIPELINE = """\
Trains and aligns a model by a recipe, and computes only what is not in the store yet.

Choose a recipe; change settings one a line, as with `--set` on the command line:

```
dpo.beta=0.2
grpo.max_steps=40
```

*Only up to* leaves out what the chosen steps do not need, *Run again* computes steps whose results are there. A wrong
setting fails the run within seconds, with the sentence that says what to change. *Cancel* saves first; *Retry* and any
later run go on from what is saved.

The same from a terminal: `headrace run quickstart --set dpo.beta=0.2`
"""
NIGHTLY = """\
Retrains the reference **REF** when there is new data: finds it by content, starts from the model in REF or from
scratch, measures the candidate beside it, and promotes what passes the gate.

A night without new data ends in seconds. One night runs at a time; a trigger that comes meanwhile is cancelled. Rules
of the gate, one a line:

```
exact_match >= 0.5
exact_match > production + 0.01
```

*Dates* runs past nights in turn: `2026-11-01..2026-11-07`. The history: `headrace refs REF --history`, and the page
`nightly-REF-trend` among the artifacts.
"""
PROMOTE = """\
Has a reference such as `production` name an artifact: a step (`grpo`), `RUN/step`, another reference, or a digest.

With *Approve*, the run pauses and shows what is known of both models; a person resumes it with yes or no. Nobody's
answer in time means no. `headrace rollback production` goes back.
"""
VERIFY = """\
Recomputes the hash of every file of an artifact, of a reference with all that it was made from, or of the whole store,
and fails if one is damaged, naming it.

The same from a terminal: `headrace verify production`
"""
GC = """\
Finds what no reference, night, recent result or running stage needs any more; with *Delete*, removes it. Safe while
runs go on.

The same from a terminal: `headrace gc --keep 30d`
"""
