from __future__ import annotations

import numpy as np
import pytest

from stages.tokenize.packing import best_fit, pack


def naive_best_fit(lengths: list[int], row_length: int) -> list[int]:
    """Tokens of each row, by looking at every row for every piece: the definition, written down as it is said."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda index: rooms[index])] -= length
        else:
            rooms.append(row_length - length)
    return sorted(row_length - room for room in rooms)


@pytest.mark.parametrize(("row_length", "seed"), [(4, 0), (7, 1), (64, 2), (128, 3), (1000, 4)])
def test_packing_fills_rows_as_a_naive_best_fit_decreasing_does(row_length: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, row_length + 1, 400).tolist()
    _, filled = best_fit(sorted(lengths, reverse=True), row_length)
    assert sorted(filled) == naive_best_fit(lengths, row_length)


def test_a_small_case_is_packed_as_worked_out_by_hand() -> None:
    # 5 opens a row and leaves 3; the first 3 fits exactly; the next 3 opens a row that 2, 2 and 1 fill up.
    rows, filled = best_fit([5, 3, 3, 2, 2, 1], 8)
    assert rows == [0, 0, 1, 1, 1, 1]
    assert filled == [8, 8]


@pytest.mark.parametrize("share_rows", [True, False])
@pytest.mark.parametrize("row_length", [3, 10, 128])
def test_every_token_of_every_document_is_in_one_place(row_length: int, share_rows: bool) -> None:
    lengths = np.random.default_rng(row_length).integers(1, 300, 500)
    layout = pack(lengths, row_length, share_rows=share_rows)
    taken = np.zeros((layout.rows, row_length), dtype=int)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    for document, start, length, row, column, segment in zip(
        layout.document, layout.start, layout.length, layout.row, layout.column, layout.segment, strict=True
    ):
        assert taken[row, column : column + length].sum() == 0
        assert column == 0 or taken[row, column - 1] == segment - 1, "the pieces of a row follow one another"
        taken[row, column : column + length] = segment
        seen[document][start : start + length] += 1
    assert all((tokens == 1).all() for tokens in seen)
    assert (taken > 0).sum() == lengths.sum()
    assert (taken[:, 0] == 1).all(), "no row is empty"
    if not share_rows:
        assert taken.max() == 1


def test_a_rest_of_one_token_takes_a_second_one_from_the_piece_before() -> None:
    layout = pack(np.array([9]), 4, share_rows=False)
    assert layout.length.tolist() == [4, 3, 2]
    assert layout.start.tolist() == [0, 4, 7]


def test_a_document_of_exactly_a_row_is_not_cut() -> None:
    layout = pack(np.array([8, 16, 8]), 8)
    assert layout.length.tolist() == [8, 8, 8, 8]
    assert layout.rows == 4


def test_the_layout_of_equal_documents_keeps_their_order() -> None:
    layout = pack(np.array([2, 2, 2, 2]), 4)
    assert layout.document.tolist() == [0, 1, 2, 3]
    assert layout.row.tolist() == [0, 0, 1, 1]
    assert layout.segment.tolist() == [1, 2, 1, 2]


def test_a_hundred_thousand_documents_fill_their_rows() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1.2, 100_000).astype(np.int64) + 1
    layout = pack(lengths, 2048)
    assert lengths.sum() / (layout.rows * 2048) > 0.999


def test_no_documents_give_no_rows() -> None:
    assert pack(np.array([], dtype=np.int64), 8).rows == 0


def test_an_empty_document_and_a_row_of_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="document 1 has no tokens"):
        pack(np.array([3, 0]), 8)
    with pytest.raises(ValueError, match="row_length must be at least 1"):
        pack(np.array([3]), 0)
