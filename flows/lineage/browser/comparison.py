"""The page that compares two artifacts: their figures, their curves, and what made them differ."""

from __future__ import annotations

from typing import Any

from flows import figures
from flows.lineage import compare as lineage_compare
from flows.lineage import queries
from flows.lineage.browser import charts
from flows.lineage.browser.run_pages import evaluations, training_rows
from flows.lineage.browser.site import NoPage, Site
from stages.artifacts import NotInStore, read_ref, read_run

_OFFERED = 40
_FILES = 20  # differing files of imported data that are named
_METRICS = 12  # of a step


def compare(site: Site, first: str, second: str) -> dict[str, Any]:
    """Two artifacts beside each other; a form where one is still to be named.

    Raises:
        NoPage: one of the names names nothing.
    """
    offered = [ref.name for ref in queries.all_refs(site.index)][:_OFFERED]
    models = queries.artifacts(site.index, kind="checkpoint", limit=_OFFERED)
    shown: dict[str, Any] = {
        "title": "Compare",
        "here": "compare",
        "first": first,
        "second": second,
        "offered": [(name, "reference") for name in offered]
        + [(figures.short(item.digest), f"{item.name}, run {item.run}") for item in models],
        "both": None,
    }
    if not first or not second:
        return shown
    both = (named(site, first), named(site, second))
    labels = _labels(both)
    return shown | {
        "title": f"{labels[0]} and {labels[1]}",
        "both": list(zip(labels, both, strict=True)),
        "same": both[0].digest == both[1].digest,
        "metrics": _metrics(site, both),
        "differences": _differences(site, both) if both[0].digest != both[1].digest else [],
        "curves": _curves(site, both, labels),
        "command_line": site.command("diff", *(figures.short(item.digest) for item in both)),
    }


def _differences(site: Site, both: tuple[queries.Artifact, queries.Artifact]) -> list[dict[str, Any]]:
    """What differs in what the two were made from, step by step, the furthest back first."""
    found = lineage_compare.compare(site.index, both[0].digest, both[1].digest)
    shown: list[dict[str, Any]] = []
    told: set[str] = set()  # a source file that several steps share is shown once
    for step in found.steps:
        code = {path: diff.splitlines() for path, diff in step.code.items()}
        shown.append(
            {
                "step": step,
                "data": [str(item) for item in step.data[:_FILES]],
                "more_data": max(0, len(step.data) - _FILES),
                "code": [(path, [] if path in told else lines) for path, lines in code.items()],
                "metrics": [(name, one, other) for name, (one, other) in step.metrics.items()][:_METRICS],
            }
        )
        told.update(code)
    return shown


def named(site: Site, name: str) -> queries.Artifact:
    """The artifact that a name means: a reference, one of its moves ("production@2"), a digest or its first digits, a
    step of a run ("RUN/step", "RUN/step/output"), or the newest artifact of a step.

    Raises:
        NoPage: it means none.
    """
    text = name.removeprefix("artifact:").removeprefix("ref:")
    digest = _of_reference(site, text) or _of_run(site, text)
    if digest is None:
        newest = queries.artifacts(site.index, step=text, limit=1)
        digest = newest[0].digest if newest else site.digest(text)
    found = queries.artifact(site.index, digest)
    if found is None:
        raise NoPage(f"This store has no artifact {digest}.")
    return found


def _of_reference(site: Site, name: str) -> str | None:
    name, _, number = name.partition("@")
    try:
        ref = read_ref(site.store, name)
    except (NotInStore, ValueError):
        return None
    if not number:
        return ref.artifact
    if not number.isdecimal() or not 1 <= int(number) <= len(ref.history):
        raise NoPage(f"Reference {name} has no move {number!r}; it has 1 to {len(ref.history)}.")
    return ref.history[int(number) - 1].artifact


def _of_run(site: Site, name: str) -> str | None:
    run, _, rest = name.partition("/")
    step, _, output = rest.partition("/")
    try:
        document = read_run(site.store, run) if rest else None
    except ValueError:  # no possible name of a run
        return None
    entry = (document or {}).get("steps", {}).get(step) or {}
    return (entry.get("outputs") or {}).get(output) if output else entry.get("artifact")


def _labels(both: tuple[queries.Artifact, queries.Artifact]) -> tuple[str, str]:
    """How to speak of the two: by their names where these differ, else with the first digits of their digests."""
    first, second = both
    if first.name != second.name:
        return first.name, second.name
    return f"{first.name} {figures.short(first.digest, 6)}", f"{second.name} {figures.short(second.digest, 6)}"


def _metrics(site: Site, both: tuple[queries.Artifact, queries.Artifact]) -> list[tuple[str, Any, Any, Any]]:
    """(metric, of the first, of the second, change) for all that either has; what an evaluation says comes first."""
    values = []
    for item in both:
        reports = evaluations(site, item.digest, limit=1)
        told = reports[0][1] if reports else {}
        values.append({**told, **{name: value for name, value in queries.metrics(site.index, item.digest).items()}})
    names = [name for name in dict.fromkeys([*values[0], *values[1]]) if not name.endswith("_stderr")]
    rows = []
    for name in names:
        one, other = values[0].get(name), values[1].get(name)
        rows.append((name, one, other, other - one if one is not None and other is not None else None))
    return rows


def _curves(site: Site, both: tuple[queries.Artifact, queries.Artifact], labels: tuple[str, str]) -> list[charts.Chart]:
    rows = {label: training_rows(site, item.digest)[0] for label, item in zip(labels, both, strict=True)}
    given = {label: found for label, found in rows.items() if found}
    return charts.curves(given) if len(given) == 2 else []
