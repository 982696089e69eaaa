"""Blobs of a remote store on this machine: fetched once, never served wrong, never more than the limit."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from s3_proxy import Proxy

from stages.artifacts import StoreError, fetch, open_cache, open_store, publish, pull
from stages.artifacts.cache import BlobCache, parse_size

FETCH = """
import sys
from pathlib import Path
from stages.artifacts import fetch, open_store
fetch(open_store(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
"""


def published(url: str, folder: Path, sizes: dict[str, int]) -> str:
    folder.mkdir()
    for name, size in sizes.items():
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    return publish(open_store(url), folder, "dataset")


def same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    return names == sorted(path.name for path in other.iterdir()) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def blob_requests(through: Proxy) -> list[str]:
    return [path for method, path, _ in through.requests if method == "GET" and "/blobs/" in path]


def cached(tmp_path: Path) -> dict[str, Path]:
    return {path.name: path for path in (tmp_path / "cache" / "blobs").glob("*/*")}


def test_a_blob_is_fetched_once_however_many_runs_read_it(tmp_path: Path, s3_url: str, through: Proxy) -> None:
    digest = published(s3_url, tmp_path / "in", {"a": 1000, "b": 9_000_000, "empty": 0})
    fetch(open_store(s3_url), digest, tmp_path / "one")
    asked = len(blob_requests(through))
    assert asked >= 3
    fetch(open_store(s3_url), digest, tmp_path / "two")
    pull(open_store(s3_url), digest, tmp_path / "pulled")
    assert len(blob_requests(through)) == asked
    assert same(tmp_path / "in", tmp_path / "one")
    assert same(tmp_path / "in", tmp_path / "two")
    assert (tmp_path / "one" / "b").stat().st_ino == (tmp_path / "two" / "b").stat().st_ino  # on the disk once
    assert (tmp_path / "two" / "b").stat().st_mode & 0o222 == 0  # a stage cannot change it by mistake


def test_what_is_pulled_may_be_changed_without_harm_to_the_cache(tmp_path: Path, s3_url: str) -> None:
    digest = published(s3_url, tmp_path / "in", {"a": 1000})
    pull(open_store(s3_url), digest, tmp_path / "pulled")
    assert (tmp_path / "pulled" / "a").stat().st_mode & 0o200
    (tmp_path / "pulled" / "a").write_bytes(b"mine")
    fetch(open_store(s3_url), digest, tmp_path / "out")
    assert same(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "cache" / "bad").exists()


def test_a_bad_blob_of_the_cache_is_put_aside_and_fetched_again(tmp_path: Path, s3_url: str) -> None:
    digest = published(s3_url, tmp_path / "in", {"a": 1000, "b": 2000})
    fetch(open_store(s3_url), digest, tmp_path / "one")
    name = hashlib.sha256((tmp_path / "in" / "a").read_bytes()).hexdigest()
    path = cached(tmp_path)[name]
    path.chmod(0o644)
    path.write_bytes(b"x" * 1000)
    fetch(open_store(s3_url), digest, tmp_path / "two")
    assert same(tmp_path / "in", tmp_path / "two")
    bad = list((tmp_path / "cache" / "bad").iterdir())
    assert [found.name[:64] for found in bad] == [name]
    assert bad[0].read_bytes() == b"x" * 1000
    assert hashlib.sha256(cached(tmp_path)[name].read_bytes()).hexdigest() == name


def test_what_was_used_longest_ago_makes_room(tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_SIZE", "10KB")  # 10,240 bytes
    digests = [published(s3_url, tmp_path / name, {name: 4000}) for name in ("a", "b", "c")]
    names = [hashlib.sha256((tmp_path / name / name).read_bytes()).hexdigest() for name in ("a", "b", "c")]
    for index, digest in enumerate(digests[:2]):
        fetch(open_store(s3_url), digest, tmp_path / f"out-{index}")
        past = time.time() - 100 + index
        os.utime(cached(tmp_path)[names[index]], (past, past))
    fetch(open_store(s3_url), digests[0], tmp_path / "again")  # now b is what was used longest ago
    fetch(open_store(s3_url), digests[2], tmp_path / "out-2")
    assert set(cached(tmp_path)) == {names[0], names[2]}
    assert same(tmp_path / "b", tmp_path / "out-1")  # what was handed out stays
    big = published(s3_url, tmp_path / "big", {"big": 20_000})
    fetch(open_store(s3_url), big, tmp_path / "out-big")  # would not fit: goes by the cache, which keeps what it has
    assert same(tmp_path / "big", tmp_path / "out-big")
    assert set(cached(tmp_path)) == {names[0], names[2]}


def test_a_fetch_that_was_killed_goes_on_where_it_was(tmp_path: Path, s3_url: str, through: Proxy) -> None:
    digest = published(s3_url, tmp_path / "in", {"large": 80_000_000})
    seen: list[str] = []

    def slow(method: str, path: str, number: int) -> str:
        if method == "GET" and "/blobs/" in path:
            seen.append(path)
            if len(seen) > 5:
                return "freeze"
        return "pass"

    through.choose = slow
    process = subprocess.Popen([sys.executable, "-c", FETCH, s3_url, digest, str(tmp_path / "out")])
    name = hashlib.sha256((tmp_path / "in" / "large").read_bytes()).hexdigest()
    partial = tmp_path / "cache" / "partial" / name
    limit = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size > 8_000_000) and time.monotonic() < limit:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "out").exists()
    had = partial.stat().st_size
    assert 0 < had < 80_000_000
    through.choose = lambda method, path, number: "pass"
    begun = len(through.requests)
    fetch(open_store(s3_url), digest, tmp_path / "out")
    assert same(tmp_path / "in", tmp_path / "out")
    ranges = [headers["Range"] for _, path, headers in through.requests[begun:] if "/blobs/" in path]
    assert min(int(text.removeprefix("bytes=").split("-")[0]) for text in ranges) == had
    assert not partial.exists()


def test_a_wrong_beginning_is_not_built_on(tmp_path: Path, s3_url: str) -> None:
    digest = published(s3_url, tmp_path / "in", {"a": 9_000_000})
    name = hashlib.sha256((tmp_path / "in" / "a").read_bytes()).hexdigest()
    (tmp_path / "cache" / "partial").mkdir(parents=True)
    (tmp_path / "cache" / "partial" / name).write_bytes(b"x" * 1_000_000)
    fetch(open_store(s3_url), digest, tmp_path / "out")
    assert same(tmp_path / "in", tmp_path / "out")


def test_processes_that_want_the_same_blobs_fetch_them_once(tmp_path: Path, s3_url: str, through: Proxy) -> None:
    digest = published(s3_url, tmp_path / "in", {f"{n}": 9_000_000 for n in range(3)})
    processes = [
        subprocess.Popen([sys.executable, "-c", FETCH, s3_url, digest, str(tmp_path / f"out-{n}")]) for n in range(4)
    ]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert all(same(tmp_path / "in", tmp_path / f"out-{n}") for n in range(4))
    assert len(blob_requests(through)) == 6  # two parts for each of the three


def test_a_cache_that_is_emptied_meanwhile_costs_only_time(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = published(s3_url, tmp_path / "in", {f"{n}": 2000 for n in range(30)})
    monkeypatch.setenv("HEADRACE_CACHE_SIZE", "70K")
    emptier = (
        "import pathlib, sys, time\n"
        "while True:\n"
        "    for path in pathlib.Path(sys.argv[1]).glob('blobs/*/*'):\n"
        "        path.unlink(missing_ok=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", emptier, str(tmp_path / "cache")])
    try:
        for n in range(4):
            fetch(open_store(s3_url), digest, tmp_path / f"out-{n}")
            assert same(tmp_path / "in", tmp_path / f"out-{n}")
    finally:
        process.kill()
        process.wait()


def test_a_full_disk_under_the_cache_is_one_sentence(tmp_path: Path, s3_url: str) -> None:
    digest = published(s3_url, tmp_path / "in", {"a": 1_000_000})
    (tmp_path / "disk").mkdir()
    script = f'mount -t tmpfs -o size=256k none {tmp_path}/disk && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", FETCH]
    environment = os.environ | {"HEADRACE_CACHE_DIR": f"{tmp_path}/disk/cache"}
    try:
        ended = subprocess.run(
            [*command, s3_url, digest, f"{tmp_path}/out"], capture_output=True, text=True, env=environment
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if "unshare:" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip(f"file systems cannot be mounted here: {ended.stderr.strip()}")
    expected = f"the disk of the cache {tmp_path}/disk/cache is full; free some space, or set HEADRACE_CACHE_DIR"
    assert expected in ended.stderr.splitlines()[-1], ended.stderr
    assert not (tmp_path / "out").exists()


def test_the_cache_can_be_turned_off_and_misspelt_settings_are_told(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = published(s3_url, tmp_path / "in", {"a": 1000})
    monkeypatch.setenv("HEADRACE_CACHE_SIZE", "0")
    fetch(open_store(s3_url), digest, tmp_path / "out")
    assert not (tmp_path / "cache").exists()
    assert (tmp_path / "out" / "a").stat().st_mode & 0o200
    monkeypatch.setenv("HEADRACE_CACHE_SIZE", "much")
    with pytest.raises(StoreError, match="HEADRACE_CACHE_SIZE is 'much'; set it to a size such as 20GiB"):
        fetch(open_store(s3_url), digest, tmp_path / "out2")
    monkeypatch.setenv("HEADRACE_CACHE_SIZE", "1G")
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(StoreError, match=r"the cache folder .* cannot be written; set HEADRACE_CACHE_DIR"):
        fetch(open_store(s3_url), digest, tmp_path / "out3")
    monkeypatch.delenv("HEADRACE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache = open_cache()
    assert isinstance(cache, BlobCache)
    assert (cache.root, cache.limit) == (tmp_path / "xdg" / "headrace", 1 << 30)


@pytest.mark.parametrize(
    ("text", "size"),
    [("", 20 << 30), ("0", 0), ("500MiB", 500 << 20), ("1.5 GB", 3 << 29), ("12", 12), ("2t", 2 << 40)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size
