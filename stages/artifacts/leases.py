"""Leases: one process computes a key, and everybody else knows who.

`leases/<key>.json` holds the last lease on a stage key, taken and renewed by compare-and-swap. Invariants:

- Of several processes that want a free lease, exactly one gets it.
- Clocks of hosts are never compared: a lease has expired when whoever waits has seen the same record for the `seconds`
  that it states, by its own monotonic clock. A holder that is a dead process of this host, boot and process namespace
  is found out at once.
- Each lease has a greater fencing token than the one before it, and than the result of the key. `check` reads the store
  again, and `write_result` refuses a lower token than the stored one: a holder that froze and wakes up late cannot
  overwrite what its successor wrote.
- A lease ends by being released (the record stays, with no holder, and keeps the token) or by being taken over.

The design is that of Gray and Cheriton, "Leases" (SOSP 1989), with the fencing tokens of Burrows, "The Chubby lock
service" (OSDI 2006).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.artifacts import processes
from stages.artifacts.store import Damaged, NotInStore, Store, StoreError, leave_out
from stages.artifacts.variables import seconds_of

GC_KEY = hashlib.sha256(b"gc").hexdigest()  # the key of the lease under which a gc removes things
GC_STEP = "gc"  # of that lease, while nothing that the gc has looked at waits to be removed
LEASE_SECONDS = 30.0
_BEATS = 6  # heartbeats in the time after which a lease expires
_POLL = 1.0  # seconds between two looks at somebody else's lease, at most
_GC_POLL = 0.1  # seconds; it removes a thousand objects at once
_RELEASED_BY_HAND = "delete it if no run of this step is going on"


class LeaseLost(StoreError):
    """Another process holds the lease now, or none does: this process may not publish under the key."""


class LeaseRecord(BaseModel):
    """What `leases/<key>.json` holds.

    Attributes:
        key: the stage key.
        holder: 32 hexadecimal digits, new for each lease; None once it is released.
        token: the fencing token, greater than that of every earlier lease on the key.
        beat: raised by each heartbeat, so that a live lease never looks the same for `seconds`.
        seconds: how long the record must stay the same before another process may take the lease over.
        stage, step, run: what is computed, for which step of which run.
        inputs: digests of the artifacts that it reads; gc keeps them.
        host, pid: where it is computed, for people.
        place: boot and process namespace in which `pid` and `born` (start of the process, in ticks since boot) tell
        whether
            it still lives; "" where the system cannot say.
        since, renewed: UTC, ISO 8601, by the clock of the holder's host; for people only.
    """

    model_config = ConfigDict(extra="forbid")

    key: str = Field(pattern="^[0-9a-f]{8,64}$")
    holder: str | None
    token: int = Field(ge=1)
    beat: int = Field(0, ge=0)
    seconds: float = Field(gt=0, le=86400)
    stage: str
    step: str
    run: str
    inputs: list[str] = []
    host: str
    pid: int
    place: str = ""
    born: str = ""
    since: str
    renewed: str

    def who(self) -> str:
        """The holder, as people speak of it."""
        return f"step {self.step} of run {self.run} (process {self.pid} on {self.host})"

    def is_dead(self) -> bool:
        """Whether the holder is known to be gone: a process of this host, boot and process namespace that ended."""
        return processes.is_gone(self.place, self.pid, self.born)


class Lease:
    """A lease that this process holds. A thread renews it until `release`; use it as a context manager.

    Attributes:
        token: its fencing token.
    """

    def __init__(self, store: Store, record: LeaseRecord, tag: str) -> None:
        self.token = record.token
        self._store, self._record, self._tag = store, record, tag
        self._lock = threading.Lock()  # of the record and its tag
        self._lost = threading.Event()
        self._end = threading.Event()
        self._reason = ""
        self._thread = threading.Thread(target=self._renew_until_end, name="lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def lost(self) -> bool:
        """Whether it is known that another process took it over. `check` asks the store."""
        return self._lost.is_set()

    @property
    def reason(self) -> str:
        """Why it is lost, in one sentence; "" while it is not."""
        return self._reason

    def check(self) -> None:
        """Read the lease from the store.

        Raises:
            LeaseLost: it is not this process's any more.
            StoreError: the store cannot be read.
        """
        with self._lock:
            if not self._lost.is_set():
                self._adopt()
        if self._lost.is_set():
            raise LeaseLost(self._reason)

    def tell(self, step: str) -> None:
        """Put what is being done into the record, for others who wait for its end. It is there when this returns.

        Raises:
            LeaseLost: it is not this process's any more.
            StoreError: the store cannot be written.
        """
        with self._lock:
            while not self._lost.is_set() and self._record.step != step:
                self._renew(step)
        if self._lost.is_set():
            raise LeaseLost(self._reason)

    @contextmanager
    def held_still(self) -> Iterator[None]:
        """Keep the thread that renews it, and with it the store, at rest for a moment, so that the process can fork."""
        with self._lock:
            yield

    def forked(self) -> None:
        """To be called in a child forked under `held_still`: it may `check` the lease, which its parent renews."""
        self._lock = threading.Lock()

    def release(self, *, remove: bool = False) -> None:
        """Give it up; nothing happens where it is lost. Errors of the store are left to the expiry.

        Args:
            remove: remove the record too. Only right where the token is kept elsewhere or no result can follow.
        """
        if self._end.is_set():
            return
        self._end.set()
        self._thread.join()
        with self._lock:
            if self._lost.is_set():
                return
            gone = self._record.model_copy(update={"holder": None, "renewed": _now()})
            try:
                if remove:
                    self._store.delete(_key(gone.key))
                    return
                self._store.put(_key(gone.key), _dump(gone), if_match=self._tag)
            except StoreError:
                return

    def _renew_until_end(self) -> None:
        while not self._end.wait(self._record.seconds / _BEATS) and not self._lost.is_set():
            try:
                with self._lock:
                    self._renew()
            except StoreError:  # the store is away: the lease may yet be ours when it is back, and the record says
                continue

    def _renew(self, step: str | None = None) -> None:
        changed = {"beat": self._record.beat + 1, "renewed": _now(), "step": step or self._record.step}
        beat = self._record.model_copy(update=changed)
        tag = self._store.put(_key(beat.key), _dump(beat), if_match=self._tag)
        if tag:
            self._record, self._tag = beat, tag
        else:
            self._adopt()

    def _adopt(self) -> None:
        """Take the record as it is in the store, if it is ours (after a lost answer); else the lease is lost."""
        try:
            found, tag = read_tagged(self._store, self._record.key)
        except NotInStore:
            self._lose("was removed from the store")
            return
        except Damaged as error:
            self._lose(f"cannot be read ({error})")
            return
        if found.holder == self._record.holder and found.token == self.token:
            self._record, self._tag = found, tag
        elif found.holder is None:
            self._lose("was taken over and is free again")
        else:
            self._lose(f"was taken over by {found.who()}")

    def _lose(self, how: str) -> None:
        self._reason = (
            f"the lease on key {self._record.key[:12]} (step {self._record.step}) {how}, because this process did not "
            "renew it in time; it stops without publishing"
        )
        self._lost.set()


def acquire(
    store: Store,
    key: str,
    *,
    stage: str,
    step: str,
    run: str,
    inputs: list[str] | None = None,
    after: Callable[[], int] = lambda: 0,
    on_wait: Callable[[LeaseRecord], None] = lambda record: None,
    give_up: Callable[[], bool] = lambda: False,
    seconds: float | None = None,
) -> Lease | None:
    """Take the lease on a key, waiting while another process holds it.

    Args:
        stage, step, run: what is to be computed; shown to those who wait.
        inputs: digests of the artifacts that the computation reads.
        after: a token that the new one must exceed, asked for when the lease is free: that of the key's result.
        on_wait: called once for each holder that is waited for.
        give_up: asked at every look, about once a second; True ends the wait without a lease.
        seconds: time after which it expires unrenewed; HEADRACE_LEASE_SECONDS, or 30, where it is None.

    Returns:
        The lease, renewed by a thread until it is released; None where `give_up` said so.

    Raises:
        StoreError: the store cannot be used, or a lease in it cannot be read.
    """
    duration = lease_seconds() if seconds is None else seconds
    holder = uuid.uuid4().hex
    about = {"holder": holder, "stage": stage, "step": step, "run": run, "inputs": sorted(set(inputs or []))}
    seen: tuple[str, float] | None = None  # the tag of a lease, and when it was first seen
    told: str | None = None
    while True:
        try:
            found, tag = read_tagged(store, key)
        except NotInStore:
            found, tag = None, ""
        if found is not None and found.holder == holder:  # taken by a put whose answer was lost
            return Lease(store, found, tag)
        if found is None or found.holder is None or found.is_dead() or _expired(found, tag, seen):
            token = max(found.token if found is not None else 0, after()) + 1
            record = _record(key, token, duration, **about)
            if found is None:
                taken = store.put(_key(key), _dump(record), if_absent=True)
            else:
                taken = store.put(_key(key), _dump(record), if_match=tag)
            if taken:
                return Lease(store, record, taken)
            continue  # somebody was faster, or the answer was lost
        if seen is None or seen[0] != tag:
            seen = (tag, time.monotonic())
        if told != found.holder:
            on_wait(found)
            told = found.holder
        if give_up():
            return None
        time.sleep(min(_POLL, found.seconds / _BEATS))


def lease_seconds() -> float:
    """How long a lease lasts unrenewed: HEADRACE_LEASE_SECONDS, or 30.

    Raises:
        StoreError: the variable is not a number from 1 to 86400.
    """
    return seconds_of("HEADRACE_LEASE_SECONDS", LEASE_SECONDS, least=1.0)


def read_lease(store: Store, key: str) -> LeaseRecord | None:
    """The last lease on a key, held or released; None where there never was one.

    Raises:
        Damaged: it cannot be read.
    """
    try:
        return read_tagged(store, key)[0]
    except NotInStore:
        return None


def gc_is_running(store: Store) -> bool:
    """Whether a gc may be removing things just now. One that was killed elsewhere may still count for a while.

    A damaged record may be that of a running one.
    """
    try:
        lease = read_lease(store, GC_KEY)
    except Damaged as error:
        leave_out(error)
        return True
    return lease is not None and lease.holder is not None and not lease.is_dead()


def outwait_gc(store: Store) -> None:
    """Wait until a gc that runs has removed what it looked at before now, or has ended.

    It states in its lease when it removes what it has looked at, as another `step` each time, and when it does not, as
    `GC_STEP`. So whatever was put before this call was seen by whatever it removes after it.
    """
    first: tuple[str | None, str] | None = None
    same: tuple[str, float] | None = None  # the tag of its lease, and when it was first seen
    while True:
        try:
            lease, tag = read_tagged(store, GC_KEY)
        except NotInStore:
            return
        except Damaged:  # its holder, if there is one, stops when it renews it
            time.sleep(lease_seconds() / _BEATS)
            return
        first = first or (lease.holder, lease.step)
        if lease.holder is None or lease.step == GC_STEP or lease.is_dead() or first != (lease.holder, lease.step):
            return
        if _expired(lease, tag, same):  # it was killed; woken up, it finds its lease lost before it looks at anything
            return
        if same is None or same[0] != tag:
            same = (tag, time.monotonic())
        time.sleep(_GC_POLL)


def leases(store: Store) -> Iterator[LeaseRecord]:
    """Every readable lease of a store, held or released; the log says which could not be read."""
    for info in store.list("leases/"):
        match = re.fullmatch(r"leases/([0-9a-f]{8,64})\.json", info.key)
        if match is None:
            continue
        try:
            found = read_lease(store, match[1])
        except Damaged as error:
            leave_out(error)
            continue
        if found is not None:
            yield found


def read_tagged(store: Store, key: str) -> tuple[LeaseRecord, str]:
    """The last lease on a key and the tag of its record.

    Raises:
        NotInStore: there never was one.
        Damaged: it cannot be read.
    """
    data, tag = store.get_with_tag(_key(key))
    try:
        record = LeaseRecord.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "whole file"
        message = f"{_key(key)} in store {store.url} is not a lease: {where}: {problem['msg']}; {_RELEASED_BY_HAND}"
        raise Damaged(message) from None
    if record.key != key:
        raise Damaged(f"{_key(key)} in store {store.url} is the lease of another key; {_RELEASED_BY_HAND}")
    return record, tag


def _key(key: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{8,64}", key):
        raise ValueError(f"{key!r} is not a stage key (8 to 64 lowercase hexadecimal digits)")
    return f"leases/{key}.json"


def _expired(found: LeaseRecord, tag: str, seen: tuple[str, float] | None) -> bool:
    return seen is not None and seen[0] == tag and time.monotonic() - seen[1] > found.seconds


def _record(key: str, token: int, seconds: float, **about: Any) -> LeaseRecord:
    now = _now()
    return LeaseRecord(
        key=key,
        token=token,
        seconds=seconds,
        host=platform.node(),
        pid=os.getpid(),
        place=processes.place(),
        born=processes.born(os.getpid()),
        since=now,
        renewed=now,
        **about,
    )


def _dump(record: LeaseRecord) -> bytes:
    return record.model_dump_json(indent=1).encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
