"""The reference stage: per-token log-probabilities of every pair of a preference dataset under a checkpoint.

Invariants:
- Pairs are batched by length, so that little is padding, and written in the dataset's order; a pair's values do not
  depend on its neighbours (beyond the rounding of floating-point sums).
- Every batch is one part of the saved progress.
"""

from __future__ import annotations

import io

import pyarrow as pa
import torch

from stages.contract import NonFinite, StageContext
from stages.modeling.checkpoint import load_model
from stages.reference.config import Config
from stages.reference.logprobs import ReferenceInfo, ReferenceRow, to_table, write_logprobs
from stages.reference.pairs import check_pairs, pair_hash, pair_logprobs, weights_hash
from stages.sampling.parts import Parts
from stages.tokenize.dataset import read_preferences, tokenizer_folder
from stages.training.device import prepare
from stages.training.preflight import check_same_tokenizer


def run(context: StageContext[Config]) -> None:
    """Compute and write the artifact."""
    config = context.config
    device = prepare(context.resources, seed=0)
    check_same_tokenizer(context.inputs["model"], tokenizer_folder(context.inputs["data"]), "input data")
    pairs = read_preferences(context.inputs["data"], "train")
    model = load_model(context.inputs["model"], dtype=getattr(torch, config.dtype), device=device).eval()
    check_pairs(model, pairs)

    order = sorted(
        range(len(pairs)),
        key=lambda i: (len(pairs[i].prompt_ids) + max(len(pairs[i].chosen_ids), len(pairs[i].rejected_ids)), i),
    )
    size = config.per_device_eval_batch_size
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    parts = Parts(context, len(batches), unit="batch", save_seconds=config.save_seconds)
    for number in range(len(parts.done), len(batches)):
        rows = []
        chosen = [pairs[index] for index in batches[number]]
        for pair, (chosen_logprobs, rejected_logprobs) in zip(chosen, pair_logprobs(model, chosen), strict=True):
            if not torch.isfinite(torch.tensor(chosen_logprobs + rejected_logprobs)).all():
                raise NonFinite(f"pair {pair.id}: the model gives a log-probability that is not finite")
            rows.append(ReferenceRow(pair.id, pair_hash(pair), chosen_logprobs, rejected_logprobs))
        parts.add(_to_bytes(rows))
        context.progress(min((number + 1) * size, len(pairs)), len(pairs), unit="pair")

    rows = [row for part in parts.done for row in _from_bytes(part)]
    by_index = dict(zip(order, rows, strict=True))
    ordered = [by_index[index] for index in range(len(pairs))]
    write_logprobs(
        context.output, ordered, ReferenceInfo(len(ordered), config.dtype, weights_hash(context.inputs["model"]))
    )
    better = sum(sum(row.chosen_logprobs) > sum(row.rejected_logprobs) for row in ordered)
    tokens = sum(len(row.chosen_logprobs) + len(row.rejected_logprobs) for row in ordered)
    context.summary(pairs=len(ordered), tokens=tokens, preference_accuracy=better / len(ordered))


def _to_bytes(rows: list[ReferenceRow]) -> bytes:
    table = to_table(rows)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _from_bytes(data: bytes) -> list[ReferenceRow]:
    with pa.ipc.open_stream(data) as reader:
        return [ReferenceRow(**row) for row in reader.read_all().to_pylist()]
