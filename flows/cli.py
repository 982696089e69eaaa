"""The `headrace` command. Every verb reads its options here and calls one function elsewhere.

Nothing heavy is imported before a verb is known: `headrace --help` must not wait for prefect or pydantic.

Exit codes: 0 done; 1 a run failed or damage was found; 2 a bad request (unknown name, wrong recipe, unusable store);
130 interrupted, after saving.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

FAILED = 1
BAD_REQUEST = 2
INTERRUPTED = 130

app = typer.Typer(
    name="headrace",
    help="Train and align language models in stages: nothing computed twice, nothing lost, everything traceable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A built-in recipe (quickstart) or a YAML file.")]
ArtifactName = Annotated[
    str, typer.Argument(metavar="ARTIFACT", help="A step (grpo), step/output, RUN/step, reference, or digest.")
]
StoreUrl = Annotated[
    str, typer.Option("--store", envvar="HEADRACE_STORE", metavar="URL", help="The artifact store: a folder.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="STEP.FIELD=VALUE", help="Change a setting or a parameter.")
]
Until = Annotated[str | None, typer.Option("--until", metavar="STEP", help="Only this step and what it needs.")]
Force = Annotated[
    list[str] | None, typer.Option("--force", metavar="STEP", help="Run this step though its result is there.")
]
AcceptCode = Annotated[
    list[str] | None,
    typer.Option("--accept-code", metavar="STEP", help="Keep this step's result though its code has changed."),
]


@app.command()
def run(
    recipe: RecipeName,
    set_: Set = None,
    store: StoreUrl = ".headrace",
    runner: Annotated[str, typer.Option(metavar="NAME", help="Where stages run: process.")] = "process",
    until: Until = None,
    force: Force = None,
    accept_code: AcceptCode = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Steps that run at once.")] = 2,
    no_prefect: Annotated[bool, typer.Option("--no-prefect", help="Run without a Prefect flow run.")] = False,
    json_: Json = False,
) -> None:
    """Run a recipe: what is there already is kept, the rest is computed, and a stopped run goes on where it was."""
    from flows import running

    request = running.Request(
        recipe, tuple(set_ or ()), store, runner, until, tuple(force or ()), tuple(accept_code or ()), workers
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
    from flows import running

    request = running.Request(
        recipe, tuple(set_ or ()), store, "process", until, tuple(force or ()), tuple(accept_code or ())
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
    from flows import listing

    listing.status(store, run, number, as_json=json_)


@app.command()
def logs(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A run; the newest when left out.")] = None,
    step: Annotated[str | None, typer.Argument(metavar="[STEP]", help="One step; all when left out.")] = None,
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Show what the steps of a run said. `headrace logs STEP` is the newest run that has the step."""
    from flows import listing

    listing.logs(store, run, step, as_json=json_)


@app.command()
def lineage(
    artifact: ArtifactName,
    store: StoreUrl = ".headrace",
    files: Annotated[bool, typer.Option("--files", help="List every source file with its hash.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
    json_: Json = False,
) -> None:
    """Show what an artifact was made from, up to source files and generators."""
    from flows import listing

    listing.lineage(store, artifact, all_files=files, as_mermaid=mermaid, as_json=json_)


@app.command()
def verify(
    artifact: Annotated[str | None, typer.Argument(metavar="[ARTIFACT]", help="One artifact; else everything.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Everything in the store (the default).")] = False,
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Recompute every hash; name each damaged file and exit 1 if there is one."""
    from flows import listing

    if all_ and artifact is not None:
        raise typer.BadParameter("give an artifact or --all, not both")
    raise typer.Exit(listing.verify(store, artifact, as_json=json_))


@app.command()
def pull(
    artifact: ArtifactName,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    store: StoreUrl = ".headrace",
    json_: Json = False,
) -> None:
    """Copy an artifact's files to a folder, verified, with SHA256SUMS."""
    from flows import listing

    listing.pull_to(store, artifact, folder, as_json=json_)


@app.command()
def sample(
    artifact: ArtifactName,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What to say to the model.")],
    store: StoreUrl = ".headrace",
) -> None:
    """Ask a checkpoint something and print its answer."""
    from flows import listing

    raise typer.Exit(listing.sample(store, artifact, prompt))


@app.command()
def refs(store: StoreUrl = ".headrace", json_: Json = False) -> None:
    """List the references: names of artifacts such as production."""
    from flows import listing

    listing.refs(store, as_json=json_)


def main() -> None:
    """Run the command; errors a person can mend are one sentence on standard error and exit code 2.

    What the machine refuses (a full disk, standard output that cannot be written) is a sentence too, and exit code 1.
    """
    _prepare_output()
    try:
        os.getcwd()
    except OSError as error:
        print(f"headrace: the current folder cannot be used ({error.strerror}); change to another", file=sys.stderr)
        raise SystemExit(BAD_REQUEST) from None
    try:
        app(standalone_mode=True)
    except BrokenPipeError:  # `headrace logs | head`
        _drop_output()
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"headrace: {error.strerror or error}{where}", file=sys.stderr)
        _drop_output()
        raise SystemExit(FAILED) from None
    except Exception as error:
        if not _is_a_persons_error(error):
            raise
        print(f"headrace: {error}", file=sys.stderr)
        raise SystemExit(BAD_REQUEST) from None


def _prepare_output() -> None:
    """Have streams that take any text: a closed one is a sink, and one that cannot show a character shows another."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (for as long as the process)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error("json", lambda error: (_json_escapes(error), getattr(error, "end", 0)))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="json" if "--json" in sys.argv else "replace")


def _json_escapes(error: UnicodeError) -> str:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1]


def _drop_output() -> None:
    """Let nothing more be written to standard output, so that leaving does not fail on it again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_a_persons_error(error: Exception) -> bool:
    """Whether an error's message is meant for the user: those of recipes, stores and names. All others are defects."""
    from flows.local_server import NoServer
    from flows.names import UnknownName
    from flows.recipe_model import RecipeError
    from stages.artifacts import StoreError

    return isinstance(error, RecipeError | UnknownName | StoreError | NoServer)


if __name__ == "__main__":
    main()
