"""Plans: hits, and the first difference that makes a step run. The stages are toys; their processes are real."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from toy_stages import Toys

from flows.endings import RunResult
from flows.execute import execute
from flows.plan import Plan, make_plan
from flows.recipe import RecipeError, load_recipe
from flows.runners.process import ProcessRunner
from stages.artifacts import open_store, read_manifest, results

STEPS = """
a: {stage: COUNT, inputs: {data: data.txt}}
b: {stage: COUNT, inputs: {data: a}, beta: 0.3}
c: {stage: COUNT, inputs: {models: {first: a, second: b}}, total: 3, reward: "MODULE:double"}
"""


class Project(Toys):
    """Toy stages with a recipe of three steps."""

    runs = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "data.txt").write_text("data")
        self.rewards = folder / f"rewards_{self.package}.py"
        self.rewards.write_text("def double(x):\n    return 2 * x\n")
        self.path = self.recipe(STEPS.replace("MODULE", self.rewards.stem))

    def plan(self, *overrides: str, **options: object) -> Plan:
        return make_plan(load_recipe(self.path, overrides), self.store, **options)  # type: ignore[arg-type]

    def run(self, *overrides: str, **options: object) -> RunResult:
        self.runs += 1
        runner = ProcessRunner(preload=False)
        try:
            return execute(self.plan(*overrides, **options), runner=runner, run_id=f"run-{self.runs}")
        finally:
            runner.close()

    def moved(self, folder: Path) -> Project:
        """A copy of all of it in another folder."""
        shutil.copytree(self.folder, folder)
        other = copy.copy(self)
        other.folder, other.store = folder, folder / "store"
        other.path = str(folder / Path(self.path).name)
        other.rewards = folder / self.rewards.name
        other.arithmetic = folder / self.arithmetic.relative_to(self.folder)
        return other

    def reasons(self, *overrides: str, **options: object) -> dict[str, str]:
        """The reason of each step that would run."""
        return {planned.step: planned.reason for planned in self.plan(*overrides, **options).misses}


@pytest.fixture
def fresh(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project(tmp_path_factory.mktemp("finished"))
    assert made.run().ok
    return made


@pytest.fixture
def project(finished: Project, tmp_path: Path) -> Project:
    """A project that was run once. It lies in another folder now, which must change no key."""
    return finished.moved(tmp_path / "project")


def test_nothing_was_ever_run(fresh: Project) -> None:
    plan = fresh.plan()
    assert [planned.reason for planned in plan.steps] == ["never run"] * 3
    assert plan["a"].key is not None
    assert (plan["b"].key, plan["b"].needs, plan["b"].inputs) == (None, ("a",), {"data": None})
    assert plan.seconds is None


def test_everything_is_a_hit_the_second_time(project: Project) -> None:
    plan = project.plan()
    assert plan.misses == []
    assert plan.seconds == 0
    store = open_store(project.store)
    assert [read_manifest(store, str(planned.artifact)).kind for planned in plan.steps] == ["report"] * 3
    assert plan["a"].outputs.keys() == {"trail"}


def test_planning_twice_gives_the_same_and_changes_nothing_in_the_store(project: Project) -> None:
    def objects() -> list[str]:
        return sorted(str(path) for path in project.store.rglob("*") if path.is_file() and path.parent.name != "cache")

    before = objects()
    assert project.plan("b.beta=0.4").to_json() == project.plan("b.beta=0.4").to_json()
    assert objects() == before


@pytest.mark.parametrize(
    ("override", "reasons"),
    [
        ("b.beta=0.4", {"b": "beta 0.3 -> 0.4", "c": "input second changed (b will run)"}),
        ("b.mode=fancy", {"b": "mode plain -> fancy", "c": "input second changed (b will run)"}),
        ("c.model.width=5", {"c": "model.width 4 -> 5"}),
        ("c.model={width: 5, depth: 3}", {"c": "model.width 4 -> 5, and 1 more"}),
        ("c.reward=", {"c": "CODE"}),
        (
            "a.total=5",
            {
                "a": "total 4 -> 5",
                "b": "input data changed (a will run)",
                "c": "input first, second changed",
            },
        ),
        ("c.inputs.models={first: a}", {"c": "input second no longer given"}),
        ("c.inputs.models={first: a, second: b, third: a}", {"c": "input third is new"}),
        ("b.delay=0.01", {}),
        ("b.resources.threads=1", {}),
    ],
)
def test_the_first_difference_is_named(project: Project, override: str, reasons: dict[str, str]) -> None:
    if reasons == {"c": "CODE"}:
        reasons = {"c": f"reward {project.rewards.stem}:double -> none, and 1 more"}
        if len(reasons["c"]) > 70:
            reasons = {"c": f"reward {(project.rewards.stem + ':double')[:47]} -> none, and 1 more"}
    assert project.reasons(override) == reasons


def test_changed_data_runs_what_reads_it(project: Project) -> None:
    (project.folder / "data.txt").write_text("other data")
    assert project.reasons() == {
        "a": "input data changed",
        "b": "input data changed (a will run)",
        "c": "input first, second changed",
    }


def test_a_comment_changes_nothing_and_a_function_is_named(project: Project) -> None:
    text = project.arithmetic.read_text()
    project.arithmetic.write_text("# a comment\n" + text.replace("The sum.", "The sum of two."))
    assert project.reasons() == {}
    project.arithmetic.write_text(text.replace("a + b", "a + b + 0"))
    where = f"{project.package}/count/arithmetic.py (add)"
    assert project.reasons() == {
        "a": f"code changed: {where}",
        "b": "input data changed (a will run), and 1 more",
        "c": "input first, second changed, and 1 more",
    }


def test_code_of_a_users_function_counts_for_the_steps_that_name_it(project: Project) -> None:
    project.rewards.write_text("def double(x):\n    return x + x\n")
    assert project.reasons() == {"c": f"code changed: {project.rewards.name} (double)"}


def test_versions_instead_of_code_keep_results_until_the_number_is_raised(project: Project) -> None:
    assert project.run("code=version").ok
    config = project.arithmetic.with_name("config.py")
    project.arithmetic.write_text(project.arithmetic.read_text().replace("a + b", "b + a"))
    assert project.reasons("code=version") == {}
    project.rewards.write_text("def double(x):\n    return x + x\n")
    assert project.reasons("code=version") == {"c": f"code changed: {project.rewards.name} (double)"}
    config.write_text(config.read_text().replace("VERSION: ClassVar[int] = 1", "VERSION: ClassVar[int] = 2"))
    script = (
        "import sys; from flows.plan import make_plan; from flows.recipe import load_recipe\n"
        f"print(make_plan(load_recipe({project.path!r}, ['code=version']), {str(project.store)!r})['a'].reason)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "code changed: VERSION 1 -> 2"


def test_a_forced_step_runs_and_what_follows_waits_for_it(project: Project) -> None:
    assert project.reasons(force=["b"]) == {"b": "forced", "c": "input second changed (b will run)"}
    result = project.run(force=["b"])
    # The same bytes came out, so what follows is a hit after all.
    assert [step.status for step in result.steps.values()] == ["cached", "done", "cached"]
    [history] = [found.history for found in results(open_store(project.store)) if found.step == "b"]
    assert [older["same_bytes"] for older in history] == [True]


def test_a_step_that_gives_the_same_bytes_again_spares_what_follows(project: Project) -> None:
    (project.folder / "data.txt").write_text("ignored")
    assert project.run("a.ignore_data=true").ok
    (project.folder / "data.txt").write_text("ignored too")
    assert list(project.reasons("a.ignore_data=true")) == ["a", "b", "c"]
    result = project.run("a.ignore_data=true")
    assert {name: step.status for name, step in result.steps.items()} == {"a": "done", "b": "cached", "c": "cached"}


def test_accepted_code_keeps_the_result_and_says_so(project: Project) -> None:
    before = project.plan()["a"]
    project.arithmetic.write_text(project.arithmetic.read_text().replace("a + b", "b + a"))
    plan = project.plan(accept_code=["a", "b", "c"])
    assert plan.misses == []
    assert plan["a"].artifact == before.artifact
    assert plan["a"].key != before.key
    assert plan["a"].reason == f"accepted: code changed: {project.package}/count/arithmetic.py (add)"
    result = project.run(accept_code=["a", "b", "c"])
    assert {step.status for step in result.steps.values()} == {"cached"}
    assert project.reasons() == {}  # from now on, without asking
    kept = next(found for found in results(open_store(project.store)) if found.key == plan["a"].key)
    assert kept.accepted_from == before.key


def test_accepting_code_where_more_has_changed_is_refused(project: Project) -> None:
    project.arithmetic.write_text(project.arithmetic.read_text().replace("a + b", "b + a"))
    with pytest.raises(
        RecipeError, match=r"--accept-code a: no earlier result differs in its code only; .*total 4 -> 9"
    ):
        project.plan("a.total=9", accept_code=["a"])


def test_accepting_code_of_what_was_never_run_is_refused(fresh: Project) -> None:
    with pytest.raises(RecipeError, match=r"--accept-code a: no earlier result .*; its stage was never run"):
        fresh.plan(accept_code=["a"])


def test_until_plans_only_what_is_needed(project: Project) -> None:
    assert [planned.step for planned in project.plan(until=["b"]).steps] == ["a", "b"]
    with pytest.raises(RecipeError, match="--force c: is not among the steps that b needs"):
        project.plan(until=["b"], force=["c"])
    with pytest.raises(RecipeError, match=r"--force d: no such step"):
        project.plan(force=["d"])
    with pytest.raises(RecipeError, match="choose one"):
        project.plan(force=["a"], accept_code=["a"])


def test_a_result_whose_artifact_is_gone_is_no_hit(project: Project) -> None:
    plan = project.plan()
    store = open_store(project.store)
    [entry] = read_manifest(store, str(plan["b"].artifact)).files
    store.delete(entry.blob)
    assert project.reasons() == {
        "b": "its artifact is damaged or gone",
        "c": "input second changed (b will run)",
    }
    assert {name: step.status for name, step in project.run().steps.items()} == {
        "a": "cached",
        "b": "done",
        "c": "cached",  # the same bytes were made again
    }


def test_saved_progress_is_found(fresh: Project) -> None:
    result = fresh.run("a.trouble=crash@3")
    assert result.steps["a"].saved_step == 2
    planned = fresh.plan()["a"]
    assert (planned.reason, planned.resumable, planned.saved_step) == ("saved progress at step 2", True, 2)


def test_a_renamed_step_is_a_hit(project: Project) -> None:
    path = project.recipe("renamed: {stage: COUNT, inputs: {data: data.txt}}", "other.yaml")
    assert make_plan(load_recipe(path), project.store)["renamed"].status == "hit"


def test_other_libraries_are_a_note_or_a_reason_as_the_recipe_says(project: Project) -> None:
    store = open_store(project.store)
    assert project.run("environment=identity").ok
    for found in list(results(store)):
        found.environment["libraries"]["numpy"] = "1.0.0"
        store.put(f"results/{found.stage}/{found.key}.json", found.model_dump_json().encode())
    plan = project.plan()
    assert plan.misses == []
    import numpy

    assert plan["a"].note == f"made with numpy 1.0.0, here {numpy.__version__}"
    # Where the versions are in the key, results made with others have other keys.
    for found in list(results(store)):
        store.delete(f"results/{found.stage}/{found.key}.json")
        changed = found.model_copy(update={"key": found.key[::-1]})
        store.put(f"results/{found.stage}/{changed.key}.json", changed.model_dump_json().encode())
    reasons = project.reasons("environment=identity")
    assert reasons["a"] == f"environment changed: numpy 1.0.0 -> {numpy.__version__}"


def test_an_input_of_the_wrong_kind_from_outside_is_refused(fresh: Project) -> None:
    (fresh.folder / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (fresh.folder / "model" / name).write_text("{}")
    with pytest.raises(RecipeError, match=r"step c: input models.x is a checkpoint \(./model\); it takes a report"):
        fresh.plan("c.inputs.models={x: ./model}")


def test_every_missing_file_is_named_at_once(fresh: Project) -> None:
    with pytest.raises(RecipeError) as caught:
        fresh.plan("a.inputs.data=x.txt", "b.inputs.data=y.txt")
    assert [("x.txt" in line, "y.txt" in line) for line in str(caught.value).splitlines()] == [
        (True, False),
        (False, True),
    ]


def test_user_code_that_is_missing_or_not_python_is_refused(fresh: Project) -> None:
    with pytest.raises(RecipeError, match=r"recipe.yaml:2: a: there is no module 'no_such_rewards'"):
        fresh.plan("a.reward=no_such_rewards:f")
    with pytest.raises(RecipeError, match=r"has no function 'triple'"):
        fresh.plan(f"c.reward={fresh.rewards.stem}:triple")
    fresh.rewards.write_text("def double(x)\n")
    with pytest.raises(RecipeError, match=r"rewards_.*py:1: not valid Python"):
        fresh.plan()


def test_settings_that_have_no_canonical_form_are_refused(fresh: Project) -> None:
    with pytest.raises(RecipeError, match=r"--set a.beta=.inf: a.beta: should be a finite number, not inf"):
        fresh.plan("a.beta=.inf")


def test_planning_imports_neither_torch_nor_prefect(fresh: Project) -> None:
    script = (
        "import sys, json; from flows.plan import make_plan; from flows.recipe import load_recipe\n"
        f"plan = make_plan(load_recipe({fresh.path!r}), {str(fresh.store)!r})\n"
        "names = ('torch', 'transformers', 'prefect', 'accelerate', 'huggingface_hub')\n"
        "heavy = [name for name in names if name in sys.modules]\n"
        "print(json.dumps([heavy, plan.to_json()]))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy, steps = json.loads(found.stdout)
    assert heavy == []
    assert {"step", "stage", "key", "status", "reason", "artifact"} <= steps[0].keys()
