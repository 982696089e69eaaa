"""Packs documents into rows of a fixed number of tokens: best-fit decreasing.

Model: a document longer than a row is cut into pieces of a whole row and a rest; the pieces, longest first, each go
into the row with the least room that still holds them, or into a new row (Ding et al. 2024, "Fewer Truncations Improve
Language Modeling", section 3; the heuristic is best fit decreasing, at most 11/9 of the fewest possible rows).

Invariants:
- Every token of every document is in exactly one row, once, and a piece is never cut again.
- The layout is a function of the lengths and of nothing else: pieces of equal length keep the documents' order, and
  among rows with equal room the one filled last is taken.
- Time is O(pieces · row_length / 64) with a tiny constant: the rooms that some row has are the bits of one integer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Layout:
    """Where each piece of each document goes; all arrays are int64 of shape [pieces], in order of row and column.

    Attributes:
        rows: number of rows.
        document: which document the piece belongs to.
        start: its first token, counted in its document.
        length: its tokens.
        row: the row it goes to.
        column: its first position in that row.
        segment: its number in that row, from 1.
    """

    rows: int
    document: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    row: NDArray[np.int64]
    column: NDArray[np.int64]
    segment: NDArray[np.int64]


def split_documents(
    lengths: NDArray[np.int64], row_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents into pieces of at most `row_length` tokens: (document, start, length) of each, in order.

    A rest of one token would have nothing to be predicted from, so the piece before it gives it one of its own.
    """
    counts = -(-lengths // row_length)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    start = (np.arange(len(document), dtype=np.int64) - first[document]) * row_length
    length = np.minimum(lengths[document] - start, row_length)
    if row_length > 2:
        alone = np.flatnonzero((length == 1) & (start > 0))
        start[alone] -= 1
        length[alone] += 1
        length[alone - 1] -= 1
    return document, start, length


def best_fit(lengths: list[int], row_length: int) -> tuple[list[int], list[int]]:
    """Place pieces, in the order given, each into the row with the least room that holds it.

    Args:
        lengths: tokens of each piece, each between 1 and `row_length`.

    Returns:
        The row of each piece, and how many tokens each row holds.
    """
    with_room: list[list[int]] = [[] for _ in range(row_length + 1)]  # rows by the room left in them
    some = 0  # bit r is set where with_room[r] is not empty
    rows: list[int] = []
    filled: list[int] = []
    for length in lengths:
        above = some >> length
        if above:
            room = length + (above & -above).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                some ^= 1 << room
        else:
            room, row = row_length, len(filled)
            filled.append(0)
        filled[row] += length
        rows.append(row)
        room -= length
        if room:
            with_room[room].append(row)
            some |= 1 << room
    return rows, filled


def pack(lengths: NDArray[np.int64], row_length: int, *, share_rows: bool = True) -> Layout:
    """Lay documents out in rows.

    Args:
        lengths: int64 [documents], tokens of each document, at least 1.
        row_length: tokens in a row.
        share_rows: whether several pieces may share a row; otherwise each piece has a row of its own.

    Raises:
        ValueError: a document is empty, or `row_length` is not positive.
        RuntimeError: tokens were lost or doubled, which is a defect of this module.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if row_length < 1:
        raise ValueError(f"row_length must be at least 1, not {row_length}")
    if len(lengths) and lengths.min() < 1:
        raise ValueError(f"document {int(lengths.argmin())} has no tokens")
    document, start, length = split_documents(lengths, row_length)
    if share_rows:
        order = np.argsort(-length, kind="stable")
        placed, filled = best_fit(length[order].tolist(), row_length)
        row = np.empty(len(order), dtype=np.int64)
        row[order] = placed
        rows = len(filled)
        # Inside a row: the longest first, as they were placed.
        by_row = order[np.argsort(row[order], kind="stable")]
        document, start, length, row = document[by_row], start[by_row], length[by_row], row[by_row]
    else:
        row = np.arange(len(document), dtype=np.int64)
        rows = len(document)
    ends = np.cumsum(length)
    first = np.flatnonzero(np.diff(row, prepend=-1))  # the first piece of each row
    column = ends - length - np.repeat((ends - length)[first], np.diff(first, append=len(row)))
    segment = np.arange(len(row), dtype=np.int64) - np.repeat(first, np.diff(first, append=len(row))) + 1
    layout = Layout(rows, document, start, length, row, column, segment)
    _check(layout, lengths, row_length)
    return layout


def _check(layout: Layout, lengths: NDArray[np.int64], row_length: int) -> None:
    per_document = np.bincount(layout.document, weights=layout.length, minlength=len(lengths)).astype(np.int64)
    per_row = np.bincount(layout.row, weights=layout.length, minlength=layout.rows).astype(np.int64)
    if not np.array_equal(per_document, lengths) or (len(per_row) and per_row.max() > row_length):
        raise RuntimeError("packing lost or doubled tokens: this is a defect of Headrace, please report it")
