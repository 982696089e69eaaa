"""Publishing and fetching, with kills, damage and many at once, on a folder and on S3."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.artifacts import (
    Damaged,
    HashCache,
    Manifest,
    NotInStore,
    Store,
    StoreError,
    fetch,
    import_files,
    is_complete,
    manifest_of,
    open_store,
    publish,
    pull,
    read_manifest,
    resolve_digest,
    verify_all,
    verify_artifact,
)

PUBLISH = """
import sys
from pathlib import Path
from stages.artifacts import open_store, publish
print("ready", flush=True)
sys.stdin.readline()
print(publish(open_store(sys.argv[1]), Path(sys.argv[2]), "dataset"), flush=True)
"""


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FILES = {
    "config.json": b"{}",
    "empty": b"",
    "deep/er/ä 日本 😀.txt": "grüße".encode(),
    "same-1": b"twice",
    "same-2": b"twice",
    "large.bin": bytes(range(256)) * 8192,
    "-dash": b"x",
    ".hidden": b"y",
}


def test_what_is_fetched_is_what_was_published(tmp_path: Path, store: Store) -> None:
    write(tmp_path / "in", FILES)
    (tmp_path / "in" / "no files here").mkdir()
    digest = publish(store, tmp_path / "in", "checkpoint")
    manifest = fetch(store, digest, tmp_path / "out")
    assert tree(tmp_path / "out") == FILES
    assert manifest == read_manifest(store, digest)
    assert manifest.kind == "checkpoint"
    assert {entry.path: entry.size for entry in manifest.files} == {name: len(data) for name, data in FILES.items()}
    assert is_complete(store, digest)
    assert verify_artifact(store, digest) == []
    blobs = list(store.list("blobs/"))
    assert len(blobs) == len(set(FILES.values()))  # equal files are one blob
    assert all(hashlib.sha256(store.get(info.key)).hexdigest() == info.key[9:] for info in blobs)
    assert f"manifests/{digest[7:9]}/{digest[7:]}.json" == next(info.key for info in store.list("manifests/"))


def test_the_digest_depends_on_content_names_and_kind_only(tmp_path: Path, store: Store) -> None:
    one = publish(store, write(tmp_path / "one", FILES), "dataset")
    shuffled = dict(reversed(FILES.items()))
    assert publish(open_store(tmp_path / "other"), write(tmp_path / "two", shuffled), "dataset") == one
    assert publish(store, tmp_path / "two", "report") != one
    write(tmp_path / "two", {"empty": b" "})
    assert publish(store, tmp_path / "two", "dataset") != one


def test_scattered_files_are_the_same_artifact_as_a_folder_of_them(tmp_path: Path, store: Store) -> None:
    write(tmp_path / "in", {"a": b"1", "b/c": b"2"})
    write(tmp_path / "x", {"p": b"2", "q": b"1"})
    files = [("b/c", tmp_path / "x" / "p"), ("a", tmp_path / "x" / "q")]
    digest = publish(store, tmp_path / "in", "source")
    assert import_files(store, files, "source") == digest
    assert manifest_of(files, "source").digest == digest


def test_what_cannot_be_published_is_refused_before_a_byte_is_stored(tmp_path: Path, store: Store) -> None:
    (tmp_path / "empty" / "folder").mkdir(parents=True)
    linked = write(tmp_path / "linked", {"a": b"1"})
    (linked / "link").symlink_to("a")
    folder_link = write(tmp_path / "folder-link", {"a": b"1"})
    (folder_link / "link").symlink_to(tmp_path)
    special = write(tmp_path / "special", {"a": b"1"})
    os.mkfifo(special / "pipe")
    odd = write(tmp_path / "odd", {"back\\slash": b"1"})
    raw = write(tmp_path / "raw", {"a": b"1"})
    Path(os.fsdecode(os.fsencode(raw) + b"/\xff")).write_bytes(b"1")
    clash = write(tmp_path / "clash", {"a": b"1", "A": b"2"})
    (tmp_path / "to-folder").symlink_to(tmp_path / "raw")
    for folder, words in (
        (tmp_path / "empty", "holds no files"),
        (linked, "is a symbolic link"),
        (folder_link, "is a symbolic link"),
        (special, "is not a regular file"),
        (odd, "backslash"),
        (raw, "not valid Unicode"),
        (clash, "same where case is ignored"),
        (tmp_path / "to-folder", "is not a folder"),
        (tmp_path / "absent", "is not a folder"),
        (linked / "a", "is not a folder"),
    ):
        with pytest.raises(ValueError, match=words):
            publish(store, folder, "dataset")
    with pytest.raises(ValueError, match="not a kind"):
        publish(store, write(tmp_path / "good", {"a": b"1"}), "datasets")
    with pytest.raises(ValueError):
        import_files(store, [("../a", tmp_path / "good" / "a")], "source")
    with pytest.raises(StoreError, match="cannot read"):
        import_files(store, [("a", tmp_path / "good" / "a"), ("b", tmp_path / "absent")], "source")
    assert list(store.list("")) == []


def flip(store: Store, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


def blob_of(data: bytes) -> str:
    name = hashlib.sha256(data).hexdigest()
    return f"blobs/{name[:2]}/{name}"


def manifest_at(digest: str) -> str:
    return f"manifests/{digest[7:9]}/{digest[7:]}.json"


def test_a_flipped_byte_is_never_served_and_is_named(tmp_path: Path, store: Store) -> None:
    digest = publish(store, write(tmp_path / "in", FILES), "dataset")
    blob = blob_of(FILES["large.bin"])
    flip(store, blob)
    assert is_complete(store, digest)  # sizes alone do not tell
    with pytest.raises(Damaged, match=blob) as caught:
        fetch(store, digest, tmp_path / "out")
    assert "large.bin" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    for found in (verify_artifact(store, digest), list(verify_all(store))):
        assert [(damage.key, damage.artifact, damage.path) for damage in found] == [(blob, digest, "large.bin")]
        assert "another hash" in str(found[0])


def test_a_truncated_blob_is_never_served(tmp_path: Path, store: Store) -> None:
    digest = publish(store, write(tmp_path / "in", FILES), "dataset")
    store.put(blob_of(FILES["large.bin"]), FILES["large.bin"][:1000])
    assert not is_complete(store, digest)
    with pytest.raises(Damaged, match="has 1,000 bytes"):
        fetch(store, digest, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "has 1,000 bytes, not 2,097,152" in verify_artifact(store, digest)[0].problem


def test_a_missing_blob_is_named_for_every_file_that_it_was(tmp_path: Path, store: Store) -> None:
    digest = publish(store, write(tmp_path / "in", FILES), "dataset")
    store.delete(blob_of(b"twice"))
    assert not is_complete(store, digest)
    with pytest.raises(Damaged, match="is missing"):
        fetch(store, digest, tmp_path / "out")
    assert [damage.path for damage in verify_artifact(store, digest)] == ["same-1", "same-2"]


def test_publishing_again_heals_what_was_damaged(tmp_path: Path, store: Store) -> None:
    digest = publish(store, write(tmp_path / "in", FILES), "dataset")
    flip(store, blob_of(FILES["large.bin"]))
    store.delete(blob_of(b"twice"))
    flip(store, manifest_at(digest))
    assert len(list(verify_all(store))) >= 2
    assert publish(store, tmp_path / "in", "dataset") == digest
    assert list(verify_all(store)) == []


def test_a_damaged_manifest_is_never_believed(tmp_path: Path, store: Store) -> None:
    digest = publish(store, write(tmp_path / "in", {"a": b"1"}), "dataset")
    key = manifest_at(digest)
    store.put(key, store.get(key).replace(b'"a"', b'"b"'))
    with pytest.raises(Damaged, match="manifests/"):
        read_manifest(store, digest)
    assert not is_complete(store, digest)
    assert [damage.artifact for damage in verify_all(store)] == [digest]
    # Bytes that hash to their name but are no manifest: a path that would leave the folder.
    text = json.dumps({"files": [{"path": "../x", "sha256": "0" * 64, "size": 1}], "kind": "source"}).replace(" ", "")
    name = hashlib.sha256(text.encode()).hexdigest()
    store.put(f"manifests/{name[:2]}/{name}.json", text.encode())
    with pytest.raises(Damaged, match="not an allowed manifest"):
        fetch(store, f"sha256:{name}", tmp_path / "out")
    assert not (tmp_path / "x").exists()


def test_verifying_all_finds_what_no_artifact_names(tmp_path: Path, store: Store) -> None:
    publish(store, write(tmp_path / "in", {"a": b"1"}), "dataset")
    store.put("blobs/aa/" + "a" * 64, b"not that")
    store.put("blobs/aa/short", b"x")
    store.put("manifests/aa/short.json", b"x")
    assert sorted(damage.key for damage in verify_all(store)) == [
        "blobs/aa/" + "a" * 64,
        "blobs/aa/short",
        "manifests/aa/short.json",
    ]


def test_an_unknown_digest_and_one_that_is_none_are_told_apart(tmp_path: Path, store: Store) -> None:
    with pytest.raises(NotInStore, match="has no artifact sha256:0000"):
        fetch(store, "sha256:" + "0" * 64, tmp_path / "out")
    for digest in ("0" * 64, "sha256:" + "0" * 63, "sha256:../../x", "md5:" + "0" * 64):
        with pytest.raises(ValueError, match="is not a digest"):
            fetch(store, digest, tmp_path / "out")


def test_fetching_never_writes_over_what_is_there(tmp_path: Path, store: Store) -> None:
    digest = publish(store, write(tmp_path / "in", {"a": b"1"}), "dataset")
    write(tmp_path / "full", {"b": b"2"})
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "full", tmp_path / "file"):
        with pytest.raises(StoreError, match="give another"):
            fetch(store, digest, place)
    fetch(store, digest, tmp_path / "empty")
    assert tree(tmp_path / "empty") == {"a": b"1"}
    assert tree(tmp_path / "full") == {"b": b"2"}


def test_a_pulled_folder_passes_sha256sum(tmp_path: Path, store: Store) -> None:
    digest = publish(store, write(tmp_path / "in", FILES), "dataset")
    pull(store, digest, tmp_path / "out")
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "out", capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert len(checked.stdout.splitlines()) == len(FILES)
    own = write(tmp_path / "own", {"a": b"1", "SHA256SUMS": b"mine"})
    pull(store, publish(store, own, "dataset"), tmp_path / "out2")
    assert tree(tmp_path / "out2") == {"a": b"1", "SHA256SUMS": b"mine"}


def test_digests_are_found_by_their_first_digits(tmp_path: Path, store: Store) -> None:
    digests = [publish(store, write(tmp_path / str(n), {"a": str(n).encode()}), "dataset") for n in range(3)]
    for digest in digests:
        for prefix in (digest, digest[7:], digest[:13], digest[7:13], digest[7:20].upper()):
            assert resolve_digest(store, prefix) == digest
    for prefix in ("", "sha256:", "abc", "sha256:12345", "zzzzzz", "../../etc", "0" * 65):
        with pytest.raises(ValueError, match="is not a digest"):
            resolve_digest(store, prefix)
    with pytest.raises(ValueError, match="has no artifact"):
        resolve_digest(store, "000000" if not digests[0][7:].startswith("000000") else "000001")
    twin = digests[0][7:-1] + ("0" if digests[0][-1] != "0" else "1")
    store.put(f"manifests/{twin[:2]}/{twin}.json", b"x")
    with pytest.raises(ValueError, match="2 artifacts start so"):
        resolve_digest(store, digests[0][7:40])


def test_many_small_files_come_back_whole(tmp_path: Path, store: Store) -> None:
    files = {f"{n % 40:02}/{n}.txt": str(n).encode() for n in range(2000 if not store.remote else 500)}
    digest = publish(store, write(tmp_path / "in", files), "source")
    fetch(store, digest, tmp_path / "out")
    assert tree(tmp_path / "out") == files


def start_publisher(tmp_path: Path, store: Store) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PUBLISH, store.url, str(tmp_path / "in")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_a_publisher_killed_at_any_moment_leaves_nothing_partial(tmp_path: Path, store: Store) -> None:
    files = {f"{n}.bin": random.Random(n).randbytes(20_000) for n in range(100)}
    write(tmp_path / "in", files)
    digest = manifest_of([(name, tmp_path / "in" / name) for name in files], "dataset").digest
    process = start_publisher(tmp_path, store)
    begun = time.monotonic()
    go(process)
    assert process.communicate(timeout=60)[0].strip() == digest
    whole = time.monotonic() - begun
    generator, killed = random.Random(0), 0
    for _ in range(8):
        for info in list(store.list("")):
            store.delete(info.key)
        process = start_publisher(tmp_path, store)
        go(process)
        time.sleep(generator.random() * whole)
        process.kill()
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            killed += 1
        else:  # it was done before: the first one had less of the machine
            whole /= 2
        assert list(verify_all(store)) == []  # every blob that can be seen is whole
        assert is_complete(store, digest) == any(store.list("manifests/"))
    assert killed >= 2
    assert publish(store, tmp_path / "in", "dataset") == digest
    fetch(store, digest, tmp_path / "out")
    assert tree(tmp_path / "out") == files


def test_eight_publishers_of_the_same_files_at_once_agree(tmp_path: Path, store: Store) -> None:
    files = {f"{n}": random.Random(n).randbytes(5000) for n in range(60)}
    write(tmp_path / "in", files)
    processes = [start_publisher(tmp_path, store) for _ in range(8)]
    for process in processes:
        go(process)
    digests = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 8
    assert len(digests) == 1
    assert len(list(store.list("blobs/"))) == 60
    assert store.leftovers(0) == []
    assert list(verify_all(store)) == []
    fetch(store, digests.pop(), tmp_path / "out")
    assert tree(tmp_path / "out") == files


def test_a_file_that_grows_while_it_is_published_is_stored_as_it_was_read(tmp_path: Path, store: Store) -> None:
    grower = f"f = open({str(tmp_path / 'in' / 'log')!r}, 'ab', 0)\nwhile True: f.write(b'x' * 1000)"
    write(tmp_path / "in", {"log": b"x" * 5_000_000})
    process = subprocess.Popen([sys.executable, "-c", grower])
    try:
        digest = publish(store, tmp_path / "in", "source")
    finally:
        process.kill()
        process.wait()
    assert verify_artifact(store, digest) == []


def test_hashes_are_remembered_until_a_file_changes(tmp_path: Path) -> None:
    path = write(tmp_path, {"a": b"one"}) / "a"
    past = time.time_ns() - 60_000_000_000
    os.utime(path, ns=(past, past))
    cache = HashCache(tmp_path / "cache" / "hashes.json")
    one = hashlib.sha256(b"one").hexdigest()
    assert cache.hash(path) == (one, 3)
    cache.save()
    assert not (tmp_path / "cache").exists()  # its inode changed just now: not yet to be trusted
    wait_until_settled(path)
    assert HashCache(cache.path).hash(path) == (one, 3)
    cache.hash(path)
    cache.save()
    # Poison the remembered hash: a lookup that gives it back was answered from memory.
    entries = json.loads(cache.path.read_text())
    entries[str(path)][4] = "f" * 64
    cache.path.write_text(json.dumps(entries))
    assert HashCache(cache.path).hash(path)[0] == "f" * 64
    path.write_bytes(b"two")
    os.utime(path, ns=(past, past))  # even with the old time stamp: the inode's own change time tells
    assert HashCache(cache.path).hash(path)[0] == hashlib.sha256(b"two").hexdigest()
    assert isinstance(manifest_of([("a", path)], "source", HashCache(cache.path)), Manifest)
    for text in ("{", "[]", '{"x": 1}'):
        cache.path.write_text(text)
        assert HashCache(cache.path).hash(path)[0] == hashlib.sha256(b"two").hexdigest()


def wait_until_settled(path: Path) -> None:
    while time.time_ns() - path.stat().st_ctime_ns < 2_100_000_000:
        time.sleep(0.1)
