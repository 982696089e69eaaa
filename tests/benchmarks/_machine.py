"""What a figure was measured on, and the environments that peers are measured in."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]


def machine() -> dict[str, object]:
    """CPU, cores, memory (GiB), load of the last minute, and the versions that decide speed."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers")},
    }


def peer_python(name: str, requirement: str) -> str:
    """The interpreter of a virtual environment with `requirement`, made on first use below the temporary folder.

    Args:
        name: of the environment; `HEADRACE_BENCH_<NAME>` names an interpreter to use instead.
        requirement: what pip installs, under our own constraints, so that both sides have the same PyTorch.
    """
    if given := os.environ.get(f"HEADRACE_BENCH_{name.upper()}"):
        return given
    folder = Path(tempfile.gettempdir()) / f"headrace-bench-{name}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing {requirement} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
        subprocess.run([*pip, requirement], check=True)
        (folder / "installed").touch()
    return str(python)
