"""Arithmetic for the quickstart: sums and differences of two-digit numbers as documents, chats, prompts, and a reward.

A problem is `a + b` or `a - b` with 10 <= a, b <= 99 and, for differences, a >= b. It is asked in one of four ways (two
word problems, two plain questions) and answered in one of two styles:

    direct   Answer: 62
    worked   4+8=12; 3+2+1=6. Answer: 62

Worked steps go from the ones to the tens. A sum carries by adding 1 to the tens; a difference borrows by taking the
ones from 10 more and 1 from the tens: 62-28 is `12-8=4; 6-2-1=3. Answer: 34`.

Invariants:
- A problem is held out by a hash of its two numbers, in whatever order and under either operation. No generator here
  gives a held-out problem unless it is asked for them, whatever its seed: the test set shares no problem with training.
- The same arguments and seed give the same rows.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

SMALLEST, LARGEST = 10, 99
HELD_OUT_SHARE = 0.1
# A problem can be asked in 1,730 ways (names, objects); far fewer are found quickly by drawing at random.
QUESTIONS_PER_PROBLEM = 400

NAMES = (
    "Tom", "Ann", "Ben", "Eva", "Sam", "Mia", "Leo", "Zoe", "Max", "Ida", "Jon", "Amy",
)  # fmt: skip
OBJECTS = (
    "coins", "apples", "books", "cards", "shells", "stamps", "pens", "stones", "cups", "eggs", "maps", "toys",
)  # fmt: skip

SUM_TEMPLATES = (
    "{name} has {a} {objects} and finds {b} more. How many {objects} does {name} have now?",
    "{name} has {a} {objects} and {other} has {b}. How many {objects} do they have together?",
    "What is {a} + {b}?",
    "What is the sum of {a} and {b}?",
)
DIFFERENCE_TEMPLATES = (
    "{name} has {a} {objects} and gives away {b}. How many {objects} does {name} have left?",
    "{name} has {a} {objects} and {other} has {b}. How many more {objects} does {name} have?",
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
)

_ANSWER = re.compile(r"(?:^|\s)Answer: (\d+)$")
_WORK = re.compile(r"\d+[+-]\d+=\d+; \d+(?:[+-]\d+)+=\d+\. Answer: \d+")


@dataclass(frozen=True, slots=True)
class Problem:
    """`a` + `b` or `a` - `b`."""

    a: int
    operation: str
    b: int

    @property
    def value(self) -> int:
        """The answer."""
        return self.a + self.b if self.operation == "+" else self.a - self.b

    def __str__(self) -> str:
        return f"{self.a}{self.operation}{self.b}"


def held_out(a: int, b: int) -> bool:
    """Whether the problems of these two numbers, in any order, are kept out of all training data."""
    digest = hashlib.sha256(f"{min(a, b)},{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


@cache
def problems(split: str) -> tuple[Problem, ...]:
    """All problems of a split, "train" or "held_out", in a fixed order.

    Raises:
        ValueError: there is no such split.
    """
    if split not in ("train", "held_out"):
        raise ValueError(f'split must be "train" or "held_out", not {split!r}')
    numbers = range(SMALLEST, LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers if held_out(a, b) == (split == "held_out")]
    return tuple(Problem(a, operation, b) for operation in "+-" for a, b in pairs if operation == "+" or a >= b)


def steps(problem: Problem) -> str:
    """The worked steps, such as "4+8=12; 3+2+1=6"."""
    (a_tens, a_ones), (b_tens, b_ones) = divmod(problem.a, 10), divmod(problem.b, 10)
    if problem.operation == "+":
        ones = a_ones + b_ones
        carry = "+1" if ones > 9 else ""
        return f"{a_ones}+{b_ones}={ones}; {a_tens}+{b_tens}{carry}={a_tens + b_tens + ones // 10}"
    borrow = a_ones < b_ones
    top = a_ones + 10 * borrow
    return f"{top}-{b_ones}={top - b_ones}; {a_tens}-{b_tens}{'-1' if borrow else ''}={a_tens - b_tens - borrow}"


def answer(problem: Problem, *, worked: bool) -> str:
    """The answer in one of the two styles."""
    return f"{steps(problem)}. Answer: {problem.value}" if worked else f"Answer: {problem.value}"


def question(problem: Problem, draw: random.Random) -> str:
    """Ask a problem in one of the four ways, with names and objects drawn at random."""
    template = draw.choice(SUM_TEMPLATES if problem.operation == "+" else DIFFERENCE_TEMPLATES)
    name, other = draw.sample(NAMES, 2)
    return template.format(name=name, other=other, objects=draw.choice(OBJECTS), a=problem.a, b=problem.b)


def documents(
    seed: int, count: int, facts_fraction: float = 0.3, worked_fraction: float = 0.5
) -> Iterator[dict[str, Any]]:
    """Documents for pretraining: facts ("34+28=62"), and questions with their answers.

    Args:
        count: number of documents.
        facts_fraction: share of documents that list facts, four to eight a document; half of the facts are steps of
            one digit, half are whole problems. The others hold two to four questions with answers.
        worked_fraction: share of the questions that are answered in the worked style.

    Raises:
        ValueError: a fraction is not between 0 and 1, or `count` is negative.
    """
    _check(count=count, facts_fraction=facts_fraction, worked_fraction=worked_fraction)
    draw = random.Random(f"arithmetic documents {seed}")
    pool = problems("train")
    for _ in range(count):
        if draw.random() < facts_fraction:
            lines = []
            for _ in range(draw.randint(4, 8)):
                problem = draw.choice(pool)
                whole = draw.random() < 0.5
                lines.append(f"{problem}={problem.value}" if whole else draw.choice(steps(problem).split("; ")))
        else:
            lines = []
            for _ in range(draw.randint(2, 4)):
                problem = draw.choice(pool)
                worked = draw.random() < worked_fraction
                lines.append(f"{question(problem, draw)} {answer(problem, worked=worked)}")
        yield {"text": "\n".join(lines)}


def chats(seed: int, count: int, worked_fraction: float = 0.4) -> Iterator[dict[str, Any]]:
    """Chats of one question and its answer, for supervised fine-tuning.

    Args:
        count: number of chats; all questions differ.
        worked_fraction: share of the answers in the worked style.

    Raises:
        ValueError: a fraction is not between 0 and 1, or `count` is negative.
    """
    _check(count=count, worked_fraction=worked_fraction)
    draw = random.Random(f"arithmetic chats {seed}")
    for problem, asked in _distinct("train", count, draw):
        worked = draw.random() < worked_fraction
        turns = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer(problem, worked=worked)},
        ]
        yield {"messages": turns}


def prompts(seed: int, count: int, split: str = "train") -> Iterator[dict[str, Any]]:
    """Questions with the number that answers them as the column `answer`, for sampling with a reward.

    Args:
        count: number of questions; all differ, and as long as there are enough problems, so do their problems.
        split: "train", or "held_out" for problems that no training data holds.

    Raises:
        ValueError: `count` is negative or too large, or there is no such split.
    """
    _check(count=count)
    draw = random.Random(f"arithmetic prompts {split} {seed}")
    for problem, asked in _distinct(split, count, draw):
        yield {"prompt": asked, "answer": str(problem.value), "problem": str(problem)}


def exact_answer(
    prompts: list[str],
    completions: list[str],
    answer: list[str],
    finished: list[bool] | None = None,
    **columns: Any,
) -> list[float]:
    """Reward: 1 where the completion ends in the right answer, and came to an end; else 0.

    Args:
        answer: the right number of each prompt.
        finished: whether each completion ended by itself; where it is not given, the text alone decides.
    """
    found = [_ANSWER.search(completion.strip()) for completion in completions]
    ended = finished if finished is not None else [True] * len(completions)
    return [
        float(match is not None and match.group(1) == right and end)
        for match, right, end in zip(found, answer, ended, strict=True)
    ]


def shows_work(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Metric in the shape of a reward: 1 where the completion has the form of a worked answer, right or wrong."""
    return [float(_WORK.fullmatch(completion.strip()) is not None) for completion in completions]


def _distinct(split: str, count: int, draw: random.Random) -> Iterator[tuple[Problem, str]]:
    """Draw questions without repeats, going round all problems of the split in a new order each time."""
    most = QUESTIONS_PER_PROBLEM * len(problems(split))
    if count > most:
        raise ValueError(f"count must be at most {most:,} for the split {split!r}, so that no question repeats")
    seen: set[str] = set()
    while len(seen) < count:
        pool = list(problems(split))
        draw.shuffle(pool)
        for problem in pool:
            asked = question(problem, draw)
            if asked in seen:
                continue
            seen.add(asked)
            yield problem, asked
            if len(seen) == count:
                return


def _check(count: int, **fractions: float) -> None:
    if count < 0:
        raise ValueError(f"count must not be negative, not {count}")
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1, not {value}")
