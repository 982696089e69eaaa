"""The verbs that look after a store, as a user meets them: what is printed, and the exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.command.store import parse_age
from flows.names import UnknownName
from flows.plan import make_plan
from flows.recipe import load_recipe
from flows.recipe_model import RecipeError
from stages.artifacts import FolderStore, append_log, open_store, publish, read_log, read_run, write_run


@dataclass
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def headrace(folder: Path, *arguments: str) -> Ended:
    """Run the command in this process: starting one takes longer than all that it does here."""
    out, errors = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["headrace", *arguments]
    try:
        with chdir(folder), redirect_stdout(out), redirect_stderr(errors):
            main()
        code: Any = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    return Ended(code or 0, out.getvalue(), errors.getvalue())


def said(folder: Path, *arguments: str) -> Any:
    """What a command prints as JSON."""
    ended = headrace(folder, *arguments, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HEADRACE_STORE", raising=False)
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.txt").write_text(f"{name} " * 200)
        (tmp_path / name / "same.txt").write_text("the same " * 100)
    return tmp_path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_verb_that_is_asked_to_end_leaves_nothing_half_done(folder: Path, number: signal.Signals) -> None:
    headrace(folder, "import", "one", "--ref", "data")
    blob = next(path for path in (folder / ".headrace" / "blobs").rglob("*") if path.is_file())
    blob.unlink()
    os.mkfifo(blob)  # the verb waits here until somebody writes
    command = [sys.executable, "-c", "from flows.__main__ import main; main()", "pull", "data", "out"]
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": root}, stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    while not list(folder.glob(".out.*")) and time.monotonic() < limit:
        time.sleep(0.05)
    process.send_signal(number)
    time.sleep(0.2)
    os.close(os.open(blob, os.O_RDWR))
    assert process.wait(60) == 128 + number
    assert not list(folder.glob("*out*")) + list(folder.glob(".out*"))


def test_a_reference_may_not_be_called_as_nothing_is_and_says_when_it_hides_a_step(folder: Path) -> None:
    one = said(folder, "import", "one")["artifact"]
    write_run(open_store(folder / ".headrace"), {"id": "calm-otter", "started": "2026-01-01", "steps": {"sft": {}}})
    for command in (["promote", one, "none"], ["import", "one", "--ref", "none"]):
        refused = headrace(folder, *command)
        assert refused.returncode == 2
        assert refused.stderr == ("headrace: 'none' means that there is no reference; take another name for one.\n")
    assert headrace(folder, "promote", one, "sft", "--expect", "none").stderr == (
        "headrace: sft is the name of a step too; it means the reference from now on, and calm-otter/sft the step\n"
    )
    assert headrace(folder, "promote", one, "data").stderr == ""


def test_data_is_imported_promoted_rolled_back_and_its_history_shown(folder: Path) -> None:
    one = said(folder, "import", "one", "--ref", "data", "--why", "first delivery")
    two = said(folder, "import", "two")
    assert (one["kind"], one["files"], one["bytes"], one["ref"]) == ("source", 2, 4 * 200 + 9 * 100, "data")
    assert one["artifact"] == publish(open_store(folder / ".headrace"), folder / "one", "source")
    moved = headrace(folder, "promote", two["artifact"], "data", "--why", "second delivery")
    assert moved.stdout == f"data  {two['artifact']}  (entry 2, before: {one['artifact'][7:19]})\n"
    refused = headrace(folder, "promote", one["artifact"], "data", "--expect", one["artifact"])
    assert refused.returncode == 2
    assert f"reference data names {two['artifact']} now, not {one['artifact']}: somebody moved it" in refused.stderr
    assert said(folder, "rollback", "data", "--why", "bad rows")["artifact"] == one["artifact"]
    again = headrace(folder, "rollback", "data")
    assert again.returncode == 2
    assert again.stderr == f"headrace: reference data never named anything before {one['artifact']}.\n"
    assert headrace(folder, "refs").stdout == f"  data                     {one['artifact']}\n"
    history = headrace(folder, "refs", "data", "--history").stdout.splitlines()
    assert [line.split("  ")[-1].strip() for line in history[1:]] == [
        "first delivery",
        "second delivery",
        "back to entry 1 · bad rows",
    ]
    lineage = headrace(folder, "lineage", "data").stdout
    assert "stage import, run import" in lineage
    assert "rows.txt" in lineage


def test_a_model_folder_is_imported_as_a_checkpoint_and_a_pickle_is_refused(folder: Path) -> None:
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    refused = headrace(folder, "import", "model")
    assert refused.returncode == 2
    assert "has its weights as a pickle (pytorch_model.bin)" in refused.stderr
    (model / "model.safetensors").write_bytes(b"x" * 10)
    assert said(folder, "import", "model")["kind"] == "checkpoint"
    nothing = headrace(folder, "import", "nowhere")
    assert nothing.returncode == 2
    assert "there is no file" in nothing.stderr


def test_verify_tells_damage_and_mends_it_from_copies(folder: Path) -> None:
    one = said(folder, "import", "one", "--ref", "data")
    assert headrace(folder, "verify", "data", "--quick").stdout.startswith(
        "ok: 1 artifact, 2 files, 1.7 kB, presence and sizes"
    )
    store = open_store(folder / ".headrace")
    assert isinstance(store, FolderStore)
    [rows] = [info.key for info in store.list("blobs/") if store.get(info.key).startswith(b"one")]
    (store.root / rows).write_text("one_" + "one " * 199)
    assert headrace(folder, "verify", "--quick").returncode == 0  # of the right size
    damaged = headrace(folder, "verify", "data")
    assert damaged.returncode == 1
    assert f"damaged: {rows} (rows.txt of artifact {one['artifact']}): damaged: its bytes have another hash" in (
        damaged.stdout
    )
    assert "headrace verify --repair" in damaged.stdout
    assert headrace(folder, "verify", "--repair").returncode == 1  # there is no copy
    mended = headrace(folder, "verify", "--repair", "--from", "one")
    assert mended.returncode == 0
    assert mended.stdout.startswith(f"mended: {rows}")
    assert headrace(folder, "verify", "data").returncode == 0
    assert headrace(folder, "verify", "--from", "one").returncode == 2


def test_room_is_shown_and_garbage_removed_only_on_request(folder: Path) -> None:
    one = said(folder, "import", "one", "--ref", "data")
    two = said(folder, "import", "two")
    used = said(folder, "du")
    assert (used["blobs"], used["kinds"]["source"]["size"]) == (900 + 800 + 800, 900 + 800 + 800)
    assert headrace(folder, "du").stdout.startswith(
        f"{used['total'] / 1000:.1f} kB in store {folder / '.headrace'}: 2 "
    )
    assert headrace(folder, "gc").stdout == "Nothing to remove: 2 artifacts are kept.\n"
    store = open_store(folder / ".headrace")
    assert isinstance(store, FolderStore)
    for info in store.list(""):
        os.utime(store.root / info.key, (time.time() - 40 * 86400,) * 2)
    shown = headrace(folder, "gc").stdout
    assert "1 × manifest of an artifact that nothing names" in shown
    assert "1 × blob of no artifact that is kept: 800 B" in shown
    assert "Nothing was removed. `headrace gc --delete` removes them." in shown
    assert said(folder, "gc", "--keep", "50d")["garbage"] == []
    assert headrace(folder, "pull", two["artifact"], "out").returncode == 0
    removed = headrace(folder, "gc", "--delete")
    assert "1 artifacts are kept" in removed.stdout
    assert headrace(folder, "pull", two["artifact"], "out2").returncode == 2
    assert headrace(folder, "pull", "data", "out3").returncode == 0
    assert said(folder, "verify", one["artifact"])["ok"]


def test_times_and_options_that_cannot_be_are_refused(folder: Path) -> None:
    assert (parse_age("30d", "--keep"), parse_age("1.5 h", "--keep"), parse_age("90s", "--keep")) == (2592000, 5400, 90)
    with pytest.raises(UnknownName, match="--keep 'soon': give a time such as 30d"):
        parse_age("soon", "--keep")
    for options, words in (
        (["--grace", "5m"], "--grace 5m: at least 10m"),
        (["--grace", "40d"], "--grace 40d is longer than --keep 30d"),
    ):
        ended = headrace(folder, "gc", *options)
        assert ended.returncode == 2
        assert words in ended.stderr
    ended = headrace(folder, "refs", "nothing")
    assert (ended.returncode, ended.stderr.endswith("has no reference nothing; it has none.\n")) == (2, True)


def test_a_secret_never_reaches_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the value of a variable, by its form, and as the password of a URL: in recipes, settings, runs and logs."""
    token = "hf_" + "aB3" * 11
    monkeypatch.setenv("LAB_PASSWORD", 'pass"word\\ü')
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "disabled-by-us")
    store = open_store(tmp_path / "store")
    recipe = tmp_path / "r.yaml"
    text = "steps:\n  a:\n    stage: tokenize\n    format: text\n    row_length: 64\n    train_tokenizer: {}\n"
    text += "    inputs: {data: d.txt}\n"
    (tmp_path / "d.txt").write_text("x")
    for secret, what in ((token, "a token of Hugging Face"), ("s3://me:hunter22@host/b", "the password of a URL")):
        recipe.write_text(f"# for {secret}\n{text}")
        with pytest.raises(RecipeError, match=rf"r\.yaml:1: has {what}, a secret: it would be stored") as caught:
            make_plan(load_recipe(str(recipe)), store)
        assert "hunter22" not in str(caught.value)
        assert token not in str(caught.value)
    write_run(store, {"id": "r", "overrides": [f"a.x={token}"], "why": 'the pass"word\\ü it was'})
    assert read_run(store, "r") == {"id": "r", "overrides": ["a.x=[secret]"], "why": "the [secret] it was"}
    append_log(store, "r", "a", [{"type": "log", "text": 'url s3://me:hunter22@host, pass"word\\ü, disabled-by-us'}])
    assert [event["text"] for event in read_log(store, "r")] == ["url s3://me:[secret]@host, [secret], disabled-by-us"]
    for info in store.list(""):
        assert b"hunter22" not in store.get(info.key)


def test_a_log_cannot_steer_the_terminal_that_it_is_read_on(folder: Path) -> None:
    store = open_store(folder / ".headrace")
    run = {"id": "golden-otter", "recipe": "a\x1b[2Jb", "state": "done", "steps": {"base": {"status": "done"}}}
    write_run(store, run)
    append_log(
        store, "golden-otter", "base", [{"type": "log", "step": "base", "text": "\x1b[32mok\x1b[0m \x1b]0;x\x07"}]
    )
    said = headrace(folder, "logs", "base").stdout + headrace(folder, "status").stdout
    assert "ok ⟨001B⟩]0;x⟨0007⟩" in said
    assert "a⟨001B⟩[2Jb" in said
    assert "\x1b" not in said
    assert "\\u001b" in headrace(folder, "logs", "base", "--json").stdout  # programs get what was said


def test_a_password_in_the_address_of_a_server_is_not_printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://ada:lovelace-1843@127.0.0.1:9/api")
    for verb in (["deploy"], ["doctor"]):
        ended = headrace(folder, *verb)
        assert ended.returncode != 0
        assert "127.0.0.1:9/api" in ended.stdout + ended.stderr
        assert "lovelace" not in ended.stdout + ended.stderr


def test_a_state_that_no_run_can_have_is_refused_with_those_that_there_are(folder: Path) -> None:
    refused = headrace(folder, "runs", "--state", "finished")
    told = "headrace: --state finished: no such state. States: running, done, failed, stopped, killed, lost.\n"
    assert (refused.returncode, refused.stderr) == (2, told)
    assert said(folder, "runs", "--state", "lost") == []
