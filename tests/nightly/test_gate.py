"""The gate's rules and their arithmetic, dates of backfills, and settings of an installation that are refused."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from flows.gate import judge, parse_rule
from flows.recipe_model import RecipeError
from flows.service.deploy_settings import read_settings


def verdict(*rules: str, candidate: dict[str, float], production: dict[str, float] | None) -> tuple[bool, str]:
    found = judge([parse_rule(rule) for rule in rules], candidate, production)
    return found.passes, str(found)


def test_the_arithmetic_of_a_gate_is_told_in_words() -> None:
    better, worse = {"exact_match": 0.922, "bits_per_byte": 1.9}, {"exact_match": 0.91, "bits_per_byte": 1.9}
    assert verdict("exact_match > production + 0.01", candidate=better, production=worse) == (
        True,
        "exact_match 0.922 > production 0.910 + 0.0100 = 0.920: passes",
    )
    assert verdict("exact_match > production + 0.01", candidate=worse, production=better)[0] is False
    assert verdict("bits_per_byte <= production", candidate=better, production=worse)[0] is True
    assert verdict("bits_per_byte < production - 0.1", candidate=better, production=worse)[0] is False
    assert verdict("exact_match >= 0.5", "exact_match >= 0.95", candidate=better, production=None) == (
        False,
        "exact_match 0.922 >= 0.500: passes; exact_match 0.922 >= 0.950: does not pass",
    )


def test_a_first_model_passes_a_comparison_with_production_and_a_missing_figure_passes_nothing() -> None:
    figures = {"exact_match": 0.1}
    assert verdict("exact_match > production", candidate=figures, production=None)[0] is True
    assert verdict("bits_per_byte < 2", candidate=figures, production=None)[0] is False
    assert verdict("exact_match > production", candidate=figures, production={})[0] is False
    assert verdict("exact_match > production", candidate={"exact_match": float("nan")}, production=None)[0] is False
    assert verdict(candidate=figures, production=None) == (True, "no rule was set: every model passes")


@pytest.mark.parametrize(
    "text", ["", "exact_match", "exact_match = 1", "0.5 > exact_match", "a > production * 2", "a > b"]
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rule: write METRIC >= NUMBER"):
        parse_rule(text)


def test_dates_of_a_backfill_are_dates_and_ranges() -> None:
    from flows.nightly import read_dates

    assert read_dates(["2026-11-03", "2026-11-01..2026-11-03"]) == [date(2026, 11, day) for day in (1, 2, 3)]
    for wrong in ("3 Nov", "2026-11-03..2026-11-01", "2026-11-31", "2020-01-01..2026-01-01"):
        with pytest.raises(ValueError, match="dates: "):
            read_dates([wrong])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stroe: x", "headrace.yaml:1: stroe: no such field. Did you mean store?"),
        ("nightly:\n  production: {recipe: quickstart, cron: often}", "'often' is not a schedule in cron's form"),
        ("nightly:\n  production: {recipe: quickstart, timezone: Mars/Base}", "there is no time zone 'Mars/Base'"),
        ("nightly:\n  production: {recipe: quickstart, gate: [better]}", "'better' is not a rule"),
        (
            "nightly:\n  production: {recipe: quickstart, warm_start: grop.model}",
            "name a step's input. Here: base.model",
        ),
        ("nightly:\n  production: {recipe: quickstart, model: grop}", "no such step. Did you mean grpo?"),
        ("nightly:\n  'a b': {recipe: quickstart}", "is not a name for a reference"),
        ("recipes: [none.yaml]", "none.yaml: no such file."),
        ("- a list", "the settings are a mapping"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_change(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "headrace.yaml").write_text(text)
    with pytest.raises(RecipeError) as refused:
        read_settings(tmp_path / "headrace.yaml")
    assert told in str(refused.value)


def test_settings_have_absolute_paths_and_a_nightly_deployment_without_schedule(tmp_path: Path) -> None:
    (tmp_path / "headrace.yaml").write_text("store: ./here")
    settings = read_settings(tmp_path / "headrace.yaml")
    assert settings.store == str(tmp_path / "here")
    assert settings.nightly["production"].cron == ""
    assert "quickstart" in settings.recipes_by_name()
