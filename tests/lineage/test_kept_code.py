"""The sources that a result ran with: kept once, without secrets, kept by gc, proved against the fingerprint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_lineage import put

from flows.lineage.proof import verify_deep
from stages.artifacts import (
    FolderStore,
    Result,
    Store,
    collect,
    keep_code,
    open_store,
    pull,
    read_manifest,
    usage,
    write_result,
)
from stages.artifacts.manifest import canonical_json, sha256_hex
from stages.fingerprint import source_hash, stage_fingerprint, stage_key

SOURCES = {"lab/__init__.py": b"", "lab/loss.py": b"# a remark\nrate = 0.5\n"}


def test_the_same_sources_are_one_artifact(store: Store, tmp_path: Path) -> None:
    digest = keep_code(store, SOURCES)
    before = list(store.list(""))
    assert keep_code(store, SOURCES) == digest
    assert [info.modified for info in store.list("")] == [info.modified for info in before]
    assert read_manifest(store, digest).kind == "code"
    pull(store, digest, tmp_path / "code")
    assert (tmp_path / "code/lab/loss.py").read_bytes() == SOURCES["lab/loss.py"]
    assert keep_code(store, SOURCES | {"lab/loss.py": b"rate = 0.25\n"}) != digest


def test_a_secret_in_the_sources_is_not_stored(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER_API_KEY", "very-secret-value")
    token = "hf_" + "a" * 34
    digest = keep_code(store, {"mine.py": f"key = 'very-secret-value'\ntoken = '{token}'\n".encode()})
    pull(store, digest, tmp_path / "code")
    text = (tmp_path / "code/mine.py").read_text()
    assert "very-secret" not in text
    assert token not in text
    assert text.count("[secret]") == 2


def record(store: FolderStore, tmp_path: Path, **more: Any) -> str:
    """A result whose key, fingerprint and kept sources belong together; the digest of its artifact."""
    digest = put(store, tmp_path / "model", "checkpoint", "weights")
    files = {path: {"sha256": source_hash(data), "definitions": {}} for path, data in SOURCES.items()}
    code = "sha256:" + sha256_hex(canonical_json({path: entry["sha256"] for path, entry in files.items()}))
    fields: dict[str, Any] = {
        "config": {"beta": 0.1},
        "identity": {"beta": 0.1},
        "code": {"mode": "closure", "digest": code, "files": files, "artifact": keep_code(store, SOURCES)},
        **more,
    }
    fields |= {
        "artifact": digest,
        "kind": "checkpoint",
        "stage": "no.such.stage",
        "step": "model",
        "key": stage_key("no.such.stage", {"beta": 0.1}, {}, code),
        "run": "golden-otter",
        "started": "2026-01-02T03:04:00+00:00",
        "finished": "2026-01-02T03:04:05+00:00",
    }
    write_result(store, Result.model_validate(fields))
    return digest


def test_gc_keeps_the_sources_of_what_it_keeps_and_du_counts_them(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    assert isinstance(store, FolderStore)
    digest = record(store, tmp_path)
    orphan = keep_code(store, {"gone.py": b"x = 1\n"})
    store.put("refs/production.json", ref_of(digest))
    found = collect(store, delete=True, retention=0.0, grace=0.0)
    gone = {item.key for item in found.garbage}
    assert any(orphan[7:] in key for key in gone)
    assert verify_deep(store, digest).ok
    used = usage(store)
    assert used.kinds["code"].artifacts == 1
    assert used.stages["(code)"].artifacts == 1
    assert [name.split()[0] for name in used.models] == ["model"]


def ref_of(digest: str) -> bytes:
    move = {"number": 1, "artifact": digest, "previous": None, "who": "ada@x", "when": "2026-01-02T03:04:05+00:00"}
    return json.dumps({"name": "production", "artifact": digest, "history": [move]}).encode()


def problems(store: FolderStore, digest: str) -> str:
    return " ".join(str(damage) for damage in verify_deep(store, digest).damages)


def test_kept_sources_that_are_not_those_of_the_fingerprint_are_found(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    assert isinstance(store, FolderStore)
    other = keep_code(store, SOURCES | {"lab/loss.py": b"rate = 0.9\n"})
    files = {path: {"sha256": source_hash(data)} for path, data in SOURCES.items()}
    code = "sha256:" + sha256_hex(canonical_json({path: entry["sha256"] for path, entry in files.items()}))
    digest = record(store, tmp_path, code={"mode": "closure", "digest": code, "files": files, "artifact": other})
    assert "its kept source lab/loss.py is not the code of its fingerprint" in problems(store, digest)


@pytest.mark.parametrize("hidden", ["inputs", "code"])
def test_an_input_or_source_that_is_gone_is_found(tmp_path: Path, hidden: str) -> None:
    store = open_store(tmp_path / "store")
    assert isinstance(store, FolderStore)
    digest = record(store, tmp_path)
    assert verify_deep(store, digest).ok
    if hidden == "code":
        name = keep_code(store, SOURCES)[7:]
        store.delete(f"manifests/{name[:2]}/{name}.json")
        assert "missing" in problems(store, digest)
    else:
        (path,) = Path(store.root, "results/no.such.stage").glob("*.json")
        path.write_text(path.read_text().replace('"inputs": {}', f'"inputs": {{"model": "sha256:{"1" * 64}"}}'))
        assert "not the hash of its settings" in problems(store, digest)
        assert "missing" in problems(store, digest)


def test_the_sources_of_a_real_stage_have_the_hashes_of_its_fingerprint() -> None:
    found = stage_fingerprint("dpo", [], [])
    assert {path: source_hash(data) for path, data in found.sources().items()} == {
        path: entry["sha256"] for path, entry in found.files.items()
    }
