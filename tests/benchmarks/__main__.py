"""Run benchmarks and write their figures into docs/benchmarks.md, each into a section of its own.

python -m tests.benchmarks [--quick] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.benchmarks._machine import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Every figure here was measured by `python -m tests.benchmarks NAME` on the machine that its section names. A ratio says
how many times as much; a goal that is missed is shown as missed.
"""


def names() -> list[str]:
    """The benchmarks there are, in alphabetical order."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def run(name: str, quick: bool) -> dict[str, Any]:
    """Run one benchmark, show what it prints, and return the object of its last line."""
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", *(["--quick"] if quick else [])]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    if process.wait() != 0:
        raise SystemExit(f"benchmark {name} ended with code {process.returncode}")
    result: dict[str, Any] = json.loads(last)
    return result


def section(result: dict[str, Any], day: str) -> str:
    """A benchmark's result as Markdown: its ratios beside their goals, its figures, and the machine."""
    lines = ["| ratio | measured | goal |", "| --- | --- | --- |"]
    for name, value in result["ratios"].items():
        goal = result["goals"].get(name)
        lines.append(f"| {name.replace('_', ' ')} | {number(value)} | {_goal(value, goal)} |")
    if figures := result.get("figures"):
        columns = list(dict.fromkeys(key for row in figures.values() for key in row))
        lines += [
            "",
            f"| | {' | '.join(key.replace('_', ' ') for key in columns)} |",
            "| --- " * (len(columns) + 1) + "|",
        ]
        for name, row in figures.items():
            cells = " | ".join(number(row[key]) if key in row else "" for key in columns)
            lines.append(f"| {name.replace('_', ' ')} | {cells} |")
    where = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in result["machine"].items())
    how = f"{'quick run' if result.get('quick') else 'full run'} of {day}"
    notes = "".join(f"\n{note}\n" for note in result.get("notes", []))
    return "\n".join(lines) + f"\n{notes}\nMachine: {where}; {how}.\n"


def _goal(value: float | None, goal: Any) -> str:
    if goal is None:
        return ""
    if not isinstance(goal, list):
        return str(goal)
    sign, limit = goal
    met = value is not None and (value >= limit if sign == ">=" else value <= limit)
    return f"{'at least' if sign == '>=' else 'at most'} {number(limit)}: {'met' if met else 'missed'}"


def number(value: float | None) -> str:
    """Four significant digits, with commas from 1,000 on."""
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def write_section(page: Path, name: str, text: str) -> None:
    """Put `text` under the heading of benchmark `name`, in place of what was there; other sections stay."""
    content = page.read_text(encoding="utf-8") if page.exists() else HEAD
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    body = f"{begin}\n{text}{end}"
    if begin in content:
        before, _, rest = content.partition(begin)
        content = before + body + rest.partition(end)[2]
    else:
        content = f"{content.rstrip()}\n\n## {name.replace('_', ' ').capitalize()}\n\n{body}\n"
    page.write_text(content, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Run benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; all when empty")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, for a look")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(names())):
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(names())}")
    for name in given.names or names():
        result = run(name, given.quick)
        write_section(PAGE, name, section(result, datetime.now(UTC).date().isoformat()))


if __name__ == "__main__":
    main()
