"""gc removes very many objects in few requests, and whoever publishes beside it waits for what it has begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from s3_proxy import Fault, Proxy

from stages.artifacts import FolderStore, ReadOnlyStore, collect, is_complete, open_store, promote, publish, verify_all
from stages.artifacts.s3 import S3Store


@pytest.fixture
def garbage(tmp_path: Path, s3_url: str) -> str:
    """A bucket with 60 blobs that nothing needs, and an artifact that is named."""
    store = open_store(s3_url)
    for name, count in (("kept", 1), ("gone", 60)):
        folder = tmp_path / name
        folder.mkdir()
        for number in range(count):
            (folder / str(number)).write_text(f"{name} {number}")
        digest = publish(store, folder, "source")
        if name == "kept":
            promote(store, "production", digest, who="me@here")
    return s3_url


def asked(through: Proxy, method: str) -> list[str]:
    """Requests with a method about manifests, blobs or the bucket, but not about the lease of the gc."""
    return [path for made, path, _ in through.requests if made == method and "/leases/" not in path]


def blobs(url: str) -> int:
    return len(list(open_store(url).list("blobs/")))


def test_many_objects_of_a_bucket_are_removed_in_one_request(garbage: str, through: Proxy) -> None:
    found = collect(open_store(garbage), delete=True, retention=0.0, grace=0.0)
    assert len(found.garbage) == 61  # with the manifest
    assert len([path for path in asked(through, "POST") if "delete" in path]) == 1
    assert len(asked(through, "DELETE")) == 1  # one alone needs no list
    assert blobs(garbage) == 1
    assert list(verify_all(open_store(garbage))) == []


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "MissingContentMD5")])
def test_a_server_that_removes_one_object_at_a_time_is_asked_for_many_once(
    garbage: str, through: Proxy, status: int, code: str
) -> None:
    def choose(method: str, path: str, number: int) -> Fault:
        return ("error", status, code) if method == "POST" else "pass"

    through.choose = choose
    store = open_store(garbage)
    assert len(collect(store, delete=True, retention=0.0, grace=0.0).garbage) == 61
    assert len(asked(through, "DELETE")) == 61
    assert blobs(garbage) == 1
    store.delete_many(["doctor/a", "doctor/b"])
    assert len(asked(through, "POST")) == 1


def test_what_a_server_fails_to_remove_among_many_is_tried_alone(garbage: str, through: Proxy) -> None:
    store = open_store(garbage)
    assert isinstance(store, S3Store)
    keys = [info.key for info in store.list("blobs/")]
    errors = "".join(
        f"<Error><Key>{store.prefix}{key}</Key><Code>InternalError</Code><Message>no</Message></Error>"
        for key in keys[:5]
    )
    body = f"<DeleteResult>{errors}</DeleteResult>"
    through.choose = lambda method, path, number: ("answer", 200, body) if method == "POST" else "pass"
    store.delete_many(keys)
    assert {path.partition("?")[0].rpartition("/")[2] for path in asked(through, "DELETE")} == {
        key.rpartition("/")[2] for key in keys[:5]
    }
    assert blobs(garbage) == len(keys) - 5


def test_many_objects_that_may_not_be_removed_are_refused_in_one_sentence(garbage: str, through: Proxy) -> None:
    through.choose = lambda method, path, number: (
        ("error", 403, "AccessDenied") if method in ("POST", "DELETE") else "pass"
    )
    with pytest.raises(ReadOnlyStore, match=r"no permission to delete .*s3:DeleteObject"):
        open_store(garbage).delete_many(["blobs/aa/x", "blobs/aa/y"])


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_ages_are_told_by_the_clock_of_the_server_alone(garbage: str, through: Proxy, ahead: int) -> None:
    """It is an hour ahead or behind: what is young stays, and what is as old as the retention goes."""
    through.choose = lambda method, path, number: ("clock", ahead)
    store = open_store(garbage)
    assert abs(store.now() - time.time() - ahead) < 60
    info = next(store.list("blobs/"))
    assert abs(info.modified - time.time() - ahead) < 300
    assert store.infos([info.key])[info.key].modified == info.modified
    assert collect(store, delete=True, retention=1800.0, grace=1800.0).garbage == []
    assert len(collect(store, delete=True, retention=0.0, grace=0.0).garbage) == 61


@pytest.mark.parametrize(
    ("method", "wanted"), [("GET", "no permission to list .*s3:ListBucket"), ("POST", "s3:DeleteObject")]
)
def test_a_gc_that_may_not_list_or_delete_says_so_and_removes_nothing(
    garbage: str, through: Proxy, method: str, wanted: str
) -> None:
    def choose(made: str, path: str, number: int) -> Fault:
        listing = made == "GET" and "list-type=2" in path
        deletes = made in ("POST", "DELETE") and "/leases/" not in path
        return ("error", 403, "AccessDenied") if (listing if method == "GET" else deletes) else "pass"

    before = blobs(garbage)
    through.choose = choose
    with pytest.raises(ReadOnlyStore, match=wanted):
        collect(open_store(garbage), delete=True, retention=0.0, grace=0.0)
    through.choose = lambda made, path, number: "pass"
    assert blobs(garbage) == before
    assert list(verify_all(open_store(garbage))) == []
    assert len(collect(open_store(garbage), delete=True, retention=0.0, grace=0.0).garbage) == 61


class Slow:
    """A store whose removals wait until they are let go."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def delete_many(self, keys: Iterable[str]) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        self.store.delete_many(keys)


@pytest.mark.parametrize("how", ["publish", "promote"])
def test_who_needs_what_a_slow_gc_has_condemned_waits_for_it(tmp_path: Path, how: str) -> None:
    store = open_store(tmp_path / "store")
    assert isinstance(store, FolderStore)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("old, and wanted again")
    digest = publish(store, tmp_path / "in", "source")
    time.sleep(0.6)
    slow = Slow(store)
    sweeper = threading.Thread(target=lambda: collect(slow, delete=True, retention=0.5, grace=0.5))  # type: ignore[arg-type]
    sweeper.start()
    assert slow.begun.wait(60)  # it has looked at the manifest, and is about to remove it
    ended: list[Any] = []

    def need() -> None:
        try:
            if how == "publish":
                ended.append(publish(store, tmp_path / "in", "source"))
            else:
                ended.append(promote(store, "production", digest, who="me@here"))
        except Exception as error:
            ended.append(error)

    person = threading.Thread(target=need)
    person.start()
    person.join(1.0)
    waited = person.is_alive()
    slow.go_on.set()
    person.join(60)
    sweeper.join(60)
    assert waited
    if how == "publish":
        assert ended == [digest]
        assert is_complete(store, digest)
    else:  # it cannot come back, and nobody is told that it is there
        assert "was removed while reference production was moved to it" in str(ended[0])
    assert [problem for problem in verify_all(store) if "refs/" not in str(problem)] == []
