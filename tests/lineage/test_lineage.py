"""Lineage is read from a real store: sources imported, results written, then traced and drawn."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from flows.lineage.graph import trace
from flows.lineage.render import mermaid, tree
from stages.artifacts import FolderStore, Result, import_files, open_store, publish, write_result


def put(store: FolderStore, folder: Path, kind: str, text: str) -> str:
    folder.mkdir(parents=True)
    (folder / "data.txt").write_text(text)
    return publish(store, folder, kind)


def made(store: FolderStore, step: str, artifact: str, kind: str, key: str, **more: object) -> Result:
    fields = {
        "artifact": artifact,
        "kind": kind,
        "stage": "no.such.stage",
        "step": step,
        "key": key * 64,
        "run": "golden-otter",
        "started": "2026-01-02T03:04:00+00:00",
        "finished": "2026-01-02T03:04:05+00:00",
        "seconds": 5.0,
        **more,
    }
    return write_result(store, Result.model_validate(fields))


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return open_store(tmp_path / "store")


@pytest.fixture
def chain(store: FolderStore, tmp_path: Path) -> dict[str, str]:
    """source -> corpus -> base -> sft, and sft also reads corpus; corpus also uses a generator."""
    files = []
    for name in ("b.txt", "a.txt", "c/d.txt", "e.txt"):
        path = tmp_path / "raw" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name * 10)
        files.append((name, path))
    digests = {"source": import_files(store, files, "source")}
    for step, kind in (("corpus", "dataset"), ("base", "checkpoint"), ("sft", "checkpoint")):
        digests[step] = put(store, tmp_path / step, kind, step)
    generator = {"generator": "my.data:rows", "name": "plain text: not code"}
    made(store, "corpus", digests["corpus"], "dataset", "a", inputs={"data": digests["source"]}, config=generator)
    made(store, "base", digests["base"], "checkpoint", "b", inputs={"data": digests["corpus"]})
    inputs = {"model": digests["base"], "data": digests["corpus"]}
    made(store, "sft", digests["sft"], "checkpoint", "c", inputs=inputs)
    return digests


def test_a_checkpoint_is_traced_to_source_files_and_generators(store: FolderStore, chain: dict[str, str]) -> None:
    graph = trace(store, chain["sft"])
    assert set(graph.nodes) == set(chain.values())
    assert graph.nodes[chain["sft"]].inputs == {"model": chain["base"], "data": chain["corpus"]}
    assert [node.digest for node in graph.sources()] == [chain["source"]]
    assert [entry.path for entry in graph.nodes[chain["source"]].files] == ["a.txt", "b.txt", "c/d.txt", "e.txt"]
    assert graph.nodes[chain["corpus"]].generators == ("my.data:rows",)


def test_the_tree_shows_each_artifact_once_in_full(store: FolderStore, chain: dict[str, str]) -> None:
    short = {name: digest[7:19] for name, digest in chain.items()}
    lines = tree(trace(store, chain["sft"])).splitlines()
    told = "stage no.such.stage, run golden-otter, 2026-01-02 03:04"
    assert lines == [
        f"sft  checkpoint  {short['sft']}  {told}",
        f"├─ model: base  checkpoint  {short['base']}  {told}",
        f"│  └─ data: corpus  dataset  {short['corpus']}  {told}",
        f"│     ├─ data: imported  source  {short['source']}",
        "│     │  └─ 4 files, 220 B: a.txt, b.txt, c/d.txt, …",
        "│     └─ code my.data:rows",
        f"└─ data: corpus  dataset  {short['corpus']}  {told}  (see above)",
    ]


def test_all_files_are_listed_with_their_hashes_when_asked(store: FolderStore, chain: dict[str, str]) -> None:
    text = tree(trace(store, chain["source"]), all_files=True)
    digest = hashlib.sha256(b"e.txt" * 10).hexdigest()
    assert f"e.txt  50 B  sha256:{digest}" in text
    assert "…" not in text


def test_json_has_every_edge_with_the_name_of_the_input(store: FolderStore, chain: dict[str, str]) -> None:
    value = trace(store, chain["sft"]).to_json()
    edges = {(edge["from"], edge["to"], edge["input"]) for edge in value["edges"]}
    assert edges == {
        (chain["base"], chain["sft"], "model"),
        (chain["corpus"], chain["sft"], "data"),
        (chain["corpus"], chain["base"], "data"),
        (chain["source"], chain["corpus"], "data"),
    }
    by_digest = {node["artifact"]: node for node in value["nodes"]}
    assert by_digest[chain["base"]]["made_by"]["run"] == "golden-otter"
    assert by_digest[chain["source"]]["made_by"] is None


def test_an_input_that_is_gone_from_the_store_is_said_to_be(store: FolderStore, chain: dict[str, str]) -> None:
    digest = chain["source"]
    store.delete(f"manifests/{digest[7:9]}/{digest[7:]}.json")
    graph = trace(store, chain["sft"])
    assert graph.nodes[digest].problem == "not in this store"
    assert "(not in this store)" in tree(graph)


def test_an_output_that_a_forced_run_replaced_keeps_its_lineage(
    store: FolderStore, chain: dict[str, str], tmp_path: Path
) -> None:
    other = put(store, tmp_path / "sft-again", "checkpoint", "other bytes")
    made(store, "sft", other, "checkpoint", "c", inputs={"model": chain["base"]}, run="brave-tern")
    assert trace(store, chain["sft"]).nodes[chain["sft"]].inputs["data"] == chain["corpus"]
    newer = trace(store, other).nodes[other]
    assert newer.made_by is not None
    assert newer.made_by.run == "brave-tern"


def test_two_ways_to_the_same_bytes_are_both_told(store: FolderStore, chain: dict[str, str]) -> None:
    made(store, "again", chain["base"], "checkpoint", "d", finished="2026-02-02T03:04:05+00:00")
    node = trace(store, chain["base"]).nodes[chain["base"]]
    assert node.name == "again"
    assert node.also == (("no.such.stage", "b" * 64),)


def test_mermaid_draws_boxes_and_named_arrows(store: FolderStore, chain: dict[str, str]) -> None:
    lines = mermaid(trace(store, chain["base"])).splitlines()
    assert lines[0] == "flowchart TD"
    assert f'    a0["base<br/>checkpoint {chain["base"][7:19]}"]' in lines
    assert '    a1 -- "data" --> a0' in lines
    assert '    a1g0{{"my.data:rows"}} --> a1' in lines
    assert '    a2[("source<br/>4 files, 220 B: a.txt, b.txt, c/d.txt, …")]' in lines


def test_a_file_name_cannot_add_to_the_drawing(store: FolderStore, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("x")
    evil = 'q"]; click a0 "javascript:alert(1)".txt'
    digest = import_files(store, [(evil, path)], "source")
    text = mermaid(trace(store, digest))
    assert text.count('"') == 2
    assert "javascript:alert#40;1#41;" in text
