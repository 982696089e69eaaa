"""Taking artifacts out of a store, verified.

Invariants: bytes that do not match their manifest are never left in the folder that was asked for, and that folder
appears whole or not at all.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

from stages.artifacts.cache import BlobCache, WrongBytes, open_cache, room_for
from stages.artifacts.manifest import MAX_BYTES, FileEntry, Manifest, check_digest, manifest_key, sha256_hex
from stages.artifacts.store import Damaged, NotInStore, Store, StoreError, in_parallel_by_size
from stages.artifacts.temporary import folder_in
from stages.os_errors import explained

SUMS = "SHA256SUMS"
_REMEMBERED_BYTES = 32 << 20  # of a manifest that is remembered


def read_manifest(store: Store, digest: str) -> Manifest:
    """The manifest of an artifact, checked against its digest.

    Raises:
        NotInStore: the store has no such artifact.
        Damaged: the stored manifest is not the one of that digest.
        ValueError: `digest` is not a full digest.
    """
    key = manifest_key(digest)
    try:
        data = store.get(key, limit=MAX_BYTES)
    except NotInStore:
        raise NotInStore(f"store {store.url} has no artifact {digest}") from None
    if "sha256:" + sha256_hex(data) != digest:
        raise Damaged(f"{key} in store {store.url} is damaged: its content has another hash")
    try:
        return _parse(data) if len(data) <= _REMEMBERED_BYTES else Manifest.parse(data)
    except ValueError as error:
        raise Damaged(f"{key} in store {store.url} is not an allowed manifest: {error}") from error


@lru_cache(maxsize=4)
def _parse(data: bytes) -> Manifest:
    """`Manifest.parse`, whose checks take half a second for 100,000 files; the same bytes are the same manifest."""
    return Manifest.parse(data)


def fetch(store: Store, digest: str, folder: Path) -> Manifest:
    """Copy an artifact's files to `folder`, which must be absent or empty, and verify them in the same pass.

    Files of a remote store go through the cache of this machine, and may be links into it: they must not be changed.

    Raises:
        NotInStore: the store has no such artifact.
        Damaged: a blob is missing or has other bytes; the message names the blob and the file.
        StoreError: the folder cannot be written or is not empty.
    """
    manifest = read_manifest(store, digest)
    _fetch(store, digest, manifest, folder, sums=False, link=True)
    return manifest


def pull(store: Store, digest: str, folder: Path) -> Manifest:
    """`fetch` for people: adds a SHA256SUMS file, unless the artifact brings its own, that `sha256sum -c` accepts.

    Raises: as `fetch`.
    """
    manifest = read_manifest(store, digest)
    _fetch(store, digest, manifest, folder, sums=all(entry.path != SUMS for entry in manifest.files), link=False)
    return manifest


def _fetch(store: Store, digest: str, manifest: Manifest, folder: Path, *, sums: bool, link: bool) -> None:
    folder = Path(os.path.abspath(folder))
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise StoreError(f"{folder} is there already and not an empty folder; give another")
    try:
        with folder_in(folder.parent, f".{folder.name}.") as partial:
            for parent in {(partial / entry.path).parent for entry in manifest.files}:
                parent.mkdir(parents=True, exist_ok=True)
            cache = room_for(open_cache(), manifest.files) if store.remote else None
            if cache is not None:
                cache.keep_manifest(check_digest(digest), manifest.to_json())

            def copy(entry: FileEntry) -> None:
                copy_blob(store, entry, partial / entry.path, f"artifact {digest}", cache=cache, link=link)

            in_parallel_by_size(copy, manifest.files, lambda entry: entry.size)
            if sums:
                lines = (f"{entry.sha256}  {entry.path}\n" for entry in manifest.files)
                (partial / SUMS).write_text("".join(lines), encoding="utf-8")
            os.rename(partial, folder)
    except OSError as error:
        raise StoreError(f"cannot write {folder}: {explained(error)}") from error


def copy_blob(
    store: Store,
    entry: FileEntry,
    target: Path,
    whose: str,
    key: str | None = None,
    *,
    cache: BlobCache | None = None,
    link: bool = False,
) -> None:
    """Copy one blob to a new file and verify it; `whose` says in errors what it belongs to.

    Args:
        key: where it lies, if not under its own hash.
        cache: where blobs of a remote store are kept on this machine; None: it is not.
        link: let the file be a link into the cache.

    Raises:
        Damaged: the blob is missing or has other bytes; nothing is left at `target`.
    """
    key = key or entry.blob
    try:
        if cache is not None:
            if not cache.take(entry, target, link=link):
                cache.fill(store, key, entry, target, link=link)
            return
        sha256, size = store.get_file(key, target, size=entry.size)
    except NotInStore:
        raise Damaged(f"{key} ({entry.path} of {whose}) is missing from store {store.url}") from None
    except WrongBytes as wrong:
        sha256, size = wrong.sha256, wrong.size
    if (sha256, size) == (entry.sha256, entry.size):
        return
    target.unlink(missing_ok=True)
    if size != entry.size:
        raise Damaged(f"{key} ({entry.path} of {whose}) has {size:,} bytes in store {store.url}, not {entry.size:,}")
    raise Damaged(f"{key} ({entry.path} of {whose}) is damaged in store {store.url}: its bytes have another hash")


def is_complete(store: Store, digest: str, seen: dict[str, int] | None = None) -> bool:
    """Whether an artifact's manifest is there and sound, and every blob is there with the right size.

    Hashes are not recomputed; `fetch` and `verify_artifact` do that.

    Args:
        seen: key -> size of blobs that the caller found a moment ago; they are not looked up again, and those that are
            found now are added. It lets one look at many artifacts, which share blobs, ask for each blob once.
    """
    try:
        return has_blobs(store, read_manifest(store, digest), seen)
    except (NotInStore, Damaged):
        return False


def has_blobs(store: Store, manifest: Manifest, seen: dict[str, int] | None = None) -> bool:
    """Whether every blob of an artifact is there with the right size; `seen` as of `is_complete`."""
    wanted = {f"blobs/{sha256[:2]}/{sha256}": size for _, size, sha256 in manifest.files}
    if len(wanted) < len(manifest.files) and any(wanted[entry.blob] != entry.size for entry in manifest.files):
        return False  # one blob cannot have two sizes
    seen = {} if seen is None else seen
    if unseen := wanted.keys() - seen.keys():
        seen.update(store.sizes(unseen))
    return wanted.items() <= seen.items()


def resolve_digest(store: Store, prefix: str) -> str:
    """The full digest that starts with `prefix`: "sha256:9f31c0" or "9f31c0", at least 6 hexadecimal digits.

    Raises:
        ValueError: it is too short or not hexadecimal, or no artifact or several start so.
    """
    digits = prefix.removeprefix("sha256:").lower()
    if not re.fullmatch(r"[0-9a-f]{6,64}", digits):
        raise ValueError(f"{prefix!r} is not a digest; give at least 6 hexadecimal digits, such as 9f31c0")
    found = []
    for info in store.list(f"manifests/{digits[:2]}/{digits}"):
        name = info.key.rpartition("/")[2].removesuffix(".json")
        if re.fullmatch(r"[0-9a-f]{64}", name):
            found.append("sha256:" + name)
    if not found:
        raise ValueError(f"store {store.url} has no artifact {prefix}")
    if len(found) > 1:
        shown = ", ".join(digest[:19] for digest in found[:4])
        raise ValueError(f"{prefix} is ambiguous: {len(found)} artifacts start so ({shown}); give more digits")
    return found[0]
