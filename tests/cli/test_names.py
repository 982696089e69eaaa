"""Names of artifacts and runs are resolved against a real store."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from flows.lineage.index import open_index
from flows.names import UnknownName, find_run, free_run_name, new_run_name, resolve
from stages.artifacts import FolderStore, open_store, promote, publish, read_ref, write_run


def put(store: FolderStore, folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "file").write_text(text)
    return publish(store, folder, "checkpoint")


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return open_store(tmp_path / "store")


@pytest.fixture
def digests(store: FolderStore, tmp_path: Path) -> dict[str, str]:
    """Two runs with grpo, the newer with a side output of it; only the older has dpo; a reference to the older grpo."""
    digests = {name: put(store, tmp_path / name, name) for name in ("old", "new", "dpo", "rollouts")}
    older = {"grpo": {"artifact": digests["old"]}, "dpo": {"artifact": digests["dpo"], "outputs": {}}}
    newer = {"grpo": {"artifact": digests["new"], "outputs": {"rollouts": digests["rollouts"]}}, "dpo": {}}
    write_run(store, {"id": "brave-tern", "started": "2026-01-01T00:00:00+00:00", "steps": older})
    write_run(store, {"id": "golden-otter", "started": "2026-02-01T00:00:00+00:00", "steps": newer})
    promote(store, "production", digests["old"], who="me@here")
    return digests


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", "new"),
        ("dpo", "dpo"),
        ("grpo/rollouts", "rollouts"),
        ("brave-tern/grpo", "old"),
        ("golden-otter/grpo/rollouts", "rollouts"),
        ("production", "old"),
        ("ref:production", "old"),
    ],
)
def test_an_artifact_is_found_by_step_output_run_and_reference(
    store: FolderStore, digests: dict[str, str], name: str, expected: str
) -> None:
    assert resolve(store, name).digest == digests[expected]


def test_an_artifact_is_found_by_its_digest_or_the_start_of_it(store: FolderStore, digests: dict[str, str]) -> None:
    digest = digests["old"]
    for name in (digest, digest[:15], digest[7:], digest[7:17], f"artifact:{digest}"):
        assert resolve(store, name).digest == digest


def test_an_entry_of_a_references_history_has_a_name(store: FolderStore, digests: dict[str, str]) -> None:
    first = read_ref(store, "production").history[0].artifact
    assert resolve(store, "production@1").digest == first
    assert resolve(store, "ref:production@1").label == "production@1"


def test_names_are_the_same_with_an_index_and_without(
    store: FolderStore, digests: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    index = open_index(store)
    for name in ("grpo", "dpo", "grpo/rollouts", "brave-tern/grpo", "golden-otter/grpo/rollouts", "production"):
        assert resolve(store, name, index) == resolve(store, name)
    with pytest.raises(UnknownName, match="Did you mean grpo"):
        resolve(store, "gpro", index)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gpro", "Did you mean grpo"),
        ("production@9", "reference production has no entry 9; it has 1 to "),
        ("productoin@1", "Did you mean production?"),
        ("ref:produktion", "Did you mean production?"),
        ("xyz", "Steps here: dpo, grpo, production."),
        ("golden-otter/nothing", "no artifact, reference or step"),
        ("grpo/nothing", "no artifact, reference or step"),
        ("sha256:zz", "at least 6 hexadecimal digits"),
        ("ffffff", "has no artifact ffffff"),
    ],
)
def test_a_name_that_is_not_there_is_an_error_with_what_is_near(
    store: FolderStore, digests: dict[str, str], name: str, told: str
) -> None:
    with pytest.raises(UnknownName) as error:
        resolve(store, name)
    assert told in str(error.value)


def test_a_run_is_found_by_the_start_of_its_name_and_the_newest_by_none(
    store: FolderStore, digests: dict[str, str]
) -> None:
    assert find_run(store)["id"] == "golden-otter"
    assert find_run(store, "brave")["id"] == "brave-tern"
    write_run(store, {"id": "brave-tern-2", "started": "2026-03-01T00:00:00+00:00", "steps": {}})
    assert find_run(store, "brave-tern")["id"] == "brave-tern"
    with pytest.raises(UnknownName, match="start of 2 runs"):
        find_run(store, "brave")
    with pytest.raises(UnknownName, match="Did you mean golden-otter"):
        find_run(store, "golden-oter")


def test_a_new_run_never_takes_the_name_of_another(store: FolderStore) -> None:
    first = new_run_name(store, random.Random(7))
    write_run(store, {"id": first, "started": "2026-01-01T00:00:00+00:00"})
    assert new_run_name(store, random.Random(7)) != first
    assert free_run_name(store, first) == f"{first}-2"
    assert free_run_name(store, "other") == "other"


def test_a_step_that_never_gave_a_result_is_no_misspelling(store: FolderStore) -> None:
    write_run(store, {"id": "brave-tern", "started": "2026-01-01", "steps": {"sft": {"status": "failed"}}})
    with pytest.raises(UnknownName, match=r"^step sft of store .* has no result yet; `headrace status` shows how"):
        resolve(store, "sft")
