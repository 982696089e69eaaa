"""What a recipe is once it has been read: steps, their inputs, and the words that messages about them share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stages.contract import Input, Resources, StageConfig

BUILT_IN = Path(__file__).parent / "recipes"


class RecipeError(ValueError):
    """The recipe, or what was asked of it, cannot be used. The message is what the user reads; one line a mistake."""


@dataclass(frozen=True)
class InputRef:
    """Where one input of a step comes from.

    Attributes:
        name: the input's name in the stage, "model", or "models.base" for one of many.
        text: as the recipe writes it.
        source: what it refers to: the output of a "step", a "ref" or an "artifact" of the store, a model of the "hf"
            hub, or "files".
        target: step name; name of the ref; digest; ORG/NAME@REVISION; empty for files.
        output: for a step: the name of a side output, empty for the main one.
        patterns: for files: paths and globs, "stdlib:GLOB" for files of Python's standard library.
        where: file and line, for messages.
    """

    name: str
    text: str
    source: Literal["step", "ref", "artifact", "hf", "files"]
    target: str = ""
    output: str = ""
    patterns: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Step:
    """One step: a stage with its inputs and settings."""

    name: str
    stage: str
    inputs: dict[str, InputRef]
    config: StageConfig
    resources: Resources
    where: str = ""

    def takes(self, ref_name: str) -> Input:
        """The declaration of the input that `ref_name` ("model", "models.base") fills."""
        return type(self.config).INPUTS[ref_name.partition(".")[0]]

    def upstream(self) -> list[str]:
        """The names of the steps whose outputs this one takes, in order and without repeats."""
        return list(dict.fromkeys(ref.target for ref in self.inputs.values() if ref.source == "step"))


@dataclass(frozen=True)
class Recipe:
    """A recipe that has been checked.

    Attributes:
        code: "closure": a step's key holds the syntax trees of the code it reaches; "version": its stage's `VERSION`.
        environment: "record": library versions are recorded with each result; "identity": they are part of its key.
        steps: in the order of the file.
        path: the file.
        python_path: folders with user code (stages and functions of their own).
        text: the file as it is; `overrides` are the `--set` arguments applied to it.
        document: the settings after overrides and parameters, as plain values.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    code: Literal["closure", "version"]
    environment: Literal["record", "identity"]
    steps: dict[str, Step]
    path: Path
    python_path: list[Path]
    text: str = ""
    overrides: tuple[str, ...] = ()
    document: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder that relative paths of the recipe start from."""
        return paths_start_from(self.path)

    def order(self, until: Sequence[str] = ()) -> list[str]:
        """Step names so that each comes after those it waits for; with `until`, these steps and what they need only.

        Raises:
            RecipeError: `until` names no step.
        """
        wanted = set(self.steps)
        for name in until:
            self.check_step(name, "--until")
        if until:
            wanted, stack = set(), list(until)
            while stack:
                name = stack.pop()
                if name not in wanted:
                    wanted.add(name)
                    stack.extend(self.steps[name].upstream())
        order: list[str] = []

        def visit(name: str) -> None:
            if name in order:
                return
            for needed in self.steps[name].upstream():
                visit(needed)
            order.append(name)

        for name in self.steps:
            if name in wanted:
                visit(name)
        return order

    def check_step(self, name: str, argument: str) -> None:
        """Raises RecipeError, naming `argument`, unless there is a step `name`."""
        if name not in self.steps:
            raise RecipeError(
                f"{argument} {name}: no such step.{near(name, self.steps)} Steps: {', '.join(self.steps)}."
            )


def paths_start_from(recipe: Path) -> Path:
    """Where a recipe's relative paths start: its own folder, or the current one for a recipe of Headrace itself."""
    return Path.cwd() if recipe.parent == BUILT_IN else recipe.parent


def near(name: str, known: Iterable[str]) -> str:
    """ " Did you mean NAME?" for the nearest known name, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {found[0]}?" if found else ""


def wrong_input(step: Step, ref: InputRef, kind: str, holds: str | None, origin: str) -> str:
    """Why an artifact of `kind` (a dataset of `holds` rows, if known) cannot be input `ref` of `step`; "" if it can."""
    takes = step.takes(ref.name)
    if kind not in takes.kinds:
        hint = " A tokenize step makes one of files." if kind == "source" and "dataset" in takes.kinds else ""
        return f"step {step.name}: input {ref.name} is {_a(kind)} ({origin}); it takes {describe_input(takes)}.{hint}"
    if kind == "dataset" and takes.holds and holds is not None and holds not in takes.holds:
        wanted = " or ".join(takes.holds)
        return f"step {step.name}: input {ref.name} is a dataset of {holds} rows ({origin}); it takes {wanted} rows."
    return ""


def lacking_split(step: Step, ref: InputRef, splits: Iterable[str] | None, maker: str = "") -> str:
    """Why a dataset with these splits (None: unknown) cannot be input `ref` of `step`; "" if it can.

    Args:
        maker: the step that makes it, "" where none does.
    """
    split, field = step.config.reads_splits().get(ref.name, ("", ""))
    if not split or splits is None or split in splits:
        return ""
    advice = f"set {maker}.validation_fraction" if maker else "give a dataset that has one"
    what = f"step {maker}" if maker else ref.text
    return (
        f"step {step.name}: input {ref.name} ({what}) has no {split} split, which {field} asks for; {advice}, or "
        f"change {field}."
    )


def describe_input(takes: Input) -> str:
    """ "a checkpoint", "a dataset (chat or text)", "a source or rollouts": what an input takes."""
    text = " or ".join([_a(takes.kinds[0]), *takes.kinds[1:]])
    return f"{text} ({' or '.join(takes.holds)})" if takes.holds else text


def stage_names() -> list[str]:
    """The stages of this installation."""
    import stages

    return sorted(
        path.parent.name
        for root in stages.__path__
        for path in Path(root).glob("*/config.py")
        if (path.parent / "stage.py").exists()
    )


def _a(noun: str) -> str:
    return noun if noun.endswith("s") else f"a {noun}"
