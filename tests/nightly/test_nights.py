"""Nights and a backfill on real text that grows (tiny Shakespeare in slices), with real training, in fast motion."""

from __future__ import annotations

import base64
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter
from prefect.testing.utilities import prefect_test_harness

from flows.nightly import nightly
from stages.artifacts import open_store, read_nights, read_ref

ROOT = Path(__file__).resolve().parent.parent.parent
PLAYS = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PLAYS.is_file(), reason="tiny Shakespeare is not at ../shared/data"),
]

RECIPE = """\
name: plays
parameters: {date: null}
steps:
  letters:  # the tokenizer is trained once, so that a model can go on from that of another night
    stage: tokenize
    inputs: {data: first.txt}
    format: text
    train_tokenizer: {vocab_size: 300}
    row_length: 64
  corpus:
    stage: tokenize
    inputs: {data: "text/*.txt", tokenizer: letters}
    format: text
    row_length: 64
  held_out:
    stage: tokenize
    inputs: {data: held-out.txt, tokenizer: letters}
    format: text
    row_length: 64
  base:
    stage: pretrain
    inputs: {data: corpus}
    hidden_size: 32
    num_hidden_layers: 2
    num_attention_heads: 2
    num_key_value_heads: 1
    intermediate_size: 64
    max_steps: 60
    train_batch_size: 8
    learning_rate: 5.0e-3
  report:
    stage: evaluate
    inputs: {models: [base], text: held_out}
    text_split: train
"""


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=600):
        yield


@pytest.fixture
def folder(tmp_path: Path, server: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    text = PLAYS.read_text()
    (tmp_path / "plays.yaml").write_text(RECIPE)
    (tmp_path / "first.txt").write_text(text[:40_000])
    (tmp_path / "held-out.txt").write_text(text[-20_000:])
    (tmp_path / "text").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def add(folder: Path, number: int, name: str = "") -> None:
    """The slice of a night: 60,000 characters more."""
    begin = 60_000 * number
    (folder / "text" / (name or f"slice-{number}.txt")).write_text(PLAYS.read_text()[begin : begin + 60_000])


def night(folder: Path, **parameters: Any) -> Any:
    defaults = {"warm_start": "base.model", "gate": ["bits_per_byte < production"], "overrides": []}
    return nightly(
        str(folder / "plays.yaml"), store=str(folder / "store"), return_state=True, **(defaults | parameters)
    )


def pages(flow_run_id: Any) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(), flow_run_filter=FlowRunFilter(id={"any_": [flow_run_id]})
        )
    return {item.key: item for item in found}


def test_three_nights_promote_find_nothing_and_improve_or_are_refused(folder: Path) -> None:
    store = open_store(folder / "store")
    add(folder, 0)
    first = night(folder)
    assert first.name == "Promoted", first
    base = read_ref(store, "production").artifact

    second = night(folder)
    assert second.name == "Nothing new", second
    assert read_nights(store, "production").nights[-1].run == ""

    add(folder, 1)
    third = night(folder)
    assert third.name == "Promoted", third
    nights = read_nights(store, "production").nights
    assert [item.state for item in nights] == ["promoted", "nothing new", "promoted"]
    last = nights[-1]
    assert (last.start, last.base, last.new) == ("warm", base, "corpus.data: 1 new of 2 files")
    assert last.metrics["bits_per_byte"] < last.production["bits_per_byte"]
    assert last.production["bits_per_byte"] == nights[0].metrics["bits_per_byte"]
    assert read_ref(store, "production").artifact == last.artifact

    add(folder, 2)
    fourth = night(folder, gate=["bits_per_byte < production - 1"])
    assert fourth.name == "Refused", fourth
    assert "does not pass" in fourth.message
    assert read_ref(store, "production").artifact == last.artifact

    from PIL import Image

    found = pages(fourth.state_details.flow_run_id)
    picture = str(found["nightly-production-trend"].data)
    data = base64.b64decode(picture.partition(",")[2])
    assert Image.open(io.BytesIO(data)).size == (800, 320)
    if photographs := os.environ.get("HEADRACE_SCREENSHOTS"):  # docs/images shows it
        (Path(photographs) / "nightly-trend.png").write_bytes(data)
    assert "corpus.data: 1 new of 3 files" in str(found["nightly-production-nights"].data)
    said = subprocess.run(
        [sys.executable, "-m", "flows.cli", "refs", "production", "--history", "--store", "store"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.count("nightly 20") == 2
    assert "bits_per_byte" in said


def test_a_backfill_runs_each_date_as_a_night_of_its_own(folder: Path) -> None:
    add(folder, 0, "2026-11-01.txt")
    add(folder, 1, "2026-11-02.txt")
    ended = night(folder, overrides=["corpus.inputs.data=text/${date}.txt"], dates=["2026-11-01..2026-11-02"], gate=[])
    assert ended.name == "Promoted", ended
    nights = read_nights(open_store(folder / "store"), "production").nights
    assert [(item.date, item.state) for item in nights] == [("2026-11-01", "promoted"), ("2026-11-02", "promoted")]
    assert nights[1].base == nights[0].artifact


def test_a_missing_day_of_data_is_refused_with_the_file_that_is_missing(folder: Path) -> None:
    add(folder, 0, "2026-11-01.txt")
    ended = night(folder, overrides=["corpus.inputs.data=text/${date}.txt"], dates=["2026-11-05"], gate=[])
    assert ended.name == "Failed"
    assert "2026-11-05.txt" in ended.message
