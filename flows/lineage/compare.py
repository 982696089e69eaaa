"""What differs between two artifacts and all that they were made from.

The two ancestries are walked side by side from the artifacts themselves, input by input: so each step of the one stands
beside the step of the other that played its part, whatever runs they were of and whatever the steps were called. Where
two inputs are the same artifact, nothing above them can matter, and the walk ends.

Data is compared by its rows, settings by name, code by the sources that were kept with the results, the environment by
version, and metrics last: they are what came of the rest.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from flows import figures
from flows.differences import setting_changes
from flows.lineage import records
from flows.lineage.index import Index
from stages.artifacts import Damaged, FileEntry, NotInStore, Result, StoreError, read_manifest
from stages.artifacts.manifest import sha256_hex

_ROWS_READ = 256 << 20  # bytes of a data file up to which its rows are compared
_FILES_SHOWN = 10
_HOSTS = ("host", "cpu", "cpu_count", "platform")  # where it ran, rather than what with


@dataclass(frozen=True)
class Changed:
    """A file of imported data that differs: rows that only one side has, None where they were not compared."""

    path: str
    change: str  # "added", "removed" or "changed"
    only_before: int | None = None
    only_after: int | None = None

    def __str__(self) -> str:
        if self.only_before is None or self.only_after is None:
            return f"{self.path} {self.change}"
        rows = f"+{self.only_after:,} -{self.only_before:,} rows"
        return f"{self.path} {rows if self.change == 'changed' else f'{self.change}, {rows}'}"


@dataclass(frozen=True)
class StepDifference:
    """What differs in one pair of steps, or of imported data.

    Attributes:
        name: of the step on both sides, "a -> b" where it has two names.
        before, after: the artifacts; "" where one side has none.
        data: differing files, for imported data.
        inputs: inputs that only one side has.
        config: changed settings, as "beta 0.1 -> 0.2".
        code: paths of changed source files -> unified diff, or a few words where the sources were not kept.
        environment: changed versions, as "torch 2.12.0 -> 2.13.0".
        place: the same for hosts and processors.
        metrics: name -> (before, after), None where a side lacks it.
    """

    name: str
    before: str
    after: str
    data: list[Changed] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    config: list[str] = field(default_factory=list)
    code: dict[str, str] = field(default_factory=dict)
    environment: list[str] = field(default_factory=list)
    place: list[str] = field(default_factory=list)
    metrics: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)

    @property
    def causes(self) -> bool:
        """Whether something of its own differs, not only its inputs."""
        return bool(self.data or self.inputs or self.config or self.code or self.environment)


@dataclass(frozen=True)
class Comparison:
    """Two artifacts compared: `steps` has what differs, each step after those that it needs."""

    before: str
    after: str
    steps: list[StepDifference]
    same: int

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


def compare(index: Index, before: str, after: str) -> Comparison:
    """Compare two artifacts by what they were made from.

    Raises:
        StoreError: the store cannot be read.
    """
    found: list[StepDifference] = []
    seen: set[tuple[str, str]] = set()
    same = 0

    def walk(one: str, other: str, label: str) -> None:
        nonlocal same
        if (one, other) in seen:
            return
        seen.add((one, other))
        if one == other:
            same += 1
            return
        made = [_maker(index, digest) for digest in (one, other)]
        inputs = [maker.inputs if maker is not None else {} for maker in made]
        for name in dict.fromkeys([*inputs[0], *inputs[1]]):
            if name in inputs[0] and name in inputs[1]:
                walk(inputs[0][name], inputs[1][name], f"{_name(made[1], label)}.{name}")
        found.append(_difference(index, one, other, made[0], made[1], label))

    walk(before, after, "")
    return Comparison(before, after, found, same)


def _maker(index: Index, digest: str) -> Result | None:
    makers = records.makers(index, digest)
    return makers[0][0] if makers and makers[0][0].stage not in ("hf", "import") else None


def _name(result: Result | None, label: str) -> str:
    return result.step if result is not None else label or "imported"


def _difference(
    index: Index, one: str, other: str, before: Result | None, after: Result | None, label: str
) -> StepDifference:
    names = [_name(before, label), _name(after, label)]
    name = names[0] if names[0] == names[1] else " -> ".join(names)
    if before is None or after is None:
        return StepDifference(name, one, other, data=changed_files(index, one, other))
    return StepDifference(
        name,
        one,
        other,
        inputs=[
            *(f"input {key} no longer given" for key in before.inputs if key not in after.inputs),
            *(f"input {key} is new" for key in after.inputs if key not in before.inputs),
        ],
        config=[
            *([f"stage {before.stage} -> {after.stage}"] if before.stage != after.stage else []),
            *setting_changes(before.config, after.config),
        ],
        code=changed_code(index, before, after),
        environment=_environment(before, after, hosts=False),
        place=_environment(before, after, hosts=True),
        metrics=_metrics(before, after),
    )


# Data


def changed_files(index: Index, before: str, after: str) -> list[Changed]:
    """The files that differ between two artifacts, with their rows where both can be read as lines of text."""
    sides: list[dict[str, FileEntry]] = []
    for digest in (before, after):
        try:
            sides.append({entry.path: entry for entry in read_manifest(index.store, digest).files})
        except (NotInStore, Damaged):
            return [Changed(f"artifact {digest[:19]}", "is not (whole) in this store, so its files were not compared")]
    found = []
    for path in sorted(sides[0].keys() | sides[1].keys()):
        one, other = sides[0].get(path), sides[1].get(path)
        if one is not None and other is not None and one.sha256 == other.sha256:
            continue
        change = "added" if one is None else "removed" if other is None else "changed"
        lines = [_lines(index, entry) for entry in (one, other)]
        if lines[0] is None or lines[1] is None:
            found.append(Changed(path, change))
            continue
        found.append(Changed(path, change, (lines[0] - lines[1]).total(), (lines[1] - lines[0]).total()))
    return found


def _lines(index: Index, entry: FileEntry | None) -> Counter[bytes] | None:
    """How often each line of a text file is in it; None where it is no text, too large or damaged."""
    if entry is None:
        return Counter()
    if entry.size > _ROWS_READ or entry.path.lower().endswith((".parquet", ".gz", ".safetensors")):
        return None
    try:
        data = index.store.get(entry.blob)
    except (NotInStore, StoreError):
        return None
    if b"\0" in data or sha256_hex(data) != entry.sha256:
        return None
    return Counter(line for line in data.splitlines() if line.strip())


# Code, environment, metrics


def changed_code(index: Index, before: Result, after: Result) -> dict[str, str]:
    """Path -> unified diff of each source file of two computations that differs in more than comments."""
    one, other = before.code.get("files") or {}, after.code.get("files") or {}
    paths = [path for path in sorted(one.keys() | other.keys()) if _hash(one, path) != _hash(other, path)]
    if not paths:
        return {}
    texts = [_sources(index, result, paths) for result in (before, after)]
    found = {}
    for path in paths:
        names = _definitions(one.get(path), other.get(path))
        if (path in one and texts[0].get(path) is None) or (path in other and texts[1].get(path) is None):
            change = "new" if path not in one else "no longer used" if path not in other else "changed"
            found[path] = f"{change}{f': {names}' if names else ''} (its sources were not kept)"
            continue
        sides = [(text.get(path) or "").splitlines(keepends=True) for text in texts]
        diff = difflib.unified_diff(sides[0], sides[1], f"a/{path}", f"b/{path}")
        found[path] = "".join(line if line.endswith("\n") else line + "\n" for line in diff)
    return found


def _hash(files: dict[str, Any], path: str) -> str | None:
    return files[path].get("sha256") if path in files else None


def _definitions(one: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    before, after = (one or {}).get("definitions", {}), (other or {}).get("definitions", {})
    names = (name for name in before.keys() | after.keys() if name and before.get(name) != after.get(name))
    return ", ".join(sorted(names))


def _sources(index: Index, result: Result, paths: list[str]) -> dict[str, str]:
    """The text of those source files that were kept."""
    digest = result.code.get("artifact")
    if not digest:
        return {}
    try:
        entries = {entry.path: entry for entry in read_manifest(index.store, digest).files}
    except (NotInStore, Damaged):
        return {}
    found = {}
    for path in paths:
        if path in entries:
            data = index.store.get(entries[path].blob)
            if sha256_hex(data) == entries[path].sha256:
                found[path] = data.decode("utf-8", "replace")
    return found


def _environment(before: Result, after: Result, *, hosts: bool) -> list[str]:
    one, other = dict(_flat(before.environment)), dict(_flat(after.environment))
    return [
        f"{name} {one.get(name, 'none')} -> {other.get(name, 'none')}"
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name) and (name in _HOSTS) == hosts
    ]


def _flat(environment: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in environment.items():
        if isinstance(value, dict):
            yield from _flat(value)
        else:
            yield name, ", ".join(map(str, value)) if isinstance(value, list) else value


def _metrics(before: Result, after: Result) -> dict[str, tuple[float | None, float | None]]:
    return {
        name: (before.metrics.get(name), after.metrics.get(name))
        for name in dict.fromkeys([*before.metrics, *after.metrics])
        if before.metrics.get(name) != after.metrics.get(name)
    }


# For people


def lines(found: Comparison, *, code: bool = True) -> list[str]:
    """A comparison for people: data, config, code, environment, then metrics; each step after those that it needs.

    Args:
        code: with the unified diffs.
    """
    if found.before == found.after:
        return ["Both are the same artifact, byte for byte."]
    rows: list[tuple[str, str, str]] = []
    for step in found.steps:
        rows += [("data", step.name, str(item)) for item in step.data[:_FILES_SHOWN]]
        if len(step.data) > _FILES_SHOWN:
            rows.append(("data", step.name, f"… and {len(step.data) - _FILES_SHOWN:,} more files"))
    for step in found.steps:
        rows += [("config", step.name, item) for item in [*step.inputs, *step.config]]
    diffs = _by_file(found)
    for path, (names, diff) in diffs.items():
        said = "" if "\n" in diff else f" {diff}"
        rows.append(("code", ", ".join(names), f"{path}{said}"))
    for kind in ("environment", "place"):
        for item, names in _grouped(found, kind).items():
            everywhere = len(names) == sum(not step.data for step in found.steps) and len(names) > 3
            rows.append((kind.removesuffix("ironment"), "every step" if everywhere else ", ".join(names), item))
    if not rows:
        rows.append(("", "", "nothing that is recorded differs; the same inputs, settings and code gave other bytes"))
    metrics = [
        ("metrics", step.name, f"{name} {_value(name, one)} -> {_value(name, other)}")
        for step in found.steps
        for name, (one, other) in step.metrics.items()
    ]
    told = _table(rows + metrics)
    if code:
        for _, diff in diffs.values():
            if "\n" in diff:
                told += ["", diff.rstrip("\n")]
    return told


def _by_file(found: Comparison) -> dict[str, tuple[list[str], str]]:
    """Path -> the steps whose code it is, and its diff; a file that several steps share is told once."""
    diffs: dict[str, tuple[list[str], str]] = {}
    for step in found.steps:
        for path, diff in step.code.items():
            names, known = diffs.setdefault(path, ([], diff))
            names.append(step.name)
            if "\n" not in known:  # another step may have kept the sources
                diffs[path] = (names, diff)
    return diffs


def _grouped(found: Comparison, kind: str) -> dict[str, list[str]]:
    items: dict[str, list[str]] = {}
    for step in found.steps:
        for item in getattr(step, kind):
            items.setdefault(item, []).append(step.name)
    return items


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    form = figures.HEADLINES.get(name.rpartition("/")[2], ("number", ""))[0]
    return {"count": figures.count, "percent": figures.percent, "number": figures.number}[form](value)


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    told, last = [], ""
    for kind, name, text in rows:
        told.append(f"  {kind if kind != last else '':<{widths[0]}}  {name:<{min(widths[1], 40)}}  {text}".rstrip())
        last = kind
    return told
