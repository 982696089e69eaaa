"""Mistakes in a recipe, as the sentences that its author reads.

`Mistakes` gathers them, each with the line or the `--set` argument that the value came from. A validation error of
pydantic becomes a place (a path into the data) and a message such as "sft.learning_rat: no such field. Did you mean
learning_rate?"; the alternatives of a union are joined into one message.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flows.recipe_model import RecipeError
from flows.recipe_yaml import Document, Path


class Mistakes:
    """What is wrong with a recipe so far, and where each of its values came from.

    Args:
        shown: the file's name in messages.
        document: the parsed file.
    """

    def __init__(self, shown: str, document: Document) -> None:
        self.shown, self.document = shown, document
        self.lines: list[str] = []
        self._origins: dict[Path, str] = {}

    def overridden(self, path: Path, origin: str) -> None:
        """Say that the value at `path` no longer comes from the file but from `origin`."""
        for known in [item for item in self.document.lines if item[: len(path)] == path]:
            del self.document.lines[known]
        self._origins[path] = origin

    def where(self, path: Path) -> str:
        """The origin of the value at `path`: "recipe.yaml:14" or "--set dpo.beta=2"."""
        for length in range(len(path), -1, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
            if path[:length] in self.document.lines:
                break
        return f"{self.shown}:{self.document.line(path)}"

    def add(self, path: Path, message: str) -> None:
        """Note a mistake in the value at `path`."""
        self.say(f"{self.where(path)}: {message}")

    def say(self, line: str) -> None:
        if line not in self.lines:
            self.lines.append(line)

    def check(self) -> None:
        """Raises RecipeError, one line a mistake, if there are any."""
        if self.lines:
            raise RecipeError("\n".join(self.lines))


def kind_of(value: Any) -> str:
    """What a value is, in words: "a mapping", "the text 'x'", "nothing"."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            return f"the text {quoted(value)}" if value else "an empty text"
    return f"the value {plain(value)}"


def quoted(value: Any) -> str:
    """A value as Python writes it, cut where it is too long to read."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:160]}...{text[-1]}"


def plain(value: Any) -> str:
    """A scalar as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def describe_errors(
    error: ValidationError, model: type[BaseModel], data: Any, path: Path, extra: Sequence[str] = ()
) -> list[tuple[Path, str]]:
    """The mistakes in `data`, each as its path below `path` and one sentence.

    Args:
        model: what `data` was validated as.
        path: where `data` stands in the recipe; "steps" in front is not shown.
        extra: names that stand beside the model's fields in the recipe, suggested like them.
    """
    shown = ".".join(map(str, path[1:] if path and path[0] == "steps" else path))
    found: dict[Path, list[str]] = {}
    for details in error.errors(include_url=False):
        below = _place(details, data)
        found.setdefault(below, []).append(_sentence(details, model, data, below, extra))
    result = []
    for below, messages in found.items():
        name = ".".join([shown, *map(str, below)] if shown else [*map(str, below)])
        message = ", or ".join(dict.fromkeys(messages))
        result.append((below, f"{name}: {message}" + ("" if message.endswith(("?", ".")) else ".")))
    return result


def _place(details: ErrorDetails, data: Any) -> Path:
    """The location without the names of union members, which pydantic puts between the keys."""
    place: list[str | int] = []
    missing = details["type"] == "missing"
    location = details["loc"]
    for index, item in enumerate(location):
        if (isinstance(data, dict) and item in data) or (isinstance(data, list) and item in range(len(data))):
            data = data[item]  # type: ignore[index]
        elif not (missing and index == len(location) - 1):
            continue
        place.append(item)
    return tuple(place)


def _sentence(details: ErrorDetails, model: type[BaseModel], data: Any, below: Path, extra: Sequence[str]) -> str:
    kind = details["type"]
    if kind == "extra_forbidden":
        fields = {name for owner in _models_at(model, below[:-1]) for name in owner.model_fields}
        if len(below) == 1:
            fields.update(extra)
        near = difflib.get_close_matches(str(below[-1]), sorted(fields), n=1, cutoff=0.6)
        if near:
            return f"no such field. Did you mean {near[0]}?"
        return f"no such field. Fields: {', '.join(sorted(fields))}." if fields else "no such field."
    if kind == "missing":
        owners = _models_at(model, below[:-1])
        infos = [owner.model_fields[str(below[-1])] for owner in owners if str(below[-1]) in owner.model_fields]
        about = infos[0].description if infos else None
        return f"is missing: {about}" if about else "is missing"
    if kind in ("too_short", "too_long"):
        limit, there = (
            details["ctx"].get("min_length", details["ctx"].get("max_length")),
            details["ctx"]["actual_length"],
        )
        return f"should have at {'least' if kind == 'too_short' else 'most'} {limit} in it, not {there}"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind in ("value_error", "assertion_error"):
        return message
    message = re.sub(r" or instance of \w+|, unable to parse.*", "", message)
    message = message.replace("Input should be", "should be").replace("dictionary", "mapping")
    value = details["input"]
    return f"{message}, not {kind_of(value) if isinstance(value, dict | list) else quoted(value)}"


def _models_at(model: type[BaseModel], path: Path) -> list[type[BaseModel]]:
    """The models that the data at `path` may be."""
    owners: list[type[BaseModel]] = [model]
    for item in path:
        following: list[type[BaseModel]] = []
        for owner in owners:
            info = owner.model_fields.get(str(item))
            if info is not None:
                following.extend(_models_in(info.annotation))
        owners = following or owners  # an index or a key of a mapping: the models are those of the field around it
    return owners


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)
