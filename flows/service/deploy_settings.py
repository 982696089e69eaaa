"""The settings of an installation, in one YAML file: its store and recipes, what is retrained by night, and its limits.

`headrace up` and `headrace deploy` read it (`headrace.yaml` in the current folder unless another is named). Without
one, the built-in recipes are deployed on the store `.headrace`, with a nightly deployment that has no schedule.

Invariants:
- Settings that exist are sound: recipes can be read, gate rules parsed, the schedule and time zone are known.
- Paths are relative to the file's folder, in which a worker's flows run. The store's is absolute once read.
- No secret stands in the file: the webhook's address comes from the environment (`HEADRACE_WEBHOOK_URL`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flows.gate import parse_rule
from flows.recipe import declared_parameters, load_recipe
from flows.recipe_errors import Mistakes, describe_errors
from flows.recipe_model import BUILT_IN, Recipe, RecipeError
from flows.recipe_yaml import Document, YamlError, parse
from stages.artifacts import check_ref_name

FILE = "headrace.yaml"


class NightlySettings(BaseModel):
    """A reference that is retrained by a schedule; see `flows.nightly.nightly` for what each means."""

    model_config = ConfigDict(extra="forbid")

    recipe: str = Field(description="The recipe: a built-in one, or the path of a YAML file.")
    cron: str = Field("", description="When, such as `0 2 * * *`; without a schedule when empty.")
    timezone: str = Field("UTC", description="The time zone of `cron`, such as Europe/Berlin.")
    overrides: list[str] = Field([], description="Changed settings, as with `--set`.")
    warm_start: str = Field("", description="step.input that takes the reference's model once it has one.")
    model: str = Field("", description="The step whose model is promoted; the last one of the chain when empty.")
    gate: list[str] = Field([], description="Rules that a model must pass, such as `exact_match > production + 0.01`.")
    approve: bool = Field(False, description="Whether a person must approve what passes the gate.")
    approve_hours: float = Field(24.0, gt=0, le=240, description="Hours after which nobody's approval means no.")
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(7, description="Nights whose models gc leaves in the store.")

    @field_validator("gate")
    @classmethod
    def _rules(cls, rules: list[str]) -> list[str]:
        for rule in rules:
            parse_rule(rule)
        return rules

    @field_validator("timezone")
    @classmethod
    def _zone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            raise ValueError(f"there is no time zone {name!r}; give one such as Europe/Berlin") from None
        return name

    @field_validator("cron")
    @classmethod
    def _cron(cls, text: str) -> str:
        if text:
            from prefect.client.schemas.schedules import CronSchedule

            try:
                CronSchedule(cron=text)
            except ValueError:
                raise ValueError(f"{text!r} is not a schedule in cron's form, such as `0 2 * * *`") from None
        return text


class DeploySettings(BaseModel):
    """What an installation deploys."""

    model_config = ConfigDict(extra="forbid")

    store: str = Field(".headrace", description="The artifact store: a folder, or s3://bucket/prefix.")
    recipes: list[str] = Field([], description="Recipes to choose from in the form; the built-in ones when empty.")
    nightly: dict[str, NightlySettings] = Field({}, description="By the name of a reference: what retrains it.")
    work_pool: str = Field("headrace", description="The Prefect work pool; it is made (of type process) if missing.")
    stage_pool: str = Field(
        "", description="The work pool whose workers run steps with `--runner workpool`; none if empty."
    )
    steps: int = Field(0, ge=0, le=10_000, description="Stages that may run at once in all runs; 0 for any number.")
    gpus: dict[str, int] = Field({}, description="GPUs by host name, for steps of several runs to share.")
    folder: Path = Field(Path("."), exclude=True)

    @field_validator("nightly")
    @classmethod
    def _names(cls, value: dict[str, NightlySettings]) -> dict[str, NightlySettings]:
        for name in value:
            check_ref_name(name)
        return value

    def path_of(self, recipe: str) -> str:
        """What loads a recipe from any folder: a built-in name, or an absolute path."""
        if not _is_path(recipe):
            return recipe
        try:
            return os.path.normpath(self.folder / Path(recipe).expanduser())
        except RuntimeError:
            raise RecipeError(f"{recipe}: there is no such home folder.") from None

    def recipes_by_name(self) -> dict[str, Recipe]:
        """Every recipe that can be chosen, read, by what is chosen: its name or path as the settings have it.

        Raises:
            RecipeError: one cannot be used. A built-in one that needs a value (a model, data) is read all the same.
        """
        names = self.recipes or sorted(path.stem for path in BUILT_IN.glob("*.yaml"))
        names = [*names, *(item.recipe for item in self.nightly.values())]
        paths = {name: self.path_of(name) for name in names}
        return {name: load_recipe(path, _placeholders(path)) for name, path in paths.items()}


def read_settings(path: Path | None = None) -> DeploySettings:
    """The settings of a file, or of `headrace.yaml` in the current folder, or the defaults where there is none.

    Raises:
        RecipeError: anything in it is wrong; one line for each mistake.
    """
    if path is None and not Path(FILE).is_file():
        return _completed(DeploySettings(), Path.cwd())
    path = path or Path(FILE)
    try:
        document = parse(path.read_text("utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not UTF-8 text (byte {error.start}).") from None
    except YamlError as error:
        raise RecipeError(f"{path}:{error.line}: {error.message}.") from None
    settings = _validate(str(path), document)
    return _completed(settings, path.absolute().parent)


def _validate(shown: str, document: Document) -> DeploySettings:
    value = {} if document.value is None else document.value
    mistakes = Mistakes(shown, document)
    try:
        if not isinstance(value, dict):
            raise RecipeError(f"{shown}:1: the settings are a mapping.")
        if "folder" in value:
            mistakes.add(("folder",), "folder: no such field.")
        return DeploySettings.model_validate({key: item for key, item in value.items() if key != "folder"})
    except ValidationError as error:
        for below, message in describe_errors(error, DeploySettings, value, (), ()):
            mistakes.add(below, message)
    mistakes.check()
    raise AssertionError("a validation error is a mistake")


def _completed(settings: DeploySettings, folder: Path) -> DeploySettings:
    """With absolute paths, a nightly deployment where none is asked for, and recipes that have been tried."""
    store = settings.store
    if "://" not in store:
        try:
            store = os.path.normpath(folder / Path(store).expanduser())
        except RuntimeError:
            raise RecipeError(f"store {store}: there is no such home folder; give the whole path.") from None
    nightly = settings.nightly or {"production": NightlySettings(recipe="quickstart")}
    completed = settings.model_copy(update={"folder": folder, "store": store, "nightly": nightly})
    completed.recipes_by_name()
    for name, item in nightly.items():
        path = completed.path_of(item.recipe)
        recipe = load_recipe(path, [*_placeholders(path), *item.overrides])
        step, _, wanted = item.warm_start.partition(".")
        if item.warm_start and (step not in recipe.steps or not wanted):
            known = ", ".join(f"{each}.model" for each, it in recipe.steps.items() if "model" in type(it.config).INPUTS)
            raise RecipeError(
                f"nightly {name}: warm_start {item.warm_start!r}: name a step's input. Here: {known or 'none'}."
            )
        if item.model:
            recipe.check_step(item.model, f"nightly {name}: model")
    return completed


def _is_path(recipe: str) -> bool:
    return "/" in recipe or "\\" in recipe or recipe.endswith((".yaml", ".yml"))


def _placeholders(path: str) -> list[str]:
    """Values for the parameters of a recipe that have none, so that its steps can be read for the form."""
    return [f"{name}=./to-be-given" for name, value in declared_parameters(path).items() if value is None]
