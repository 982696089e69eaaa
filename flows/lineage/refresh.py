"""How an index takes in what has changed in a store: one reader for each sort of object.

What the tables hold, and the invariants, are in `flows.lineage.index`.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any

from pydantic_core import from_json

from stages.artifacts import NotInStore, ObjectInfo, Store
from stages.artifacts.changes import changed_parts

PREFIXES = ("manifests/", "results/", "refs/", "runs/")
_READERS = 16
_TOGETHER = 512  # objects of a bucket that are read ahead


@dataclass
class Refresh:
    """One refresh, within one transaction."""

    db: sqlite3.Connection
    store: Store
    progress: Callable[[int], None]
    artifact_ids: dict[str, int] = field(default_factory=dict)
    path_ids: dict[str, int] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)  # artifacts whose time and maker may be others now

    def run(self) -> tuple[int, int]:
        """Returns how many objects were read, and how many are gone."""
        changed: list[tuple[ObjectInfo, str, int | None]] = []  # with its part, and its id where it was known
        gone: list[int] = []
        for prefix in PREFIXES:
            known = dict(
                map(tuple, self.db.execute("SELECT name, mark FROM parts WHERE name GLOB ?", (f"{prefix[:-1]}*",)))
            )
            seen = set()
            for part in changed_parts(self.store, prefix, known):
                seen.add(part.name)
                if part.objects is None:
                    continue
                self.db.execute("INSERT OR REPLACE INTO parts VALUES (?, ?)", (part.name, part.mark))
                sql = "SELECT key, id, mark FROM objects WHERE part = ?"
                before = {key: (number, mark) for key, number, mark in self.db.execute(sql, (part.name,))}
                for info in part.objects:
                    number, mark = before.pop(info.key, (None, None))
                    if mark is None or mark != info.mark:
                        changed.append((info, part.name, number))
                gone += [number for number, _ in before.values()]
            for name in known.keys() - seen:
                gone += [number for (number,) in self.db.execute("SELECT id FROM objects WHERE part = ?", (name,))]
                self.db.execute("DELETE FROM parts WHERE name = ?", (name,))
        for number in gone:
            self._forget(number)
            self.db.execute("DELETE FROM objects WHERE id = ?", (number,))
        read = 0
        for info, part_name, number, data in self._contents(changed):
            if data is None:  # removed since it was listed; the next refresh sees that
                continue
            self._take(info, part_name, number, data)
            read += 1
            if read % 1000 == 0:
                self.progress(read)
        self._settle(bool(gone))
        return read, len(gone)

    def _contents(
        self, changed: list[tuple[ObjectInfo, str, int | None]]
    ) -> Iterator[tuple[ObjectInfo, str, int | None, bytes | None]]:
        """Each object with its bytes, None where it is gone."""

        def get(item: tuple[ObjectInfo, str, int | None]) -> bytes | None:
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

    def _take(self, info: ObjectInfo, part: str, number: int | None, data: bytes) -> None:
        if number is not None:
            self._forget(number)
            self.db.execute(
                "UPDATE objects SET mark = ?, part = ?, problem = '' WHERE id = ?", (info.mark, part, number)
            )
        else:
            sql = "INSERT INTO objects(key, part, mark, problem) VALUES (?, ?, ?, '')"
            number = self.db.execute(sql, (info.key, part, info.mark)).lastrowid
            assert number is not None
        prefix = info.key.partition("/")[0]
        take = {"manifests": self._manifest, "results": self._result, "refs": self._ref, "runs": self._run}[prefix]
        try:
            self.db.execute("SAVEPOINT object")
            take(info, number, data)
            self.db.execute("RELEASE object")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self.db.execute("ROLLBACK TO object")
            self.db.execute("RELEASE object")
            self.artifact_ids.clear()  # ids that were given since may be void
            self.path_ids.clear()
            problem = f"cannot be read: {type(error).__name__}: {str(error)[:200]}"
            self.db.execute("UPDATE objects SET problem = ? WHERE id = ?", (problem, number))

    def _manifest(self, info: ObjectInfo, number: int, data: bytes) -> None:
        match = re.fullmatch(r"manifests/([0-9a-f]{2})/(\1[0-9a-f]{62})\.json", info.key)
        if match is None:
            raise ValueError("is not the name of a manifest")
        if hashlib.sha256(data).hexdigest() != match[2]:
            raise ValueError("its content has another hash than its name")
        value = from_json(data)
        artifact = self._artifact("sha256:" + match[2])
        entries = value["files"]
        size = sum(entry["size"] for entry in entries)
        self.db.execute(
            "UPDATE artifacts SET kind = ?, size = ?, files = ?, present = 1, stored = ? WHERE id = ?",
            (value["kind"], size, len(entries), info.modified, artifact),
        )
        self.db.executemany(
            "INSERT INTO files VALUES (?, ?, ?, ?)",
            [(artifact, self._path(e["path"]), e["size"], bytes.fromhex(e["sha256"])) for e in entries],
        )
        self.touched.add(artifact)

    def _result(self, info: ObjectInfo, number: int, data: bytes) -> None:
        value = from_json(data, allow_inf_nan=True)
        if info.key != f"results/{value['stage']}/{value['key']}.json":
            raise ValueError("it belongs to another key")
        for made, current in ((value, 1), *((older, 0) for older in value.get("history", []))):
            self._making(made, number, current)

    def _making(self, made: dict[str, Any], number: int, current: int) -> None:
        environment, code = made.get("environment") or {}, (made.get("code") or {}).get("artifact")
        device, devices = devices_of(environment)
        making = self.db.execute(
            "INSERT INTO makings(object, current, stage, step, key, run, started, finished, seconds, devices, device,"
            " code) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(number, current, made["stage"], made["step"], made["key"], made["run"]),
                *(_unix(made.get("started")), _unix(made["finished"]), float(made.get("seconds") or 0.0)),
                *(devices, device, self._artifact(code) if code else None),
            ),
        ).lastrowid
        outputs = {"": made["artifact"], **(made.get("outputs") or {})}
        named = [(making, name, self._artifact(digest)) for name, digest in outputs.items()]
        self.db.executemany("INSERT INTO outputs VALUES (?, ?, ?)", named)
        self.touched.update(artifact for _, _, artifact in named)
        read = [(making, name, self._artifact(digest)) for name, digest in (made.get("inputs") or {}).items()]
        self.db.executemany("INSERT INTO inputs VALUES (?, ?, ?)", read)
        values = [(making, name, float(value)) for name, value in (made.get("metrics") or {}).items()]
        self.db.executemany("INSERT INTO metrics VALUES (?, ?, ?)", values)

    def _ref(self, info: ObjectInfo, number: int, data: bytes) -> None:
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
        self.db.execute("DELETE FROM moves WHERE ref = ?", (name,))
        self.db.executemany("INSERT INTO moves VALUES (?, ?, ?, ?, ?, ?, ?, ?)", moves)
        latest = (name, number, self._artifact(value["artifact"]), len(moves), moves[-1][5])
        self.db.execute("INSERT OR REPLACE INTO refs VALUES (?, ?, ?, ?, ?)", latest)

    def _run(self, info: ObjectInfo, number: int, data: bytes) -> None:
        value = from_json(data)
        name = info.key.removeprefix("runs/").removesuffix(".json")
        if value["id"] != name:
            raise ValueError("it is the document of another run")
        values = (number, name, str(value.get("recipe") or ""), str(value.get("state") or ""))
        times = (_unix(value.get("started")), _unix(value.get("finished")), value.get("seconds"))
        sql = "INSERT INTO runs(object, name, recipe, state, started, finished, seconds) VALUES (?, ?, ?, ?, ?, ?, ?)"
        run = self.db.execute(sql, (*values, *times)).lastrowid
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
        self.db.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", steps)
        found = [(run, name, self._artifact(digest)) for name, digest in (value.get("sources") or {}).items() if digest]
        self.db.executemany("INSERT INTO sources VALUES (?, ?, ?)", found)

    def _artifact(self, digest: str) -> int:
        """The id of an artifact, which may not be in the store (yet)."""
        found = self.artifact_ids.get(digest)
        if found is None:
            if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
                raise ValueError(f"{digest[:80]!r} is not a digest")
            row = self.db.execute("SELECT id FROM artifacts WHERE digest = ?", (digest,)).fetchone()
            found = row[0] if row else self.db.execute("INSERT INTO artifacts(digest) VALUES (?)", (digest,)).lastrowid
            assert found is not None
            self.artifact_ids[digest] = found
        return found

    def _path(self, path: str) -> int:
        found = self.path_ids.get(path)
        if found is None:
            row = self.db.execute("SELECT id FROM paths WHERE path = ?", (path,)).fetchone()
            found = row[0] if row else self.db.execute("INSERT INTO paths(path) VALUES (?)", (path,)).lastrowid
            assert found is not None
            self.path_ids[path] = found
        return found

    def _forget(self, number: int) -> None:
        """Remove what an object said."""
        (key,) = self.db.execute("SELECT key FROM objects WHERE id = ?", (number,)).fetchone()
        prefix, _, rest = key.partition("/")
        if prefix == "manifests":
            row = self.db.execute("SELECT id FROM artifacts WHERE digest = ?", (f"sha256:{rest[3:-5]}",)).fetchone()
            if row:
                self.db.execute("DELETE FROM files WHERE artifact = ?", row)
                self.db.execute(
                    "UPDATE artifacts SET present = 0, kind = '', size = 0, files = 0, stored = NULL WHERE id = ?", row
                )
                self.touched.add(row[0])
        elif prefix == "results":
            for (making,) in self.db.execute("SELECT id FROM makings WHERE object = ?", (number,)).fetchall():
                for table in ("inputs", "metrics"):
                    self.db.execute(f"DELETE FROM {table} WHERE making = ?", (making,))
                sql = "DELETE FROM outputs WHERE making = ? RETURNING artifact"
                self.touched.update(artifact for (artifact,) in self.db.execute(sql, (making,)).fetchall())
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
        self.db.executemany("INSERT INTO touched VALUES (?)", ((number,) for number in self.touched))
        # These two are needed now; the others are made when the tables are filled.
        self.db.execute("CREATE INDEX IF NOT EXISTS outputs_artifact ON outputs(artifact)")
        newest = (
            "SELECT m.id FROM outputs o JOIN makings m ON m.id = o.making WHERE o.artifact = artifacts.id"
            " ORDER BY m.finished DESC, m.key DESC LIMIT 1"
        )
        self.db.execute(f"UPDATE artifacts SET maker = ({newest}) WHERE id IN (SELECT id FROM touched)")
        self.db.execute(
            "UPDATE artifacts SET time = coalesce((SELECT finished FROM makings WHERE id = maker), stored)"
            " WHERE id IN (SELECT id FROM touched)"
        )
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
