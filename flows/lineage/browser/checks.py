"""The page that checks an artifact now: every hash and the records of how, of it alone or with all it was made from.

Reading gigabytes is for the command `headrace verify`; the page does it up to a size, and one check at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.lineage import proof, queries, records, signature
from flows.lineage.browser.site import NoPage, Site
from stages.artifacts import Damage, Result, StoreError, result_key, verify_artifacts

MOST_BYTES = 2 << 30
_MOST_ARTIFACTS = 2000
_checking = threading.Lock()


def check(site: Site, name: str, *, ancestors: bool) -> dict[str, Any]:
    """Recompute the hashes of an artifact.

    Args:
        ancestors: with everything that it was made from.

    Raises:
        NoPage: the store does not name it.
    """
    digest = site.digest(name)
    known = queries.artifact(site.index, digest)
    if known is None:
        raise NoPage(f"This store has no artifact {digest}.")
    found = _with_ancestors(site, known) if ancestors else [known]
    size = sum(item.size for item in found)
    shown: dict[str, Any] = {
        "title": f"Check of {known.name}",
        "here": "artifacts",
        "artifact": known,
        "ancestors": ancestors,
        "found": found,
        "size": size,
        "state": "checked",
        "damages": [],
        "seconds": 0.0,
        "signatures": [],
        "command_line": site.command("verify", digest, *(["--ancestors"] if ancestors else [])),
    }
    if size > MOST_BYTES or len(found) >= _MOST_ARTIFACTS:
        return shown | {"state": "large"}
    if not _checking.acquire(blocking=False):
        return shown | {"state": "busy"}
    try:
        begun = time.monotonic()
        damages = [*_pointers(site, found), *verify_artifacts(site.store, [item.digest for item in found])]
        signatures = list(_signatures(site, digest))
        return shown | {"damages": damages, "signatures": signatures, "seconds": time.monotonic() - begun}
    finally:
        _checking.release()


def _pointers(site: Site, found: list[queries.Artifact]) -> Iterator[Damage]:
    """What is wrong with records and references: those that cannot be read, and those that contradict themselves."""
    for unread in queries.problems(site.index):
        if unread.key.startswith(("results/", "refs/")):  # what it named cannot be told, so it may be part of this
            yield Damage(unread.key, unread.problem)
    sources: dict[tuple[str, str], list[str]] = {}
    for item in found:
        for result, _ in records.makers(site.index, item.digest):
            for problem in proof.check_record(site.store, result, sources):
                yield Damage(result_key(result.stage, result.key), problem, result.artifact)
    for name, _, _, now in queries.refs_to(site.index, [found[0].digest]):
        if now:
            yield from proof.check_ref(site.store, name)


def _signatures(site: Site, digest: str) -> Iterator[tuple[str, list[str]]]:
    """(signed folder, what the store says otherwise) for the folders that say they are of this artifact; where folders
    were given and none is, that the artifact was not signed."""

    def makers(artifact: str) -> list[Result]:
        return [result for result, _ in records.makers(site.index, artifact)]

    mine = [(folder, key) for folder, key in site.signed if _about(folder) == digest]
    for folder, key in mine:
        try:
            yield str(folder), list(signature.problems(site.store, digest, signature.open_signed(folder, key), makers))
        except StoreError as error:
            yield str(folder), [str(error)]
    if site.signed and not mine:
        named = ", ".join(str(folder) for folder, _ in site.signed)
        yield named, [f"this artifact is none that was signed; {named} has the signature of another"]


def _about(folder: Path) -> str:
    try:
        return signature.signed_artifact(folder)
    except StoreError:  # it was readable when the pages were started
        return ""


def _with_ancestors(site: Site, root: queries.Artifact) -> list[queries.Artifact]:
    found, waiting = {root.digest: root}, [root.digest]
    while waiting and len(found) < _MOST_ARTIFACTS:
        for edge in queries.parents(site.index, waiting.pop(0)):
            if edge.artifact.digest not in found:
                found[edge.artifact.digest] = edge.artifact
                waiting.append(edge.artifact.digest)
    return list(found.values())
