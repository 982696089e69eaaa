"""The worked example of docs/artifacts.md, read by Headrace and written by it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from stages.artifacts import (
    FolderStore,
    Result,
    Store,
    WorkArea,
    acquire,
    canonical_json,
    fetch,
    import_files,
    list_runs,
    open_store,
    promote,
    read_lease,
    read_log,
    read_ref,
    read_result,
    resolve_digest,
    usage,
    verify_all,
    write_result,
)

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "artifacts.md"


@pytest.fixture(scope="module")
def example() -> dict[str, bytes]:
    """Key -> bytes of every object of the example, taken from the page by its rules alone."""
    _, _, text = PAGE.read_text("utf-8").partition("## Worked example")
    objects = {}
    for key, language, body in re.findall(r"^`([\w./-]+)`\n\n```(\w+)\n(.*?)\n```$", text, re.DOTALL | re.MULTILINE):
        exact = (language == "text" and body != "{}") or key.startswith("logs/")
        objects[key] = (body + "\n" if exact else body).encode()
    assert len(objects) == 10
    return objects


def test_a_store_that_was_written_by_the_page_is_read_by_headrace(
    tmp_path: Path, store: Store, example: dict[str, bytes]
) -> None:
    for key, data in example.items():
        store.put(key, data)
    assert list(verify_all(store)) == []
    ref = read_ref(store, "production")
    assert resolve_digest(store, "865740") == ref.artifact
    fetch(store, ref.artifact, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == "{}"
    assert (tmp_path / "out" / "notes" / "readme.txt").read_text() == "hello\n"
    [key] = [key.split("/")[2].removesuffix(".json") for key in example if key.startswith("results/")]
    result = read_result(store, "dpo", key)
    assert result is not None
    assert (result.artifact, result.step, result.token, result.metrics) == (
        ref.artifact,
        "align",
        1,
        {"accuracy": 0.75},
    )
    identity = {"stage": "dpo", "config": result.identity, "inputs": result.inputs, "code": result.code["digest"]}
    assert hashlib.sha256(canonical_json(identity)).hexdigest() == key
    lease = read_lease(store, key)
    assert lease is not None
    assert (lease.holder, lease.token) == (None, 1)
    [run] = list_runs(store)
    assert run["steps"]["align"]["artifact"] == ref.artifact
    assert [event["text"] for event in read_log(store, "golden-otter", "align")] == ["begun"]
    found = WorkArea(store, "cd" * 32, tmp_path / "scratch").latest()
    assert found is not None
    step, folder = found
    assert (step, (folder / "state.txt").read_text()) == (3, "step 3\n")
    assert usage(store).kinds["checkpoint"].size == 8


def test_headrace_writes_what_the_page_shows(tmp_path: Path, example: dict[str, bytes]) -> None:
    store = open_store(tmp_path / "store")
    assert isinstance(store, FolderStore)
    (tmp_path / "a").write_text("{}")
    (tmp_path / "b").write_text("hello\n")
    digest = import_files(store, [("notes/readme.txt", tmp_path / "b"), ("config.json", tmp_path / "a")], "checkpoint")
    [shown] = [Result.model_validate_json(data) for key, data in example.items() if key.startswith("results/")]
    lease = acquire(store, shown.key, stage=shown.stage, step=shown.step, run=shown.run)
    assert lease is not None
    write_result(store, shown.model_copy(update={"token": 0, "artifact": digest}), lease)
    lease.release()
    promote(store, "production", digest, who="ada@node-7", why="the first")
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "state.txt").write_text("step 3\n")
    work = WorkArea(store, "cd" * 32, tmp_path / "scratch")
    work.save(3, tmp_path / "progress")
    work.wait()
    written = {info.key: store.get(info.key) for info in store.list("")}
    for prefix in ("blobs/", "manifests/"):
        assert {k: v for k, v in written.items() if k.startswith(prefix)} == {
            k: v for k, v in example.items() if k.startswith(prefix)
        }
    [result, lease_key] = [f"{prefix}{shown.key}.json" for prefix in ("results/dpo/", "leases/")]
    assert json.loads(written[result]) == json.loads(example[result])
    for key in (lease_key, "refs/production.json"):
        assert json.loads(written[key]).keys() == json.loads(example[key]).keys()
    assert json.loads(written["refs/production.json"])["history"][0].keys() == (
        json.loads(example["refs/production.json"])["history"][0].keys()
    )
    shapes = [
        sorted(re.sub(r"[0-9a-f]{32}(?![0-9a-f])", "<token>", key) for key in objects if key.startswith("work/"))
        for objects in (written, example)
    ]
    assert shapes[0] == shapes[1]
    locks = {path.name for path in (store.root / "locks").iterdir()}
    assert set(re.findall(r"`locks/([0-9a-f]{2})`", PAGE.read_text("utf-8"))) <= locks
