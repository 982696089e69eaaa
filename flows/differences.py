"""What differs between a step as it is now and an earlier result of its stage, in the words of a plan.

Differences come in a fixed order: settings, inputs, code, environment; the first of them is what a plan shows.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flows.recipe_model import Step
from stages.artifacts import Result
from stages.fingerprint import difference

# The libraries whose version can change the bytes that a stage makes.
LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy", "pyarrow")
_SHOWN = 48  # characters of a value in a reason


@dataclass(frozen=True)
class Nearest:
    """The nearest earlier result, and how the step differs from it."""

    result: Result
    differences: list[str]

    @property
    def first(self) -> str:
        """The first difference, and how many more there are."""
        if not self.differences:
            return "its key is made in another way"
        more = len(self.differences) - 1
        return self.differences[0] + (f", and {more} more" if more else "")


def nearest(
    step: Step,
    earlier: Sequence[Result],
    inputs: dict[str, str | None],
    waiting: dict[str, str],
    code: dict[str, Any],
    versions: dict[str, str] | None,
    *,
    code_only: bool = False,
) -> Nearest | None:
    """The earlier result that is nearest to the step: same step name first, then fewest differences, then newest.

    A result of another step name counts only where at most one thing differs: the step was renamed then.

    Args:
        earlier: results of the step's stage, newest first.
        inputs: input name -> digest, None where it is yet to be made.
        waiting: for an input yet to be made, the step that makes it ("" for a model of the hub).
        code: record of the step's code (mode, digest, version, files).
        versions: of libraries, where they are part of the key.
        code_only: take only results with the same settings, inputs and environment.
    """
    identity = step.config.identity()
    best: tuple[tuple[bool, int], Nearest] | None = None
    for result in earlier:
        settings = list(_settings(result.identity, identity))
        given = _inputs(result.inputs, inputs, waiting)
        libraries = _environment(result.environment, versions)
        if code_only and (settings or given or libraries):
            continue
        found = Nearest(result, [*settings, *given, *_code(result.code, code), *libraries])
        if result.step != step.name and len(found.differences) > 1:
            continue  # another step that runs the same stage, not this one under another name
        rank = (result.step != step.name, len(found.differences))
        if best is None or rank < best[0]:
            best = (rank, found)
    return best[1] if best else None


def setting_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every setting that differs, as "beta 0.1 -> 0.2"; a group of settings that only one side has is one of them."""
    return list(_settings(old, new))


def _settings(old: dict[str, Any], new: dict[str, Any], group: str = "") -> Iterator[str]:
    for key in dict.fromkeys([*new, *old]):
        name = f"{group}.{key}" if group else str(key)
        if key not in old:
            yield f"{name} {_short(new[key])} (was not set)"
        elif key not in new:
            yield f"{name} {_short(old[key])} -> not set"
        elif (parts := (_parts(old[key]), _parts(new[key]))) and parts[0] and parts[1]:
            yield from _settings(parts[0], parts[1], name)
        elif old[key] != new[key]:
            yield f"{name} {_short(old[key])} -> {_short(new[key])}"


def _parts(value: Any) -> dict[str, Any]:
    """What is compared part by part: the fields of a group, the items of a list of groups by their number."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return {str(index): item for index, item in enumerate(value)}
    return value if isinstance(value, dict) else {}


def _short(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _text(value: Any) -> str:
    if isinstance(value, str):
        return repr(value) if not value or " " in value else value
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _inputs(old: dict[str, str], new: dict[str, str | None], waiting: dict[str, str]) -> list[str]:
    """All inputs that differ, as one difference."""
    changed = [name for name, digest in new.items() if digest is None or old.get(name) != digest]
    gone = [name for name in old if name not in new]
    if not changed and not gone:
        return []
    if not changed:
        return [f"input {', '.join(map(_label, gone))} no longer given"]
    makers = list(dict.fromkeys(waiting[name] for name in changed if waiting.get(name)))
    shown = ", ".join(_label(name) for name in changed)
    if len(changed) == 1:
        word = "changed" if changed[0] in old else "is new"
        if makers:
            return [f"input {shown} {word} ({makers[0]} will run)"]
        return [f"input {shown} {word}"]
    return [f"input {shown} changed"]


def _label(name: str) -> str:
    """ "models.dpo" is shown as "dpo", for the labels of an input with many artifacts are names of their own."""
    return name.partition(".")[2] or name


def _code(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    if old.get("mode", new["mode"]) != new["mode"]:
        return [f"code: {old['mode']} -> {new['mode']}"]
    if new["mode"] == "version":
        if old.get("version") != new["version"]:
            return [f"code changed: VERSION {old.get('version')} -> {new['version']}"]
        if old.get("user") == new["user"]:
            return []
        where = difference(old.get("user_files") or {}, new["user_files"])
        return [f"code changed: {where}" if where else "code changed"]
    if old.get("digest") == new["digest"]:
        return []
    where = difference(old.get("files") or {}, new["files"])
    return [f"code changed: {where}" if where else "code changed"]


def environment_here() -> dict[str, str]:
    """The versions, here, of Python and of the libraries whose version can change the bytes that a stage makes."""
    return dict(_installed())


@cache
def _installed() -> dict[str, str]:
    """Read once a process: it takes 20 ms, and every step of a run asks."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def recorded_versions(environment: dict[str, Any]) -> dict[str, str]:
    """The versions of Python and of those libraries in the environment that a stage process recorded."""
    return _versions(environment)


def _versions(environment: dict[str, Any]) -> dict[str, str]:
    """The versions in the environment that a stage process recorded."""
    found: dict[str, str] = {}
    for key, value in environment.items():
        if isinstance(value, dict):
            found.update({name: str(item) for name, item in value.items() if name in LIBRARIES})
        elif key == "python" or key in LIBRARIES:
            found[key] = str(value)
    return found


def _environment(old: dict[str, Any], new: dict[str, str] | None) -> list[str]:
    """The differences that enter the key; none where versions are only recorded."""
    if new is None:
        return []
    before = _versions(old)
    changed = [f"{name} {before[name]} -> {new[name]}" for name in new if name in before and before[name] != new[name]]
    return [f"environment changed: {', '.join(changed)}"] if changed else []


def drift(old: dict[str, Any], new: dict[str, str]) -> str:
    """What a result was made with that is another version here, for a note; "" when nothing is."""
    before = _versions(old)
    changed = [
        f"{name} {before[name]}, here {new[name]}" for name in new if name in before and before[name] != new[name]
    ]
    return f"made with {'; '.join(changed)}" if changed else ""
