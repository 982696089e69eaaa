"""The S3 store where networks fail, servers are busy and settings are wrong, against a real server."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import s3_server as server_module
from s3_proxy import Proxy

from stages.artifacts import (
    Damaged,
    FilesAtHand,
    FullStore,
    HashCache,
    NotInStore,
    ReadOnlyStore,
    StoreError,
    append_log,
    fetch,
    import_files,
    open_store,
    publish,
    read_log,
    repair,
    s3_client,
    s3_transfer,
    verify_all,
    verify_artifact,
)
from stages.artifacts.s3 import S3Store

BUCKET = "headrace-tests"


def connected(url: str) -> S3Store:
    store = open_store(url)
    assert isinstance(store, S3Store)
    assert not store.exists("connect")
    return store


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of a few MiB be large ones; 5 MiB is the smallest part that S3 takes."""
    monkeypatch.setattr(s3_transfer, "MULTIPART", 8 << 20)
    monkeypatch.setattr(s3_transfer, "UPLOAD_PART", 5 << 20)


def file_of(path: Path, size: int) -> tuple[Path, str]:
    data = os.urandom(size)
    path.write_bytes(data)
    return path, hashlib.sha256(data).hexdigest()


def test_a_large_file_goes_up_in_parts_and_comes_back(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    store = connected(s3_url)
    path, sha256 = file_of(tmp_path / "large", (12 << 20) + 1)
    assert store.put_blob(path) == (sha256, (12 << 20) + 1)
    key = f"blobs/{sha256[:2]}/{sha256}"
    head = store.client.head_object(Bucket=BUCKET, Key=store.prefix + key, ChecksumMode="ENABLED")
    assert head["ChecksumSHA256"].endswith("-3")  # three parts, each checked by the server
    assert store.hash(key) == sha256
    assert store.get_file(key, tmp_path / "copy", size=(12 << 20) + 1) == (sha256, (12 << 20) + 1)
    assert store.leftovers(0) == []


def test_a_file_of_exactly_the_threshold_and_its_neighbours_come_back(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    store = connected(s3_url)
    for size in ((8 << 20) - 1, 8 << 20, 10 << 20):
        path, sha256 = file_of(tmp_path / f"{size}", size)
        assert store.put_blob(path) == (sha256, size)
        assert store.get_file(f"blobs/{sha256[:2]}/{sha256}", tmp_path / f"{size}.copy", size=size) == (sha256, size)


def test_an_upload_that_fails_is_given_up_and_leaves_no_parts(
    tmp_path: Path, s3_url: str, through: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    store = connected(s3_url)
    path, sha256 = file_of(tmp_path / "large", 12 << 20)
    through.choose = lambda method, path, number: (
        ("error", 403, "AccessDenied") if "partNumber=2" in path and method == "PUT" else "pass"
    )
    with pytest.raises(ReadOnlyStore, match="no permission to write"):
        store.put_blob(path)
    through.choose = lambda method, path, number: "pass"
    assert store.leftovers(0) == []
    assert not store.exists(f"blobs/{sha256[:2]}/{sha256}")
    store.put_blob(path)
    assert list(verify_all(store)) == []


def test_parts_of_a_killed_upload_are_found_and_removed(tmp_path: Path, s3_url: str) -> None:
    store = connected(s3_url)
    begun = store.client.create_multipart_upload(Bucket=BUCKET, Key=store.prefix + "blobs/aa/x")
    store.client.upload_part(
        Bucket=BUCKET, Key=store.prefix + "blobs/aa/x", UploadId=begun["UploadId"], PartNumber=1, Body=b"x" * 1000
    )
    assert store.leftovers(3600) == []
    found = store.leftovers(-60)
    assert [(info.key, info.size) for info in found] == [("blobs/aa/x", 1000)]
    assert store.leftovers(-60, remove=True) == found
    assert store.leftovers(-60) == []


def test_a_file_that_changes_after_it_was_hashed_is_refused(tmp_path: Path, s3_url: str) -> None:
    store = connected(s3_url)
    path, sha256 = file_of(tmp_path / "file", 1000)
    hashed = s3_transfer.hash_for_upload(path)
    path.write_bytes(os.urandom(1000))
    with pytest.raises(Damaged, match="changed while it was stored"):
        store._upload(f"blobs/{sha256[:2]}/{sha256}", path, hashed)
    path.write_bytes(b"short")
    with pytest.raises(StoreError, match="became shorter"):
        store._upload(f"blobs/{sha256[:2]}/{sha256}", path, hashed)
    assert list(store.list("")) == []


def test_a_busy_server_is_waited_for(tmp_path: Path, s3_url: str, through: Proxy) -> None:
    store = connected(s3_url)
    path, sha256 = file_of(tmp_path / "file", 100_000)
    through.choose = lambda method, path, number: "slow down" if number % 2 else "pass"
    digest = import_files(store, [("a", path)], "source")
    fetch(store, digest, tmp_path / "out")
    assert hashlib.sha256((tmp_path / "out" / "a").read_bytes()).hexdigest() == sha256


def test_cut_connections_cost_nothing_but_time(
    tmp_path: Path, s3_url: str, through: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    store = connected(s3_url)
    paths = [file_of(tmp_path / f"{n}", size)[0] for n, size in enumerate((0, 10, 300_000, 20_000_000))]
    kinds = ("cut request", "cut answer", "lose answer")
    seen: list[str] = []

    def choose(method: str, path: str, number: int) -> str:
        """Harm each request when it is first made."""
        if f"{method} {path}" in seen:
            return "pass"
        seen.append(f"{method} {path}")
        return kinds[len(seen) % 3]

    through.choose = choose
    digest = import_files(store, [(path.name, path) for path in paths], "source")
    fetch(store, digest, tmp_path / "out")
    assert [(tmp_path / "out" / path.name).read_bytes() == path.read_bytes() for path in paths] == [True] * 4
    through.choose = lambda method, path, number: "pass"
    assert verify_artifact(store, digest) == []


def test_a_conditional_put_whose_answer_was_lost_is_still_won(s3_url: str, through: Proxy) -> None:
    store = connected(s3_url)
    lost: list[str] = []

    def choose(method: str, path: str, number: int) -> str:
        if method == "PUT" and path not in lost:
            lost.append(path)
            return "lose answer"
        return "pass"

    through.choose = choose
    tag = store.put("leases/a", b"mine", if_absent=True)
    assert tag is not None
    assert store.get_with_tag("leases/a") == (b"mine", tag)
    lost.clear()
    newer = store.put("leases/a", b"still mine", if_match=tag)
    assert newer is not None
    lost.clear()
    assert store.put("leases/a", b"yours", if_absent=True) is None  # retried too, and lost for good
    assert store.get("leases/a") == b"still mine"


def test_conflicting_puts_are_tried_again(s3_url: str, through: Proxy) -> None:
    store = connected(s3_url)
    through.choose = lambda method, path, number: (
        ("error", 409, "ConditionalRequestConflict") if method == "PUT" and number < 4 else "pass"
    )
    assert store.put("k", b"x", if_absent=True) is not None
    assert store.get("k") == b"x"


def test_a_flipped_bit_on_the_way_is_never_served(tmp_path: Path, s3_url: str, through: Proxy) -> None:
    store = connected(s3_url)
    path, _ = file_of(tmp_path / "file", 50_000)
    digest = import_files(store, [("a", path)], "source")
    through.choose = lambda method, path, number: "flip" if method == "GET" and "blobs" in path else "pass"
    with pytest.raises(Damaged, match="another hash"):
        fetch(store, digest, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    through.choose = lambda method, path, number: "flip" if method == "GET" else "pass"
    with pytest.raises(Damaged):
        store.get(f"manifests/{digest[7:9]}/{digest[7:]}.json")
    through.choose = lambda method, path, number: "pass"
    fetch(store, digest, tmp_path / "out")


def test_what_is_there_is_not_sent_again(tmp_path: Path, s3_url: str, through: Proxy) -> None:
    store = connected(s3_url)
    for n in range(60):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{n}").write_bytes(os.urandom(100))
    file_of(tmp_path / "in" / "large", 2_000_000)
    digest = publish(store, tmp_path / "in", "dataset")
    begun = len(through.requests)
    assert publish(store, tmp_path / "in", "dataset") == digest
    asked = [(method, path) for method, path, _ in through.requests[begun:]]
    assert [method for method, _ in asked if method in ("PUT", "POST")] == []
    assert len(asked) < 6  # not one request for each file


@pytest.mark.parametrize("count", [2, 42])
@pytest.mark.parametrize("remembered", [False, True])
def test_a_blob_of_the_right_size_with_other_bytes_is_replaced_where_the_server_tells(
    tmp_path: Path, s3_url: str, through: Proxy, count: int, remembered: bool
) -> None:
    """Looked up alone, the server says the SHA-256; listed, the MD5, which says nothing of a file that is not read."""
    store = connected(s3_url)
    (tmp_path / "in").mkdir()
    for n in range(count):
        (tmp_path / "in" / f"{n}").write_bytes(b"%03d" % n)
        os.utime(tmp_path / "in" / f"{n}", (1e9, 1e9))
    time.sleep(2.1 if remembered else 0)  # what changed just now is not remembered
    cache = HashCache(tmp_path / "hashes.json") if remembered else None
    digest = publish(store, tmp_path / "in", "dataset", cache)
    wrong = hashlib.sha256(b"001").hexdigest()
    store.put(f"blobs/{wrong[:2]}/{wrong}", b"100")
    begun = len(through.requests)
    assert publish(store, tmp_path / "in", "dataset", cache) == digest
    sent = [path for method, path, _ in through.requests[begun:] if method == "PUT"]
    there = store.get(f"blobs/{wrong[:2]}/{wrong}")
    if remembered and count == 42:
        assert (sent, there) == ([], b"100")
        found = verify_artifact(store, digest)
        assert [damage.path for damage in found] == ["1"]
        assert repair(store, found, FilesAtHand([tmp_path / "in"])) == found
    else:
        assert ([path.rpartition("/")[2].partition("?")[0] for path in sent], there) == ([wrong], b"001")


def test_etags_that_are_no_md5_make_nothing_be_sent_again(tmp_path: Path, s3_url: str, through: Proxy) -> None:
    """A server may make its ETags otherwise (S3 does, of objects under a KMS key): the SHA-256 decides then."""
    store = connected(s3_url)
    (tmp_path / "in").mkdir()
    for n in range(200):
        (tmp_path / "in" / f"{n}").write_bytes(os.urandom(50))
    digest = publish(store, tmp_path / "in", "dataset")
    listed = s3_client.listed_objects
    begun = len(through.requests)
    with pytest.MonkeyPatch.context() as patch:

        def strange(page: dict[str, Any]) -> tuple[list[str], list[int], list[str], list[Any]]:
            names, sizes, etags, times = listed(page)
            return names, sizes, ["0" * 32 for _ in etags], times

        patch.setattr(s3_client, "listed_objects", strange)
        assert publish(store, tmp_path / "in", "dataset") == digest
    methods = [method for method, _, _ in through.requests[begun:]]
    assert [method for method in methods if method in ("PUT", "POST")] == []
    assert len(methods) < 60  # not one request for each file


def test_the_sizes_of_more_objects_than_a_listing_has_are_found_in_few_requests(
    s3_url: str, s3_server: server_module.Server, through: Proxy
) -> None:
    store, client = connected(s3_url), server_module.client(s3_server)
    keys = [f"blobs/{n % 256:02x}/{n:064x}" for n in range(1100)]
    there = {key: n for n, key in enumerate(keys) if n % 10}
    with ThreadPoolExecutor(8) as pool:
        put = partial(client.put_object, Bucket=BUCKET)
        list(pool.map(lambda key: put(Key=store.prefix + key, Body=b"x" * there[key]), there))
    begun = len(through.requests)
    assert store.sizes(keys) == there
    assert len(through.requests) - begun <= 16
    few = keys[5:50]
    assert store.sizes(few) == {key: there[key] for key in few if key in there}


def test_a_listing_is_read_however_a_server_writes_it(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = connected(s3_url)
    names = ["a b", "ü", "c&d", "e%f", "g+h", "i=j"]
    for name in names:
        store.put(f"runs/{name}", b"x")
    quick = list(store.list("runs/"))
    assert [info.key for info in quick] == sorted(f"runs/{name}" for name in names)
    monkeypatch.setattr(s3_client, "_take_listing", lambda **answer: None)
    plain = connected(s3_url)  # its client reads listings as botocore does
    assert [(info.key, info.size) for info in plain.list("runs/")] == [(info.key, info.size) for info in quick]
    assert all(abs(a.modified - b.modified) < 1 for a, b in zip(plain.list("runs/"), quick, strict=True))


def test_encryption_settings_reach_the_server(
    tmp_path: Path, s3_url: str, through: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    monkeypatch.setenv("HEADRACE_S3_SSE", "aws:kms")
    monkeypatch.setenv("HEADRACE_S3_SSE_KMS_KEY_ID", "alias/headrace")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = connected(s3_url)
    through.choose = lambda method, path, number: (
        ("error", 400, "InvalidRequest") if method in ("PUT", "POST") else "pass"  # the server here has no keys
    )
    for call in (lambda: store.put("k", b"x"), lambda: store.put_blob(file_of(tmp_path / "f", 9 << 20)[0])):
        with pytest.raises(StoreError, match="InvalidRequest"):
            call()
        method, _, headers = through.requests[-1]
        assert method in ("PUT", "POST")
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/headrace"


def refused(url: str, words: str, error: type[StoreError] = StoreError) -> str:
    with pytest.raises(error, match=words) as caught:
        open_store(url).put("k", b"x")
    text = str(caught.value)
    assert "\n" not in text
    assert server_module.ADMIN[1] not in text
    return text


def test_wrong_settings_are_one_sentence_each(
    s3_url: str, s3_server: server_module.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused("s3://no-such-bucket/x", "has no bucket no-such-bucket; create it")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        refused(
            s3_url, "does not accept the credentials .SignatureDoesNotMatch.; check AWS_ACCESS_KEY_ID", ReadOnlyStore
        )
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        refused(s3_url, "does not accept the credentials .InvalidAccessKeyId.", ReadOnlyStore)
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        refused(s3_url, "no credentials found; set AWS_ACCESS_KEY_ID", ReadOnlyStore)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_PROFILE", "absent")
        refused(s3_url, "set AWS_PROFILE to one of")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", "nonsense")
        refused(s3_url, "check AWS_ENDPOINT_URL_S3")
    with monkeypatch.context() as patch:
        patch.setenv("HEADRACE_S3_SSE", "rot13")
        refused(s3_url, "set it to AES256 or aws:kms")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_MAX_ATTEMPTS", "many")
        refused(s3_url, "AWS_MAX_ATTEMPTS is 'many'; set it to a number")
    with monkeypatch.context() as patch:
        patch.setenv("HEADRACE_S3_ADDRESSING_STYLE", "sideways")
        refused(s3_url, "set it to path, virtual or auto")
    for url, words in (
        ("s3://", "is not the name of a bucket"),
        ("s3://Bucket_X/y", "is not the name of a bucket"),
        ("s3://key:secret@bucket/x", "takes no user, password or host"),
        ("s3://bucket/x?endpoint_url=http://h", "takes no options in its URL"),
        ("s3://bucket/../x", "the prefix cannot be used"),
    ):
        with pytest.raises(StoreError, match=words) as caught:
            open_store(url)
        assert "secret" not in str(caught.value)


def test_an_unreachable_server_is_reported_within_seconds(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{unused.getsockname()[1]}")
        refused(s3_url, r"http://127.0.0.1:\d+ cannot be reached; check the network and AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://user:hidden@no-such-host.invalid")
    assert "hidden" not in refused(s3_url, "https://no-such-host.invalid cannot be reached")


def test_missing_permission_names_the_action(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(s3_url).put("k", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server_module.READER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server_module.READER[1])
    reader = open_store(s3_url)
    assert reader.get("k") == b"x"
    with pytest.raises(ReadOnlyStore, match=r"no permission to write k \(AccessDenied\); allow .* s3:PutObject"):
        reader.put("k", b"y")
    with pytest.raises(ReadOnlyStore, match="s3:DeleteObject"):
        reader.delete("k")


@pytest.mark.parametrize(
    ("answer", "words", "kind"),
    [
        (
            ("error", 403, "RequestTimeTooSkewed", {"Date": "Mon, 01 Jan 2024 00:00:00 GMT"}),
            "s ahead of the server",
            StoreError,
        ),
        (("error", 403, "ExpiredToken"), "credentials have expired", ReadOnlyStore),
        (
            ("error", 400, "AuthorizationHeaderMalformed", {"x-amz-bucket-region": "eu-west-3"}),
            "set AWS_REGION=eu-west-3",
            StoreError,
        ),
        (("error", 507, "XMinioStorageFull"), "is full", FullStore),
        (("error", 403, "QuotaExceeded"), "is full", FullStore),
        (("error", 503, "SlowDown"), "is overloaded .SlowDown., also after", StoreError),
        (("error", 400, "SomethingNew"), "as the test wants .SomethingNew.", StoreError),
    ],
)
def test_what_a_server_refuses_is_one_sentence(
    s3_url: str, through: Proxy, monkeypatch: pytest.MonkeyPatch, answer: tuple[str], words: str, kind: type[StoreError]
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    store = connected(s3_url)
    through.choose = lambda method, path, number: answer if method == "PUT" else "pass"
    with pytest.raises(kind, match=words) as caught:
        store.put("k", b"x")
    assert re.fullmatch(r"[^\n]+[^.\n]", str(caught.value))


def test_a_reader_that_was_refused_knows_why_though_a_head_says_nothing(s3_url: str, through: Proxy) -> None:
    store = connected(s3_url)
    through.choose = lambda method, path, number: ("error", 403, "ExpiredToken")
    with pytest.raises(ReadOnlyStore, match="have expired"):
        store.size("k")


def test_long_logs_go_on_in_another_object(s3_url: str) -> None:
    store = connected(s3_url)
    line = b"x" * 99_999 + b"\n"
    for _ in range(7):
        store.append("logs/r/s.jsonl", line)
    sizes = {info.key: info.size for info in store.list("logs/r/")}
    assert sizes == {"logs/r/s.jsonl": 300_000, "logs/r/s.jsonl.000001": 300_000, "logs/r/s.jsonl.000002": 100_000}
    connected(s3_url).append("logs/r/s.jsonl", b"end\n")  # another process finds where it goes on
    assert store.size("logs/r/s.jsonl.000002") == 100_004


def test_a_log_in_several_objects_is_read_as_one(s3_url: str) -> None:
    store = connected(s3_url)
    for n in range(30):
        append_log(store, "r", "s", [{"time": n, "n": n, "text": "x" * 20_000}])
        append_log(store, "r", "s2", [{"time": n + 0.5, "n": -n}])
    assert len(list(store.list("logs/r/s.jsonl"))) == 3
    assert [event["n"] for event in read_log(store, "r", "s")] == list(range(30))
    assert [event["n"] for event in read_log(store, "r")] == [m for n in range(30) for m in (n, -n)]


def test_a_store_does_not_see_its_neighbours(s3_url: str) -> None:
    store = connected(s3_url)
    neighbour = open_store(s3_url + "-2")
    neighbour.put("k", b"x")
    open_store(s3_url + "/inner").put("k", b"y")
    assert [info.key for info in store.list("")] == ["inner/k"]
    with pytest.raises(NotInStore):
        store.get("k")


def test_a_forked_process_makes_connections_of_its_own(s3_url: str) -> None:
    code = (
        "import os, sys\n"
        "from stages.artifacts import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store.put('parent', b'1')\n"
        "children = []\n"
        "for n in range(4):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        ok = all(store.put(f'child/{n}/{i}', b'x' * 1000) for i in range(20))\n"
        "        os._exit(0 if ok else 1)\n"
        "    children.append(pid)\n"
        "for n in range(20):\n"
        "    assert store.get('parent') == b'1'\n"
        "assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4\n"
        "assert len(list(store.list('child/'))) == 80\n"
    )
    subprocess.run([sys.executable, "-c", code, s3_url], check=True, timeout=120)


def test_credentials_are_in_no_object(tmp_path: Path, s3_url: str) -> None:
    store = connected(s3_url)
    path, _ = file_of(tmp_path / "file", 100)
    import_files(store, [("a", path)], "source")
    everything = b"".join(store.get(info.key) for info in store.list("")) + store.url.encode() + repr(store).encode()
    assert server_module.ADMIN[0].encode() not in everything
    assert server_module.ADMIN[1].encode() not in everything
