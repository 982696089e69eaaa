"""The index says what the store says: after a first look, after changes, after damage, and to several processes."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from test_lineage import made, put

from flows.lineage import impact, queries
from flows.lineage.index import Index, open_index
from stages.artifacts import Store, import_files, open_store, processes, promote, rollback, write_run

RUN: dict[str, Any] = {
    "id": "golden-otter",
    "recipe": "nightly",
    "state": "running",
    "started": "2026-01-02T03:04:00+00:00",
    "steps": {"corpus": {"stage": "tokenize", "status": "running", "reason": "never run"}},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def chain(store: Store, tmp_path: Path) -> dict[str, str]:
    """source -> corpus -> base -> sft (with a side output), on a folder and on S3; the sft has metrics."""
    raw = tmp_path / "raw.txt"
    raw.write_text("some data")
    digests = {"source": import_files(store, [("docs/raw.txt", raw)], "source")}
    for step, kind in (("corpus", "dataset"), ("base", "checkpoint"), ("sft", "checkpoint"), ("side", "adapter")):
        digests[step] = put(store, tmp_path / step, kind, step)
    made(store, "corpus", digests["corpus"], "dataset", "a", inputs={"data": digests["source"]})
    made(store, "base", digests["base"], "checkpoint", "b", inputs={"data": digests["corpus"]})
    inputs = {"model": digests["base"], "data": digests["corpus"]}
    more = {"outputs": {"adapter": digests["side"]}, "metrics": {"loss": 2.5, "reward": float("nan")}}
    made(store, "sft", digests["sft"], "checkpoint", "c", inputs=inputs, **more)
    return digests


def names(found: list[queries.Artifact]) -> set[str]:
    return {artifact.name for artifact in found}


def test_artifacts_edges_files_and_metrics_are_those_of_the_store(store: Store, chain: dict[str, str]) -> None:
    index = open_index(store)
    assert names(queries.artifacts(index)) == {"imported", "corpus", "base", "sft", "sft/adapter"}
    assert [found.digest for found in queries.artifacts(index, kind="dataset")] == [chain["corpus"]]
    assert queries.count_artifacts(index, step="sft") == 2
    sft = queries.artifact(index, chain["sft"])
    assert sft is not None
    assert (sft.kind, sft.size, sft.files, sft.run, sft.key) == ("checkpoint", 3, 1, "golden-otter", "c" * 64)
    edges = [(edge.input, edge.artifact.digest) for edge in queries.parents(index, chain["sft"])]
    assert edges == [("model", chain["base"]), ("data", chain["corpus"])]
    below = {(edge.input, edge.artifact.name) for edge in queries.children(index, chain["corpus"])}
    assert below == {("data", "base"), ("data", "sft"), ("data", "sft/adapter")}
    below = queries.made_from(index, artifact=chain["source"])
    assert names(below.artifacts) == {"corpus", "base", "sft", "sft/adapter"}
    assert (below.total, below.kinds) == (4, {"checkpoint": 2, "adapter": 1, "dataset": 1})
    newest = queries.made_from(index, artifact=chain["source"], limit=1, offset=1)
    assert (newest.artifacts, newest.total) == (below.artifacts[1:2], 4)
    (file,) = queries.files(index, chain["source"])
    assert file.path == "docs/raw.txt"
    assert [(found.digest, path) for found, path in queries.holders(index, file.sha256)] == [
        (chain["source"], "docs/raw.txt")
    ]
    assert queries.metrics(index, chain["sft"])["loss"] == 2.5
    assert [(found.digest, value) for found, value in queries.with_metric(index, "loss")] == [(chain["sft"], 2.5)]


def test_a_refresh_reads_what_is_new_changed_or_gone_and_nothing_else(
    store: Store, chain: dict[str, str], tmp_path: Path
) -> None:
    index = open_index(store)
    assert index.refresh().read == 0
    write_run(store, RUN)
    assert index.refresh().read == 1
    write_run(store, RUN | {"state": "stopped"})  # of the same length, written at once: no time tells them apart
    assert index.refresh().read == 1
    assert [run.state for run in queries.runs(index)] == ["stopped"]
    promote(store, "production", chain["base"], who="ada@node-7")
    promote(store, "production", chain["sft"], who="ada@node-7", why="better")
    rollback(store, "production", who="ada@node-7")
    assert index.refresh().read == 1
    assert [(ref.name, ref.artifact, ref.moves) for ref in queries.all_refs(index)] == [
        ("production", chain["base"], 3)
    ]
    assert [move.restores for move in queries.history(index, "production")] == [1, None, None]
    assert {(ref, now) for ref, _, _, now in queries.refs_to(index, [chain["sft"]])} == {("production", False)}
    other = put(store, tmp_path / "again", "checkpoint", "other bytes")
    made(store, "sft", other, "checkpoint", "c", inputs={"model": chain["base"]}, run="brave-tern")
    assert index.refresh().read == 2
    newest = queries.makings(index, other)
    assert [(making.run, making.current) for making in newest] == [("brave-tern", 1)]
    assert [making.current for making in queries.makings(index, chain["sft"])] == [0]  # in the history now
    store.delete(f"manifests/{other[7:9]}/{other[7:]}.json")
    assert index.refresh().gone == 1
    gone = queries.artifact(index, other)
    assert gone is not None
    assert not gone.present
    assert "sft" not in {found.name for found in queries.artifacts(index, run="brave-tern")}


def test_impact_counts_everything_and_lists_as_much_as_is_asked_for(
    store: Store, chain: dict[str, str], tmp_path: Path
) -> None:
    twin = tmp_path / "twin"
    twin.mkdir()
    (twin / "copy.txt").write_text("some data")  # the bytes of docs/raw.txt, in another artifact
    import_files(store, [("copy.txt", twin / "copy.txt")], "source")
    promote(store, "production", chain["sft"], who="ada@node-7")
    index = open_index(store)
    sha256 = hashlib.sha256(b"some data").hexdigest()
    whole, part = impact.impact(index, sha256), impact.impact(index, sha256, limit=1)
    assert (len(whole.holders), len(whole.made)) == (2, 4)
    assert (len(part.holders), len(part.made)) == (1, 1)
    assert (part.held, part.total, part.kinds, part.refs) == (2, 4, whole.kinds, whole.refs)
    assert [(ref, digest, now) for ref, digest, _, now in part.refs] == [("production", chain["sft"], True)]
    text = "\n".join(impact.lines(part))
    assert "and 1 more artifact that holds it" in text
    assert "and 3 more" in text
    assert "refs: production (since" in text


def test_what_cannot_be_read_is_named_and_stops_nothing(store: Store, chain: dict[str, str]) -> None:
    store.put("results/dpo/" + "d" * 64 + ".json", b"{ not json")
    store.put("refs/broken.json", b'{"name": "other"}')
    store.put(f"manifests/{chain['base'][7:9]}/{chain['base'][7:]}.json", b'{"kind": "checkpoint", "files": []}')
    index = open_index(store)
    assert len(queries.problems(index)) == 3
    assert "another hash" in {problem.key[:9]: problem.problem for problem in queries.problems(index)}["manifests"]
    base = queries.artifact(index, chain["base"])
    assert base is not None
    assert not base.present
    store.put("refs/broken.json", b"{}")
    assert index.refresh().read == 1
    assert len(queries.problems(index)) == 3


def test_a_search_finds_references_runs_steps_metrics_files_and_digits(store: Store, chain: dict[str, str]) -> None:
    write_run(store, RUN)
    promote(store, "production", chain["sft"], who="ada@node-7")
    index = open_index(store)

    def hits(text: str) -> set[tuple[str, str]]:
        return {(hit.what, hit.name) for hit in queries.search(index, text)}

    assert ("ref", "production") in hits("prod")
    assert ("run", "golden-otter") in hits("OTTER")
    assert ("run", "golden-otter") in hits("nightly")
    assert ("artifact", chain["corpus"]) in hits("corpus")
    assert ("metric", "loss") in hits("los")
    assert any(what == "file" for what, _ in hits("raw.t"))
    assert ("artifact", chain["base"]) in hits(chain["base"][:20])
    assert ("artifact", chain["sft"]) in hits("c" * 12)  # a stage key
    assert hits("100%_") == set()
    assert hits("  ") == set()


def test_a_damaged_or_foreign_index_is_made_anew(store: Store, chain: dict[str, str]) -> None:
    index = open_index(store)
    path = index.path
    index.close()
    path.write_bytes(b"this is no database" * 1000)
    assert names(queries.artifacts(open_index(store))) >= {"corpus", "sft"}
    assert path.with_name(path.name + ".bad").exists()
    again = open_index(store)
    again.rows("UPDATE meta SET value = '0' WHERE name = 'schema'")
    again.close()
    assert names(queries.artifacts(open_index(store))) >= {"corpus", "sft"}


def test_an_index_that_breaks_while_it_is_open_heals_itself(store: Store, chain: dict[str, str]) -> None:
    index = open_index(store)
    index.rows("DROP TABLE artifacts")
    assert names(queries.artifacts(index)) >= {"corpus", "sft"}


def test_several_processes_and_threads_share_one_index(tmp_path: Path, cache: Path) -> None:
    from tests.benchmarks._lineage_store import build

    build(tmp_path / "many", 3)
    code = (
        "import sys; from stages.artifacts import open_store; from flows.lineage.index import open_index;"
        "from flows.lineage import queries; print(queries.totals(open_index(open_store(sys.argv[1]))))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path / "many"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    store = open_store(tmp_path / "many")
    index = open_index(store)
    totals = queries.totals(index)
    assert totals["runs"] == 3
    for process in processes:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        assert said.strip() == str(totals)
    seen: list[Any] = []
    threads = [threading.Thread(target=lambda: seen.append(queries.totals(index))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [totals] * 4


def test_a_reader_does_not_wait_for_a_refresh(store: Store, chain: dict[str, str]) -> None:
    index = open_index(store)
    writer = sqlite3.connect(index.path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")  # as a refresh of another process does
    try:
        other = open_index(store, fresh=False)
        other.rows("PRAGMA busy_timeout = 1")  # it would wait for minutes
        assert names(queries.artifacts(other)) >= {"corpus", "sft"}
    finally:
        writer.execute("ROLLBACK")
        writer.close()


def test_an_unwritable_cache_that_was_asked_for_is_an_error_and_another_is_done_without(
    store: Store, chain: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.artifacts import StoreError

    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="set HEADRACE_CACHE_DIR"):
        open_index(store)
    monkeypatch.delenv("HEADRACE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert names(queries.artifacts(open_index(store))) >= {"corpus", "sft"}


def test_a_run_that_was_killed_is_found_though_its_document_stays_as_it_was(store: Store) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = {"pid": child.pid, "place": processes.place(), "born": processes.born(child.pid)}
    write_run(store, RUN | process)
    assert [run.state for run in queries.runs(open_index(store))] == ["running"]
    child.kill()
    child.wait()
    [run] = queries.runs(open_index(store), state="killed")
    assert (run.name, run.states) == ("golden-otter", {"killed": 1})


def test_a_result_of_a_stage_with_kept_sources_is_a_child_of_them(store: Store, tmp_path: Path) -> None:
    from stages.artifacts import keep_code

    kept = keep_code(store, {"lab/loss.py": b"rate = 1\n", "lab/__init__.py": b""})
    digest = put(store, tmp_path / "m", "checkpoint", "m")
    made(store, "m", digest, "checkpoint", "a", code={"digest": "sha256:" + "0" * 64, "artifact": kept})
    index: Index = open_index(store)
    assert [(edge.input, edge.code) for edge in queries.parents(index, digest)] == [("code", True)]
    assert [found.digest for found in queries.made_from(index, artifact=kept).artifacts] == [digest]
    assert [edge.artifact.digest for edge in queries.children(index, kept)] == [digest]
    assert json.dumps(queries.totals(index)["artifacts"], sort_keys=True) == '{"checkpoint": 1, "code": 1}'
