"""Manifests: what an artifact is.

An artifact is a set of files. Its manifest is canonical JSON (RFC 8785) of the artifact's kind and of each file's path,
size and SHA-256, and its digest is the SHA-256 of those bytes. Invariants:

- A manifest holds content only: no time, host, user or provenance. The same files are the same artifact everywhere.
- Bytes and manifest are one to one: `Manifest.parse` refuses bytes that are not the canonical form of what they say.
- Every path is safe to create below a folder on any system: relative, normal, NFC, no two of them the same file on a
  file system that ignores case, none a folder of another.
"""

from __future__ import annotations

import gc
import hashlib
import json
import operator
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import rfc8785

from stages.contract import KINDS

MAX_FILES = 1_000_000
MAX_BYTES = 256 << 20  # of a manifest, which is read whole
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_SIZE = 2**53 - 1  # the largest integer that canonical JSON can hold, for a file and for the sum of all

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MEMBERS = {"path", "sha256", "size"}
_HEX = re.compile(r"[0-9a-f]{64}")
# Paths that are plainly safe, which nearly all are: the checks one by one are for the others, and to say what is wrong.
_PLAIN = re.compile(r"(?:(?!\.\.?(?:/|\Z))[A-Za-z0-9_.+=@, -]{1,255}/)*(?!\.\.?\Z)[A-Za-z0-9_.+=@, -]{1,255}")


# A manifest whose paths are all plain, entry by entry. Where such entries cover all of its bytes, it is canonical.
_PART = _NAME = r"(?!\.\.?[/\"])[A-Za-z0-9_.+=@, -]{1,255}"
_ENTRY = re.compile(
    rf'\{{"path":"((?:{_PART}/)*{_NAME})","sha256":"([0-9a-f]{{64}})","size":(0|[1-9][0-9]{{0,15}})\}}(,|\])'
)
_AROUND_ENTRY = len('{"path":"","sha256":"","size":}') + 64


def canonical_json(value: Any) -> bytes:
    """RFC 8785 canonical JSON of `value`.

    Raises:
        ValueError: a value has no canonical form (NaN, an infinity, an integer beyond 2**53 - 1, not JSON at all).
    """
    try:
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as error:
        raise ValueError(f"no canonical JSON for this value: {str(error)[:200]}") from error


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_digest(digest: str) -> str:
    """The 64 hexadecimal digits of a full digest "sha256:<64 hex>".

    Raises:
        ValueError: it is not one.
    """
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is not a digest of the form sha256:<64 hexadecimal digits>")
    return digest.removeprefix("sha256:")


def check_path(path: Any) -> str:
    """Return `path` if it is safe inside an artifact, with "/" between its parts.

    Raises:
        ValueError: it is absolute, has "." or "..", a backslash, a drive letter, control characters, is not NFC, is too
            long, or is not text.
    """
    if isinstance(path, str) and len(path) <= MAX_PATH_BYTES and _PLAIN.fullmatch(path):
        return path
    if not isinstance(path, str) or not path:
        raise ValueError(f"file name {path!r} is empty or not text")
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"file name {path!r} is not valid Unicode; rename the file") from None
    if any(unicodedata.category(character) == "Cc" for character in path):
        raise ValueError(f"file name {path!r} has a control character; rename the file")
    if "\\" in path or re.match(r"[A-Za-z]:", path):
        raise ValueError(f"file name {path!r} has a backslash or a drive letter; rename the file")
    if unicodedata.normalize("NFC", path) != path:
        raise ValueError(f"file name {path!r} is not in Unicode form NFC; rename the file")
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"file name {path!r} is not a normal relative path")
    if len(encoded) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise ValueError(
            f"file name {path[:80]!r}... is longer than {MAX_NAME_BYTES} bytes, or {MAX_PATH_BYTES} in all"
        )
    return path


class FileEntry(NamedTuple):
    """One file of an artifact.

    Attributes:
        path: where it lies in the artifact, "/" between the parts.
        size: bytes.
        sha256: 64 lowercase hexadecimal digits of its content, which also name its blob.
    """

    path: str
    size: int
    sha256: str

    @property
    def blob(self) -> str:
        """The key of its blob in a store."""
        return blob_key(self.sha256)


def blob_key(sha256: str) -> str:
    return f"blobs/{sha256[:2]}/{sha256}"


def manifest_key(digest: str) -> str:
    """The key of a manifest in a store; `digest` is "sha256:<64 hex>"."""
    name = check_digest(digest)
    return f"manifests/{name[:2]}/{name}.json"


@dataclass(frozen=True)
class Manifest:
    """The kind and files of an artifact, checked when made and sorted by path.

    Raises:
        ValueError: an unknown kind, no files, or a file entry that is not allowed.
    """

    kind: str
    files: tuple[FileEntry, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind!r} is not a kind of artifact ({', '.join(KINDS)})")
        if not self.files:
            raise ValueError("an artifact needs at least one file")
        if len(self.files) > MAX_FILES:
            raise ValueError(f"{len(self.files):,} files are more than one artifact may hold ({MAX_FILES:,})")
        if not _plainly_allowed(self.files):
            for entry in self.files:
                _check_entry(entry)
            _check_clashes(entry.path for entry in self.files)
        if self.size > MAX_SIZE:
            raise ValueError(f"the files hold {self.size:,} bytes in all, more than an artifact may ({MAX_SIZE:,})")
        object.__setattr__(self, "files", tuple(sorted(self.files, key=lambda entry: entry.path)))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    @cached_property
    def _bytes(self) -> bytes:
        files = [{"path": entry.path, "sha256": entry.sha256, "size": entry.size} for entry in self.files]
        # For text without control characters and integers below 2**53, with members in order, this is RFC 8785.
        data = json.dumps({"files": files, "kind": self.kind}, ensure_ascii=False, separators=(",", ":")).encode()
        if len(data) > MAX_BYTES:
            raise ValueError(
                f"the manifest would have {len(data):,} bytes, more than {MAX_BYTES:,}; split the artifact or shorten "
                "the names of its files"
            )
        return data

    def to_json(self) -> bytes:
        """The canonical bytes, whose SHA-256 is the digest.

        Raises:
            ValueError: they are more than a manifest may have.
        """
        return self._bytes

    @cached_property
    def digest(self) -> str:
        """ "sha256:<64 hex>"."""
        return "sha256:" + sha256_hex(self._bytes)

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read a manifest and check all of it.

        Raises:
            ValueError: it is not the canonical JSON of an allowed manifest.
        """
        if len(data) > MAX_BYTES:
            raise ValueError(f"it has {len(data):,} bytes, more than a manifest may ({MAX_BYTES:,})")
        with many_objects():
            plain = _parse_plain(data)
        if plain is not None:
            manifest = cls.__new__(cls)
            vars(manifest).update(kind=plain[0], files=plain[1], _bytes=data)
            return manifest
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the manifest is not JSON: {error}") from None
        if not isinstance(value, dict) or set(value) != {"files", "kind"} or not isinstance(value["files"], list):
            raise ValueError('the manifest must hold exactly "kind" and a list "files"')
        entries = []
        for item in value["files"]:
            if not isinstance(item, dict) or item.keys() != _MEMBERS:
                raise ValueError('every file of a manifest must hold exactly "path", "sha256" and "size"')
            entries.append(FileEntry(**item))
        if not isinstance(value["kind"], str):
            raise ValueError("the kind of a manifest must be text")
        manifest = cls(value["kind"], tuple(entries))
        if manifest.to_json() != data:
            raise ValueError("the manifest is not in canonical form (RFC 8785, files sorted by path)")
        return manifest


@contextmanager
def many_objects() -> Iterator[None]:
    """Make very many objects that stay, without Python's search for cycles among them, which would take half the time.

    What other threads make meanwhile is searched afterwards.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _parse_plain(data: bytes) -> tuple[str, tuple[FileEntry, ...]] | None:
    """Kind and files of a manifest that is allowed and whose paths are plain; None: look at it one by one.

    A quarter of the time of the checks one by one, which say what is wrong and know all of Unicode.
    """
    head, body, (kind, tail) = data[:10], data[10:-64], _kind_of(data[-64:])
    if head != b'{"files":[' or kind is None:
        return None
    text = (body + tail).decode("ascii", "replace")
    found = _ENTRY.findall(text)
    paths, hashes, sizes, ends = zip(*found, strict=True) if found else ((), (), (), ())
    covered = sum(map(len, paths)) + sum(map(len, sizes)) + (_AROUND_ENTRY + 1) * len(found)
    if not found or covered != len(text) or "]" in ends[:-1] or ends[-1] != "]" or len(found) > MAX_FILES:
        return None
    files = tuple(map(FileEntry._make, zip(paths, map(int, sizes), hashes, strict=True)))
    if any(map(operator.ge, paths, paths[1:])) or _ascii_clash(paths) or sum(file.size for file in files) > MAX_SIZE:
        return None
    return kind, files


def _plainly_allowed(files: tuple[FileEntry, ...]) -> bool:
    """Whether entries are allowed and their paths plain; False: look at them one by one, which says what is wrong."""
    paths, sizes, hashes = zip(*files, strict=True)
    return (
        set(map(type, paths)) == set(map(type, hashes)) == {str}
        and set(map(type, sizes)) == {int}
        and 0 <= min(sizes) <= max(sizes) <= MAX_SIZE
        and all(map(_HEX.fullmatch, hashes))
        and all(map(_PLAIN.fullmatch, paths))
        and not _ascii_clash(paths)
    )


def _ascii_clash(paths: Sequence[str]) -> bool:
    """Whether plain paths are too long, meet where case is ignored, or are a file and a folder at once."""
    folded = {path.lower() for path in paths}
    folders = _folders(paths)
    return (
        max(map(len, paths)) > MAX_PATH_BYTES
        or len(folded) != len(paths)
        or len({folder.lower() for folder in folders}) != len(folders)
        or not folded.isdisjoint(folder.lower() for folder in folders)
    )


def _kind_of(end: bytes) -> tuple[str | None, bytes]:
    """The kind that the last bytes of a manifest name (None: none that is known), and those before it."""
    match = re.fullmatch(rb'(.*\]),"kind":"([a-z]+)"\}', end, re.DOTALL)
    if match is None or (kind := match[2].decode()) not in KINDS:
        return None, b""
    return kind, match[1]


def _folders(paths: Iterable[str]) -> set[str]:
    """Every folder on the way to the paths."""
    folders: set[str] = set()
    for parent in {path.rpartition("/")[0] for path in paths}:
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition("/")[0]
    return folders


def _check_entry(entry: FileEntry) -> None:
    check_path(entry.path)
    if type(entry.size) is not int or not 0 <= entry.size <= MAX_SIZE:
        raise ValueError(f"{entry.path}: the size {entry.size!r} is not an integer from 0 to {MAX_SIZE:,}")
    if not isinstance(entry.sha256, str) or not _HEX.fullmatch(entry.sha256):
        raise ValueError(f"{entry.path}: the hash {entry.sha256!r} is not 64 lowercase hexadecimal digits")


def _check_clashes(paths: Iterable[str]) -> None:
    """Refuse paths that would meet on a file system that ignores case, and files that are also folders."""
    files: dict[str, str] = {}
    folders: dict[str, str] = {}
    checked: set[str] = set()
    for path in paths:
        folded = _fold(path)
        if folded in files:
            raise ValueError(
                f"file names {files[folded]!r} and {path!r} are the same where case is ignored; rename one"
            )
        files[folded] = path
        parent = path.rpartition("/")[0]
        if not parent or parent in checked:
            continue
        checked.add(parent)
        parts = parent.split("/")
        for depth in range(1, len(parts) + 1):
            folder = "/".join(parts[:depth])
            other = folders.setdefault(_fold(folder), folder)
            if other != folder:
                raise ValueError(f"folders {other!r} and {folder!r} are the same where case is ignored; rename one")
    for folded, path in files.items():
        if folded in folders:
            raise ValueError(f"{path!r} is both a file and a folder")


def _fold(path: str) -> str:
    return path.lower() if path.isascii() else unicodedata.normalize("NFC", path.casefold())
