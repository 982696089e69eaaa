"""The inputs of steps: what each reference means, and whether what it names fits.

A list of files is one `source` artifact. For an input that takes many artifacts, a list gives one artifact for each
reference and each folder of a model, and one for all plain files together; a mapping gives one for each of its labels.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from flows.recipe_errors import Mistakes, kind_of, quoted
from flows.recipe_model import InputRef, RecipeError, Step, describe_input, lacking_split, near, wrong_input
from flows.recipe_yaml import Path as Where
from stages.contract import StageConfig

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def read_inputs(
    step: str, value: Any, path: Where, config: type[StageConfig], steps: dict[str, Any], folder: Path, bad: Mistakes
) -> dict[str, InputRef]:
    """The inputs of one step, as the recipe writes them at `path`; what is wrong goes to `bad`.

    Args:
        steps: all steps of the recipe, by name.
        folder: the recipe's folder.
    """
    if value is None:
        value = {}
    if not isinstance(value, dict):
        bad.add(path, f"{step}.inputs: is a mapping of input names, not {kind_of(value)}.")
        return {}
    reader = _References(step, steps, folder, bad)
    result: dict[str, InputRef] = {}
    for name, given in value.items():
        place: Where = (*path, name)
        takes = config.INPUTS.get(name)
        if takes is None:
            known = f" It takes {', '.join(config.INPUTS)}." if config.INPUTS else " It takes none."
            bad.add(place, f"{step}: no input {name!r}.{near(name, config.INPUTS)}{known}")
        elif given is None:
            continue
        elif given in ([], {}) and not takes.required:
            bad.add(place, f"{step}: input {name} is {kind_of(given)} without anything in it; leave it out.")
        elif takes.many:
            for ref in reader.many(name, given, place):
                if ref.name in result:
                    bad.add(place, f"{step}: {ref.name} is given twice; give a mapping of names to artifacts.")
                result[ref.name] = ref
        elif (one := reader.one(name, given, place)) is not None:
            result[name] = one
    for name, takes in config.INPUTS.items():
        if takes.required and value.get(name) in (None, {}, []):
            bad.add(path, f"{step}: input {name} is missing; it takes {describe_input(takes)}.")
    return result


class _References:
    """Reads the references of one step's inputs."""

    def __init__(self, step: str, steps: dict[str, Any], folder: Path, bad: Mistakes) -> None:
        self.step, self.steps, self.folder, self.bad = step, steps, folder, bad

    def many(self, name: str, given: Any, path: Where) -> list[InputRef]:
        """The artifacts of an input that takes many, each named "name.label"."""
        if isinstance(given, dict):
            found = []
            for label, item in given.items():
                if not _LABEL.fullmatch(label):
                    self.bad.add(
                        (*path, label),
                        f"{self.step}: {label!r} cannot name an artifact of {name}: letters, digits, - and _.",
                    )
                elif (ref := self.one(f"{name}.{label}", item, (*path, label))) is not None:
                    found.append(ref)
            return found
        items = given if isinstance(given, list) else [given]
        refs = [self.one(name, item, (*path, index)) for index, item in enumerate(items)]
        alone: list[InputRef] = []
        files: list[InputRef] = []
        for ref in refs:
            if ref is not None:
                (files if ref.source == "files" and not self.is_model(ref) else alone).append(ref)
        alone = [replace(ref, name=f"{name}.{_label(ref)}") for ref in alone]
        return [*alone, _together(f"{name}.files", files, self.bad.where(path))] if files else alone

    def is_model(self, ref: InputRef) -> bool:
        """Whether the files are the folder of a Hugging Face model, which is an artifact of its own."""
        return len(ref.patterns) == 1 and (self.folder / Path(ref.patterns[0]).expanduser() / "config.json").is_file()

    def one(self, name: str, given: Any, path: Where) -> InputRef | None:
        """The reference `given`: text, or a list of files. None, with the mistake noted, where it is neither."""
        if not isinstance(given, list):
            return self.reference(name, given, path)
        if not given:
            self.bad.add(path, f"{self.step}: input {name} is an empty list.")
            return None
        found = [self.reference(name, item, (*path, index)) for index, item in enumerate(given)]
        if len(found) == 1:
            return found[0]
        files = [ref for ref in found if ref is not None]
        other = [ref.text for ref in files if ref.source != "files"]
        if other:
            self.bad.add(
                path, f"{self.step}: input {name} takes one artifact; a list holds files only, not {other[0]!r}."
            )
        return _together(name, files, self.bad.where(path)) if len(files) == len(found) and not other else None

    def reference(self, name: str, given: Any, path: Where) -> InputRef | None:
        step, where = self.step, self.bad.where(path)
        if not isinstance(given, str) or not given:
            self.bad.add(path, f"{step}: input {name} names a step, a reference or a file, not {kind_of(given)}.")
            return None
        if problem := name_problem(given):
            self.bad.add(path, f"{step}: input {name}: {quoted(given)} {problem}.")
            return None
        if given.startswith("stdlib:"):
            return InputRef(name, given, "files", patterns=(given,), where=where)
        prefix, colon, rest = given.partition(":")
        if colon and prefix in ("ref", "artifact", "hf"):
            if problem := _check_target(prefix, rest):
                self.bad.add(path, f"{step}: input {name}: {given!r}: {problem}.")
                return None
            return InputRef(name, given, prefix, target=rest, where=where)  # type: ignore[arg-type]
        head, slash, output = given.partition("/")
        if head in self.steps:
            return InputRef(name, given, "step", target=head, output=output if slash else "", where=where)
        if re.search(r"[./\\*?\[~]", given) or (self.folder / given).exists():
            return InputRef(name, given, "files", patterns=(given,), where=where)
        known = f"Steps: {', '.join(self.steps)}; a file beside the recipe is written ./{given}."
        self.bad.add(path, f"{step}: input {name}: no step {given!r}.{near(given, self.steps)} {known}")
        return None


def _together(name: str, files: list[InputRef], where: str) -> InputRef:
    patterns = tuple(pattern for ref in files for pattern in ref.patterns)
    return InputRef(name, ", ".join(patterns), "files", patterns=patterns, where=where)


def check_kinds(steps: dict[str, Step], bad: Mistakes) -> None:
    """Note every input whose step makes something that the stage does not take, or a dataset that lacks a split."""
    for step in steps.values():
        for ref in step.inputs.values():
            if ref.source != "step":
                continue
            config = steps[ref.target].config
            if ref.output and ref.output not in config.SIDE_OUTPUTS:
                sides = ", ".join(f"{ref.target}/{name}" for name in config.SIDE_OUTPUTS) or "none"
                guess = near(ref.output, config.SIDE_OUTPUTS)
                bad.say(
                    f"{ref.where}: {step.name}: "
                    f"step {ref.target} has no output {ref.output!r}.{guess} Side outputs: {sides}."
                )
                continue
            kind = config.SIDE_OUTPUTS[ref.output] if ref.output else config.OUTPUT
            holds = config.holds() if kind == "dataset" and not ref.output else None
            if problem := wrong_input(step, ref, kind, holds, f"step {ref.text}"):
                takes = step.takes(ref.name)
                names = [
                    text for text, made, rows in _outputs(steps, step) if not wrong_input(step, ref, made, rows, "")
                ]
                label = (
                    f"{takes.kinds[0].capitalize().removesuffix('s')}s" if len(takes.kinds) == 1 else "Fitting outputs"
                )
                bad.say(f"{ref.where}: {problem} {label} here: {', '.join(names) or 'none'}.")
            elif not ref.output and (problem := lacking_split(step, ref, config.makes_splits(), ref.target)):
                bad.say(f"{ref.where}: {problem}")


def check_cycles(steps: dict[str, Step]) -> None:
    """Raises RecipeError, naming each step of the loop, where steps wait for each other."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            loop = [*trail[trail.index(name) :], name]
            told = ", ".join(f"{first} needs {second}" for first, second in pairwise(loop))
            raise RecipeError(f"{steps[name].where}: steps wait for each other: {told}.")
        if name not in done:
            for needed in steps[name].upstream():
                visit(needed, [*trail, name])
            done.add(name)

    for name in steps:
        visit(name, [])


def _outputs(steps: dict[str, Step], reader: Step) -> list[tuple[str, str, str | None]]:
    """Each output that `reader` could take without a cycle: reference, kind, and what a dataset holds."""

    def needs(name: str, seen: set[str]) -> bool:
        if name == reader.name:
            return True
        seen.add(name)
        return any(needs(other, seen) for other in steps[name].upstream() if other not in seen)

    result: list[tuple[str, str, str | None]] = []
    for name, step in steps.items():
        if not needs(name, set()):
            config = step.config
            result.append((name, config.OUTPUT, config.holds() if config.OUTPUT == "dataset" else None))
            result.extend((f"{name}/{side}", kind, None) for side, kind in config.SIDE_OUTPUTS.items())
    return result


def name_problem(given: str) -> str:
    """Why no file can have the name that an input is given; "" if one can."""
    if given.startswith("s3://"):
        named = re.match(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/|\Z)", given)
        return "" if named else "names no bucket; write s3://BUCKET/PATH"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", given):
        return "is a URL, and nothing is fetched from one; download it and give the path of the file"
    try:
        name = os.fsencode(Path(given).expanduser())
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which no file name can"
    except RuntimeError:  # "~name"
        return "starts with ~, and there is no such home folder; write ./~ for a file of that name, or the whole path"
    if b"\0" in name:
        return "holds a NUL character, which no file name can"
    if len(name) > 4000 or max(map(len, name.split(b"/"))) > 255:
        return "is too long for the name of a file"
    return ""


def _check_target(prefix: str, rest: str) -> str:
    """What is wrong with the part after "ref:", "artifact:" or "hf:"; "" when nothing is."""
    if prefix == "artifact" and not re.fullmatch(r"(sha256:)?[0-9a-f]{6,64}", rest):
        return "a digest is written sha256:<hex>, with at least 6 digits"
    if prefix == "ref" and not re.fullmatch(r"[A-Za-z0-9][\w./@-]*", rest):
        return "a reference is a name such as ref:production"
    if prefix == "hf":
        repository, at, revision = rest.partition("@")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repository):
            return "a model of the hub is written hf:ORG/NAME@REVISION"
        listed = "its model page lists them under Files, History"
        if not at or not revision:
            return f"a revision is needed, as names move: hf:{repository}@<the 40 digits of a commit>; {listed}"
        if not re.fullmatch(r"[0-9a-f]{40}", revision):
            return f"revision {revision!r} is a name that can move; give the 40 digits of its commit; {listed}"
    return ""


def _label(ref: InputRef) -> str:
    """The label of one artifact in a list: "sft", "grpo-rollouts", the first digits of a digest, the name of a file."""
    match ref.source:
        case "step":
            return f"{ref.target}-{ref.output}" if ref.output else ref.target
        case "artifact":
            return ref.target.removeprefix("sha256:")[:8]
        case "hf":
            return ref.target.partition("@")[0].rpartition("/")[2]
        case "ref":
            return ref.target
    return Path(ref.patterns[0].removeprefix("stdlib:")).stem
