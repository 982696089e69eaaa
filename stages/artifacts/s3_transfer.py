"""Moving files to and from S3: whole, in parts, and on from where a cut connection or a kill left off.

Upward, a file is read from the disk once, and hashed: the key of a blob is its hash, so no byte can be sent before the
last one is known. It is sent from the page cache right after, with the SHA-256 of that reading, which the server checks
against what arrives. So a file that changes in between is refused, not stored under a wrong name, and what was hashed
need not be hashed again. (To send it under a temporary key while it is hashed, and to copy it on the server, would cost
every byte twice there; and large objects cannot be copied in one request.) A large file goes up in parts, whose hashes
are taken in the same reading.

Downward, parts arrive in parallel and are hashed and written in order, so that a file that was cut short is a beginning
of the right one. Memory is bounded by the parts in flight, whatever the size of a file.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import botocore.exceptions as aws

from stages.artifacts.s3_client import FAULTS, error_code, may_have_happened, status
from stages.artifacts.store import CHUNK, StoreError, open_source
from stages.os_errors import explained

MULTIPART = 128 << 20  # from this size on a file goes up in parts
UPLOAD_PART = 32 << 20
DOWNLOAD_PART = 8 << 20
MAX_PARTS = 10_000  # of S3
PARTS_AT_ONCE = 4
_RESUMES = 6  # attempts for one part after its connection was cut
_CUTS = (aws.IncompleteReadError, aws.ResponseStreamingError, aws.ReadTimeoutError)


@dataclass(frozen=True)
class Hashed:
    """What one reading of a file gave.

    Attributes:
        sha256: 32 bytes.
        size: bytes that were read.
        part: bytes of each part but the last; 0 for a file that goes up in one request.
        parts: SHA-256 of each part, 32 bytes each.
    """

    sha256: bytes
    size: int
    part: int = 0
    parts: tuple[bytes, ...] = ()

    @property
    def checksum(self) -> str:
        """What S3 keeps as the SHA-256 checksum of the object: of the bytes, or of the hashes of the parts."""
        if not self.part:
            return base64_of(self.sha256)
        return f"{base64_of(hashlib.sha256(b''.join(self.parts)).digest())}-{len(self.parts)}"


def base64_of(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def size_of(path: Path) -> int:
    """Bytes of a file.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explained(error)}") from error


def hash_for_upload(path: Path) -> Hashed:
    """Read a file once.

    Raises:
        StoreError: it cannot be read.
    """
    with open_source(path) as source:
        expected = os.fstat(source.fileno()).st_size
        part = 0 if expected < MULTIPART else max(UPLOAD_PART, -(-expected // MAX_PARTS))
        whole, current, parts, size, filled = hashlib.sha256(), hashlib.sha256(), [], 0, 0
        while True:
            try:
                # Not beyond its first size: a file that grows is stored as it was, in as many parts as were meant.
                room = min(CHUNK, expected - size, part - filled if part else CHUNK)
                chunk = source.read(room) if room else b""
            except OSError as error:
                raise StoreError(f"cannot read {path}: {explained(error)}") from error
            if not chunk:
                break
            whole.update(chunk)
            size += len(chunk)
            if part:
                current.update(chunk)
                filled += len(chunk)
                if filled == part:
                    parts.append(current.digest())
                    current, filled = hashlib.sha256(), 0
        if filled:
            parts.append(current.digest())
    return Hashed(whole.digest(), size, part, tuple(parts))


def upload(client: Any, bucket: str, key: str, path: Path, hashed: Hashed, options: dict[str, str]) -> None:
    """Store the bytes of a file that `hash_for_upload` has read.

    Args:
        options: of server-side encryption.

    Raises:
        StoreError: the file cannot be read.
        botocore errors: the server refuses, or finds other bytes than were hashed.
    """
    if hashed.part:
        _upload_parts(client, bucket, key, path, hashed, options)
        return
    with Window(path, 0, hashed.size) as body:
        client.put_object(Bucket=bucket, Key=key, Body=body, ChecksumSHA256=base64_of(hashed.sha256), **options)


def _upload_parts(client: Any, bucket: str, key: str, path: Path, hashed: Hashed, options: dict[str, str]) -> None:
    begun = client.create_multipart_upload(Bucket=bucket, Key=key, ChecksumAlgorithm="SHA256", **options)
    name = {"Bucket": bucket, "Key": key, "UploadId": begun["UploadId"]}

    def send(index: int) -> dict[str, Any]:
        start = index * hashed.part
        checksum = base64_of(hashed.parts[index])
        with Window(path, start, min(hashed.part, hashed.size - start)) as body:
            answer = client.upload_part(**name, PartNumber=index + 1, Body=body, ChecksumSHA256=checksum)
        return {"PartNumber": index + 1, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

    pool = ThreadPoolExecutor(PARTS_AT_ONCE)
    try:
        done = list(pool.map(send, range(len(hashed.parts))))
        try:
            client.complete_multipart_upload(**name, MultipartUpload={"Parts": done})
        except FAULTS as error:
            # An attempt whose answer was lost may have completed it; then the object says so.
            if not (error_code(error) == "NoSuchUpload" and may_have_happened(error)):
                raise
            if client.head_object(Bucket=bucket, Key=key)["ContentLength"] != hashed.size:
                raise
    except BaseException:
        pool.shutdown(cancel_futures=True)  # no part may arrive after the upload is given up
        with suppress(*FAULTS):  # what cannot be given up now, `gc` removes
            client.abort_multipart_upload(**name)
        raise
    finally:
        pool.shutdown()


class Window(io.RawIOBase):
    """Bytes `start` to `start + size` of a file, as a file of its own that can be read again for another attempt.

    Raises:
        StoreError: the file cannot be read.
    """

    def __init__(self, path: Path, start: int, size: int) -> None:
        super().__init__()
        self._path, self._start, self._size, self._at = path, start, size, 0
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {explained(error)}") from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        try:
            data = os.pread(self._descriptor, wanted, self._start + self._at)
        except OSError as error:
            raise StoreError(f"cannot read {self._path}: {explained(error)}") from error
        if not data and wanted:
            raise StoreError(f"{self._path} became shorter while it was stored; store it again")
        self._at += len(data)
        return data

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def download(client: Any, bucket: str, key: str, path: Path, *, size: int | None, resume: bool) -> tuple[str, int]:
    """Copy an object to a file. Returns the SHA-256 (hex) and size of what the file holds then.

    Args:
        size: of the object, where it is known: a large one is fetched in parts.
        resume: take a file that is there for the beginning of the object, and leave what was copied on errors.

    Raises:
        StoreError: the file cannot be written; without `resume`, also where there is one.
        botocore errors: the object is not there or cannot be read.
    """
    try:
        with open(path, "r+b" if resume and path.exists() else "x+b") as file:
            try:
                digest = hashlib.sha256()
                while resume and (chunk := file.read(CHUNK)):
                    digest.update(chunk)
                _fetch(client, bucket, key, file, digest, size)
                file.truncate()
                return digest.hexdigest(), file.tell()
            except BaseException:
                if not resume:
                    path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise StoreError(f"cannot write {path}: {explained(error)}") from error


def write_new(path: Path, data: bytes) -> tuple[str, int]:
    """Put bytes into a new file. Returns their SHA-256 (hex) and size.

    Raises:
        StoreError: it cannot be written, or is there.
    """
    try:
        with open(path, "xb") as file:
            try:
                file.write(data)
                file.flush()
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise StoreError(f"cannot write {path}: {explained(error)}") from error
    return hashlib.sha256(data).hexdigest(), len(data)


def _fetch(client: Any, bucket: str, key: str, file: IO[bytes], digest: Any, size: int | None) -> None:
    """Get what the file lacks, hashing and writing in order. The file's position is where it ends so far."""
    at = file.tell()
    if size is None or size <= DOWNLOAD_PART:
        if at and size is None:
            size = int(client.head_object(Bucket=bucket, Key=key)["ContentLength"])
        elif at == 0:
            data, size = get_bytes(client, bucket, key, at_most=DOWNLOAD_PART)
            _add(file, digest, data)
            at = len(data)
    assert size is not None
    if at >= size:
        return
    parts = [(start, min(start + DOWNLOAD_PART, size)) for start in range(at, size, DOWNLOAD_PART)]
    with ThreadPoolExecutor(min(PARTS_AT_ONCE, len(parts))) as pool:
        waiting: deque[Future[bytes]] = deque()
        try:
            for start, end in parts:
                waiting.append(pool.submit(_get_range, client, bucket, key, start, end))
                if len(waiting) > PARTS_AT_ONCE:
                    _add(file, digest, waiting.popleft().result())
            while waiting:
                _add(file, digest, waiting.popleft().result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _add(file: IO[bytes], digest: Any, data: bytes) -> None:
    file.write(data)
    digest.update(data)


def get_bytes(client: Any, bucket: str, key: str, *, at_most: int | None = None, **options: Any) -> tuple[bytes, int]:
    """An object's bytes, or none of them where they are more than `at_most`; and its size."""
    answer: dict[str, Any] = {}

    def get() -> bytes:
        answer.update(client.get_object(Bucket=bucket, Key=key, **options))
        with body_of(answer) as body:
            if at_most is not None and answer["ContentLength"] > at_most:
                return b""
            return bytes(body.read())

    return persist(get), int(answer["ContentLength"])


def _get_range(client: Any, bucket: str, key: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` (exclusive), or fewer where the object ends before."""

    def get() -> bytes:
        try:
            answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}")
        except FAULTS as error:
            if status(error) == 416:  # the object is shorter
                return b""
            raise
        with body_of(answer) as body:
            if answer["ContentLength"] > end - start:
                raise StoreError(f"the server sent more of {key} than it was asked for; it does not support ranges")
            return bytes(body.read())  # all at once: each smaller read would be copied twice more

    return bytes(persist(get))


class _Cut(Exception):
    """The body of an answer ended early."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def body_of(answer: dict[str, Any]) -> Iterator[Any]:
    """The body of an answer, to be read within `persist`."""
    body = answer["Body"]  # as its own context manager it gives the stream below it, which checks no length or checksum
    try:
        yield body
    except _CUTS as error:
        raise _Cut(error) from error
    finally:
        body.close()


def persist(get: Callable[[], Any], progress: Callable[[], int] = lambda: 0) -> Any:
    """Try again when the body of an answer is cut: botocore repeats only what fails before the body.

    Args:
        progress: a number that grows while attempts get anywhere; then they are not counted.
    """
    failures, before = 0, progress()
    while True:
        try:
            return get()
        except _Cut as cut:
            failures = failures + 1 if progress() == before else 1
            before = progress()
            if failures >= _RESUMES:
                raise cut.error from None
            time.sleep(random.uniform(0, min(8.0, 0.1 * 2**failures)))
