"""OpenLineage events reach a server, and never fail a run; logs are followed to the end of a run."""

from __future__ import annotations

import importlib
import json
import pkgutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flows.command import listing
from flows.lineage import openlineage
from stages.artifacts import LogTail, Store, StoreError, append_log, open_store, write_run

pytest.importorskip("openlineage.client")

RUN: dict[str, Any] = {
    "id": "golden-otter",
    "recipe": "nightly",
    "state": "failed",
    "started": "2026-01-02T03:04:00+00:00",
    "finished": "2026-01-02T03:05:00+00:00",
    "steps": {
        "corpus": {"stage": "tokenize", "status": "cached", "artifact": "sha256:" + "1" * 64},
        "sft": {"stage": "sft", "status": "failed", "message": "it broke", "inputs": {"data": "corpus"}},
    },
}


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    """Where a run's document lies is nothing to its events."""
    return open_store(tmp_path / "store")


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that takes OpenLineage events, and what it got."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/api/v1/lineage"
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", got
        listening.shutdown()
        thread.join()


def test_a_failed_run_is_told_to_a_server(folder_store: Store, server: tuple[str, list[dict[str, Any]]]) -> None:
    write_run(folder_store, RUN)
    url, got = server
    assert openlineage.emit(openlineage.run_events(folder_store, "golden-otter"), url=url) == 6
    states = [(event["job"]["name"], event["eventType"]) for event in got]
    assert states == [
        ("nightly", "START"),
        ("nightly.corpus", "START"),
        ("nightly.corpus", "COMPLETE"),
        ("nightly.sft", "START"),
        ("nightly.sft", "FAIL"),
        ("nightly", "FAIL"),
    ]
    failed = got[4]
    assert failed["run"]["facets"]["errorMessage"]["message"] == "it broke"
    assert failed["run"]["facets"]["parent"]["run"]["runId"] == got[0]["run"]["runId"]
    assert failed["inputs"][0]["facets"]["version"]["datasetVersion"] == "sha256:" + "1" * 64
    tags = {tag["key"]: tag["value"] for tag in got[2]["run"]["facets"]["tags"]["tags"]}
    assert tags["headrace.status"] == "cached"


def test_every_facet_has_what_the_librarys_class_of_its_schema_asks_for(folder_store: Store) -> None:
    """The package ships no JSON schemas; its classes are generated from them, and name what is required and allowed."""
    import attr
    import openlineage.client.generated as generated
    from openlineage.client.serde import Serde

    classes = {}
    for module in pkgutil.iter_modules(generated.__path__):
        found = vars(importlib.import_module(f"{generated.__name__}.{module.name}")).values()
        classes |= {each._get_schema(): each for each in found if hasattr(each, "_get_schema")}
    write_run(folder_store, RUN)
    checked = set()
    for event in openlineage.run_events(folder_store, "golden-otter"):
        value = json.loads(Serde.to_json(event))
        datasets = [*value["inputs"], *value["outputs"]]
        holders = [value["run"], value["job"], *datasets]
        facets = [facet for holder in holders for facet in (holder.get("facets") or {}).values()]
        facets += [facet for each in datasets for facet in (each.get("outputFacets") or {}).values()]
        for facet in facets:
            fields = attr.fields(classes[facet["_schemaURL"]])
            required = {field.name for field in fields if field.default is attr.NOTHING}
            assert required <= facet.keys() <= {field.name for field in fields}, facet
            checked.add(facet["_schemaURL"].rpartition("/")[2])
    assert checked >= {"JobTypeJobFacet", "ParentRunFacet", "ProcessingEngineRunFacet", "TagsRunFacet"}
    assert checked >= {"ErrorMessageRunFacet", "DatasetVersionDatasetFacet"}


def test_each_run_reports_where_the_environment_says(
    folder_store: Store, server: tuple[str, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(folder_store, RUN)
    url, got = server
    openlineage.report(folder_store, "golden-otter")  # nothing is configured: nothing is sent
    assert got == []
    monkeypatch.setenv("OPENLINEAGE_URL", url)
    openlineage.report(folder_store, "golden-otter")
    assert len(got) == 6


def test_a_server_that_is_not_there_is_a_warning_for_a_run_and_an_error_for_the_verb(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(folder_store, RUN)
    nowhere = "http://127.0.0.1:9"
    for name, value in (("TYPE", "http"), ("URL", nowhere), ("RETRY", '{"total": 0}')):
        monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{name}", value)
    openlineage.report(folder_store, "golden-otter")
    assert "events of run golden-otter were not sent" in capsys.readouterr().err
    with pytest.raises(StoreError, match="cannot be written"):
        openlineage.emit(openlineage.run_events(folder_store, "golden-otter"), url=nowhere)


def test_a_run_that_goes_on_has_no_events_yet(folder_store: Store) -> None:
    write_run(folder_store, RUN | {"state": "running"})
    with pytest.raises(StoreError, match="still goes on"):
        list(openlineage.run_events(folder_store, "golden-otter"))


def test_a_tail_gives_each_event_once_and_none_in_part(store: Store) -> None:
    tail = LogTail(store, "golden-otter")
    assert tail.new() == []
    append_log(store, "golden-otter", "sft", [{"time": 2.0, "text": "b"}])
    append_log(store, "golden-otter", "corpus", [{"time": 1.0, "text": "a"}])
    assert [event["text"] for event in tail.new()] == ["a", "b"]
    assert tail.new() == []
    store.append("logs/golden-otter/sft.jsonl", b'{"time": 3.0, "te')
    assert tail.new() == []
    store.append("logs/golden-otter/sft.jsonl", b'xt": "c"}\n')
    assert [event["text"] for event in tail.new()] == ["c"]


def test_logs_are_followed_until_the_run_has_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listing, "FOLLOW_SECONDS", 0.05)
    write_run(store, RUN | {"state": "running"})

    def work() -> None:
        for number in range(5):
            append_log(
                store, "golden-otter", "sft", [{"type": "log", "time": number, "step": "sft", "text": f"n{number}"}]
            )
        write_run(store, RUN)

    worker = threading.Thread(target=work)
    worker.start()
    listing.logs(store.url, "golden-otter", None, follow=True, as_json=True)
    worker.join()
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == [f"n{n}" for n in range(5)]


def test_logs_of_a_step_whose_name_begins_a_run_are_those_of_the_step(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"dp": {"status": "done"}, "gold": {"status": "done"}}
    for number, name in enumerate(("golden-otter", "wide-tern")):
        write_run(store, RUN | {"id": name, "started": f"2026-11-30T1{number}:00:00+00:00", "steps": steps})
        append_log(store, name, "gold", [{"type": "log", "time": 1.0, "step": "gold", "text": f"from {name}"}])
    listing.logs(store.url, "gold", None, as_json=False)
    assert "from wide-tern" in capsys.readouterr().out
    listing.logs(store.url, "golden", None, as_json=False)
    assert "from golden-otter" in capsys.readouterr().out
    write_run(
        store,
        RUN | {"id": "last-heron", "started": "2026-11-30T13:00:00+00:00", "steps": {"gold": {"status": "cached"}}},
    )
    listing.logs(store.url, "gold", None, as_json=False)
    assert "It was computed in another: headrace logs wide-tern gold" in capsys.readouterr().out
