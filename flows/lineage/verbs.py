"""The verbs that question and prove lineage: each opens the store, asks one function, and prints what came of it.

Text for people, or one JSON value with `as_json`. Questions go through the index of the store (`flows.lineage.index`),
which is brought up to date first; proofs read the store itself.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from flows import figures
from flows.command.listing import print_json
from flows.lineage import compare, queries
from flows.lineage import cost as costs
from flows.lineage import impact as impacts
from flows.lineage import rows as traced
from flows.lineage import why as reasons
from flows.lineage.index import Index, open_index
from flows.lineage.signature import SignatureFails
from flows.names import UnknownName, find_run, resolve
from stages.artifacts import Damaged, Store, open_store, read_manifest
from stages.artifacts.store import leave_out


def _index(store: Store) -> Index:
    """The index of a store, brought up to date. What it could not read is named on standard error, and left out."""
    index = open_index(store)
    for unread in queries.problems(index):
        leave_out(Damaged(f"{unread.key} in store {store.url} {unread.problem}"))
    return index


def lineage(
    store_url: str,
    name: str,
    *,
    up: bool,
    down: bool,
    all_files: bool,
    as_mermaid: bool,
    limit: int,
    as_json: bool,
) -> None:
    """What an artifact was made from (`up`), and what was made from it (`down`), as trees, JSON or Mermaid.

    Raises:
        UnknownName: there is no such artifact.
    """
    from flows.lineage.graph import descend, trace
    from flows.lineage.render import mermaid, tree, tree_down

    store = open_store(store_url)
    index = _index(store)
    digest = resolve(store, name, index).digest
    graphs = ([trace(store, digest, index)] if up else []) + ([descend(index, digest, limit)] if down else [])
    if as_json:
        values = [graph.to_json() for graph in graphs]
        print_json(values[0] if len(values) == 1 else {"up": values[0], "down": values[1]})
        return
    for number, graph in enumerate(graphs):
        if number:
            print()
        if as_mermaid:
            print(mermaid(graph))
        else:
            print(tree_down(graph) if graph.down else tree(graph, all_files=all_files))


def impact(store_url: str, what: str, *, limit: int, as_json: bool) -> None:
    """What was made from a file or an artifact.

    Raises:
        UnknownName: the store knows nothing of it.
    """
    found = impacts.impact(_index(open_store(store_url)), what, None if as_json else limit)
    if as_json:
        print_json(found.to_json())
    else:
        print("\n".join(impacts.lines(found)))


def diff(store_url: str, before: str, after: str, *, code: bool, as_json: bool) -> None:
    """What differs between two artifacts and their ancestries.

    Raises:
        UnknownName: there is no such artifact.
    """
    store = open_store(store_url)
    index = _index(store)
    found = compare.compare(index, *(resolve(store, name, index).digest for name in (before, after)))
    if as_json:
        print_json(found.to_json())
    else:
        print("\n".join(compare.lines(found, code=code)))


def trace(store_url: str, name: str, step: int, *, as_json: bool) -> None:
    """Which rows of which files an optimiser step consumed.

    Raises:
        UnknownName: there is no such checkpoint or step, or where its data came from is not recorded.
    """
    store = open_store(store_url)
    index = _index(store)
    found = traced.consumed(index, resolve(store, name, index).digest, step)
    if as_json:
        print_json(found.to_json())
    else:
        print("\n".join(traced.lines(found)))


def why(store_url: str, step: str, run: str | None, *, as_json: bool) -> None:
    """Why a step of a run ran or was reused.

    Raises:
        UnknownName: there is no such step or run.
    """
    store = open_store(store_url)
    name = find_run(store, run)["id"] if run is not None else None
    found = reasons.why(_index(store), step, name)
    if as_json:
        print_json(found.to_json())
    else:
        print("\n".join(reasons.lines(found)))


def runs(store_url: str, *, recipe: str | None, state: str | None, number: int, as_json: bool) -> None:
    """Runs, newest first, each with its cost.

    Raises:
        UnknownName: there is no such state.
    """
    if state is not None and state not in queries.RUN_STATES:
        raise UnknownName(f"--state {state}: no such state. States: {', '.join(queries.RUN_STATES)}.")
    index = _index(open_store(store_url))
    found = queries.runs(index, recipe=recipe, state=state, limit=number)
    if as_json:
        print_json([asdict(run) | {"cost": costs.run_cost(index, run.name).to_json()} for run in found])
        return
    if not found:
        print(f"No such runs in store {index.store.url}. `headrace run quickstart` makes one.")
    for run in found:
        spent = costs.run_cost(index, run.name)
        counts = ", ".join(f"{count} {status}" for status, count in run.states.items())
        print(
            f"  {run.name:<22} {run.recipe:<16} {run.state:<8} {_when(run.started):>16}  {counts:<22}"
            f"  spent {costs.told(spent.spent)}, reuse saved {costs.told(spent.saved)}"
        )


def _when(seconds: float | None) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M}" if seconds is not None else ""


def cost(store_url: str, what: str | None, *, as_json: bool) -> None:
    """What a run or a model cost; without a name, what each reference's model did.

    Raises:
        UnknownName: there is no such run or artifact.
    """
    store = open_store(store_url)
    index = _index(store)
    if what is None:
        found = {ref.name: costs.model_cost(index, ref.artifact) for ref in queries.all_refs(index)}
        if as_json:
            print_json({name: each.to_json() for name, each in found.items()})
        elif not found:
            print(f"No references in store {store.url}; give a run or an artifact.")
        for name, each in found.items() if not as_json else ():
            print(f"  {name:<24} {figures.short(each.what)}  {costs.told(each.spent)}")
        return
    if queries.run(index, what) is not None:
        spent = costs.run_cost(index, what)
        print_json(spent.to_json()) if as_json else print("\n".join(costs.run_lines(spent)))
        return
    named = resolve(store, what, index)
    spent = costs.model_cost(index, named.digest)
    times, saved = costs.saved_by(index, named.digest)
    if as_json:
        print_json(spent.to_json() | {"reused": times, "reuse_saved": saved})
        return
    print("\n".join(costs.model_lines(spent, named.label)))
    if times:
        print(f"Runs took it from the store {times:,} time{'s' * (times != 1)}, which saved {costs.told(saved)}.")


def verify_deep(store_url: str, name: str, *, as_json: bool) -> int:
    """Check an artifact, everything it was made from, the records of how, and the reference. Returns the exit code.

    Raises:
        UnknownName: there is no such artifact.
    """
    from flows.lineage import proof

    store = open_store(store_url)
    begun = time.monotonic()
    found = resolve(store, name)
    proved = proof.verify_deep(store, found.digest, found.ref)
    if as_json:
        damages = [asdict(damage) for damage in proved.damages]
        print_json(asdict(proved) | {"ok": proved.ok, "artifact": found.digest, "damages": damages})
        return 0 if proved.ok else 1
    for damage in proved.damages:
        print(f"damaged: {damage}")
    told = (
        f"{len(proved.artifacts):,} artifacts, {figures.size(proved.size)}, {proved.sources:,} sources, "
        f"{proved.records:,} records, every hash recomputed ({figures.duration(time.monotonic() - begun)})"
    )
    print(f"ok: {told}" if proved.ok else f"{len(proved.damages)} damaged of {told}")
    return 0 if proved.ok else 1


def verify_signed(store_url: str, name: str, folder: Path, public_key: Path, *, as_json: bool) -> int:
    """Compare a store with a folder that was signed. Returns the exit code.

    Raises:
        UnknownName: there is no such artifact.
        StoreError: the folder or the key cannot be read, or a package is missing.
    """
    from flows.lineage import signature

    store = open_store(store_url)
    digest = resolve(store, name).digest
    try:
        signed = signature.open_signed(folder, public_key)
        found = list(signature.problems(store, digest, signed, signature.makers_in(store)))
    except SignatureFails as error:
        found = [str(error)]
    if as_json:
        print_json({"ok": not found, "artifact": digest, "problems": found})
        return 1 if found else 0
    for problem in found:
        print(f"not as signed: {problem}")
    if not found:
        print(f"ok: {figures.short(digest)} and the records of all it was made from are as signed in {folder}")
    return 1 if found else 0


def attest(store_url: str, name: str, output: Path | None, *, folder: Path | None, key: Path | None) -> None:
    """Write the provenance statement of an artifact; sign a pulled folder of it if asked.

    Raises:
        UnknownName: there is no such artifact.
        StoreError: it was imported, the folder is not the artifact, or a package is missing.
    """
    from flows.lineage import attest as statements
    from flows.lineage.graph import trace

    store = open_store(store_url)
    index = _index(store)
    digest = resolve(store, name, index).digest
    manifest = read_manifest(store, digest)
    made = statements.statement(trace(store, digest, index), manifest)
    if folder is not None and key is not None:
        signature = statements.sign(folder, manifest, made, key, os.environ.get("HEADRACE_KEY_PASSWORD"))
        print(f"Signed {folder}: {signature.name} covers its files and {statements.STATEMENT}.")
        print(f"Check it: python -m model_signing verify key {folder} --signature {signature} --public_key PUBLIC.pem")
    text = json.dumps(made, indent=1, ensure_ascii=False)
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
        print(f"Wrote {output}")
    elif folder is None:
        print(text)


def events(store_url: str, run: str | None, *, output: Path | None, url: str | None) -> None:
    """Emit the OpenLineage events of a run.

    Raises:
        UnknownName: there is no such run.
        StoreError: it still goes on, they cannot be sent, or a package is missing.
    """
    from flows.lineage import openlineage

    if output is not None and url is not None:
        raise UnknownName("give --output or --url, not both.")
    store = open_store(store_url)
    found = openlineage.run_events(store, find_run(store, run)["id"])
    if output is None and url is None:
        from openlineage.client.serde import Serde

        for event in found:
            print(Serde.to_json(event))
        return
    count = openlineage.emit(found, file=output, url=url)
    print(f"Emitted {count} events to {output or url}")


def mlflow(store_url: str, run: str | None, *, uri: str | None, experiment: str | None) -> None:
    """Send a run to MLflow.

    Raises:
        UnknownName: there is no such run.
        StoreError: it still goes on or was sent before, MLflow does not take it, or a package is missing.
    """
    from flows.lineage.mlflow import export

    store = open_store(store_url)
    name = find_run(store, run)["id"]
    identity, steps = export(store, name, uri=uri, experiment=experiment)
    print(f"Sent run {name} with {steps} steps to MLflow, as its run {identity}")


def croissant(store_url: str, name: str, output: Path | None, *, license: str, url: str) -> None:
    """Write the Croissant description of an artifact of data.

    Raises:
        UnknownName: there is no such artifact.
        StoreError: it is no data, or cannot be read.
    """
    from flows.lineage.croissant import describe
    from flows.lineage.graph import trace

    store = open_store(store_url)
    index = _index(store)
    graph = trace(store, resolve(store, name, index).digest, index)
    text = json.dumps(describe(store, graph, license=license, url=url), indent=1, ensure_ascii=False)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")
        print(f"Wrote {output}")
