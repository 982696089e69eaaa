"""The forms of the deployments: JSON schemas that Prefect's pages draw as selects, multi-selects and lines to add.

A flow's parameters are plain text and lists of text, so that any program may start it with any recipe; the form of a
deployment narrows them to what this installation has. The server checks what is submitted against the schema, so a step
or a recipe that does not exist is refused before a run is made; settings are checked as the first thing in the run.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from typing import Any

from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema
from pydantic.fields import FieldInfo

from flows.recipe_model import Recipe

OVERRIDE = r"^\s*[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\s*=[\s\S]*$"  # what `--set` takes


def form(flow: Flow[..., Any], recipes: Mapping[str, Recipe], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a flow's parameters as its form shows them.

    Args:
        recipes: those to choose from; the steps to choose from are all of theirs.
        defaults: values that the deployment sets, shown in the form.
    """
    schema = parameter_schema(flow.fn).model_dump()
    fields = _fields(flow)
    steps = list(dict.fromkeys(step for recipe in recipes.values() for step in recipe.steps))
    for name, shape in schema["properties"].items():
        info = fields.get(name)
        if info is not None:
            shape["title"] = info.title or _titled(name)
            if info.description:
                shape["description"] = info.description
        if "const" in shape:  # one choice is a select too
            shape["enum"] = [shape.pop("const")]
        if name == "recipe" and recipes:
            shape["enum"] = list(recipes)
        if name in ("until", "force", "accept_code") and steps:
            shape["items"] = {"type": "string", "enum": steps}
            shape["uniqueItems"] = True
        if name == "overrides":
            shape["items"] = {"type": "string", "pattern": OVERRIDE}
        if name in defaults:
            shape["default"] = defaults[name]
    return schema


def _fields(flow: Flow[..., Any]) -> dict[str, FieldInfo]:
    """The `Field` of each parameter that is annotated with one."""
    hints = typing.get_type_hints(flow.fn, include_extras=True)
    found = {}
    for name in inspect.signature(flow.fn).parameters:
        for item in getattr(hints.get(name), "__metadata__", ()):
            if isinstance(item, FieldInfo):
                found[name] = item
    return found


def _titled(name: str) -> str:
    return re.sub("_", " ", name).capitalize()
