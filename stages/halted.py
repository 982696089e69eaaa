"""What a run that halted itself leaves behind for people to look at: its last weights, as a checkpoint of their own.

The artifact is named by a record of the stage "halted" under a key of its own, so that lineage tells where it comes
from and a gc keeps it as long as other results. It is in no result of the stage that halted: no plan, run or name of a
step ever takes it for what that stage was to give.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from stages.artifacts import Result, Store, StoreError, log_key, publish, write_result
from stages.contract import StageEnd, StageSpec
from stages.environment import environment

HALTED = "halted"


def keep_halted(
    store: Store,
    spec: StageSpec,
    end: StageEnd,
    code: dict[str, Any],
    *,
    started: str,
    finished: str,
    warn: Callable[[str], None],
) -> None:
    """Publish the checkpoint that a halted stage left, if it did, with the record of how it came about.

    Its digest becomes `end.kept`. That it cannot be published is no more than a warning: the verdict is the same.

    Args:
        spec: of the stage that halted.
        end: how it did.
        code: as in the stage's own record.
        started, finished: UTC, ISO 8601.
        warn: called with one sentence.
    """
    if end.checkpoint is None:
        return
    try:
        digest = publish(store, end.checkpoint, "checkpoint")
        write_result(store, _record(spec, digest, str(end), code, started, finished))
    except (StoreError, ValueError) as error:
        warn(f"the checkpoint of the halted run is not kept: {error}")
        return
    end.kept = digest


def _record(spec: StageSpec, digest: str, why: str, code: dict[str, Any], started: str, finished: str) -> Result:
    return Result(
        artifact=digest,
        kind="checkpoint",
        stage=HALTED,
        step=spec.step,
        key=hashlib.sha256(f"{HALTED}:{spec.key}".encode()).hexdigest(),
        run=spec.run,
        config=spec.config,
        identity={"artifact": digest},
        inputs=spec.inputs,
        code=code,
        environment=environment() | {"processes": spec.resources.processes},
        started=started,
        finished=finished,
        logs=log_key(spec.run, spec.step),
        record={"stage": spec.stage, "key": spec.key, "why": why},
    )
