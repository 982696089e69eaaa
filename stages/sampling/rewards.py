"""Calls reward functions: plain Python functions that a recipe names as `module:function`.

The shape is TRL's: `function(prompts, completions, **columns) -> list[float]`, where `prompts` and `completions` are
lists of strings and every other column of the prompt dataset arrives as a list under its name. A function takes the
columns it names; with `**kwargs` it gets all of them. `None` says that the function does not apply to that row. Two
more lists can be asked for in the same way: `completion_ids` (token ids) and `finished` (whether the completion ended
itself).

Invariants: a reward is a finite number; every row is scored by at least one function; nothing is clipped or replaced.
No torch here, so that a reward can be tried without it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from stages.contract import NonFinite, Refused, failure, import_function

RESERVED = ("prompts", "completions", "completion_ids", "finished")


@dataclass(frozen=True)
class Reward:
    """One reward function, the name it was imported by, and its weight in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0

    @property
    def column(self) -> str:
        """Its column in tables of rollouts and the name of its metrics: the function's name."""
        return self.name.partition(":")[2]


@dataclass(frozen=True)
class Scores:
    """Rewards of some rows: the weighted total, and what each function gave (None where it does not apply)."""

    total: list[float]
    by_function: dict[str, list[float | None]]


def load_rewards(paths: Sequence[str], weights: Sequence[float] | None = None) -> list[Reward]:
    """Import the reward functions of a config.

    Raises:
        Refused: one cannot be imported, two have the same function name, or there are not as many weights as functions.
    """
    if weights is not None and len(weights) != len(paths):
        raise Refused(f"reward_weights has {len(weights)} values for {len(paths)} reward functions; give one for each")
    rewards = [
        Reward(path, import_function(path), weight)
        for path, weight in zip(paths, weights if weights is not None else [1.0] * len(paths), strict=True)
    ]
    columns = [reward.column for reward in rewards]
    for column in columns:
        if columns.count(column) > 1:
            raise Refused(f"two reward functions are called {column!r}; give one of them another name")
    return rewards


def check_columns(rewards: Sequence[Reward], columns: Sequence[str]) -> None:
    """Refuse, before anything is sampled, a function that needs a column which the prompts do not have.

    Raises:
        Refused: naming the function, the column and the columns there are.
    """
    for name in RESERVED:
        if name in columns:
            raise Refused(f"the prompt dataset has a column {name!r}, which reward functions get already; rename it")
    for reward in rewards:
        for parameter in _parameters(reward).values():
            needed = parameter.default is parameter.empty and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            )
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise Refused(f"reward {reward.name}: its parameter {parameter.name!r} cannot be given by name")
            if needed and parameter.name not in {*RESERVED, *columns}:
                raise Refused(
                    f"reward {reward.name} needs a column {parameter.name!r}; the prompts have"
                    f" {', '.join(sorted(columns)) or 'no columns'} (and {', '.join(RESERVED)})"
                )


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows of named values into lists by name; a row without a value has None."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def score(
    rewards: Sequence[Reward],
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    *,
    completion_ids: Sequence[Sequence[int]],
    finished: Sequence[bool],
    row_names: Sequence[str] | None = None,
) -> Scores:
    """Score completions with every function and add up weight * reward.

    Args:
        columns: further columns of the dataset, each as long as `prompts`.
        row_names: what to call a row in an error; its number otherwise.

    Raises:
        Refused: a function fails, or gives something other than one number (or None) a row.
        NonFinite: a reward is NaN or infinite; the message names the function and the row.
    """
    names = row_names if row_names is not None else [str(row) for row in range(len(prompts))]
    given: dict[str, list[Any]] = {
        "prompts": list(prompts),
        "completions": list(completions),
        "completion_ids": [list(ids) for ids in completion_ids],
        "finished": list(finished),
        **{name: list(values) for name, values in columns.items()},
    }
    total = [0.0] * len(prompts)
    scored = [False] * len(prompts)
    by_function: dict[str, list[float | None]] = {}
    for reward in rewards:
        values = _call(reward, given)
        checked = [_checked(reward, value, name) for value, name in zip(values, names, strict=True)]
        by_function[reward.column] = checked
        for row, value in enumerate(checked):
            if value is not None:
                total[row] += reward.weight * value
                scored[row] = True
    for row, name in enumerate(names):
        if not scored[row]:
            raise Refused(f"no reward function applies to row {name}: {', '.join(r.name for r in rewards)} gave None")
    return Scores(total, by_function)


def _parameters(reward: Reward) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(reward.function).parameters


def _call(reward: Reward, given: dict[str, list[Any]]) -> list[Any]:
    rows = len(given["prompts"])
    parameters = _parameters(reward)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {name: values for name, values in given.items() if name in parameters}
    try:
        # A copy, for a function may change what it gets, and the next one, or the next step, must not see that.
        values = reward.function(**copy.deepcopy(given))
    except (Exception, SystemExit) as error:
        raise Refused(f"reward {reward.name} failed: {failure(error)}") from error
    try:
        values = list(values)
    except TypeError:
        raise Refused(
            f"reward {reward.name} returned {type(values).__name__}; it must return a list of numbers"
        ) from None
    if len(values) != rows:
        raise Refused(f"reward {reward.name} returned {len(values)} values for {rows} completions")
    return values


def _checked(reward: Reward, value: Any, row: str) -> float | None:
    if value is None:
        return None
    if hasattr(value, "item"):  # a NumPy or PyTorch scalar
        value = value.item()
    if not isinstance(value, Real):
        raise Refused(
            f"reward {reward.name} gave {value!r} ({type(value).__name__}) for row {row}; it must be a number"
        )
    try:
        value = float(value)
    except OverflowError:  # an integer of hundreds of digits
        value = math.inf
    if not math.isfinite(value):
        raise NonFinite(f"reward {reward.name} gave {value} for row {row}")
    return value
