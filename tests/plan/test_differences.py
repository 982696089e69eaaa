"""How differences of settings are told: one line for each, and one for a whole group that only one side has."""

from __future__ import annotations

from typing import Any

import pytest

from flows.differences import setting_changes

GROUP = {"vocab_size": 300, "special_tokens": ["<a>", "<b>"], "lower": True}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ({"beta": 0.1, "seed": 1}, {"beta": 0.2, "seed": 1}, ["beta 0.1 -> 0.2"]),
        ({"g": GROUP}, {"g": GROUP | {"vocab_size": 400}}, ["g.vocab_size 300 -> 400"]),
        ({"g": None}, {"g": GROUP}, ["g none -> {vocab_size: 300, special_tokens: [<a>, <b>], l…"]),
        ({"g": GROUP}, {"g": None}, ["g {vocab_size: 300, special_tokens: [<a>, <b>], l… -> none"]),
        ({}, {"g": {"a": 1, "b": {"c": None}}}, ["g {a: 1, b: {c: none}} (was not set)"]),
        ({"g": {"a": 1, "b": 2}}, {}, ["g {a: 1, b: 2} -> not set"]),
        ({"g": {"h": {"a": 1}}}, {"g": {}}, ["g {h: {a: 1}} -> {}"]),
        ({"l": [{"a": 1}]}, {"l": [{"a": 2}, {"a": 3, "b": 4}]}, ["l.0.a 1 -> 2", "l.1 {a: 3, b: 4} (was not set)"]),
        ({"l": [1, 2]}, {"l": [1, 3]}, ["l [1, 2] -> [1, 3]"]),
        ({"l": []}, {"l": [{"a": 1}]}, ["l [] -> [{a: 1}]"]),
        ({"g": GROUP}, {"g": dict(reversed(GROUP.items()))}, []),
    ],
)
def test_a_group_of_settings_that_one_side_lacks_is_one_difference(
    old: dict[str, Any], new: dict[str, Any], told: list[str]
) -> None:
    assert setting_changes(old, new) == told
