"""Recipes: a YAML mapping of steps, read into typed steps or refused with the line to change.

The model: a `Recipe` is steps by name; a `Step` is a stage, its validated `Config`, its `Resources` and its inputs; an
`InputRef` says where one input comes from (another step, a reference, an artifact, the Hugging Face hub, or files).

Invariants:
- A `Recipe` that exists is sound: every field is known and valid, every step that an input names exists and makes a
  kind that the input takes, and no step waits for itself. What cannot be known without the store or the disk (a missing
  file, the kind of an artifact named by digest) is checked by `flows.plan`.
- Every message names the file and line, or the `--set` argument, that the value came from.
- Relative paths are relative to the recipe's own folder, so a recipe means the same wherever it is run from.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.recipe_errors import Mistakes, describe_errors, kind_of, plain, quoted
from flows.recipe_inputs import check_cycles, check_kinds, name_problem, read_inputs
from flows.recipe_model import BUILT_IN, InputRef, Recipe, RecipeError, Step, near, paths_start_from, stage_names
from flows.recipe_yaml import Document, YamlError, parse, parse_value
from flows.recipe_yaml import Path as Where
from flows.runners.memory import parse_size
from stages.artifacts import canonical_json
from stages.contract import Resources, StageConfig, config_class

__all__ = ["Header", "InputRef", "Recipe", "RecipeError", "Step", "declared_parameters", "find_recipe", "load_recipe"]

MAX_BYTES = 4 << 20  # a larger file is no recipe, but data that was named by mistake
_SHOWN = 200  # characters of an override in a message
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,99}")  # it becomes the name of a log file
_SPECIAL = ("stage", "inputs", "resources")


class Header(BaseModel):
    """The settings of a recipe outside its steps."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("", description="Name of the recipe; the file's name when empty.")
    description: str = Field("", description="What it does, for people.")
    parameters: dict[str, Any] = Field({}, description="Values that steps take as ${name}, set with --set name=value.")
    code: Literal["closure", "version"] = Field(
        "closure", description="What of a stage's code is part of a step's key: all that it reaches, or its VERSION."
    )
    environment: Literal["record", "identity"] = Field(
        "record", description="Whether versions of libraries are only recorded, or part of a step's key."
    )
    python_path: list[str] | None = Field(
        None, description="Folders with user code; the recipe's own folder when empty."
    )
    steps: dict[str, Any] = Field(description="The steps by name.")


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe: "quickstart" is a built-in one, anything with a slash or `.yaml` is a file.

    Args:
        overrides: `--set` arguments, "step.field=value" or "parameter=value", applied in order.

    Raises:
        RecipeError: anything is wrong with the file or an override; one line for each mistake.
    """
    path = find_recipe(str(name_or_path))
    shown = path.name if path.parent == BUILT_IN else str(name_or_path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise RecipeError(
                f"{shown}: has {size:,} bytes; a recipe has {MAX_BYTES:,} at most. Data is named in `inputs`, not "
                "written in the recipe."
            )
        text = path.read_text("utf-8")
    except OSError as error:
        raise RecipeError(f"{shown}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{shown}: is not UTF-8 text (byte {error.start}).") from None
    try:
        document = parse(text)
    except YamlError as error:
        raise RecipeError(f"{shown}:{error.line}: {error.message}.") from None
    return _Reader(shown, path, text, document).read(overrides)


def declared_parameters(name_or_path: str) -> dict[str, Any]:
    """The parameters of a recipe with their values, before its steps are looked at; {} where it cannot be read, which
    `load_recipe` then says.

    Raises:
        RecipeError: there is no such recipe.
    """
    try:
        document = parse(find_recipe(name_or_path).read_text("utf-8")).value
    except (OSError, UnicodeDecodeError, YamlError):
        return {}
    parameters = document.get("parameters") if isinstance(document, dict) else None
    return parameters if isinstance(parameters, dict) else {}


def find_recipe(name: str) -> Path:
    """The file of a recipe: of a built-in one by its name, of any other by its path.

    Raises:
        RecipeError: there is none.
    """
    if not re.search(r"[/\\]|\.ya?ml$", name):
        path = BUILT_IN / f"{name}.yaml"
        if not path.is_file():
            names = sorted(item.stem for item in BUILT_IN.glob("*.yaml"))
            known = (
                f"Built-in recipes: {', '.join(names) or 'none'}; a file is given by its path, such as ./{name}.yaml."
            )
            raise RecipeError(f"no recipe {name!r}.{near(name, names)} {known}")
        return path
    try:
        name.encode()
        path = Path(name).expanduser()
        path.stat()
    except UnicodeEncodeError:
        raise RecipeError(f"{name!r} is not UTF-8 text; rename the recipe, or set LANG=C.UTF-8.") from None
    except RuntimeError:
        raise RecipeError(f"{name}: there is no such home folder.") from None
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise RecipeError(f"{quoted(name)} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if path.is_dir():
        raise RecipeError(f"{name}: is a folder; name a recipe file.")
    if path.exists() and not path.is_file():
        raise RecipeError(f"{name}: is not a regular file; write the recipe into one.")
    if not path.is_file():
        folder = path.parent
        others = [str(folder / item.name) for item in folder.glob("*.y*ml")] if folder.is_dir() else []
        raise RecipeError(f"{name}: no such file.{near(str(path), others)}")
    return path.absolute()


class _Reader:
    """Reads one document: where each value came from, and the mistakes found so far."""

    def __init__(self, shown: str, path: Path, text: str, document: Document) -> None:
        self.shown, self.path, self.text = shown, path, text
        self.value = document.value
        self.bad = Mistakes(shown, document)

    def read(self, overrides: Sequence[str]) -> Recipe:
        if self.value is None:
            raise RecipeError(f"{self.shown}: is empty; a recipe is a mapping with `steps`.")
        if not isinstance(self.value, dict):
            raise RecipeError(f"{self.shown}:1: a recipe is a mapping with `steps`, not {kind_of(self.value)}.")
        for text in overrides:
            self.override(text)
        self.bad.check()
        header = self.validate(Header, self.value, ())
        if header is None or not header.steps:
            if header is not None:
                self.bad.add(("steps",), "there are no steps.")
            self.bad.check()
        assert header is not None
        self.value["steps"] = self.substitute(header.steps, ("steps",), header.parameters)
        self.bad.check()
        python_path = self.python_path(header.python_path)
        steps = self.steps(self.value["steps"])
        self.bad.check()
        check_kinds(steps, self.bad)
        self.bad.check()
        check_cycles(steps)
        return Recipe(
            header.name or self.path.stem,
            header.description,
            header.parameters,
            header.code,
            header.environment,
            steps,
            self.path,
            python_path,
            self.text,
            tuple(overrides),
            self.value,
        )

    def validate(self, model: type[BaseModel], value: Any, path: Where, extra: Sequence[str] = ()) -> Any:
        try:
            return model.model_validate(value)
        except ValidationError as error:
            for below, message in describe_errors(error, model, value, path, extra):
                self.bad.add((*path, *below), message)
        except RecursionError:
            self.bad.add(path, "is nested too deeply.")
        return None

    # --set

    def override(self, argument: str) -> None:
        target, equals, text = argument.partition("=")
        origin = f"--set {argument if len(argument) <= _SHOWN else argument[: _SHOWN - 1] + '…'}"
        parts = target.strip().split(".")
        if not equals or not all(parts):
            raise RecipeError(f"{origin}: write step.field=value or parameter=value.")
        try:
            value = parse_value(text)
        except YamlError as error:
            raise RecipeError(f"{origin}: the value is not YAML: {error.message}.") from None
        steps = self.value.get("steps")
        steps = steps if isinstance(steps, dict) else {}
        parameters = self.value.get("parameters")
        parameters = parameters if isinstance(parameters, dict) else {}
        path: list[Any]
        if parts[0] in steps and len(parts) > 1:
            path = ["steps", *parts]
        elif parts[0] in parameters:
            path = ["parameters", *parts]
        elif len(parts) == 1 and parts[0] in ("code", "environment"):
            path = parts
        elif parts[0] in steps:
            raise RecipeError(f"{origin}: {parts[0]} is a step; name a field of it, {parts[0]}.field=value.")
        elif len(parts) == 1:
            known = f" Parameters: {', '.join(parameters)}." if parameters else " This recipe has no parameters."
            raise RecipeError(f"{origin}: no parameter {parts[0]}.{near(parts[0], parameters)}{known}")
        else:
            raise RecipeError(f"{origin}: no step {parts[0]}.{near(parts[0], steps)} Steps: {', '.join(steps)}.")
        target_value: Any = self.value
        for index, part in enumerate(path[:-1]):
            if isinstance(target_value, dict) and target_value.get(part) is None:
                target_value[part] = {}
                self.bad.overridden(tuple(path[: index + 1]), origin)
            target_value = target_value[self.key(target_value, path, index, origin)]
        target_value[self.key(target_value, path, len(path) - 1, origin)] = value
        self.bad.overridden(tuple(path), origin)

    def key(self, value: Any, path: list[Any], index: int, origin: str) -> str | int:
        """What part `index` of a `--set` path is in `value`: a key of a mapping, or the number of a list's item."""
        shown = ".".join(map(str, path[1:index] if path[0] == "steps" else path[:index]))
        if isinstance(value, dict):
            return str(path[index])
        if not isinstance(value, list):
            raise RecipeError(f"{origin}: {shown} is {kind_of(value)}, not a mapping.")
        if not re.fullmatch(r"[0-9]{1,6}", path[index]) or int(path[index]) >= len(value):
            known = f"0 to {len(value) - 1}" if value else "none, for it is empty"
            raise RecipeError(
                f"{origin}: {shown} is a list; name the number of an item ({known}), or set the whole list."
            )
        path[index] = int(path[index])
        return int(path[index])

    # parameters

    def substitute(self, value: Any, path: Where, parameters: dict[str, Any]) -> Any:
        if isinstance(value, dict):
            return {key: self.substitute(item, (*path, key), parameters) for key, item in value.items()}
        if isinstance(value, list):
            return [self.substitute(item, (*path, index), parameters) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value

        def look_up(match: re.Match[str]) -> Any:
            name = match[1]
            if name not in parameters:
                self.bad.add(path, f"{_dotted(path)}: no parameter {name!r}.{near(name, parameters)}")
                return ""
            if parameters[name] is None and "inputs" in path:
                self.bad.add(path, f"{_dotted(path)}: parameter {name} has no value; give it with --set {name}=...")
                return ""
            return parameters[name]

        if whole := re.fullmatch(r"\$\{([^{}]*)\}", value):
            return look_up(whole)
        parts = re.split(r"(\$\$\{)", value)  # "$${" stands for a plain "${"
        return "".join(
            "${" if part == "$${" else re.sub(r"\$\{([^{}]*)\}", lambda m: plain(look_up(m)), part) for part in parts
        )

    # steps

    def python_path(self, folders: list[str] | None) -> list[Path]:
        if folders is None:
            result = [] if self.path.parent == BUILT_IN else [self.path.parent]
        else:
            bad = {index: problem for index, folder in enumerate(folders) if (problem := name_problem(folder))}
            for index, problem in bad.items():
                self.bad.add(("python_path", index), f"python_path: {quoted(folders[index])} {problem}.")
            if bad:
                return []
            result = [(self.path.parent / Path(folder).expanduser()).absolute() for folder in folders]
        for index, folder in enumerate(result):
            if not folder.is_dir():
                self.bad.add(("python_path", index), f"python_path: there is no folder {folder}.")
            elif str(folder) not in sys.path:
                sys.path.append(str(folder))
        return result

    def steps(self, value: dict[str, Any]) -> dict[str, Step]:
        result: dict[str, Step] = {}
        for name, body in value.items():
            path: Where = ("steps", name)
            if not _NAME.fullmatch(name):
                self.bad.add(
                    path,
                    f"{quoted(name)} cannot be a step's name: letters, digits, - and _, a letter first, at most 100.",
                )
            elif not isinstance(body, dict):
                self.bad.add(path, f"{name}: a step is a mapping with `stage`, not {kind_of(body)}.")
            elif (step := self.step(name, body, path, value)) is not None:
                result[name] = step
        return result

    def step(self, name: str, body: dict[str, Any], path: Where, all_steps: dict[str, Any]) -> Step | None:
        stage = body.get("stage")
        if not isinstance(stage, str):
            self.bad.add(
                (*path, "stage"),
                f"{name}.stage: names the stage that the step runs, such as {', '.join(stage_names()[:3])}.",
            )
            return None
        try:
            config_type = config_class(stage)
        except ValueError as error:
            known = near(stage, stage_names())
            self.bad.add(
                (*path, "stage"), f"{name}.stage: {error}.{known or ' Stages: ' + ', '.join(stage_names()) + '.'}"
            )
            return None
        except Exception as error:  # the module of a user's stage may raise anything
            self.bad.add(
                (*path, "stage"), f"{name}.stage: {stage} cannot be imported: {type(error).__name__}: {error}."
            )
            return None
        settings = {key: item for key, item in body.items() if key not in _SPECIAL}
        config = self.validate(config_type, settings, path, _SPECIAL)
        if config is not None:
            self.check_identity(name, config, path)
        given = body.get("resources")
        resources = self.validate(Resources, {} if given is None else given, (*path, "resources"))
        for field in ("memory", "shm"):
            try:
                if resources is not None and getattr(resources, field):
                    parse_size(getattr(resources, field))
            except ValueError as error:
                self.bad.add((*path, "resources", field), f"{name}.resources.{field}: {error}.")
        inputs = read_inputs(
            name,
            body.get("inputs"),
            (*path, "inputs"),
            config_type,
            all_steps,
            paths_start_from(self.path),
            self.bad,
        )
        if config is None or resources is None:
            return None
        given = {key.partition(".")[0] for key in inputs}
        if problem := config.inputs_problem(given):
            self.bad.add(path, f"{name}: {problem}.")
        return Step(name, stage, inputs, config, resources, self.bad.where(path))

    def check_identity(self, name: str, config: StageConfig, path: Where) -> None:
        """Note the settings that cannot be part of a step's key, before anything runs on the way to that step."""
        for field, value in config.identity().items():
            try:
                canonical_json(value)
            except ValueError as error:
                reason = str(error).partition(": ")[2]
                self.bad.add((*path, field), f"{name}.{field}: cannot be kept exactly: {reason}.")


def _dotted(path: Where) -> str:
    return ".".join(map(str, path[1:] if path and path[0] == "steps" else path))
