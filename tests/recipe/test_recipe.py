"""Recipes: what is read, and that every mistake is one sentence with the place to change."""

import os
from pathlib import Path

import pytest

from flows.recipe import Recipe, RecipeError, load_recipe

# Stages of a made-up project with settings and kinds like those of real ones, which may change without these tests.
CONFIG = """
from typing import ClassVar, Literal
from pydantic import BaseModel, Field
from stages.contract import ImportPath, Input, StageConfig

class Model(BaseModel):
    model_config = {"extra": "forbid"}
    hidden_size: int = 8

class Config(StageConfig):
    INPUTS: ClassVar = INPUTS_HERE
    OUTPUT: ClassVar[str] = "OUTPUT_HERE"
    SIDE_OUTPUTS: ClassVar[dict[str, str]] = SIDE_HERE
    format: Literal["text", "chat", "preference"] = "text"
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate.")
    max_steps: int | None = None
    model: Model | int = Model()
    reward: ImportPath | None = None
    REQUIRED_HERE
    def holds(self):
        return self.format if self.OUTPUT == "dataset" else None
"""
STAGES = {
    "rows": ('{"data": Input(("source",), required=False, many=True)}', "dataset", "{}", ""),
    "train": (
        '{"data": Input(("dataset",), holds=("text", "chat")), "model": Input(("checkpoint",), required=False)}',
        "checkpoint",
        "{}",
        "",
    ),
    "align": (
        '{"model": Input(("checkpoint",)), "pairs": Input(("dataset",), holds=("preference",))}',
        "checkpoint",
        '{"rollouts": "rollouts"}',
        'beta: float = Field(description="Strength of the penalty.")',
    ),
    "judge": ('{"models": Input(("checkpoint",), many=True)}', "report", "{}", ""),
}

GOOD = """
name: example
parameters: {seed: 3, rate: 2e-3, file: words}
steps:
  corpus:
    stage: st.rows
    inputs: {data: ["${file}.txt", "*.md"]}
  base:
    stage: st.train
    inputs: {data: corpus}
    learning_rate: "${rate}"
    max_steps: ${seed}
  pairs: {stage: st.rows, format: preference}
  dpo:
    stage: st.align
    inputs: {model: base, pairs: pairs}
    beta: 0.1
    resources: {threads: 2, memory: 8GiB}
  report:
    stage: st.judge
    inputs: {models: [base, dpo]}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, (inputs, output, side, required) in STAGES.items():
        (folder / "st" / name).mkdir(parents=True)
        text = CONFIG.replace("INPUTS_HERE", inputs).replace("OUTPUT_HERE", output)
        text = text.replace("SIDE_HERE", side).replace("REQUIRED_HERE", required)
        (folder / "st" / name / "config.py").write_text(text)
        (folder / "st" / name / "stage.py").write_text("def run(context): ...\n")
    (folder / "st" / "broken").mkdir()
    (folder / "st" / "broken" / "config.py").write_text("import no_such_library\n")
    return folder


def load(project: Path, text: str, *overrides: str) -> Recipe:
    path = project / "recipe.yaml"
    path.write_text(text)
    return load_recipe(str(path), overrides)


def refusal(project: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(project, text, *overrides)
    return str(caught.value).replace(f"{project}{os.sep}", "")


def test_a_recipe_is_read_into_checked_steps(project: Path) -> None:
    recipe = load(project, GOOD)
    assert recipe.name == "example"
    assert recipe.steps["base"].config.learning_rate == 0.002  # type: ignore[attr-defined]
    assert recipe.steps["base"].config.max_steps == 3  # type: ignore[attr-defined]
    assert recipe.steps["dpo"].resources.threads == 2
    assert recipe.steps["dpo"].inputs["model"].target == "base"
    assert recipe.steps["corpus"].inputs["data.files"].patterns == ("words.txt", "*.md")
    assert list(recipe.steps["report"].inputs) == ["models.base", "models.dpo"]
    assert recipe.python_path == [project]


def test_steps_come_after_what_they_need_and_until_leaves_the_rest_out(project: Path) -> None:
    text = GOOD.replace("steps:\n", "steps:\n  last: {stage: st.train, inputs: {data: corpus, model: dpo}}\n")
    recipe = load(project, text)
    assert recipe.order() == ["corpus", "base", "pairs", "dpo", "last", "report"]
    assert recipe.order(["base"]) == ["corpus", "base"]
    with pytest.raises(RecipeError, match=r"--until bsae: no such step. Did you mean base\?"):
        recipe.order(["bsae"])


def test_set_changes_settings_parameters_and_inputs(project: Path) -> None:
    recipe = load(project, GOOD, "dpo.beta=0.2", "rate=1e-4", "base.model.hidden_size=16", "report.inputs.models=[dpo]")
    assert recipe.steps["dpo"].config.beta == 0.2  # type: ignore[attr-defined]
    assert recipe.steps["base"].config.learning_rate == 1e-4  # type: ignore[attr-defined]
    assert recipe.steps["base"].config.model.hidden_size == 16  # type: ignore[attr-defined]
    assert list(recipe.steps["report"].inputs) == ["models.dpo"]


def test_set_reaches_into_lists_by_number(project: Path) -> None:
    recipe = load(
        project, GOOD, "report.inputs.models.1=base", "corpus.inputs.data.0=other.txt", "report.inputs.models.0=dpo"
    )
    assert list(recipe.steps["report"].inputs) == ["models.dpo", "models.base"]
    assert recipe.steps["corpus"].inputs["data.files"].patterns == ("other.txt", "*.md")
    assert refusal(project, GOOD, "report.inputs.models.2=dpo") == (
        "--set report.inputs.models.2=dpo: report.inputs.models is a list; name the number of an item (0 to 1), "
        "or set the whole list."
    )
    assert "is the value 0.1, not a mapping" in refusal(project, GOOD, "dpo.beta.0=3")


def test_parameters_inside_a_text_are_written_as_yaml_writes_them(project: Path) -> None:
    text = "parameters: {a: true, b: 2}\nsteps:\n  x: {stage: st.rows, inputs: {data: '${a}-${b}-$${c}.txt'}}\n"
    assert load(project, text).steps["x"].inputs["data.files"].patterns == ("true-2-${c}.txt",)


def test_a_mapping_names_the_artifacts_of_an_input_that_takes_many(project: Path) -> None:
    recipe = load(project, GOOD.replace("[base, dpo]", "{before: base, after: dpo, third: 'ref:production'}"))
    inputs = recipe.steps["report"].inputs
    assert {name: (ref.source, ref.target) for name, ref in inputs.items()} == {
        "models.before": ("step", "base"),
        "models.after": ("step", "dpo"),
        "models.third": ("ref", "production"),
    }


def test_side_outputs_artifacts_and_models_of_the_hub_can_be_named(project: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    text = GOOD.replace("[base, dpo]", f'[base, "artifact:sha256:9f31c0", "hf:org/name@{revision}"]')
    inputs = load(project, text).steps["report"].inputs
    assert [ref.source for ref in inputs.values()] == ["step", "artifact", "hf"]
    assert list(inputs) == ["models.base", "models.9f31c0", "models.name"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "learning_rate:",
            "learning_rat:",
            "recipe.yaml:11: base.learning_rat: no such field. Did you mean learning_rate?",
        ),
        ("beta: 0.1", "beta: high", "recipe.yaml:17: dpo.beta: should be a valid number, not 'high'."),
        ("    beta: 0.1\n", "", "recipe.yaml:14: dpo.beta: is missing: Strength of the penalty."),
        ('"${rate}"', "-1.0", "recipe.yaml:11: base.learning_rate: should be greater than 0, not -1.0."),
        ("format: preference", "format: pairs", "should be 'text', 'chat' or 'preference', not 'pairs'."),
        ("${seed}", "${sede}", "recipe.yaml:12: base.max_steps: no parameter 'sede'. Did you mean seed?"),
        ("stage: st.train", "stage: st.trian", "recipe.yaml:9: base.stage: there is no stage 'st.trian'"),
        (
            "stage: st.train",
            "stage: pretrian",
            "base.stage: there is no stage 'pretrian' (no module stages.pretrian.config)",
        ),
        ("stage: st.train", "stage: st.broken", "base.stage: st.broken cannot be imported: ModuleNotFoundError"),
        ("stage: st.train", "stage: [x]", "recipe.yaml:9: base.stage: names the stage that the step runs"),
        ("data: corpus", "data: corups", "recipe.yaml:10: base: input data: no step 'corups'. Did you mean corpus?"),
        ("{data: corpus}", "{dota: corpus}", "recipe.yaml:10: base: no input 'dota'. Did you mean data?"),
        ("{data: corpus}", "{}", "base: input data is missing; it takes a dataset (text or chat)."),
        (
            "inputs: {models: [base, dpo]}",
            "inputs: {models: []}",
            "report: input models is missing; it takes a checkpoint.",
        ),
        ("[base, dpo]", "[base, base]", "report: models.base is given twice"),
        ("[base, dpo]", "[base, dpo/rollout]", "step dpo has no output 'rollout'. Did you mean rollouts?"),
        ("pairs: pairs}", "pairs: [pairs, base]}", "dpo: input pairs takes one artifact; a list holds files only"),
        ("data: corpus", "data: 3", "base: input data names a step, a reference or a file, not the value 3."),
        ("data: corpus", "data: 'hf:org/name'", "a revision is needed, as names move"),
        ("data: corpus", "data: 'hf:org/name@main'", "revision 'main' is a name that can move"),
        ("data: corpus", "data: 'artifact:xyz'", "a digest is written sha256:<hex>"),
        ("threads: 2", "thread: 2", "recipe.yaml:18: dpo.resources.thread: no such field. Did you mean threads?"),
        ("memory: 8GiB", "memory: lots", "dpo.resources.memory: 'lots' is not a size; write it like 8GiB or 500MB."),
        ("name: example", "name: example\ncode: versoin", "recipe.yaml:3: code: should be 'closure' or 'version'"),
        ("name: example", "nam: example", "recipe.yaml:2: nam: no such field. Did you mean name?"),
        ("name: example", "python_path: [nowhere]", "python_path: there is no folder"),
        ("name: example", "python_path: [~nosuchuser/x]", "python_path: '~nosuchuser/x' starts with ~, and there is"),
        ("name: example", f"python_path: [{'x' * 300}]", "is too long for the name of a file."),
        ("name: example", 'python_path: ["a\\0b"]', "python_path: 'a\\x00b' holds a NUL character"),
        ("  pairs:", "  pa/irs:", "'pa/irs' cannot be a step's name"),
        ("  pairs:", f"  {'p' * 101}:", "cannot be a step's name: letters, digits, - and _, a letter first, at most"),
        (
            '["${file}.txt", "*.md"]',
            "[]",
            "recipe.yaml:7: corpus: input data is a list without anything in it; leave it",
        ),
        ("*.md", "~nosuchuser/x", "'~nosuchuser/x' starts with ~, and there is no such home folder"),
        ("*.md", "x" * 5000 + "/", "x...' is too long for the name of a file."),
        ("*.md", "a\\0.md", "holds a NUL character"),
        ("*.md", "\\ud800.md", "holds half of a surrogate pair"),
        ("*.md", "https://host/a.txt", "'https://host/a.txt' is a URL, and nothing is fetched from one; download it"),
        ('"${rate}"', "1e999", "recipe.yaml:11: base.learning_rate: should be a finite number, not inf."),
        ("${seed}", "true", "recipe.yaml:12: base.max_steps: should be a number, not true."),
        ("${seed}", "9" * 30, "9 exceeds safe integer domain for JSON floats."),
        (
            "max_steps:",
            "model: {hiden_size: 3}\n    max_steps:",
            "base.model.hiden_size: no such field. Did you mean hidden_size?",
        ),
        ("max_steps:", "reward: score\n    max_steps:", "base.reward: 'score' is not of the form module:function"),
        (
            "max_steps:",
            "learning_rate: 1\n    max_steps:",
            "steps.base.learning_rate is written twice, first on line 11",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(project: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    found = refusal(project, GOOD.replace(old, new, 1))
    assert message in found
    assert found.startswith("recipe.yaml:")


def test_an_input_of_the_wrong_kind_is_named_with_those_that_fit(project: Path) -> None:
    found = refusal(project, GOOD.replace("model: base", "model: corpus"))
    assert "step dpo: input model is a dataset (step corpus); it takes a checkpoint. Checkpoints here: base." in found


def test_a_dataset_of_the_wrong_rows_is_named_with_those_that_fit(project: Path) -> None:
    found = refusal(project, GOOD.replace("pairs: pairs", "pairs: corpus"))
    assert "step dpo: input pairs is a dataset of text rows (step corpus); it takes preference rows." in found
    assert "Datasets here: pairs." in found


def test_a_cycle_is_named_step_by_step(project: Path) -> None:
    found = refusal(project, GOOD.replace("{data: corpus}", "{data: corpus, model: dpo}"))
    assert "steps wait for each other: base needs dpo, dpo needs base." in found


def test_several_mistakes_are_told_at_once(project: Path) -> None:
    found = refusal(project, GOOD.replace("beta: 0.1", "bta: 0.1").replace("learning_rate:", "learning_rat:"))
    assert {line.split(": ")[1] for line in found.splitlines()} == {"base.learning_rat", "dpo.bta", "dpo.beta"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dpo.bta=0.2", "--set dpo.bta=0.2: dpo.bta: no such field. Did you mean beta?"),
        ("dpo.beta=x", "--set dpo.beta=x: dpo.beta: should be a valid number, not 'x'."),
        ("dpo.beta", "--set dpo.beta: write step.field=value or parameter=value."),
        (".beta=1", "write step.field=value"),
        ("dop.beta=1", "--set dop.beta=1: no step dop. Did you mean dpo?"),
        ("dpo=1", "dpo is a step; name a field of it"),
        ("sed=1", "--set sed=1: no parameter sed. Did you mean seed? Parameters: seed, rate, file."),
        ("dpo.beta.x=1", "--set dpo.beta.x=1: dpo.beta is the value 0.1, not a mapping."),
        ("dpo.beta=[1", "--set dpo.beta=[1: the value is not YAML"),
        ("dpo.inputs.model=pairs", "--set dpo.inputs.model=pairs: step dpo: input model is a dataset (step pairs)"),
        ("code=versoin", "--set code=versoin: code: should be 'closure' or 'version', not 'versoin'."),
    ],
)
def test_a_bad_override_is_named_as_it_was_given(project: Path, override: str, message: str) -> None:
    assert message in refusal(project, GOOD, override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "recipe.yaml: is empty"),
        ("# nothing\n", "recipe.yaml: is empty"),
        ("- a\n- b\n", "recipe.yaml:1: a recipe is a mapping with `steps`, not a list."),
        ("name: x\n", "recipe.yaml:1: steps: is missing"),
        ("steps: {}\n", "recipe.yaml:1: there are no steps."),
        ("steps: [a]\n", "steps: should be a valid mapping, not a list."),
        ("name: x\nsteps:\n  a: [1\n", "recipe.yaml:4: expected ',' or ']'"),
        (
            "steps:\n  a: {stage: tokenize, format: text, row_length: 8}\n",
            "recipe.yaml:2: a: there is nothing to read: give the input `data`, or generators.",
        ),
        (
            "steps:\n  a: {stage: tokenize, format: text, row_length: 8, inputs: {data: ./x.txt}}\n",
            "recipe.yaml:2: a: there is no tokenizer: give the input `tokenizer`",
        ),
        (
            "steps:\n  a: {stage: evaluate, inputs: {models: ['ref:a'], prompts: 'ref:b'}}\n",
            "recipe.yaml:2: a: input prompts needs `score`",
        ),
        ("steps: {a: 3}\n", "a: a step is a mapping with `stage`, not the value 3."),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(project: Path, text: str, message: str) -> None:
    assert message in refusal(project, text)


def test_a_file_that_is_not_there_is_refused_with_the_nearest(project: Path) -> None:
    (project / "recipe.yaml").write_text(GOOD)
    with pytest.raises(RecipeError, match=r"recipes.yaml: no such file. Did you mean .*recipe.yaml\?"):
        load_recipe(str(project / "recipes.yaml"))
    with pytest.raises(RecipeError, match="no recipe 'nowhere'"):
        load_recipe("nowhere")
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe(f"{project}/")
    os.mkfifo(project / "pipe.yaml")
    with pytest.raises(RecipeError, match=r"pipe.yaml: is not a regular file"):
        load_recipe(str(project / "pipe.yaml"))
    with open(project / "large.yaml", "wb") as file:
        file.truncate(5_000_000_000)
    with pytest.raises(RecipeError, match=r"large.yaml: has 5,000,000,000 bytes; a recipe has 4,194,304 at most"):
        load_recipe(str(project / "large.yaml"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(project / "recipe.yaml"), ["base.hidden_size=" + "9" * 100_000])
    assert len(str(caught.value)) < 1000
    (project / "binary.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(RecipeError, match="is not UTF-8 text"):
        load_recipe(str(project / "binary.yaml"))
