"""Nothing that a store holds, and nothing that a visitor asks for, does anything but be shown."""

from __future__ import annotations

import html
import json
import re
import socket
from html.parser import HTMLParser
from pathlib import Path

import pytest
import small_store
from fastapi.testclient import TestClient
from served_pages import Pages, start_browse, stop

from flows.lineage import queries
from flows.lineage.browser.app import create_app
from flows.lineage.browser.guard import host_of, is_loopback
from flows.lineage.browser.rendering import visible
from flows.lineage.browser.serve import Address
from flows.lineage.browser.site import open_site
from stages.artifacts import StoreError, append_log, import_files, read_manifest, write_run

EVIL = "\"><script>alert(1)</script><img src=x onerror='alert(2)'>{{7*7}}"
TAGS = """html head meta title link script noscript body a header div nav ul ol li form label input button main footer
p kbd section h1 h2 h3 span table thead tbody tr th td svg g path rect text tspan circle code time figure figcaption
small b i dl dt dd datalist details summary pre mark progress img br select option"""


class Reader(HTMLParser):
    """Collects what a browser would take for elements and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.bad: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.scripts += tag == "script"
        for name, value in attributes:
            if name.startswith("on") or name in ("style", "srcdoc"):
                self.bad.append(f"{tag} {name}")
            if name in ("href", "src", "action") and not str(value).startswith(("/", "#")):
                self.bad.append(f"{tag} {name}={value}")


def check(text: str) -> None:
    """The page has our elements alone, our one script, no inline script or style, and no address outside."""
    reader = Reader()
    reader.feed(text)
    assert reader.tags <= set(TAGS.split())
    assert reader.scripts == 1
    assert reader.bad == []


def test_hostile_names_are_inert_on_every_page(own_pages: Pages, tmp_path: Path) -> None:
    small = own_pages.small
    raw = tmp_path / "x"
    raw.write_text(f"{EVIL}\n<script>alert(3)</script>")
    name = EVIL.replace("/", "∕")
    source = import_files(small.store, [(name, raw), ("javascript:alert(1)".replace(":", "꞉"), raw)], "source")
    log = (
        json.dumps({"step": 1, EVIL: 2.0}) + "\n" + json.dumps({"step": 2, EVIL: 1.0, "loss": "NaN"}) + "\n"
    ).encode()
    config = json.dumps({"model_type": EVIL, "vocab_size": "<b>"}).encode()
    files = {"config.json": config, "training.jsonl": log, "README.md": EVIL.encode()}
    model = small.publish("evil", "checkpoint", files)
    small.result(
        EVIL,
        "checkpoint",
        model,
        "evil",
        stage="no.such",
        inputs={EVIL: source},
        metrics={EVIL: 1.0},
        config={EVIL: EVIL},
    )
    report = {
        "models": {EVIL: {"exact_match": 1.0}},
        "samples": [{"prompt": EVIL, "answers": {EVIL: {"completion": EVIL}}}],
    }
    told = small.publish("evil-report", "report", {"report.json": json.dumps(report).encode()})
    small.result(
        "report", "report", told, "evil", inputs={f"models.{EVIL}": model}, metrics={f"{EVIL}/exact_match": 1.0}
    )
    step = small_store.step(
        "evil<b>", ("no-step",), "failed", message=EVIL, reason=EVIL, artifact=model, logs="logs/evil/s.jsonl"
    )
    document = small_store.document(
        "evil", EVIL, {EVIL: step, "s": step}, recipe=EVIL, overrides=[EVIL], recipe_text=EVIL, host=EVIL
    )
    write_run(small.store, document)
    append_log(small.store, "evil", "s", [{"time": 1.0, "step": EVIL, "type": "log", "level": EVIL, "text": EVIL}])
    hashed = read_manifest(small.store, source).files[0].sha256
    visited: set[str] = set()
    waiting = ["/", "/runs", "/run/evil", "/run/evil/log/s", f"/search?q={EVIL}", "/artifacts", f"/artifact/{model}"]
    waiting += [
        f"/file/{hashed}",
        f"/compare?a={model}&b={own_pages.digest('sft')}",
        f"/compare?a={EVIL}&b=x",
        f"/run/{EVIL}",
        f"/metric/{EVIL}",
    ]
    while waiting and len(visited) < 120:
        path = waiting.pop(0)
        if path in visited:
            continue
        visited.add(path)
        answer = own_pages.client.get(path)
        if "/raw/" in path:
            assert "sandbox" in answer.headers["content-security-policy"]
            continue
        assert answer.status_code in (200, 400, 404), path
        check(answer.text)
        for found in re.findall(r'href="(/[^"]*)"', answer.text):
            address = html.unescape(found)
            if any(part in address for part in ("evil", model[7:15], source[7:15], told[7:15], "metric", "script")):
                waiting.append(address)
    assert any("/raw/" in path for path in visited)
    assert any(path.startswith("/file/") for path in visited)
    assert any(path.startswith("/metric/") for path in visited)


def test_characters_that_hide_or_turn_text_are_shown() -> None:
    assert visible("gnp\u202excod.exe") == "gnp⟨202E⟩xcod.exe"
    assert visible("a\x1b[31mb\x00") == "a⟨001B⟩[31mb⟨0000⟩"
    assert visible("é日本 \n\tx") == "é日本 \n\tx"
    assert visible("half \ud800") == "half �"


@pytest.mark.parametrize(
    "path",
    [
        "/artifact/{source}/raw/../../../../etc/passwd",
        "/artifact/{source}/raw/..%2f..%2f..%2fetc%2fpasswd",
        "/artifact/{source}/file/%2fetc%2fpasswd",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/run/..%2f..%2fetc",
        "/run/golden-otter/log/..%2f..%2fruns%2fgolden-otter",
        "/ref/..%2fruns%2fgolden-otter",
        "/artifact/..%2f..%2frefs",
        "/file/..%2f..%2frefs",
    ],
)
def test_no_address_leads_out_of_the_store(pages: Pages, path: str) -> None:
    answer = pages.client.get(path.format(source=pages.small.source))
    assert answer.status_code in (400, 404)
    assert "root:" not in answer.text


def test_only_the_own_names_are_answered_to(pages: Pages) -> None:
    for host in ("localhost", "localhost:4780", "127.0.0.1:99", "[::1]:4780", "LOCALHOST"):
        assert pages.client.get("/runs", headers={"host": host}).status_code == 200
    for host in (
        "evil.example",
        "evil.example:4780",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "a@localhost",
        "",
    ):
        answer = pages.client.get("/runs", headers={"host": host})
        assert answer.status_code == 400
        assert "--allow-host" in answer.text
    named = TestClient(create_app(open_site(pages.small.store.url), Address(allowed=("models.example",)).hosts))
    assert named.get("/runs", headers={"host": "models.example"}).status_code == 200


def test_every_answer_forbids_scripts_and_frames_of_others(pages: Pages) -> None:
    for path in ("/", "/nothing", "/static/style.css", f"/artifact/{pages.small.source}/raw/train.jsonl"):
        headers = pages.client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in pages.client.get("/").headers["content-security-policy"]


def test_other_sites_may_link_here_and_load_nothing(pages: Pages) -> None:
    def status(**fetch: str) -> int:
        return pages.client.get(
            "/refs", headers={f"sec-fetch-{name}": value for name, value in fetch.items()}
        ).status_code

    assert status(site="cross-site", mode="navigate", dest="document") == 200
    assert status(site="cross-site", mode="no-cors", dest="image") == 403
    assert status(site="same-origin", mode="cors", dest="empty") == 200


def test_nothing_can_be_written(pages: Pages) -> None:
    before = sorted((info.key, info.modified) for info in pages.small.store.list(""))
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert pages.client.request(method, "/refs").status_code == 405
    for path in ("/", "/runs", "/refs", "/artifacts", f"/artifact/{pages.digest('base')}"):
        pages.text(path)
    assert sorted((info.key, info.modified) for info in pages.small.store.list("")) == before


def test_a_page_of_a_dataset_file_is_no_picture_or_page_of_its_own(own_pages: Pages) -> None:
    files = {
        "page.html": b"<script>alert(1)</script>",
        "fake.png": b"<svg onload=alert(1)>",
        "real.png": b"\x89PNG\r\n\x1a\n...",
    }
    digest = own_pages.small.publish("pictures", "source", files)
    kinds = {path: own_pages.client.get(f"/artifact/{digest}/raw/{path}").headers["content-type"] for path in files}
    assert kinds == {
        "page.html": "application/octet-stream",
        "fake.png": "application/octet-stream",
        "real.png": "image/png",
    }
    assert "&lt;script&gt;" in own_pages.text(f"/artifact/{digest}/file/page.html")


def test_hosts_and_addresses_are_read_as_they_are_meant() -> None:
    assert host_of("[::1]:80") == "[::1]"
    assert host_of("Example.org:80") == "example.org"
    assert [host_of(text) for text in ("", "a b", "a:b:c", "a/b", "u@h")] == ["", "", "", "", ""]
    assert [is_loopback(text) for text in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [True] * 4
    assert [is_loopback(text) for text in ("0.0.0.0", "10.0.0.1", "::", "example.org")] == [False] * 4
    assert "0.0.0.0" not in Address("0.0.0.0").hosts
    assert "192.0.2.1" in Address("192.0.2.1").hosts
    for wrong in (
        {"root": "headrace"},
        {"root": "/a/"},
        {"root": "//a"},
        {"allowed": ("*",)},
        {"allowed": ("http://a/",)},
    ):
        with pytest.raises(StoreError, match="--"):
            Address(**wrong)  # type: ignore[arg-type]


def test_the_command_serves_this_machine_alone_and_ends_when_told(pages: Pages, tmp_path: Path) -> None:
    process, url = start_browse(Path(pages.small.store.url), tmp_path / "cache", "--root-path", "/lineage")
    try:
        assert re.fullmatch(r"http://localhost:\d+/lineage", url)
        port = int(url.split(":")[2].split("/")[0])
        with socket.socket() as probe:
            probe.connect(("127.0.0.1", port))
        other = f"headrace: cannot serve on 127.0.0.1:{port}"
        with pytest.raises(AssertionError, match=re.escape(other)):
            start_browse(Path(pages.small.store.url), tmp_path / "cache", "--port", str(port))
    finally:
        assert stop(process) == 0


def test_a_store_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(AssertionError, match=r"headrace: .*is a file, not a folder"):
        start_browse(tmp_path / "file", tmp_path / "cache")


def test_the_index_names_what_pages_link_to(pages: Pages) -> None:
    index = open_site(pages.small.store.url).index
    for item in queries.artifacts(index):
        pages.text(f"/artifact/{item.digest}")
        pages.text(f"/artifact/{item.digest}/lineage")
        pages.text(f"/artifact/{item.digest}/children")
        for file in queries.files(index, item.digest):
            pages.text(f"/artifact/{item.digest}/file/{file.path}")
            pages.text(f"/file/{file.sha256}")
