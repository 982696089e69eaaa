"""The gate before a promotion: rules over the metrics of a report, and their arithmetic in words.

A rule is `METRIC OPERATOR TERM`, the operator one of >= > <= <, the term a number, or `production` (the model that the
reference names now, measured in the same report) with an optional `+ number` or `- number`:

    exact_match >= 0.5
    exact_match > production + 0.01
    bits_per_byte <= production + 0.02

Invariants:
- Both sides of a comparison come from one report, so from the same data, code and night.
- A rule about production passes while there is none. Any other rule whose metric is missing or no number does not pass.
- A gate without rules passes; the arithmetic then says that nothing was asked.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows import figures

_OPERATORS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_RULE = re.compile(
    rf"\s*(?P<metric>[A-Za-z_]\w*)\s*(?P<operator>>=|<=|>|<)\s*"
    rf"(?:(?P<production>production)\s*(?:(?P<sign>[-+])\s*(?P<margin>{_NUMBER}))?|(?P<number>[-+]?{_NUMBER}))\s*"
)


@dataclass(frozen=True)
class Rule:
    """One rule of a gate.

    Attributes:
        text: as it was written.
        number: what the metric is compared with; where `against_production`, what is added to production's first.
    """

    text: str
    metric: str
    operator: str
    against_production: bool
    number: float


@dataclass(frozen=True)
class Verdict:
    """What a gate says of a candidate: whether it passes, and a line of arithmetic for each rule."""

    passes: bool
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.lines)


def parse_rule(text: str) -> Rule:
    """Read a rule.

    Raises:
        ValueError: it is not one.
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a rule: write METRIC >= NUMBER, or METRIC > production + NUMBER (also >, <=, <)"
        )
    number = float(match["number"] or match["margin"] or 0.0)
    if match["sign"] == "-":
        number = -number
    return Rule(text.strip(), match["metric"], match["operator"], match["production"] is not None, number)


def judge(rules: Sequence[Rule], candidate: Mapping[str, float], production: Mapping[str, float] | None) -> Verdict:
    """Whether a candidate passes.

    Args:
        candidate: its metrics in the report.
        production: those of the model in production; None where there is none.
    """
    if not rules:
        return Verdict(True, ("no rule was set: every model passes",))
    told = [_judge(rule, candidate, production) for rule in rules]
    return Verdict(all(passes for passes, _ in told), tuple(line for _, line in told))


def _judge(rule: Rule, candidate: Mapping[str, float], production: Mapping[str, float] | None) -> tuple[bool, str]:
    value = candidate.get(rule.metric)
    if value is None or not math.isfinite(value):
        known = ", ".join(sorted(candidate)) or "none"
        return False, f"{rule.metric}: the report has no such figure of the candidate (it has: {known})"
    shown = f"{rule.metric} {figures.number(value)}"
    if not rule.against_production:
        passes = _OPERATORS[rule.operator](value, rule.number)
        return passes, f"{shown} {rule.operator} {figures.number(rule.number)}: {_says(passes)}"
    if production is None:
        return True, f"{shown}: passes, nothing is in production yet"
    other = production.get(rule.metric)
    if other is None or not math.isfinite(other):
        return False, f"{rule.metric}: the report has no such figure of production"
    limit = other + rule.number
    sum_ = f"production {figures.number(other)}"
    if rule.number:
        sign = "+" if rule.number > 0 else "-"
        sum_ += f" {sign} {figures.number(abs(rule.number))} = {figures.number(limit)}"
    passes = _OPERATORS[rule.operator](value, limit)
    return passes, f"{shown} {rule.operator} {sum_}: {_says(passes)}"


def _says(passes: bool) -> str:
    return "passes" if passes else "does not pass"
