from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from stages.examples.gsm8k import exact_answer, final_answer, has_answer_format

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 72.\n#### 72", "72"),
        ("#### 1,234", "1234"),
        ("####$1,234.50", "1234.5"),
        ("#### -3", "-3"),
        ("#### −3", "-3"),
        ("#### $-3", "-3"),
        ("#### 18 dollars", "18"),
        ("#### 18.00", "18"),
        ("#### 18.", "18"),
        ("#### .5", "0.5"),
        ("#### 0", "0"),
        ("#### 1\nno: #### 2", "2"),
        ("72", None),
        ("#### seventy-two", None),
        ("####\n72", None),
        ("", None),
    ],
)
def test_the_number_after_the_marks_is_read(text: str, number: str | None) -> None:
    assert final_answer(text) == (None if number is None else Decimal(number))


def test_the_reward_compares_numbers_and_wants_an_end() -> None:
    completions = ["#### 1000", "#### 1,000.0", "#### 100", "1000", "#### 1000"]
    rewards = exact_answer(
        ["q"] * 5,
        completions,
        answer=["x\n#### 1,000"] * 5,
        finished=[True, True, True, True, False],
        question=["q"] * 5,
    )
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert exact_answer(["q"], ["#### 5"], answer=["#### 5"]) == [1.0]
    assert has_answer_format(["q"] * 2, ["#### 1", "1"]) == [1.0, 0.0]


def test_a_reference_without_an_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="no number"):
        exact_answer(["q"], ["#### 1"], answer=["one"])


@pytest.mark.skipif(not (SHARED / "gsm8k-model-solutions.jsonl").exists(), reason="the shared data folder is not there")
def test_every_reference_of_gsm8k_has_a_final_answer() -> None:
    for name in ("gsm8k-train.jsonl", "gsm8k-test.jsonl"):
        rows = [json.loads(line) for line in (SHARED / name).read_text().splitlines()]
        assert all(final_answer(row["answer"]) is not None for row in rows)
