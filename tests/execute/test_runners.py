"""Sizes, memory and GPUs of the process runner."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flows.runners.base import RunnerError
from flows.runners.gpus import GpuPool
from flows.runners.memory import parse_size, session_memory, show_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("500MB", 500_000_000),
        ("2g", 2_000_000_000),
        ("1.5 KiB", 1536),
        ("100", 100),
        ("1ti", 1 << 40),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 gigs", "-1", "0", "1e3", "8iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 8GiB or 500MB"):
        parse_size(text)


def test_sizes_are_shown() -> None:
    assert [show_size(size) for size in (12, 1536, 9 << 30, 3 << 40)] == ["12 bytes", "1.5 KiB", "9.0 GiB", "3.0 TiB"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_memory_counts_all_processes_of_a_session() -> None:
    hold = "import sys, os; data = os.urandom(1 << 20) * 50; print('ready', flush=True); sys.stdin.read()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    used = session_memory(process.pid)
    process.communicate()
    assert 50 << 20 < used < 150 << 20
    assert session_memory(process.pid) == 0


def test_gpus_are_lent_to_one_stage_at_a_time() -> None:
    pool = GpuPool(["0", "1", "3"])
    first = pool.take(2, "a")
    assert first == ["0", "1"]
    second: list[str] = []
    thread = threading.Thread(target=lambda: second.extend(pool.take(2, "b")))
    thread.start()
    thread.join(0.1)
    assert second == []
    pool.give_back(first)
    thread.join()
    assert second == ["0", "1"]
    assert pool.take(0, "c") == []
    with pytest.raises(RunnerError, match=r"step d asks for 4 GPUs \(resources.gpus\), and this machine has 3"):
        pool.take(4, "d")


def test_gpus_are_lent_to_one_process_at_a_time_and_free_when_it_is_killed(tmp_path: Path) -> None:
    names = [f"{tmp_path.name}-{number}" for number in range(2)]  # GPUs that no other test lends
    script = (
        "import sys; from flows.runners.gpus import GpuPool; "
        f"pool = GpuPool({names!r}); print(pool.take(1, 'a'), flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == repr(names[:1])
    pool = GpuPool(names)
    assert pool.take(1, "b") == names[1:]
    process.kill()
    process.wait()
    assert pool.take(1, "c") == names[:1]


def test_gpus_that_the_environment_hides_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "2,3")
    assert GpuPool().take(2, "a") == ["2", "3"]
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RunnerError, match=r"asks for 1 GPU .*has none"):
        GpuPool().take(1, "a")
