"""What a killed process leaves beside the folder that it was to make goes with the next one, and nothing else does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.artifacts import HashCache, Store, fetch, publish, pull
from stages.artifacts.temporary import folder_in

HOLD = """
import sys, time
from pathlib import Path
from stages.artifacts.temporary import folder_in
with folder_in(Path(sys.argv[1]), ".out.") as folder:
    (folder / "half").write_text("half")
    print(folder, flush=True)
    time.sleep(600)
"""


def holder(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that makes a folder there and stays in it."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(place)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("copy", [fetch, pull])
def test_what_a_killed_pull_left_is_removed_by_the_next_to_the_same_folder(
    tmp_path: Path, store: Store, copy: Callable[[Store, str, Path], object]
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("text")
    digest = publish(store, tmp_path / "in", "source")
    place = tmp_path / "place"
    dead, left = holder(place)
    end(dead)
    other = place / f".other.{left.name[-32:]}"  # beside another folder
    mine = place / ".out.notes"
    for folder in (other, mine):
        folder.mkdir()
    (place / f".out.{'0' * 32}").symlink_to(tmp_path / "in")
    living, used = holder(place)
    try:
        assert not left.exists()  # the other process has removed it already
        left.mkdir()
        copy(store, digest, place / "out")
        assert not left.exists()
        assert (used / "half").read_text() == "half"
        assert other.exists()
        assert mine.exists()
        assert (tmp_path / "in" / "file").exists()
        assert (place / "out" / "file").read_text() == "text"
    finally:
        end(living)


def test_a_folder_goes_with_an_error_and_stays_where_it_was_renamed(tmp_path: Path) -> None:
    with pytest.raises(KeyError), folder_in(tmp_path / "a", "x-") as folder:
        raise KeyError
    with folder_in(tmp_path / "a", "x-") as folder:
        os.rename(folder, tmp_path / "kept")
    assert list((tmp_path / "a").iterdir()) == []
    assert (tmp_path / "kept").is_dir()


def test_half_a_file_of_remembered_hashes_is_removed_once_it_is_old(tmp_path: Path) -> None:
    old, young = (tmp_path / f"hashes.json.{letter * 32}" for letter in "ab")
    for left in (old, young):
        left.write_text("{")
    os.utime(old, (time.time() - 7200,) * 2)
    hashes = HashCache(tmp_path / "hashes.json")
    hashes.keep("place", [1, 2], "0" * 64)
    hashes.save()
    assert "place" in json.loads((tmp_path / "hashes.json").read_text())
    assert (old.exists(), young.exists()) == (False, True)
