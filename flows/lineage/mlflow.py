"""A run of Headrace as runs of MLflow, for teams that watch their models there.

A recipe is an experiment. A run is an MLflow run, and each of its steps a run nested in it: the settings are its
parameters, the final metrics and the rows of `training.jsonl` its metrics (by optimiser step), the artifacts that it
read its dataset inputs, and digests, key and log are tags. Files stay in the store: the tag `headrace.artifact` leads
to them. Where a run was sent before, it is not sent again.

Where the server is, and who may write to it, MLflow's own client takes from its environment (MLFLOW_TRACKING_URI,
MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD, MLFLOW_TRACKING_TOKEN, ...).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from flows.lineage.records import read_bytes
from stages.artifacts import Damaged, NotInStore, Result, Store, StoreError, parse_result, read_run, result_key

_TOGETHER = 100  # what MLflow takes in one request: parameters and tags; metrics could be 1,000
_PARAMETER = 6000  # characters of a value, and 250 of a name
_NAME = 250
_TAG = 5000
_STATES = {"done": "FINISHED", "cached": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "skipped": "KILLED"}
_RUN_TAG = "headrace.run"
_LOG_BYTES = 256 << 20


def export(store: Store, run: str, *, uri: str | None = None, experiment: str | None = None) -> tuple[str, int]:
    """Send a run that has ended to MLflow. Returns the id of its MLflow run, and how many steps were sent.

    Args:
        uri: MLflow's tracking URI; None is what MLflow's environment says.
        experiment: its name; the recipe's when left out.

    Raises:
        StoreError: there is no such run, it still goes on or was sent before, MLflow does not take it, or is missing.
    """
    if uri is not None and urlsplit(uri).password:
        raise StoreError(
            "the URI has a password in it, which others could read; give MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD in the environment instead"
        )
    try:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise StoreError(f"sending runs to MLflow needs the packages of headrace[mlflow]: {error}") from None
    document = read_run(store, run)
    if document is None:
        raise StoreError(f"store {store.url} has no run {run}")
    if document.get("state") == "running":
        raise StoreError(f"run {run} still goes on; send it when it has ended")
    try:
        return _Export(MlflowClient(tracking_uri=uri), store, document).send(experiment)
    except MlflowException as error:
        raise StoreError(f"MLflow does not take run {run}: {str(error).splitlines()[0][:300]}") from None


class _Export:
    """One run on its way."""

    def __init__(self, client: Any, store: Store, document: dict[str, Any]) -> None:
        self._client, self._store, self._document = client, store, document
        self._identity = f"{store.url} {document['id']}"

    def send(self, experiment: str | None) -> tuple[str, int]:
        document = self._document
        name = experiment or str(document.get("recipe") or "headrace")
        found = self._client.get_experiment_by_name(name)
        number = found.experiment_id if found is not None else self._client.create_experiment(name)
        self._refuse_twice(number)
        begun, ended = _milliseconds(document.get("started")), _milliseconds(document.get("finished"))
        tags = {
            _RUN_TAG: self._identity,
            "headrace.store": self._store.url,
            "headrace.recipe": str(document.get("recipe") or ""),
            "headrace.overrides": json.dumps(document.get("overrides") or []),
        }
        whole = self._run(number, document["id"], begun, tags)
        count = 0
        for step, entry in (document.get("steps") or {}).items():
            if entry.get("status") in _STATES:
                self._step(number, whole, step, entry, begun)
                count += 1
        self._client.set_terminated(whole, _STATES.get(str(document.get("state")), "FAILED"), ended or begun)
        return whole, count

    def _refuse_twice(self, experiment: str) -> None:
        quoted = self._identity.replace("\\", "\\\\").replace("'", "\\'")
        there = self._client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{quoted}'", max_results=1)
        if there:
            identity = there[0].info.run_id
            raise StoreError(f"run {self._document['id']} was sent before, as MLflow run {identity}; delete that first")

    def _run(self, experiment: str, name: str, begun: int, tags: dict[str, str]) -> str:
        kept = {key: value[:_TAG] for key, value in tags.items() if value}
        made = self._client.create_run(experiment, start_time=begun, tags=kept, run_name=name)
        return str(made.info.run_id)

    def _step(self, experiment: str, whole: str, step: str, entry: dict[str, Any], begun: int) -> None:
        from mlflow.entities import Metric, Param

        result = self._result(entry)
        started = _milliseconds(entry.get("started")) or begun
        ended = _milliseconds(entry.get("finished")) or started
        tags = {
            "mlflow.parentRunId": whole,
            "headrace.step": step,
            "headrace.stage": str(entry.get("stage") or ""),
            "headrace.status": str(entry.get("status")),
            "headrace.why": str(entry.get("reason") or ""),
            "headrace.message": str(entry.get("message") or ""),
            "headrace.key": str(entry.get("key") or ""),
            "headrace.artifact": str(entry.get("artifact") or ""),
            "headrace.log": str(entry.get("logs") or ""),
            **{f"headrace.output.{_name(name)}": digest for name, digest in (entry.get("outputs") or {}).items()},
        }
        if result is not None:
            commit = (result.record.get("git") or {}).get("commit")
            tags |= {"headrace.code": str(result.code.get("digest") or ""), "mlflow.source.git.commit": commit or ""}
        run = self._run(experiment, step, started, tags)
        parameters = [Param(_name(name), value[:_PARAMETER]) for name, value in _flat(result.config if result else {})]
        for some in _batches(parameters):
            self._client.log_batch(run, params=some)
        final = dict(result.metrics if result else entry.get("metrics") or {})
        metrics = [Metric(_name(name), float(value), ended, 0) for name, value in final.items()]
        for row in self._training(entry):
            at = int(row.pop("step"))
            metrics += [
                Metric(f"training/{_name(name)}", float(value), ended, at)
                for name, value in row.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            ]
        for some in _batches(metrics, 10 * _TOGETHER):
            self._client.log_batch(run, metrics=some)
        self._inputs(run, result)
        self._client.set_terminated(run, _STATES[entry["status"]], ended)

    def _result(self, entry: dict[str, Any]) -> Result | None:
        """The record of a step; None where it gave none, or it cannot be read."""
        if not entry.get("key") or not entry.get("artifact"):
            return None
        try:
            found = parse_result(self._store, result_key(entry["stage"], entry["key"]))
        except (NotInStore, Damaged, ValueError):
            return None
        return found if found.artifact == entry["artifact"] else None

    def _training(self, entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The rows of training.jsonl of what the step gave; none where it gave no such file."""
        if not entry.get("artifact"):
            return
        try:
            data = read_bytes(self._store, entry["artifact"], "training.jsonl", _LOG_BYTES)
        except (NotInStore, Damaged):
            return
        for line in data.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                yield row

    def _inputs(self, run: str, result: Result | None) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        made = [
            DatasetInput(
                Dataset(
                    name=_name(name),
                    digest=digest.removeprefix("sha256:")[:32],  # MLflow keeps 36 characters
                    source_type="headrace",
                    source=json.dumps({"artifact": digest, "store": self._store.url}),
                ),
                [InputTag("mlflow.data.context", name)],
            )
            for name, digest in (result.inputs if result is not None else {}).items()
        ]
        if made:
            self._client.log_inputs(run, made)


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Settings by dotted name, lists and scalars as JSON, text as it is."""
    if isinstance(value, dict) and (value or not name):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _name(text: str) -> str:
    """A name as MLflow allows it: letters, digits and `_ - . / :` and spaces, and no path that leads upwards."""
    kept = re.sub(r"[^\w\-./: ]", "_", text)
    parts = [part.replace("..", "_") for part in kept.split("/") if part not in ("", ".")]
    return "/".join(parts)[:_NAME] or "_"


def _batches(items: list[Any], size: int = _TOGETHER) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def _milliseconds(stamp: str | None) -> int:
    return round(datetime.fromisoformat(stamp).timestamp() * 1000) if stamp else 0
