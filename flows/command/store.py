"""The verbs that look after a store: verify, import, promote, rollback, refs, du, gc.

Each takes the store's URL and prints to standard output: text for people, or one JSON value with `as_json`.
"""

from __future__ import annotations

import getpass
import hashlib
import platform
import re
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows import figures
from flows.command.listing import print_json
from flows.names import UnknownName, resolve
from flows.plan import cache_path
from flows.sources import find_files
from stages.artifacts import (
    NO_REFERENCE,
    Damage,
    FilesAtHand,
    FolderStore,
    FullStore,
    Garbage,
    HashCache,
    NotInStore,
    Ref,
    Result,
    Share,
    Store,
    ancestors,
    check_ref_name,
    collect,
    import_files,
    is_about_manifest,
    list_runs,
    open_store,
    read_manifest,
    read_ref,
    ref_names,
    repair,
    size_of,
    usage,
    verify_all,
    verify_artifacts,
    write_result,
)
from stages.artifacts import promote as move_ref
from stages.artifacts import refs as all_refs
from stages.artifacts import rollback as move_ref_back

LEAST_GRACE = 600.0  # seconds; a publish that takes longer than the grace period is not safe from gc
_SHOWN = 12  # objects of a kind that gc names one by one
_SHARES_SHOWN = 20  # lines of a kind that du prints
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def parse_age(text: str, option: str) -> float:
    """A time such as "30d", "12h" or "90m" in seconds.

    Raises:
        UnknownName: it is not one.
    """
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)\s*([smhdw])", text.strip())
    if match is None:
        raise UnknownName(f"{option} {text!r}: give a time such as 30d, 12h or 90m.")
    return float(match[1]) * _UNITS[match[2]]


def who() -> str:
    """Who is at work, for histories: "user@host"."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry
        user = "unknown"
    return f"{user}@{platform.node()}"


# verify


def verify(
    store_url: str,
    name: str | None,
    *,
    quick: bool,
    with_ancestors: bool,
    mend: bool,
    sources: list[Path],
    as_json: bool,
) -> int:
    """Check one artifact, a ref with everything it was made from, or the whole store; mend what can be mended if asked.

    Args:
        quick: presence and sizes only.
        with_ancestors: with what the artifact was made from; a ref is always checked so.
        mend: put damaged blobs and manifests back from the local cache, from `sources` and from the store itself.
        sources: folders and files to find the right bytes in.

    Returns:
        The exit code: 0, or 1 if anything is (still) wrong.

    Raises:
        UnknownName: there is no such artifact.
        StoreError: the store cannot be read, or not be written to mend it.
    """
    store = open_store(store_url)
    started = time.monotonic()
    damages, artifacts, blobs = _damages(store, name, quick, with_ancestors)
    mended, left = _mend(store, damages, sources, quick) if mend and damages else ([], damages)
    if as_json:
        print_json(
            {
                "ok": not left,
                "artifacts": artifacts,
                "files": len(blobs),
                "bytes": sum(blobs.values()),
                "quick": quick,
                "damages": [_damage_json(item) for item in left],
                "mended": [_damage_json(item) for item in mended],
            }
        )
        return 1 if left else 0
    for damage in mended:
        print(f"mended: {damage}")
    for damage in left:
        print(f"damaged: {damage}")
    how = "presence and sizes" if quick else "every hash recomputed"
    told = (
        f"{figures.count(artifacts)} artifact{'s' * (artifacts != 1)}, {figures.count(len(blobs))} files, "
        f"{figures.size(sum(blobs.values()))}, {how} ({figures.duration(time.monotonic() - started)})"
    )
    if left:
        print(f"{len(left)} damaged of {told}")
        if not mend:
            print("Mend it from copies: headrace verify --repair, with --from DIR for files that you have elsewhere.")
        if any(is_about_manifest(damage) for damage in left):
            print("A manifest can be made again from a folder with all files of its artifact, such as an earlier pull.")
        print("What a step gave, `headrace run RECIPE --force STEP` puts back; data that was read, --from its folder.")
        return 1
    print(f"ok: {told}" + (f"; {len(mended)} mended" if mended else ""))
    return 0


def _damages(
    store: Store, name: str | None, quick: bool, with_ancestors: bool
) -> tuple[list[Damage], int, dict[str, int]]:
    """The damages, how many artifacts were looked at, and blob key -> size of what was."""
    if name is None:
        damages = list(verify_all(store, quick=quick))
        artifacts = sum(1 for _ in store.list("manifests/"))
        return damages, artifacts, {info.key: info.size for info in store.list("blobs/")}
    found = resolve(store, name)
    digests = ancestors(store, found.digest) if with_ancestors or found.ref else [found.digest]
    damages = list(verify_artifacts(store, digests, quick=quick))
    unreadable = {damage.artifact for damage in damages if damage.key.startswith("manifests/")}
    blobs: dict[str, int] = {}
    for digest in digests:
        if digest not in unreadable:
            blobs |= {entry.blob: entry.size for entry in read_manifest(store, digest).files}
    return damages, len(digests), blobs


def _mend(store: Store, damages: list[Damage], sources: list[Path], quick: bool) -> tuple[list[Damage], list[Damage]]:
    """What could be mended, and what is left; what only a manifest that was put back tells of is in one of them."""
    find = _copies(sources)
    mended = repair(store, damages, find, sources)
    left = [damage for damage in damages if damage not in mended]
    back = dict.fromkeys(damage.artifact for damage in mended if is_about_manifest(damage))
    more = [damage for damage in verify_artifacts(store, back, quick=quick) if damage.key not in {d.key for d in left}]
    mended_then = repair(store, more, find)
    return mended + mended_then, left + [damage for damage in more if damage not in mended_then]


def _copies(sources: list[Path]) -> Any:
    """Finds a copy of an object by its hash: in the given folders, then in this machine's cache."""
    from stages.artifacts.cache import open_cache

    files, cache = FilesAtHand(sources), open_cache()

    def find(sha256: str, size: int | None) -> Path | None:
        if found := files(sha256, size):
            return found
        return cache.find(sha256) if cache is not None else None

    return find


def _damage_json(damage: Damage) -> dict[str, Any]:
    return {"key": damage.key, "problem": damage.problem, "artifact": damage.artifact, "path": damage.path}


# import


def import_artifact(store_url: str, paths: list[str], *, ref: str | None, why: str, as_json: bool) -> None:
    """Bring files, folders or a Hugging Face model's folder into the store, as a run that reads them would.

    A folder with a config.json becomes a `checkpoint`, all else a `source`. A record says who brought what, and when.

    Args:
        ref: a reference that shall name it.

    Raises:
        UnknownName: nothing matches, or a file cannot be taken.
        StoreError: the store cannot be written.
    """
    store = open_store(store_url)
    started, begun = datetime.now(UTC), time.monotonic()
    try:
        if ref is not None:
            check_ref_name(ref)
        kind, files = find_files(tuple(paths), Path.cwd())
        hashes = HashCache(cache_path(store))
        digest = import_files(store, files, kind, hashes)
        hashes.save()
    except ValueError as error:
        raise UnknownName(f"{str(error).rstrip('.')}.") from None
    finished, seconds = datetime.now(UTC), time.monotonic() - begun
    names = sorted({Path(path).name for path in paths})
    record: dict[str, Any] = {
        "artifact": digest,
        "kind": kind,
        "stage": "import",
        "step": re.sub(r"[^\w.-]", "-", names[0]),
        "key": hashlib.sha256(f"import:{digest}".encode()).hexdigest(),
        "run": "import",
        "config": {"paths": names},
        "identity": {"artifact": digest},
        "started": started.isoformat(timespec="milliseconds"),
        "finished": finished.isoformat(timespec="milliseconds"),
        "seconds": round(seconds, 3),
        "record": {"who": who()},
    }
    write_result(store, Result.model_validate(record))
    if ref is not None:
        moved = _moved(lambda: move_ref(store, ref, digest, who=who(), why=why or f"imported {', '.join(names)}"))
        _say_if_also_a_step(store, moved)
    size = sum(size_of(file) for _, file in files)
    if as_json:
        print_json({"artifact": digest, "kind": kind, "files": len(files), "bytes": size, "ref": ref})
        return
    print(f"{kind}: {figures.count(len(files))} file{'s' * (len(files) != 1)}, {figures.size(size)}")
    print(digest + (f"  ({ref})" if ref else ""))
    print(f"In a recipe: {f'ref:{ref}' if ref else f'artifact:{digest}'}")


# References


def promote(store_url: str, name: str, ref: str, *, why: str, expect: str | None, as_json: bool) -> None:
    """Have a reference name an artifact.

    Args:
        name: the artifact, as people name it.
        expect: the artifact that the reference must name now, `NO_REFERENCE` for: there must be no such reference.

    Raises:
        UnknownName: there is no such artifact, or the name is not allowed.
        StoreError: the artifact is not whole, or the reference names something else than expected.
    """
    store = open_store(store_url)
    digest = resolve(store, name).digest
    expected = None if expect is None else "" if expect == NO_REFERENCE else resolve(store, expect).digest
    moved = _moved(lambda: move_ref(store, ref, digest, who=who(), why=why, expect=expected))
    _say_moved(moved, as_json)
    _say_if_also_a_step(store, moved)


def rollback(store_url: str, ref: str, *, to: int | None, why: str, as_json: bool) -> None:
    """Have a reference name what it named before.

    Raises:
        UnknownName: it never named anything else, or has no such entry.
        StoreError: there is no such reference, or the artifact is gone.
    """
    store = open_store(store_url)
    _say_moved(_moved(lambda: move_ref_back(store, ref, who=who(), why=why, to=to)), as_json)


def _moved(move: Any) -> Ref:
    try:
        return move()
    except ValueError as error:
        raise UnknownName(f"{str(error).rstrip('.')}.") from None


def _say_if_also_a_step(store: Store, ref: Ref) -> None:
    """Warn whoever makes a reference that is called as a step is: from now on the bare name means the reference."""
    if len(ref.history) > 1:
        return
    run = next((run["id"] for run in list_runs(store) if ref.name in run.get("steps", {})), None)
    if run is not None:
        print(
            f"headrace: {ref.name} is the name of a step too; it means the reference from now on, and {run}/{ref.name} "
            "the step",
            file=sys.stderr,
        )


def _say_moved(ref: Ref, as_json: bool) -> None:
    if as_json:
        print_json(ref.model_dump(mode="json"))
        return
    last = ref.history[-1]
    before = f", before: {figures.short(last.previous)}" if last.previous else ""
    print(f"{ref.name}  {ref.artifact}  (entry {last.number}{before})")


def refs(store_url: str, name: str | None, *, history: bool, as_json: bool) -> None:
    """The references of a store, or one; with their histories if asked.

    Raises:
        UnknownName: there is no such reference.
    """
    store = open_store(store_url)
    try:
        found = list(all_refs(store, all_or_none=False)) if name is None else [read_ref(store, name)]
    except (NotInStore, ValueError) as error:
        raise UnknownName(f"{str(error).rstrip('.')}.") from None
    if as_json:
        print_json([ref.model_dump(mode="json", exclude=None if history else {"history"}) for ref in found])
        return
    if not found and not ref_names(store):
        print(f"No references in store {store.url}. `headrace promote ARTIFACT NAME` makes one.")
    for ref in found:
        print(f"  {ref.name:<24} {ref.artifact}")
        for move in ref.history if history else []:
            when = f"{datetime.fromisoformat(move.when).astimezone():%Y-%m-%d %H:%M}"
            back = f"back to entry {move.restores}" if move.restores else ""
            told = " · ".join(filter(None, [back, move.why]))
            print(f"    {move.number:>4}  {when}  {figures.short(move.artifact):<12}  {move.who:<20}  {told}".rstrip())


# Room


def du(store_url: str, *, as_json: bool) -> None:
    """What takes how much room, by kind, stage, run and model."""
    store = open_store(store_url)
    used = usage(store)
    if as_json:
        print_json(asdict(used) | {"total": used.total})
        return
    print(
        f"{figures.size(used.total)} in store {store.url}: {figures.count(used.artifacts)} artifacts with "
        f"{figures.size(used.files)} of files in {figures.size(used.blobs)} of blobs"
    )
    groups = (("kind", used.kinds), ("stage", used.stages), ("run", used.runs), ("model", used.models))
    for title, shares in groups:
        print(f"  by {title:<35} {'artifacts':>9}  {'size':>10}  {'alone':>10}")
        for label, share in list(shares.items())[:_SHARES_SHOWN]:
            print(_share_line(label, share))
        if len(shares) > _SHARES_SHOWN:
            print(f"    … and {figures.count(len(shares) - _SHARES_SHOWN)} smaller ones (all of them with --json)")
    rest = {**used.other, "blobs of no artifact": used.unnamed, "left by killed writers": used.leftovers}
    print("  beside the artifacts")
    for label, size in rest.items():
        if size:
            print(f"    {label:<47}  {figures.size(size):>10}")
    print("alone: what no artifact outside the line holds, so what removing those of the line would free.")


def _share_line(label: str, share: Share) -> str:
    sizes = f"{figures.size(share.size):>10}  {figures.size(share.alone):>10}"
    return f"    {label:<36} {figures.count(share.artifacts):>7}  {sizes}"


def _make_way(store: Store) -> bool:
    """Free what a gc needs for its own lease on a full disk: hashes that can be computed again. Whether it could be."""
    from flows.plan import cache_path

    remembered = cache_path(store)
    try:
        if not isinstance(store, FolderStore) or remembered is None:
            return False
        remembered.unlink()
    except OSError:
        return False
    return True


def gc(store_url: str, *, delete: bool, keep: str, grace: str, as_json: bool) -> None:
    """Name, or remove, what nothing needs any more.

    Raises:
        UnknownName: a time is not one, or the grace period is too short or too long.
        StoreError: the store cannot be read or written.
    """
    retention, young = parse_age(keep, "--keep"), parse_age(grace, "--grace")
    if young < LEAST_GRACE:
        raise UnknownName(f"--grace {grace}: at least 10m, so that what runs are just publishing is safe.")
    if young > retention:
        raise UnknownName(f"--grace {grace} is longer than --keep {keep}; make it shorter.")
    store = open_store(store_url)
    try:
        found = collect(store, delete=delete, retention=retention, grace=young)
    except FullStore:
        if not _make_way(store):
            raise
        found = collect(store, delete=delete, retention=retention, grace=young)
    if as_json:
        print_json(asdict(found) | {"bytes": found.size})
        return
    by_why: dict[str, list[Garbage]] = {}
    for item in found.garbage:
        by_why.setdefault(item.why, []).append(item)
    for why, items in by_why.items():
        print(f"  {figures.count(len(items))} × {why}: {figures.size(sum(item.size for item in items))}")
        for item in items[:_SHOWN]:
            print(f"      {item.key}  {figures.size(item.size)}")
        if len(items) > _SHOWN:
            print(f"      … and {figures.count(len(items) - _SHOWN)} more (all of them with --json)")
    if found.spared:
        print(f"  {figures.count(len(found.spared))} spared at the second look: they are in use again")
    count = figures.count(len(found.garbage))
    if not found.garbage:
        print(f"Nothing to remove: {figures.count(found.kept)} artifacts are kept.")
    elif delete:
        print(f"Removed {count} objects, {figures.size(found.size)}; {figures.count(found.kept)} artifacts are kept.")
    else:
        print(f"{count} objects, {figures.size(found.size)}, would go; {figures.count(found.kept)} artifacts are kept.")
        print("Nothing was removed. `headrace gc --delete` removes them.")
