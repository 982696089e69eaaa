"""A run as OpenLineage events, for catalogues that collect lineage from many systems.

A recipe is a job, and each of its steps a job below it, named "recipe.step", in the namespace `headrace`. An artifact
is a version of a dataset: what step `grpo` of recipe `nightly` gives is the dataset "nightly.grpo" in the namespace of
the store, and the digest is its version; imported data is "nightly.corpus.data". A step that was reused has events too,
with the tag `headrace.status: cached`.

`headrace events` emits the events of a finished run. Where the client is configured (OPENLINEAGE_URL,
OPENLINEAGE_CONFIG or OPENLINEAGE__TRANSPORT__TYPE), each run emits its own when it ends.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stages.artifacts import Damaged, NotInStore, Store, StoreError, read_manifest, read_run

NAMESPACE = "headrace"
PRODUCER = "urn:headrace"
_MISSING = "OpenLineage events need the packages of headrace[provenance]: {}"
_ENDS = {"done": "COMPLETE", "cached": "COMPLETE", "failed": "FAIL", "stopped": "ABORT", "skipped": "ABORT"}


def configured() -> bool:
    """Whether the environment says where events go."""
    names = ("OPENLINEAGE_URL", "OPENLINEAGE_CONFIG", "OPENLINEAGE__TRANSPORT__TYPE")
    disabled = os.environ.get("OPENLINEAGE_DISABLED", "").lower() in ("true", "1")
    return not disabled and any(os.environ.get(name) for name in names)


def report(store: Store, run: str) -> None:
    """Emit a run's events where the environment says; a failure is a warning, for lineage must not fail a run."""
    if not configured():
        return
    try:
        from openlineage.client import OpenLineageClient

        client = OpenLineageClient()
        for event in run_events(store, run):
            client.emit(event)
        client.close()
    except Exception as error:  # whatever a transport raises
        print(f"headrace: the OpenLineage events of run {run} were not sent: {error}", file=sys.stderr)


def emit(events: Iterable[Any], *, file: Path | None = None, url: str | None = None) -> int:
    """Append events to a file, one a line, or send them to a server. Returns how many.

    Raises:
        StoreError: the file cannot be written, the server does not take them, or the packages are missing.
    """
    try:
        from openlineage.client import OpenLineageClient
        from openlineage.client.transport.file import FileConfig, FileTransport
        from openlineage.client.transport.http import HttpConfig, HttpTransport
    except ImportError as error:
        raise StoreError(_MISSING.format(error)) from None
    if file is not None:
        transport: Any = FileTransport(FileConfig(log_file_path=str(file), append=True))
    else:
        patience = {"total": 3, "backoff_factor": 0.2}  # seconds, for somebody waits; the default is 15
        transport = HttpTransport(HttpConfig.from_dict({"type": "http", "url": url, "retry": patience}))
    count = 0
    try:
        client = OpenLineageClient(transport=transport)
        for event in events:
            client.emit(event)
            count += 1
        client.close()
    except Exception as error:  # requests, urllib3, OSError: whatever the transport raises
        raise StoreError(f"the events cannot be written to {file or url}: {error}") from None
    return count


def run_events(store: Store, run: str) -> Iterator[Any]:
    """The events of a run that has ended, in the order in which things happened: objects of the openlineage package.

    Raises:
        StoreError: there is no such run, it still goes on, or the packages are missing.
    """
    try:
        from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
        from openlineage.client.generated import job_type_job, parent_run, processing_engine_run
    except ImportError as error:
        raise StoreError(_MISSING.format(error)) from None
    document = read_run(store, run)
    if document is None:
        raise StoreError(f"store {store.url} has no run {run}")
    if document.get("state") == "running":
        raise StoreError(f"run {run} still goes on; its events are emitted when it has ended")
    if not document.get("finished"):
        raise StoreError(
            f"run {run} was {document.get('state')} and could not say how it ended; there are no events of it"
        )
    recipe = str(document.get("recipe") or "recipe")
    engine = processing_engine_run.ProcessingEngineRunFacet(version=_version(), name="Headrace")

    def job(name: str, sort: str) -> Any:
        facet = job_type_job.JobTypeJobFacet(processingType="BATCH", integration="HEADRACE", jobType=sort)
        return Job(namespace=NAMESPACE, name=name, facets={"jobType": facet})

    def event(state: str, time: str, who: Any, where: Any, inputs: list[Any], outputs: list[Any]) -> Any:
        return RunEvent(
            eventType=RunState[state],
            eventTime=time,
            run=who,
            job=where,
            inputs=inputs,
            outputs=outputs,
            producer=PRODUCER,
        )

    whole = Run(runId=_run_id(store, run, ""), facets={"processing_engine": engine})
    yield event("START", document["started"], whole, job(recipe, "RECIPE"), [], [])
    parent = parent_run.ParentRunFacet(
        run=parent_run.Run(runId=whole.runId), job=parent_run.Job(namespace=NAMESPACE, name=recipe)
    )
    datasets = _Datasets(store, recipe, document)
    last = document.get("finished") or document["started"]
    steps = (document.get("steps") or {}).items()
    for name, step in sorted(steps, key=lambda item: item[1].get("finished") or last):
        ended = step.get("finished") or last
        facets = {"parent": parent, "processing_engine": engine, **_step_facets(step)}
        who = Run(runId=_run_id(store, run, name), facets=facets)
        where, inputs = job(f"{recipe}.{name}", "STEP"), datasets.inputs(name, step)
        yield event("START", step.get("started") or ended, who, where, inputs, [])
        yield event(_ENDS.get(step.get("status"), "OTHER"), ended, who, where, inputs, datasets.outputs(name, step))
    end = {"done": "COMPLETE", "failed": "FAIL"}.get(document.get("state", ""), "ABORT")
    yield event(end, last, whole, job(recipe, "RECIPE"), [], [])


def _step_facets(step: dict[str, Any]) -> dict[str, Any]:
    from openlineage.client.generated import error_message_run, tags_run

    tags = [tags_run.TagsRunFacetFields(key="headrace.status", value=str(step.get("status")), source="headrace")]
    if step.get("key"):
        tags.append(tags_run.TagsRunFacetFields(key="headrace.key", value=step["key"], source="headrace"))
    facets: dict[str, Any] = {"tags": tags_run.TagsRunFacet(tags=tags)}
    if step.get("status") in ("failed", "skipped", "stopped") and step.get("message"):
        facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
            message=step["message"], programmingLanguage="python"
        )
    return facets


class _Datasets:
    """The artifacts of a run as OpenLineage datasets."""

    def __init__(self, store: Store, recipe: str, document: dict[str, Any]) -> None:
        self._store, self._recipe, self._document = store, recipe, document
        self._namespace = store.url if "://" in store.url else f"file://{store.url}"

    def inputs(self, name: str, step: dict[str, Any]) -> list[Any]:
        from openlineage.client.event_v2 import InputDataset

        found = []
        for label, text in (step.get("inputs") or {}).items():
            source = (self._document.get("sources") or {}).get(f"{name}.{label}")
            target, _, output = str(text).partition("/")
            maker = (self._document.get("steps") or {}).get(target)
            if source:
                found.append((f"{self._recipe}.{name}.{label}", source))
            elif maker:
                digest = (maker.get("outputs") or {}).get(output) if output else maker.get("artifact")
                if digest:
                    found.append((f"{self._recipe}.{target}{f'.{output}' if output else ''}", digest))
        return [
            InputDataset(namespace=self._namespace, name=dataset, facets=self._facets(digest))
            for dataset, digest in found
        ]

    def outputs(self, name: str, step: dict[str, Any]) -> list[Any]:
        from openlineage.client.event_v2 import OutputDataset
        from openlineage.client.generated import output_statistics_output_dataset as statistics

        given = {"": step.get("artifact"), **(step.get("outputs") or {})}
        found = []
        for output, digest in given.items():
            if not digest:
                continue
            facets: dict[str, Any] = {}
            if (manifest := self._manifest(digest)) is not None:
                facets["outputStatistics"] = statistics.OutputStatisticsOutputDatasetFacet(
                    size=manifest.size, fileCount=len(manifest.files)
                )
            dataset = f"{self._recipe}.{name}{f'.{output}' if output else ''}"
            found.append(
                OutputDataset(namespace=self._namespace, name=dataset, facets=self._facets(digest), outputFacets=facets)
            )
        return found

    def _facets(self, digest: str) -> dict[str, Any]:
        from openlineage.client.generated import dataset_type_dataset, dataset_version_dataset

        facets: dict[str, Any] = {"version": dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=digest)}
        if (manifest := self._manifest(digest)) is not None:
            kind = manifest.kind.upper()
            facets["datasetType"] = dataset_type_dataset.DatasetTypeDatasetFacet(datasetType=kind)
        return facets

    def _manifest(self, digest: str) -> Any:
        try:
            return read_manifest(self._store, digest)
        except (NotInStore, Damaged, ValueError):
            return None


def _run_id(store: Store, run: str, step: str) -> str:
    """The same for the same run of the same store, so that events that are sent twice are the same events."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"headrace:{store.url}/{run}/{step}"))


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("headrace")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
