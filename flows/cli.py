"""The `headrace` command. Every verb reads its options here and calls one function elsewhere.

Nothing heavy is imported before a verb is known: `headrace --help` must not wait for prefect or pydantic.

Exit codes: 0 done; 1 a run failed or damage was found; 2 a bad request (unknown name, wrong recipe, unusable store);
128 and the number of a signal: stopped by it, after saving (130 Ctrl-C, 143 SIGTERM, 129 a closed terminal, 141 a
closed pipe).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.command import lineage as cli_lineage
from flows.command.images import images
from flows.command.options import ArtifactName, Json, PublicKey, SignedFolder, StoreUrl
from flows.command.output import drop_output, prepare_output
from flows.signals import INTERRUPTED, exit_code, interrupting

FAILED = 1
BAD_REQUEST = 2

app = typer.Typer(
    name="headrace",
    help="Train and align language models in stages: nothing computed twice, nothing lost, everything traceable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(images)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A built-in recipe (quickstart) or a YAML file.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="STEP.FIELD=VALUE", help="Change a setting or a parameter.")
]
Until = Annotated[
    list[str] | None, typer.Option("--until", metavar="STEP", help="Only this step and what it needs; may be repeated.")
]
Force = Annotated[
    list[str] | None, typer.Option("--force", metavar="STEP", help="Run this step though its result is there.")
]
AcceptCode = Annotated[
    list[str] | None,
    typer.Option("--accept-code", metavar="STEP", help="Keep this step's result though its code has changed."),
]

Settings = Annotated[
    Path | None,
    typer.Argument(metavar="[SETTINGS]", help="A YAML file; headrace.yaml in this folder, where there is one."),
]


@app.command()
def run(
    recipe: RecipeName,
    set_: Set = None,
    store: StoreUrl = ".headrace",
    runner: Annotated[
        str, typer.Option(metavar="NAME", help="Where stages run: process, docker, workpool.")
    ] = "process",
    until: Until = None,
    force: Force = None,
    accept_code: AcceptCode = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Steps that run at once.")] = 2,
    no_prefect: Annotated[bool, typer.Option("--no-prefect", help="Run without a Prefect flow run.")] = False,
    json_: Json = False,
) -> None:
    """Run a recipe: what is there already is kept, the rest is computed, and a stopped run goes on where it was."""
    from flows.command import running

    request = running.Request(
        recipe,
        tuple(set_ or ()),
        store,
        runner,
        tuple(until or ()),
        tuple(force or ()),
        tuple(accept_code or ()),
        workers,
    )
    if dry_run:
        raise typer.Exit(running.show_plan(request, as_json=json_))
    raise typer.Exit(running.run(request, with_prefect=not no_prefect, as_json=json_))


@app.command()
def plan(
    recipe: RecipeName,
    set_: Set = None,
    store: StoreUrl = ".headrace",
    until: Until = None,
    force: Force = None,
    accept_code: AcceptCode = None,
    json_: Json = False,
) -> None:
    """Show what a run would do: each step, whether its result is there, and if not, why."""
    from flows.command import running

    request = running.Request(
        recipe, tuple(set_ or ()), store, "process", tuple(until or ()), tuple(force or ()), tuple(accept_code or ())
    )
    raise typer.Exit(running.show_plan(request, as_json=json_))


@app.command()
def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run: show its steps. Else the last runs.")
    ] = None,
    store: StoreUrl = ".headrace",
    number: Annotated[int, typer.Option("-n", min=1, help="How many runs to list.")] = 10,
    json_: Json = False,
) -> None:
    """List the last runs, or show the steps of one."""
    from flows.command import listing

    listing.status(store, run, number, as_json=json_)


@app.command()
def logs(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run; the newest when left out.")] = None,
    step: Annotated[str | None, typer.Argument(metavar="[STEP]", help="One step; all when left out.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Show what the steps of a run said. `headrace logs STEP` is the newest run that has the step."""
    from flows.command import listing

    listing.logs(store, run, step, follow=follow, as_json=json_)


@app.command()
def verify(
    artifact: Annotated[
        str | None,
        typer.Argument(
            metavar="[ARTIFACT]", help="One artifact; a reference with all it was made from; else everything."
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Everything in the store (the default).")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Presence and sizes only; no hash is recomputed.")] = False,
    ancestors: Annotated[bool, typer.Option("--ancestors", help="With all that the artifact was made from.")] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="With all it was made from, and the records and references on the way.")
    ] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Put damaged files back from the local cache.")] = False,
    from_: Annotated[
        list[Path] | None, typer.Option("--from", metavar="DIR", help="Repair from the files of this folder too.")
    ] = None,
    signed: SignedFolder = None,
    public_key: PublicKey = None,
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Recompute every hash; name each damaged file and exit 1 if there is one."""
    from flows.command import store as store_verbs

    if all_ and artifact is not None:
        raise typer.BadParameter("give an artifact or --all, not both")
    if (ancestors or deep) and artifact is None:
        raise typer.BadParameter(f"{'--deep' if deep else '--ancestors'} needs an artifact")
    if deep and (quick or repair):
        raise typer.BadParameter("--deep recomputes every hash and mends nothing; leave --quick and --repair out")
    if signed is not None or public_key is not None:
        raise typer.Exit(cli_lineage.verify_signed(store, artifact, signed, public_key, deep=deep, as_json=json_))
    if deep and artifact is not None:
        from flows.lineage import verbs

        raise typer.Exit(verbs.verify_deep(store, artifact, as_json=json_))
    if from_ and not repair:
        raise typer.BadParameter("--from goes with --repair")
    raise typer.Exit(
        store_verbs.verify(
            store,
            artifact,
            quick=quick,
            with_ancestors=ancestors,
            mend=repair,
            sources=from_ or [],
            as_json=json_,
        )
    )


@app.command(name="import")
def import_(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="A model's folder, or data: files, folders, patterns, s3://BUCKET/PATH."
        ),
    ],
    ref: Annotated[str | None, typer.Option("--ref", metavar="NAME", help="A reference that shall name it.")] = None,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="For the reference's history.")] = "",
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Bring a Hugging Face model's folder or data files into the store as an artifact."""
    from flows.command import store as store_verbs

    store_verbs.import_artifact(store, paths, ref=ref, why=why, as_json=json_)


@app.command()
def promote(
    artifact: ArtifactName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The reference, such as production.")],
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for the history.")] = "",
    expect: Annotated[
        str | None,
        typer.Option("--expect", metavar="ARTIFACT", help="Only if it names this now ('none': nothing yet)."),
    ] = None,
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Have a reference name an artifact; its history is kept."""
    from flows.command import store as store_verbs

    store_verbs.promote(store, artifact, name, why=why, expect=expect, as_json=json_)


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The reference.")],
    to: Annotated[int | None, typer.Option("--to", min=1, metavar="N", help="To entry N of its history.")] = None,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, for the history.")] = "",
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Have a reference name what it named before its last move."""
    from flows.command import store as store_verbs

    store_verbs.rollback(store, name, to=to, why=why, as_json=json_)


@app.command()
def pull(
    artifact: ArtifactName,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Copy an artifact's files to a folder, verified, with SHA256SUMS."""
    from flows.command import listing

    listing.pull_to(store, artifact, folder, as_json=json_)


@app.command()
def sample(
    artifact: ArtifactName,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to say to the model.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on with PROMPT as it stands, without the chat template.")
    ] = False,
    store: StoreUrl = ".headrace",
) -> None:
    """Ask a checkpoint something and print its answer."""
    from flows.command import listing

    raise typer.Exit(listing.sample(store, artifact, prompt, raw=raw))


@app.command()
def reproduce(artifact: ArtifactName, store: StoreUrl = ".headrace", json_: Json = False) -> None:
    """Run the stage that made an artifact again, from its record, and compare the bytes; exit 1 if they differ."""
    from flows import reproduce as verb

    raise typer.Exit(verb.reproduce(store, artifact, as_json=json_))


@app.command()
def refs(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One reference; else all.")] = None,
    history: Annotated[bool, typer.Option("--history", help="With every move: when, who, why.")] = False,
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """List the references: names of artifacts such as production."""
    from flows.command import store as store_verbs

    store_verbs.refs(store, name, history=history, as_json=json_)


@app.command()
def du(store: StoreUrl = ".headrace", json_: Json = False) -> None:
    """Show what takes how much room, by kind, stage, run and model; shared files count once."""
    from flows.command import store as store_verbs

    store_verbs.du(store, as_json=json_)


@app.command()
def gc(
    delete: Annotated[bool, typer.Option("--delete", help="Remove it; otherwise it is only shown.")] = False,
    keep: Annotated[
        str, typer.Option("--keep", metavar="TIME", help="Keep results and runs younger than this.")
    ] = "30d",
    grace: Annotated[str, typer.Option("--grace", metavar="TIME", help="Touch nothing younger than this.")] = "24h",
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Show what no reference, result, run or running stage needs any more, or remove it."""
    from flows.command import store as store_verbs

    store_verbs.gc(store, delete=delete, keep=keep, grace=grace, as_json=json_)


@app.command()
def browse(
    store: StoreUrl = ".headrace",
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to serve on; there is no log-in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 for any free one.")] = 4280,
    root_path: Annotated[str, typer.Option(metavar="PATH", help="Path that a proxy serves the pages under.")] = "",
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="A further host name to answer to.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open a web browser.")] = False,
    signed: Annotated[
        list[Path] | None,
        typer.Option("--signed", metavar="DIR", help="A signed folder; checks of its artifact compare with it."),
    ] = None,
    public_key: PublicKey = None,
) -> None:
    """Serve web pages to walk through the store: runs, artifacts and what they were made from, references."""
    from flows.lineage.browser import serve

    address = serve.address_of(host, port, root_path, allow_host or [])
    serve.browse(store, address, open_browser=open_, signed=signed or [], public_key=public_key)


@app.command()
def up(
    settings: Settings = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Of the Prefect server.")] = 4200,
    browser_port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Of the lineage browser.")] = 4280,
    runs: Annotated[int, typer.Option(min=1, metavar="N", help="Flow runs at once.")] = 2,
) -> None:
    """Start a Prefect server with its pages, the deployments, a worker and the lineage browser; Ctrl-C stops them."""
    from flows.service import up as verb

    raise typer.Exit(verb.up(settings, port=port, browser_port=browser_port, runs=runs))


@app.command()
def deploy(settings: Settings = None, json_: Json = False) -> None:
    """Bring the configured Prefect server's deployments, limits and automations to what the settings say."""
    from flows.command import deploy as deploy_verb

    raise typer.Exit(deploy_verb.deploy(settings, as_json=json_))


@app.command()
def doctor(store: StoreUrl = ".headrace", json_: Json = False) -> None:
    """Check this machine and the store: what does not work or is not safe, and how to mend it."""
    from flows.command import doctor as checks

    raise typer.Exit(checks.doctor(store, as_json=json_))


cli_lineage.register(app)


def main() -> None:
    """Run the command; errors a person can mend are one sentence on standard error and exit code 2.

    What the machine refuses (a full disk, standard output that cannot be written) is a sentence too, and exit code 1.
    """
    prepare_output()
    try:
        os.getcwd()
    except OSError as error:
        print(f"headrace: the current folder cannot be used ({error.strerror}); change to another", file=sys.stderr)
        raise SystemExit(BAD_REQUEST) from None
    try:
        with interrupting():  # so that a verb removes what it had half done
            app(standalone_mode=True)
    except KeyboardInterrupt:
        raise SystemExit(exit_code()) from None
    except SystemExit as end:  # typer makes one of a KeyboardInterrupt, and takes it for Ctrl-C
        if isinstance(end.__context__, BrokenPipeError):  # `headrace logs | head`; typer makes it 1
            drop_output()
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise SystemExit(exit_code() if end.code == INTERRUPTED else end.code) from None
    except OSError as error:
        from stages.os_errors import explained

        where = f"{error.filename}: " if error.filename else ""
        print(f"headrace: {where}{explained(error)}", file=sys.stderr)
        drop_output()
        raise SystemExit(FAILED) from None
    except Exception as error:
        if _comes_of_an_interrupt(error):
            raise SystemExit(exit_code()) from None
        if not _is_a_persons_error(error):
            raise
        from stages.artifacts import redact

        print(f"headrace: {redact(str(error))}", file=sys.stderr)
        raise SystemExit(BAD_REQUEST) from None


def _comes_of_an_interrupt(error: BaseException | None) -> bool:
    """Whether an error stands for Ctrl-C: Python wraps what is raised while a class is made."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _is_a_persons_error(error: Exception) -> bool:
    """Whether an error's message is meant for the user: those of recipes, stores and names. All others are defects."""
    from flows.names import UnknownName
    from flows.recipe_model import RecipeError
    from flows.runners.base import RunnerError
    from flows.service.installation import NoHome
    from flows.service.local_server import NoServer
    from stages.artifacts import StoreError

    return isinstance(error, RecipeError | UnknownName | StoreError | NoServer | NoHome | RunnerError)


if __name__ == "__main__":
    main()
