"""The `logprobs` artifact: what a reference model gives to every completion token of a preference dataset.

`logprobs.parquet`, one row a pair in the dataset's order: id string, pair string (hash of the pair's token ids),
chosen_logprobs and rejected_logprobs list<float32>, one value a completion token.
`logprobs.json`: {"rows", "dtype", "weights"}; "weights" is the hash of the model that gave them (`pairs.weights_hash`).

No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.contract import Refused

TABLE = "logprobs.parquet"
INFO = "logprobs.json"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("pair", pa.string()),
        ("chosen_logprobs", pa.list_(pa.float32())),
        ("rejected_logprobs", pa.list_(pa.float32())),
    ]
)


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """The reference's log-probabilities of one pair, one value a completion token."""

    id: str
    pair: str
    chosen_logprobs: list[float]
    rejected_logprobs: list[float]


@dataclass(frozen=True)
class ReferenceInfo:
    """`logprobs.json`: how many rows, at what precision, and the hash of the model's weights."""

    rows: int
    dtype: str
    weights: str


def to_table(rows: Iterable[ReferenceRow]) -> pa.Table:
    """Rows as a table of the artifact's columns."""
    return pa.Table.from_pylist([{name: getattr(row, name) for name in SCHEMA.names} for row in rows], schema=SCHEMA)


def write_logprobs(folder: Path, rows: Sequence[ReferenceRow], info: ReferenceInfo) -> None:
    """Write the artifact's files into `folder`."""
    pq.write_table(to_table(rows), folder / TABLE, compression="zstd")
    text = json.dumps({"rows": info.rows, "dtype": info.dtype, "weights": info.weights}, indent=2)
    (folder / INFO).write_text(text + "\n", encoding="utf-8")


def read_logprobs(folder: Path) -> tuple[dict[str, ReferenceRow], ReferenceInfo]:
    """Read a `logprobs` artifact: its rows by id, and its info.

    Raises:
        Refused: the folder is not such an artifact.
    """
    try:
        info = ReferenceInfo(**json.loads((folder / INFO).read_bytes()))
        rows = [ReferenceRow(**row) for row in pq.read_table(folder / TABLE, schema=SCHEMA).to_pylist()]
    except FileNotFoundError as error:
        raise Refused(f"{folder} holds no reference log-probabilities: it has no {Path(error.filename).name}") from None
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise Refused(f"{folder} holds no reference log-probabilities: {type(error).__name__}: {error}") from None
    return {row.id: row for row in rows}, info
