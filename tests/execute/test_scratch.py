"""Scratch folders: where they lie, whose they are, and what is left of runs that were killed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flows.scratch import ScratchFolders, private_folder
from stages.artifacts import StoreError, open_store


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files, of this test alone."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("HEADRACE_SCRATCH", raising=False)
    return folder


def test_the_scratch_of_a_bucket_is_a_folder_that_other_users_cannot_reach(temporary: Path) -> None:
    made = ScratchFolders(open_store("s3://bucket/x"), "golden-otter").make("base", 1)
    root = temporary / f"headrace-{os.getuid()}"
    assert made.is_relative_to(root)
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_name_that_another_user_has_taken_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    link = temporary / f"headrace-{os.getuid()}"
    link.symlink_to(elsewhere)
    with pytest.raises(StoreError, match="belongs to another user; set TMPDIR to a folder of yours"):
        private_folder("headrace")
    link.unlink()
    link.mkdir()
    uid = os.getuid()
    (temporary / f"headrace-{uid + 1}").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(StoreError, match=f"headrace-{uid + 1} belongs to another user"):
        private_folder("headrace")


def test_runs_of_this_host_whose_process_is_gone_are_named(tmp_path: Path, temporary: Path) -> None:
    store = open_store(tmp_path / "store")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    mine = ScratchFolders(store, "golden-otter")
    mine.make("base", 1)
    root = tmp_path / "store" / "scratch"
    (root / f"quick-eel@{platform.node()}@{child.pid}" / "base-1").mkdir(parents=True)
    (root / f"late-eel@another-host@{child.pid}").mkdir()
    assert mine.sweep() == ["quick-eel"]
    assert len(list(root.iterdir())) == 3  # what was written a moment ago may still be saved from
    mine.close()
    assert len(list(root.iterdir())) == 2
