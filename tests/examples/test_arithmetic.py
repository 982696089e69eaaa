from __future__ import annotations

import re
from collections import Counter
from itertools import product

import pytest

from stages.examples import arithmetic
from stages.examples.arithmetic import Problem, answer, held_out, problems, steps

NUMBERS = range(10, 100)
ALL = [Problem(a, "+", b) for a, b in product(NUMBERS, NUMBERS)]
ALL += [Problem(a, "-", b) for a, b in product(NUMBERS, NUMBERS) if a >= b]


def value_of(text: str) -> int:
    """Add up an expression such as "3+2+1" or "6-2-1" from left to right."""
    return sum(int(term) for term in re.findall(r"[+-]?\d+", text))


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem(34, "+", 28), "4+8=12; 3+2+1=6. Answer: 62"),
        (Problem(47, "+", 38), "7+8=15; 4+3+1=8. Answer: 85"),
        (Problem(22, "+", 31), "2+1=3; 2+3=5. Answer: 53"),
        (Problem(57, "+", 68), "7+8=15; 5+6+1=12. Answer: 125"),
        (Problem(62, "-", 28), "12-8=4; 6-2-1=3. Answer: 34"),
        (Problem(68, "-", 22), "8-2=6; 6-2=4. Answer: 46"),
        (Problem(34, "-", 28), "14-8=6; 3-2-1=0. Answer: 6"),
        (Problem(50, "-", 50), "0-0=0; 5-5=0. Answer: 0"),
    ],
)
def test_worked_answers_are_written_as_by_hand(problem: Problem, text: str) -> None:
    assert answer(problem, worked=True) == text
    assert answer(problem, worked=False) == text.partition(". ")[2]


def test_the_steps_of_every_problem_are_right_and_lead_to_its_answer() -> None:
    assert len(ALL) == 8100 + 4095
    for problem in ALL:
        ones, tens = steps(problem).split("; ")
        results = []
        for step in (ones, tens):
            left, _, right = step.partition("=")
            assert value_of(left) == int(right), (problem, step)
            results.append(int(right))
        # Independent of how a carry or a borrow is written: the digits must make up the answer.
        carry = results[0] >= 10
        assert results[1] * 10 + results[0] % 10 == problem.value, problem
        if problem.operation == "+":
            assert problem.value == problem.a + problem.b
            assert ("+1=" in tens and tens.count("+") == 2) == carry
        else:
            assert problem.value == problem.a - problem.b >= 0
            borrow = problem.a % 10 < problem.b % 10
            assert (tens.count("-") == 2) == borrow
            assert int(ones.split("-")[0]) == problem.a % 10 + (10 if borrow else 0)


def test_the_two_splits_share_no_numbers_and_make_up_all_problems() -> None:
    train, test = problems("train"), problems("held_out")
    assert Counter([*train, *test]) == Counter(ALL)
    pairs = [{frozenset((problem.a, problem.b)) for problem in split} for split in (train, test)]
    assert not pairs[0] & pairs[1]
    assert 0.08 < len(test) / len(ALL) < 0.12
    assert all(held_out(a, b) == held_out(b, a) for a, b in product(NUMBERS, NUMBERS))
    with pytest.raises(ValueError, match="'validation'"):
        problems("validation")


def questions_in(text: str) -> list[list[int]]:
    """The two-digit numbers of each line, up to where its answer begins."""
    return [[int(n) for n in re.findall(r"\b\d\d\b", re.split(r"[=?]", line)[0])] for line in text.split("\n")]


def test_no_training_data_of_any_seed_holds_a_held_out_problem() -> None:
    test_pairs = {frozenset((problem.a, problem.b)) for problem in problems("held_out")}
    seen = 0
    for seed in range(4):
        texts = [row["text"] for row in arithmetic.documents(seed, 3000)]
        texts += [row["messages"][0]["content"] for row in arithmetic.chats(seed, 3000)]
        texts += [row["prompt"] for row in arithmetic.prompts(seed, 3000)]
        for numbers in (numbers for text in texts for numbers in questions_in(text)):
            # A step such as "12-8=4" has one number of two digits; a problem has two.
            if len(numbers) == 2:
                assert frozenset(numbers) not in test_pairs
                seen += 1
    assert seen > 40_000


def test_five_hundred_held_out_questions_share_no_problem_with_any_training_problem() -> None:
    rows = list(arithmetic.prompts(0, 500, "held_out"))
    training = {frozenset((problem.a, problem.b)) for problem in problems("train")}
    assert len({row["prompt"] for row in rows}) == len({row["problem"] for row in rows}) == 500
    for row in rows:
        (numbers,) = questions_in(row["prompt"])
        assert frozenset(numbers) not in training
        a, operation, b = re.fullmatch(r"(\d+)([+-])(\d+)", row["problem"]).groups()  # type: ignore[union-attr]
        assert [int(a), int(b)] == numbers
        assert int(row["answer"]) == (int(a) + int(b) if operation == "+" else int(a) - int(b))


def test_every_template_asks_what_is_answered() -> None:
    templates: Counter[str] = Counter()
    for row in arithmetic.prompts(1, 2000):
        text = row["prompt"]
        adds = any(word in text for word in (" finds ", "together", " + ", " sum "))
        takes = any(word in text for word in (" gives away ", "How many more", " - ", " minus "))
        assert adds != takes
        assert ("+" in row["problem"]) == adds
        words = "name" if text.split()[0] in arithmetic.NAMES else text.split("?")[0].rstrip("0123456789 ")
        templates[re.sub(r"\d+", "N", words)] += 1
    assert sum(count for name, count in templates.items() if name == "name") > 500


def test_the_mix_follows_its_fractions() -> None:
    chats = [row["messages"][1]["content"] for row in arithmetic.chats(0, 4000, worked_fraction=0.4)]
    worked = arithmetic.shows_work([""] * 4000, chats)
    assert 0.36 < sum(worked) / 4000 < 0.44
    assert sum(arithmetic.shows_work([""], [row["messages"][1]["content"]])[0]
               for row in arithmetic.chats(0, 200, worked_fraction=0.0)) == 0  # fmt: skip
    facts = list(arithmetic.documents(0, 500, facts_fraction=1.0))
    assert not any("Answer" in row["text"] for row in facts)
    questions = list(arithmetic.documents(0, 500, facts_fraction=0.0, worked_fraction=1.0))
    assert all(line.count("; ") == 1 for row in questions for line in row["text"].split("\n"))
    assert list(arithmetic.documents(0, 0)) == []


def test_every_fact_in_a_document_is_true() -> None:
    for row in arithmetic.documents(2, 2000, facts_fraction=1.0):
        for line in row["text"].split("\n"):
            left, _, right = line.partition("=")
            assert value_of(left) == int(right)


@pytest.mark.parametrize("generator", [arithmetic.documents, arithmetic.chats, arithmetic.prompts])
def test_a_seed_gives_the_same_rows_and_another_seed_gives_others(generator: object) -> None:
    assert callable(generator)
    assert list(generator(seed=5, count=100)) == list(generator(seed=5, count=100))
    assert list(generator(seed=5, count=100)) != list(generator(seed=6, count=100))


def test_chats_and_prompts_do_not_repeat() -> None:
    assert len({row["messages"][0]["content"] for row in arithmetic.chats(0, 20_000)}) == 20_000
    assert len({row["problem"] for row in arithmetic.prompts(0, 5000)}) == 5000


def test_more_questions_than_there_are_is_an_error_and_not_a_loop() -> None:
    with pytest.raises(ValueError, match="at most"):
        next(arithmetic.prompts(0, 1_000_000, "held_out"))


@pytest.mark.parametrize(
    ("completion", "right", "finished", "reward"),
    [
        ("Answer: 62", "62", True, 1.0),
        ("4+8=12; 3+2+1=6. Answer: 62", "62", True, 1.0),
        ("4+8=13; 3+2+1=6. Answer: 62", "62", True, 1.0),  # the answer counts, not the way to it
        (" Answer: 62\n", "62", True, 1.0),
        ("Answer: 62", "62", False, 0.0),
        ("Answer: 62", "6", True, 0.0),
        ("Answer: 6", "62", True, 0.0),
        ("Answer: 062", "62", True, 0.0),
        ("Answer: 62.", "62", True, 0.0),
        ("Answer: 62 coins", "62", True, 0.0),
        ("62", "62", True, 0.0),
        ("", "62", True, 0.0),
        ("Answer: 62 Answer: 63", "62", True, 0.0),
        ("noAnswer: 62", "62", True, 0.0),
    ],
)
def test_the_reward_is_one_for_the_exact_answer_and_a_proper_end(
    completion: str, right: str, finished: bool, reward: float
) -> None:
    assert arithmetic.exact_answer(["q"], [completion], answer=[right], finished=[finished], problem=["x"]) == [reward]


def test_without_knowing_the_ends_the_text_decides() -> None:
    assert arithmetic.exact_answer(["q", "q"], ["Answer: 1", "Answer: 2"], answer=["1", "1"]) == [1.0, 0.0]


def test_shown_work_is_the_form_and_not_the_result() -> None:
    texts = ["4+8=12; 3+2+1=6. Answer: 62", "4+8=9; 3+2=1. Answer: 5", "Answer: 62", "4+8=12. Answer: 62"]
    assert arithmetic.shows_work([""] * 4, texts) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("settings", [{"count": -1}, {"count": 1, "worked_fraction": 1.1}])
def test_arguments_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        list(arithmetic.chats(seed=0, **settings))  # type: ignore[arg-type]
