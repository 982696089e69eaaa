"""The store in a bucket of S3, or of a server that speaks its protocol.

An object is a key below the prefix of the store's URL. S3 itself makes objects appear whole or not at all; conditional
puts (`If-None-Match`, `If-Match`) let one of several writers win. Everything that is stored carries its SHA-256, which
the server checks before it keeps the bytes.

Invariants:
- A conditional put whose answer was lost counts as won only if the object is then what was put.
- A blob that is there, whole, is not sent again. One with other bytes, as its size or the checksum that the server
  keeps tells, is replaced: the SHA-256 where it is looked up alone, the MD5 (ETag) where it is listed with others. That
  costs no request and no reading: of a file whose hash is remembered, a listing tells no more than the size.
- The first request of a process looks at the bucket, with little patience: a wrong address, bucket or credential is
  reported within seconds. Later ones wait out half a minute of overload, and those of runs ten minutes of a bucket
  that is away (`stages.artifacts.patience`).
"""

from __future__ import annotations

import builtins
import hashlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.artifacts import s3_client, s3_transfer
from stages.artifacts.manifest import blob_key, check_path, sha256_hex
from stages.artifacts.s3_bulk import BulkClient, open_bulk
from stages.artifacts.s3_client import FAULTS, error_code, status
from stages.artifacts.s3_lookup import HEADS, REQUESTS_AT_ONCE, Found, find
from stages.artifacts.s3_stored import Stored, has_another_md5, of_head, vouched_for
from stages.artifacts.s3_transfer import Hashed, base64_of
from stages.artifacts.store import Damaged, NotInStore, ObjectInfo, StoreError, check_limit, in_parallel, is_segment
from stages.os_errors import explained

_FILES_AT_ONCE = 4
_PUTS_AT_ONCE = 32  # of small files
_SMALL = 1 << 20  # files up to this size are looked up together, not one by one
_DELETES = 1000  # objects that one request removes
_NO_MANY = (400, 404, 405, 411, 501)  # what servers answer that do not remove many objects in one request
_SEGMENT = 256 << 10  # an appended object goes on in another after so many bytes
_CONFLICTS = 10
_IN_PARTS = ("blobs/", "work/", "doctor/")  # what may go up in parts; other uploads in the bucket are not ours


class S3Store:
    """A store at `s3://bucket` or `s3://bucket/prefix`. Safe for many threads, processes and hosts at once.

    Args:
        noun: what messages call it.

    Raises:
        StoreError: the URL is not of that form.
    """

    remote = True

    def __init__(self, url: str, noun: str = "store") -> None:
        self.noun = noun
        self.bucket, self.prefix = s3_client.parse_url(url)
        self.url = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self._lock = threading.Lock()
        self._made: Any = None
        self._session: Any = None  # of the client, until another one is made of it
        self._address = ""
        self._bulk: BulkClient | None = None
        self._pid = 0
        self._sse = s3_client.encryption()
        self._small_gets = itertools.count()  # a few are not worth loading another client
        self._deletes_many = True
        self._appended: dict[str, tuple[str, bytes, str]] = {}

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    @property
    def client(self) -> Any:
        """The botocore client: made, and the bucket looked at, when first used in a process.

        Raises:
            StoreError: the bucket cannot be used.
        """
        with self._lock:
            if self._made is None or self._pid != os.getpid():  # connections must not be shared with a parent
                session, asked = s3_client.make_session(), []
                first = s3_client.make_client(session, patient=False)
                first.meta.events.register("before-send.s3.*", lambda request, **_: asked.append(request.url))
                try:
                    first.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix + "refs/", MaxKeys=1)
                except FAULTS as error:
                    raise self._explain(first, error, "list", self.bucket) from error
                self._made, self._pid = s3_client.make_client(session), os.getpid()
                self._session, self._address = session, asked[-1].partition("?")[0].rstrip("/")
                self._bulk = None
            return self._made

    @property
    def address(self) -> str:
        """URL of the folder that it lies in, which names the server, too, and nothing secret."""
        return f"{s3_client.endpoint(self.client)}/{self.bucket}/{self.prefix}".rstrip("/")

    def _bulk_client(self) -> BulkClient | None:
        """The client for many small objects, where there can be one: loaded when first used in a process."""
        client = self.client
        with self._lock:
            if self._bulk is None and self._session is not None:
                session, self._session = self._session, None
                if not self._sse and not self.bucket.endswith("--x-s3"):
                    self._bulk = open_bulk(session, self._address, client.meta.region_name, self.prefix)
            return self._bulk

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self._get(key, limit)[0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        name, size = self._name(key), self.size(key)
        if size is None:
            raise NotInStore(f"store {self.url} has no {key}")
        if start >= size or length <= 0:  # a range of no bytes is an error to a server
            return b""

        def get() -> bytes:
            span = f"bytes={start}-{min(start + length, size) - 1}"
            with s3_transfer.body_of(self.client.get_object(Bucket=self.bucket, Key=name, Range=span)) as body:
                return bytes(body.read())

        with self._errors("read", key):
            return s3_transfer.persist(get)

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        return self._get(key, None)

    def _get(self, key: str, limit: int | None) -> tuple[bytes, str]:
        name, tags = self._name(key), []

        def get() -> bytes:
            answer = self.client.get_object(Bucket=self.bucket, Key=name, ChecksumMode="ENABLED")
            tags.append(answer["ETag"])
            with s3_transfer.body_of(answer) as body:
                check_limit(self.url, key, int(answer["ContentLength"]), limit)
                return bytes(body.read())

        with self._errors("read", key):
            return s3_transfer.persist(get), tags[-1]

    def exists(self, key: str) -> bool:
        return self.size(key) is not None

    def size(self, key: str) -> int | None:
        head = self._head(key)
        return None if head is None else int(head["ContentLength"])

    def _head(self, key: str) -> dict[str, Any] | None:
        name = self._name(key)
        with self._errors("read", key):
            try:
                return dict(self.client.head_object(Bucket=self.bucket, Key=name, ChecksumMode="ENABLED"))
            except FAULTS as error:
                if status(error) == 404:
                    return None
                if status(error) == 403:  # a HEAD cannot say why; a GET can
                    self.client.get_object(Bucket=self.bucket, Key=name, Range="bytes=0-0")["Body"].close()
                raise

    def is_still(self, key: str, mark: str) -> bool:
        """Whether an object is there, and the one that was listed with this mark."""
        head = self._head(key)
        return head is not None and str(head.get("ETag", "")).strip('"') == mark

    def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """Sizes of the objects that are there: by listing where many of those listed are asked for, else one by one."""
        return {key: found[0] for key, found in self._find(keys).items()}

    def infos(self, keys: Iterable[str]) -> dict[str, ObjectInfo]:
        return {
            key: ObjectInfo(key, size, s3_client.time_of(at), etag)
            for key, (size, etag, _, at) in self._find(keys).items()
        }

    def _stored(self, keys: Iterable[str]) -> dict[str, Stored]:
        return {key: Stored._make(found[:3]) for key, found in self._find(keys).items()}

    def _stored_alone(self, key: str) -> Stored | None:
        head = self._head(key)
        return None if head is None else of_head(head)

    def _find(self, keys: Iterable[str]) -> dict[str, Found]:
        return find(keys, self._page, self._look_up)

    def _look_up(self, key: str) -> Found | None:
        head = self._head(key)
        return None if head is None else (*of_head(head), head["LastModified"])

    def _page(self, prefix: str, first: str) -> tuple[dict[str, Found], bool]:
        start = self.prefix + first[:-1]  # the listing begins after it
        with self._errors("list", prefix):
            answer = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix + prefix, StartAfter=start)
        names, sizes, etags, times = s3_client.listed_objects(answer)
        keys = [name[len(self.prefix) :] for name in names]
        found = zip(sizes, etags, itertools.repeat(""), times, strict=False)
        return dict(zip(keys, found, strict=True)), bool(answer.get("IsTruncated"))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_path(folder)
        found: builtins.list[ObjectInfo] = []
        with self._errors("list", prefix):
            pages = self.client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=self.prefix + prefix):
                names, sizes, etags, times = s3_client.listed_objects(page)
                keys = [name[len(self.prefix) :] for name in names]
                found += map(ObjectInfo, keys, sizes, map(s3_client.time_of, times), etags)
        yield from sorted(found, key=lambda info: info.key)  # not every server sorts as S3 does

    def put(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str | None:
        condition = {"IfNoneMatch": "*"} if if_absent else {} if if_match is None else {"IfMatch": if_match}
        request = {"Bucket": self.bucket, "Key": self._name(key), "Body": data, **condition, **self._sse}
        request["ChecksumSHA256"] = base64_of(hashlib.sha256(data).digest())
        with self._errors("write", key):
            for attempt in range(_CONFLICTS):
                try:
                    return str(self.client.put_object(**request)["ETag"])
                except FAULTS as error:
                    if not condition:
                        raise
                    if status(error) == 412 or error_code(error) == "NoSuchKey":
                        return self._won(key, data) if s3_client.may_have_happened(error) or attempt else None
                    if status(error) != 409 or attempt == _CONFLICTS - 1:  # another put of the key is under way
                        raise
                time.sleep(random.uniform(0, 0.05 * 2**attempt))
        return None

    def _won(self, key: str, data: bytes) -> str | None:
        """The tag of the object if it is what we put: an earlier attempt was carried out, and its answer lost."""
        try:
            found, tag = self.get_with_tag(key)
        except NotInStore:
            return None
        return tag if found == data else None

    def put_file(self, key: str, path: Path, *, sha256: str | None = None) -> str:
        hashed = s3_transfer.hash_for_upload(path)
        if sha256 is not None and hashed.sha256.hex() != sha256:
            raise Damaged(f"{path} has the hash {hashed.sha256.hex()}, not {sha256}: it changed while it was stored")
        self._upload(key, path, hashed)
        return hashed.sha256.hex()

    def _upload(self, key: str, path: Path, hashed: Hashed) -> None:
        with self._errors("write", key):
            s3_transfer.upload(self.client, self.bucket, self._name(key), path, hashed, self._sse)

    def put_blob(self, path: Path, *, known: tuple[str, int] | None = None) -> tuple[str, int]:
        if known is not None:
            hashed = Hashed(bytes.fromhex(known[0]), known[1])  # the server finds out if it is no longer true
            stored = self._stored_alone(blob_key(known[0]))
            if stored is not None and not stored.differs(hashed):
                return known
            if known[1] < s3_transfer.MULTIPART:
                self._upload(blob_key(known[0]), path, hashed)
                return known
        hashed = s3_transfer.hash_for_upload(path)
        key = blob_key(hashed.sha256.hex())
        stored = self._stored_alone(key)
        if stored is None or stored.differs(hashed):
            self._upload(key, path, hashed)
        return hashed.sha256.hex(), hashed.size

    def put_blobs(
        self, paths: Sequence[Path], known: Sequence[tuple[str, int] | None] | None = None
    ) -> builtins.list[tuple[str, int]]:
        """`put_blob` of many: large files one by one, four at a time, each sent while it is in the page cache.

        Small ones are all hashed first, then looked up together, and those that are missing are sent.
        """
        had = list(known or [None] * len(paths))
        small = [index for index, path in enumerate(paths) if s3_transfer.size_of(path) <= _SMALL]
        done: dict[int, tuple[str, int]] = {}
        if len(small) > HEADS:
            done = self._put_small(small, paths, had)
        rest = [index for index in range(len(paths)) if index not in done]
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            stored = in_parallel(pool, lambda index: self.put_blob(paths[index], known=had[index]), rest)
        done.update(zip(rest, stored, strict=True))
        return [done[index] for index in range(len(paths))]

    def _put_small(
        self, indices: Sequence[int], paths: Sequence[Path], had: Sequence[tuple[str, int] | None]
    ) -> dict[int, tuple[str, int]]:
        done: dict[int, tuple[str, int]] = {}
        first: dict[str, tuple[int, str]] = {}  # key of a blob -> its first file (equal ones are one blob), and MD5
        for index in indices:
            sha256, size, md5 = (*(had[index] or ("", 0)), "") if had[index] else _hashes(paths[index])
            done[index] = sha256, size
            first.setdefault(blob_key(sha256), (index, md5))

        def hashed(key: str) -> Hashed:
            sha256, size = done[first[key][0]]
            return Hashed(bytes.fromhex(sha256), size)

        stored = self._stored(first)
        missing, doubtful = [], []
        for key, (index, md5) in first.items():
            found = stored.get(key)
            if found is None or found.size != done[index][1] or (found.checksum and found.differs(hashed(key))):
                missing.append(key)
            elif md5 and has_another_md5(found, md5):
                doubtful.append(key)
        missing += self._wrong(sorted(doubtful), hashed)
        bulk = self._bulk_client()

        def send(key: str) -> None:
            path = paths[first[key][0]]
            if bulk is None or not bulk.put(key, path, hashed(key).sha256):
                self._upload(key, path, hashed(key))

        with ThreadPoolExecutor(_PUTS_AT_ONCE) as pool:
            in_parallel(pool, send, missing)
        return done

    def _wrong(self, keys: Sequence[str], hashed: Callable[[str], Hashed]) -> builtins.list[str]:
        """Which of the blobs whose ETag is not the MD5 of their bytes have wrong bytes.

        An ETag need not be an MD5 (that of an object under a KMS key is not), so each is asked for its SHA-256. Where
        that is right of as many as are worth asking, no ETag of this server says anything.
        """
        wrong: builtins.list[str] = []
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            for start in range(0, len(keys), HEADS):
                some = keys[start : start + HEADS]
                heads = zip(some, pool.map(self._head, some), strict=True)
                found = [key for key, head in heads if head is None or not vouched_for(head, hashed(key))]
                wrong += found
                if not found:
                    break
        return wrong

    def get_file(self, key: str, path: Path, *, size: int | None = None, resume: bool = False) -> tuple[str, int]:
        name = self._name(key)
        many = size is not None and size <= _SMALL and next(self._small_gets) >= HEADS
        if many and (bulk := self._bulk_client()) and not os.path.lexists(path):
            data = bulk.get(key, size or 0)
            if data is not None:
                return s3_transfer.write_new(path, data)
        with self._errors("read", key):
            return s3_transfer.download(self.client, self.bucket, name, path, size=size, resume=resume)

    def hash(self, key: str) -> str:
        digest = hashlib.sha256()
        at = 0
        name = self._name(key)

        def read() -> None:
            nonlocal at
            options = {"Range": f"bytes={at}-"} if at else {}
            answer = self.client.get_object(Bucket=self.bucket, Key=name, **options)
            with s3_transfer.body_of(answer) as body:
                while chunk := body.read(s3_transfer.CHUNK):
                    digest.update(chunk)
                    at += len(chunk)

        with self._errors("read", key):
            s3_transfer.persist(read, lambda: at)
        return digest.hexdigest()

    def append(self, key: str, data: bytes) -> None:
        """Add to an object by replacing it under its tag, for S3 cannot append.

        So that long logs stay cheap, an object of 256 KiB goes on in another: `s.jsonl`, `s.jsonl.000001`, ...
        """
        for _ in range(_CONFLICTS * 10):
            current, before, tag = self._appended.get(key) or self._last_segment(key)
            if tag and len(before) >= _SEGMENT:
                current, before, tag = _next_segment(key, current), b"", ""
            whole = before + data
            new = self.put(current, whole, if_absent=not tag, if_match=tag or None)
            if new is not None:
                self._appended[key] = (current, whole, new)
                return
            self._appended.pop(key, None)  # another process appended
        raise StoreError(f"store {self.url}: cannot append to {key}: too many others do at the same time")

    def _last_segment(self, key: str) -> tuple[str, bytes, str]:
        last = [info.key for info in self.list(key) if is_segment(info.key, key)]
        if not last:
            return key, b"", ""
        try:
            return (last[-1], *self.get_with_tag(last[-1]))
        except NotInStore:
            return key, b"", ""

    def delete(self, key: str) -> None:
        with self._errors("delete", key):
            self.client.delete_object(Bucket=self.bucket, Key=self._name(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        names = {self._name(key): key for key in keys}
        alone = []
        for start in range(0, len(names), _DELETES):
            some = list(names)[start : start + _DELETES]
            # What is refused of many is tried alone, which waits for a busy server, or says what is wrong.
            alone += [names[name] for name in self._not_deleted(some)]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            in_parallel(pool, self.delete, alone)

    def _not_deleted(self, names: builtins.list[str]) -> builtins.list[str]:
        """Remove at most 1,000 objects in one request. Returns those that are to be removed one by one."""
        if not self._deletes_many or len(names) == 1:
            return names
        request = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        with self._errors("delete", f"{len(names)} objects"):
            try:
                answer = self.client.delete_objects(Bucket=self.bucket, Delete=request, ChecksumAlgorithm="SHA256")
            except FAULTS as error:
                if status(error) not in _NO_MANY:
                    raise
                self._deletes_many = False  # this server does not know the request, or wants another checksum
                return names
        refused = [str(item.get("Key", "")) for item in answer.get("Errors", [])]
        return refused if set(refused) <= set(names) else names

    def leftovers(self, older_than: float, *, remove: bool = False) -> builtins.list[ObjectInfo]:
        """Uploads in parts that were never completed: they cost as much as objects, and are not listed with them."""
        found = []
        limit = self.now() - older_than
        with self._errors("list", "unfinished uploads"):
            pages = self.client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self.bucket, Prefix=self.prefix):
                for item in page.get("Uploads", []):
                    begun, key = item["Initiated"].timestamp(), item["Key"].removeprefix(self.prefix)
                    if begun >= limit or not key.startswith(_IN_PARTS):
                        continue
                    name = {"Bucket": self.bucket, "Key": item["Key"], "UploadId": item["UploadId"]}
                    parts = self.client.get_paginator("list_parts").paginate(**name)
                    try:
                        size = sum(part["Size"] for found_parts in parts for part in found_parts.get("Parts", []))
                        if remove:
                            self.client.abort_multipart_upload(**name)
                    except FAULTS as error:
                        if error_code(error) == "NoSuchUpload":  # completed or given up meanwhile
                            continue
                        raise
                    found.append(ObjectInfo(key, size, begun))
        return found

    def now(self) -> float:
        with self._errors("list", self.bucket):
            answer = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix + "refs/", MaxKeys=1)
        there = s3_client.server_time(answer["ResponseMetadata"]["HTTPHeaders"])
        return time.time() if there is None else there

    def _name(self, key: str) -> str:
        return self.prefix + check_path(key)

    @contextmanager
    def _errors(self, verb: str, what: str) -> Iterator[None]:
        try:
            yield
        except FAULTS as error:
            raise self._explain(self._made, error, verb, what) from error

    def _explain(self, client: Any, error: BaseException, verb: str, what: str) -> StoreError:
        where = s3_client.endpoint(client)
        return s3_client.explain(error, f"{self.noun} {self.url}", self.bucket, where, verb, what)


def _next_segment(base: str, key: str) -> str:
    number = int(key.removeprefix(base + ".")) + 1 if key != base else 1
    return f"{base}.{number:06d}"


def _hashes(path: Path) -> tuple[str, int, str]:
    """SHA-256 (hex), size and MD5 (hex) of a small file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {explained(error)}") from error
    return sha256_hex(data), len(data), hashlib.md5(data, usedforsecurity=False).hexdigest()
