"""Nothing is computed twice, and the plan says beforehand what will be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from mini_runs import ROOT, RUN, headrace, plan


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the project's code that a test may edit."""
    root = tmp_path / "project"
    for name in ("flows", "stages"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def reasons(folder: Path, *arguments: str, root: Path = ROOT) -> dict[str, str]:
    """Why each step would run; steps that would not are left out."""
    planned = plan(folder, *arguments, root=root)
    return {step: entry["reason"] for step, entry in planned.items() if entry["status"] == "miss"}


def test_a_second_run_starts_no_stage(finished: Path, tmp_path: Path) -> None:
    before = sorted(finished.glob(".headrace/results/*/*.json"))
    lines = headrace(finished, *RUN, "--json").splitlines()
    final = json.loads(lines[-1])
    assert {step["status"] for step in final["steps"].values()} == {"cached"}
    assert {step["attempts"] for step in final["steps"].values()} == {0}
    assert sorted(finished.glob(".headrace/results/*/*.json")) == before


def test_a_changed_setting_runs_its_step_and_what_follows(finished: Path) -> None:
    assert reasons(finished) == {}
    assert reasons(finished, "--set", "dpo.beta=0.2") == {
        "dpo": "beta 0.1 -> 0.2",
        "grpo": "input model changed (dpo will run)",
        "report": "input dpo, grpo changed",
    }


def test_a_comment_in_the_dpo_loss_runs_nothing(finished: Path, sources: Path) -> None:
    loss = sources / "stages/dpo/loss.py"
    loss.write_text(loss.read_text().replace("def ", "# a remark\n\n\ndef ", 1))
    assert reasons(finished, root=sources) == {}


def test_editing_the_dpo_loss_leaves_sft_cached(finished: Path, sources: Path) -> None:
    loss = sources / "stages/dpo/loss.py"
    code = loss.read_text()
    assert "logsigmoid" in code
    loss.write_text(code.replace("logsigmoid", "softsign"))
    changed = reasons(finished, root=sources)
    assert list(changed) == ["dpo", "grpo", "report"]
    assert changed["dpo"].startswith("code changed: stages/dpo/loss.py")


def test_a_step_that_gives_its_old_bytes_again_leaves_what_follows_cached(finished: Path) -> None:
    final = json.loads(headrace(finished, *RUN, "--json", "--force", "base").splitlines()[-1])
    ran = {step for step, entry in final["steps"].items() if entry["status"] == "done"}
    assert ran == {"base"}
