"""References: moved by compare-and-swap, with a history that is never lost, and rolled back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stages.artifacts import (
    Damaged,
    NotInStore,
    Store,
    StoreError,
    promote,
    publish,
    read_ref,
    ref_names,
    refs,
    rollback,
    verify_all,
)

ME = "me@here"


def artifact(tmp_path: Path, store: Store, text: str) -> str:
    folder = tmp_path / f"folder-{text}"
    folder.mkdir(exist_ok=True)
    (folder / "a.txt").write_text(text)
    return publish(store, folder, "report")


def test_a_reference_keeps_every_move(tmp_path: Path, store: Store) -> None:
    one, two = artifact(tmp_path, store, "one"), artifact(tmp_path, store, "two")
    promote(store, "production", one, who=ME, why="the first")
    moved = promote(store, "production", two, who="you@there", why="better")
    assert read_ref(store, "production") == moved
    assert [(move.number, move.artifact, move.previous, move.who, move.why) for move in moved.history] == [
        (1, one, None, ME, "the first"),
        (2, two, one, "you@there", "better"),
    ]
    assert promote(store, "production", two, who=ME) == moved  # it names it already
    promote(store, "nightly", one, who=ME)
    assert ref_names(store) == ["nightly", "production"]
    assert [ref.artifact for ref in refs(store)] == [one, two]


def test_rolling_back_twice_goes_back_two_moves(tmp_path: Path, store: Store) -> None:
    """A, B, C; back to B; back to A; then D, and back to A: what a rollback left is not come back to."""
    a, b, c, d = (artifact(tmp_path, store, text) for text in "abcd")
    for digest in (a, b, c):
        promote(store, "production", digest, who=ME)
    assert rollback(store, "production", who=ME).artifact == b
    assert rollback(store, "production", who=ME).artifact == a
    with pytest.raises(ValueError, match="never named anything before"):
        rollback(store, "production", who=ME)
    promote(store, "production", d, who=ME)
    assert rollback(store, "production", who=ME).artifact == a
    assert rollback(store, "production", who=ME, to=3, why="c after all").artifact == c
    history = read_ref(store, "production").history
    assert [(move.artifact, move.restores) for move in history] == [
        (a, None),
        (b, None),
        (c, None),
        (b, 2),
        (a, 1),
        (d, None),
        (a, 1),
        (c, 3),
    ]
    with pytest.raises(ValueError, match="has no entry 9; it has 1 to 8"):
        rollback(store, "production", who=ME, to=9)
    with pytest.raises(NotInStore, match="has no reference staging; it has production"):
        rollback(store, "staging", who=ME)


def test_a_reference_is_moved_only_from_what_was_expected(tmp_path: Path, store: Store) -> None:
    one, two = artifact(tmp_path, store, "one"), artifact(tmp_path, store, "two")
    promote(store, "production", one, who=ME, expect="")
    for expect in ("", two):
        with pytest.raises(StoreError, match=r"names sha256:.* now, not .*: somebody moved it"):
            promote(store, "production", two, who=ME, expect=expect)
    assert promote(store, "production", two, who=ME, expect=one).artifact == two


def test_of_many_who_move_a_reference_at_once_nobody_is_forgotten(tmp_path: Path, store: Store) -> None:
    digests = [artifact(tmp_path, store, str(number)) for number in range(12)]
    threads = [threading.Thread(target=promote, args=(store, "r", d), kwargs={"who": d}) for d in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = read_ref(store, "r").history
    assert sorted(move.artifact for move in history) == sorted(digests)
    assert [move.previous for move in history] == [None, *(move.artifact for move in history[:-1])]


def test_only_what_is_whole_can_be_promoted(tmp_path: Path, store: Store) -> None:
    digest = artifact(tmp_path, store, "one")
    store.delete(next(info.key for info in store.list("blobs/")))
    with pytest.raises(NotInStore, match="does not hold all of artifact"):
        promote(store, "production", digest, who=ME)
    assert ref_names(store) == []


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-a", "ä", "a" * 101, "deadbeef", "none", "None"])
def test_names_that_could_mean_something_else_are_refused(tmp_path: Path, store: Store, name: str) -> None:
    with pytest.raises(ValueError, match="reference"):
        promote(store, name, "sha256:" + "0" * 64, who=ME)


def test_a_reference_from_before_its_name_was_refused_can_still_be_read_and_moved(tmp_path: Path, store: Store) -> None:
    one, two = artifact(tmp_path, store, "one"), artifact(tmp_path, store, "two")
    promote(store, "prod", one, who=ME)
    store.put("refs/none.json", store.get("refs/prod.json").replace(b'"prod"', b'"none"'))
    assert promote(store, "none", two, who=ME).history[-1].previous == one
    assert [ref.name for ref in refs(store)] == ["none", "prod"]


def test_a_reference_that_was_tampered_with_is_damage(tmp_path: Path, store: Store) -> None:
    digest = artifact(tmp_path, store, "one")
    promote(store, "production", digest, who=ME)
    assert list(verify_all(store)) == []
    whole = store.get("refs/production.json").decode()
    for wrong in (whole.replace('"number":1', '"number":2').replace('"number": 1', '"number": 2'), whole[:-20], "{}"):
        store.put("refs/production.json", wrong.encode())
        with pytest.raises(Damaged, match=r"refs/production\.json"):
            read_ref(store, "production")
        assert [damage.key for damage in verify_all(store)] == ["refs/production.json"]
    store.put("refs/production.json", whole.encode())
    store.delete(next(info.key for info in store.list("manifests/")))
    assert [damage.problem for damage in verify_all(store)] == [f"its artifact {digest} is missing"]


def test_a_secret_in_the_reason_is_not_kept(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    ref = promote(store, "p", artifact(tmp_path, store, "one"), who=ME, why="key correct-horse-battery, it works")
    assert ref.history[0].why == "key [secret], it works"
    assert b"correct-horse" not in store.get("refs/p.json")
    with pytest.raises(ValueError, match="1,000 are allowed"):
        promote(store, "p", artifact(tmp_path, store, "two"), who=ME, why="x" * 1001)
