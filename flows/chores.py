"""The flows around a store: `promote` (with a person's approval if asked), `verify` and `gc`.

They do what the verbs of the command do, by the same functions, and log what these print.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State
from pydantic import Field

from flows import figures
from flows.command import store as store_verbs
from flows.flow_run.approval import ask
from flows.flow_run.pages import browser_link
from flows.names import resolve
from flows.pipeline import StoreField
from stages.artifacts import NotInStore, Store, open_store, read_ref, results
from stages.artifacts import promote as move_ref

ArtifactField = Annotated[
    str, Field(title="Artifact", description="A step (grpo), RUN/step, a reference, or a digest.")
]
ApproveField = Annotated[
    bool, Field(title="Approve", description="Pause before the promotion until a person says yes or no.")
]
HoursField = Annotated[
    float, Field(title="Hours to approve", description="After these, nobody's answer means no.", gt=0, le=240)
]


@flow(name="promote", persist_result=False, log_prints=True)
def promote(
    artifact: ArtifactField,
    ref: Annotated[str, Field(title="Reference", description="The name that shall stand for it.")] = "production",
    why: Annotated[str, Field(title="Why", description="The reason, for the reference's history.")] = "",
    approve: ApproveField = False,
    approve_hours: HoursField = 24.0,
    store: StoreField = ".headrace",
) -> State[Any]:
    """Have a reference name an artifact."""
    opened = open_store(store)
    digest = resolve(opened, artifact).digest
    now = current(opened, ref)
    if now == digest:
        return Completed(name="Unchanged", message=f"{ref} names {digest} already")
    if approve:
        answer = ask(question(opened, ref, digest, now), approve_hours)
        if not answer.approved:
            return Completed(name="Not approved", message=f"not promoted: {answer.why or 'a person said no'}")
        why = " · ".join(filter(None, [why, answer.why]))
    reason = " · ".join(filter(None, [why, f"by run {flow_run.get_name()}"]))
    moved = move_ref(opened, ref, digest, who=store_verbs.who(), why=reason, expect=now)
    return Completed(name="Promoted", message=f"{ref} names {digest} (entry {moved.history[-1].number})")


@flow(name="verify", persist_result=False, log_prints=True)
def verify(
    artifact: Annotated[str, Field(title="Artifact", description="Or a reference; everything when empty.")] = "",
    quick: Annotated[bool, Field(title="Quick", description="Presence and sizes only; no hash is recomputed.")] = False,
    store: StoreField = ".headrace",
) -> State[Any]:
    """Recompute every hash, and fail where a file is damaged."""
    code = store_verbs.verify(
        store, artifact or None, quick=quick, with_ancestors=False, mend=False, sources=[], as_json=False
    )
    what = artifact or "the store"
    if code:
        return Failed(message=f"{what} has damaged files; the log names them")
    return Completed(message=f"{what} is whole")


@flow(name="gc", persist_result=False, log_prints=True)
def gc(
    delete: Annotated[bool, Field(title="Delete", description="Remove it; otherwise it is only shown.")] = False,
    keep: Annotated[str, Field(title="Keep", description="Results and runs younger than this stay.")] = "30d",
    grace: Annotated[str, Field(title="Grace", description="Nothing younger than this is touched.")] = "24h",
    store: StoreField = ".headrace",
) -> State[Any]:
    """Find, or remove, what nothing needs any more."""
    store_verbs.gc(store, delete=delete, keep=keep, grace=grace, as_json=False)
    return Completed(message="what went, or would go, is in the log")


def current(store: Store, ref: str) -> str:
    """The digest that a reference names now, "" for none."""
    try:
        return read_ref(store, ref).artifact
    except NotInStore:
        return ""


def question(store: Store, ref: str, candidate: str, now: str, arithmetic: tuple[str, ...] = ()) -> str:
    """Markdown that asks whether a reference shall name a candidate: the gate's arithmetic, or both models' figures."""
    lines = [f"Shall **{ref}** name {browser_link(f'`{figures.short(candidate)}`', 'artifact', candidate)}?", ""]
    lines += [f"- {line}" for line in arithmetic]
    ours, theirs = measured(store, candidate), measured(store, now) if now else {}
    if not arithmetic and ours:
        lines += ["", f"| | candidate | {ref} now |", "|---|---:|---:|"]
        for name, value in sorted(ours.items()):
            other = figures.number(theirs[name]) if name in theirs else ""
            lines.append(f"| {name.replace('_', ' ')} | {figures.number(value)} | {other} |")
    if now:
        lines += ["", f"{ref} names {browser_link(f'`{figures.short(now)}`', 'artifact', now)} now."]
    else:
        lines += ["", f"{ref} names nothing yet."]
    return "\n".join(lines)


def measured(store: Store, digest: str) -> dict[str, float]:
    """The figures of a checkpoint in the newest report that has it."""
    newest: tuple[str, dict[str, float]] = ("", {})
    for result in results(store):
        if result.kind != "report":
            continue
        for name, given in result.inputs.items():
            label = name.partition(".")[2]
            if given == digest and label and result.finished > newest[0]:
                found = {
                    metric.partition("/")[2]: value
                    for metric, value in result.metrics.items()
                    if metric.partition("/")[0] == label and math.isfinite(value)
                }
                newest = (result.finished, found)
    return newest[1]
