"""Calling reward functions: what they get, how they are added up, and what is refused."""

import math

import pytest

from stages.contract import NonFinite, Refused
from stages.sampling.rewards import check_columns, columns_of, load_rewards, score


def scored(*names, weights=None, columns=None, rows=3):
    rewards = load_rewards([f"tiny_rewards:{name}" for name in names], weights)
    return score(
        rewards,
        [f"p{row}" for row in range(rows)],
        [f"c{row}" for row in range(rows)],
        columns or {},
        completion_ids=[[1] * (row + 1) for row in range(rows)],
        finished=[row == 0 for row in range(rows)],
        row_names=[f"row-{row}" for row in range(rows)],
    )


def test_a_function_gets_the_columns_it_names():
    scores = scored("right", columns={"answer": ["c0", "no", "c2"], "other": [1, 2, 3]})
    assert scores.total == [1.0, 0.0, 1.0]
    assert scored("ended").total == [1.0, 0.0, 0.0]
    assert scored("length").total == [1.0, 2.0, 3.0]


def test_rewards_are_added_up_by_weight():
    scores = scored("ended", "length", weights=[0.5, -2.0])
    assert scores.total == [0.5 - 2, -4.0, -6.0]
    assert scores.by_function == {"ended": [1.0, 0.0, 0.0], "length": [1.0, 2.0, 3.0]}


def test_what_a_function_does_to_its_arguments_reaches_no_other_one_and_no_later_step():
    columns = {"answer": [{"a": 1}, {"b": 2}, {"c": 3}]}
    for _ in range(2):
        assert scored("untidy", "untidy_too", columns=columns).total == [2.0, 2.0, 2.0]


def test_none_leaves_a_function_out_of_that_row():
    scores = scored("only_odd", "length")
    assert scores.total == [1.0, 3.0, 3.0]
    assert scores.by_function["only_odd"] == [None, 1.0, None]


def test_a_row_that_no_function_scores_is_refused():
    with pytest.raises(Refused, match="no reward function applies to row row-0"):
        scored("nothing")


def test_nan_names_the_function_and_the_row():
    with pytest.raises(NonFinite, match=r"tiny_rewards:not_a_number gave nan for row row-1"):
        scored("not_a_number")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "returned 2 values for 3 completions"),
        ("words", "gave 'good' .str. for row row-0; it must be a number"),
        ("broken", "tiny_rewards:broken failed: KeyError: 'answer'"),
        ("one_number", "returned float; it must return a list"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_a_function_that_does_not_keep_to_the_shape_is_refused(name, message):
    with pytest.raises(Refused, match=message):
        scored(name)


def test_a_column_that_the_prompts_lack_is_refused_before_sampling():
    rewards = load_rewards(["tiny_rewards:needs_solution"])
    with pytest.raises(Refused, match="needs a column 'solution'; the prompts have answer, level"):
        check_columns(rewards, ["level", "answer"])
    with pytest.raises(Refused, match="column 'completions'"):
        check_columns(rewards, ["solution", "completions"])
    check_columns(rewards, ["solution"])


def test_weights_must_be_one_for_each_function():
    with pytest.raises(Refused, match="reward_weights has 1 values for 2 reward functions"):
        load_rewards(["tiny_rewards:right", "tiny_rewards:ended"], [1.0])
    with pytest.raises(Refused, match="two reward functions are called 'right'"):
        load_rewards(["tiny_rewards:right", "tiny_rewards:right"])


def test_columns_of_rows_with_different_names_are_filled_with_none():
    assert columns_of([{"a": 1}, {"b": 2}]) == {"a": [1, None], "b": [None, 2]}
    assert columns_of([]) == {}


def test_an_integer_too_large_for_a_float_is_not_finite():
    from stages.sampling.rewards import Reward

    reward = Reward("x:f", lambda completions: [10**400])
    with pytest.raises(NonFinite, match="reward x:f gave inf for row 0"):
        score([reward], [""], [""], {}, completion_ids=[[]], finished=[False])


def test_numbers_of_numpy_and_torch_are_taken():
    import numpy as np
    import torch

    from stages.sampling.rewards import Reward

    reward = Reward("x:f", lambda completions: [np.float32(0.25), torch.tensor(2), True])
    scores = score([reward], ["", "", ""], ["", "", ""], {}, completion_ids=[[], [], []], finished=[False] * 3)
    assert scores.total == [0.25, 2.0, 1.0]
    assert all(math.isfinite(value) for value in scores.total)
