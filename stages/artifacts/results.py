"""Results: which artifact a stage's key gave, and the record of how.

Invariants:
- A result is written after its artifacts, and `read_result` gives it only while every object of them is there, so a hit
  can always be used.
- Writing a result over an older one keeps the older one in `history` and says whether the bytes are the same. It is
  written by compare-and-swap: of two writers of a key neither's result is lost.
- Under a lease, a result is written only while the lease is held, and never over one with a greater fencing token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.artifacts.fetch import is_complete
from stages.artifacts.leases import Lease, LeaseLost
from stages.artifacts.manifest import check_digest
from stages.artifacts.secrets import redact
from stages.artifacts.store import Damaged, NotInStore, Store, StoreError, leave_out

_TRIES = 1000  # each failed try means that another writer has succeeded


class Result(BaseModel):
    """What a stage key gave, and everything that is recorded about it.

    Attributes:
        artifact: digest of the main artifact ("sha256:<64 hex>").
        outputs: side output name -> digest.
        kind: kind of the main artifact.
        stage, step, key, run: which stage under which key, and the recipe's step and the run that computed it.
        config: the whole config; `identity`: the fields of it that are in the key.
        inputs: input name -> digest.
        code: code fingerprint (digest, files), as the flow planned it.
        environment: versions, platform and devices that computed it.
        started, finished: UTC, ISO 8601.
        seconds: time of the stage, saved progress of earlier attempts included.
        attempts: how many times it was started until it was done, as far as the flow knows.
        metrics: final metrics of the stage.
        logs: key of the step's log in the store.
        record: whatever else the flow knows (recipe, git commit, ...).
        accepted_from: key of the older result that a person declared still right (`--accept-code`).
        token: the fencing token of the lease that it was computed under; 0 for what needs none.
        history: older results under this key, oldest first, each with `same_bytes`: whether the result that replaced it
            has the same artifacts.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")

    artifact: str
    outputs: dict[str, str] = {}
    kind: str
    stage: str
    step: str
    key: str
    run: str
    config: dict[str, Any] = {}
    identity: dict[str, Any] = {}
    inputs: dict[str, str] = {}
    code: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    started: str
    finished: str
    seconds: float = 0.0
    attempts: int = 1
    metrics: dict[str, float] = {}
    logs: str | None = None
    record: dict[str, Any] = {}
    accepted_from: str | None = None
    token: int = 0
    history: list[dict[str, Any]] = []


def result_key(stage: str, key: str) -> str:
    """Where a result lies in a store.

    Raises:
        ValueError: the stage's name or the key is not allowed.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.]*", stage):
        raise ValueError(f"{stage!r} is not the name of a stage")
    if not re.fullmatch(r"[0-9a-f]{8,64}", key):
        raise ValueError(f"{key!r} is not a stage key (8 to 64 lowercase hexadecimal digits)")
    return f"results/{stage}/{key}.json"


def parse_result(store: Store, object_key: str) -> Result:
    """Read the result at a key of the store, whether or not its artifacts are there.

    Raises:
        NotInStore: there is none.
        Damaged: it is not a result, or not the one of that key.
    """
    return _parse(store, object_key, store.get(object_key))


def _parse(store: Store, object_key: str, data: bytes) -> Result:
    try:
        result = Result.model_validate_json(data)
        for digest in (result.artifact, *result.outputs.values()):
            check_digest(digest)
        if result_key(result.stage, result.key) != object_key:
            raise ValueError("it belongs to another key")
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "whole file"
        raise Damaged(f"{object_key} in store {store.url} is not a result: {where}: {problem['msg']}") from None
    except ValueError as error:
        raise Damaged(f"{object_key} in store {store.url} is not a result: {error}") from None
    return result


def read_result(store: Store, stage: str, key: str, seen: dict[str, int] | None = None) -> Result | None:
    """The result of a stage under a key, or None unless every object of its artifact and side outputs is there.

    A result that cannot be read counts as none; `verify_all` names it.

    Args:
        seen: as of `is_complete`.
    """
    try:
        result = parse_result(store, result_key(stage, key))
    except (NotInStore, Damaged):
        return None
    if all(is_complete(store, digest, seen) for digest in (result.artifact, *result.outputs.values())):
        return result
    return None


def write_result(store: Store, result: Result, lease: Lease | None = None) -> Result:
    """Store a result under its stage and key, an older one becoming its history. Returns what was stored.

    `history[-1]["same_bytes"]` of the returned result says whether the older result had the same artifacts.

    Args:
        lease: the lease on the key that it was computed under; the result gets its fencing token.

    Raises:
        ValueError: its key, stage or a digest is malformed.
        NotInStore: one of its artifacts is not (wholly) in the store.
        LeaseLost: the lease is another process's by now, or the stored result has a greater token.
    """
    key = result_key(result.stage, result.key)
    if lease is not None:
        result = result.model_copy(update={"token": lease.token})
    for digest in (result.artifact, *result.outputs.values()):
        if not is_complete(store, digest):
            raise NotInStore(f"store {store.url} does not hold all of artifact {digest}; publish it before its result")
    for _ in range(_TRIES):
        # In this order: what is read before the lease is checked, and unchanged when it is written, is fenced.
        older, tag = _older(store, key)
        if older is not None and _same_writing(older, result):  # a put whose answer was lost
            return older
        if older is not None and 0 < result.token < older.token:
            raise LeaseLost(
                f"key {result.key[:12]} has a result with the fencing token {older.token}, later than this process's "
                f"{result.token}: its lease expired while it worked; nothing is overwritten"
            )
        if lease is not None:
            lease.check()
        stored = _after(older, result)
        data = redact(stored.model_dump_json(indent=1)).encode()
        if store.put(key, data, if_absent=True) if tag is None else store.put(key, data, if_match=tag):
            return stored
    raise StoreError(f"{key} in store {store.url} was written {_TRIES} times by others meanwhile; try again")


def _older(store: Store, key: str) -> tuple[Result | None, str | None]:
    """The result that is there (None also for one that cannot be read) and its tag, None where there is none."""
    try:
        data, tag = store.get_with_tag(key)
    except NotInStore:
        return None, None
    try:
        return _parse(store, key, data), tag
    except Damaged:
        return None, tag


def _same_writing(older: Result, result: Result) -> bool:
    return older.model_dump_json(exclude={"history"}) == redact(result.model_dump_json(exclude={"history"}))


def _after(older: Result | None, result: Result) -> Result:
    """`result` with the history that it has when it replaces `older`."""
    history = []
    if older is not None:
        same = older.artifact == result.artifact and older.outputs == result.outputs
        entry = older.model_dump(mode="json", exclude={"history"}) | {"same_bytes": same}
        history = [*older.history, entry]
    return result.model_copy(update={"history": history})


def results(store: Store, stage: str | None = None) -> Iterator[Result]:
    """Every readable result, of one stage or of all, newest first, whether or not its artifacts are still there.

    The log says which could not be read.
    """
    prefix = "results/" if stage is None else f"results/{stage}/"
    found = []
    for info in store.list(prefix):
        try:
            found.append(parse_result(store, info.key))
        except NotInStore:  # removed just now
            continue
        except Damaged as error:
            leave_out(error)
    yield from sorted(found, key=lambda result: (result.finished, result.key), reverse=True)
