"""The `rollouts` artifact: sampled completions with their log-probabilities and rewards, as one Parquet table.

`rollouts.parquet`, one row a completion, in the order they were sampled:
step int32 (the optimiser step or round that sampled it), id string (of the prompt), prompt string, messages string
(JSON of the chat, null for plain text), prompt_ids list<int32>, completion string (without special tokens),
completion_ids list<int32> (the end-of-turn token included), logprobs list<float32>, reward float64 (the weighted
total), reward/<function> float64 (null where it does not apply), finished bool, columns string (JSON).

Invariant: the same rows give the same bytes, however the table was put together (in one go, or over resumed runs).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.sampling.groups import Sampled
from stages.sampling.rewards import Scores

FILE = "rollouts.parquet"


def schema(reward_columns: Sequence[str]) -> pa.Schema:
    """The columns of `rollouts.parquet` for these reward functions."""
    return pa.schema(
        [
            ("step", pa.int32()),
            ("id", pa.string()),
            ("prompt", pa.string()),
            ("messages", pa.string()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("completion", pa.string()),
            ("completion_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("reward", pa.float64()),
            *((f"reward/{name}", pa.float64()) for name in reward_columns),
            ("finished", pa.bool_()),
            ("columns", pa.string()),
        ]
    )


def table(step: int, sampled: Sampled, scores: Scores) -> pa.Table:
    """The table of the completions sampled at one step."""
    prompts, completions = sampled.prompts, sampled.completions
    return pa.table(
        {
            "step": [step] * len(prompts),
            "id": [prompt.id for prompt in prompts],
            "prompt": [prompt.prompt for prompt in prompts],
            "messages": [None if prompt.messages is None else _json(prompt.messages) for prompt in prompts],
            "prompt_ids": [prompt.prompt_ids for prompt in prompts],
            "completion": sampled.texts,
            "completion_ids": [completion.tokens for completion in completions],
            "logprobs": [completion.logprobs for completion in completions],
            "reward": scores.total,
            **{f"reward/{name}": values for name, values in scores.by_function.items()},
            "finished": [completion.finished for completion in completions],
            "columns": [_json(prompt.columns) for prompt in prompts],
        },
        schema=schema(list(scores.by_function)),
    )


def to_bytes(tables: Sequence[pa.Table]) -> bytes:
    """The tables one after the other as an Arrow stream, to keep with the state of a run."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, tables[0].schema) as writer:
        for item in tables:
            writer.write_table(item)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    """What `to_bytes` kept."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


def write(tables: Sequence[pa.Table], folder: Path) -> int:
    """Write `rollouts.parquet` into `folder`; returns its rows."""
    names = [name.removeprefix("reward/") for name in tables[0].schema.names if name.startswith("reward/")]
    # One chunk a column and one schema, so that the file does not show where a run was resumed.
    joined = pa.concat_tables([item.cast(schema(names)) for item in tables]).combine_chunks()
    pq.write_table(joined, folder / FILE, compression="zstd", row_group_size=65536)
    return int(joined.num_rows)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def read(folder: Path) -> pa.Table:
    """The table of a `rollouts` artifact."""
    return pq.read_table(folder / FILE)
