"""Looking into files of artifacts and logs without reading more than a page can show.

Invariants:
- What is small is read whole and its hash is checked (`whole`); of what is large only pieces are read, and whoever
  shows them says that they were not checked.
- A file is found by the manifest of its artifact, and read by its hash: no path given by a visitor reaches a store.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from stages.artifacts import Damaged, FileEntry, NotInStore, Store, log_key
from stages.artifacts.store import is_segment

SMALL = 4 << 20  # bytes that are read whole
PIECE = 64 << 10  # bytes of text on a page
_BUFFER = 256 << 10
_HEADER = 16 << 20  # the largest header of a safetensors file that is read


def whole(store: Store, entry: FileEntry, limit: int = SMALL) -> bytes | None:
    """All bytes of a file, checked; None where it is larger than `limit`.

    Raises:
        Damaged: its bytes are missing, or others than the manifest promises.
    """
    if entry.size > limit:
        return None
    try:
        data = store.get(entry.blob, limit=limit)
    except NotInStore:
        raise Damaged(f"{entry.path}: its bytes ({entry.blob}) are missing from the store") from None
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise Damaged(f"{entry.path} is damaged: its bytes ({entry.blob}) have another hash than its name")
    return data


class _Blob(io.RawIOBase):
    """A file of an artifact as a Python file that reads only what is asked for."""

    def __init__(self, store: Store, entry: FileEntry) -> None:
        self._store, self._entry, self._at = store, entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = read_range(self._store, self._entry, self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_file(store: Store, entry: FileEntry) -> io.BufferedReader:
    """A file of an artifact as a Python file, read as far as is asked for; its hash is not checked."""
    return io.BufferedReader(_Blob(store, entry), _BUFFER)


def read_range(store: Store, entry: FileEntry, start: int, length: int) -> bytes:
    """Bytes of a file from `start` on, not checked.

    Raises:
        Damaged: its bytes are missing.
    """
    try:
        return store.get_range(entry.blob, start, min(length, max(0, entry.size - start)))
    except NotInStore:
        raise Damaged(f"{entry.path}: its bytes ({entry.blob}) are missing from the store") from None


@dataclass(frozen=True)
class Text:
    """A piece of a text.

    Attributes:
        start, end: where it lies in the whole, in bytes; it begins and ends with whole lines where these are short.
        total: bytes of the whole.
        binary: whether it is no text; `text` shows bytes as hexadecimal digits then.
    """

    text: str
    start: int
    end: int
    total: int
    binary: bool = False

    @property
    def before(self) -> int | None:
        """Where the piece before it begins; None at the beginning."""
        return max(0, self.start - PIECE) if self.start else None

    @property
    def after(self) -> int | None:
        """Where the piece after it begins; None at the end."""
        return self.end if self.end < self.total else None


def text_of(store: Store, entry: FileEntry, at: int = 0) -> Text:
    """A piece of a file as text, from byte `at` on.

    Raises:
        Damaged: its bytes are missing; or, where it is read whole, others than the manifest promises.
    """
    if entry.size <= PIECE:
        at = 0
        data = whole(store, entry) or b""
    else:
        at = max(0, min(at, entry.size - 1))
        data = read_range(store, entry, max(0, at - 1), PIECE + 1)
    return _text(data, at, entry.size)


def _text(data: bytes, at: int, total: int) -> Text:
    """A piece from byte `at` on; `data` begins a byte earlier, which tells whether a line begins there."""
    if b"\0" in data:
        shown = data[:512]
        lines = (f"{at + start:08x}  {shown[start : start + 16].hex(' ')}" for start in range(0, len(shown), 16))
        return Text("\n".join(lines), at, at + len(shown), total, binary=True)
    if at:
        skipped = data.find(b"\n") + 1
        data, at = data[max(1, skipped) :], at + max(0, skipped - 1)
    if at + len(data) < total and (end := data.rfind(b"\n") + 1):
        data = data[:end]
    return Text(data.decode("utf-8", "replace"), at, at + len(data), total)


def pretty_json(text: str) -> str | None:
    """JSON in lines, for JSON that is a single line; None for anything else."""
    if text.count("\n") > 1:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return json.dumps(value, indent=1, ensure_ascii=False) if isinstance(value, dict | list) else None


def training_rows(store: Store, entry: FileEntry) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a training.jsonl, and whether they are all: of a long one, stretches of it all along.

    Raises:
        Damaged: its bytes are missing or damaged.
    """
    if (data := whole(store, entry)) is not None:
        return list(json_lines(data)), True
    rows: list[dict[str, Any]] = []
    stretches = 64
    for number in range(stretches):
        start = number * (entry.size - PIECE) // (stretches - 1)
        data = read_range(store, entry, start, PIECE // 2)
        lines = data[data.find(b"\n") + 1 if start else 0 : data.rfind(b"\n") + 1]
        rows += list(json_lines(lines))[:8]
    return rows, False


def json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The objects of JSON Lines; lines that are none are passed over (a log may end in one that was cut short)."""
    for line in data.split(b"\n"):
        try:
            value = from_json(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


@dataclass(frozen=True)
class LogPiece:
    """Events of a step's log, with where they lie in it: see `Text`."""

    events: list[dict[str, Any]]
    start: int
    end: int
    total: int

    @property
    def before(self) -> int | None:
        return max(0, self.start - PIECE) if self.start else None

    @property
    def after(self) -> int | None:
        return self.end if self.end < self.total else None


def log_piece(store: Store, run: str, step: str, at: int | None = None, length: int = PIECE) -> LogPiece:
    """Events of a step's log from byte `at` on; the last ones where it is None.

    Raises:
        ValueError: the run or the step has no possible name.
    """
    key = log_key(run, step)
    parts = [info for info in store.list(key) if is_segment(info.key, key)]
    total = sum(info.size for info in parts)
    start = max(0, total - length) if at is None else max(0, min(at, total))
    data, passed = b"", 0
    for info in parts:
        first, last = max(start - 1 - passed, 0), min(start + length - passed, info.size)
        if first < last:
            data += store.get_range(info.key, first, last - first)
        passed += info.size
    text = _text(data.replace(b"\0", b" "), start, total)
    return LogPiece(list(json_lines(text.text.encode())), text.start, text.end, total)


# Tensors


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file, as its header tells."""

    name: str
    dtype: str
    shape: list[int]
    start: int
    end: int


def tensors(store: Store, entry: FileEntry) -> list[Tensor]:
    """The tensors of a safetensors file, in the order in which they lie in it; `start` and `end` count from its begin.

    Raises:
        Damaged: its bytes are missing, or its header is not one.
    """
    try:
        (size,) = struct.unpack("<Q", read_range(store, entry, 0, 8))
        if size > min(_HEADER, entry.size):
            raise ValueError("the header is too long")
        header = from_json(read_range(store, entry, 8, size))
        found = []
        for name, item in header.items():
            if name != "__metadata__":
                start, end = item["data_offsets"]
                shape = [int(side) for side in item["shape"]]
                found.append(Tensor(name, str(item["dtype"]), shape, 8 + size + int(start), 8 + size + int(end)))
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise Damaged(f"{entry.path} is not a safetensors file: {error}") from None
    return sorted(found, key=lambda tensor: tensor.start)
