"""The folder store: whole objects or none, and one sentence for what a person must mend."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stages.artifacts import (
    FolderStore,
    StoreError,
    import_files,
    is_complete,
    open_store,
    publish,
    read_manifest,
    verify_all,
)
from stages.artifacts.leases import GC_KEY
from stages.artifacts.manifest import blob_key
from stages.artifacts.store import copy_stream, in_parallel
from stages.os_errors import explained


def test_an_empty_folder_goes_with_its_last_object(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put("work/k/data/t/0", b"x")
    store.delete("work/k/data/t/0")
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("tmp", "locks")] == ["work"]
    assert list((tmp_path / "work").iterdir()) == []


def test_nothing_is_left_in_tmp_by_a_put_that_lost(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.put("k", b"one", if_absent=True)
    assert store.put("k", b"two", if_absent=True) is None
    assert store.get("k") == b"one"
    assert store.put("k", b"three")
    assert store.get("k") == b"three"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_writers_and_deleters_of_one_folder_do_not_trip_over_each_other(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def churn(index: int) -> None:
        store = open_store(tmp_path)
        try:
            for _ in range(60):
                store.put(f"work/k/data/{index}", b"x")
                store.delete(f"work/k/data/{index}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_opening_a_store_makes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    assert list(store.list("")) == []
    store.delete("a/b")
    assert not (tmp_path / "store").exists()


def test_objects_follow_the_umask(tmp_path: Path) -> None:
    code = (
        "import os, sys; os.umask(0o027)\n"
        "from stages.artifacts import open_store\n"
        "open_store(sys.argv[1]).put('k', b'x')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o640


def test_urls_name_folders_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "with space").mkdir()
    store = open_store(f"file://{tmp_path}/with%20space")
    store.put("k", b"x")
    assert (tmp_path / "with space" / "k").read_bytes() == b"x"
    assert isinstance(store, FolderStore)
    for url, words in (
        ("http://host/x", "unknown kind of store 'http'"),
        ("file://other-host/x", "must be on this host"),
        ("s3:/bucket/x", "write s3://bucket/x"),
        ("file:x", "write file:///x"),
        ("  ", "is empty"),
    ):
        with pytest.raises(StoreError, match=words):
            open_store(url)


def test_a_file_in_place_of_the_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("x")
    with pytest.raises(StoreError, match="is a file, not a folder"):
        open_store(tmp_path / "store")
    with pytest.raises(StoreError, match="is a file where a folder must be"):
        open_store(tmp_path / "store" / "below").put("k", b"x")


def test_a_file_in_place_of_a_folder_of_the_store_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("x")
    (tmp_path / "file").write_text("content")
    with pytest.raises(StoreError, match="is a file where a folder must be"):
        open_store(tmp_path).put_blob(tmp_path / "file")


def in_small_file_system(tmp_path: Path, script: str) -> str:
    """Run a shell script with a file system of 256 KiB mounted at $DISK, in a mount namespace of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"set -e; mount -t tmpfs -o size=256k none {disk}; {script}"
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script]
    environment = os.environ | {"DISK": str(disk), "PYTHON": sys.executable, "CODE": PUT}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if "unshare" in ended.stderr or "mount" in ended.stderr:
        pytest.skip(f"file systems cannot be mounted here: {ended.stderr.strip()}")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


PUT = """
import sys
from stages.artifacts import StoreError, open_store
try:
    open_store(sys.argv[1]).put(sys.argv[2], b"x" * int(sys.argv[3]))
except StoreError as error:
    print(type(error).__name__, error)
"""


EVENTS = """
import json, os, sys
from stages.events import EventStream
disk = sys.argv[1]
emit = EventStream(os.open(f"{disk}/events", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
emit({"type": "log", "text": "first"})
emit({"type": "log", "text": "x" * 300_000})
os.truncate(f"{disk}/events", 4096)
emit({"type": "outcome", "code": 1})
lines = open(f"{disk}/events").read().splitlines()
print(json.loads(lines[0])["text"], len(lines), json.loads(lines[-1])["code"])
"""


def test_why_a_stage_ended_is_heard_though_the_disk_was_full_of_its_events(tmp_path: Path) -> None:
    assert in_small_file_system(tmp_path, f'CODE={shlex.quote(EVENTS)}; "$PYTHON" -c "$CODE" $DISK') == "first 3 1\n"


def test_garbage_is_removed_from_a_full_disk(tmp_path: Path) -> None:
    script = """
    export PYTHONPATH=%s
    echo rows > $DISK/rows; "$PYTHON" -m flows.cli import $DISK/rows --store $DISK/store > /dev/null
    mkdir -p $DISK/store/cache; head -c 8192 /dev/zero > $DISK/store/cache/hashes.json
    head -c 1000000 /dev/zero > $DISK/filler 2> /dev/null || true
    "$PYTHON" -m flows.cli import $DISK/rows --ref r --store $DISK/store 2> /dev/null || echo full
    "$PYTHON" -m flows.cli gc --delete --store $DISK/store
    """
    said = in_small_file_system(tmp_path, script % shlex.quote(str(Path(__file__).parents[2])))
    assert said == "full\nNothing to remove: 1 artifacts are kept.\n"


def test_a_read_only_store_is_one_sentence(tmp_path: Path) -> None:
    said = in_small_file_system(
        tmp_path,
        '"$PYTHON" -c "$CODE" $DISK/store k 10; mount -o remount,ro $DISK; "$PYTHON" -c "$CODE" $DISK/store new/k 10',
    )
    expected = f"store {tmp_path}/disk/store: cannot write new/k: the file system is mounted read-only"
    assert said == f"ReadOnlyStore {expected}; mount it for writing, or choose another place\n"


def test_a_file_that_cannot_be_stored_is_not_called_unwritable_itself(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("rows")
    (tmp_path / "store" / blob_key(hashlib.sha256(b"rows").hexdigest())).mkdir(parents=True)
    with pytest.raises(StoreError, match=r"store: cannot write a copy of .*rows\.txt: Is a directory"):
        open_store(tmp_path / "store").put_blobs([tmp_path / "rows.txt"])


def test_copies_end_when_what_they_are_for_has_failed() -> None:
    def work(item: str) -> None:
        if item == "fails":
            raise ValueError(item)
        with open("/dev/zero", "rb") as endless:
            copy_stream(endless, None, Path("/dev/zero"))

    with pytest.raises(ValueError, match="fails"), ThreadPoolExecutor(2) as pool:
        in_parallel(pool, work, ["copies", "fails", "copies"])


def test_too_many_open_files_are_one_sentence(tmp_path: Path) -> None:
    code = f"import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))\n{PUT}"
    imported = f"import stages.artifacts.folder, stages.artifacts\n{code}"
    held = "held = []\ntry:\n    while True: held.append(os.open('/', os.O_RDONLY))\nexcept OSError: pass\n"
    code = imported.replace("try:\n    open_store", f"{held}try:\n    open_store")
    command = [sys.executable, "-c", code, str(tmp_path), "k", "1"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    why = "this process has too many files open; raise its limit (ulimit -n)"
    assert said == f"StoreError store {tmp_path}: cannot write k: {why}\n"


def test_a_name_too_long_for_the_file_system_is_one_sentence(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 250] * ((4090 - len(str(tmp_path))) // 251))
    with pytest.raises(StoreError, match=r"the name is too long for this file system; choose a shorter path$"):
        open_store(deep).put("manifests/" + "k" * 200, b"x")


def test_a_source_that_the_disk_cannot_read_is_one_sentence(tmp_path: Path) -> None:
    """Address 0 of a process, read as a file, gives the error of a disk that fails (EIO)."""
    memory = Path("/proc/self/mem")
    if not memory.is_file():
        pytest.skip("no /proc here")
    with pytest.raises(StoreError, match=r"^cannot read /proc/self/mem: the disk, or the network to it, failed"):
        open_store(tmp_path).put_file("k", memory)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space is left on the disk; free some"),
        (errno.EDQUOT, "the disk quota is used up; free some space, have the quota raised"),
        (errno.EROFS, "mounted read-only; mount it for writing"),
        (errno.EMFILE, "raise its limit (ulimit -n)"),
        (errno.ENFILE, "this machine has too many files open"),
        (errno.ENAMETOOLONG, "choose a shorter path"),
        (errno.EXDEV, "another file system is mounted inside that folder; put all of it on one"),
        (errno.EIO, "the system's log (dmesg) says more"),
        (errno.ENOTDIR, "Not a directory"),
    ],
)
def test_what_the_system_refuses_is_said_with_the_way_out(number: int, words: str) -> None:
    text = explained(OSError(number, os.strerror(number)))
    assert words in text
    assert not text.endswith(".")
    assert "\n" not in text


def test_a_full_store_is_one_sentence_and_keeps_what_it_had(tmp_path: Path) -> None:
    said = in_small_file_system(
        tmp_path,
        '"$PYTHON" -c "$CODE" $DISK/store k 1000; "$PYTHON" -c "$CODE" $DISK/store k 900000; '
        "stat -c %s $DISK/store/k; ls $DISK/store/tmp",
    )
    store = tmp_path / "disk" / "store"
    assert said == f"FullStore store {store} is full; free some space, or give another place with --store\n1000\n"


def test_another_file_system_inside_the_store_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    said = in_small_file_system(
        tmp_path,
        "mkdir -p $DISK/store/blobs; mount -t tmpfs none $DISK/store/blobs; "
        '"$PYTHON" -c "$CODE" $DISK/store blobs/aa/b 10; ls $DISK/store/tmp; find $DISK/store/blobs -type f',
    )
    store = tmp_path / "disk" / "store"
    assert said.startswith(f"StoreError store {store}: cannot write blobs/aa/b: another file system is mounted inside")
    assert said.count("\n") == 1


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_hard_links_lets_one_of_several_writers_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As FAT and some FUSE file systems answer, none of which tests can mount."""

    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    store = open_store(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: store.put("other/r.json", b"%d" % n, if_absent=True), range(64)))
    [winner] = [n for n, tag in enumerate(won) if tag is not None]
    assert store.get("other/r.json") == b"%d" % winner
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("text")
    digest = publish(store, tmp_path / "in", "source")
    assert publish(store, tmp_path / "in", "source") == digest
    assert list(verify_all(store)) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_file_size_limit_stops_a_write_without_a_partial_object(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(100_000))
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from stages.artifacts import StoreError, open_store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try:\n"
        "    open_store(sys.argv[1]).put_blob(Path(sys.argv[2]))\n"
        "except StoreError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store"), str(tmp_path / "big")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "cannot write" in said
    assert "File too large" in said
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 50_000


def test_leftovers_of_killed_writers_go_after_a_day_and_young_ones_stay(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "old").write_text("x")
    (tmp_path / "tmp" / "young").write_text("x")
    past = time.time() - 25 * 3600
    os.utime(tmp_path / "tmp" / "old", (past, past))
    open_store(tmp_path).put("k", b"x")
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["young"]
    assert [info.key for info in open_store(tmp_path).list("")] == ["k"]  # what is in tmp/ is no object


def test_a_link_in_the_store_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    store = open_store(tmp_path / "store")
    store.put("a/k", b"x")
    (tmp_path / "store" / "a" / "link").symlink_to(tmp_path / "outside")
    assert [info.key for info in store.list("a/")] == ["a/k"]


def test_a_store_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("x")
    digest = publish(open_store(tmp_path / "one"), tmp_path / "in", "source")
    (tmp_path / "one").rename(tmp_path / "two")
    from stages.artifacts import fetch

    fetch(open_store(tmp_path / "two"), digest, tmp_path / "out")
    assert (tmp_path / "out" / "a").read_text() == "x"


def test_publishing_small_files_again_writes_no_blob_but_mends_one_of_other_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_text(name * 100)
    store = open_store(tmp_path / "store")
    digest = publish(store, folder, "source")
    blobs = {path: path.stat().st_ino for path in (tmp_path / "store" / "blobs").rglob("*") if path.is_file()}
    damaged = tmp_path / "store" / read_manifest(store, digest).files[0].blob
    damaged.write_text("x" * 100)  # of the right size

    assert publish(store, folder, "source") == digest

    assert damaged.read_text() == "a" * 100
    same = {path: path.stat().st_ino == inode for path, inode in blobs.items()}
    assert same == {path: path != damaged for path in blobs}


def test_a_damaged_record_of_gc_stops_no_publish(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    (tmp_path / "file").write_text("text")
    store.put(f"leases/{GC_KEY}.json", b"no lease")

    digest = import_files(store, [("file", tmp_path / "file")], "source")

    assert is_complete(store, digest)
