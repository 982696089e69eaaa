"""The pages in a real browser: what a person does with a pointer, with keys alone, on a telephone and in the dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small_store
from served_pages import Served
from small_store import FIRST, SECOND

from stages.artifacts import append_log, canonical_json, import_files, keep_code, read_manifest, write_run
from stages.artifacts.manifest import sha256_hex
from stages.fingerprint import source_hash, stage_fingerprint

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
WAIT = 60_000  # milliseconds; a machine may be busy
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=3 * WAIT)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, served: Served) -> Iterator[Any]:
    """A page that fails the test where a script or the content policy complains."""
    with opened(chromium, served) as made:
        yield made


@contextmanager
def opened(chromium: Any, served: Served, **options: Any) -> Iterator[Any]:
    context = chromium.new_context(base_url=served.url, viewport={"width": 1280, "height": 900}, **options)
    context.set_default_timeout(WAIT)
    made = context.new_page()
    complaints: list[str] = []
    made.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on("dialog", lambda dialog: (complaints.append("a dialog opened"), dialog.dismiss()))
    yield made
    context.close()
    assert complaints == []


def test_one_walks_from_production_to_the_raw_file_and_back(page: Any, served: Served) -> None:
    page.goto("/")
    page.get_by_role("link", name="production", exact=True).click()
    page.get_by_role("link", name="production names").click()
    assert page.locator("h1").inner_text().startswith("grpo")
    for step in ("sft", "base", "corpus", "train.jsonl"):  # each is left of the one before in the picture
        page.locator(".broad a").filter(has_text=step if step != "train.jsonl" else "notes.txt").first.click()
        page.wait_for_url("**/artifact/**")
    page.get_by_role("link", name="train.jsonl", exact=True).click()
    assert "the planted sentence" in page.get_by_role("region", name="Text of the file").inner_text()
    page.get_by_role("link", name="Impact of this file").click()
    assert "9 artifacts were made from it" in page.locator("main").inner_text()
    page.get_by_role("link", name="production").first.click()
    page.wait_for_url("**/ref/production")


def test_two_runs_are_compared(page: Any, served: Served) -> None:
    page.goto("/compare")
    page.get_by_label("One", exact=True).fill(f"{FIRST}/grpo")
    page.get_by_label("Another", exact=True).fill(f"{SECOND}/grpo")
    page.get_by_role("button", name="Compare").click()
    setting = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="setting", exact=True))
    assert setting.inner_text().split() == ["setting", "learning_rate", "0.02", "->", "0.03"]
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="exact match", exact=True))
    assert row.inner_text().split() == ["exact", "match", "0.900", "0.950", "+0.0500"]
    assert page.get_by_role("img", name=re.compile("^loss")).count() == 1


def test_a_changed_line_of_code_is_shown_as_a_diff(page: Any, served: Served) -> None:
    """The loss of the real stage, with one line changed; and a comment elsewhere, which changes nothing."""
    small, known = served.small, stage_fingerprint("dpo", [], [])
    path, sources = "stages/dpo/loss.py", known.sources()
    line = next(text for text in sources[path].decode().splitlines() if "* logsigmoid(" in text)
    changed = line.replace("logsigmoid(", "softplus(", 1)
    edited = sources | {path: sources[path].replace(line.encode(), changed.encode())}
    edited["stages/dpo/stage.py"] += b"# a comment\n"
    for run, kept in (("code-before", sources), ("code-after", edited)):
        files = {name: {"sha256": source_hash(data)} for name, data in kept.items()}
        code = {"digest": "sha256:" + sha256_hex(canonical_json(files)), "files": files}
        small.made[run] = {"dpo": small.publish(run, "checkpoint", {"config.json": run.encode()})}
        more = {"code": code | {"artifact": keep_code(small.store, kept)}, "identity": {"run": run}}
        small.result("dpo", "checkpoint", small.made[run]["dpo"], run, **more)
    page.goto(f"/compare?a={small.made['code-before']['dpo']}&b={small.made['code-after']['dpo']}")
    rows = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="code", exact=True))
    assert rows.count() == 1  # not the file whose comment alone is another
    assert rows.locator("summary").inner_text() == "stages/dpo/loss.py"
    assert rows.locator(".minus").all_inner_texts() == [f"-{line}"]
    assert rows.locator(".plus").all_inner_texts() == [f"+{changed}"]
    assert rows.locator(".hunk").inner_text().startswith("@@ -")


def test_a_live_run_is_followed_without_a_new_load_of_the_page(page: Any, served: Served) -> None:
    store = served.small.store
    steps = {
        "corpus": small_store.step("tokenize", (), "done", reason="never run", seconds=3.0),
        "base": small_store.step("pretrain", ("corpus",), "running", logs="logs/live-run/base.jsonl"),
    }

    def progress(done: int) -> None:
        event = {"time": 1767323041.0, "step": "base", "type": "progress", "done": done, "total": 40, "unit": "step"}
        append_log(store, "live-run", "base", [event | {"figures": {"loss": 5.0 / done}}])

    write_run(store, small_store.document("live-run", "running", steps))
    progress(2)
    page.goto("/run/live-run")
    page.evaluate("window.mark = 'the same page'")
    assert "step 2 of 40 · loss 2.50" in page.locator("main").inner_text()
    summary = page.get_by_text("The recipe as it was")
    summary.click()
    progress(25)
    page.get_by_text("step 25 of 40 · loss 0.200").wait_for()
    steps["base"] |= {"status": "done", "seconds": 60.0, "metrics": {"loss": 0.1}}
    write_run(store, small_store.document("live-run", "done", steps))
    page.locator("#live-steps .state-running").wait_for(state="detached")
    page.get_by_text("took 10m 00s").wait_for()
    assert page.evaluate("window.mark") == "the same page"
    assert page.locator("details[open]").count() == 1
    assert page.evaluate("document.body.dataset.running") == ""  # and it has stopped asking


def test_a_hostile_artifact_is_only_text(page: Any, served: Served, tmp_path: Path) -> None:
    evil = '"><img src=x onerror="document.title=\'taken\'">'
    raw = tmp_path / "x"
    raw.write_text(f"<script>document.title='taken'</script>{evil}")
    source = import_files(served.small.store, [(evil.replace("/", "-"), raw)], "source")
    step = small_store.step("evil", (), "failed", message=evil, reason=evil, artifact=source, logs="logs/evil/s.jsonl")
    write_run(
        served.small.store,
        small_store.document("evil", "failed", {evil: step, "s": step}, recipe=evil, recipe_text=evil),
    )
    append_log(served.small.store, "evil", "s", [{"time": 1.0, "type": "log", "text": evil, "level": "info"}])
    for address in ("/", "/run/evil", "/run/evil/log/s", f"/artifact/{source}", "/search?q=%22%3E%3Cimg"):
        page.goto(address)
        assert page.title() != "taken"
        assert page.locator("main img").count() == 0
    page.goto(f"/artifact/{source}")
    page.locator("#files").locator("xpath=..").get_by_role("link", name=evil, exact=True).click()
    assert evil in page.get_by_role("region", name="Text of the file").inner_text()
    assert page.title() != "taken"


def test_keys_alone_are_enough(page: Any, served: Served) -> None:
    def focused() -> str:
        return str(
            page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        )

    page.goto("/")
    page.keyboard.press("Tab")
    assert focused() == "Skip to the content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert focused() == "production"
    page.keyboard.press("/")
    page.keyboard.type("brave")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search?q=brave")
    page.get_by_role("link", name=SECOND).focus()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/run/{SECOND}")
    page.locator(".broad a").first.focus()
    seen = [focused().partition(" ")[0]]
    for _ in range(5):
        page.keyboard.press("ArrowRight")
        seen.append(focused().partition(" ")[0])
    assert [seen[0], seen[-1]] == ["raw/*.jsonl", "report"]
    page.keyboard.press("ArrowLeft")
    assert focused().startswith("grpo")
    outline = page.evaluate("getComputedStyle(document.activeElement.querySelector('.body')).strokeWidth")
    assert outline == "3.5px"
    page.keyboard.press("Enter")
    page.wait_for_url("**/artifact/**")
    assert page.locator("h1").inner_text().startswith("grpo")


ADDRESSES = (
    "/",
    "/runs",
    f"/run/{SECOND}",
    f"/run/{SECOND}/log",
    "/artifacts",
    "/refs",
    "/ref/production",
    "/search?q=sft",
)


def sha256_of_train(served: Served) -> str:
    files = read_manifest(served.small.store, served.small.source).files
    return next(entry.sha256 for entry in files if entry.path == "train.jsonl")


def addresses(served: Served) -> list[str]:
    """A page of every sort."""
    made = served.small.made[SECOND]
    more = [f"/artifact/{made[step]}" for step in ("grpo", "report", "corpus", "grpo/rollouts")]
    more += [
        f"/artifact/{made['corpus']}/rows",
        f"/artifact/{made['grpo']}/lineage",
        f"/artifact/{made['base']}/children",
    ]
    more += [f"/artifact/{served.small.source}/file/notes.txt", f"/artifact/{made['grpo']}/file/model.safetensors"]
    more += [f"/artifact/{made['grpo']}/check", f"/file/{sha256_of_train(served)}"]
    more += ["/room", f"/run/{SECOND}/why/sft", f"/artifact/{made['sft']}/file/config.json"]
    more += ["/metric/grpo/exact_match", f"/compare?a={FIRST}/grpo&b={SECOND}/grpo", "/nothing"]
    return [*ADDRESSES, *more]


def test_nothing_is_wider_than_a_telephone(chromium: Any, served: Served) -> None:
    with opened(chromium, served) as page:
        page.set_viewport_size({"width": 390, "height": 844})
        for address in addresses(served)[:-1]:
            page.goto(address)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, address
        page.goto(f"/run/{SECOND}")
        boxes = [box.bounding_box() for box in page.locator(".narrow a").all()]
        assert len(boxes) == 6
        assert [box["y"] for box in boxes] == sorted(box["y"] for box in boxes)  # from top to bottom
        assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)
        assert page.locator(".broad").first.is_hidden()


def test_pages_are_dark_where_that_is_preferred(chromium: Any, served: Served) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        with opened(chromium, served, color_scheme=scheme) as page:
            page.goto(f"/run/{SECOND}")
            colours = page.evaluate("['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name])")
            brightness[scheme] = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in colours]
    assert brightness["light"][0] > 230 > 60 > brightness["light"][1]
    assert brightness["dark"][0] < 40 < 200 < brightness["dark"][1]


def test_pages_read_without_scripts(chromium: Any, served: Served) -> None:
    with opened(chromium, served, java_script_enabled=False) as page:
        page.goto(f"/artifact/{served.small.made[SECOND]['grpo']}")
        assert page.get_by_role("img", name=re.compile("^loss")).count() == 1
        page.get_by_role("link", name="Everything it was made from").click()
        assert page.locator(".broad a").count() == 5


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from the npm registry."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", "axe-core@4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        pytest.skip(f"axe-core cannot be installed here: {done.stderr[-200:]}")
    return script.read_text()


@pytest.mark.parametrize(
    ("scheme", "width", "every"),
    [
        ("light", 1280, 2),  # every second sort of page; the slow ones look at all
        pytest.param("light", 1280, 1, marks=pytest.mark.slow),
        pytest.param("dark", 1280, 1, marks=pytest.mark.slow),
        pytest.param("light", 390, 1, marks=pytest.mark.slow),
        pytest.param("dark", 390, 1, marks=pytest.mark.slow),
    ],
)
def test_no_page_has_a_serious_fault_for_people_with_impairments(
    chromium: Any, served: Served, axe: str, scheme: str, width: int, every: int
) -> None:
    found: list[str] = []
    with opened(chromium, served, color_scheme=scheme) as page:
        page.set_viewport_size({"width": width, "height": 900})
        for address in addresses(served)[:-1:every]:
            page.goto(address)
            page.evaluate(axe)  # by the debugger: the pages' own policy lets no other script run
            result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            for violation in result["violations"]:
                nodes = [node["html"][:200] for node in violation["nodes"][:3]]
                found.append(f"{address}: {violation['impact']} {violation['id']} {json.dumps(nodes)}")
    serious = [item for item in found if ": minor" not in item]
    assert not serious, "\n".join(serious)
