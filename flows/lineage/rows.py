"""Which rows of which files an optimiser step consumed.

The order of the data is a pure function of (seed, epoch, step), so the rows of a dataset that a step took are computed
from the record alone; the side output `origins` of the tokenize step that made the dataset says which line of which
file each of them was. A pair made of rollouts leads on to its prompt, and from there to the prompt's own file.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows import figures
from flows.lineage import records
from flows.lineage.index import Index
from flows.names import UnknownName
from stages.artifacts import Damaged, NotInStore, Result, read_manifest
from stages.contract import config_class
from stages.tokenize.dataset import PACKED
from stages.tokenize.origins import Origin, Piece, read_origins
from stages.training.config import TrainingConfig
from stages.training.order import batch_rows

DATA_INPUTS = {"pretrain": "data", "sft": "data", "dpo": "data", "grpo": "prompts"}
_ROLLOUTS = "rollouts.parquet"


@dataclass(frozen=True)
class Place:
    """A place that a row of a dataset was read at.

    Attributes:
        source: the input of the tokenize step ("data", "data.name"), or the generator's `module:function`.
        artifact: the artifact that was read; "" for a generator.
        path, sha256: the file in it, and its hash; "" for a generator.
        number: line or row in the file, or row of the generator, from 1; 0: the whole file.
        unit: what `number` counts: "line" or "row".
        via: where the prompt came from, for pairs made of rollouts; None for all else.
    """

    source: str
    artifact: str
    path: str
    sha256: str
    number: int
    unit: str
    via: Place | None = None

    @property
    def text(self) -> str:
        """ "train.jsonl line 3,017"."""
        where = f" {self.unit} {self.number:,}" if self.number else ""
        return f"{self.path or self.source}{where}"


@dataclass(frozen=True)
class TracedRow:
    """A row of a dataset: its number there (from 0) and, for each piece in it, (first position, tokens, first token of
    its document, place). Rows that are not packed have one piece (0, 0, 0, place)."""

    row: int
    pieces: list[tuple[int, int, int, Place]]


@dataclass(frozen=True)
class Consumed:
    """What an optimiser step consumed.

    Attributes:
        step: from 1, of `total_steps`.
        name, stage, run: of the training step.
        dataset, dataset_name: digest, and the step that made it.
        holds: "text", "chat", "preference" or "prompt".
        epoch: of its first row, from 0.
        rows: in the order in which the step takes them.
    """

    artifact: str
    step: int
    total_steps: int
    name: str
    stage: str
    run: str
    dataset: str
    dataset_name: str
    holds: str
    epoch: int
    rows: list[TracedRow]

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values."""
        rows = [
            {
                "row": row.row,
                "pieces": [
                    {"column": column, "length": length, "start": start, "place": asdict(place)}
                    for column, length, start, place in row.pieces
                ],
            }
            for row in self.rows
        ]
        return asdict(self) | {"rows": rows}


def consumed(index: Index, digest: str, step: int) -> Consumed:
    """What optimiser step `step` (from 1) of the training that gave a checkpoint consumed.

    Raises:
        UnknownName: the artifact is no checkpoint that a training stage gave, the step is not one of its steps, or
            where the data came from was not recorded.
        Damaged: a file that is needed for the answer is damaged.
    """
    result = _training(index, digest)
    config = config_class(result.stage).model_validate(result.config)
    assert isinstance(config, TrainingConfig)
    dataset = result.inputs[DATA_INPUTS[result.stage]]
    info = json.loads(_read(index, dataset, "dataset.json"))
    count = int(info["splits"]["train"]["rows"])
    total = config.total_steps(count)
    if not 1 <= step <= total:
        raise UnknownName(f"step {result.step} took optimiser steps 1 to {total:,}; there is no step {step:,}.")
    rows, epoch = rows_of_step(config, count, step)
    made, origins = _origins(index, dataset)
    pieces = _pieces(index, origins, rows)
    places = _Places(index, made)
    by_row: dict[int, list[tuple[int, int, int, Place]]] = {}
    for piece in pieces:
        place = places.of(piece.origin)
        by_row.setdefault(piece.row, []).append((piece.column, piece.length, piece.start, place))
    traced = [TracedRow(row, by_row.get(row, [])) for row in rows]
    names = (result.step, result.stage, result.run, dataset, made.step)
    return Consumed(digest, step, total, *names, info["holds"], epoch, traced)


def rows_of_step(config: TrainingConfig, rows: int, step: int) -> tuple[list[int], int]:
    """The rows (from 0) of a dataset that optimiser step `step` (from 1) takes, and the epoch of the first, from 0."""
    batch, size = step - 1, config.train_batch_size
    if hasattr(config, "prompts_per_batch"):  # grpo: a batch of completions serves several optimiser steps
        batch, size = batch // config.num_iterations, config.prompts_per_batch()  # type: ignore[attr-defined]
    limit = None if config.max_steps is not None else config.total_rows(rows)
    return batch_rows(rows, size, config.seed, batch, limit).tolist(), batch * size // rows


def _training(index: Index, digest: str) -> Result:
    found = records.makers(index, digest)
    for result, output in found:
        if not output and result.stage in DATA_INPUTS:
            return result
    if not found:
        raise UnknownName(f"{digest[:19]} was imported; trace takes a checkpoint that a training step gave.")
    result, output = found[0]
    what = f"{result.step}/{output}" if output else result.step
    known = ", ".join(DATA_INPUTS)
    raise UnknownName(f"{what} was given by stage {result.stage}; trace takes a checkpoint of the stages {known}.")


def _origins(index: Index, dataset: str) -> tuple[Result, str]:
    """The result that gave a dataset, and the artifact with its origins."""
    found = records.makers(index, dataset)
    for result, output in found:
        if not output and "origins" in result.outputs:
            return result, result.outputs["origins"]
    if not found:
        raise UnknownName(f"dataset {dataset[:19]} was imported, so where its rows come from is not known here.")
    step = found[0][0].step
    raise UnknownName(
        f"the record of step {step} does not say where the rows of its dataset come from: it was made before that was"
        f" kept. Run the recipe again with --force {step}; the dataset stays the same."
    )


def _pieces(index: Index, origins: str, rows: list[int]) -> list[Piece]:
    with tempfile.TemporaryDirectory(prefix="headrace-origins-") as folder:
        table = records.copy_file(index.store, origins, "train.parquet", Path(folder) / "train.parquet")
        return read_origins(table, rows)


def _read(index: Index, digest: str, path: str) -> bytes:
    try:
        return records.read_bytes(index.store, digest, path)
    except NotInStore as error:
        raise UnknownName(f"{error}; it is needed to tell which rows a step took.") from None


class _Places:
    """Finds the file of an origin, through rollouts to that of the prompt."""

    def __init__(self, index: Index, made: Result) -> None:
        self._index, self._made = index, made
        self._hashes: dict[str, dict[str, str]] = {}  # artifact -> path -> sha256
        self._prompts: dict[str, list[Place | None]] = {}  # rollouts artifact -> for each line, where its prompt was

    def of(self, origin: Origin) -> Place:
        if not origin.path:
            return Place(origin.source, "", "", "", origin.number, "row")
        artifact = self._made.inputs[origin.source]
        plain = origin.path.lower().removesuffix(".gz").removesuffix(".zst")
        rows = self._made.config.get("reader") or plain.endswith((".parquet", ".json"))
        via = self._prompt(artifact, origin.number) if origin.path == _ROLLOUTS and origin.other else None
        sha256 = self._files(artifact).get(origin.path, "")
        return Place(origin.source, artifact, origin.path, sha256, origin.number, "row" if rows else "line", via)

    def _files(self, artifact: str) -> dict[str, str]:
        if artifact not in self._hashes:
            try:
                files = read_manifest(self._index.store, artifact).files
            except (NotInStore, Damaged):
                files = ()
            self._hashes[artifact] = {entry.path: entry.sha256 for entry in files}
        return self._hashes[artifact]

    def _prompt(self, rollouts: str, line: int) -> Place | None:
        if rollouts not in self._prompts:
            self._prompts[rollouts] = self._prompts_of(rollouts)
        lines = self._prompts[rollouts]
        return lines[line - 1] if line <= len(lines) else None

    def _prompts_of(self, rollouts: str) -> list[Place | None]:
        """Where the prompt of each line of a table of rollouts was read; [] where that is not recorded."""
        import pyarrow.parquet as pq

        makers = [result for result, _ in records.makers(self._index, rollouts) if "prompts" in result.inputs]
        if not makers:
            return []
        dataset = makers[0].inputs["prompts"]
        try:
            made, origins = _origins(self._index, dataset)
            with tempfile.TemporaryDirectory(prefix="headrace-rollouts-") as name:
                store, folder = self._index.store, Path(name)
                table = records.copy_file(store, rollouts, _ROLLOUTS, folder / "rollouts.parquet")
                prompts = records.copy_file(store, dataset, "train.parquet", folder / "prompts.parquet")
                ids = pq.read_table(table, columns=["id"])["id"].to_pylist()
                row_of = {
                    value: row for row, value in enumerate(pq.read_table(prompts, columns=["id"])["id"].to_pylist())
                }
        except (UnknownName, NotInStore):
            return []
        places = _Places(self._index, made)
        wanted = sorted({row_of[value] for value in ids if value in row_of})
        origin_of = {piece.row: piece.origin for piece in _pieces(self._index, origins, wanted)}
        known = {row: places.of(origin) for row, origin in origin_of.items()}
        return [known.get(row_of.get(value, -1)) for value in ids]


def lines(found: Consumed) -> list[str]:
    """What a step consumed, for people."""
    packed = found.holds in PACKED
    unit = {"preference": "pairs", "prompt": "prompts"}.get(found.holds, "rows")
    told = [
        f"Step {found.step:,} of {found.total_steps:,} of {found.name} ({found.stage}, run {found.run}) took"
        f" {len(found.rows)} {unit} of {found.dataset_name} {figures.short(found.dataset)} (epoch {found.epoch + 1}):"
    ]
    for row in found.rows:
        for number, (column, length, start, place) in enumerate(row.pieces):
            label = f"{row.row:>9,}" if not number else " " * 9
            span = f"  {column:>6,} + {length:<6,}" if packed else ""
            cut = f"  from token {start:,}" if start else ""
            via = f"  prompt: {place.via.text}" if place.via is not None else ""
            file = f"  sha256:{place.sha256[:12]}" if place.sha256 else ""
            told.append(f"{label}{span}  {place.text}{cut}{file}{via}")
        if not row.pieces:
            told.append(f"{row.row:>9,}  its origin is not recorded")
    if packed:
        told.append("         row, position + tokens, where the document was read")
    return told
