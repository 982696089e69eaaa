"""How an index takes in what has changed in a store: one reader for each sort of object.

What the tables hold, and the invariants, are in `flows.lineage.index`.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import Any, NotRequired

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict

from stages.artifacts import Damaged, NotInStore, ObjectInfo, Store, read_run
from stages.artifacts.changes import LastLook, changed_parts

PREFIXES = ("manifests/", "results/", "refs/", "runs/")
_READERS = 16
_TOGETHER = 512  # objects of a bucket that are read ahead


class _Code(TypedDict):
    artifact: NotRequired[str | None]


class _Making(TypedDict):
    """What the index takes of a record. Most of one is the code's hashes, which are read over."""

    artifact: str
    outputs: NotRequired[dict[str, str] | None]
    stage: str
    step: str
    key: str
    run: str
    inputs: NotRequired[dict[str, str] | None]
    code: NotRequired[_Code | None]
    environment: NotRequired[dict[str, Any] | None]
    started: NotRequired[str | None]
    finished: str
    seconds: NotRequired[float | None]
    metrics: NotRequired[dict[str, float] | None]


class _Record(_Making):
    history: NotRequired[list[_Making]]


_RECORD: TypeAdapter[_Record] = TypeAdapter(_Record)
_Rows = dict[str, list[tuple[Any, ...]]]  # table -> rows to insert
_COLUMNS = {  # of what is inserted, in the order of the rows
    "artifacts": "id, digest",
    "runs": "id, object, name, recipe, state, started, finished, seconds",
}
_FLUSH = 50_000  # rows that are held back, for SQLite takes many at once several times as fast


class Refresh:
    """One refresh, within one transaction of `db`. Rows are held back and written many at a time."""

    def __init__(self, db: sqlite3.Connection, store: Store, progress: Callable[[int], None]) -> None:
        self.db, self.store, self.progress = db, store, progress
        self._rows: dict[str, list[tuple[Any, ...]]] = {}  # table -> rows to insert
        self._manifests: list[tuple[Any, ...]] = []  # updates of artifacts
        self._held = 0
        self._next: dict[str, int] = {}  # table -> the next id
        self._ids: dict[str, dict[str, int]] = {"artifacts": {}, "paths": {}}
        self._touched: set[int] = set()  # artifacts whose time and maker may be others now
        self._plain = db.cursor()
        self._plain.row_factory = None
        for table in ("artifacts", "paths", "makings", "runs"):
            self._next[table] = db.execute(f"SELECT coalesce(max(id), 0) + 1 FROM {table}").fetchone()[0]
        seen = db.execute("SELECT value FROM meta WHERE name = 'objects'").fetchone()  # no object has an id twice
        self._next["objects"] = int(seen[0]) if seen else 1
        self._empty = self._next["objects"] == 1  # nothing to look up: all is new

    def run(self) -> tuple[int, int]:
        """Returns how many objects were read, and how many are gone."""
        changed: list[tuple[ObjectInfo, str]] = []  # with its part
        gone: list[tuple[str, str]] = []  # part and key
        for prefix in PREFIXES:
            sql = "SELECT name, mark FROM parts WHERE name GLOB ?"
            last = LastLook(dict(map(tuple, self.db.execute(sql, (f"{prefix[:-1]}*",)))), self._marks)
            seen = set()
            for part in changed_parts(self.store, prefix, last):
                seen.add(part.name)
                changed += [(info, part.name) for info in part.changed]
                gone += [(part.name, key) for key in part.gone]
                if last.parts.get(part.name) != part.mark:
                    self.db.execute("INSERT OR REPLACE INTO parts VALUES (?, ?)", (part.name, part.mark))
            for name in last.parts.keys() - seen:
                gone += [(name, key) for key in self._marks(name)]
                self.db.execute("DELETE FROM parts WHERE name = ?", (name,))
        for part_name, key in gone:
            self._forget(part_name, key)
        read = 0
        for info, part_name, data in self._contents(changed):
            if data is None:  # removed since it was listed; the next refresh sees that
                continue
            self._take(info, part_name, data)
            read += 1
            if read % 1000 == 0:
                self.progress(read)
        self._flush()
        self.db.execute("INSERT OR REPLACE INTO meta VALUES ('objects', ?)", (str(self._next["objects"]),))
        self._find_killed()
        self._settle(bool(gone))
        return read, len(gone)

    def _find_killed(self) -> None:
        """Look again at runs that go on: one whose process was killed says nothing more, and its object stays."""
        for number, name in self.db.execute("SELECT id, name FROM runs WHERE state = 'running'").fetchall():
            with suppress(Damaged, ValueError):
                document = read_run(self.store, name)
                if document is not None and (state := document.get("state")) != "running":
                    self.db.execute("UPDATE runs SET state = ? WHERE id = ?", (state, number))
                    for step, entry in (document.get("steps") or {}).items():
                        sql = "UPDATE steps SET status = ? WHERE run = ? AND step = ?"
                        self.db.execute(sql, (entry.get("status"), number, step))

    def _marks(self, part: str) -> dict[str, str]:
        """Key -> mark of the objects that are known of a part."""
        return dict(self._plain.execute("SELECT key, mark FROM objects WHERE part = ?", (part,)).fetchall())

    def _contents(self, changed: list[tuple[ObjectInfo, str]]) -> Iterator[tuple[ObjectInfo, str, bytes | None]]:
        """Each object with its bytes, None where it is gone."""

        def get(item: tuple[ObjectInfo, str]) -> bytes | None:
            try:
                return self.store.get(item[0].key)
            except NotInStore:
                return None

        if not self.store.remote:
            yield from ((*item, get(item)) for item in changed)
            return
        with ThreadPoolExecutor(_READERS) as pool:
            items = iter(changed)
            while together := list(islice(items, _TOGETHER)):
                for item, data in zip(together, pool.map(get, together), strict=True):
                    yield (*item, data)

    def _take(self, info: ObjectInfo, part: str, data: bytes) -> None:
        if not self._empty:
            self._forget(part, info.key)
        number = self._new("objects")
        prefix = info.key.partition("/")[0]
        take = {"manifests": self._manifest, "results": self._result, "refs": self._ref, "runs": self._run}[prefix]
        problem = ""
        try:
            rows = take(info, number, data)
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(str(part) for part in wrong["loc"]) or "whole file"
            rows, problem = {}, f"cannot be read: {where}: {wrong['msg'][:200]}"
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, IndexError) as error:
            rows, problem = {}, f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        self._add("objects", [(part, info.key, number, info.mark, problem)])
        for table, found in rows.items():
            self._add(table, found)

    def _add(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        self._rows.setdefault(table, []).extend(rows)
        self._held += len(rows)
        if self._held > _FLUSH:
            self._flush()

    def _flush(self) -> None:
        for table, rows in self._rows.items():
            if rows:
                columns = f"({_COLUMNS[table]})" if table in _COLUMNS else ""
                self.db.executemany(f"INSERT INTO {table}{columns} VALUES ({', '.join('?' * len(rows[0]))})", rows)
                rows.clear()
        sql = "UPDATE artifacts SET kind = ?, size = ?, files = ?, present = 1, stored = ? WHERE id = ?"
        self.db.executemany(sql, self._manifests)
        self._manifests.clear()
        self._held = 0

    def _manifest(self, info: ObjectInfo, number: int, data: bytes) -> _Rows:
        match = re.fullmatch(r"manifests/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json", info.key)
        if match is None:
            raise ValueError("is not the name of a manifest")
        if hashlib.sha256(data).hexdigest() != match[2]:
            raise ValueError("its content has another hash than its name")
        value = from_json(data)
        artifact = self._artifact("sha256:" + match[2])
        files = [
            (artifact, self._id("paths", entry["path"]), entry["size"], bytes.fromhex(entry["sha256"]))
            for entry in value["files"]
        ]
        self._manifests.append((value["kind"], sum(row[2] for row in files), len(files), info.modified, artifact))
        self._touched.add(artifact)
        return {"files": files}

    def _result(self, info: ObjectInfo, number: int, data: bytes) -> _Rows:
        value = _RECORD.validate_json(data)
        if info.key != f"results/{value['stage']}/{value['key']}.json":
            raise ValueError("it belongs to another key")
        rows: _Rows = {"makings": [], "outputs": [], "inputs": [], "metrics": []}
        for made, current in ((value, 1), *((older, 0) for older in value.get("history", []))):
            self._making(made, number, current, rows)
        self._touched.update(artifact for _, _, artifact in rows["outputs"])
        return rows

    def _making(self, made: _Making, number: int, current: int, rows: _Rows) -> None:
        making = self._new("makings")
        code = (made.get("code") or {}).get("artifact")
        device, devices = devices_of(made.get("environment") or {})
        rows["makings"].append(
            (
                *(making, number, current, made["stage"], made["step"], made["key"], made["run"]),
                *(_unix(made.get("started")), _unix(made["finished"]), float(made.get("seconds") or 0.0)),
                *(devices, device, self._artifact(code) if code else None),
            )
        )
        outputs = {"": made["artifact"], **(made.get("outputs") or {})}
        rows["outputs"] += [(making, name, self._artifact(digest)) for name, digest in outputs.items()]
        inputs = made.get("inputs") or {}
        rows["inputs"] += [(making, name, self._artifact(digest)) for name, digest in inputs.items()]
        metrics = made.get("metrics") or {}
        rows["metrics"] += [(making, name, float(value)) for name, value in metrics.items()]

    def _ref(self, info: ObjectInfo, number: int, data: bytes) -> _Rows:
        value = from_json(data)
        name, history = info.key.removeprefix("refs/").removesuffix(".json"), value["history"]
        if value["name"] != name or history[-1]["artifact"] != value["artifact"]:
            raise ValueError("its name or artifact is not that of its last entry")
        moves = [
            (
                *(name, move["number"], self._artifact(move["artifact"])),
                self._artifact(move["previous"]) if move.get("previous") else None,
                *(move["who"], _unix(move["when"]), move.get("why", ""), move.get("restores")),
            )
            for move in history
        ]
        latest = (name, number, moves[-1][2], len(moves), moves[-1][5])
        return {"moves": moves, "refs": [latest]}

    def _run(self, info: ObjectInfo, number: int, data: bytes) -> _Rows:
        value = from_json(data)
        name = info.key.removeprefix("runs/").removesuffix(".json")
        if value["id"] != name:
            raise ValueError("it is the document of another run")
        run = self._new("runs")
        times = (_unix(value.get("started")), _unix(value.get("finished")), value.get("seconds"))
        document = (run, number, name, str(value.get("recipe") or ""), str(value.get("state") or ""), *times)
        steps = [
            (
                *(run, position, step, entry.get("stage"), entry.get("status"), entry.get("key")),
                self._artifact(entry["artifact"]) if entry.get("artifact") else None,
                *(entry.get("seconds"), entry.get("reason") or "", entry.get("message") or ""),
                *(_unix(entry.get("started")), _unix(entry.get("finished")), entry.get("logs")),
                entry.get("attempts") or 0,
            )
            for position, (step, entry) in enumerate((value.get("steps") or {}).items())
        ]
        sources = value.get("sources") or {}
        found = [(run, source, self._artifact(digest)) for source, digest in sources.items() if digest]
        return {"runs": [document], "steps": steps, "sources": found}

    def _artifact(self, digest: str) -> int:
        """The id of an artifact, which may not be in the store (yet)."""
        if digest not in self._ids["artifacts"] and not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise ValueError(f"{digest[:80]!r} is not a digest")
        return self._id("artifacts", digest)

    def _id(self, table: str, value: str) -> int:
        known = self._ids[table]
        found = known.get(value)
        if found is None:
            if not self._empty:
                column = "digest" if table == "artifacts" else "path"
                row = self.db.execute(f"SELECT id FROM {table} WHERE {column} = ?", (value,)).fetchone()
                found = row[0] if row else None
            if found is None:
                found = self._new(table)
                self._add(table, [(found, value)])
            known[value] = found
        return found

    def _new(self, table: str) -> int:
        self._next[table] += 1
        return self._next[table] - 1

    def _forget(self, part: str, key: str) -> None:
        """Remove an object that was known, and what it said."""
        sql = "DELETE FROM objects WHERE part = ? AND key = ? RETURNING id"
        known = self.db.execute(sql, (part, key)).fetchall()
        if not known:
            return
        number = known[0][0]
        prefix, _, rest = key.partition("/")
        if prefix == "manifests":
            row = self.db.execute("SELECT id FROM artifacts WHERE digest = ?", (f"sha256:{rest[3:-5]}",)).fetchone()
            if row:
                self.db.execute("DELETE FROM files WHERE artifact = ?", row)
                self.db.execute(
                    "UPDATE artifacts SET present = 0, kind = '', size = 0, files = 0, stored = NULL WHERE id = ?", row
                )
                self._touched.add(row[0])
        elif prefix == "results":
            for (making,) in self.db.execute("SELECT id FROM makings WHERE object = ?", (number,)).fetchall():
                for table in ("inputs", "metrics"):
                    self.db.execute(f"DELETE FROM {table} WHERE making = ?", (making,))
                sql = "DELETE FROM outputs WHERE making = ? RETURNING artifact"
                self._touched.update(artifact for (artifact,) in self.db.execute(sql, (making,)).fetchall())
            self.db.execute("DELETE FROM makings WHERE object = ?", (number,))
        elif prefix == "refs":
            self.db.execute("DELETE FROM moves WHERE ref IN (SELECT name FROM refs WHERE object = ?)", (number,))
            self.db.execute("DELETE FROM refs WHERE object = ?", (number,))
        else:
            for table in ("steps", "sources"):
                self.db.execute(f"DELETE FROM {table} WHERE run IN (SELECT id FROM runs WHERE object = ?)", (number,))
            self.db.execute("DELETE FROM runs WHERE object = ?", (number,))

    def _settle(self, removed: bool) -> None:
        """Give each artifact that was touched its newest making and its time."""
        self.db.execute("CREATE TEMP TABLE IF NOT EXISTS touched(id INTEGER PRIMARY KEY)")
        self.db.execute("DELETE FROM touched")
        self.db.executemany("INSERT INTO touched VALUES (?)", ((number,) for number in self._touched))
        # These are needed now; the others are made when all is in its place.
        self.db.execute("CREATE INDEX IF NOT EXISTS outputs_artifact ON outputs(artifact)")
        self.db.execute("CREATE INDEX IF NOT EXISTS outputs_making ON outputs(making, artifact)")
        newest = """SELECT m.id, m.finished, m.stage, m.step, m.run, o.name FROM outputs o JOIN makings m
            ON m.id = o.making WHERE o.artifact = artifacts.id ORDER BY m.finished DESC, m.key DESC LIMIT 1"""
        sql = f"UPDATE artifacts SET (maker, time, stage, step, run, output) = ({newest}) WHERE id IN touched"
        self.db.execute(sql)
        sql = "UPDATE artifacts SET time = stored, stage = '', step = '', run = '', output = ''"
        self.db.execute(f"{sql} WHERE maker IS NULL AND id IN touched")
        if removed:
            used = " UNION ".join(
                f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL"
                for table, column in (
                    *(("outputs", "artifact"), ("inputs", "artifact"), ("moves", "artifact"), ("moves", "previous")),
                    *(("steps", "artifact"), ("sources", "artifact"), ("makings", "code")),
                )
            )
            self.db.execute(f"DELETE FROM artifacts WHERE present = 0 AND id NOT IN ({used})")


def devices_of(environment: dict[str, Any]) -> tuple[str, int]:
    """The sort ("gpu" or "cpu") and number of the devices that a result's environment says it was computed on.

    A stage that saw GPUs has one for each of its processes; else its processors count as one device.
    """
    gpus = len(environment.get("cuda_devices") or ())
    processes = int(environment.get("processes") or 1)
    return ("gpu", min(gpus, processes)) if gpus else ("cpu", 1)


def _unix(stamp: str | None) -> float | None:
    """An ISO 8601 time as unix seconds.

    Raises:
        ValueError: it is not one.
    """
    return datetime.fromisoformat(stamp).timestamp() if stamp else None
