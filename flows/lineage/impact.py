"""What was made from a file or an artifact, and which references point there."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from flows import figures
from flows.lineage import queries
from flows.lineage.index import Index
from flows.lineage.queries import Artifact
from flows.names import UnknownName, resolve
from stages.artifacts import hash_file


@dataclass(frozen=True)
class Impact:
    """What was made from something.

    Attributes:
        what: how to speak of it: a file's name or an artifact's.
        sha256: of the file, 64 hex; "" where an artifact was asked about.
        holders: artifacts that hold the file, with its path in each, newest first; or the artifact itself, with "".
        held: how many hold it, those that were left out included.
        made: artifacts that were made from them, newest first, with or without the tables beside datasets.
        total: how many were made, those that were left out included.
        kinds: how many artifacts of each kind were made and are in the store; the tables beside datasets do not count.
        refs: (reference, digest, since when in unix seconds, whether it names that now).
    """

    what: str
    sha256: str
    holders: list[tuple[Artifact, str]]
    held: int
    made: list[Artifact]
    total: int
    kinds: dict[str, int]
    refs: list[tuple[str, str, float, bool]]

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values."""
        return {
            "what": self.what,
            "sha256": self.sha256,
            "held_by": [{"artifact": found.digest, "kind": found.kind, "path": path} for found, path in self.holders],
            "kinds": self.kinds,
            "made": [asdict(found) | {"name": found.name} for found in self.made],
            "refs": [dict(zip(("ref", "artifact", "since", "now"), found, strict=True)) for found in self.refs],
        }


def impact(index: Index, name: str, limit: int | None = None) -> Impact:
    """What was made from a file on this machine, a file's SHA-256, the path of a file in an artifact, or an artifact.

    Args:
        limit: how many artifacts to list, and then without the tables beside datasets; None is all of everything.

    Raises:
        UnknownName: the store knows nothing of that.
    """
    path = Path(name)
    if path.is_file():
        sha256 = hash_file(path)[0]
        if found := of_file(index, sha256, name, limit):
            return found
        raise UnknownName(f"{name} (sha256:{sha256[:12]}…): no artifact in store {index.store.url} holds these bytes.")
    digits = name.removeprefix("artifact:").removeprefix("sha256:")
    if re.fullmatch(r"[0-9a-f]{64}", digits):
        if queries.artifact(index, f"sha256:{digits}") is not None:
            return of_artifact(index, f"sha256:{digits}", f"artifact {digits[:12]}", limit)
        if found := of_file(index, digits, f"file sha256:{digits[:12]}…", limit):
            return found
        raise UnknownName(f"store {index.store.url} has neither an artifact nor a file {name}.")
    same = [file for file in queries.files_named(index, name, limit=1000) if file.path == name]
    if len({file.sha256 for file in same}) == 1:
        found = of_file(index, same[0].sha256, name, limit)
        assert found is not None
        return found
    if same:
        hashes = ", ".join(f"sha256:{file.sha256}" for file in same[:3])
        raise UnknownName(f"{len(same)} different files have the path {name}; give the hash of one: {hashes}, …")
    try:
        named = resolve(index.store, name, index)
    except UnknownName as error:
        raise UnknownName(f"there is no file {name} here or in the store, and {error}") from None
    return of_artifact(index, named.digest, named.label, limit)


def of_file(
    index: Index, sha256: str, what: str, limit: int | None = None, *, offset: int = 0, holders: int | None = None
) -> Impact | None:
    """What was made from a file (64 hex); None where no artifact holds it.

    Args:
        limit, offset: as of `impact`, and from which of them on.
        holders: how many artifacts that hold it to list, else as `limit`.
    """
    most = holders if holders is not None else limit
    found = queries.holders(index, sha256, limit=-1 if most is None else most)
    if not found:
        return None
    made = queries.made_from(index, file=sha256, limit=limit, offset=offset, tables=limit is None)
    held = queries.count_holders(index, sha256)
    return Impact(what, sha256, found, held, made.artifacts, made.total, made.kinds, made.refs)


def of_artifact(index: Index, digest: str, what: str, limit: int | None = None) -> Impact:
    """What was made from an artifact.

    Raises:
        UnknownName: the store does not know it.
    """
    found = queries.artifact(index, digest)
    if found is None:
        raise UnknownName(f"store {index.store.url} has no artifact {digest}.")
    made = queries.made_from(index, artifact=digest, limit=limit, tables=limit is None)
    return Impact(what, "", [(found, "")], 1, made.artifacts, made.total, made.kinds, made.refs)


def lines(found: Impact) -> list[str]:
    """An impact for people."""
    kinds = [
        f"{count:,} {kind}{'' if kind.endswith('s') else 's' * (count != 1)}" for kind, count in found.kinds.items()
    ]
    hashed = f" (sha256:{found.sha256[:12]}…)" if found.sha256 else ""
    now = [f"{ref} (since {_day(since)})" for ref, _, since, is_now in found.refs if is_now]
    once = sorted(
        {ref for ref, _, _, is_now in found.refs if not is_now} - {ref for ref, _, _, is_now in found.refs if is_now}
    )
    refs = f"; refs: {', '.join(now)}" if now else "; no reference names any of it now"
    told = [f"{found.what}{hashed}: {figures.listed(kinds) or 'nothing'} made from it{refs}"]
    if once:
        told.append(f"  once named by {', '.join(once)}")
    if found.sha256:
        for holder, path in found.holders:
            told.append(f"  in {holder.kind} {figures.short(holder.digest)} ({holder.name}) as {path}")
        if found.held > len(found.holders):
            more = found.held - len(found.holders)
            told.append(f"  … and {more:,} more artifact{'s' * (more != 1)} that hold{'s' * (more == 1)} it")
    names = {digest: ref for ref, digest, _, is_now in found.refs if is_now}
    for artifact in found.made:
        when = f"{datetime.fromtimestamp(artifact.time).astimezone():%Y-%m-%d %H:%M}" if artifact.time else ""
        ref = f"  <- {names[artifact.digest]}" if artifact.digest in names else ""
        gone = "" if artifact.present else "  (not in this store)"
        what = f"{figures.short(artifact.digest)}  {artifact.kind:<10}  {artifact.name:<20}"
        told.append(f"    {what}  run {artifact.run}  {when}{gone}{ref}")
    if found.total > len(found.made):
        told.append(f"    … and {found.total - len(found.made):,} more (all with --limit or --json)")
    return told


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%d %b %Y}".lstrip("0")
