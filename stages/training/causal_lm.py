"""Next-token prediction on packed rows: what pretrain and sft train.

The loss of a step is the summed negative log-likelihood of its target tokens over their number. Which tokens are
targets is the dataset's word (`loss_mask`): all but the first of a document for text, the assistant's turns for chat.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stages.contract import Refused, StageContext
from stages.modeling.logprobs import token_loss
from stages.modeling.lora import add_adapter
from stages.modeling.vocabulary import fit_embeddings
from stages.tokenize.dataset import read_packed
from stages.training.config import TokenLossConfig, TrainingConfig
from stages.training.distributed import rows_per_pass
from stages.training.finish import finish, kept_when_halted
from stages.training.loop import Figures, HeldOut, MicroBatch, train
from stages.training.order import batch_rows
from stages.training.preflight import check_model, check_rows, largest_token


class CausalLM:
    """Objective over packed rows. See `stages.training.loop.Objective`.

    Args:
        input_ids: int32 [rows, length].
        segment_ids: int32 [rows, length], the document of each token from 1; 0 is padding.
        loss_mask: uint8 [rows, length], 1 where the token is a target.
        config: batch sizes and seed.
        label_smoothing, z_loss: see `stages.modeling.head.linear_cross_entropy`.
    """

    def __init__(
        self,
        input_ids: np.ndarray,
        segment_ids: np.ndarray,
        loss_mask: np.ndarray,
        config: TrainingConfig,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.input_ids, self.segment_ids, self.loss_mask = input_ids, segment_ids, loss_mask
        self.config = config
        self.limit = None if config.max_steps is not None else config.total_rows(len(input_ids))
        self.targets_in_rows = loss_mask.sum(axis=1, dtype=np.int64)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """The rows of optimiser step `step`; columns that are padding in the whole micro-batch are cut off."""
        config = self.config
        return self.batches(batch_rows(len(self.input_ids), config.train_batch_size, config.seed, step, self.limit))

    def batches(self, rows: np.ndarray) -> list[MicroBatch]:
        """Micro-batches of the rows with these numbers, int64 [rows]; those without targets are left out."""
        size = rows_per_pass(self.config, len(rows))
        batches = []
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            weight = int(self.targets_in_rows[part].sum())
            if weight == 0:
                continue
            segments = self.segment_ids[part]
            length = int(np.flatnonzero(segments.any(axis=0))[-1]) + 1
            tensors = {
                "input_ids": torch.from_numpy(self.input_ids[part, :length]),
                "segment_ids": torch.from_numpy(segments[:, :length]),
                "loss_mask": torch.from_numpy(self.loss_mask[part, :length]),
            }
            batches.append(MicroBatch(tensors, weight=weight, tokens=int((segments > 0).sum())))
        return batches

    def loss(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Figures]:
        """Summed cross-entropy (nats) of the targets; with smoothing or z-loss, its parts as figures."""
        tensors = batch.tensors
        loss, nll, extra = token_loss(
            model,
            tensors["input_ids"],
            tensors["loss_mask"],
            segment_ids=tensors["segment_ids"],
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )
        figures: Figures = {}
        if self.label_smoothing or self.z_loss:
            figures["nll_loss"] = nll
        if self.z_loss:
            figures["z_loss"] = extra
        return loss, figures

    def state(self) -> dict[str, Tensor]:
        """Nothing beside the step: the order of the data is a function of it."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Nothing to put back."""

    def metrics(self) -> dict[str, float]:
        """None beside the loss."""
        return {}


def held_out(data: Path, config: TokenLossConfig) -> HeldOut | None:
    """The validation split of a dataset that holds text or chat; None where the config does not ask for it.

    Its loss is the plain cross-entropy, without smoothing or z-loss.

    Raises:
        Refused: it is asked for, and the dataset has none, or nothing in it is a target.
    """
    if config.eval_steps is None:
        return None
    rows = read_packed(data, "validation")
    objective = CausalLM(rows.input_ids, rows.segment_ids, rows.loss_mask, config)
    numbers, size = np.arange(len(rows.input_ids)), config.train_batch_size
    batches = [batch for start in range(0, len(numbers), size) for batch in objective.batches(numbers[start:][:size])]
    if not batches:
        raise Refused("eval_steps is set, and no token of the validation split is a target; give the split more rows")
    return HeldOut(config.eval_steps, batches, lambda model, batch: objective.loss(model, batch)[0])


def train_on_packed(
    context: StageContext[Any], config: TokenLossConfig, model: Any, tokenizer: Any, data: Path
) -> None:
    """Check, train, report and save: what pretrain and sft have in common.

    Args:
        context: the stage's context; the checkpoint goes into its output.
        config: the training settings.
        model: a causal LM in fp32 on its device.
        tokenizer: saved with the model.
        data: folder of a dataset that holds text or chat.

    Raises:
        Refused: see `stages.training.preflight`.
    """
    if added := fit_embeddings(model, tokenizer):
        if config.lora is not None:
            raise Refused(
                f"input data has {added} special tokens that the model lacks, and lora would leave their embeddings"
                " untrained; train all weights, or tokenize with the model's own tokenizer"
            )
        context.log(f"{added} new tokens: the embedding has {len(tokenizer)} rows now")
    rows = read_packed(data, "train")
    count, length = rows.input_ids.shape
    check_rows(count, int(rows.loss_mask.sum(dtype=np.int64)), config, "input data")
    check_model(
        model,
        tokenizer,
        max_token=largest_token(rows.input_ids),
        length=length,
        packed=bool((rows.segment_ids > 1).any()),
        what="input data",
    )
    adapted = add_adapter(model, config.lora, config.seed)
    objective = CausalLM(
        rows.input_ids,
        rows.segment_ids,
        rows.loss_mask,
        config,
        label_smoothing=config.label_smoothing,
        z_loss=config.z_loss,
    )
    measured = held_out(data, config)
    with kept_when_halted(context, model, tokenizer, adapted):
        metrics = train(
            context, config, model, tokenizer, objective, total_steps=config.total_steps(count), held_out=measured
        )
    context.summary(**metrics)
    finish(context, model, tokenizer, adapted)
