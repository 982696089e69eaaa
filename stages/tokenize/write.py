"""Writes the splits of a dataset: packed rows by way of spool files, and tables of pairs and prompts.

Memory: of packed documents only the lengths are held; their tokens go to spool files in the scratch folder and from
there, through memory maps, to their place. So a dataset may be larger than the memory.

Invariant: the files are a function of the documents' order, the settings and the seed.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stages.seeds import stream_seed
from stages.tokenize.dataset import create_packed, write_table
from stages.tokenize.encode import Document, EncodedPair, EncodedPrompt
from stages.tokenize.origins import OriginWriter
from stages.tokenize.packing import pack

CHUNK = 1 << 21  # tokens that are moved at a time


class PackedWriter:
    """Collects the documents of one split and writes them as packed rows."""

    def __init__(self, scratch: Path, split: str) -> None:
        self.lengths = array("q")
        self._paths = [scratch / f"{split}.{part}.spool" for part in ("ids", "mask", "bytes")]
        self._files = [path.open("wb") for path in self._paths]

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, document: Document) -> None:
        """Take a document of at least two tokens."""
        self.lengths.append(len(document.ids))
        for file, values in zip(self._files, (document.ids, document.mask, document.bytes), strict=True):
            file.write(np.ascontiguousarray(values).tobytes())

    def close(self) -> None:
        """Remove the spool files."""
        for file, path in zip(self._files, self._paths, strict=True):
            file.close()
            path.unlink(missing_ok=True)

    def write(
        self,
        path: Path,
        *,
        row_length: int,
        share_rows: bool,
        pad_id: int,
        seed: int,
        origins: tuple[OriginWriter, Path] | None = None,
    ) -> dict[str, Any]:
        """Write the safetensors file at `path` and return the figures of the split.

        The order of the rows is shuffled by `seed`: packing orders them by the length of their documents.

        Args:
            origins: of the documents, in the order in which they were added, and the file to write them to.
        """
        for file in self._files:
            file.flush()
        lengths = np.frombuffer(self.lengths, dtype=np.int64)
        layout = pack(lengths, row_length, share_rows=share_rows)
        tokens = int(lengths.sum())
        ids, mask, sizes = (
            np.memmap(spool, dtype, "r", shape=(tokens,))
            for spool, dtype in zip(self._paths, (np.int32, np.uint8, np.int32), strict=True)
        )
        offsets = np.cumsum(lengths) - lengths
        source = offsets[layout.document] + layout.start
        shuffled = np.random.default_rng(stream_seed("row order", seed)).permutation(layout.rows)
        target = shuffled[layout.row] * row_length + layout.column
        if origins is not None:
            origins[0].write(origins[1], layout, shuffled)
        rows = create_packed(path, layout.rows, row_length)
        flat_ids, flat_segments, flat_mask = (
            part.reshape(-1) for part in (rows.input_ids, rows.segment_ids, rows.loss_mask)
        )
        if pad_id:
            for first in range(0, len(flat_ids), CHUNK):
                flat_ids[first : first + CHUNK] = pad_id
        targets = target_bytes = 0
        moved = np.cumsum(layout.length)
        first = 0
        while first < len(moved):
            done = int(moved[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(moved, done + CHUNK, side="right")))
            length = layout.length[first:last]
            within = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
            read = np.repeat(source[first:last], length) + within
            put = np.repeat(target[first:last], length) + within
            trained = mask[read]
            trained[within == 0] = 0  # a piece begins with nothing to predict from
            flat_ids[put] = ids[read]
            flat_segments[put] = np.repeat(layout.segment[first:last], length)
            flat_mask[put] = trained
            targets += int(trained.sum())
            target_bytes += int(sizes[read][trained.astype(bool)].sum(dtype=np.int64))
            first = last
        return {
            "rows": layout.rows,
            "documents": len(lengths),
            "pieces": len(layout.row),
            "tokens": tokens,
            "target_tokens": targets,
            "bytes": target_bytes,
            "fill": round(tokens / (layout.rows * row_length), 6),
        }


@dataclass
class PairWriter:
    """Collects the pairs of one split."""

    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {
            name: [] for name in ("id", "prompt_ids", "chosen_ids", "rejected_ids", "prompt", "chosen", "rejected")
        }
    )

    def __len__(self) -> int:
        return len(self.columns["id"])

    def add(self, row_id: str, pair: EncodedPair) -> None:
        """Take a pair."""
        self.columns["id"].append(row_id)
        for name, values in self.columns.items():
            if name != "id":
                values.append(getattr(pair, name))

    def write(self, path: Path) -> dict[str, Any]:
        """Write the Parquet file at `path` and return the figures of the split."""
        write_table(path, self.columns)
        answers = sum(len(ids) for name in ("chosen_ids", "rejected_ids") for ids in self.columns[name])
        prompts = sum(len(ids) for ids in self.columns["prompt_ids"])
        rows = len(self)
        return {"rows": rows, "documents": rows, "tokens": prompts + answers, "target_tokens": answers}


@dataclass
class PromptWriter:
    """Collects the prompts of one split."""

    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in ("id", "prompt_ids", "prompt", "messages", "columns")}
    )

    def __len__(self) -> int:
        return len(self.columns["id"])

    def add(self, row_id: str, prompt: EncodedPrompt, columns: dict[str, Any]) -> None:
        """Take a prompt and the columns that rewards get."""
        messages = None if prompt.messages is None else _json(prompt.messages)
        values = (row_id, prompt.prompt_ids, prompt.prompt, messages, _json(columns))
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)

    def write(self, path: Path) -> dict[str, Any]:
        """Write the Parquet file at `path` and return the figures of the split."""
        write_table(path, self.columns)
        rows = len(self)
        return {"rows": rows, "documents": rows, "tokens": sum(len(ids) for ids in self.columns["prompt_ids"])}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
