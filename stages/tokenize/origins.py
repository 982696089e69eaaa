"""Where the rows of a dataset come from: the side output `origins`, an artifact beside the dataset.

It is no part of the dataset, for that is a function of the rows alone: a data file that is renamed moves no model. One
Parquet table for each split, in the order of the dataset's rows:

- packed rows: one line for each piece of a document, with `row`, `column` and `length` (tokens) of the piece and
  `start`, its first token counted in its document;
- pairs and prompts: one line a row, with `row`; for pairs made of rollouts `other`, the line of the table that holds
  the rejected completion.

Each line has `source` ("data", "data.name" or the generator's `module:function`), `path` (the file in that input's
artifact, "" for a generator) and `number` (the line or row in the file, or the row that the generator gave, from 1; 0
where the document is the whole file).
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.tokenize.packing import Layout


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an example was read: see above. `other` is 0 but for pairs made of rollouts."""

    source: str
    path: str
    number: int
    other: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a row of a dataset and where it comes from; for rows that are not packed, the whole row."""

    row: int
    origin: Origin
    column: int = 0
    length: int = 0
    start: int = 0


def number_of(where: str, path: str) -> int:
    """The line or row that `Row.where` names, behind the file's (or generator's) name; 0 where it names none."""
    match = re.fullmatch(r" (?:line|row) ([\d,]+)", where.removeprefix(path))
    return int(match[1].replace(",", "")) if match else 0


class OriginWriter:
    """Collects the origins of one split's examples, in the order in which they are added to it.

    Memory: 20 bytes an example.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], int] = {}  # (source, path) -> number
        self._place, self._number, self._other = array("i"), array("q"), array("q")

    def add(self, origin: Origin) -> None:
        """Take the origin of the next example."""
        self._place.append(self._places.setdefault((origin.source, origin.path), len(self._places)))
        self._number.append(origin.number)
        self._other.append(origin.other)

    def write(self, path: Path, layout: Layout | None, rows: NDArray[np.int64] | None = None) -> None:
        """Write the table of a split.

        Args:
            layout: of packed documents; None for rows that are not packed.
            rows: the row in the dataset of each row of the layout, int64 [layout.rows].
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {}
        if layout is None:
            document = np.arange(len(self._place))
            columns["row"] = pa.array(document, pa.int64())
        else:
            assert rows is not None
            order = np.lexsort((layout.column, rows[layout.row]))
            document = layout.document[order]
            columns["row"] = pa.array(rows[layout.row][order], pa.int64())
            for name in ("column", "length", "start"):
                columns[name] = pa.array(getattr(layout, name)[order], pa.int64())
        place = np.frombuffer(self._place, np.int32)[document] if len(document) else np.zeros(0, np.int32)
        for index, name in enumerate(("source", "path")):
            # Arrow writes a dictionary in which a value stands twice with a tail of memory that nobody has set.
            unique: dict[str, int] = {}
            codes = np.array([unique.setdefault(key[index], len(unique)) for key in self._places], np.int32)
            values = pa.array(list(unique), pa.string())
            columns[name] = pa.DictionaryArray.from_arrays(pa.array(codes[place], pa.int32()), values)
        for name, values in (("number", self._number), ("other", self._other)):
            if name == "number" or any(values):
                columns[name] = pa.array(np.frombuffer(values, np.int64)[document], pa.int64())
        pq.write_table(pa.table(columns), path, compression="zstd")


def read_origins(path: Path, rows: list[int] | None = None) -> list[Piece]:
    """The pieces of a split's rows, in the order of the table.

    Args:
        path: the split's table.
        rows: only those rows of the dataset; all when left out.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if rows is not None:
        table = table.filter(pc.is_in(table["row"], pa.array(sorted(set(rows)), pa.int64())))
    return [
        Piece(
            line["row"],
            Origin(line["source"], line["path"], line["number"], line.get("other") or 0),
            line.get("column") or 0,
            line.get("length") or 0,
            line.get("start") or 0,
        )
        for line in table.to_pylist()
    ]
