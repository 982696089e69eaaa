"""Prove a result: run its stage again from its record, and compare the bytes.

The record says what was computed: the stage, its whole config, the digests of its inputs, the number of threads. The
stage runs from that alone, under a key of its own, so nothing that is cached is touched: when it ends, its result is
removed again, whatever it gave. Code of the user's is taken from where it was; where that folder is gone, or on another
machine, the sources that the store keeps with the result run in its place.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from flows import figures
from flows.differences import drift, environment_here
from flows.names import UnknownName, new_run_name, resolve
from flows.runners.process import ProcessRunner
from flows.scratch import ScratchFolders
from stages.artifacts import Result, Store, fetch, is_complete, open_store, read_manifest, read_result, results
from stages.artifacts.results import result_key
from stages.contract import ExitCode, Resources, StageSpec, config_class
from stages.fingerprint import difference, stage_fingerprint

GRACE = 60.0
_NO_STAGES = ("hf", "import", "halted")  # records of where an artifact comes from, and no results of stages


def reproduce(store_url: str, name: str, *, as_json: bool) -> int:
    """Run the stage that made an artifact again. Returns the exit code: 0 where it gives the same digests, else 1.

    Raises:
        UnknownName: there is no such artifact, no stage computed it, or an input of it is gone.
    """
    store = open_store(store_url)
    digest = resolve(store, name).digest
    recorded = _record_of(store, digest)
    with TemporaryDirectory(prefix="headrace-reproduce-") as kept:
        spec = _spec(store, recorded, Path(kept) / "code")
        notes = _notes(recorded, spec)
        if not as_json:
            took = figures.duration(recorded.seconds)
            print(f"Reproducing {recorded.step} ({recorded.stage}) of run {recorded.run}, which took {took}")
            for note in notes:
                print(f"  note: {note}")
        outcome, made = _run(store, spec, quiet=as_json)
    expected = {"": recorded.artifact, **recorded.outputs}
    got = {"": made.artifact, **made.outputs} if made is not None else {}
    differing = _differing(store, expected, got) if made is not None else []
    same = made is not None and expected == got
    if as_json:
        print(
            json.dumps(
                {
                    "same": same,
                    "stage": recorded.stage,
                    "step": recorded.step,
                    "recorded": expected[""],
                    "reproduced": got.get(""),
                    "differing": differing,
                    "notes": notes,
                    "message": "" if made is not None else str(outcome.get("message", "")),
                }
            )
        )
    elif made is None:
        print(
            f"headrace: step {recorded.step} did not end: {outcome.get('message') or 'it was killed'}", file=sys.stderr
        )
    elif same:
        print(f"same bytes: {recorded.artifact}")
    else:
        label = next((label for label in expected if got.get(label) != expected[label]), "")
        where = f" as {label}" if label else ""
        print(
            f"other bytes: {got.get(label)}{where} instead of {expected.get(label)}; differing: {', '.join(differing)}"
        )
    return 0 if same else 1


def _record_of(store: Store, digest: str) -> Result:
    """The newest result that gave the artifact."""
    for result in results(store):
        if digest in (result.artifact, *result.outputs.values()) and result.stage not in _NO_STAGES:
            return result
    raise UnknownName(
        f"no stage computed {digest} to its end: it was imported, kept from a halted run, or its record is gone; only "
        "results can be reproduced"
    )


def _spec(store: Store, recorded: Result, kept: Path) -> StageSpec:
    """What the stage is to be run with. Sources that are needed from the store are put into the folder `kept`."""
    python_path = _python_path(store, recorded, kept)
    sys.path += [folder for folder in python_path if folder not in sys.path]
    try:
        config = config_class(recorded.stage).model_validate(recorded.config)
    except (ValueError, ValidationError) as error:
        raise UnknownName(
            f"the record of step {recorded.step} does not fit this version of stage {recorded.stage}: {error}"
        ) from None
    for label, digest in recorded.inputs.items():
        if not is_complete(store, digest):
            raise UnknownName(f"input {label} of step {recorded.step} ({digest}) is not in store {store.url} any more")
    code = stage_fingerprint(recorded.stage, config.user_code(), [Path(folder) for folder in python_path])
    run = new_run_name(store)
    return StageSpec(
        stage=recorded.stage,
        step=recorded.step,
        run=run,
        key=hashlib.sha256(f"reproduce {recorded.key} {run}".encode()).hexdigest(),
        config=recorded.config,
        inputs=recorded.inputs,
        store=store.url,
        scratch="",
        resources=Resources(
            threads=recorded.environment.get("threads"), processes=recorded.environment.get("processes", 1)
        ),
        python_path=python_path,
        record={"code": {"digest": code.digest, "files": code.files}},
        forced=True,
    )


def _python_path(store: Store, recorded: Result, kept: Path) -> list[str]:
    """The folders with the user's code: those of the record, or `kept` with the sources out of the store."""
    recorded_path = [str(folder) for folder in recorded.record.get("python_path", [])]
    if all(Path(folder).is_dir() for folder in recorded_path):
        return recorded_path
    sources = recorded.code.get("artifact")
    if not sources or not is_complete(store, sources):
        return [folder for folder in recorded_path if Path(folder).is_dir()]
    fetch(store, sources, kept)
    shutil.rmtree(kept / "stages", ignore_errors=True)  # those of this installation run
    return [str(kept)]


def _notes(recorded: Result, spec: StageSpec) -> list[str]:
    """What is not as it was, and may make other bytes."""
    notes = []
    if gone := [folder for folder in recorded.record.get("python_path", []) if not Path(folder).is_dir()]:
        notes.append(f"{', '.join(gone)} is not here: code of yours is what the store kept of it")
    code = spec.record["code"]
    if recorded.code.get("digest") != code["digest"]:
        where = difference(recorded.code.get("files") or {}, code["files"])
        notes.append(f"the code has changed since{': ' + where if where else ''}")
    if made_with := drift(recorded.environment, environment_here()):
        notes.append(made_with)
    return notes


def _run(store: Store, spec: StageSpec, *, quiet: bool) -> tuple[dict[str, Any], Result | None]:
    """Run the stage to its end. Returns its outcome, and its result, which is no longer in the store."""
    scratch = ScratchFolders(store, spec.run)
    runner = ProcessRunner(fork_server=False)
    outcome: dict[str, Any] = {}
    try:
        handle = runner.start(spec.model_copy(update={"scratch": str(scratch.make(spec.step, 1))}))
        try:
            for event in handle.events():
                if event.get("type") == "outcome":
                    outcome = event
                elif event.get("type") == "progress" and not quiet and sys.stderr.isatty():
                    print(f"\r  {event.get('unit')} {event.get('done')}/{event.get('total')} ", end="", file=sys.stderr)
            code = handle.wait()
        except BaseException:
            handle.stop(GRACE)
            raise
        made = read_result(store, spec.stage, spec.key) if code == ExitCode.DONE else None
    finally:
        runner.close()
        scratch.close()
        store.delete(result_key(spec.stage, spec.key))
    return outcome, made


def _differing(store: Store, expected: dict[str, str], got: dict[str, str]) -> list[str]:
    """The files that differ, as output/path."""
    found = []
    for output in expected.keys() | got.keys():
        sides = []
        for digests in (expected, got):
            present = output in digests and is_complete(store, digests[output])
            sides.append(
                {entry.path: entry.sha256 for entry in read_manifest(store, digests[output]).files} if present else {}
            )
        paths = {path for path in sides[0].keys() | sides[1].keys() if sides[0].get(path) != sides[1].get(path)}
        found += [f"{output}/{path}" if output else path for path in paths]
    return sorted(found)
