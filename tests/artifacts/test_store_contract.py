"""What every store promises, on a folder and on a real S3 server."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stages.artifacts import Damaged, NotInStore, Store, StoreError, open_store


def test_objects_are_put_read_listed_and_deleted(store: Store) -> None:
    assert list(store.list("")) == []
    assert store.put("a/b", b"one")
    assert store.put("a/c", b"")
    assert store.put("ab", b"three")
    assert store.get("a/b") == b"one"
    assert store.get("a/c") == b""
    assert (store.size("a/b"), store.size("nothing"), store.size("a")) == (3, None, None)
    assert store.exists("ab")
    assert not store.exists("a")
    listed = list(store.list(""))
    assert [(info.key, info.size) for info in listed] == [("a/b", 3), ("a/c", 0), ("ab", 5)]
    assert all(abs(info.modified - store.now()) < 600 for info in listed)
    assert [info.key for info in store.list("a")] == ["a/b", "a/c", "ab"]
    assert [info.key for info in store.list("a/")] == ["a/b", "a/c"]
    assert [info.key for info in store.list("a/c")] == ["a/c"]
    assert list(store.list("zz/")) == []
    store.delete("a/b")
    store.delete("a/b")
    with pytest.raises(NotInStore, match="has no a/b"):
        store.get("a/b")
    with pytest.raises(NotInStore, match="has no a/b"):
        store.get_with_tag("a/b")
    assert store.get("a/c") == b""


def test_a_piece_of_an_object_is_read_and_ends_where_the_object_does(store: Store) -> None:
    store.put("k", b"0123456789")
    assert store.get_range("k", 0, 4) == b"0123"
    assert store.get_range("k", 7, 100) == b"789"
    assert store.get_range("k", 10, 5) == b""
    assert store.get_range("k", 50, 5) == b""
    assert store.get_range("k", 3, 0) == b""
    with pytest.raises(NotInStore, match="has no nothing"):
        store.get_range("nothing", 0, 4)


def test_keys_may_hold_any_text_that_a_path_may(store: Store) -> None:
    names = ["ä 日本/😀.json", "plus+and&?=%20#;'\"<>", "dots...and~tilde", "a" * 250]
    for name in names:
        store.put(f"odd/{name}", name.encode())
    assert {info.key.removeprefix("odd/") for info in store.list("odd/")} == set(names)
    assert [store.get(f"odd/{name}") for name in names] == [name.encode() for name in names]
    for name in names:
        store.delete(f"odd/{name}")
    assert list(store.list("odd/")) == []


def test_putting_again_replaces_and_if_absent_does_not(store: Store) -> None:
    assert store.put("k", b"one", if_absent=True) is not None
    assert store.put("k", b"two", if_absent=True) is None
    assert store.get("k") == b"one"
    assert store.put("k", b"three") is not None
    assert store.get("k") == b"three"


def test_only_who_knows_the_newest_version_replaces_it(store: Store) -> None:
    first = store.put("k", b"one")
    assert first is not None
    assert store.get_with_tag("k") == (b"one", first)
    second = store.put("k", b"two", if_match=first)
    assert second is not None
    assert second != first
    assert store.put("k", b"three", if_match=first) is None
    assert store.get_with_tag("k") == (b"two", second)
    store.delete("k")
    assert store.put("k", b"four", if_match=second) is None
    assert not store.exists("k")


def test_exactly_one_of_many_writers_wins_if_absent(store: Store, store_url: str) -> None:
    stores = [open_store(store_url) for _ in range(8)]
    for each in stores:
        each.exists("x")  # connected
    for round_ in range(2 if store.remote else 10):
        barrier = threading.Barrier(8)
        won: list[int] = []

        def put(index: int, key: str, barrier: threading.Barrier = barrier, won: list[int] = won) -> None:
            barrier.wait()
            if stores[index].put(key, str(index).encode(), if_absent=True):
                won.append(index)

        threads = [threading.Thread(target=put, args=(index, f"lease/{round_}")) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get(f"lease/{round_}") == str(won[0]).encode()


def test_no_update_is_lost_where_writers_compare_and_swap(store: Store, store_url: str) -> None:
    store.put("refs/n", b"0")

    def add(_: int) -> None:
        mine = open_store(store_url)
        for _ in range(10):
            while True:
                data, tag = mine.get_with_tag("refs/n")
                if mine.put("refs/n", str(int(data) + 1).encode(), if_match=tag) is not None:
                    break

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert store.get("refs/n") == b"40"


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a/../../x", "", "a\\b", "a//b"])
def test_no_key_leads_out_of_the_store(store: Store, key: str) -> None:
    for call in (store.get, store.exists, store.delete, store.hash, store.get_with_tag):
        with pytest.raises(ValueError):
            call(key)
    with pytest.raises(ValueError):
        store.put(key, b"x")


def test_files_are_copied_in_and_out_with_their_hash(tmp_path: Path, store: Store) -> None:
    data = os.urandom(20_000_001)  # more than one part of a download, no whole number of them
    (tmp_path / "file").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    assert store.put_file("k", tmp_path / "file") == sha256
    assert store.hash("k") == sha256
    for number, size in enumerate((None, len(data))):
        assert store.get_file("k", tmp_path / f"copy-{number}", size=size) == (sha256, len(data))
        assert (tmp_path / f"copy-{number}").read_bytes() == data
    assert store.put_blob(tmp_path / "file") == (sha256, len(data))
    assert store.put_blob(tmp_path / "file") == (sha256, len(data))
    assert store.get(f"blobs/{sha256[:2]}/{sha256}") == data
    with pytest.raises(Damaged, match="changed while it was stored"):
        store.put_file("other", tmp_path / "file", sha256="0" * 64)
    assert not store.exists("other")
    with pytest.raises(StoreError, match="cannot write"):
        store.get_file("k", tmp_path / "copy-0")  # never over an existing file
    assert (tmp_path / "copy-0").read_bytes() == data
    with pytest.raises(NotInStore):
        store.get_file("nothing", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(StoreError, match="cannot read"):
        store.put_file("k", tmp_path / "absent")


def test_a_copy_goes_on_where_it_was_cut(tmp_path: Path, store: Store) -> None:
    data = os.urandom(20_000_001)
    (tmp_path / "file").write_bytes(data)
    sha256 = store.put_file("k", tmp_path / "file")
    for number, begun in enumerate((0, 1, 9_000_000, len(data))):
        part = tmp_path / f"part-{number}"
        part.write_bytes(data[:begun])
        assert store.get_file("k", part, size=len(data), resume=True) == (sha256, len(data))
        assert part.read_bytes() == data


def test_the_size_of_an_object_need_not_be_what_was_thought(tmp_path: Path, store: Store) -> None:
    for number, (real, thought) in enumerate([(10, 30_000_000), (0, 5), (10, 0), (9_000_000, 20_000_000)]):
        data = os.urandom(real)
        store.put(f"k{number}", data)
        found = store.get_file(f"k{number}", tmp_path / str(number), size=thought)
        assert found == (hashlib.sha256(data).hexdigest(), real)


def test_an_empty_file_is_an_object(tmp_path: Path, store: Store) -> None:
    (tmp_path / "empty").write_bytes(b"")
    nothing = hashlib.sha256(b"").hexdigest()
    assert store.put_blob(tmp_path / "empty") == (nothing, 0)
    assert store.get_file(f"blobs/{nothing[:2]}/{nothing}", tmp_path / "copy", size=0) == (nothing, 0)
    assert (tmp_path / "copy").read_bytes() == b""


def test_many_blobs_are_stored_together_and_equal_files_once(tmp_path: Path, store: Store) -> None:
    paths = [tmp_path / f"{n}" for n in range(150)]
    for n, path in enumerate(paths):
        path.write_bytes(str(n // 2).encode() * 50)
    stored = store.put_blobs(paths)
    assert stored == [(hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size) for path in paths]
    assert len(list(store.list("blobs/"))) == 75
    assert store.put_blobs(paths, stored) == stored
    with pytest.raises(StoreError, match="cannot read"):
        store.put_blobs([*paths, tmp_path / "absent"])


def test_a_blob_that_is_known_to_be_there_is_not_read_again(tmp_path: Path, store: Store) -> None:
    (tmp_path / "file").write_bytes(b"content")
    known = store.put_blob(tmp_path / "file")
    assert store.put_blob(tmp_path / "no longer there", known=known) == known
    store.delete(f"blobs/{known[0][:2]}/{known[0]}")
    assert store.put_blob(tmp_path / "file", known=known) == known
    assert store.size(f"blobs/{known[0][:2]}/{known[0]}") == 7


def test_more_objects_than_a_listing_gives_at_once_are_listed_and_measured(store: Store) -> None:
    names = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(1060)]
    keys = [f"blobs/{name[:2]}/{name}" for name in names]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, key[-9:].encode()), keys[:1050]))
    assert [(info.key, info.size) for info in store.list("blobs/")] == [(key, 9) for key in sorted(keys[:1050])]
    for asked in (3, 50, 1060):  # one by one, a few pages of many, all
        assert store.sizes(keys[-asked:]) == {key: 9 for key in keys[-asked:] if key in keys[:1050]}
    assert store.sizes([]) == {}


def test_appending_makes_and_extends_an_object(store: Store, store_url: str) -> None:
    other = open_store(store_url)
    store.append("logs/r/s.jsonl", b"one\n")
    other.append("logs/r/s.jsonl", b"two\n")
    store.append("logs/r/s.jsonl", b"three\n")
    assert store.get("logs/r/s.jsonl") == b"one\ntwo\nthree\n"


def test_what_killed_writers_left_is_told_apart_by_its_age(store: Store) -> None:
    assert store.leftovers(0) == []
    assert store.leftovers(0, remove=True) == []


def test_the_clock_of_the_store_is_near(store: Store) -> None:
    assert abs(store.now() - time.time()) < 5
