"""docs/benchmarks.md: each benchmark has its own section, and missed goals are shown as missed."""

import subprocess
import sys

from tests.benchmarks.__main__ import names, section, write_section
from tests.benchmarks._machine import ROOT, machine

RESULT = {
    "benchmark": "one",
    "ratios": {"speed_over_peer": 1.5, "memory_over_peer": 0.75, "other": 12345.6},
    "goals": {"speed_over_peer": [">=", 1.0], "memory_over_peer": ["<=", 0.5]},
    "machine": {"cpu": "some"},
}


def test_a_goal_is_shown_as_met_or_missed():
    text = section(RESULT, "2026-01-01")
    assert "| speed over peer | 1.5 | at least 1: met |" in text
    assert "| memory over peer | 0.75 | at most 0.5: missed |" in text
    assert "| other | 12,346 |  |" in text
    assert "Machine: cpu some; full run of 2026-01-01." in text


def test_writing_one_section_again_leaves_the_others_alone(tmp_path):
    page = tmp_path / "benchmarks.md"
    write_section(page, "one", "first\n")
    write_section(page, "two", "second\n")
    write_section(page, "one", "third\n")
    text = page.read_text()
    assert "first" not in text
    assert text.count("## One") == text.count("## Two") == 1
    assert text.index("third") < text.index("## Two") < text.index("second")


def test_the_machine_is_described():
    assert machine()["cores"] >= 1
    assert machine()["memory_gib"] > 0
    assert "training" in names()


def test_the_gpu_script_imports_nothing_that_a_bare_machine_lacks():
    code = (
        "import sys\n"
        "for name in ('pydantic', 'pyarrow', 'rfc8785', 'prefect', 'peft', 'matplotlib'): sys.modules[name] = None\n"
        "import tests.benchmarks._gpu"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
