"""The command where its surroundings are odd: no output, output that cannot show a character, a folder that is gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.names import free_run_name
from stages.artifacts import Store, open_store, promote, publish, resolve_digest, write_run

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "flows.cli"]


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "HEADRACE_STORE"} | {
        "PYTHONPATH": str(ROOT),
        **more,
    }


def headrace(folder: Path, *arguments: str | bytes, **more: Any) -> subprocess.CompletedProcess[str]:
    more = {"stdout": subprocess.PIPE, "env": environment()} | more
    return subprocess.run([*COMMAND, *arguments], cwd=folder, stderr=subprocess.PIPE, text=True, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store `wärme` with one artifact, whose step a run names."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "größe.txt").write_text("x")
    store = open_store(tmp_path / "wärme")
    digest = publish(store, tmp_path / "files", "source")
    write_run(
        store, {"id": "brave-tern", "started": "2026-01-01T00:00:00+00:00", "steps": {"raw": {"artifact": digest}}}
    )
    return tmp_path


def test_output_that_knows_only_ascii_is_written_with_replacements(folder: Path) -> None:
    done = headrace(folder, "lineage", "raw", "--files", "--store", "wärme", env=environment(PYTHONIOENCODING="ascii"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr??e.txt" in done.stdout


def test_json_for_an_ascii_output_loses_no_character(folder: Path) -> None:
    arguments = ("lineage", "raw", "--files", "--json", "--store", "wärme")
    done = headrace(folder, *arguments, env=environment(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert json.loads(done.stdout) == json.loads(headrace(folder, *arguments).stdout)
    assert "größe.txt" in json.dumps(json.loads(done.stdout), ensure_ascii=False)


def test_a_closed_standard_output_is_no_error(folder: Path) -> None:
    script = f"exec >&-; exec {sys.executable} -m flows.cli plan ./recipe.yaml"
    step = "{stage: tokenize, format: text, row_length: 8, train_tokenizer: {}, inputs: {data: ./words.txt}}"
    (folder / "words.txt").write_text("words")
    (folder / "recipe.yaml").write_text(f"steps: {{a: {step}}}\n")
    done = subprocess.run(["sh", "-c", script], cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_under_standard_output_is_one_sentence(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        done = headrace(folder, "status", "--store", "wärme", stdout=full)
    said = "headrace: no space is left on the disk; free some, or choose a place on another disk\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_current_folder_that_is_gone_is_a_bad_request(folder: Path) -> None:
    (folder / "gone").mkdir()
    script = f"rmdir ../gone; exec {sys.executable} -m flows.cli status"
    done = subprocess.run(
        ["sh", "-c", script], cwd=folder / "gone", env=environment(), stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("headrace: the current folder cannot be used (No such file or directory)")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("status", "--store", b"st\xff"), "its path is not UTF-8 text; give another with --store"),
        (
            ("status", "--store", "x" * 300),
            "cannot be opened: File name too long; give another with --store",
        ),
        (("plan", b"r\xff.yaml"), "is not UTF-8 text; rename the recipe"),
        (("plan", "x" * 300 + ".yaml"), "cannot be read: File name too long."),
        (("plan", "~nosuchuser/x.yaml"), "there is no such home folder."),
    ],
)
def test_a_name_that_no_file_can_have_is_one_sentence(
    folder: Path, arguments: tuple[str | bytes, ...], message: str
) -> None:
    done = headrace(folder, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


HOOK = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
        return None

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("module", ["flows.cli", "typer", "flows.command.listing", "stages.artifacts"])
def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_word(folder: Path, module: str) -> None:
    """The signal comes just when the module is looked for."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    more = {"PYTHONPATH": f"{folder / 'hook'}:{ROOT}", "INTERRUPT_AT": module}
    command = [sys.executable, "-m", "flows", "status", "--store", "wärme"]
    done = subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_model_whose_process_is_killed_says_so_without_a_traceback(folder: Path) -> None:
    digest = publish(open_store(folder / "wärme"), folder / "files", "checkpoint")
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    more = {"PYTHONPATH": f"{folder / 'hook'}:{ROOT}", "INTERRUPT_AT": "stages.sampling.cli"}
    done = headrace(folder, "sample", digest, "hello", "--store", "wärme", env=environment(**more))
    told = "headrace: the process of the model was killed by SIGINT\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", told)


IN_A_CLASS = """
import dataclasses, os, signal, sys

def interrupt(self, owner, name):
    if "flows.command.listing" in sys.modules:
        os.kill(os.getpid(), signal.SIGTERM)

dataclasses.Field.__set_name__ = interrupt
"""


IN_AN_EXEC = """
import sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "flows.command.listing":
            exec("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
        return None

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("hook", [IN_A_CLASS, IN_AN_EXEC])
def test_a_signal_while_a_class_is_made_ends_the_command_without_a_word(folder: Path, hook: str) -> None:
    """Python 3.11 makes a RuntimeError of what is raised there, or an end by SIGINT."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(hook)
    done = headrace(folder, "status", env=environment(PYTHONPATH=f"{folder / 'hook'}:{ROOT}"))
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "")


@pytest.mark.parametrize(
    ("key", "data", "arguments", "said", "left_out"),
    [
        ("runs/old-heron.json", b'{"id": "old-', ["status"], "brave-tern", "runs/old-heron.json in store"),
        ("runs/old-heron.json", b"[]", ["runs"], "brave-tern", "runs/old-heron.json in store"),
        ("runs/old-heron.json", b"[]", ["lineage", "raw"], "source", "runs/old-heron.json in store"),
        ("refs/bad.json", b"{}", ["refs"], "production", "refs/bad.json in store"),
        (f"results/sft/{'ab' * 32}.json", b"{", ["du"], "1 artifact", f"results/sft/{'ab' * 32}.json in store"),
        (f"manifests/ab/{'ab' * 32}.json", b"{", ["du"], "1 artifact", f"manifests/ab/{'ab' * 32}.json in store"),
        ("logs/brave-tern/raw.jsonl", b'{"type": "log", "text": "hi"}\nxx\n{"ty', ["logs"], "hi", "1 of 2 lines"),
    ],
)
def test_a_listing_names_what_is_damaged_and_shows_the_rest(
    folder: Path, key: str, data: bytes, arguments: list[str], said: str, left_out: str
) -> None:
    store = open_store(folder / "wärme")
    promote(store, "production", resolve_digest(store, store_digest(store)), who="me@here")
    store.put(key, data)
    done = headrace(folder, *arguments, "--store", "wärme")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert left_out in done.stderr
    assert done.stderr.count("\n") == 1
    assert headrace(folder, "verify", "--store", "wärme").returncode == (1 if "logs/" not in key else 0)


def store_digest(store: Store) -> str:
    [info] = store.list("manifests/")
    return info.key.rpartition("/")[2].removesuffix(".json")


def test_a_store_whose_only_run_is_damaged_does_not_say_that_there_is_none(folder: Path) -> None:
    store = open_store(folder / "wärme")
    store.put("runs/brave-tern.json", b"{")
    done = headrace(folder, "status", "--store", "wärme")
    assert done.stdout == f"No run of store {folder / 'wärme'} can be read.\n"
    assert "runs/brave-tern.json" in done.stderr
    asked = headrace(folder, "status", "brave", "--store", "wärme")
    assert asked.returncode == 2
    assert "can be read; `headrace verify` names what is damaged" in asked.stderr
    assert free_run_name(store, "brave-tern") == "brave-tern-2"
