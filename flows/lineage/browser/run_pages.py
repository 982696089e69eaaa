"""The pages of runs: all of them, one with its steps, and what its steps said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows import figures
from flows.command import listing, summary
from flows.lineage import cost, queries
from flows.lineage import why as reasons
from flows.lineage.browser import charts, pieces
from flows.lineage.browser.drawing import Box, draw
from flows.lineage.browser.rendering import STATES, seconds_of
from flows.lineage.browser.site import NoPage, Site
from flows.lineage.records import entry_of
from flows.names import UnknownName
from stages.artifacts import Damaged, StoreError, read_manifest, read_run

PAGE = 50
_CURVES = 8  # steps of a run whose curves are shown
_TAIL = 256 << 10  # bytes of a running step's log that are read for its figures


def home(site: Site) -> dict[str, Any]:
    """What there is: references, the last runs, how much the store holds, and what could not be read."""
    index = site.index
    runs = queries.runs(index, limit=8)
    refs = queries.all_refs(index)
    return {
        "title": "Overview",
        "runs": runs,
        "refs": [(ref, queries.artifact(index, ref.artifact), headline_of(site, ref.artifact)) for ref in refs[:8]],
        "more_refs": max(0, len(refs) - 8),
        "totals": queries.totals(index),
        "problems": queries.problems(index)[:20],
        "running": any(run.state == "running" for run in runs),
        "verify": site.command("verify"),
    }


def headline_of(site: Site, digest: str) -> str:
    """The figures of an artifact that are worth a line: of its evaluation, or else of its making."""
    measured = evaluations(site, digest)
    return figures.headline(measured[0][1] if measured else queries.metrics(site.index, digest))


def evaluations(site: Site, digest: str, limit: int = 4) -> list[tuple[queries.Artifact, dict[str, float]]]:
    """The reports that measured a model, newest first, each with what it says of this model."""
    found: list[tuple[queries.Artifact, dict[str, float]]] = []
    for edge in queries.children(site.index, digest, limit=50):
        label = edge.input.partition(".")[2]
        if edge.artifact.kind != "report" or not edge.input.startswith("models.") or len(found) >= limit:
            continue
        metrics = queries.metrics(site.index, edge.artifact.digest)
        own = {name.removeprefix(f"{label}/"): value for name, value in metrics.items() if name.startswith(f"{label}/")}
        if own:
            found.append((edge.artifact, own))
    return found


def runs(site: Site, page: int, state: str | None, recipe: str | None) -> dict[str, Any]:
    """The list of runs, newest first."""
    found = queries.runs(site.index, state=state, recipe=recipe, limit=PAGE + 1, offset=page * PAGE)
    return {
        "title": "Runs",
        "here": "runs",
        "runs": found[:PAGE],
        "page": page,
        "more": len(found) > PAGE,
        "here_state": state,
        "recipe": recipe,
        "states": queries.RUN_STATES,
        "total": queries.count_runs(site.index),
        "running": any(run.state == "running" for run in found),
    }


def _document(site: Site, name: str) -> dict[str, Any]:
    try:
        run = read_run(site.store, name)
    except ValueError as error:
        raise NoPage(f"{error}.") from None
    if run is None:
        raise NoPage(f"There is no run {name!r} in this store.")
    return run


def run(site: Site, name: str) -> dict[str, Any]:
    """One run: its steps as a graph and a table, curves, evaluation, and how it was asked for.

    Raises:
        NoPage: there is no such run.
        StoreError: its document cannot be read.
    """
    document = _document(site, name)
    steps = [_step(site, name, step, entry) for step, entry in _entries(document).items()]
    running = document.get("state") == "running"
    counts: dict[str, int] = {}
    for step in steps:
        counts[step["status"]] = counts.get(step["status"], 0) + 1
    return {
        "title": f"Run {name}",
        "here": "runs",
        "run": document,
        "steps": steps,
        "counts": counts,
        "drawings": _graph(site, name, document, steps),
        "charts": _curves(site, steps),
        "evaluation": _evaluation(site, steps),
        "sources": _sources(site, document),
        "cost": _cost(site, name),
        "running": running,
        "commands": [site.command("status", name), site.command("logs", name)],
        "recipe_file": str(document.get("recipe_path") or ""),
    }


def _entries(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    steps = document.get("steps")
    return {name: entry for name, entry in steps.items() if isinstance(entry, dict)} if isinstance(steps, dict) else {}


def _step(site: Site, run_name: str, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A step of a run as its page shows it."""
    status = str(entry.get("status") or "?")
    step: dict[str, Any] = {
        "name": name,
        "stage": str(entry.get("stage") or ""),
        "status": status,
        "reason": str(entry.get("reason") or ""),
        "message": str(entry.get("message") or ""),
        "seconds": entry.get("seconds"),
        "artifact": entry.get("artifact"),
        "outputs": entry.get("outputs") or {},
        "metrics": entry.get("metrics") or {},
        "needs": [needed for needed in entry.get("needs") or [] if isinstance(needed, str)],
        "attempts": entry.get("attempts") or 0,
        "saved_step": entry.get("saved_step"),
        "log": site.links.run(run_name, "log", name) if entry.get("logs") else "",
        "progress": None,
        "live_rows": [],
    }
    if status == "running":
        step |= _live(site, run_name, name, entry)
    return step


def _live(site: Site, run_name: str, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """How far a running step is, by the end of its log."""
    try:
        events = pieces.log_piece(site.store, run_name, name, length=_TAIL).events
    except (StoreError, ValueError):
        return {}
    progress = next((event for event in reversed(events) if event.get("type") == "progress"), None)
    rows = [
        {"step": event.get("at"), **event["values"]}
        for event in events
        if event.get("type") == "metric" and isinstance(event.get("values"), dict)
    ]
    begun = seconds_of(entry.get("started"))
    heard = seconds_of(events[-1].get("time")) if events else None
    told: dict[str, Any] = {"live_rows": rows, "heard": heard}
    if begun is not None and heard is not None:
        told["seconds"] = max(0.0, heard - begun)
    if progress is not None:
        done, total = progress.get("done"), progress.get("total")
        shown = {key: value for key, value in (progress.get("figures") or {}).items() if isinstance(value, int | float)}
        left = shown.pop("seconds_left", None)
        words = [f"{progress.get('unit') or 'step'} {done}" + (f" of {total}" if total else "")]
        words += [figures.figure(key, value) for key, value in list(shown.items()) if key != "memory_bytes"][:4]
        words += [f"{figures.about(left)} left"] if left else []
        told["progress"] = {"done": done, "total": total, "words": " · ".join(words)}
    return told


def _graph(site: Site, run_name: str, document: Mapping[str, Any], steps: list[dict[str, Any]]) -> list[Any]:
    """The steps and what came from outside, as a picture from left to right and one from top to bottom."""
    boxes, arrows = [], []
    for name, digest, readers in _sources(site, document):
        key = f"source {digest}"
        boxes.append(Box(key, name, "from outside", "source", site.links.artifact(digest), sign="▤"))
        arrows += [(key, step, name) for step in readers]
    for step in steps:
        sign, word = STATES.get(step["status"], ("?", step["status"]))
        took = "" if step["seconds"] is None else figures.duration(step["seconds"])
        note = " · ".join(filter(None, [word, took if step["status"] != "cached" else ""]))
        link = site.links.artifact(step["artifact"]) if step["artifact"] else step["log"]
        boxes.append(Box(step["name"], step["name"], note, step["status"], link, sign=sign))
        arrows += [(needed, step["name"], "") for needed in step["needs"]]
    return [draw(boxes, arrows), draw(boxes, arrows, down=True)]


def _sources(site: Site, document: Mapping[str, Any]) -> list[tuple[str, str, list[str]]]:
    """What came from outside the run: (name, digest, steps that read it)."""
    found: dict[str, tuple[str, list[str]]] = {}
    sources = document.get("sources")
    for place, digest in sources.items() if isinstance(sources, dict) else ():
        step, _, name = str(place).partition(".")
        texts = _entries(document).get(step, {}).get("inputs") or {}
        text = str(texts.get(name) or texts.get(name.partition(".")[0]) or name)
        found.setdefault(str(digest), (text, []))[1].append(step)
    return [(text, digest, steps) for digest, (text, steps) in found.items()]


def _curves(site: Site, steps: list[dict[str, Any]]) -> list[tuple[str, str, charts.Chart]]:
    """(step, where all its curves are, one of the two most telling ones) for the steps that train."""
    found: list[tuple[str, str, charts.Chart]] = []
    for step in steps:
        rows: list[dict[str, Any]] = step["live_rows"]
        if not rows and step["artifact"] and len(found) < 2 * _CURVES:
            rows = training_rows(site, step["artifact"])[0]
        if rows:
            made = charts.curves({step["name"]: rows})
            shown = [item for item in made if item.title in ("loss", "reward", "rewards/accuracies")][:2] or made[:1]
            link = site.links.artifact(step["artifact"]) if step["artifact"] else ""
            found += [(step["name"], link, item) for item in shown]
    return found


def training_rows(site: Site, digest: str) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a checkpoint's training.jsonl, and whether they are all; none where it cannot be read."""
    try:
        entry = entry_of(read_manifest(site.store, digest), "training.jsonl")
        return pieces.training_rows(site.store, entry) if entry is not None else ([], True)
    except (StoreError, ValueError):  # the artifact's own page says what is wrong with it
        return [], True


def _evaluation(site: Site, steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The table of the run's last report, with where it is."""
    for step in reversed(steps):
        if step["stage"] == "evaluate" and step["artifact"]:
            try:
                entry = entry_of(read_manifest(site.store, step["artifact"]), "report.json")
                report = read_report(site, entry) if entry is not None else None
            except (StoreError, ValueError):
                continue
            if report:
                headings, rows = summary.results_table(report)
                return {"headings": headings, "rows": rows, "link": site.links.artifact(step["artifact"])}
    return None


def read_report(site: Site, entry: Any) -> dict[str, Any] | None:
    """A report.json that has models; None for any other.

    Raises:
        Damaged: its bytes are missing or damaged.
    """
    report = next(pieces.json_lines((pieces.whole(site.store, entry) or b"").replace(b"\n", b" ")), None)
    models = report.get("models") if report else None
    if not isinstance(models, dict) or not all(isinstance(metrics, dict) for metrics in models.values()):
        return None
    return report


def _cost(site: Site, name: str) -> list[tuple[str, str]]:
    """(figure, what it is) of what a run spent, and what reuse saved it."""
    found = cost.run_cost(site.index, name)
    shown = [(cost.told(found.spent), "spent")] if found.spent else []
    return shown + ([(cost.told(found.saved), "saved by reuse")] if found.saved else [])


def why(site: Site, name: str, step: str) -> dict[str, Any]:
    """Why a step of a run was computed or reused, with everything that differs from the result before it.

    Raises:
        NoPage: there is no such run or step.
    """
    _document(site, name)
    try:
        found = reasons.why(site.index, step, name)
    except UnknownName as error:
        raise NoPage(str(error)) from None
    return {
        "title": f"Why {step} of run {name}",
        "here": "runs",
        "why": found,
        "command_line": site.command("why", f"{name}/{step}"),
    }


def log(site: Site, name: str, step: str, at: int | None) -> dict[str, Any]:
    """A piece of what a step said.

    Raises:
        NoPage: there is no such run or step.
    """
    document = _document(site, name)
    entry = _entries(document).get(step)
    if entry is None:
        raise NoPage(f"Run {name} has no step {step!r}.")
    try:
        piece = pieces.log_piece(site.store, name, step, at)
    except ValueError as error:
        raise NoPage(f"{error}.") from None
    running = entry.get("status") == "running" and at is None
    return {
        "title": f"Log of {step}, run {name}",
        "here": "runs",
        "run": document,
        "step": step,
        "piece": piece,
        "lines": log_lines(piece.events),
        "running": running,
        "command_line": site.command("logs", name, step),
    }


def logs(site: Site, name: str) -> dict[str, Any]:
    """The end of what each step of a run said, in the order of time."""
    document = _document(site, name)
    names = [step for step, entry in _entries(document).items() if entry.get("logs")]
    events: list[dict[str, Any]] = []
    for step in names:
        try:
            part = pieces.log_piece(site.store, name, step, length=pieces.PIECE // 4).events
        except (Damaged, ValueError):
            continue
        events += [{"step": step, **event} for event in part]
    lines = [line for line in log_lines(events) if line["type"] != "metric"]
    return {
        "title": f"Logs of run {name}",
        "here": "runs",
        "run": document,
        "steps": names,
        "lines": sorted(lines, key=lambda line: line["time"] or 0.0)[-400:],
        "running": document.get("state") == "running",
        "command_line": site.command("logs", name),
    }


def log_lines(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events as lines of a log; those that only move a progress bar are left out."""
    lines = []
    for event in events:
        if text := listing.event_text(event):
            level = str(event.get("level") or "")
            bad = event.get("type") == "outcome" and event.get("code") not in (0, None)
            look = "error" if bad or level == "error" else "warning" if level == "warning" else ""
            time = seconds_of(event.get("time"))
            lines.append(
                {
                    "time": time,
                    "step": str(event.get("step") or ""),
                    "text": text,
                    "look": look,
                    "type": event.get("type"),
                }
            )
    return lines
