"""Does a store keep what Headrace relies on? Asked of the store itself, with objects that are removed afterwards.

A server that speaks S3 may ignore a condition or a checksum that it does not know, and answer "done". Nothing then
fails, until two runs meet. So each promise is tried: a condition that does not hold must be refused, and so must bytes
that do not have the checksum sent with them.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from stages.artifacts.store import NotInStore, Store, StoreError

_SKEW_SECONDS = 30.0
State = Literal["ok", "warning", "unsafe", "failed"]


@dataclass(frozen=True)
class Check:
    """What was found.

    Attributes:
        name: what was looked at.
        state: "ok"; "warning": works, but look at it; "unsafe": works until it does harm; "failed": does not work.
        detail: one sentence: figures, or what is wrong and how to mend it.
    """

    name: str
    state: State
    detail: str


def check_store(store: Store) -> Iterator[Check]:
    """Try a store's promises: reading and writing, conditional writes, checksums, listing, the clock."""
    probe = f"doctor/{uuid.uuid4().hex}"
    try:
        begun = time.monotonic()
        store.put(probe, b"one")
        if store.get(probe) != b"one":
            yield Check("store", "failed", f"{store.url} gave back other bytes than were put there")
            return
        took = (time.monotonic() - begun) * 1000
        yield Check("store", "ok", f"{store.url} can be written and read ({took:.0f} ms for both)")
        yield _tried("conditional writes", lambda: _conditions(store, probe))
        yield _tried("listing", lambda: _listing(store, probe))
        if store.remote:
            yield _tried("checksums", lambda: _checksums(store, probe))
            yield _tried("clock", lambda: _clock(store))
    except StoreError as error:
        yield Check("store", "failed", str(error))
        return
    finally:
        for key in (probe, probe + "-absent", probe + "-sum", probe + "-part"):
            with suppress(StoreError):
                store.delete(key)
    yield _tried("deleting", lambda: _deleted(store, probe))


def _tried(name: str, check: Callable[[], tuple[State, str]]) -> Check:
    try:
        return Check(name, *check())
    except StoreError as error:
        return Check(name, "failed", str(error))


def _conditions(store: Store, key: str) -> tuple[State, str]:
    wrong = []
    if store.put(key, b"two", if_absent=True) is not None or store.get(key) != b"one":
        wrong.append("If-None-Match")
        store.put(key, b"one")
    _, tag = store.get_with_tag(key)
    newer = store.put(key, b"three", if_match=tag)
    if newer is None or store.get(key) != b"three":
        wrong.append("If-Match (a right tag was refused)")
    elif store.put(key, b"four", if_match=tag) is not None or store.get(key) != b"three":
        wrong.append("If-Match")
    if store.put(key + "-absent", b"x", if_match=tag) is not None:
        wrong.append("If-Match on an object that is not there")
    if not wrong:
        return "ok", "honoured: of several writers exactly one wins"
    return "unsafe", (
        f"not honoured ({', '.join(wrong)}): two runs at once could compute the same step, and a reference lose an "
        "update; let one run at a time use this store, or use a server that honours them"
    )


def _listing(store: Store, key: str) -> tuple[State, str]:
    if [info.key for info in store.list(key)] != [key]:
        return "unsafe", (
            "an object that was just put is not listed: `gc` could remove what a run has just published; "
            "use a store that lists what it holds at once"
        )
    return "ok", "an object is listed as soon as it is put"


def _checksums(store: Store, key: str) -> tuple[State, str]:
    from stages.artifacts.s3 import S3Store

    if not isinstance(store, S3Store):
        return "ok", "checked by the store"
    wrong = []
    if _accepts(store, lambda name, checksum: _put_wrong(store, name, checksum), key + "-sum"):
        wrong.append("single objects")
    if _accepts(store, lambda name, checksum: _put_wrong_part(store, name, checksum), key + "-part"):
        wrong.append("uploads in parts")
    if wrong:
        return "warning", (
            f"SHA-256 is not checked by the server ({', '.join(wrong)}): bytes that go wrong on the way up "
            "are found only when they are read; run `headrace verify` after large uploads"
        )
    return "ok", "SHA-256 is checked by the server, of single objects and of parts"


def _accepts(store: Any, put: Callable[[str, str], None], key: str) -> bool:
    from stages.artifacts.s3_client import FAULTS, endpoint, explain, status
    from stages.artifacts.s3_transfer import base64_of

    try:
        put(store.prefix + key, base64_of(hashlib.sha256(b"other bytes").digest()))
    except FAULTS as error:
        if status(error) == 400:
            return False
        raise explain(error, f"store {store.url}", store.bucket, endpoint(store.client), "write", key) from error
    return True


def _put_wrong(store: Any, name: str, checksum: str) -> None:
    store.client.put_object(Bucket=store.bucket, Key=name, Body=b"bytes", ChecksumSHA256=checksum)


def _put_wrong_part(store: Any, name: str, checksum: str) -> None:
    begun = store.client.create_multipart_upload(Bucket=store.bucket, Key=name, ChecksumAlgorithm="SHA256")
    upload = {"Bucket": store.bucket, "Key": name, "UploadId": begun["UploadId"]}
    try:
        store.client.upload_part(**upload, PartNumber=1, Body=b"bytes", ChecksumSHA256=checksum)
    finally:
        store.client.abort_multipart_upload(**upload)


def _clock(store: Store) -> tuple[State, str]:
    off = time.time() - store.now()
    if abs(off) > _SKEW_SECONDS:
        way = "ahead of" if off > 0 else "behind"
        return "warning", f"this machine is {abs(off):,.0f} s {way} the store; turn on NTP (S3 refuses 15 minutes)"
    return "ok", f"within {max(1.0, abs(off)):.0f} s of the store's"


def _deleted(store: Store, key: str) -> tuple[State, str]:
    try:
        store.get(key)
    except NotInStore:
        return "ok", "what was put for these checks is gone again"
    return "warning", f"{key} is still there: these credentials may not delete, so `gc` and saved progress will fail"
