"""Rows of datasets, rollouts and other tables, as people read them: tokens as text, with the mask that training uses.

Nothing here imports torch: rows are read from their files piece by piece, and the dataset's own tokenizer turns tokens
into text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic_core import from_json
from tokenizers import Tokenizer

from flows.lineage.browser.pieces import Tensor, open_file, read_range, tensors, whole
from flows.lineage.records import entry_of
from stages.artifacts import Damaged, FileEntry, Manifest, Store
from stages.tokenize.dataset import INFO_FILE, PACKED, TOKENIZER_FOLDER

PACKED_ROWS = 5  # on a page
TABLE_ROWS = 20
_TOKENIZER_BYTES = 64 << 20
_CELL = 4000  # characters of a cell that are shown
_ROW_TOKENS = 8192  # of a packed row that are shown


@dataclass(frozen=True)
class Span:
    """Tokens next to each other as text.

    Attributes:
        trained: whether they are targets of the loss.
        tokens: how many.
    """

    text: str
    trained: bool
    tokens: int


@dataclass(frozen=True)
class PackedRow:
    """A packed row: its documents as spans, how much of it is padding, and how many of its tokens are trained on."""

    number: int
    documents: list[list[Span]]
    tokens: int
    trained: int
    padding: int
    cut: int = 0  # tokens that are not shown


@dataclass(frozen=True)
class Table:
    """Rows of a table: column names with their types, and cells as text."""

    columns: list[tuple[str, str]]
    rows: list[list[str]]
    first: int
    total: int


@dataclass(frozen=True)
class Rows:
    """What the page of a dataset's rows shows.

    Attributes:
        info: dataset.json.
        split: the split that is shown, of `info["splits"]`.
        packed, table: the one or the other.
        page, pages: from 0.
    """

    info: dict[str, Any]
    split: str
    packed: list[PackedRow]
    table: Table | None
    page: int
    pages: int


def dataset_info(store: Store, manifest: Manifest) -> dict[str, Any] | None:
    """`dataset.json` of a dataset; None where the artifact has none that can be read.

    Raises:
        Damaged: its bytes are missing or damaged.
    """
    entry = entry_of(manifest, INFO_FILE)
    data = whole(store, entry) if entry is not None else None
    try:
        info = from_json(data) if data is not None else None
    except ValueError:
        return None
    return info if isinstance(info, dict) and isinstance(info.get("splits"), dict) and info["splits"] else None


def dataset_rows(store: Store, manifest: Manifest, split: str, page: int) -> Rows | None:
    """A page of the rows of a dataset's split; None where the artifact is no dataset, or has no such split.

    Raises:
        Damaged: a file that is needed is missing or damaged.
    """
    info = dataset_info(store, manifest)
    if info is None:
        return None
    split = split or next(iter(info["splits"]))
    if split not in info["splits"]:
        return None
    if info.get("holds") in PACKED:
        entry = entry_of(manifest, f"{split}.safetensors")
        if entry is None:
            raise Damaged(f"the dataset has no {split}.safetensors")
        parts = {tensor.name: tensor for tensor in tensors(store, entry)}
        total = parts["input_ids"].shape[0] if "input_ids" in parts else 0
        page, pages = _page(page, total, PACKED_ROWS)
        packed = _packed_rows(store, entry, parts, _tokenizer_of(store, manifest), page * PACKED_ROWS)
        return Rows(info, split, packed, None, page, pages)
    entry = entry_of(manifest, f"{split}.parquet")
    if entry is None:
        raise Damaged(f"the dataset has no {split}.parquet")
    table = read_table(store, entry, page, hidden=("prompt_ids", "chosen_ids", "rejected_ids"))
    page, pages = _page(page, table.total, TABLE_ROWS)
    return Rows(info, split, [], table, page, pages)


def _page(page: int, total: int, size: int) -> tuple[int, int]:
    pages = max(1, math.ceil(total / size))
    return max(0, min(page, pages - 1)), pages


def _packed_rows(
    store: Store, entry: FileEntry, parts: dict[str, Tensor], tokenizer: Tokenizer, first: int
) -> list[PackedRow]:
    columns = {}
    for name, dtype in (("input_ids", np.int32), ("segment_ids", np.int32), ("loss_mask", np.uint8)):
        if (tensor := parts.get(name)) is None or len(tensor.shape) != 2:
            raise Damaged(f"{entry.path} has no rows {name}")
        rows, length = tensor.shape
        count = max(0, min(PACKED_ROWS, rows - first))
        bytes_of_row = length * np.dtype(dtype).itemsize
        data = read_range(store, entry, tensor.start + first * bytes_of_row, count * bytes_of_row)
        if len(data) != count * bytes_of_row:
            raise Damaged(f"{entry.path} ends before its rows do")
        columns[name] = np.frombuffer(data, dtype).reshape(count, length)
    made = zip(columns["input_ids"], columns["segment_ids"], columns["loss_mask"], strict=True)
    return [_packed_row(first + index, *row, tokenizer) for index, row in enumerate(made)]


def _packed_row(number: int, ids: Any, segments: Any, mask: Any, tokenizer: Tokenizer) -> PackedRow:
    used = int((segments != 0).sum())
    shown = min(used, _ROW_TOKENS)
    documents: list[list[Span]] = []
    start = 0
    for at in range(1, shown + 1):
        if at < shown and segments[at] == segments[start] and (mask[at] != 0) == (mask[start] != 0):
            continue
        text = tokenizer.decode(ids[start:at].tolist(), skip_special_tokens=False)
        span = Span(text, bool(mask[start]), at - start)
        if start == 0 or segments[start] != segments[start - 1]:
            documents.append([])
        documents[-1].append(span)
        start = at
    return PackedRow(number, documents, used, int((mask != 0).sum()), len(ids) - used, used - shown)


def _tokenizer_of(store: Store, manifest: Manifest) -> Tokenizer:
    path = f"{TOKENIZER_FOLDER}/tokenizer.json"
    entry = entry_of(manifest, path)
    if entry is None or entry.size > _TOKENIZER_BYTES:
        raise Damaged(f"the dataset has no {path} that can be read")
    data = whole(store, entry, _TOKENIZER_BYTES) or b""
    try:
        return _tokenizer(data)
    except Exception as error:  # the library's own exceptions have no common class
        raise Damaged(f"{path} is not a tokenizer: {error}") from None


@lru_cache(maxsize=4)
def _tokenizer(data: bytes) -> Tokenizer:
    return Tokenizer.from_str(data.decode())


def read_table(store: Store, entry: FileEntry, page: int = 0, *, hidden: tuple[str, ...] = ()) -> Table:
    """A page of the rows of a Parquet file.

    Args:
        hidden: columns that are left out.

    Raises:
        Damaged: its bytes are missing, or it is not a Parquet file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_file(store, entry) as file:
            parquet = pq.ParquetFile(file, pre_buffer=False)
            total = parquet.metadata.num_rows
            page, _ = _page(page, total, TABLE_ROWS)
            schema = parquet.schema_arrow
            names = [name for name in schema.names if name not in hidden]
            records = _records(parquet, names, page * TABLE_ROWS)
    except (pa.ArrowException, OSError) as error:
        raise Damaged(f"{entry.path} is not a Parquet file: {str(error)[:200]}") from None
    rows = [[_cell(record[name]) for name in names] for record in records]
    return Table([(name, str(schema.field(name).type)) for name in names], rows, page * TABLE_ROWS, total)


def _records(parquet: Any, names: list[str], first: int) -> list[dict[str, Any]]:
    """`TABLE_ROWS` records from row `first` on; only the row groups that hold them are read."""
    groups, skipped = [], 0
    reached = 0
    for number in range(parquet.metadata.num_row_groups):
        count = parquet.metadata.row_group(number).num_rows
        if reached + count <= first:
            skipped += count
        elif reached < first + TABLE_ROWS:
            groups.append(number)
        reached += count
    found: list[dict[str, Any]] = []
    at = skipped
    for batch in parquet.iter_batches(batch_size=512, row_groups=groups, columns=names) if groups else ():
        if at + batch.num_rows > first:
            found += batch.slice(max(0, first - at), TABLE_ROWS - len(found)).to_pylist()
        at += batch.num_rows
        if len(found) >= TABLE_ROWS:
            break
    return found


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and len(value) > 24:
        return f"[{', '.join(map(str, value[:24]))}, … {len(value):,} in all]"
    text = str(value)
    return text if len(text) <= _CELL else f"{text[:_CELL]}… ({len(text):,} characters)"
