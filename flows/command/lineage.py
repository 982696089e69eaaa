"""The verbs of the `headrace` command that ask where things come from, and prove it: each calls one function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.command.options import ArtifactName, Json, StoreUrl

Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="How many artifacts to show.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (lineage, impact, diff, trace, why, runs, cost, attest, events, mlflow, croissant):
        app.command()(verb)


def lineage(
    artifact: ArtifactName,
    up: Annotated[bool, typer.Option("--up", help="What it was made from (the default).")] = False,
    down: Annotated[bool, typer.Option("--down", help="What was made from it.")] = False,
    store: StoreUrl = ".headrace",
    files: Annotated[bool, typer.Option("--files", help="List every source file with its hash.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    limit: Limit = 500,
    json_: Json = False,
) -> None:
    """Show what an artifact was made from, up to source files and generators, or what was made from it."""
    from flows.lineage import verbs

    verbs.lineage(
        store, artifact, up=up or not down, down=down, all_files=files, as_mermaid=mermaid, limit=limit, as_json=json_
    )


def impact(
    what: Annotated[
        str, typer.Argument(metavar="FILE|DIGEST", help="A file here or in the store, its SHA-256, or an artifact.")
    ],
    store: StoreUrl = ".headrace",
    limit: Limit = 20,
    json_: Json = False,
) -> None:
    """Show everything that was made from a file or an artifact, and the references that point there."""
    from flows.lineage import verbs

    verbs.impact(store, what, limit=limit, as_json=json_)


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="An artifact; REF@N is entry N of a reference's history.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The artifact to compare it with.")],
    code: Annotated[bool, typer.Option("--code/--no-code", help="With the changed lines of code.")] = True,
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Show what differs between two artifacts and all they were made from: data, settings, code, versions, metrics."""
    from flows.lineage import verbs

    verbs.diff(store, before, after, code=code, as_json=json_)


def trace(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="What a training step gave.")],
    step: Annotated[int, typer.Option("--step", min=1, metavar="N", help="The optimiser step, from 1.")],
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Show which rows of which files an optimiser step consumed."""
    from flows.lineage import verbs

    verbs.trace(store, checkpoint, step, as_json=json_)


def why(
    step: Annotated[str, typer.Argument(metavar="STEP", help="A step.")],
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run; the newest that has the step.")] = None,
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Show why a step ran or was reused."""
    from flows.lineage import verbs

    verbs.why(store, step, run, as_json=json_)


def runs(
    recipe: Annotated[str | None, typer.Option("--recipe", metavar="NAME", help="Only runs of this recipe.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="Only: running, done, failed, stopped, killed, lost.")
    ] = None,
    number: Annotated[int, typer.Option("-n", min=1, help="How many runs to list.")] = 20,
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """List runs, newest first, with what they cost and what reuse saved."""
    from flows.lineage import verbs

    verbs.runs(store, recipe=recipe, state=state, number=number, as_json=json_)


def cost(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[RUN|ARTIFACT]", help="A run, or an artifact or reference; else all references."),
    ] = None,
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Show what a run or a model cost in device-hours, and what reuse saved."""
    from flows.lineage import verbs

    verbs.cost(store, what, as_json=json_)


def attest(
    artifact: ArtifactName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the statement; else printed.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--sign", metavar="DIR", help="Sign the files of this pulled folder of the artifact.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="The private key to sign with (PEM, elliptic curve).")
    ] = None,
    store: StoreUrl = ".headrace",
) -> None:
    """Write an in-toto statement of how an artifact was made (SLSA provenance), or sign its files."""
    from flows.lineage import verbs

    if (folder is None) != (key is None):
        raise typer.BadParameter("--sign DIR and --key FILE go together")
    verbs.attest(store, artifact, output, folder=folder, key=key)


def events(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run; the newest when left out.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Append them to a file, one a line.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="Send them to an OpenLineage server.")] = None,
    store: StoreUrl = ".headrace",
) -> None:
    """Emit the OpenLineage events of a run: printed, into a file, or to a server."""
    from flows.lineage import verbs

    verbs.events(store, run, output=output, url=url)


def mlflow(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run; the newest when left out.")] = None,
    uri: Annotated[
        str | None, typer.Option("--uri", help="MLflow's tracking URI; else what MLFLOW_TRACKING_URI says.")
    ] = None,
    experiment: Annotated[
        str | None, typer.Option("--experiment", metavar="NAME", help="MLflow's experiment; else the recipe.")
    ] = None,
    store: StoreUrl = ".headrace",
) -> None:
    """Send a run to MLflow: settings, metrics by step, digests of what each step read and gave."""
    from flows.lineage import verbs

    verbs.mlflow(store, run, uri=uri, experiment=experiment)


def croissant(
    artifact: ArtifactName,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write it; else printed.")
    ] = None,
    license: Annotated[
        str, typer.Option("--license", metavar="NAME", help="The licence of the data: an SPDX name or an address.")
    ] = "",
    url: Annotated[str, typer.Option("--url", help="The address where the data is published.")] = "",
    store: StoreUrl = ".headrace",
) -> None:
    """Describe a dataset, or other data, in the Croissant format: files with hashes, tables with columns."""
    from flows.lineage import verbs

    verbs.croissant(store, artifact, output, license=license, url=url)


def verify_signed(
    store: str, artifact: str | None, signed: Path | None, public_key: Path | None, *, deep: bool, as_json: bool
) -> int:
    """`verify` with a signed folder; returns the exit code."""
    from flows.lineage import verbs

    if artifact is None or signed is None or public_key is None:
        raise typer.BadParameter("a signature is checked with all of ARTIFACT, --signed DIR and --public-key FILE")
    if deep and as_json:
        raise typer.BadParameter("--json answers one question: leave --deep or --signed out")
    code = verbs.verify_signed(store, artifact, signed, public_key, as_json=as_json)
    return max(code, verbs.verify_deep(store, artifact, as_json=False)) if deep else code
