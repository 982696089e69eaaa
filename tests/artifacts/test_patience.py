"""A run waits for a bucket that is away, and says so; other commands say within a minute that it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_proxy import Proxy

from stages.artifacts import NotInStore, Store, StoreError, open_store, patience, stop_waiting, wait_for_stores

AWAY = ("error", 503, "SlowDown")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What this process says once it waits for stores; botocore itself tries each request once."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_RETRY_MODE", "standard")
    monkeypatch.setattr(patience, "_PAUSE", 0.01)
    said: list[str] = []
    yield said
    patience._seconds = 0.0
    patience._enough.clear()
    patience._away.clear()


def connected(url: str) -> Store:
    store = open_store(url)
    store.put("runs/first", b"1")
    return store


@pytest.mark.parametrize("how", [AWAY, "cut request", ("error", 500, "InternalError")])
def test_a_run_waits_until_the_bucket_is_back_and_says_both_once(
    s3_url: str, through: Proxy, told: list[str], tmp_path: Path, how: object
) -> None:
    store = connected(s3_url)
    (tmp_path / "file").write_text("text" * 1000)
    wait_for_stores(told.append)
    begun = len(through.requests)
    through.choose = lambda method, path, number: how if number < begun + 5 else "pass"
    sha256, _ = store.put_blob(tmp_path / "file")
    assert store.get(f"blobs/{sha256[:2]}/{sha256}") == b"text" * 1000
    assert [sentence.split(" (S3) is ")[1].split(" ")[0] for sentence in told] == ["away", "back"]
    assert through.endpoint in told[0]
    assert "waiting for it up to 10 min" in told[0]


def test_what_only_one_writer_may_put_is_won_by_whoever_put_it_before_an_outage(
    s3_url: str, through: Proxy, told: list[str]
) -> None:
    store = connected(s3_url)
    wait_for_stores(told.append)
    begun = len(through.requests)
    faults = ["lose answer", AWAY, AWAY]
    through.choose = lambda method, path, number: dict(enumerate(faults, begun)).get(number, "pass")
    tag = store.put("runs/mine", b"mine", if_absent=True)
    assert tag is not None
    assert store.put("runs/mine", b"mine", if_absent=True) is None
    begun = len(through.requests)
    assert store.put("runs/mine", b"again", if_match=tag) is not None


def test_answers_that_no_waiting_mends_are_not_waited_for(s3_url: str, through: Proxy, told: list[str]) -> None:
    store = connected(s3_url)
    wait_for_stores(told.append)
    with pytest.raises(NotInStore):
        store.get("runs/none")
    through.choose = lambda method, path, number: ("error", 403, "AccessDenied")
    with pytest.raises(StoreError, match="no permission"):
        store.get("runs/first")
    assert told == []


def test_a_wait_ends_when_its_time_is_over_or_the_run_is_stopped(
    s3_url: str, through: Proxy, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = connected(s3_url)
    through.choose = lambda method, path, number: AWAY
    with pytest.raises(StoreError, match="overloaded"):  # not a run
        store.get("runs/first")
    monkeypatch.setenv("HEADRACE_STORE_WAIT", "0.2")
    wait_for_stores(told.append)
    with pytest.raises(StoreError, match="overloaded"):
        store.get("runs/first")
    monkeypatch.setenv("HEADRACE_STORE_WAIT", "3600")
    patience._away.clear()
    wait_for_stores(told.append)
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            store.get("runs/first")
        except StoreError as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    begun = len(through.requests)
    thread.start()
    while len(through.requests) < begun + 3:
        thread.join(0.01)
    stop_waiting()
    thread.join(60)
    assert "overloaded" in str(failures[0])


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "1e9"])
def test_a_wait_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HEADRACE_STORE_WAIT", text)
    with pytest.raises(StoreError, match=f"HEADRACE_STORE_WAIT is '{text}'; give a number of seconds from 0 to 86400"):
        wait_for_stores()
