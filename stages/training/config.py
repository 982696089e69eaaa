"""Settings that pretrain, sft, dpo and grpo share.

Names follow `transformers.TrainingArguments` and TRL where they have one. `max_steps` says where the run ends and
`schedule_steps` says over how many steps the learning rate is planned: they are separate, so that a run can stop early
without changing the rates it has used. Nothing here imports torch.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stages.contract import NotIdentity, StageConfig


class LoRA(BaseModel):
    """Train low-rank adapters and freeze the model's own weights; the checkpoint has them merged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    r: int = Field(16, ge=1, description="Rank of the adapters.")
    alpha: float = Field(32.0, gt=0, description="Their update counts alpha / r times.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before an adapter.")
    target_modules: list[str] | None = Field(
        None, min_length=1, description="Names of the layers to adapt; every linear layer but the head when empty."
    )


class TrainingConfig(StageConfig):
    """Base of the configs of the training stages."""

    OUTPUT = "checkpoint"
    SIDE_OUTPUTS: ClassVar[dict[str, str]] = {"adapter": "adapter"}  # there with `lora` alone
    RANKS = True
    LOSS_IS_POSITIVE: ClassVar[bool] = True  # whether a spike can be told by the ratio of two losses
    REPORTS_ENTROPY: ClassVar[bool] = False  # whether training.jsonl has the entropy of what the model says

    max_steps: int | None = Field(
        None, ge=1, description="Optimiser steps to take; when empty, as many as num_train_epochs needs."
    )
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the data when max_steps is empty.")
    train_batch_size: int = Field(
        32, ge=1, description="Rows (or pairs, or prompts) of one optimiser step, over all ranks."
    )
    per_device_train_batch_size: int | None = Field(
        None,
        ge=1,
        description="Rows of one forward pass; gradients accumulate until train_batch_size. Whole batch when empty.",
    )

    learning_rate: float = Field(1e-4, ge=0, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "cosine_with_restarts", "wsd"] = Field(
        "cosine", description="How the rate falls after the warmup; wsd is warmup, stable, then a linear decay."
    )
    num_cycles: int = Field(1, ge=1, description="For cosine_with_restarts: how often the rate falls from its peak.")
    warmup_steps: int | None = Field(
        None, ge=0, description="Steps of linear warmup; when empty, warmup_ratio says how many."
    )
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="Warmup as a share of the schedule.")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="The rate at the end of the schedule, as a share of peak.")
    decay_ratio: float = Field(0.2, gt=0, le=1, description="For wsd: the last share of the schedule, which decays.")
    schedule_steps: int | None = Field(
        None, ge=1, description="Horizon of the schedule in steps; the length of the run when empty."
    )

    optimizer: Literal["adamw", "adamw_8bit", "muon"] = Field(
        "adamw",
        description="muon: Muon on the hidden matrices, AdamW on embeddings, head, norms and biases; adamw_8bit: AdamW"
        " with its state in 8 bits, from torchao.",
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Decoupled weight decay; norms, biases and embeddings never decay."
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="Term in AdamW's denominator.")
    muon_learning_rate: float | None = Field(
        None, ge=0, description="Peak rate of the matrices under Muon; learning_rate when empty."
    )
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="Momentum of Muon (Nesterov).")
    muon_steps: int = Field(5, ge=1, le=20, description="Newton-Schulz iterations of Muon.")
    max_grad_norm: float = Field(1.0, ge=0, description="Clip the gradient's norm to this; 0 does not clip.")

    lora: LoRA | None = Field(None, description="Train low-rank adapters instead of all weights.")

    seed: int = Field(0, ge=0, lt=2**32, description="Seed of initial weights, data order and dropout.")
    mixed_precision: Literal["no", "bf16", "fp16"] = Field(
        "no", description="Precision of matrix products; weights and optimiser state stay fp32. On CPU, no is fastest."
    )

    device: Annotated[Literal["auto", "cpu", "cuda"], NotIdentity()] = Field(
        "auto", description="Where to train; auto takes a GPU when the step was given one."
    )
    distribution: Annotated[Literal["ddp", "fsdp2"], NotIdentity()] = Field(
        "ddp",
        description="With resources.processes above 1: ddp holds the model on every rank, fsdp2 shards weights,"
        " gradients and optimiser state.",
    )
    ddp_timeout: Annotated[int, NotIdentity()] = Field(
        600, ge=1, description="Seconds that a rank waits for another one before the step fails."
    )
    gradient_checkpointing: Annotated[bool, NotIdentity()] = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    # Compiled kernels round differently, as another device does; so it is no more identity than `device` is.
    torch_compile: Annotated[bool, NotIdentity()] = Field(
        False,
        description="Compile the decoder layers: faster steps after minutes of compiling. A run that is interrupted"
        " then ends with equal weights up to rounding, not to the byte.",
    )
    save_steps: Annotated[int | None, NotIdentity()] = Field(
        None, ge=1, description="Save progress every so many steps."
    )
    save_seconds: Annotated[float, NotIdentity()] = Field(
        10.0,
        ge=0,
        description="Save progress about this often, but never so often that it costs over 2% of the time; 0: never.",
    )
    logging_steps: Annotated[int, NotIdentity()] = Field(
        10, ge=1, description="Steps between live metrics; training.jsonl always has every step."
    )
    report_to: Annotated[list[Literal["tensorboard", "mlflow", "wandb", "trackio"]], NotIdentity()] = Field(
        [], description="Trackers that are shown every logging_steps; addresses and secrets come from the environment."
    )
    max_seconds: Annotated[float | None, NotIdentity()] = Field(
        None, gt=0, description="Wall-clock budget over all attempts; the step ends with code 82 once it is spent."
    )
    tripwire_loss_ratio: Annotated[float | None, NotIdentity()] = Field(
        None,
        gt=1,
        description="End with code 80, saved, when the loss exceeds this many times the median of the 50 steps before.",
    )
    tripwire_grad_norm: Annotated[float | None, NotIdentity()] = Field(
        None, gt=0, description="End with code 80, saved, when the gradient's norm (before clipping) exceeds this."
    )
    tripwire_entropy: Annotated[float | None, NotIdentity()] = Field(
        None, ge=0, description="End with code 80, saved, when the entropy of the samples (nats a token) is below this."
    )

    @model_validator(mode="after")
    def _check_dropout(self) -> TrainingConfig:
        if self.lora is not None and self.lora.dropout and getattr(self, "disable_dropout", False):
            raise ValueError(
                f"lora.dropout is {self.lora.dropout:g} and disable_dropout is on; set lora.dropout to 0, or "
                "disable_dropout to false"
            )
        return self

    @model_validator(mode="after")
    def _check_tripwires(self) -> TrainingConfig:
        if self.tripwire_entropy is not None and not self.REPORTS_ENTROPY:
            raise ValueError("tripwire_entropy is of no use here: only grpo knows an entropy; remove it")
        if self.tripwire_loss_ratio is not None and not self.LOSS_IS_POSITIVE:
            raise ValueError(
                "tripwire_loss_ratio is of no use here: the loss of grpo is about zero by construction; "
                "use tripwire_entropy or tripwire_grad_norm"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> TrainingConfig:
        micro = self.per_device_train_batch_size
        if micro is not None and micro > self.train_batch_size:
            raise ValueError(
                f"per_device_train_batch_size ({micro}) is larger than train_batch_size ({self.train_batch_size})"
            )
        if self.schedule_steps and self.warmup_steps and self.warmup_steps > self.schedule_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) exceeds schedule_steps ({self.schedule_steps})")
        return self

    def micro_batch_size(self) -> int:
        """Rows of one forward pass."""
        return self.per_device_train_batch_size or self.train_batch_size

    def total_steps(self, rows: int) -> int:
        """Optimiser steps of a run over `rows` rows of data: max_steps, or what num_train_epochs needs.

        The last step of a run by epochs may be short, so that every row is seen exactly as often as asked.
        """
        if self.max_steps is not None:
            return self.max_steps
        return max(1, math.ceil(self.total_rows(rows) / self.train_batch_size))

    def total_rows(self, rows: int) -> int:
        """Rows that a run by epochs sees, repeats counted."""
        return max(1, round(self.num_train_epochs * rows))


class TokenLossConfig(TrainingConfig):
    """What pretrain and sft add: the shape of the loss of a token, and its measurement on held-out rows."""

    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Share of each label that is spread over the whole vocabulary."
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="Weight of the squared log of the softmax's denominator, which keeps logits small; 1e-4 is usual.",
    )
    # What it computes is written into training.jsonl, so it is identity, although the weights are the same without it.
    eval_steps: int | None = Field(
        None,
        ge=1,
        description="Steps between measurements of the loss on the validation split (eval_loss in training.jsonl), also"
        " measured after the last step; never when empty.",
    )

    def reads_splits(self) -> dict[str, tuple[str, str]]:
        """The validation split of the data, where it is measured."""
        return {} if self.eval_steps is None else {"data": ("validation", "eval_steps")}
