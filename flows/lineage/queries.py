"""Questions to an index: artifacts, what made them, what was made from them, files, metrics, references, runs, search.

Every function takes an open `Index` (brought up to date by whoever opened it) and answers from it alone, in well under
a third of a second on 100,000 artifacts. Lists are newest first and paged by `limit` and `offset`. Digests are
"sha256:<64 hex>", times unix seconds. What they answer with is in `flows.lineage.entries`.
"""

from __future__ import annotations

import json
import re
import sqlite3
from typing import Any

from flows.lineage.entries import Artifact, Edge, File, Hit, MadeFrom, Making, Problem, RefMove, RefRow, Run, Step
from flows.lineage.index import Index

RUN_STATES = ("running", "done", "failed", "stopped", "killed", "lost")
_RARE = 3000  # values of a metric, from which on it is common


# Artifacts

_COLUMNS = """a.digest, a.kind, a.size, a.files, a.present, a.time, a.stage, a.step, a.run, a.output, m.key, m.seconds
    FROM artifacts a LEFT JOIN makings m ON m.id = a.maker"""
_ARTIFACT = f"SELECT {_COLUMNS}"
_WITH_IDS = f"SELECT a.id AS id, a.maker AS maker, {_COLUMNS}"


def _artifact(row: sqlite3.Row) -> Artifact:
    return Artifact(
        row["digest"],
        row["kind"],
        row["size"],
        row["files"],
        bool(row["present"]),
        row["time"],
        row["stage"] or "",
        row["step"] or "",
        row["output"] or "",
        row["key"] or "",
        row["run"] or "",
        row["seconds"],
    )


def artifact(index: Index, digest: str) -> Artifact | None:
    """An artifact by its digest; None where the store neither holds nor names it."""
    found = index.rows(f"{_ARTIFACT} WHERE a.digest = ?", (digest,))
    return _artifact(found[0]) if found else None


def artifacts(
    index: Index,
    *,
    kind: str | None = None,
    stage: str | None = None,
    step: str | None = None,
    run: str | None = None,
    limit: int = 50,
    offset: int = 0,
) -> list[Artifact]:
    """The artifacts that are in the store, newest first; those of a kind, or whose newest making is of a stage, step or
    run."""
    where, parameters = _where(kind, stage, step, run)
    # The page is found on an index alone; only its rows are joined with their makings.
    page = f"SELECT a.id FROM artifacts a WHERE {where} ORDER BY a.time DESC, a.id DESC LIMIT ? OFFSET ?"
    sql = f"{_ARTIFACT} WHERE a.id IN ({page}) ORDER BY a.time DESC, a.id DESC"
    return [_artifact(row) for row in index.rows(sql, (*parameters, limit, offset))]


def count_artifacts(
    index: Index, *, kind: str | None = None, stage: str | None = None, step: str | None = None, run: str | None = None
) -> int:
    """How many artifacts `artifacts` would list without a limit."""
    where, parameters = _where(kind, stage, step, run)
    sql = f"SELECT count(*) FROM artifacts a WHERE {where}"
    return int(index.rows(sql, parameters)[0][0])


def _where(kind: str | None, stage: str | None, step: str | None, run: str | None) -> tuple[str, list[str]]:
    conditions, parameters = ["a.present = 1"], []
    for column, value in (("a.kind", kind), ("a.stage", stage), ("a.step", step), ("a.run", run)):
        if value is not None:
            conditions.append(f"{column} = ?")
            parameters.append(value)
    return " AND ".join(conditions), parameters


def files(index: Index, digest: str, *, limit: int = 1000, offset: int = 0) -> list[File]:
    """The files of an artifact, by path."""
    sql = (
        "SELECT p.path, f.size, hex(f.sha256) AS sha256 FROM files f JOIN paths p ON p.id = f.path"
        " WHERE f.artifact = (SELECT id FROM artifacts WHERE digest = ?) ORDER BY p.path LIMIT ? OFFSET ?"
    )
    return [File(row["path"], row["size"], row["sha256"].lower()) for row in index.rows(sql, (digest, limit, offset))]


def makings(index: Index, digest: str) -> list[Making]:
    """Every computation that gave the artifact, newest first."""
    sql = (
        "SELECT m.*, o.name AS output FROM outputs o JOIN makings m ON m.id = o.making"
        " WHERE o.artifact = (SELECT id FROM artifacts WHERE digest = ?) ORDER BY m.finished DESC, m.key DESC"
    )
    names = ("stage", "step", "key", "run", "output", "current", "started", "finished", "seconds", "devices", "device")
    return [Making(**{name: row[name] for name in names}) for row in index.rows(sql, (digest,))]


# Edges


def parents(index: Index, digest: str) -> list[Edge]:
    """What the artifact was made from: the inputs of its newest making, and the sources of the code that ran."""
    maker = "(SELECT maker FROM artifacts WHERE digest = ?)"
    read = index.rows(
        f"SELECT i.name AS input, x.* FROM inputs i JOIN ({_ARTIFACT}) x ON x.digest ="
        f" (SELECT digest FROM artifacts WHERE id = i.artifact) WHERE i.making = {maker} ORDER BY i.rowid",
        (digest,),
    )
    code = index.rows(
        f"{_ARTIFACT} WHERE a.id = (SELECT code FROM makings WHERE id = {maker})",
        (digest,),
    )
    edges = [Edge(row["input"], _artifact(row)) for row in read]
    return edges + [Edge("code", _artifact(row), code=True) for row in code]


def children(index: Index, digest: str, *, limit: int = 200, offset: int = 0) -> list[Edge]:
    """What was made directly from the artifact, newest first, each with the input as which it was read.

    For the sources of a stage: what they computed.
    """
    sql = f"""SELECT e.input, e.code, x.* FROM (
            SELECT o.artifact AS id, min(i.name) AS input, 0 AS code FROM inputs i JOIN outputs o ON o.making = i.making
                WHERE i.artifact = (SELECT id FROM artifacts WHERE digest = :digest) GROUP BY o.artifact
            UNION ALL
            SELECT o.artifact, 'code', 1 FROM makings m JOIN outputs o ON o.making = m.id
                WHERE m.code = (SELECT id FROM artifacts WHERE digest = :digest) GROUP BY o.artifact
        ) e JOIN ({_WITH_IDS}) x ON x.id = e.id
        ORDER BY x.time DESC, x.id DESC LIMIT :limit OFFSET :offset"""
    found = index.rows(sql, {"digest": digest, "limit": limit, "offset": offset})  # type: ignore[arg-type]
    return [Edge(row["input"], _artifact(row), bool(row["code"])) for row in found]


def made_from(
    index: Index,
    *,
    artifact: str | None = None,
    file: str | None = None,
    tables: bool = True,
    limit: int | None = None,
    offset: int = 0,
) -> MadeFrom:
    """Everything that was made from an artifact (a digest), or from any artifact that holds a file (64 hex), over all
    steps; these themselves are not in it. What a stage's sources computed counts as made from them.

    A file that all checkpoints share leads to the whole store, so only the artifacts of the page are taken in hand.

    Args:
        tables: with the tables of origins beside datasets.
        limit: None is all.
    """
    start = "SELECT DISTINCT artifact FROM files WHERE sha256 = ?"
    if file is None:
        start = "SELECT id FROM artifacts WHERE digest = ?"
    listed = "" if tables else "WHERE kind != 'origins'"
    # The walk is over computations, each once: from what one gave to those that read it. CROSS JOIN keeps its order.
    sql = f"""WITH RECURSIVE start(id) AS MATERIALIZED ({start}),
        reached(making) AS (
            SELECT i.making FROM start CROSS JOIN inputs i ON i.artifact = start.id
            UNION
            SELECT m.id FROM start CROSS JOIN makings m ON m.code = start.id
            UNION
            SELECT i.making FROM reached CROSS JOIN outputs o ON o.making = reached.making
                CROSS JOIN inputs i ON i.artifact = o.artifact
        ),
        found(id, digest, kind, present, time) AS MATERIALIZED (
            SELECT id, digest, kind, present, time FROM artifacts
            WHERE id IN (SELECT o.artifact FROM reached CROSS JOIN outputs o ON o.making = reached.making)
                AND id NOT IN start
        )
        SELECT 'kind' AS what, kind AS name, NULL AS digest, count(*) AS number, present AS is_so
            FROM found GROUP BY kind, present
        UNION ALL
        SELECT 'ref', m.ref, a.digest, max(m.time), r.artifact = m.artifact FROM moves m
            JOIN artifacts a ON a.id = m.artifact JOIN refs r ON r.name = m.ref
            WHERE m.artifact IN (SELECT id FROM found UNION ALL SELECT id FROM start) GROUP BY m.ref, m.artifact
        UNION ALL
        SELECT * FROM (SELECT 'made', '', digest, time, 1 FROM found {listed}
            ORDER BY time DESC, id DESC LIMIT ? OFFSET ?)"""
    about = bytes.fromhex(file) if file is not None else artifact
    rows = index.rows(sql, (about, -1 if limit is None else limit, offset))
    counts = [(row["name"], row["number"]) for row in rows if row["what"] == "kind" and row["is_so"]]
    kinds = {kind: count for kind, count in sorted(counts, key=lambda pair: -pair[1]) if kind != "origins"}
    refs = [(row["name"], row["digest"], row["number"], bool(row["is_so"])) for row in rows if row["what"] == "ref"]
    refs.sort(key=lambda ref: (not ref[3], ref[0], -ref[2]))
    total = sum(row["number"] for row in rows if row["what"] == "kind" and (tables or row["name"] != "origins"))
    page = _json([row["digest"] for row in rows if row["what"] == "made"])
    sql = f"{_ARTIFACT} WHERE a.digest IN (SELECT value FROM json_each(?)) ORDER BY a.time DESC, a.id DESC"
    return MadeFrom([_artifact(row) for row in index.rows(sql, (page,))], total, kinds, refs)


def _json(values: list[str]) -> str:
    return json.dumps(values)


# Files


def holders(index: Index, sha256: str, *, limit: int = 1000) -> list[tuple[Artifact, str]]:
    """The artifacts that hold a file with that SHA-256 (64 hex), each with the file's path in it; newest first.

    A limit of -1 is none.
    """
    sql = (
        f"SELECT x.*, p.path FROM files f JOIN paths p ON p.id = f.path JOIN"
        f" ({_WITH_IDS}) x ON x.id = f.artifact"
        " WHERE f.sha256 = ? ORDER BY x.time DESC, x.id DESC LIMIT ?"
    )
    return [(_artifact(row), row["path"]) for row in index.rows(sql, (bytes.fromhex(sha256), limit))]


def count_holders(index: Index, sha256: str) -> int:
    """How many `holders` lists without a limit."""
    return int(index.rows("SELECT count(*) FROM files WHERE sha256 = ?", (bytes.fromhex(sha256),))[0][0])


def files_named(index: Index, text: str, *, limit: int = 50) -> list[File]:
    """Distinct files whose path has `text` in it, whatever the case; imported data first, then the newest.

    Of each path the `limit` that were indexed last are looked at, for some paths are in every checkpoint.
    """
    pattern = f"%{_escape(text)}%"
    paths = index.rows("SELECT id FROM paths WHERE path LIKE ? ESCAPE '\\' ORDER BY length(path) LIMIT 200", (pattern,))
    sql = """SELECT p.path, f.size, f.sha256, coalesce(a.time, 0) AS time, a.kind = 'source' AS raw
        FROM files f JOIN paths p ON p.id = f.path JOIN artifacts a ON a.id = f.artifact
        WHERE f.path = ? ORDER BY f.artifact DESC LIMIT ?"""
    found: dict[File, tuple[bool, float]] = {}
    for (path,) in paths:
        for row in index.rows(sql, (path, limit)):
            file = File(row["path"], row["size"], row["sha256"].hex())
            found[file] = max(found.get(file, (False, 0.0)), (bool(row["raw"]), row["time"]))
    return sorted(found, key=lambda file: found[file], reverse=True)[:limit]


def _escape(text: str) -> str:
    return re.sub(r"([\\%_])", r"\\\1", text)


# References


def all_refs(index: Index) -> list[RefRow]:
    """Every reference, by name."""
    sql = "SELECT r.*, a.digest FROM refs r JOIN artifacts a ON a.id = r.artifact ORDER BY r.name"
    return [RefRow(row["name"], row["digest"], row["time"], row["moves"]) for row in index.rows(sql)]


def history(index: Index, ref: str, *, limit: int = 200, offset: int = 0) -> list[RefMove]:
    """The moves of a reference, newest first."""
    sql = (
        "SELECT m.*, a.digest, b.digest AS before FROM moves m JOIN artifacts a ON a.id = m.artifact"
        " LEFT JOIN artifacts b ON b.id = m.previous WHERE m.ref = ? ORDER BY m.number DESC LIMIT ? OFFSET ?"
    )
    return [
        RefMove(row["number"], row["digest"], row["before"], row["who"], row["time"], row["why"], row["restores"])
        for row in index.rows(sql, (ref, limit, offset))
    ]


def refs_to(index: Index, digests: list[str]) -> list[tuple[str, str, float, bool]]:
    """The references that name, or ever named, one of the artifacts: (reference, digest, since when, whether now)."""
    sql = """SELECT m.ref, a.digest, max(m.time) AS time, r.artifact = m.artifact AS now FROM moves m
        JOIN artifacts a ON a.id = m.artifact JOIN refs r ON r.name = m.ref
        WHERE a.digest IN (SELECT value FROM json_each(?)) GROUP BY m.ref, m.artifact
        ORDER BY now DESC, m.ref, time DESC"""
    return [(row["ref"], row["digest"], row["time"], bool(row["now"])) for row in index.rows(sql, (_json(digests),))]


# Runs


def runs(
    index: Index, *, recipe: str | None = None, state: str | None = None, limit: int = 50, offset: int = 0
) -> list[Run]:
    """Runs, newest first."""
    conditions, parameters = ["1"], []
    for column, value in (("recipe", recipe), ("state", state)):
        if value is not None:
            conditions.append(f"{column} = ?")
            parameters.append(value)
    sql = f"SELECT * FROM runs WHERE {' AND '.join(conditions)} ORDER BY started DESC, name DESC LIMIT ? OFFSET ?"
    return [_run(index, row) for row in index.rows(sql, (*parameters, limit, offset))]


def count_runs(index: Index) -> int:
    """How many runs there are."""
    return int(index.rows("SELECT count(*) FROM runs")[0][0])


def run(index: Index, name: str) -> Run | None:
    """A run by its name."""
    found = index.rows("SELECT * FROM runs WHERE name = ?", (name,))
    return _run(index, found[0]) if found else None


def _run(index: Index, row: sqlite3.Row) -> Run:
    states = index.rows("SELECT status, count(*) FROM steps WHERE run = ? GROUP BY status", (row["id"],))
    names = ("name", "recipe", "state", "started", "finished", "seconds")
    return Run(**{name: row[name] for name in names}, states={status or "?": count for status, count in states})


_STEP = (
    "SELECT s.*, r.name AS run_name, a.digest FROM steps s JOIN runs r ON r.id = s.run"
    " LEFT JOIN artifacts a ON a.id = s.artifact"
)


def steps(index: Index, run_name: str) -> list[Step]:
    """The steps of a run, in the order of its plan."""
    return [_step(row) for row in index.rows(f"{_STEP} WHERE r.name = ? ORDER BY s.position", (run_name,))]


def runs_with(index: Index, digest: str, *, limit: int = 50) -> list[Step]:
    """The steps of runs that gave or took the artifact as their result, newest first."""
    sql = f"{_STEP} WHERE s.artifact = (SELECT id FROM artifacts WHERE digest = ?) ORDER BY r.started DESC LIMIT ?"
    return [_step(row) for row in index.rows(sql, (digest, limit))]


def _step(row: sqlite3.Row) -> Step:
    names = (
        "step",
        "stage",
        "status",
        "key",
        "seconds",
        "reason",
        "message",
        "started",
        "finished",
        "logs",
        "attempts",
    )
    return Step(run=row["run_name"], artifact=row["digest"], **{name: row[name] for name in names})


# Metrics


def metrics(index: Index, digest: str) -> dict[str, float]:
    """The final metrics of the newest making of an artifact."""
    sql = "SELECT name, value FROM metrics WHERE making = (SELECT maker FROM artifacts WHERE digest = ?) ORDER BY rowid"
    return dict(map(tuple, index.rows(sql, (digest,))))


def metric_names(index: Index) -> list[str]:
    """The name of every metric, sorted."""
    # One step of the index for each name, where DISTINCT would read every value.
    sql = """WITH RECURSIVE names(name) AS (SELECT min(name) FROM metrics UNION ALL
        SELECT (SELECT min(name) FROM metrics WHERE name > names.name) FROM names WHERE names.name IS NOT NULL)
        SELECT name FROM names WHERE name IS NOT NULL"""
    return [row[0] for row in index.rows(sql)]


def with_metric(index: Index, name: str, *, limit: int = 50, offset: int = 0) -> list[tuple[Artifact, float]]:
    """The main artifacts whose newest making has the metric, with its value; newest first."""
    rare = len(index.rows("SELECT 1 FROM metrics WHERE name = ? LIMIT ?", (name, _RARE))) < _RARE
    # A common metric is found along the artifacts by time; a rare one is looked up, and what it is of sorted.
    order = "metrics v CROSS JOIN artifacts a" if rare else "artifacts a CROSS JOIN metrics v"
    page = (
        f"SELECT a.id, v.value FROM {order} WHERE v.name = ? AND v.making = a.maker AND a.present = 1"
        " AND a.output = '' ORDER BY a.time DESC, a.id DESC LIMIT ? OFFSET ?"
    )
    sql = f"SELECT x.*, p.value FROM ({page}) p JOIN ({_WITH_IDS}) x ON x.id = p.id ORDER BY x.time DESC, x.id DESC"
    return [(_artifact(row), row["value"]) for row in index.rows(sql, (name, limit, offset))]


# Search


def search(index: Index, text: str, *, limit: int = 50) -> list[Hit]:
    """What a few typed letters may mean: references, runs and recipes, steps and stages, metrics, paths of files, and
    the first digits (six or more) of a digest, a stage key or a file's SHA-256. The likeliest first."""
    text = text.strip()
    if not text:
        return []
    found: list[Hit] = []
    digits = text.removeprefix("artifact:").removeprefix("sha256:").lower()
    if re.fullmatch(r"[0-9a-f]{6,64}", digits):
        found += _by_digits(index, digits, limit)
    like = f"%{_escape(text)}%"
    for row in index.rows("SELECT name FROM refs WHERE name LIKE ? ESCAPE '\\' ORDER BY name LIMIT ?", (like, limit)):
        found.append(Hit("ref", row[0], "reference"))
    # The distinct steps are few; the newest artifacts of those that fit are found by the index on (step, finished).
    distinct = """WITH RECURSIVE names(step) AS (SELECT min(step) FROM makings UNION ALL
        SELECT (SELECT min(step) FROM makings WHERE step > names.step) FROM names WHERE names.step IS NOT NULL)
        SELECT step FROM names WHERE step IS NOT NULL AND step LIKE ? ESCAPE '\\' LIMIT 100"""
    for (step,) in index.rows(distinct, (like,)):
        sql = f"""{_ARTIFACT} WHERE a.id IN (SELECT o.artifact FROM outputs o WHERE o.name = '' AND o.making IN
            (SELECT id FROM makings WHERE step = ? ORDER BY finished DESC LIMIT 20)) ORDER BY a.time DESC"""
        for made in map(_artifact, index.rows(sql, (step,))):
            found.append(Hit("artifact", made.digest, f"{made.kind} of step {made.name}, run {made.run}"))
    for name in metric_names(index):
        if text.lower() in name.lower():
            found.append(Hit("metric", name, "metric"))
    sql = (
        "SELECT name, recipe, state FROM runs WHERE name LIKE ?1 ESCAPE '\\' OR recipe LIKE ?1 ESCAPE '\\'"
        " ORDER BY started DESC LIMIT ?2"
    )
    for row in index.rows(sql, (like, limit)):
        found.append(Hit("run", row["name"], f"run of {row['recipe']}, {row['state']}"))
    found += [Hit("file", file.sha256, file.path) for file in files_named(index, text, limit=limit)]
    return list(dict.fromkeys(found))[:limit]


def _by_digits(index: Index, digits: str, limit: int) -> list[Hit]:
    found = []
    low, high = "sha256:" + digits.ljust(64, "0"), "sha256:" + digits.ljust(64, "f")
    sql = f"{_ARTIFACT} WHERE a.digest BETWEEN ? AND ? ORDER BY a.digest LIMIT ?"
    for made in map(_artifact, index.rows(sql, (low, high, limit))):
        found.append(Hit("artifact", made.digest, f"{made.kind or 'not in this store'} {made.name}"))
    sql = (
        f"SELECT x.* FROM makings k JOIN outputs o ON o.making = k.id AND o.name = '' JOIN"
        f" ({_WITH_IDS}) x ON x.id = o.artifact"
        " WHERE k.key BETWEEN ? AND ? LIMIT ?"
    )
    for made in map(_artifact, index.rows(sql, (digits, digits.ljust(64, "f"), limit))):
        found.append(Hit("artifact", made.digest, f"stage key of step {made.name}, run {made.run}"))
    sql = (
        "SELECT DISTINCT hex(f.sha256) AS sha256, p.path FROM files f JOIN paths p ON p.id = f.path"
        " WHERE f.sha256 BETWEEN ? AND ? ORDER BY f.sha256 LIMIT ?"
    )
    limits = (bytes.fromhex(digits.ljust(64, "0")), bytes.fromhex(digits.ljust(64, "f")), limit)
    for row in index.rows(sql, limits):
        found.append(Hit("file", row["sha256"].lower(), row["path"]))
    return found


def problems(index: Index) -> list[Problem]:
    """Objects that could not be read when the index last looked at them, by key."""
    sql = "SELECT key, problem FROM objects WHERE problem != '' ORDER BY +key"
    return [Problem(row["key"], row["problem"]) for row in index.rows(sql)]


def totals(index: Index) -> dict[str, Any]:
    """How much the store holds: artifacts by kind, makings, runs, references."""
    kinds = index.rows("SELECT kind, count(*) FROM artifacts WHERE present = 1 GROUP BY kind ORDER BY kind")
    counts = {name: index.rows(f"SELECT count(*) FROM {name}")[0][0] for name in ("makings", "runs", "refs")}
    return {"artifacts": dict(map(tuple, kinds)), **counts}
