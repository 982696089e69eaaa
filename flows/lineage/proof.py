"""Checking an artifact with all that it was made from: every object, every record on the way, and the reference.

Everything is read from the store, nothing from an index. What can be found without a signature is what contradicts
itself, and nearly everything is tied to something else by a hash:

- the bytes of files to a manifest, and the manifest to the digest that names it;
- a record's settings, inputs and code to its key, which is their hash; its sources to the code's fingerprint;
- its artifacts and final metrics to what the stage said at its end, in the log;
- the entries of a reference's history to one another.

A record or reference that is rewritten with all that it is tied to can only be told by a signature made before
(`headrace attest`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flows.differences import recorded_versions
from stages.artifacts import (
    Damage,
    Damaged,
    NotInStore,
    Ref,
    Result,
    Store,
    StoreError,
    canonical_json,
    parse_result,
    read_log,
    read_manifest,
    read_ref,
    verify_artifacts,
)
from stages.artifacts.manifest import sha256_hex
from stages.artifacts.secrets import BLANK
from stages.fingerprint import CodeError, source_hash, stage_key

_MADE_OUTSIDE = ("hf", "import")  # their keys are not those of stages


@dataclass
class Proof:
    """What `verify_deep` looked at and found.

    Attributes:
        damages: everything that is wrong; empty when all is well.
        artifacts: digests of the artifact and all that it was made from.
        records: how many results were checked, those in histories included.
        sources: how many files of imported data there are.
        files, size: distinct files that were hashed, and their bytes.
    """

    damages: list[Damage] = field(default_factory=list)
    artifacts: list[str] = field(default_factory=list)
    records: int = 0
    sources: int = 0
    files: int = 0
    size: int = 0

    @property
    def ok(self) -> bool:
        return not self.damages


def verify_deep(store: Store, digest: str, ref: str = "") -> Proof:
    """Check an artifact, everything that it was made from, and the records of how; and the reference that names it.

    Args:
        ref: the reference that the artifact was found by, "" for none.

    Raises:
        StoreError: the store cannot be read.
    """
    proof = Proof()
    if ref:
        proof.damages += check_ref(store, ref)
    by_artifact: dict[str, list[tuple[str, Result]]] = {}
    for info in store.list("results/"):
        try:
            current = parse_result(store, info.key)
        except NotInStore:
            continue
        except Damaged as error:  # what it gave cannot be told, so it may be part of this
            proof.damages.append(Damage(info.key, str(error)))
            continue
        for result in (current, *_older(current)):
            for made in (result.artifact, *result.outputs.values()):
                by_artifact.setdefault(made, []).append((info.key, result))
    checked: set[int] = set()
    sources: dict[tuple[str, str], list[str]] = {}  # what was found of kept sources, which many records share
    waiting, seen = [digest], dict[str, None]()
    while waiting:
        current_digest = waiting.pop(0)
        if current_digest in seen:
            continue
        seen[current_digest] = None
        for key, result in by_artifact.get(current_digest, []):
            waiting.extend(result.inputs.values())
            if code := result.code.get("artifact"):
                waiting.append(str(code))
            if id(result) not in checked:
                checked.add(id(result))
                proof.records += 1
                problems = check_record(store, result, sources)
                proof.damages += [Damage(key, problem, result.artifact) for problem in problems]
    proof.artifacts = list(seen)
    proof.damages += verify_artifacts(store, seen)
    _count(store, proof, {made for made, found in by_artifact.items() if found})
    return proof


def _older(result: Result) -> Iterator[Result]:
    for entry in result.history:
        yield Result.model_validate({name: value for name, value in entry.items() if name != "same_bytes"})


def _count(store: Store, proof: Proof, made: set[str]) -> None:
    sizes: dict[str, int] = {}
    for digest in proof.artifacts:
        try:
            manifest = read_manifest(store, digest)
        except (NotInStore, Damaged):
            continue
        sizes |= {entry.sha256: entry.size for entry in manifest.files}
        if digest not in made and manifest.kind not in ("code",):
            proof.sources += len(manifest.files)
    proof.files, proof.size = len(sizes), sum(sizes.values())


def check_ref(store: Store, name: str) -> list[Damage]:
    """What contradicts itself in a reference."""
    key = f"refs/{name}.json"
    try:
        ref: Ref = read_ref(store, name)
    except (Damaged, NotInStore) as error:
        return [Damage(key, str(error))]
    before: str | None = None
    found = []
    for entry in ref.history:
        if entry.previous != before:
            said = entry.previous or "nothing"
            found.append(
                Damage(key, f"entry {entry.number} says that it named {said} before, not {before or 'nothing'}")
            )
        if entry.restores and ref.history[entry.restores - 1].artifact != entry.artifact:
            found.append(Damage(key, f"entry {entry.number} goes back to entry {entry.restores}, which names another"))
        before = entry.artifact
    return found


# Records


def check_record(store: Store, result: Result, sources: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    """What contradicts itself in a record, in a few words each.

    Args:
        sources: what was found of kept sources before; what is found now is added.
    """
    if result.stage in _MADE_OUTSIDE:
        return
    for name, value in result.identity.items():
        if name in result.config and result.config[name] != value:
            yield f"its config says {name} {result.config[name]!r}, its identity {value!r}"
    files = result.code.get("files") or {}
    if files and result.code.get("digest") != _digest_of(files):
        yield "its code's digest is not that of its files"
    blanked = BLANK in result.model_dump_json(include={"identity", "inputs", "code"})  # a secret was in it
    if not blanked and result.key not in _keys(result):
        yield "its key is not the hash of its settings, inputs and code: one of them was changed"
    shared = (str(result.code.get("artifact")), str(result.code.get("digest")))
    if shared not in sources:
        sources[shared] = list(_check_sources(store, result))
    yield from sources[shared]
    yield from _check_log(store, result)


def _digest_of(files: dict[str, Any]) -> str:
    return "sha256:" + sha256_hex(canonical_json({path: entry.get("sha256") for path, entry in files.items()}))


def _keys(result: Result) -> Iterator[str]:
    """The keys that a record may have: with the code or its version, with or without the environment."""
    code = result.code
    parts: list[Any] = [code.get("digest", "")]
    if code.get("mode") == "version":
        parts = [{"version": code.get("version"), "user": code.get("user", "")}]
    versions = recorded_versions(result.environment)
    for part in [*parts, *({"code": part, "environment": versions} for part in parts)]:
        try:
            yield stage_key(result.stage, result.identity, result.inputs, part)
        except ValueError:
            continue


def _check_sources(store: Store, result: Result) -> Iterator[str]:
    """Whether the kept sources are the code of the fingerprint. Damaged ones are found with their artifact."""
    digest, files = result.code.get("artifact"), result.code.get("files") or {}
    if not digest:
        return
    try:
        manifest = read_manifest(store, str(digest))
    except (NotInStore, Damaged, ValueError):
        return
    kept = {entry.path: entry for entry in manifest.files}
    if missing := sorted(files.keys() - kept.keys()):
        yield f"its kept sources lack {missing[0]}"
    for path in sorted(files.keys() & kept.keys()):
        try:
            data = store.get(kept[path].blob)
        except NotInStore:
            continue
        if BLANK.encode() in data or sha256_hex(data) != kept[path].sha256:
            continue
        try:
            same = source_hash(data) == files[path].get("sha256")
        except CodeError:
            same = False
        if not same:
            yield f"its kept source {path} is not the code of its fingerprint"


def _check_log(store: Store, result: Result) -> Iterator[str]:
    """Whether the record says what the stage said at its end, where the log is still there."""
    match = re.fullmatch(r"logs/([^/]+)/([^/]+)\.jsonl", result.logs or "")
    if match is None or result.accepted_from:
        return
    try:
        ends = [event for event in read_log(store, match[1], match[2]) if event.get("type") == "outcome"]
    except (StoreError, ValueError):
        return
    mine = [event for event in ends if event.get("artifact") and event.get("computed") is not False]
    if not mine:
        return
    if not any(event["artifact"] == result.artifact and event.get("outputs", {}) == result.outputs for event in mine):
        yield f"its artifact is not the one that its log says ({mine[-1]['artifact']})"
        return
    said = next(event for event in reversed(mine) if event["artifact"] == result.artifact)
    for name, value in (said.get("metrics") or {}).items():
        if isinstance(value, int | float) and not math.isnan(value) and result.metrics.get(name) != value:
            yield f"its metric {name} is {result.metrics.get(name)}, its log says {value}"
