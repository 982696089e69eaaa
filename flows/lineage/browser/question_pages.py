"""The pages that answer a question: what a name means, who saw a file, how a metric went, where a reference points."""

from __future__ import annotations

import re
import time
from typing import Any

from flows import figures
from flows.lineage import impact as lineage_impact
from flows.lineage import queries
from flows.lineage.browser import charts
from flows.lineage.browser.run_pages import evaluations, headline_of
from flows.lineage.browser.site import NoPage, Site
from stages.artifacts import NotInStore, read_ref
from stages.artifacts.refs import before

PAGE = 50
_HITS = 60
_MOVES = 100
_ROOM_SECONDS = 60.0  # that sums of sizes are kept
_SHARES_SHOWN = 30  # of what takes room
_HOLDERS = 200  # of a file, on a page
# Of a model's figures, the one that its reference's chart shows first.
_TELLING = ("exact_match", "sampled", "preference_accuracy", "bits_per_byte", "eval_loss", "reward", "loss")
_SHARES = frozenset({"exact_match", "sampled", "preference_accuracy", "shows_work", "sampled_showing_work"})
_GROUPS = (("ref", "References"), ("run", "Runs"), ("artifact", "Artifacts"), ("file", "Files"), ("metric", "Metrics"))


def search(site: Site, text: str) -> dict[str, Any]:
    """What a few typed letters may mean."""
    hits = queries.search(site.index, text, limit=_HITS) if text.strip() else []
    groups = [(title, [hit for hit in hits if hit.what == what]) for what, title in _GROUPS]
    return {
        "title": f"Search: {text}" if text.strip() else "Search",
        "query": text,
        "groups": [(title, found) for title, found in groups if found],
        "cut": len(hits) >= _HITS,
    }


def impact(site: Site, sha256: str, page: int) -> dict[str, Any]:
    """Everything that was made from a file, and the references that point there.

    Raises:
        NoPage: it is not a hash, or no artifact of the store holds such a file.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise NoPage("A file is named by its SHA-256, 64 hexadecimal digits.")
    found = lineage_impact.of_file(
        site.index, sha256, f"sha256:{sha256[:12]}", PAGE, offset=page * PAGE, holders=_HOLDERS
    )
    if found is None:
        raise NoPage(f"No artifact of this store holds a file with the hash {sha256}.")
    named = {digest: queries.artifact(site.index, digest) for digest in dict.fromkeys(ref[1] for ref in found.refs)}
    name = found.holders[0][1]
    return {
        "title": f"Impact of {name}",
        "name": name,
        "sha256": sha256,
        "holders": found.holders,
        "more_holders": found.held - len(found.holders),
        "made": found.made,
        "page": page,
        "pages": -(-found.total // PAGE),
        "kinds": sorted(found.kinds.items()),
        "total": found.total,
        "refs": [(ref, named[digest], time) for ref, digest, time, now in found.refs if now],
        "former": [(ref, named[digest], time) for ref, digest, time, now in found.refs if not now],
        "command_line": site.command("impact", sha256),
    }


def metric(site: Site, name: str, page: int) -> dict[str, Any]:
    """How a metric went, over all that has it.

    Raises:
        NoPage: nothing has it.
    """
    found = queries.with_metric(site.index, name, limit=PAGE + 1, offset=page * PAGE)
    if not found and not page:
        raise NoPage(f"No result of this store has a metric {name!r}.")
    shown = found[:PAGE]
    points = [(float(number), value) for number, (_, value) in enumerate(reversed(shown), 1)]
    return {
        "title": f"Metric {name}",
        "name": name,
        "found": shown,
        "page": page,
        "more": len(found) > PAGE,
        "curve": charts.chart(name, {name: points}, share=name.rpartition("/")[2] in _SHARES, across="result"),
    }


def room(site: Site) -> dict[str, Any]:
    """What takes how much room: by kind, stage and run, and of each referenced model with all that it was made from.

    The sums run over the whole index, so they are kept for a while; the page says of when they are.
    """
    index, now = site.index, time.time()
    if site.room is not None and now - site.room["summed"] < _ROOM_SECONDS:
        return site.room
    total = "count(*) AS artifacts, sum(a.size) AS size FROM artifacts a"
    largest = f"a.present = 1 GROUP BY name ORDER BY size DESC LIMIT {_SHARES_SHOWN}"
    made = f"{total} JOIN makings m ON m.id = a.maker WHERE {largest}"
    kinds = index.rows(f"SELECT a.kind AS name, {total} WHERE {largest}")
    above = """WITH RECURSIVE above(id) AS (SELECT id FROM artifacts WHERE digest = ? UNION
        SELECT i.artifact FROM above JOIN artifacts a ON a.id = above.id JOIN inputs i ON i.making = a.maker)
        SELECT count(*) AS artifacts, sum(size) AS size FROM artifacts
        WHERE present = 1 AND id IN (SELECT id FROM above)"""
    models = [(ref, index.rows(above, (ref.artifact,))[0]) for ref in queries.all_refs(index)[:_SHARES_SHOWN]]
    site.room = {
        "title": "Room",
        "summed": now,
        "kinds": kinds,
        "stages": index.rows(f"SELECT m.stage AS name, {made}"),
        "runs": index.rows(f"SELECT m.run AS name, {made}"),
        "models": models,
        "command_line": site.command("du"),
    }
    return site.room


# References


def refs(site: Site) -> dict[str, Any]:
    """All references, with what they name."""
    found = [
        (ref, queries.artifact(site.index, ref.artifact), headline_of(site, ref.artifact))
        for ref in queries.all_refs(site.index)
    ]
    return {
        "title": "References",
        "here": "refs",
        "refs": found,
        "promote": site.command("promote", "ARTIFACT", "NAME"),
    }


def ref(site: Site, name: str, metric: str | None) -> dict[str, Any]:
    """A reference: what it names now, every move, and how a metric went over them.

    Raises:
        NoPage: there is no such reference.
        Damaged: it cannot be read.
    """
    try:
        found = read_ref(site.store, name)
    except (NotInStore, ValueError) as error:
        raise NoPage(f"{str(error)[:1].upper()}{str(error)[1:]}.") from None
    moves = list(reversed(found.history))[:_MOVES]
    measured = {digest: _figures(site, digest) for digest in dict.fromkeys(move.artifact for move in moves)}
    names = list(dict.fromkeys(key for values in measured.values() for key in values))
    names.sort(key=lambda key: _TELLING.index(key) if key in _TELLING else len(_TELLING))
    telling = next((key for key in names if len({values.get(key) for values in measured.values()}) > 1), None)
    metric = metric if metric in names else telling or (names[0] if names else None)
    points = [
        (float(move.number), measured[move.artifact][metric])
        for move in reversed(moves)
        if metric is not None and metric in measured[move.artifact]
    ]
    return {
        "title": f"Reference {name}",
        "here": "refs",
        "ref": found,
        "artifact": queries.artifact(site.index, found.artifact),
        "moves": moves,
        "cut": len(found.history) - len(moves),
        "measured": measured,
        "metrics": names,
        "metric": metric,
        "is_share": metric in _SHARES,
        "curve": charts.chart(
            (metric or "").replace("_", " "), {metric or "": points}, share=metric in _SHARES, across="move"
        ),
        "headline": figures.headline(measured[found.artifact]),
        "back": before(found),
        "rollback": site.command("rollback", name),
        "promote": site.command("promote", "ARTIFACT", name),
    }


def _figures(site: Site, digest: str) -> dict[str, float]:
    """What is known of a model: what its newest report says, and the metrics of its making."""
    reports = evaluations(site, digest, limit=1)
    own = queries.metrics(site.index, digest)
    return {**own, **(reports[0][1] if reports else {})}
