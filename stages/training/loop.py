"""The training loop that pretrain, sft, dpo and grpo share.

Read `train` from top to bottom: that is the whole of it. What a stage trains on is its `Objective`; the loop owns
optimiser, schedule, saving, and the decisions to skip, stop or halt.

Invariants:
- The loss of a step is the summed loss of all its targets divided by their number, over all micro-batches; a mean of
  means would weigh tokens of short batches more.
- Everything after an optimiser step is a function of (config, data, code): a run that is interrupted and resumed
  writes the same checkpoint and the same training.jsonl, byte for byte. No time of day enters either.
- A step whose loss or gradient is not finite changes no weight. Three in a row, or 5% of the steps, end the run.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from stages.contract import BudgetSpent, NonFinite, Refused, StageContext, Stopped
from stages.training.config import TrainingConfig
from stages.training.optimizers import make_optimizers, set_learning_rate
from stages.training.resume import OtherFormat, Progress, read_snapshot, write_snapshot
from stages.training.schedule import learning_rate_factor

RECORDS = "training.jsonl"
SAVE_SHARE = 0.02  # saving by time may cost this share of a run
SKIPS_IN_A_ROW = 3
SKIPPED_SHARE = 0.05

Figure = Tensor | float
Figures = dict[str, Figure | tuple[Figure, Figure]]


@dataclass
class MicroBatch:
    """The data of one forward and backward pass.

    Attributes:
        tensors: what the objective's `loss` needs; the loop moves them to the model's device.
        weight: how many targets the batch has (tokens, pairs, completions: whatever the loss is a mean over).
        tokens: tokens that the model reads, padding left out; only for the speed that is shown.
    """

    tensors: dict[str, Tensor]
    weight: float
    tokens: int = 0


class Objective(Protocol):
    """What a stage trains: its data and its loss."""

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """The data of optimiser step `step` (from 0): a pure function of (seed, step), and for on-policy methods of
        the model and of what `state` keeps. Called once a step, before any gradient is computed."""

    def loss(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Figures]:
        """The summed loss over the batch's targets, a scalar with gradient, and figures to report.

        A figure is a sum over the batch's targets, which the loop divides by the step's total weight; or a pair
        (sum, count) that is divided by its own count. Tensors must be detached scalars: they are read once a step.
        """

    def state(self) -> dict[str, Tensor]:
        """Tensors that saved progress must hold beside weights, optimiser and random streams; mostly {}."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""

    def metrics(self) -> dict[str, float]:
        """Figures of the step just done beside those of `loss` (reward, entropy, ...); may be {}."""


def train(
    context: StageContext[Any],
    config: TrainingConfig,
    model: Any,
    tokenizer: Any,
    objective: Objective,
    *,
    total_steps: int,
) -> dict[str, float]:
    """Train `model` in place for `total_steps` optimiser steps, going on from saved progress where there is any.

    Writes `training.jsonl` into `context.output`: one line a step with step (from 1), loss, learning_rate, grad_norm,
    weight and the objective's figures. The caller saves the checkpoint.

    Args:
        context: the stage's context; progress is kept in `context.work`.
        config: the training settings.
        model: a transformers causal LM on the device to train on, with fp32 weights.
        tokenizer: unused by the loop itself; objectives that generate hold their own.
        objective: data and loss.
        total_steps: optimiser steps of the whole run.

    Returns:
        Final metrics: loss (mean over the last tenth of the steps, at most 50), steps, skipped_steps, and
        tokens_per_second where this attempt took a step.

    Raises:
        Refused: fp16 is asked for on a CPU.
        Stopped: a stop was asked for; progress is saved.
        BudgetSpent: `max_seconds` is spent; progress is saved.
        NonFinite: too many steps had to be skipped.
        ValueError: a step has no targets, or saved progress does not fit the model.
    """
    if config.mixed_precision == "fp16" and model.device.type == "cpu":
        raise Refused("mixed_precision: fp16 needs a GPU; use no (fastest) or bf16 on the CPU")
    accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=model.device.type == "cpu")
    scaler = accelerator.scaler
    optimizers = make_optimizers(model, config)
    parameters = [param for param in model.parameters() if param.requires_grad]
    records = context.output / RECORDS
    records.write_bytes(b"")
    progress = Progress()
    saver = _Saver(context, config)
    if (latest := context.work.latest()) is not None:
        try:
            progress, extra = read_snapshot(latest[1], model, optimizers, records)
            objective.load_state(extra)
            if scaler is not None:
                scaler.load_state_dict(progress.scaler)
            saver.step = progress.step
            context.resumed(progress.step)
        except OtherFormat as error:
            context.log(f"{error}: training starts anew", "warning")
    model.train()
    if config.gradient_checkpointing:
        # Renamed in the course of transformers 5; both names take the same argument.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    before, started = progress.seconds, time.monotonic()
    display = _Display(context, config, progress.step, total_steps)
    with records.open("a", encoding="utf-8") as lines:
        while True:
            progress.seconds = before + time.monotonic() - started
            ending = _reason_to_end(context, config, progress, total_steps)
            if ending is not None or saver.due(progress.step):
                lines.flush()
                if scaler is not None:
                    progress.scaler = scaler.state_dict()
                saver.save(progress, model, optimizers, objective, records)
            if ending is not None:
                context.work.wait()
                raise ending
            if progress.step >= total_steps:
                break

            factor = learning_rate_factor(config, progress.step, total_steps)
            set_learning_rate(optimizers, factor)
            batches = objective.micro_batches(progress.step)
            weight = sum(batch.weight for batch in batches)
            if not weight > 0:
                raise ValueError(f"optimiser step {progress.step + 1} has no targets to train on")
            totals = _Totals()
            for batch in batches:
                batch.tensors = {name: tensor.to(model.device) for name, tensor in batch.tensors.items()}
                with accelerator.autocast():
                    loss, figures = objective.loss(model, batch)
                accelerator.backward(loss / weight)
                totals.add(loss.detach(), figures)
            if scaler is not None:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
            norm = torch.nn.utils.get_total_norm([param.grad for param in parameters if param.grad is not None])
            mean_loss, grad_norm, figures_now = totals.read(weight, norm)

            finite = math.isfinite(mean_loss) and math.isfinite(grad_norm)
            if finite:
                if config.max_grad_norm and grad_norm > config.max_grad_norm:
                    for param in parameters:
                        if param.grad is not None:
                            param.grad.mul_(config.max_grad_norm / (grad_norm + 1e-6))
                for optimizer in optimizers:
                    if scaler is not None:
                        scaler.step(optimizer)
                    else:
                        optimizer.step()
            for param in parameters:
                param.grad = None
            backed_off = False
            if scaler is not None:
                # An overflow of fp16 gradients is how the scaler finds its scale, not a fault of the run.
                backed_off = not finite and math.isfinite(mean_loss) and scaler.get_scale() > 1
                scaler.update()
            progress.step += 1
            progress.skipped_in_a_row = 0 if finite or backed_off else progress.skipped_in_a_row + 1
            progress.skipped += not (finite or backed_off)

            record: dict[str, Any] = {
                "step": progress.step,
                "loss": mean_loss,
                "learning_rate": config.learning_rate * factor,
                "grad_norm": grad_norm,
                "weight": weight,
                **figures_now,
                **objective.metrics(),
            }
            record = {name: value if math.isfinite(value) else None for name, value in record.items()}
            if not finite:
                record["skipped"] = True
            lines.write(json.dumps(record) + "\n")
            display.show(record, sum(batch.tokens for batch in batches))
            if not finite and not backed_off:
                context.log(f"step {progress.step} skipped: loss {mean_loss}, gradient norm {grad_norm}", "warning")
                _check_skips(progress, total_steps)

    context.work.wait()
    return _final_metrics(records, progress) | display.speed()


def _reason_to_end(
    context: StageContext[Any], config: TrainingConfig, progress: Progress, total_steps: int
) -> Stopped | BudgetSpent | None:
    """Why the run must end before its next step, if it must."""
    if progress.step >= total_steps:
        return None
    if context.stop_requested:
        return Stopped(f"saved at step {progress.step} of {total_steps}")
    if config.max_seconds is not None and progress.seconds >= config.max_seconds:
        return BudgetSpent(
            f"max_seconds ({config.max_seconds:g}) is spent at step {progress.step} of {total_steps}; progress is "
            "saved, and a larger max_seconds goes on from there"
        )
    return None


def _check_skips(progress: Progress, total_steps: int) -> None:
    """Halt when too many steps were skipped."""
    if progress.skipped_in_a_row >= SKIPS_IN_A_ROW:
        why = f"{progress.skipped_in_a_row} steps in a row (up to step {progress.step})"
    elif progress.skipped > max(SKIPS_IN_A_ROW - 1, SKIPPED_SHARE * total_steps):
        why = f"{progress.skipped} of {total_steps} steps (up to step {progress.step})"
    else:
        return
    raise NonFinite(
        f"the loss or its gradient was not finite in {why}; lower learning_rate, lengthen the warmup, or check the data"
    )


class _Totals:
    """Sums of a step over its micro-batches, read from the device once."""

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}

    def add(self, loss: Tensor, figures: Figures) -> None:
        self.loss = loss if self.loss is None else self.loss + loss
        for name, figure in figures.items():
            value, count = figure if isinstance(figure, tuple) else (figure, None)
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            if count is not None:
                self.counts[name] = self.counts[name] + count if name in self.counts else count

    def read(self, weight: float, norm: Tensor) -> tuple[float, float, dict[str, float]]:
        """Mean loss, gradient norm and mean figures, as Python floats, in one transfer."""
        assert self.loss is not None
        device = self.loss.device
        names = list(self.sums)
        values = [self.loss, norm, *(self.sums[name] for name in names), *self.counts.values()]
        flat = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]).tolist()
        counts = dict(zip(self.counts, flat[2 + len(names) :], strict=True))
        means = {}
        for name, value in zip(names, flat[2:], strict=False):
            count = counts.get(name, weight)
            means[name] = value / count if count else math.nan
        return flat[0] / weight, flat[1], means


class _Saver:
    """Decides when to save and does it."""

    def __init__(self, context: StageContext[Any], config: TrainingConfig) -> None:
        self.context = context
        self.config = config
        self.latest = time.monotonic()
        self.cost = 0.0
        self.step: int | None = None

    def due(self, step: int) -> bool:
        if step == self.step or step == 0:
            return False
        if self.config.save_steps and step % self.config.save_steps == 0:
            return True
        pause = max(self.config.save_seconds, self.cost / SAVE_SHARE)
        return self.config.save_seconds > 0 and time.monotonic() - self.latest >= pause

    def save(
        self,
        progress: Progress,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        objective: Objective,
        records: Path,
    ) -> None:
        if progress.step == self.step:
            return
        begin = time.monotonic()
        folder = self.context.scratch / f"progress-{progress.step}"
        shutil.rmtree(folder, ignore_errors=True)  # left by an earlier try at the same step
        write_snapshot(folder, progress, model, optimizers, objective.state(), records)
        self.context.work.save(progress.step, folder)
        self.step = progress.step
        self.latest = time.monotonic()
        self.cost = self.latest - begin
        self.context.saved(progress.step, self.cost)


class _Display:
    """Live progress and metrics; nothing here enters the artifact."""

    def __init__(self, context: StageContext[Any], config: TrainingConfig, step: int, total_steps: int) -> None:
        self.context = context
        self.every = config.logging_steps
        self.total_steps = total_steps
        self.first_step = step
        self.begin = self.shown = time.monotonic()
        self.tokens = 0

    def show(self, record: dict[str, Any], tokens: int) -> None:
        self.tokens += tokens
        now, step = time.monotonic(), record["step"]
        last = step == self.total_steps
        if last or now - self.shown >= 0.5:
            self.shown = now
            per_step = (now - self.begin) / (step - self.first_step)
            figures = {"learning_rate": record["learning_rate"], "seconds_left": per_step * (self.total_steps - step)}
            if record["loss"] is not None:
                figures["loss"] = record["loss"]
            self.context.progress(step, self.total_steps, "step", **figures, **self.speed())
        if last or step % self.every == 0:
            values = {name: float(value) for name, value in record.items() if name != "step" and value is not None}
            self.context.metric(step, **values)

    def speed(self) -> dict[str, float]:
        seconds = time.monotonic() - self.begin
        return {"tokens_per_second": self.tokens / seconds} if self.tokens and seconds > 0 else {}


def _final_metrics(records: Path, progress: Progress) -> dict[str, float]:
    lines = records.read_text(encoding="utf-8").splitlines()
    window = min(50, max(1, len(lines) // 10))
    losses = [loss for line in lines[-window:] if (loss := json.loads(line)["loss"]) is not None]
    metrics = {"steps": float(progress.step), "skipped_steps": float(progress.skipped)}
    if losses:
        metrics["loss"] = sum(losses) / len(losses)
    return metrics
