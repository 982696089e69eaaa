"""An index of a store, so that questions about 100,000 artifacts are answered at once.

A SQLite file in this user's cache folder (HEADRACE_CACHE_DIR, or `headrace` in XDG_CACHE_HOME or ~/.cache), one for
each store URL. It holds what manifests, results, refs and runs say; the questions are in `flows.lineage.queries`.

Invariants:
- It is never the truth: it can be deleted at any time, and what is decided or proved is read from the store again.
- A refresh is one transaction: readers see the state before or after it, and one that is killed leaves the former.
  One process refreshes at a time; the others wait and find it done.
- A file that is no index, is damaged or has another schema is put aside and made anew.

The rule of refreshing is that of `stages.artifacts.changes`: objects whose mark (in a folder inode, time and size; in
a bucket the ETag) is not the known one are read again, by one thread in a folder, by sixteen in a bucket. Manifests
never change under their digest; results, refs and runs do. Objects that cannot be read are kept with the reason in
`objects.problem`.

The schema (ids are SQLite's; times are unix seconds, REAL; `digest` is "sha256:<64 hex>"):

    meta(name, value)                            store, schema, refreshed; objects: the next id of one
    parts(name, mark)                            folders as they were at the last look
    objects(part, key, id, mark, problem)        every manifest, result, ref and run; problem "" where it could be read
    artifacts(id, digest, kind, size, files, present, stored, time, maker, stage, step, run, output)
        size: bytes of all files; files: how many; present: 1 while the manifest is there and sound (else kind "");
        time: when its newest making ended, or its manifest was put (`stored`); maker: that making, NULL for imported
        data; stage, step, run: of that making ("" for none); output: which output of it this is, "" for the main one
    paths(id, path)                              every path that a manifest has, once
    files(artifact, path, size, sha256)          sha256 as 32 bytes
    makings(id, object, current, stage, step, key, run, started, finished, seconds, devices, device, code)
        one computation: a result (current 1) or an older one in its history (0); `devices` of the sort `device`
        ("gpu", "cpu") worked for `seconds`; code: the artifact that holds its sources, NULL where they were not kept
    outputs(making, name, artifact)              name "" is the main output
    inputs(making, name, artifact)
    metrics(making, name, value)                 final metrics
    refs(name, object, artifact, moves, time)
    moves(ref, number, artifact, previous, who, time, why, restores)     artifact, previous: ids
    runs(id, object, name, recipe, state, started, finished, seconds)
    steps(run, position, step, stage, status, key, artifact, seconds, reason, message, started, finished, logs,
        attempts)
    sources(run, input, artifact)                what came from outside the run; input is "step.input"
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.lineage.refresh import Refresh
from stages.artifacts import Store, StoreError
from stages.artifacts.cache import cache_folder

SCHEMA = 3
_WAIT_SECONDS = 600.0  # for another process that refreshes; the first index of a large bucket takes minutes
_TABLES = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE parts(name TEXT PRIMARY KEY, mark TEXT) WITHOUT ROWID;
CREATE TABLE objects(part TEXT, key TEXT, id INTEGER, mark TEXT, problem TEXT, PRIMARY KEY (part, key)) WITHOUT ROWID;
CREATE TABLE artifacts(id INTEGER PRIMARY KEY, digest TEXT UNIQUE, kind TEXT DEFAULT '', size INTEGER DEFAULT 0,
    files INTEGER DEFAULT 0, present INTEGER DEFAULT 0, stored REAL, time REAL, maker INTEGER, stage TEXT DEFAULT '',
    step TEXT DEFAULT '', run TEXT DEFAULT '', output TEXT DEFAULT '');
CREATE TABLE paths(id INTEGER PRIMARY KEY, path TEXT UNIQUE);
CREATE TABLE files(artifact INTEGER, path INTEGER, size INTEGER, sha256 BLOB);
CREATE TABLE makings(id INTEGER PRIMARY KEY, object INTEGER, current INTEGER, stage TEXT, step TEXT, key TEXT, run TEXT,
    started REAL, finished REAL, seconds REAL, devices INTEGER, device TEXT, code INTEGER);
CREATE TABLE outputs(making INTEGER, name TEXT, artifact INTEGER);
CREATE TABLE inputs(making INTEGER, name TEXT, artifact INTEGER);
CREATE TABLE metrics(making INTEGER, name TEXT, value REAL);
CREATE TABLE refs(name TEXT PRIMARY KEY, object INTEGER, artifact INTEGER, moves INTEGER, time REAL);
CREATE TABLE moves(ref TEXT, number INTEGER, artifact INTEGER, previous INTEGER, who TEXT, time REAL, why TEXT,
    restores INTEGER);
CREATE TABLE runs(id INTEGER PRIMARY KEY, object INTEGER, name TEXT UNIQUE, recipe TEXT, state TEXT, started REAL,
    finished REAL, seconds REAL);
CREATE TABLE steps(run INTEGER, position INTEGER, step TEXT, stage TEXT, status TEXT, key TEXT, artifact INTEGER,
    seconds REAL, reason TEXT, message TEXT, started REAL, finished REAL, logs TEXT, attempts INTEGER);
CREATE TABLE sources(run INTEGER, input TEXT, artifact INTEGER);
"""
# Made once the tables are filled: a first index is then a third faster.
_INDICES = """
CREATE INDEX IF NOT EXISTS objects_problem ON objects(problem) WHERE problem != '';
CREATE INDEX IF NOT EXISTS artifacts_time ON artifacts(time DESC, id DESC) WHERE present = 1;
CREATE INDEX IF NOT EXISTS artifacts_kind ON artifacts(kind, time DESC, id DESC) WHERE present = 1;
CREATE INDEX IF NOT EXISTS artifacts_stage ON artifacts(stage, time DESC, id DESC) WHERE present = 1;
CREATE INDEX IF NOT EXISTS artifacts_step ON artifacts(step, time DESC, id DESC) WHERE present = 1;
CREATE INDEX IF NOT EXISTS artifacts_maker ON artifacts(maker);
CREATE INDEX IF NOT EXISTS artifacts_run ON artifacts(run, time DESC, id DESC) WHERE present = 1;
CREATE INDEX IF NOT EXISTS files_artifact ON files(artifact);
CREATE INDEX IF NOT EXISTS files_sha256 ON files(sha256);
CREATE INDEX IF NOT EXISTS files_path ON files(path, artifact);
CREATE INDEX IF NOT EXISTS makings_object ON makings(object);
CREATE INDEX IF NOT EXISTS makings_key ON makings(key);
CREATE INDEX IF NOT EXISTS makings_code ON makings(code);
CREATE INDEX IF NOT EXISTS makings_run ON makings(run);
CREATE INDEX IF NOT EXISTS makings_step ON makings(step, finished DESC);
CREATE INDEX IF NOT EXISTS outputs_making ON outputs(making, artifact);
CREATE INDEX IF NOT EXISTS outputs_artifact ON outputs(artifact);
CREATE INDEX IF NOT EXISTS inputs_making ON inputs(making);
CREATE INDEX IF NOT EXISTS inputs_artifact ON inputs(artifact, making);
CREATE INDEX IF NOT EXISTS metrics_making ON metrics(making);
CREATE INDEX IF NOT EXISTS metrics_name ON metrics(name, value);
CREATE INDEX IF NOT EXISTS moves_ref ON moves(ref, number);
CREATE INDEX IF NOT EXISTS moves_artifact ON moves(artifact);
CREATE INDEX IF NOT EXISTS refs_artifact ON refs(artifact);
CREATE INDEX IF NOT EXISTS runs_started ON runs(started DESC);
CREATE INDEX IF NOT EXISTS runs_object ON runs(object);
CREATE INDEX IF NOT EXISTS steps_run ON steps(run, position);
CREATE INDEX IF NOT EXISTS steps_artifact ON steps(artifact);
CREATE INDEX IF NOT EXISTS steps_step ON steps(step);
CREATE INDEX IF NOT EXISTS sources_run ON sources(run);
CREATE INDEX IF NOT EXISTS sources_artifact ON sources(artifact);
"""


@dataclass(frozen=True)
class Refreshed:
    """What a refresh did.

    Attributes:
        read: objects that were read, for they were new or had changed.
        gone: objects that are no longer in the store.
        seconds: how long it took.
    """

    read: int
    gone: int
    seconds: float


def open_index(store: Store, *, fresh: bool = True, progress: Callable[[int], None] = lambda read: None) -> Index:
    """The index of a store, made if there is none.

    Args:
        fresh: bring it up to date first.
        progress: called with the number of objects read so far, now and then.

    Raises:
        StoreError: the store cannot be read, or the cache folder that was asked for cannot be written.
    """
    index = Index(store, _place(store))
    if fresh:
        index.refresh(progress)
    return index


def _place(store: Store) -> Path:
    caches = cache_folder()
    folder = caches / "index" if caches is not None else None
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        usable = folder is not None and os.access(folder, os.W_OK)
    except OSError:
        usable = False
    if folder is None or not usable:
        if os.environ.get("HEADRACE_CACHE_DIR"):
            raise StoreError(f"the cache folder {folder} cannot be written; set HEADRACE_CACHE_DIR to another one")
        folder = Path(tempfile.mkdtemp(prefix="headrace-index-"))  # for this process alone; costs a first index
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / f"{hashlib.sha256(store.url.encode()).hexdigest()[:32]}.sqlite"


class Index:
    """An open index. Safe for several threads (each has a connection of its own) and processes.

    Attributes:
        store: what is indexed.
        path: the SQLite file.
    """

    def __init__(self, store: Store, path: Path) -> None:
        self.store, self.path = store, path
        self._threads = threading.local()
        self._life = 0  # how often the file was made anew: connections of an earlier life are closed
        self._renewing = threading.Lock()

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """All rows of a query. An index that proves damaged is made anew, once.

        Raises:
            StoreError: the index cannot be read or made.
        """
        try:
            return self._connection().execute(sql, parameters).fetchall()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
        self._renew()
        self.refresh()
        return self._connection().execute(sql, parameters).fetchall()

    def refresh(self, progress: Callable[[int], None] = lambda read: None) -> Refreshed:
        """Bring the index up to date with the store.

        Raises:
            StoreError: the store cannot be read, or the index not be written.
        """
        try:
            return self._refresh(progress)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise StoreError(
                    f"the index {self.path} cannot be written: {error}; delete it if that stays"
                ) from error
        self._renew()
        return self._refresh(progress)

    def _refresh(self, progress: Callable[[int], None]) -> Refreshed:
        begun = time.monotonic()
        connection = self._connection()
        connection.execute("BEGIN IMMEDIATE")
        try:
            read, gone = Refresh(connection, self.store, progress).run()
            for statement in filter(str.strip, _INDICES.split(";")):
                connection.execute(statement)
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('refreshed', ?)", (str(time.time()),))
            connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        if read > 10_000:
            connection.execute("PRAGMA optimize")
        return Refreshed(read, gone, time.monotonic() - begun)

    def close(self) -> None:
        """Close this thread's connection."""
        connection = getattr(self._threads, "connection", None)
        if connection is not None:
            connection.close()
            self._threads.connection = None

    def _connection(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._threads, "connection", None)
        if connection is not None and self._threads.life == self._life:
            return connection
        self.close()
        try:
            connection = self._open()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise StoreError(f"the index {self.path} cannot be opened: {error}") from error
            self._renew()
            connection = self._open()
        self._threads.connection, self._threads.life = connection, self._life
        return connection

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=OFF")  # a lost index is made again
            connection.execute("PRAGMA cache_size=-65536")
            if _is_empty(connection):  # else nothing is locked: a reader does not wait for a refresh
                connection.execute("BEGIN IMMEDIATE")
                if _is_empty(connection):  # another process may have been first
                    for statement in filter(str.strip, _TABLES.split(";")):
                        connection.execute(statement)
                    values = [("schema", str(SCHEMA)), ("store", self.store.url)]
                    connection.executemany("INSERT INTO meta VALUES (?, ?)", values)
                connection.execute("COMMIT")
            known = dict(map(tuple, connection.execute("SELECT name, value FROM meta").fetchall()))
            if known.get("schema") != str(SCHEMA) or known.get("store") != self.store.url:
                raise _OtherSchema(f"schema {known.get('schema')} of {known.get('store')}")
            return connection
        except sqlite3.OperationalError as error:
            connection.close()
            raise _OtherSchema(str(error)) if "no such table" in str(error) else error from error
        except BaseException:
            connection.close()
            raise

    def _renew(self) -> None:
        """Put the file aside; the next connection makes a new one."""
        with self._renewing:
            self.close()
            self._life += 1
            for ending in ("-wal", "-shm", ""):
                with suppress(FileNotFoundError):
                    os.replace(f"{self.path}{ending}", f"{self.path}.bad{ending}")


class _OtherSchema(sqlite3.DatabaseError):
    """A file of another program, another store or another version of this one."""


def _is_empty(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file itself is wrong, rather than locked, full or asked wrongly."""
    if isinstance(error, _OtherSchema):
        return True
    wrong = ("malformed", "not a database", "no such table", "no such column", "disk image", "file is encrypted")
    return any(words in str(error) for words in wrong)
