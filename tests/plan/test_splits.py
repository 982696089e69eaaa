"""A split that a step reads must be there: said before anything starts, wherever the dataset comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.plan import make_plan
from flows.recipe import load_recipe
from flows.recipe_model import RecipeError
from stages.artifacts import open_store, publish

RECIPE = """\
steps:
  corpus:
    stage: tokenize
    format: text
    row_length: 64
    train_tokenizer: {vocab_size: 300}
    inputs: {data: data.txt}
  base:
    stage: pretrain
    learning_rate: 1.0e-3
    max_steps: 2
    inputs: {data: corpus}
  report:
    stage: evaluate
    inputs: {models: [base], text: corpus}
"""


def planned(folder: Path, text: str) -> str:
    """What a plan of the recipe refuses, "" where it is one."""
    (folder / "recipe.yaml").write_text(text)
    (folder / "data.txt").write_text("text")
    try:
        make_plan(load_recipe(str(folder / "recipe.yaml")), folder / "store")
    except RecipeError as error:
        return str(error).replace(f"{folder}/", "")
    return ""


def test_a_split_that_a_step_will_not_make_is_named_with_both_ways_out(tmp_path: Path) -> None:
    assert planned(tmp_path, RECIPE) == (
        "recipe.yaml:15: step report: input text (step corpus) has no validation split, which text_split asks for; "
        "set corpus.validation_fraction, or change text_split."
    )
    assert planned(tmp_path, RECIPE + "    text_split: train\n") == ""
    assert planned(tmp_path, RECIPE.replace("row_length: 64", "row_length: 64\n    validation_fraction: 0.1")) == ""


def test_a_loss_on_held_out_rows_needs_them_too(tmp_path: Path) -> None:
    text = RECIPE.partition("  report:")[0].replace("max_steps: 2", "max_steps: 2\n    eval_steps: 1")
    assert "step base: input data (step corpus) has no validation split, which eval_steps asks" in planned(
        tmp_path, text
    )


@pytest.mark.parametrize(("splits", "problem"), [(["train"], True), (["train", "validation"], False)])
def test_a_split_that_a_stored_dataset_lacks_is_named(tmp_path: Path, splits: list[str], problem: bool) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "dataset.json").write_text(json.dumps({"holds": "text", "splits": {split: {} for split in splits}}))
    digest = publish(open_store(tmp_path / "store"), folder, "dataset")
    said = planned(tmp_path, RECIPE.replace("text: corpus", f"text: 'artifact:{digest}'"))
    expected = f"step report: input text (artifact:{digest}) has no validation split, which text_split asks for; give a"
    assert (expected in said) == problem
    assert bool(said) == problem
