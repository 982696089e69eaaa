"""The pages of a store that real runs have filled: the miniature of the quickstart, run twice with another beta."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from served_pages import ROOT

from flows.lineage import queries, rows
from flows.lineage.browser.app import create_app
from flows.lineage.browser.site import Site, open_site

# Two runs of the miniature come before the first test; on a machine that is busy they take long.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MINI = ROOT / "tests" / "end_to_end"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("mini")
    for name in ("mini.yaml", "mini_rewards.py"):
        shutil.copy(MINI / name, folder)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for more in ([], ["--set", "dpo.beta=0.2"]):
        command = [sys.executable, "-m", "flows.cli", "run", "mini.yaml", "--no-prefect", "--set", "steps=8", *more]
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE_DIR", str(folder / "cache"))
        yield open_site(str(folder / ".headrace"))


@pytest.fixture(scope="module")
def client(site: Site) -> TestClient:
    return TestClient(create_app(site), base_url="http://localhost")


def text_of(client: TestClient, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, path
    main = answer.text.split('<main id="main"', 1)[1].split("</main>", 1)[0]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", main)).split())


def test_every_page_that_a_page_links_to_is_there(client: TestClient) -> None:
    waiting, visited = ["/"], set()
    while waiting:
        path = waiting.pop()
        if path in visited:
            continue
        visited.add(path)
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "Damaged." not in answer.text, path
        if "text/html" in answer.headers["content-type"]:
            waiting += [html.unescape(found) for found in re.findall(r'href="(/[^"#]*)"', answer.text)]
    sorts = ("/run/", "/artifact/", "/rows", "/lineage", "/file/", "/raw/", "/metric/", "/why/", "/log/", "/check")
    assert all(any(sort in path for path in visited) for sort in sorts)
    assert len(visited) > 300


def test_the_changed_beta_is_what_made_two_models_differ(site: Site, client: TestClient) -> None:
    newer, older = (run.name for run in queries.runs(site.index, limit=2))
    text = text_of(client, f"/compare?a={older}/grpo&b={newer}/grpo")
    assert "dpo setting beta 0.1 -> 0.2" in text
    assert "sft" not in text[text.index("What made them differ") : text.index("Figures")]
    assert "beta 0.1 -> 0.2" in text_of(client, f"/run/{newer}/why/dpo")


def test_a_step_leads_to_the_rows_and_files_that_it_read(site: Site, client: TestClient) -> None:
    base = queries.artifacts(site.index, step="base", limit=1)[0]
    found = rows.consumed(site.index, base.digest, 3)
    answer = client.get(f"/artifact/{base.digest}/step?step=3")
    assert answer.url.path == f"/artifact/{base.digest}/step/3"
    for row in found.rows:
        assert f'<td class="number">{row.row:,}</td>' in answer.text
        for _, _, _, place in row.pieces:
            assert (f'href="/file/{place.sha256}"' if place.sha256 else html.escape(place.source)) in answer.text
    assert client.get(f"/artifact/{base.digest}/step/9").status_code == 404


def test_rows_of_every_sort_of_dataset_are_read(site: Site, client: TestClient) -> None:
    found = {item.step: item.digest for item in queries.artifacts(site.index, kind="dataset")}
    assert "import this" not in text_of(client, f"/artifact/{found['corpus']}/rows")
    assert "Answer:" in text_of(client, f"/artifact/{found['chat']}/rows")
    assert "chosen" in text_of(client, f"/artifact/{found['pairs']}/rows")
    assert "How many" in text_of(client, f"/artifact/{found['prompts']}/rows") or "What is" in text_of(
        client, f"/artifact/{found['prompts']}/rows"
    )


def test_all_that_a_model_was_made_from_passes_its_check(site: Site, client: TestClient) -> None:
    grpo = queries.artifacts(site.index, step="grpo", kind="checkpoint", limit=1)[0]
    assert "All is well" in text_of(client, f"/artifact/{grpo.digest}/check?ancestors=true")
