"""Whether a store still says what was signed.

The model: `headrace attest --sign` leaves a folder with an artifact's files, the statement of how it was made, and a
signature of both. Whoever has that folder (away from the store) and the public key can tell a store that was rewritten
in every place that ties it together, which no look at the store alone can:

- the signature is OpenSSF model signing's and is checked by its library: the folder is as it was signed;
- the artifact asked about is the one that was signed, so a reference that was moved to another is told;
- its manifest is sound, and its files in the store have the signed hashes;
- of every artifact that it was made from the manifest is sound, and the record that was signed is still in the store,
  byte for byte of its canonical JSON. That the same was made again since is no fault, for older records are kept.

The bytes of files further up are tied to these manifests; `verify --deep` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.lineage.attest import SIGNATURE, STATEMENT, record_hash
from flows.lineage.records import older
from stages.artifacts import Damaged, Manifest, NotInStore, Result, Store, StoreError, read_manifest, results


class SignatureFails(StoreError):
    """The signature does not hold, or what it covers was changed."""


@dataclass(frozen=True)
class Signed:
    """A folder whose signature holds: see `open_signed`.

    Attributes:
        artifact: the digest that was signed.
        statement: in-toto's, as it was signed.
    """

    folder: Path
    artifact: str
    statement: dict[str, Any]


def signed_artifact(folder: Path) -> str:
    """The digest that a folder's statement is about, whether or not its signature holds.

    Raises:
        StoreError: it has no statement.
    """
    return _artifact_of(_read_statement(folder), folder)


def open_signed(folder: Path, public_key: Path) -> Signed:
    """Check the signature of a folder that `headrace attest --sign` signed.

    Args:
        public_key: of the key that it was signed with (PEM).

    Raises:
        SignatureFails: the signature does not hold.
        StoreError: the folder or key cannot be read, or the package is missing.
    """
    try:
        from model_signing import hashing, verifying
    except ImportError as error:
        raise StoreError(f"checking signatures needs the packages of headrace[provenance]: {error}") from None
    signature = folder / SIGNATURE
    if not signature.is_file():
        raise StoreError(f"{folder} has no signature {SIGNATURE}; `headrace attest ARTIFACT --sign {folder}` makes one")
    if not public_key.is_file():
        raise StoreError(f"there is no public key {public_key}; docs/lineage.md says how to make one")
    hashed = hashing.Config().set_ignored_paths(paths=[signature.absolute()])  # relative ones count from the folder
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key).set_hashing_config(hashed)
        verifier.verify(folder.absolute(), signature)
    except Exception as error:  # the library's own and those of three others, with no class in common
        raise SignatureFails(f"the signature of {folder} does not hold: {str(error) or type(error).__name__}") from None
    statement = _read_statement(folder)
    return Signed(folder, _artifact_of(statement, folder), statement)


def _read_statement(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / STATEMENT).read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder / STATEMENT} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise StoreError(f"{folder / STATEMENT} is no statement")
    return value


def _artifact_of(statement: dict[str, Any], folder: Path) -> str:
    for subject in statement.get("subject") or []:
        if subject.get("name") == "manifest" and (digest := (subject.get("annotations") or {}).get("artifact")):
            return str(digest)
    raise StoreError(f"{folder / STATEMENT} names no artifact")


def problems(store: Store, digest: str, signed: Signed, makers: Callable[[str], Iterable[Result]]) -> Iterator[str]:
    """What the store says otherwise than it was signed, in a few words each; nothing when all is as it was.

    Args:
        digest: of the artifact asked about.
        makers: the results of the store that gave an artifact, older ones included.

    Raises:
        StoreError: the store cannot be read.
    """
    if digest != signed.artifact:
        yield f"artifact {digest} is not the one that was signed ({signed.artifact})"
        return
    yield from _files(store, digest, signed)
    definition = signed.statement["predicate"]["buildDefinition"]
    parts = [("", digest, definition["internalParameters"].get("record"))]
    for item in definition.get("resolvedDependencies") or []:
        notes = item.get("annotations") or {}
        if "kind" in notes:  # an artifact; the others are its files
            parts.append((item["name"], f"sha256:{item['digest']['sha256']}", notes.get("record")))
    for name, artifact, record in parts:
        if name:
            try:
                read_manifest(store, artifact)
            except (NotInStore, Damaged) as error:
                yield f"{name}: {error}"
        if record and record not in map(record_hash, makers(artifact)):
            yield f"{name or 'its own record'}: the record that was signed ({record[:12]}…) is no longer in the store"


def _files(store: Store, digest: str, signed: Signed) -> Iterator[str]:
    try:
        manifest: Manifest = read_manifest(store, digest)
    except (NotInStore, Damaged) as error:
        yield str(error)
        return
    named = {subject["name"]: subject["digest"]["sha256"] for subject in signed.statement["subject"]}
    for entry in manifest.files:
        try:
            found = store.hash(entry.blob)
        except NotInStore:
            found = ""
        if found != named.get(entry.path):
            yield f"{entry.path}: its bytes in the store are {'not those that were signed' if found else 'missing'}"


def makers_in(store: Store) -> Callable[[str], list[Result]]:
    """The results that gave an artifact, by a look through all records of the store."""
    found: dict[str, list[Result]] = {}
    for current in results(store):
        for result in (current, *older(current)):
            for digest in (result.artifact, *result.outputs.values()):
                found.setdefault(digest, []).append(result)
    return lambda digest: found.get(digest, [])
