"""Mending a store from copies at hand.

A blob is put back from any file with its hash. A manifest is put back from a copy of it, which the cache of this
machine has of what it fetched; else it is made again, from a folder that holds the artifact's files, or from the store
itself: the `SHA256SUMS` of a checkpoint names all of its files. Whatever it is made from, its hash proves it.

What a record, a reference or a run said cannot be made again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from stages.artifacts.fetch import SUMS, read_manifest
from stages.artifacts.manifest import MAX_BYTES, FileEntry, Manifest, check_digest, manifest_key, sha256_hex
from stages.artifacts.store import Damaged, NotInStore, Store, StoreError, hash_file
from stages.artifacts.verify import Damage
from stages.contract import KINDS
from stages.os_errors import explained

_SUM = re.compile(r"[0-9a-f]{64}  .+\n")
Find = Callable[[str, int | None], Path | None]
_LARGEST_SUMS = 1 << 20  # of ten thousand files


def repair(store: Store, damages: Iterable[Damage], find: Find, folders: Iterable[Path] = ()) -> list[Damage]:
    """Put damaged and missing blobs and manifests back. Returns the damages that are mended.

    What is damaged below a manifest that was put back is known only then: verify its artifact again.

    Args:
        find: a file of a hash (hex) and a size (None: any), whose bytes are checked again when they are stored.
        folders: folders that may hold, alone or somewhere below, all files of an artifact.

    Raises:
        StoreError: the store cannot be written, or a folder cannot be read.
    """
    damages = list(damages)
    blobs: dict[str, bool] = {}
    for damage in damages:
        match = re.fullmatch(r"blobs/[0-9a-f]{2}/([0-9a-f]{64})", damage.key)
        if match and damage.key not in blobs:
            copy = find(match[1], damage.size)
            blobs[damage.key] = copy is not None and _put_back(store, damage.key, match[1], copy)
    gone = dict.fromkeys(damage.artifact for damage in damages if is_about_manifest(damage))
    back = {digest for digest, data in _manifests(store, list(gone), find, list(folders)) if _put(store, digest, data)}
    return [
        damage for damage in damages if blobs.get(damage.key) or (is_about_manifest(damage) and damage.artifact in back)
    ]


def is_about_manifest(damage: Damage) -> bool:
    """Whether the manifest of `damage.artifact` is damaged, or missing where something names it."""
    return bool(damage.artifact) and not damage.path and not damage.key.startswith("blobs/")


def _put_back(store: Store, key: str, sha256: str, copy: Path) -> bool:
    try:
        store.put_file(key, copy, sha256=sha256)
    except Damaged:  # it changed since it was found
        return False
    return store.hash(key) == sha256


def _put(store: Store, digest: str, data: bytes) -> bool:
    store.put(manifest_key(digest), data)
    return "sha256:" + sha256_hex(store.get(manifest_key(digest), limit=MAX_BYTES)) == digest


def _manifests(store: Store, digests: list[str], find: Find, folders: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Those of the manifests that can be had, as (digest, bytes)."""
    wanted = set(digests)
    for digest in digests:
        copy = find(check_digest(digest), None)
        data = copy.read_bytes() if copy is not None and copy.stat().st_size <= MAX_BYTES else b""
        if "sha256:" + sha256_hex(data) == digest:
            wanted.discard(digest)
            yield digest, data
    for source in (_of_sums, lambda _: _of_folders(folders)):
        if wanted:
            for files in source(store):
                for manifest in _made_of(files):
                    if manifest.digest in wanted:
                        wanted.discard(manifest.digest)
                        yield manifest.digest, manifest.to_json()


def _made_of(files: tuple[FileEntry, ...]) -> Iterator[Manifest]:
    """The manifests that files may have, of any kind."""
    for kind in KINDS:
        try:
            yield Manifest(kind, files)
        except ValueError:  # no files, or names that no artifact has
            return


def _of_sums(store: Store) -> Iterator[tuple[FileEntry, ...]]:
    """The files that blobs in the format of sha256sum name, with the blob itself, where no sound manifest holds it."""
    infos = {info.key: info for info in store.list("blobs/")}
    named: set[str] = set()
    for info in store.list("manifests/"):
        try:
            named.update(entry.blob for entry in read_manifest(store, "sha256:" + info.key[-69:-5]).files)
        except (NotInStore, Damaged, ValueError):
            continue
    for key, info in infos.items():
        if key in named or info.size > _LARGEST_SUMS:
            continue
        text = store.get(key).decode("utf-8", "replace")
        sums = re.findall(r"^([0-9a-f]{64})  (.+)$", text, re.MULTILINE) if _SUM.match(text) else []
        sizes = {sha256: infos.get(f"blobs/{sha256[:2]}/{sha256}") for sha256, _ in sums}
        if sums and all(sizes.values()):
            files = [FileEntry(path, found.size, sha) for sha, path in sums if (found := sizes[sha]) is not None]
            yield (*files, FileEntry(SUMS, info.size, key.rpartition("/")[2]))


def _of_folders(folders: list[Path]) -> Iterator[tuple[FileEntry, ...]]:
    """The files of each folder at or below those given: all of them, those that are not hidden, without the sums."""
    entries: dict[Path, tuple[int, str]] = {}
    for top in folders:
        if top.is_dir():
            for path in _files(top):
                sha256, size = hash_file(path)
                entries[path] = size, sha256
    for folder in dict.fromkeys(parent for path in entries for parent in path.parents):
        if not any(folder == top or top in folder.parents for top in folders):
            continue
        files = [
            FileEntry(path.relative_to(folder).as_posix(), *entries[path]) for path in entries if folder in path.parents
        ]
        shown = [file for file in files if not any(part.startswith(".") for part in file.path.split("/"))]
        yield from {tuple(files), tuple(shown), tuple(file for file in files if file.path != SUMS)}


class FilesAtHand:
    """Finds files by their content below folders, such as an earlier `pull` or the raw data: a file is hashed when its
    size fits, once.

    Raises:
        StoreError: a folder cannot be read.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._by_size: dict[int, list[Path]] = {}
        self._hashes: dict[Path, str] = {}
        for folder in folders:
            if not folder.exists():
                raise StoreError(f"{folder} does not exist; give a folder or file to repair from")
            for path in [folder] if folder.is_file() else _files(folder):
                self._by_size.setdefault(path.stat().st_size, []).append(path)

    def __call__(self, sha256: str, size: int | None) -> Path | None:
        """A file with that SHA-256 (hex), None where there is none."""
        sizes = self._by_size if size is None else [size]
        for path in (path for known in sizes for path in self._by_size.get(known, [])):
            if path not in self._hashes:
                self._hashes[path] = hash_file(path)[0]
            if self._hashes[path] == sha256:
                return path
        return None


def _files(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise StoreError(f"cannot read {error.filename}: {explained(error)}")

    for parent, _, names in os.walk(folder, onerror=refuse):
        yield from (path for path in (Path(parent) / name for name in sorted(names)) if path.is_file())
