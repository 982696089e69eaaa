"""The files of a `dataset` artifact, read without torch.

A dataset is `dataset.json` (what it holds and how much), `tokenizer/` (a Hugging Face tokenizer folder), and for each
split ("train", "validation"):
- text and chat: `<split>.safetensors` with packed rows: `input_ids` int32 [rows, L], `segment_ids` int32 [rows, L]
  (1, 2, ... by document; 0 where there is padding) and `loss_mask` uint8 [rows, L] (1 where the token at this position
  is a target, to be predicted from those before it in its document; a document's first token never is);
- preference: `<split>.parquet` with id, prompt_ids, chosen_ids, rejected_ids and the texts prompt, chosen, rejected;
- prompt: `<split>.parquet` with id, prompt_ids, prompt (text), messages and columns (JSON).

Invariant: the bytes are a function of the rows alone: no times, host names or paths.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.contract import Refused

INFO_FILE = "dataset.json"
TOKENIZER_FOLDER = "tokenizer"
SPLITS = ("train", "validation")
PACKED = ("text", "chat")


@dataclass(frozen=True)
class SplitInfo:
    """What one split holds.

    Attributes:
        rows: packed rows, pairs or prompts.
        documents: documents, chats, pairs or prompts.
        tokens: tokens without padding.
        target_tokens: tokens that are trained on; 0 for prompts.
        bytes: UTF-8 bytes of text that the target tokens of packed rows stand for (markers stand for none);
            bits per byte = summed negative log-likelihood of the targets / ln 2 / bytes.
    """

    rows: int
    documents: int
    tokens: int
    target_tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class DatasetInfo:
    """`dataset.json`: what a dataset holds.

    Attributes:
        holds: "text", "chat", "preference" or "prompt".
        row_length: tokens in a packed row; None where rows are not packed and not limited.
        splits: by name; "train" is always there.
        vocab_size: one more than the largest token id that the tokenizer can give.
        kept: documents in all splits together.
        dropped: how many rows were dropped, by reason.
    """

    holds: str
    row_length: int | None
    splits: dict[str, SplitInfo]
    vocab_size: int
    kept: int
    dropped: dict[str, int]


@dataclass(frozen=True)
class PackedRows:
    """Packed rows [rows, L], memory-mapped and read-only: ids int32, segments int32, loss mask uint8."""

    input_ids: NDArray[np.int32]
    segment_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Preference:
    """A pair of completions of one prompt as token ids; a completion includes its end-of-turn token."""

    id: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to complete.

    Attributes:
        id: a hash of its content.
        prompt_ids: the prompt as a model gets it, with the start of the assistant's turn.
        prompt: its text for people and rewards: the last message, without markers.
        messages: the chat that was rendered; None for plain text.
        columns: all other columns of its row, for rewards.
    """

    id: str
    prompt_ids: list[int]
    prompt: str
    messages: list[dict[str, Any]] | None
    columns: dict[str, Any]


def tokenizer_folder(folder: Path) -> Path:
    """The Hugging Face tokenizer folder of a dataset."""
    return folder / TOKENIZER_FOLDER


def read_info(folder: Path) -> DatasetInfo:
    """Read `dataset.json`.

    Raises:
        Refused: the folder is not a dataset.
    """
    path = folder / INFO_FILE
    try:
        data = json.loads(path.read_bytes())
        splits = {name: SplitInfo(**_known(values)) for name, values in data["splits"].items()}
        return DatasetInfo(
            holds=data["holds"],
            row_length=data["row_length"],
            splits=splits,
            vocab_size=data["vocab_size"],
            kept=data["kept"],
            dropped=data["dropped"],
        )
    except FileNotFoundError:
        raise Refused(f"{folder} is not a dataset: it has no {INFO_FILE}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path} is not the description of a dataset: {type(error).__name__}: {error}") from None


def read_packed(folder: Path, split: str = "train") -> PackedRows:
    """Map the packed rows of a text or chat dataset.

    Raises:
        Refused: the dataset holds something else, or has no such split.
    """
    _check_split(folder, split, PACKED)
    tensors = map_safetensors(folder / f"{split}.safetensors")
    return PackedRows(tensors["input_ids"], tensors["segment_ids"], tensors["loss_mask"])


def read_preferences(folder: Path, split: str = "train") -> list[Preference]:
    """Read the pairs of a preference dataset.

    Raises:
        Refused: the dataset holds something else, or has no such split.
    """
    _check_split(folder, split, ("preference",))
    return [Preference(**row) for row in _read_table(folder / f"{split}.parquet")]


def read_prompts(folder: Path, split: str = "train") -> list[Prompt]:
    """Read the prompts of a prompt dataset.

    Raises:
        Refused: the dataset holds something else, or has no such split.
    """
    _check_split(folder, split, ("prompt",))
    return [
        Prompt(
            id=row["id"],
            prompt_ids=row["prompt_ids"],
            prompt=row["prompt"],
            messages=json.loads(row["messages"]) if row["messages"] is not None else None,
            columns=json.loads(row["columns"]),
        )
        for row in _read_table(folder / f"{split}.parquet")
    ]


def map_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Memory-map the tensors of a safetensors file, read-only."""
    types = {"I32": np.int32, "U8": np.uint8}
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: np.memmap(path, types[item["dtype"]], "r", 8 + size + item["data_offsets"][0], tuple(item["shape"]))
        for name, item in header.items()
    }


def create_packed(path: Path, rows: int, row_length: int) -> PackedRows:
    """Create the safetensors file of packed rows, all zeros, and map it for writing.

    The rows are written in place, for a dataset may be larger than the memory; the layout of the file is that of
    safetensors (an 8-byte little-endian header length, a JSON header, the tensors one after another).
    """
    types: dict[str, tuple[str, Any]] = {
        "input_ids": ("I32", np.int32),
        "segment_ids": ("I32", np.int32),
        "loss_mask": ("U8", np.uint8),
    }
    header: dict[str, Any] = {}
    offset = 0
    for name, (code, dtype) in types.items():
        end = offset + rows * row_length * np.dtype(dtype).itemsize
        header[name] = {"dtype": code, "shape": [rows, row_length], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    arrays = {
        name: np.memmap(path, dtype, "r+", 8 + len(text) + header[name]["data_offsets"][0], (rows, row_length))
        for name, (_, dtype) in types.items()
    }
    return PackedRows(arrays["input_ids"], arrays["segment_ids"], arrays["loss_mask"])


def write_table(path: Path, columns: dict[str, list[Any]]) -> None:
    """Write a Parquet file: columns that end in `_ids` are lists of int32, all others strings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.list_(pa.int32()) if name.endswith("_ids") else pa.string()) for name in columns])
    pq.write_table(pa.table(columns, schema=schema), path, compression="zstd")


def _read_table(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in SplitInfo.__dataclass_fields__ if name in values}


def _check_split(folder: Path, split: str, holds: tuple[str, ...]) -> None:
    info = read_info(folder)
    if info.holds not in holds:
        raise Refused(f"the dataset holds {info.holds} rows where {' or '.join(holds)} rows are needed")
    if split not in info.splits:
        raise Refused(
            f"the dataset has no {split} split (it has {', '.join(info.splits)}); "
            "set validation_fraction in the step that made it"
        )
