"""Reward for GSM8K (Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems"): the number after "####".

The data is used as it is: `prompt_template: "{question}"`, `completion_template: "{answer}"`, and the column `answer`
goes through to the reward.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

_FINAL = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"[-−]?\s*[$€£]?\s*[-−]?\d[\d,]*(?:\.\d+)?|[-−]?\s*[$€£]?\s*\.\d+")


def final_answer(text: str) -> Decimal | None:
    """The number after the last "####" of `text`, without thousands separators, currency signs and units.

    None where there is no "####", or no number after it.
    """
    marked = _FINAL.findall(text)
    if not marked:
        return None
    number = _NUMBER.search(marked[-1])
    if number is None:
        return None
    plain = re.sub(r"[,\s$€£]", "", number.group()).replace("−", "-")
    try:
        return Decimal(plain).normalize()
    except InvalidOperation:  # such as "--5"
        return None


def exact_answer(
    prompts: list[str],
    completions: list[str],
    answer: list[str],
    finished: list[bool] | None = None,
    **columns: Any,
) -> list[float]:
    """Reward: 1 where the final number of the completion equals that of the reference, and it came to an end; else 0.

    Args:
        answer: GSM8K's reference solutions, each ending in "#### number".
        finished: whether each completion ended by itself; where it is not given, the text alone decides.

    Raises:
        ValueError: a reference has no number after "####".
    """
    ended = finished if finished is not None else [True] * len(completions)
    rewards = []
    for completion, reference, end in zip(completions, answer, ended, strict=True):
        right = final_answer(reference)
        if right is None:
            raise ValueError(f'the reference answer {reference[-40:]!r} has no number after "####"')
        rewards.append(float(end and final_answer(completion) == right))
    return rewards


def has_answer_format(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Metric in the shape of a reward: 1 where the completion gives a number after "####", right or wrong."""
    return [float(final_answer(completion) is not None) for completion in completions]
