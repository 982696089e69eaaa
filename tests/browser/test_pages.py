"""What the pages say of a store, against what is known to be in it."""

from __future__ import annotations

import hashlib
import html
import re

import pytest
import small_store
from fastapi.testclient import TestClient
from served_pages import Pages, pages_of
from small_store import FIRST, SECOND

from flows import figures
from flows.lineage.browser import pieces
from stages.artifacts import append_log, promote, read_manifest, write_run


def plain(page: str) -> str:
    """The text of a page's main part, spaces joined."""
    main = page.split('<main id="main"', 1)[1].split("</main>", 1)[0]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", main)).split())


def hash_of(pages: Pages, digest: str, path: str) -> str:
    return next(entry.sha256 for entry in read_manifest(pages.small.store, digest).files if entry.path == path)


def test_the_overview_leads_to_references_and_runs(pages: Pages) -> None:
    text = pages.text("/")
    assert 'href="/ref/production"' in text
    assert f'href="/run/{SECOND}"' in text
    assert "95.0% exact match" in plain(text)


def test_a_run_shows_each_step_with_state_time_and_reason(pages: Pages) -> None:
    text = pages.text(f"/run/{SECOND}")
    rows = {}
    for row in re.findall(r"<tr id=\"step-\d+\">.*?</tr>", text, re.DOTALL):
        cells = [
            " ".join(re.sub(r"<[^>]+>", " ", cell).split()) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)
        ]
        rows[cells[0]] = cells[1:]
    assert rows["base"][:3] == ["↺ reused", "unchanged", ""]
    assert rows["sft"][:3] == ["✓ done", html.escape("learning_rate 0.02 -> 0.03"), "1m 05s"]
    assert "sft.learning_rate=0.03" in text
    assert f'href="/artifact/{pages.digest("grpo/rollouts", SECOND)}"' in text
    assert "90.0%" not in plain(text)  # the evaluation is this run's
    assert "95.0%" in plain(text)


def test_a_run_says_what_it_cost_and_what_reuse_saved(pages: Pages) -> None:
    assert "3m 15s of CPU spent 2m 10s of CPU saved by reuse" in plain(pages.text(f"/run/{SECOND}"))
    assert "reused 1 time saved 1m 05s of CPU" in plain(pages.text(f"/artifact/{pages.digest('base')}"))
    assert "cost with all before it 4m 20s of CPU" in plain(pages.text(f"/artifact/{pages.digest('grpo')}"))


def test_why_a_step_ran_has_a_page_of_its_own(pages: Pages) -> None:
    assert f'href="/run/{SECOND}/why/sft"' in pages.text(f"/run/{SECOND}")
    text = plain(pages.text(f"/run/{SECOND}/why/sft"))
    assert f"of run {FIRST} : learning_rate 0.02 -> 0.03" in text
    assert f"Run {FIRST} had computed it" in plain(pages.text(f"/run/{SECOND}/why/base"))
    assert "has no step" in pages.text(f"/run/{SECOND}/why/nothing", 404)


def test_two_models_are_compared_down_to_the_setting_that_differs(pages: Pages) -> None:
    page = pages.text("/compare?a=production@2&b=production")
    text = plain(page)
    sft = text[text.index("What made them differ") : text.index("Figures")]
    assert "sft setting learning_rate 0.02 -> 0.03 metrics loss 0.220 → 0.230" in sft
    assert "grpo only its inputs metrics reward 0.900 → 0.950" in sft
    assert "base" not in sft  # the same on both sides
    assert "exact match 0.900 0.950 +0.0500" in text
    assert "byte by byte" in plain(pages.text("/compare?a=production&b=brave-tern/grpo"))
    assert "no move '9'" in plain(pages.text("/compare?a=production@9&b=production", 404))
    assert "No artifact begins with 'nothing'" in plain(pages.text("/compare?a=nothing&b=production", 404))
    for name in (f"{FIRST}/grpo/rollouts", "sft", pages.digest("sft")[7:20], "ref:production"):
        pages.text(f"/compare?a={name}&b=production")


def test_room_is_told_by_kind_run_and_model(pages: Pages) -> None:
    text = plain(pages.text("/room"))
    made = {digest for step, digest in pages.small.made[SECOND].items() if step in ("corpus", "base", "sft", "grpo")}
    size = sum(read_manifest(pages.small.store, digest).size for digest in [*made, pages.small.source])
    assert f"production {pages.digest('grpo', SECOND)[7:19]} 5 {figures.size(size)}" in text
    assert "checkpoint 5 " in text
    assert f"{SECOND} 4 " in text  # its sft, grpo and report, and the rollouts, which it made last


def test_a_run_whose_document_makes_no_sense_is_no_page_and_says_so(own_pages: Pages) -> None:
    write_run(own_pages.small.store, {"id": "odd", "started": 5, "state": "done", "steps": {"a": {"outputs": 7}}})
    answer = own_pages.client.get("/run/odd")
    assert answer.status_code == 500
    assert "could not be made" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    own_pages.text("/runs")


def test_the_graph_of_a_run_has_every_step_and_what_came_from_outside(pages: Pages) -> None:
    picture = pages.text(f"/run/{FIRST}").split("<svg width", 3)[2]
    labels = re.findall(r'<a href="([^"]+)" class="look-(\w+)[^"]*" aria-label="([^"]+)"', picture)
    assert [(look, label.partition(" ")[0]) for _, look, label in labels] == [
        ("source", "raw/*.jsonl"),
        ("done", "corpus"),
        ("done", "base"),
        ("done", "sft"),
        ("done", "grpo"),
        ("done", "report"),
    ]
    assert labels[0][0] == f"/artifact/{pages.small.source}"


def test_an_artifact_shows_files_with_digests_its_record_and_its_relatives(pages: Pages) -> None:
    digest = pages.digest("sft")
    text = pages.text(f"/artifact/{digest}")
    assert digest in text
    for entry in read_manifest(pages.small.store, digest).files:
        assert f'href="/file/{entry.sha256}"' in text
        assert entry.path in text
    for other in ("base", "corpus", "grpo", "report"):
        assert f'href="/artifact/{pages.digest(other)}"' in text
    assert "learning_rate" in text
    assert "stages/sft/stage.py" in text
    assert "Damaged" not in text


def test_the_first_digits_of_a_digest_lead_to_the_artifact(pages: Pages) -> None:
    digest = pages.digest("sft")
    answer = pages.client.get(f"/artifact/{digest[7:19]}", follow_redirects=False)
    assert answer.status_code == 307
    assert answer.headers["location"] == f"/artifact/{digest}"
    assert "No artifact begins" in pages.text("/artifact/sha256:abcdef123", 404)


def test_a_checkpoint_shows_its_curves_and_how_it_was_evaluated(pages: Pages) -> None:
    text = pages.text(f"/artifact/{pages.digest('grpo')}")
    assert "training: 1.00 at step 1, " in text
    assert 'aria-label="reward. 0 at step 1, 0.967 at step 30' in text
    assert "0.900" in plain(text)  # exact match, from the report that measured it
    base = pages.text(f"/artifact/{pages.digest('base')}")
    assert "validation: " in base


def test_a_report_shows_its_table_and_samples(pages: Pages) -> None:
    text = plain(pages.text(f"/artifact/{pages.digest('report')}"))
    assert "grpo 1.90 90.0%" in text
    assert "What is 31 - 17?" in text
    assert "grpo ✓ right Answer: 14" in text
    assert "sft ✗ wrong Answer: 13" in text


def test_rows_of_a_dataset_are_decoded_with_the_mask_of_the_loss(pages: Pages) -> None:
    text = pages.text(f"/artifact/{pages.digest('corpus')}/rows")
    made = small_store.tokenizer()
    expected = []
    for document in small_store.DOCUMENTS:
        ids = made.encode(document).ids
        expected.append((made.decode(ids[:5]), made.decode(ids[5:])))
        assert "".join(expected[-1]) == document
    first = text.split('<div class="row">', 2)[1]
    shown = re.findall(r'<div class="document">(.*?)<mark title="\d+ tokens">(.*?)</mark></div>', first)
    assert [(html.unescape(read), html.unescape(trained)) for read, trained in shown] == expected
    assert "Row 0 · 3 documents" in plain(text)
    last = pages.text(f"/artifact/{pages.digest('corpus')}/rows?split=train&page=2")
    assert "Row 10 ·" in plain(last)
    assert "Row 12 ·" not in plain(last)
    assert "no rows of split" in pages.text(f"/artifact/{pages.digest('corpus')}/rows?split=nothing", 404)


def test_rollouts_are_shown_and_paged_over_row_groups(pages: Pages) -> None:
    digest = pages.digest("grpo/rollouts")
    assert "What is 19 + 1?" in pages.text(f"/artifact/{digest}")
    last = plain(pages.text(f"/artifact/{digest}/file/rollouts.parquet?page=2"))
    assert [f"What is {number} + 1?" in last for number in (39, 40, 44)] == [False, True, True]
    assert "page 3 of 3" in last


def test_a_file_leads_to_everything_made_from_it_and_the_references_there(pages: Pages) -> None:
    planted = hash_of(pages, pages.small.source, "train.jsonl")
    text = pages.text(f"/file/{planted}")
    told = plain(text)
    made = {digest for run in pages.small.made.values() for digest in run.values()}
    assert len(made) == 9  # the rollouts of both runs are the same bytes
    assert "9 artifacts were made from it: 5 checkpoints, 1 dataset, 2 reports, 1 rollouts" in told
    assert all(f'href="/artifact/{digest}"' in text for digest in made)
    assert 'href="/ref/production"' in text
    weights = hash_of(pages, pages.digest("grpo", FIRST), "model.safetensors")
    other = pages.text(f"/file/{weights}")
    assert pages.digest("base") not in other
    assert "1 artifact was made from it: 1 report" in plain(other)
    assert "No reference points there" in plain(other)  # production has moved on
    assert 'href="/ref/production"' in other  # but once did


def test_names_digests_metrics_and_files_are_found(pages: Pages) -> None:
    assert 'href="/ref/production"' in pages.text("/search?q=produc")
    assert f'href="/run/{SECOND}"' in pages.text("/search?q=brave")
    assert 'href="/metric/grpo/exact_match"' in pages.text("/search?q=exact_match")
    assert f'href="/file/{hash_of(pages, pages.small.source, "notes.txt")}"' in pages.text("/search?q=notes.t")
    digest = pages.digest("base")
    assert f'href="/artifact/{digest}"' in pages.text(f"/search?q={digest[7:15]}")
    assert "Nothing is called" in pages.text("/search?q=nothing-of-that-name")
    values = plain(pages.text("/metric/grpo/exact_match"))
    assert "0.950" in values
    assert "0.900" in values


def test_a_reference_shows_its_moves_figures_and_commands(pages: Pages) -> None:
    text = pages.text("/ref/production")
    told = plain(text)
    assert "exact match 95.0% vs 90.0%" in told
    assert re.search(r"3 \d+ \w+.*95\.0%.*2 \d+ \w+.*90\.0%.*1 \d+ \w+.*30\.0%", told)
    assert f"headrace rollback production --store {pages.small.store.url}" in told
    assert f"headrace promote ARTIFACT production --store {pages.small.store.url}" in told
    first, second = pages.digest("grpo", FIRST), pages.digest("grpo", SECOND)
    assert f"a={first.replace(':', '%3A')}&amp;b={second.replace(':', '%3A')}" in text
    assert "0.900" in plain(pages.text("/ref/production?metric=reward"))
    assert "no reference nothing" in pages.text("/ref/nothing", 404)


def test_a_long_file_is_shown_in_pieces_of_whole_lines(pages: Pages) -> None:
    path = f"/artifact/{pages.small.source}/file/notes.txt"
    whole = "".join(f"line {number} of the notes\n" for number in range(6000))
    seen, at = "", 0
    while True:
        text = pages.text(f"{path}?at={at}")
        piece = html.unescape(re.search(r'<pre class="piece"[^>]*>(.*?)</pre>', text, re.DOTALL)[1])  # type: ignore[index]
        assert len(piece) <= pieces.PIECE
        seen += piece
        found = re.search(r'rel="next" href="[^"]*at=(\d+)"', text)
        if found is None:
            break
        at = int(found[1])
    assert seen == whole


def test_a_file_is_downloaded_as_it_is(pages: Pages) -> None:
    answer = pages.client.get(f"/artifact/{pages.small.source}/raw/train.jsonl")
    assert answer.content.decode().startswith(small_store.LEAKED)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-checksum-sha256"] == hashlib.sha256(answer.content).hexdigest()


def test_the_log_of_a_step_is_read_in_pieces_from_its_end(own_pages: Pages) -> None:
    events = [{"time": 1767323040.0 + n, "step": "sft", "type": "log", "text": f"said {n}"} for n in range(4000)]
    append_log(own_pages.small.store, FIRST, "sft", events)
    text = own_pages.text(f"/run/{FIRST}/log/sft")
    assert "said 3999" in text
    assert "said 1<" not in text
    assert len(re.findall("<li>", text)) < 1200
    earlier = re.search(r'rel="prev" href="([^"]+)"', text)
    assert earlier is not None
    assert "said 3999" not in own_pages.text(html.unescape(earlier[1]))
    assert "sft begins" in own_pages.text(f"/run/{FIRST}/log/sft?at=0")
    assert "said 3999" in own_pages.text(f"/run/{FIRST}/log")


def test_a_running_step_shows_how_far_it_is(own_pages: Pages) -> None:
    steps = {
        "corpus": small_store.step("tokenize", (), "running", logs="logs/new-run/corpus.jsonl", reason="never run")
    }
    write_run(own_pages.small.store, small_store.document("new-run", "running", steps))
    event = {"time": 1767323041.0, "step": "corpus", "type": "progress", "done": 7, "total": 40, "unit": "step"}
    append_log(own_pages.small.store, "new-run", "corpus", [event | {"figures": {"loss": 2.5, "seconds_left": 20}}])
    text = own_pages.text("/run/new-run")
    assert "step 7 of 40 · loss 2.50 · 20 s left" in plain(text)
    assert 'max="40" value="7"' in text
    assert 'data-running="yes"' in text
    assert "data-running" not in own_pages.text(f"/run/{FIRST}").split("<main")[0]


def test_a_move_of_a_reference_is_seen_at_the_next_look(own_pages: Pages) -> None:
    own_pages.text("/refs")
    promote(own_pages.small.store, "staging", own_pages.digest("base"), who="ada@mill", why="to try")
    assert "to try" in own_pages.text("/ref/staging")


def test_a_damaged_file_is_shown_to_be_and_never_handed_out(own_pages: Pages) -> None:
    digest = own_pages.digest("report")
    blob = next(entry for entry in read_manifest(own_pages.small.store, digest).files)
    own_pages.small.store.put(blob.blob, b" " * blob.size)
    text = own_pages.text(f"/artifact/{digest}")
    assert "Damaged" in text
    assert "have another hash" in text
    assert "have another hash" in own_pages.text(f"/artifact/{digest}/file/report.json", 500)
    assert "have another hash" in own_pages.text(f"/artifact/{digest}/raw/report.json", 500)


def test_a_large_file_is_downloaded_whole_or_breaks_off(own_pages: Pages) -> None:
    data = bytes(range(256)) * (3 << 12) * 2  # 6 MiB, in pieces
    digest = own_pages.small.publish("large", "source", {"large.bin": data})
    address = f"/artifact/{digest}/raw/large.bin"
    assert own_pages.client.get(address).content == data
    entry = read_manifest(own_pages.small.store, digest).files[0]
    own_pages.small.store.put(entry.blob, data[:-1] + b"x")
    with pytest.raises(RuntimeError, match="response already started"):  # a server closes the connection then
        TestClient(own_pages.client.app, base_url="http://localhost").get(address)


def test_a_check_finds_a_changed_byte_that_no_page_shows(own_pages: Pages) -> None:
    grpo, base = own_pages.digest("grpo"), own_pages.digest("base")
    address = f"/artifact/{grpo}/check?ancestors=true"
    assert "All is well : 5 artifacts" in plain(own_pages.text(address))
    weights = next(e for e in read_manifest(own_pages.small.store, base).files if e.path == "model.safetensors")
    own_pages.small.store.put(weights.blob, b"x" * weights.size)
    assert "All is well : 1 artifact," in plain(own_pages.text(f"/artifact/{grpo}/check"))
    text = plain(own_pages.text(address))
    assert "1 damaged of 5 artifacts" in text
    assert weights.blob in text
    assert "model.safetensors" in text


def test_missing_bytes_a_damaged_manifest_and_a_damaged_record_are_told(own_pages: Pages) -> None:
    store = own_pages.small.store
    sft, base = own_pages.digest("sft"), own_pages.digest("base")
    store.delete(next(entry.blob for entry in read_manifest(store, sft).files if entry.path == "config.json"))
    assert "config.json: its bytes" in own_pages.text(f"/artifact/{sft}")
    store.put(f"manifests/{base[7:9]}/{base[7:]}.json", b'{"files": [], "kind": "checkpoint"}')
    assert "is damaged: its content has another hash" in own_pages.text(f"/artifact/{base}")
    record = next(info.key for info in store.list("results/sft/"))
    store.put(record, b'{"artifact": 1}')
    store.put("refs/production.json", b"{}")
    text = own_pages.text("/")
    assert record in text
    assert "refs/production.json" in text
    assert "is not a reference" in own_pages.text("/ref/production", 500)
    own_pages.text(f"/artifact/{sft}")  # the page stands without the record


def test_what_is_not_there_is_one_sentence(pages: Pages) -> None:
    assert "There is no run 'nothing'" in plain(pages.text("/run/nothing", 404))
    assert "no step 'nothing'" in plain(pages.text(f"/run/{FIRST}/log/nothing", 404))
    assert "This store has no artifact" in plain(pages.text(f"/artifact/sha256:{'0' * 64}", 404))
    assert "No artifact of this store holds a file" in plain(pages.text(f"/file/{'0' * 64}", 404))
    assert "has no file" in plain(pages.text(f"/artifact/{pages.small.source}/file/nothing", 404))
    assert "no page at this address" in plain(pages.text("/nothing", 404))
    assert "whole number" in plain(pages.text("/runs?page=x", 400))


def test_behind_a_proxy_every_address_is_below_its_path(pages: Pages) -> None:
    client = pages_of(pages.small, "/tools/headrace").client
    for path in ("/run/golden-otter", "/tools/headrace/run/golden-otter"):  # a proxy may take the path away or leave it
        text = client.get(path).text
        found = re.findall(r'(?:href|src|action)="(/[^"]*)"', text)
        assert found
        assert all(address.startswith("/tools/headrace/") for address in found)
    assert client.get("/tools/headrace/static/style.css").status_code == 200
