"""The recipes that come with Headrace, against the stages as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flows.plan import make_plan
from flows.recipe import RecipeError, load_recipe
from flows.recipe_model import BUILT_IN


@pytest.mark.parametrize("name", sorted(path.stem for path in BUILT_IN.glob("*.yaml")))
def test_every_built_in_recipe_is_sound(name: str) -> None:
    parameters = yaml.safe_load((BUILT_IN / f"{name}.yaml").read_text()).get("parameters", {})
    recipe = load_recipe(name, [f"{key}=some.file" for key, value in parameters.items() if value is None])
    assert recipe.name == name
    assert recipe.description
    assert len(recipe.order()) == len(recipe.steps)


def test_the_quickstart_can_be_planned_from_nothing(tmp_path: Path) -> None:
    plan = make_plan(load_recipe("quickstart"), tmp_path / "store")
    assert {planned.reason for planned in plan.steps} == {"never run"}
    assert plan["corpus"].key is not None
    assert plan["corpus"].key == make_plan(load_recipe("quickstart"), tmp_path / "other")["corpus"].key


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.learning_rat=1", "sft.learning_rat: no such field. Did you mean learning_rate?"),
        (
            "grpo.inputs.model=chat",
            "step grpo: input model is a dataset (step chat); it takes a checkpoint. Checkpoints",
        ),
        (
            "dpo.inputs.data=chat",
            "step dpo: input data is a dataset of chat rows (step chat); it takes preference rows.",
        ),
        (
            "base.inputs.data=DATA",
            "step base: input data is a source (DATA); it takes a dataset (text or chat). A tokenize step makes",
        ),
    ],
)
def test_mistakes_in_real_stages_are_told(override: str, message: str, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("{}")
    with pytest.raises(RecipeError) as caught:
        make_plan(load_recipe("quickstart", [override.replace("DATA", str(data))]), tmp_path / "store")
    assert message.replace("DATA", str(data)) in str(caught.value)


def test_files_of_a_built_in_recipe_are_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"parameter train has no value; give it with --set train=\.\.\."):
        load_recipe("gsm8k-smollm2", ["model=m.gguf", "test=t.jsonl"])
    recipe = load_recipe("gsm8k-smollm2", ["model=m.gguf", "train=t.jsonl", "test=t.jsonl"])
    with pytest.raises(RecipeError, match=f"there is no file {tmp_path / 't.jsonl'}"):
        make_plan(recipe, tmp_path / "store")
    (tmp_path / "t.jsonl").write_text("{}")
    (tmp_path / "m.gguf").write_text("GGUF")
    assert len(make_plan(recipe, tmp_path / "store").steps) == 11
