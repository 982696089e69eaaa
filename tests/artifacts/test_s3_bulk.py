"""Many small files and a bucket: the client of compiled code, and what goes back to botocore where it cannot go on."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path

import pytest
import s3_server as server_module
from s3_proxy import Proxy

from stages.artifacts import Damaged, ReadOnlyStore, fetch, is_complete, open_store, publish, verify_all
from stages.artifacts.s3 import S3Store

BUCKET = "headrace-tests"
COMPILED = "object_store/"  # how that client names itself


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A folder with more small files than are looked up one by one."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_bytes(b"%d " % number * 100)
    return folder


def opened(url: str) -> S3Store:
    store = open_store(url)
    assert isinstance(store, S3Store)
    return store


def agents(proxy: Proxy, method: str) -> list[bool]:
    """Of each request with a method for a blob: whether the compiled client made it."""
    asked = [(headers, path) for made, path, headers in proxy.requests if made == method and "/blobs/" in path]
    found = [{name.lower(): value for name, value in headers.items()} for headers, path in asked if "list" not in path]
    return [headers["user-agent"].startswith(COMPILED) for headers in found]


def test_small_files_go_by_the_compiled_client_and_the_server_checks_them(
    s3_url: str, through: Proxy, many: Path, tmp_path: Path
) -> None:
    store = opened(s3_url)
    digest = publish(store, many, "source")
    assert agents(through, "PUT") == [True] * 60
    fetch(store, digest, tmp_path / "out")
    assert sum(agents(through, "GET")) == 20  # the first ones are not worth loading it
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in many.iterdir()
    }
    data = (many / "7.txt").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    key = f"{store.prefix}blobs/{sha256[:2]}/{sha256}"
    head = store.client.head_object(Bucket=BUCKET, Key=key, ChecksumMode="ENABLED")
    assert base64.b64decode(head["ChecksumSHA256"]).hex() == sha256


def test_a_busy_or_broken_connection_is_left_to_botocore_which_waits(
    s3_url: str, through: Proxy, many: Path, tmp_path: Path
) -> None:
    store = opened(s3_url)
    kinds = ("slow down", "cut request", "cut answer", "lose answer")

    def choose(method: str, path: str, number: int) -> str:
        compiled = str(through.requests[-1][2].get("user-agent", "")).startswith(COMPILED)
        return kinds[number % 4] if compiled and number % 3 == 0 else "pass"

    through.choose = choose
    digest = publish(store, many, "source")
    fetch(store, digest, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 60
    through.choose = lambda method, path, number: "pass"
    assert list(verify_all(store)) == []
    assert not all(agents(through, "PUT"))


def test_what_is_refused_is_said_in_one_sentence_as_ever(
    s3_url: str, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server_module.READER[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server_module.READER[1])
    with pytest.raises(ReadOnlyStore, match=r"no permission to write blobs/.* \(AccessDenied\); allow .* s3:PutObject"):
        publish(opened(s3_url), many, "source")


def test_a_flipped_bit_of_a_small_file_is_never_served(s3_url: str, through: Proxy, many: Path, tmp_path: Path) -> None:
    store = opened(s3_url)
    digest = publish(store, many, "source")
    through.choose = lambda method, path, number: "flip" if method == "GET" and "/blobs/" in path else "pass"
    with pytest.raises(Damaged, match="bytes have another hash"):
        fetch(store, digest, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_has_other_bytes_by_now_is_not_put_under_the_old_name(s3_url: str, many: Path) -> None:
    store = opened(s3_url)
    bulk = store._bulk_client()
    assert bulk is not None
    sha256 = hashlib.sha256((many / "1.txt").read_bytes()).digest()
    (many / "1.txt").write_bytes(b"other")
    assert not bulk.put("blobs/aa/x", many / "1.txt", sha256)
    assert not bulk.put("blobs/aa/x", many / "gone", sha256)
    assert list(store.list("")) == []


def test_a_process_that_was_forked_uses_botocore_alone(s3_url: str, many: Path) -> None:
    """The threads of the compiled client are its parent's."""
    store = opened(s3_url)
    assert store._bulk_client() is not None
    publish(store, many, "source")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            (many / "new.txt").write_text("new")
            publish(store, many, "dataset")
            code = 0 if store._bulk_client() is None else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert list(verify_all(store)) == []


@pytest.mark.parametrize(("name", "value"), [("HEADRACE_S3_SSE", "AES256"), ("prefix", "with space")])
def test_what_only_botocore_knows_is_left_to_it(
    s3_url: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    store = opened(f"{s3_url}/{value}" if name == "prefix" else s3_url)
    assert store._bulk_client() is None


def test_one_look_at_artifacts_that_share_blobs_asks_for_each_blob_once(
    s3_url: str, through: Proxy, many: Path
) -> None:
    store = opened(s3_url)
    one, other = (publish(store, many, kind) for kind in ("source", "dataset"))
    seen: dict[str, int] = {}
    assert is_complete(store, one, seen)
    begun = len(through.requests)
    assert is_complete(store, other, seen)
    assert len(through.requests) - begun == 1  # its manifest
    store.delete(next(iter(seen)))
    assert not is_complete(store, other)  # another look
