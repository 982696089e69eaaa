"""The page of recipes: up to date, complete, and its example is a recipe."""

from __future__ import annotations

import re
from pathlib import Path

from docs.generate import TARGET, recipes_page
from flows.recipe import load_recipe
from flows.recipe_model import stage_names
from stages.contract import config_class


def test_the_page_is_what_the_models_say() -> None:
    assert TARGET.read_text("utf-8") == recipes_page(), "run `python -m docs.generate`"


def test_every_field_and_input_of_every_stage_is_on_the_page() -> None:
    page = recipes_page()
    shared = page[page.index("### Settings of all stages that train") : page.index("### convert")]
    for name in stage_names():
        section = page[page.index(f"### {name}\n") :]
        section = section[: section.find("\n### ", 1)] + shared
        config = config_class(name)
        missing = [key for key in (*config.model_fields, *config.INPUTS) if f"| `{key}` |" not in section]
        assert missing == [], name


def test_every_field_is_described() -> None:
    undescribed = [
        f"{name}.{field}"
        for name in stage_names()
        for field, info in config_class(name).model_fields.items()
        if not info.description
    ]
    assert undescribed == []


def test_the_example_of_the_page_is_a_recipe(tmp_path: Path) -> None:
    found = re.search(r"```yaml\n(.*?)```", TARGET.read_text("utf-8"), re.DOTALL)
    assert found is not None
    path = tmp_path / "tiny.yaml"
    path.write_text(found[1])
    assert load_recipe(str(path), ["rate=0.01"]).order() == ["corpus", "base", "report"]
