"""The pages of an artifact: what it is, how it was made, what was made from it; its files and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows import figures
from flows.command import summary
from flows.lineage import cost, queries, records
from flows.lineage import rows as lineage_rows
from flows.lineage.browser import charts, pieces, rows
from flows.lineage.browser.drawing import Box, Drawing, draw
from flows.lineage.browser.rendering import KIND_SIGNS
from flows.lineage.browser.run_pages import evaluations, read_report, training_rows
from flows.lineage.browser.site import NoPage, Site
from flows.lineage.records import entry_of
from flows.names import UnknownName
from stages.artifacts import (
    Damaged,
    FileEntry,
    Manifest,
    NotInStore,
    Result,
    StoreError,
    read_manifest,
)

PAGE = 50
FILES = 100  # of an artifact on a page
_CHECKED = 200  # files whose presence is looked at each time an artifact is shown
_PICTURE = 26  # boxes of the picture on an artifact's page
_WHOLE_PICTURE = 150  # boxes of the picture of everything above
_CHILDREN = 7  # of an artifact, in a picture
_HIDDEN = ("prompt_ids", "completion_ids", "chosen_ids", "rejected_ids", "logprobs", "messages", "columns", "id")


def artifacts(site: Site, page: int, kind: str | None) -> dict[str, Any]:
    """The artifacts of the store, newest first."""
    found = queries.artifacts(site.index, kind=kind, limit=PAGE + 1, offset=page * PAGE)
    return {
        "title": "Artifacts",
        "here": "artifacts",
        "artifacts": found[:PAGE],
        "page": page,
        "more": len(found) > PAGE,
        "here_kind": kind,
        "kinds": queries.totals(site.index)["artifacts"],
    }


def artifact(site: Site, name: str, file_page: int = 0) -> dict[str, Any]:
    """What an artifact is.

    Raises:
        NoPage: the store neither holds nor names it.
    """
    digest = site.digest(name)
    index = site.index
    known = queries.artifact(index, digest)
    manifest, problems = _manifest(site, digest)
    if known is None and manifest is None:
        raise NoPage(f"This store has no artifact {digest}.")
    if known is None:  # put a moment ago, and not yet in the index
        assert manifest is not None
        known = queries.Artifact(digest, manifest.kind, manifest.size, len(manifest.files), True, None)
    problems += _missing_files(site, manifest) if manifest is not None else []
    makings = queries.makings(index, digest)
    made = records.makers(index, digest)
    record = made[0][0] if made else None
    children = queries.children(index, digest, limit=PAGE + 1)
    files = manifest.files[file_page * FILES : (file_page + 1) * FILES] if manifest is not None else ()
    content: dict[str, Any] = {}
    if manifest is not None:
        try:
            content = _content(site, digest, manifest)
        except (StoreError, ValueError) as error:
            problems.append(str(error))
    refs = queries.refs_to(index, [digest])
    return {
        "title": f"{known.name}, {known.kind or 'missing'} {figures.short(digest)}",
        "here": "artifacts",
        "artifact": known,
        "problems": problems,
        "makings": makings,
        "record": record,
        "settings": _settings(record),
        "metrics": record.metrics if record is not None else queries.metrics(index, digest),
        "parents": queries.parents(index, digest),
        "children": children[:PAGE],
        "more_children": len(children) > PAGE,
        "drawings": picture(site, known, limit=_PICTURE, up=2),
        "legend": sorted(KIND_SIGNS.items()),
        "refs": [(ref, time) for ref, _, time, now in refs if now],
        "former_refs": [(ref, time) for ref, _, time, now in refs if not now],
        "cost": _cost(site, digest),
        "can_trace": record is not None and not known.output and record.stage in lineage_rows.DATA_INPUTS,
        "runs": queries.runs_with(index, digest, limit=8),
        "files": files,
        "all_files": manifest.files if manifest is not None else (),
        "file_page": file_page,
        "file_pages": -(-len(manifest.files) // FILES) if manifest is not None else 0,
        "evaluations": evaluations(site, digest) if known.kind == "checkpoint" else [],
        "content": content,
        "commands": _commands(site, known),
    }


def _manifest(site: Site, digest: str) -> tuple[Manifest | None, list[str]]:
    try:
        return read_manifest(site.store, digest), []
    except NotInStore:
        return None, [f"This store does not hold the artifact: only records name it ({digest})."]
    except Damaged as error:
        return None, [str(error)]


def _missing_files(site: Site, manifest: Manifest) -> list[str]:
    """What a look at presence and sizes finds wrong; the first files only, for a page must not take long."""
    looked = manifest.files[:_CHECKED]
    sizes = site.store.sizes(entry.blob for entry in looked)
    told = []
    for entry in looked:
        if entry.blob not in sizes:
            told.append(f"{entry.path}: its bytes ({entry.blob}) are missing from the store.")
        elif sizes[entry.blob] != entry.size:
            told.append(f"{entry.path}: {entry.blob} has {sizes[entry.blob]:,} bytes, not {entry.size:,}.")
    return told


def _settings(record: Result | None) -> list[tuple[str, Any, bool]]:
    """(setting, value, whether it is part of the key) of a record, those of the key first."""
    if record is None:
        return []
    found = [(name, value, name in record.identity) for name, value in record.config.items()]
    return sorted(found, key=lambda item: not item[2])


def _content(site: Site, digest: str, manifest: Manifest) -> dict[str, Any]:
    """What there is to see in an artifact of its kind.

    Raises:
        Damaged: a file of it is missing or damaged.
    """
    content: dict[str, Any] = {}
    if entry_of(manifest, "training.jsonl") is not None:
        found, all_of_it = training_rows(site, digest)
        content |= {"charts": charts.curves({"": found}), "thinned": not all_of_it}
    if manifest.kind == "checkpoint" and (entry := entry_of(manifest, "config.json")) is not None:
        content["model"] = _model(site, entry)
    if manifest.kind == "dataset":
        content["dataset"] = rows.dataset_info(site.store, manifest)
    entry = entry_of(manifest, "report.json") if manifest.kind == "report" else None
    if entry is not None and (report := read_report(site, entry)):
        headings, table = summary.results_table(report)
        content["report"] = {"headings": headings, "rows": table, "counts": report.get("counts") or {}}
        content["samples"] = _samples(report)
    for path in ("rollouts.parquet", "completions.parquet", "logprobs.parquet"):
        if (entry := entry_of(manifest, path)) is not None and entry.size:
            content |= {"table": rows.read_table(site.store, entry, hidden=_HIDDEN), "table_path": path}
    return content


def _model(site: Site, entry: FileEntry) -> dict[str, Any]:
    config = next(pieces.json_lines((pieces.whole(site.store, entry) or b"").replace(b"\n", b" ")), {})
    names = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "dtype")
    return {name.replace("_", " "): config[name] for name in names if isinstance(config.get(name), int | float | str)}


def _samples(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for sample in report.get("samples") or []:
        if isinstance(sample, dict) and isinstance(sample.get("answers"), dict):
            answers = {label: answer for label, answer in sample["answers"].items() if isinstance(answer, dict)}
            found.append({"prompt": sample.get("prompt"), "answers": answers})
    return found


def _cost(site: Site, digest: str) -> list[tuple[str, str]]:
    """(what it is, figure) of what an artifact cost, and what its reuse saved."""
    found = cost.model_cost(site.index, digest)
    times, saved = cost.saved_by(site.index, digest)
    shown = [("cost with all before it", cost.told(found.spent))] if found.spent else []
    return shown + ([(f"reused {times} time{'s' * (times != 1)}", f"saved {cost.told(saved)}")] if times else [])


def _commands(site: Site, known: queries.Artifact) -> list[tuple[str, str]]:
    """(what for, the command) to copy."""
    digest = figures.short(known.digest)
    found = [("Copy its files to a folder", site.command("pull", digest, "DIR"))]
    if known.kind == "checkpoint":
        found.append(("Ask it something", site.command("sample", digest, "What is 31 - 17?")))
        found.append(("Name it", site.command("promote", digest, "production")))
    if known.stage and known.stage not in ("hf", "import"):
        found.append(("Make it again and compare the bytes", site.command("reproduce", digest)))
    found.append(
        ("Recompute every hash of it and of all it was made from", site.command("verify", digest, "--ancestors"))
    )
    return found


# Pictures


def picture(site: Site, root: queries.Artifact, *, limit: int, up: int, down: bool = True) -> list[Drawing]:
    """An artifact with what it was made from and what was made from it, from left to right and from top to bottom.

    Args:
        limit: at most about so many boxes; where more would follow, a box says so.
        up: how many steps back.
        down: whether what was made from it is in it.
    """
    boxes = {root.digest: _box(site, root, here=True)}
    arrows: list[tuple[str, str, str]] = []
    reached = [root.digest]
    for _ in range(up):
        following: list[str] = []
        for digest in reached:
            for edge in queries.parents(site.index, digest):
                parent = edge.artifact.digest
                if edge.code:
                    continue
                if parent not in boxes:
                    if len(boxes) >= limit:
                        continue
                    boxes[parent] = _box(site, edge.artifact)
                    following.append(parent)
                arrows.append((parent, digest, edge.input))
        reached = following
    for digest in reached:
        before = [edge for edge in queries.parents(site.index, digest) if not edge.code]
        unseen = [edge for edge in before if edge.artifact.digest not in boxes]
        arrows += [(edge.artifact.digest, digest, edge.input) for edge in before if edge.artifact.digest in boxes]
        if unseen:
            boxes[f"before {digest}"] = _more(
                site, f"before {digest}", unseen, site.links.artifact(root.digest, "lineage")
            )
            arrows.append((f"before {digest}", digest, ""))
    if down:
        children = [edge for edge in queries.children(site.index, root.digest, limit=PAGE) if not edge.code]
        for edge in children[:_CHILDREN]:
            boxes.setdefault(edge.artifact.digest, _box(site, edge.artifact))
            arrows.append((root.digest, edge.artifact.digest, edge.input))
        if len(children) > _CHILDREN:
            link = site.links.artifact(root.digest, "children")
            boxes["after"] = _more(site, "after", children[_CHILDREN:], link)
            arrows.append((root.digest, "after", ""))
    found = list(boxes.values())
    return [draw(found, arrows), draw(found, arrows, down=True)]


def _box(site: Site, item: queries.Artifact, *, here: bool = False) -> Box:
    note = f"{item.kind or 'missing'} {figures.short(item.digest, 8)}"
    title = item.name
    if not item.stage and item.present and (files := queries.files(site.index, item.digest, limit=1)):
        title = files[0].path.rpartition("/")[2]
        note = f"{figures.count(item.files)} file{'s' * (item.files != 1)}, {figures.size(item.size)}"
    sign = KIND_SIGNS.get(item.kind, "?")
    return Box(item.digest, title, note, item.kind or "missing", site.links.artifact(item.digest), here, sign)


def _more(site: Site, name: str, edges: list[queries.Edge], link: str) -> Box:
    names = ", ".join(dict.fromkeys(edge.artifact.name for edge in edges))
    return Box(name, f"{len(edges)} more", names, "skipped", link, sign="…")


def lineage(site: Site, name: str) -> dict[str, Any]:
    """Everything that an artifact was made from, as one picture and as a list."""
    digest = site.digest(name)
    known = queries.artifact(site.index, digest)
    if known is None:
        raise NoPage(f"This store has no artifact {digest}.")
    found, waiting = {digest: known}, [digest]
    while waiting and len(found) < 1000:
        for edge in queries.parents(site.index, waiting.pop(0)):
            if not edge.code and edge.artifact.digest not in found:
                found[edge.artifact.digest] = edge.artifact
                waiting.append(edge.artifact.digest)
    return {
        "title": f"What {known.name} {figures.short(digest)} was made from",
        "here": "artifacts",
        "artifact": known,
        "drawings": picture(site, known, limit=_WHOLE_PICTURE, up=60, down=False),
        "found": list(found.values())[1:],
        "size": sum(item.size for item in found.values()),
        "cut": bool(waiting) or len(found) > _WHOLE_PICTURE,
        "legend": sorted(KIND_SIGNS.items()),
        "command_line": site.command("lineage", figures.short(digest)),
    }


def children(site: Site, name: str, page: int) -> dict[str, Any]:
    """Everything that was made directly from an artifact."""
    digest = site.digest(name)
    known = queries.artifact(site.index, digest)
    if known is None:
        raise NoPage(f"This store has no artifact {digest}.")
    edges = queries.children(site.index, digest, limit=PAGE + 1, offset=page * PAGE)
    return {
        "title": f"Made from {known.name} {figures.short(digest)}",
        "here": "artifacts",
        "artifact": known,
        "edges": edges[:PAGE],
        "page": page,
        "more": len(edges) > PAGE,
    }


# Files and rows


def _artifact_and_file(site: Site, name: str, path: str) -> tuple[str, FileEntry]:
    digest = site.digest(name)
    try:
        entry = entry_of(read_manifest(site.store, digest), path)
    except NotInStore as error:
        raise NoPage(f"{error}.") from None
    if entry is None:
        raise NoPage(f"Artifact {digest} has no file {path!r}.")
    return digest, entry


def file(site: Site, name: str, path: str, at: int, page: int) -> dict[str, Any]:
    """A file of an artifact, as far as a page can show it.

    Raises:
        NoPage: there is no such artifact or file.
        Damaged: its bytes are missing or damaged.
    """
    digest, entry = _artifact_and_file(site, name, path)
    shown: dict[str, Any] = {"how": "text"}
    suffix = path.rpartition(".")[2].lower()
    if suffix == "parquet":
        table = rows.read_table(site.store, entry, page)
        shown = {"how": "table", "table": table, "pages": -(-table.total // rows.TABLE_ROWS)}
    elif suffix == "safetensors":
        found = pieces.tensors(site.store, entry)
        shown = {"how": "tensors", "tensors": found[:2000], "count": len(found)}
    elif suffix == "png" and pieces.read_range(site.store, entry, 0, 8) == b"\x89PNG\r\n\x1a\n":
        shown = {"how": "picture"}
    if shown["how"] == "text":
        text = pieces.text_of(site.store, entry, at)
        shown |= {"text": text, "pretty": pieces.pretty_json(text.text) if suffix == "json" else None}
    return {
        "title": f"{path} of {figures.short(digest)}",
        "here": "artifacts",
        "artifact": queries.artifact(site.index, digest),
        "full": digest,
        "entry": entry,
        "page": page,
        "holders": len(queries.holders(site.index, entry.sha256, limit=100)),
        **shown,
    }


def raw(site: Site, name: str, path: str) -> tuple[FileEntry, bool]:
    """A file of an artifact to be sent as it is, and whether it is a picture that a page may show.

    Raises:
        NoPage: there is no such artifact or file.
        Damaged: its bytes are missing.
    """
    _, entry = _artifact_and_file(site, name, path)
    return entry, pieces.read_range(site.store, entry, 0, 8) == b"\x89PNG\r\n\x1a\n"


def dataset_rows(site: Site, name: str, split: str, page: int) -> dict[str, Any]:
    """The rows of a dataset, decoded.

    Raises:
        NoPage: the artifact is no dataset, or has no such split.
        Damaged: a file is missing or damaged.
    """
    digest = site.digest(name)
    try:
        found = rows.dataset_rows(site.store, read_manifest(site.store, digest), split, page)
    except NotInStore as error:
        raise NoPage(f"{error}.") from None
    if found is None:
        raise NoPage(f"Artifact {digest} has no rows{f' of split {split!r}' if split else ''}.")
    return {
        "title": f"Rows of {figures.short(digest)}",
        "here": "artifacts",
        "artifact": queries.artifact(site.index, digest),
        "full": digest,
        "rows": found,
    }


def trace(site: Site, name: str, step: int) -> dict[str, Any]:
    """Which rows of which files an optimiser step of a checkpoint's training consumed.

    Raises:
        NoPage: the artifact is no such checkpoint, or has no such step.
        Damaged: a file that is needed for the answer is damaged.
    """
    digest = site.digest(name)
    try:
        found = lineage_rows.consumed(site.index, digest, step)
    except UnknownName as error:
        raise NoPage(str(error)) from None
    return {
        "title": f"Step {step} of {found.name}",
        "here": "artifacts",
        "consumed": found,
        "command_line": site.command("trace", figures.short(digest), "--step", str(step)),
    }
