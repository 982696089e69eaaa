"""Statements of how an artifact was made, for programs that check provenance, and signatures of its files.

A statement is in-toto's, version 1, with SLSA's provenance predicate, version 1: its subjects are the artifact's files
and its manifest, its dependencies the sources of the code, the inputs, and all that these were made from. It says what
the record says; who trusts it trusts the store, or the signature.

A signature is in the format of OpenSSF model signing, made with a local elliptic-curve key. It covers a folder of the
artifact with the statement in it, and is checked without Headrace:

    python -m model_signing verify key DIR --signature DIR/model.sig --public_key KEY.pub

Whether a store still says the same is `flows.lineage.signature`.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

from flows.lineage.graph import Graph, Node
from stages.artifacts import Manifest, Result, StoreError, canonical_json, hash_file
from stages.artifacts.manifest import sha256_hex

STATEMENT = "provenance.intoto.json"
SIGNATURE = "model.sig"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:headrace:stage:1"


def statement(graph: Graph, manifest: Manifest) -> dict[str, Any]:
    """The in-toto statement of the root of a graph, as JSON-able values, checked by in-toto's own validators.

    Args:
        graph: the artifact with all that it was made from.
        manifest: of the artifact.

    Raises:
        StoreError: the packages are missing, or the artifact was imported and nothing is known of its making.
    """
    try:
        import in_toto_attestation.predicates.provenance.v1.provenance_pb2 as provenance
        from google.protobuf import json_format
        from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
        from in_toto_attestation.v1.statement import Statement
    except ImportError as error:
        raise StoreError(f"attest needs the packages of headrace[provenance]: {error}") from None
    root = graph.nodes[graph.root]
    if root.made_by is None:
        raise StoreError(f"artifact {graph.root} was imported: nothing is recorded of how it was made")
    subjects = [ResourceDescriptor(name=entry.path, digest={"sha256": entry.sha256}) for entry in manifest.files]
    subjects.append(
        ResourceDescriptor(
            name="manifest",
            digest={"sha256": manifest.digest.removeprefix("sha256:")},
            annotations={"kind": manifest.kind, "artifact": manifest.digest},
        )
    )
    predicate = _predicate(graph, root)
    json_format.ParseDict(predicate, provenance.Provenance())  # refuses what SLSA does not define
    made = Statement([subject.pb for subject in subjects], PREDICATE, predicate)
    made.validate()
    value: dict[str, Any] = json_format.MessageToDict(made.pb)
    return value


def _predicate(graph: Graph, root: Node) -> dict[str, Any]:
    result = root.made_by
    assert result is not None
    libraries = {name: str(version) for name, version in (result.environment.get("libraries") or {}).items()}
    resources = {name: result.environment[name] for name in ("threads", "processes") if name in result.environment}
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "stage": result.stage,
                "step": result.step,
                "config": _plain(result.config),
                "inputs": dict(result.inputs),
            },
            "internalParameters": {
                "key": result.key,
                "code": str(result.code.get("digest", "")),
                "record": record_hash(result),
                "git": _plain(result.record.get("git") or {}),
                "environment": _plain({**resources, "python": result.environment.get("python", ""), **libraries}),
            },
            "resolvedDependencies": [*_code(root), *_inputs(graph)],
        },
        "runDetails": {
            "builder": {"id": "urn:headrace:stage-process", "version": {"headrace": _version()}},
            "metadata": {
                "invocationId": f"{result.run}/{result.step}",
                "startedOn": _utc(result.started),
                "finishedOn": _utc(result.finished),
            },
            "byproducts": [{"name": "metrics", "annotations": _plain(result.metrics)}],
        },
    }


def record_hash(result: Result) -> str:
    """The SHA-256 (64 hex) of a record's canonical JSON, without the older records that it keeps."""
    return sha256_hex(canonical_json(json.loads(result.model_dump_json(exclude={"history"}))))


def _code(root: Node) -> list[dict[str, Any]]:
    assert root.made_by is not None
    kept = root.made_by.code.get("artifact")
    if not kept:
        return []
    return [{"name": "code", "digest": {"sha256": str(kept).removeprefix("sha256:")}, "annotations": {"kind": "code"}}]


def _inputs(graph: Graph) -> list[dict[str, Any]]:
    found = []
    for node in graph.nodes.values():
        if node.digest == graph.root:
            continue
        found.append(
            {
                "name": node.name,
                "digest": {"sha256": node.digest.removeprefix("sha256:")},
                "annotations": {"kind": node.kind, **({"record": record_hash(node.made_by)} if node.made_by else {})},
            }
        )
        if node.imported:
            found += [{"name": f"{node.name}/{entry.path}", "digest": {"sha256": entry.sha256}} for entry in node.files]
    return found


def _plain(value: Any) -> Any:
    """A value as JSON has it: no NaN, no infinity."""
    return json.loads(json.dumps(value, default=str), parse_constant=str)


def _utc(stamp: str) -> str:
    return stamp.replace("+00:00", "Z")


def _version() -> str:
    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return ""


def sign(folder: Path, manifest: Manifest, made: dict[str, Any], key: Path, password: str | None = None) -> Path:
    """Write the statement into a folder of the artifact, sign the folder, and return the signature's file.

    Args:
        folder: what `headrace pull` made: exactly the artifact's files, and SHA256SUMS.
        made: the statement.
        key: a private elliptic-curve key (PEM).
        password: of the key, where it has one.

    Raises:
        StoreError: the folder is not the artifact, the key cannot be used, or the package is missing.
    """
    try:
        from model_signing import hashing, signing
    except ImportError as error:
        raise StoreError(f"signing needs the packages of headrace[provenance]: {error}") from None
    check_folder(folder, manifest)
    signature = folder / SIGNATURE
    signature.unlink(missing_ok=True)
    (folder / STATEMENT).write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    hashed = hashing.Config().set_ignored_paths(paths=[signature.absolute()])
    try:
        signer = signing.Config().use_elliptic_key_signer(private_key=key, password=password)
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"the key {key} cannot be used: {error}; make one as docs/lineage.md says") from None
    signer.set_hashing_config(hashed).sign(folder.absolute(), signature)
    return signature


def check_folder(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder that is not exactly the artifact's files (with SHA256SUMS, a statement and a signature).

    Raises:
        StoreError: a file is missing, changed or none of the artifact's.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; make it with `headrace pull`")
    wanted = {entry.path: entry.sha256 for entry in manifest.files}
    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if not path.is_dir()}
    for path in there.keys() - wanted.keys() - {STATEMENT, SIGNATURE, "SHA256SUMS"}:
        raise StoreError(f"{folder / path} is no file of the artifact; sign a folder that `headrace pull` made")
    for path, sha256 in wanted.items():
        if path not in there or hash_file(there[path])[0] != sha256:
            raise StoreError(f"{folder / path} is not the artifact's; sign a folder that `headrace pull` made")
