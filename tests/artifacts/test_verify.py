"""verify: quick and whole, one artifact, with its ancestors, or everything; and repair from copies."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.command import store as store_verbs
from stages.artifacts import (
    Damaged,
    FilesAtHand,
    Manifest,
    NotInStore,
    Result,
    Store,
    StoreError,
    ancestors,
    fetch,
    is_complete,
    manifest_of,
    open_store,
    publish,
    pull,
    read_manifest,
    repair,
    verify_all,
    verify_artifact,
    verify_artifacts,
    write_result,
)


def folder_of(tmp_path: Path, name: str, **texts: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    for path, text in texts.items():
        (folder / path).write_text(text)
    return folder


def result(store: Store, key: str, artifact: str, **inputs: str) -> None:
    stamp = "2026-11-30T10:00:00.000+00:00"
    values: dict[str, Any] = {"artifact": artifact, "kind": "report", "stage": "sft", "step": "a", "run": "r"}
    write_result(store, Result(**values, key=key * 32, inputs=inputs, started=stamp, finished=stamp))


def damage(store: Store, text: str, new: str | None) -> str:
    """Replace the blob of a text, or remove it."""
    [key] = [info.key for info in store.list("blobs/") if store.get(info.key) == text.encode()]
    if new is None:
        store.delete(key)
    else:
        store.put(key, new.encode())
    return key


def test_quick_sees_what_is_missing_or_of_another_size_and_not_a_flipped_bit(tmp_path: Path, store: Store) -> None:
    digest = publish(store, folder_of(tmp_path, "f", a="aaa", b="bbb", c="ccc"), "report")
    assert list(verify_all(store, quick=True)) == verify_artifact(store, digest, quick=True) == []
    missing, cut, flipped = damage(store, "aaa", None), damage(store, "bbb", "b"), damage(store, "ccc", "ccd")
    quick = [(found.key, found.problem, found.path) for found in verify_artifact(store, digest, quick=True)]
    assert quick == [(missing, "missing", "a"), (cut, "has 1 bytes, not 3", "b")]
    assert sorted(found.key for found in verify_all(store, quick=True)) == sorted([missing, cut])
    whole = verify_artifact(store, digest)
    assert [(found.key, found.problem) for found in whole[2:]] == [(flipped, "damaged: its bytes have another hash")]
    assert [found.size for found in whole] == [3, 3, 3]


def test_an_artifact_is_verified_with_all_that_it_was_made_from(tmp_path: Path, store: Store) -> None:
    data = publish(store, folder_of(tmp_path, "data", d="data"), "source")
    base = publish(store, folder_of(tmp_path, "base", b="base"), "report")
    model = publish(store, folder_of(tmp_path, "model", m="model"), "report")
    other = publish(store, folder_of(tmp_path, "other", o="other"), "report")
    result(store, "aa", base, data=data)
    result(store, "bb", model, base=base)
    result(store, "cc", other, base=base)
    assert ancestors(store, model) == [model, base, data]
    assert ancestors(store, data) == [data]
    damage(store, "other", "wrong")
    assert list(verify_artifacts(store, ancestors(store, model))) == []
    damage(store, "data", "dada")
    assert [found.artifact for found in verify_artifacts(store, ancestors(store, model))] == [data]
    store.delete(f"manifests/{base[7:9]}/{base[7:]}.json")
    found = list(verify_artifacts(store, ancestors(store, model)))
    assert [(item.artifact, item.problem[:7]) for item in found] == [(base, "missing"), (data, "damaged")]


def test_damage_is_mended_from_files_at_hand(tmp_path: Path, store: Store) -> None:
    digest = publish(store, folder_of(tmp_path, "f", a="aaa", b="bbb", c="ccc"), "report")
    other = publish(store, folder_of(tmp_path, "g", a="aaa"), "report")
    for text, new in (("aaa", None), ("bbb", "bbx"), ("ccc", "c")):
        damage(store, text, new)
    copies = folder_of(tmp_path, "copies", anything="bbb", else_="zzz")
    (copies / "deep").mkdir()
    (copies / "deep" / "er").write_text("aaa")
    found = list(verify_all(store))
    mended = repair(store, found, FilesAtHand([copies]))
    assert sorted(f"{item.artifact}/{item.path}" for item in mended) == sorted(
        [f"{digest}/a", f"{other}/a", f"{digest}/b"]
    )
    left = list(verify_all(store))
    assert [item.path for item in left] == ["c"]
    assert repair(store, left, FilesAtHand([])) == []
    (tmp_path / "one-file").write_text("ccc")
    repair(store, left, FilesAtHand([tmp_path / "one-file"]))
    assert list(verify_all(store)) == []
    with pytest.raises(StoreError, match="does not exist; give a folder or file to repair from"):
        FilesAtHand([tmp_path / "nowhere"])


def test_a_copy_that_changes_while_it_is_taken_mends_nothing(tmp_path: Path, store: Store) -> None:
    publish(store, folder_of(tmp_path, "f", a="aaa"), "report")
    damage(store, "aaa", None)
    copy = tmp_path / "copy"
    copy.write_text("aaa")
    at_hand = FilesAtHand([copy])

    def find(sha256: str, size: int | None) -> Path | None:
        found = at_hand(sha256, size)
        copy.write_text("aab")
        return found

    assert repair(store, list(verify_all(store)), find) == []
    assert [item.problem for item in verify_all(store)] == ["missing"]


def test_a_manifest_is_made_again_from_a_folder_with_the_files_of_its_artifact(tmp_path: Path, store: Store) -> None:
    """From a pull (which adds a file with sums) below a folder with other things; proved by its hash."""
    artifact = publish(store, folder_of(tmp_path, "f", a="aaa", b="bbb"), "report")
    result(store, "aa", artifact)
    pull(store, artifact, tmp_path / "backups" / "pulled")
    (tmp_path / "backups" / "note").write_text("something else")
    key = f"manifests/{artifact[7:9]}/{artifact[7:]}.json"
    for harm, words in ((lambda: store.delete(key), "is missing"), (lambda: store.put(key, b"{}"), "is damaged")):
        harm()
        found = list(verify_all(store))
        assert words in str(found[0])
        assert repair(store, found, FilesAtHand([]), [tmp_path / "nothing-there"]) == []
        assert repair(store, found, FilesAtHand([tmp_path / "backups"]), [tmp_path / "backups"]) == found
        assert list(verify_all(store)) == []
    assert store.get(key) == read_manifest(store, artifact).to_json()
    store.delete(key)
    (tmp_path / "backups" / "pulled" / "a").write_text("aab")
    found = list(verify_all(store))
    assert [str(item) for item in found] == [f"results/sft/{'aa' * 32}.json: its artifact {artifact} is missing"]
    assert repair(store, found, FilesAtHand([tmp_path / "backups"]), [tmp_path / "backups"]) == []


def test_the_manifest_of_a_checkpoint_is_made_again_from_its_own_sums(tmp_path: Path, store: Store) -> None:
    folder = folder_of(tmp_path, "f", a="aaa", b="bbb")
    (folder / "sub").mkdir()
    (folder / "sub" / "c").write_text("ccc")
    names = ("a", "b", "sub/c")
    sums = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (folder / "SHA256SUMS").write_text(sums)
    artifact = publish(store, folder, "checkpoint")
    result(store, "aa", artifact)
    store.delete(f"manifests/{artifact[7:9]}/{artifact[7:]}.json")
    found = list(verify_all(store))
    assert repair(store, found, FilesAtHand([])) == found
    assert list(verify_all(store)) == []


def test_a_manifest_and_blobs_that_were_fetched_are_put_back_from_the_cache(
    tmp_path: Path, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(s3_url)
    artifact = publish(store, folder_of(tmp_path, "f", a="aaa", b="bbb"), "report")
    result(store, "aa", artifact)
    assert (
        store_verbs.verify(s3_url, None, quick=False, with_ancestors=False, mend=True, sources=[], as_json=False) == 0
    )
    fetch(store, artifact, tmp_path / "fetched")
    store.delete(f"manifests/{artifact[7:9]}/{artifact[7:]}.json")
    blob = damage(store, "aaa", None)
    capsys.readouterr()
    assert (
        store_verbs.verify(s3_url, None, quick=False, with_ancestors=False, mend=True, sources=[], as_json=False) == 0
    )
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"mended: results/sft/{'aa' * 32}.json: its artifact {artifact} is missing",
        f"mended: {blob} (a of artifact {artifact}): missing",
    ]
    assert list(verify_all(store)) == []


def test_a_manifest_over_the_limit_is_refused_on_both_sides(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, "f", **{f"file-{number}": str(number) for number in range(20)})
    digest = publish(store, folder, "report")
    size = len(read_manifest(store, digest).to_json())
    for module in ("manifest", "fetch"):
        monkeypatch.setattr(sys.modules[f"stages.artifacts.{module}"], "MAX_BYTES", size - 1)
    with pytest.raises(ValueError, match=rf"manifest would have {size:,} bytes, more than {size - 1:,}"):
        manifest_of([(path.name, path) for path in folder.iterdir()], "report").to_json()
    with pytest.raises(ValueError, match="split the artifact"):
        publish(store, folder, "report")
    with pytest.raises(Damaged, match=rf"has {size:,} bytes, more than the {size - 1:,} that it may have"):
        read_manifest(store, digest)
    assert not is_complete(store, digest)
    with pytest.raises(ValueError, match="more than a manifest may"):
        Manifest.parse(b" " * size)
    with pytest.raises(NotInStore):
        read_manifest(store, "sha256:" + "0" * 64)
