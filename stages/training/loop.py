"""The training loop that pretrain, sft, dpo and grpo share.

Read `train` from top to bottom: that is the whole of it. What a stage trains on is its `Objective`; the loop owns
optimiser, schedule, saving, and the decisions to skip, stop or halt.

Invariants:
- The loss of a step is the summed loss of all its targets divided by their number, over all micro-batches; a mean of
  means would weigh tokens of short batches more.
- Everything after an optimiser step is a function of (config, data, code): a run that is interrupted and resumed
  writes the same checkpoint and the same training.jsonl, byte for byte. No time of day enters either.
- A step whose loss or gradient is not finite changes no weight. Three in a row, or 5% of the steps, end the run.
- Ranks run this loop side by side: they differ in their micro-batches, and whatever they decide on is a sum or a
  maximum over all of them. Dropout is seeded for every micro-batch, so that neither ranks nor interruptions change it.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from stages.contract import NonFinite, RankDone, Refused, StageContext, Tripwire
from stages.seeds import stream_seed
from stages.training import distributed
from stages.training.config import TrainingConfig
from stages.training.control import Control
from stages.training.distributed import Trained
from stages.training.optimizers import make_optimizers, set_learning_rate
from stages.training.precision import LossScale, autocast
from stages.training.preflight import check_room
from stages.training.resume import OtherFormat, Progress, read_snapshot, write_snapshot
from stages.training.schedule import learning_rate_factor
from stages.training.throughput import flops_per_token, peak_memory, utilisation
from stages.training.trackers import Trackers, start_trackers

RECORDS = "training.jsonl"
SAVE_SHARE = 0.02  # saving by time may cost this share of a run

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


@dataclass(frozen=True)
class HeldOut:
    """Data that is measured and not trained on.

    Attributes:
        every: steps between measurements.
        batches: all of it, with the number of targets as weights.
        loss: the summed loss over a batch's targets.
    """

    every: int
    batches: list[MicroBatch]
    loss: Callable[[Any, MicroBatch], Tensor]


class Objective(Protocol):
    """What a stage trains: its data and its loss.

    An objective that samples from the model it was made with says so with an attribute `samples = True`: the model's
    weights are then whole whenever `micro_batches` is called.
    """

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """The data of optimiser step `step` (from 0): a pure function of (seed, step), and for on-policy methods of
        the model and of what `state` keeps. Called once a step on every rank, before any gradient is computed, and
        equal on all of them: the loop deals the micro-batches out."""

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
    held_out: HeldOut | None = None,
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
        held_out: measured every so many steps and after the last one, as `eval_loss`.

    Returns:
        Final metrics: loss (mean over the last tenth of the steps, at most 50), steps, skipped_steps, eval_loss where
        it was measured, and tokens_per_second where this attempt took a step.

    Raises:
        Refused: fp16 is asked for on a CPU, or disk or memory cannot suffice.
        Stopped: a stop was asked for; progress is saved.
        BudgetSpent: `max_seconds` is spent; progress is saved.
        Tripwire: a threshold of the config was crossed; progress is saved.
        NonFinite: too many steps had to be skipped.
        RankDone: on every rank but the first, once all steps are done; the first one has the weights.
        ValueError: a step has no targets, or saved progress does not fit the model.
    """
    if config.mixed_precision == "fp16" and model.device.type == "cpu":
        raise Refused("mixed_precision: fp16 needs a GPU; use no (fastest) or bf16 on the CPU")
    check_room(context, config, model)
    if config.gradient_checkpointing:
        # Renamed in the course of transformers 5; both names take the same argument.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    device, ranks = model.device, distributed.world_size()
    distributed.connect(device, config.ddp_timeout)
    trained = distributed.wrap(model, config.distribution, compiled=config.torch_compile)
    optimizers = make_optimizers(trained.module, config)
    scale = LossScale.of(config.mixed_precision)
    records = context.output / RECORDS
    records.write_bytes(b"")
    saver = _Saver(context, config)
    progress = _restore(context, trained, optimizers, scale, objective, records)
    saver.step = progress.step if progress is not None else None
    progress = progress or Progress()
    control = Control(context, config, total_steps)
    control.recall(json.loads(line) for line in records.read_text(encoding="utf-8").splitlines())
    trained.module.train()

    before, started = progress.seconds, time.monotonic()
    trackers = start_trackers(context, config, main=distributed.rank() == 0)
    display = _Display(context, config, model, progress.step, total_steps, trackers)
    with records.open("a", encoding="utf-8") as lines:
        while True:
            progress.seconds = before + time.monotonic() - started
            decision = control.decide(progress, saver.due(progress.step))
            if decision.save:
                lines.flush()
                progress.scaler = scale.state()
                saver.save(progress, trained, optimizers, objective, records)
            if decision.ending is not None:
                if decision.save:
                    context.work.wait()
                trackers.close()
                if isinstance(decision.ending, Tripwire | NonFinite):
                    trained.finish()  # its weights are looked at; see `stages.training.finish`
                    decision.ending.together = True
                raise decision.ending
            if progress.step >= total_steps:
                break

            factor = learning_rate_factor(config, progress.step, total_steps)
            set_learning_rate(optimizers, factor)
            samples = getattr(objective, "samples", False)
            if samples:
                trained.gather()
            batches = objective.micro_batches(progress.step)
            if samples:
                trained.release()
            weight = sum(batch.weight for batch in batches)
            if not weight > 0:
                raise ValueError(f"optimiser step {progress.step + 1} has no targets to train on")
            totals = _Totals()
            share = distributed.my_share(batches)
            for number, batch, counts in share:
                batch.tensors = {name: tensor.to(device) for name, tensor in batch.tensors.items()}
                torch.manual_seed(stream_seed("micro-batch", config.seed, progress.step, number))
                with trained.accumulating(more=batch is not share[-1][1]):
                    with autocast(device, config.mixed_precision):
                        loss, figures = trained.run(objective.loss, batch)
                    # DDP and FSDP2 take the mean over ranks of what is a sum over them.
                    (loss * (counts * ranks * scale.scale / weight)).backward()
                totals.add(loss.detach(), figures, counts)
            gradients = trained.gradients()
            if scale.scale != 1:
                torch._foreach_div_(gradients, scale.scale)
            norm = distributed.whole(torch.nn.utils.get_total_norm(gradients))
            mean_loss, grad_norm, figures_now = totals.read(weight, norm)

            finite = math.isfinite(mean_loss) and math.isfinite(grad_norm)
            if finite:
                if config.max_grad_norm and grad_norm > config.max_grad_norm:
                    for gradient in gradients:
                        gradient.mul_(config.max_grad_norm / (grad_norm + 1e-6))
                for optimizer in optimizers:
                    optimizer.step()
            for param in trained.parameters.values():
                param.grad = None
            # An overflow of fp16 gradients is how the scale is found, not a fault of the run.
            backed_off = scale.update(finite) and math.isfinite(mean_loss)
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
            if held_out is not None and (progress.step % held_out.every == 0 or progress.step == total_steps):
                record["eval_loss"] = _measure(trained, config, held_out)
            record = {name: value if math.isfinite(value) else None for name, value in record.items()}
            if not finite:
                record["skipped"] = True
            lines.write(json.dumps(record) + "\n")
            control.note(record)
            display.show(record, sum(batch.tokens for batch in batches))
            if not finite and not backed_off:
                context.log(f"step {progress.step} skipped: loss {mean_loss}, gradient norm {grad_norm}", "warning")

    context.work.wait()
    trackers.close()
    trained.finish()
    if distributed.rank() != 0:
        raise RankDone("trained; rank 0 saves and publishes")
    return _final_metrics(records, progress) | display.speed()


def _measure(trained: Trained, config: TrainingConfig, held_out: HeldOut) -> float:
    """The mean loss over the targets of held-out data, each rank measuring its share."""
    device, summed = trained.model.device, 0.0
    with distributed.evaluating(trained):
        for _, batch, counts in distributed.my_share(held_out.batches):
            moved = replace(batch, tensors={name: tensor.to(device) for name, tensor in batch.tensors.items()})
            with autocast(device, config.mixed_precision):
                loss = trained.run(held_out.loss, moved)
            summed += float(loss) * counts
    total = distributed.total(torch.tensor([summed], dtype=torch.float64))
    return float(total) / sum(batch.weight for batch in held_out.batches)


def _restore(
    context: StageContext[Any],
    trained: Trained,
    optimizers: list[torch.optim.Optimizer],
    scale: LossScale,
    objective: Objective,
    records: Path,
) -> Progress | None:
    """Put the newest saved progress back on every rank; None where there is none."""

    def find() -> str | None:
        latest = context.work.latest()
        return None if latest is None else str(latest[1])

    folder = distributed.from_main(find)
    if folder is None:
        return None
    try:
        progress, extra = read_snapshot(Path(folder), trained, optimizers, records)
    except OtherFormat as error:
        context.log(f"{error}: training starts anew", "warning")
        return None
    objective.load_state(extra)
    scale.load_state(progress.scaler)
    context.resumed(progress.step)
    return progress


class _Totals:
    """Sums of a step over its micro-batches, read from the device once."""

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}

    def add(self, loss: Tensor, figures: Figures, counts: bool) -> None:
        """Add a micro-batch; one that does not count adds zeros."""
        loss = loss if counts else torch.zeros_like(loss)
        self.loss = loss if self.loss is None else self.loss + loss
        for name, figure in figures.items():
            value, count = figure if isinstance(figure, tuple) else (figure, None)
            if not counts:
                value, count = 0.0, None if count is None else 0
            self.sums[name] = self.sums[name] + value if name in self.sums else value
            if count is not None:
                self.counts[name] = self.counts[name] + count if name in self.counts else count

    def read(self, weight: float, norm: Tensor) -> tuple[float, float, dict[str, float]]:
        """Mean loss, gradient norm and mean figures over all ranks, as Python floats, in one transfer."""
        assert self.loss is not None
        device = self.loss.device
        names = list(self.sums)
        values = [norm, self.loss, *(self.sums[name] for name in names), *self.counts.values()]
        flat = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values]).cpu()
        grad_norm, (loss, *sums) = float(flat[0]), distributed.total(flat[1:]).tolist()
        counts = dict(zip(self.counts, sums[len(names) :], strict=True))
        means = {}
        for name, value in zip(names, sums, strict=False):
            count = counts.get(name, weight)
            means[name] = value / count if count else math.nan
        return loss / weight, grad_norm, means


class _Saver:
    """Finds when it is time to save, and does it on all ranks together."""

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
        trained: Trained,
        optimizers: list[torch.optim.Optimizer],
        objective: Objective,
        records: Path,
    ) -> None:
        if progress.step == self.step:
            return
        begin = time.monotonic()
        folder = self.context.scratch / f"progress-{progress.step}"
        shutil.rmtree(folder, ignore_errors=True)  # left by an earlier try at the same step
        write_snapshot(folder, progress, trained, optimizers, objective.state(), records)
        step, stood_still = progress.step, time.monotonic() - begin
        if distributed.rank() == 0:
            self.context.work.save(step, folder, lambda: self.context.saved(step, stood_still))
        self.step = progress.step
        self.latest = time.monotonic()
        self.cost = self.latest - begin


class _Display:
    """Live progress and metrics; nothing here enters the artifact."""

    def __init__(
        self,
        context: StageContext[Any],
        config: TrainingConfig,
        model: Any,
        step: int,
        total_steps: int,
        trackers: Trackers,
    ) -> None:
        self.context = context
        self.trackers = trackers
        self.device, self.flops = model.device, flops_per_token(model)
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
            self.trackers.log(record, **self.speed())

    def speed(self) -> dict[str, float]:
        seconds = time.monotonic() - self.begin
        figures = {"memory_bytes": float(peak_memory(self.device))}
        if self.tokens and seconds > 0:
            rate = figures["tokens_per_second"] = self.tokens / seconds
            mfu = utilisation(self.flops, rate, self.device, distributed.world_size())
            if mfu is not None:
                figures["mfu"] = mfu
        return figures


def _final_metrics(records: Path, progress: Progress) -> dict[str, float]:
    lines = records.read_text(encoding="utf-8").splitlines()
    window = min(50, max(1, len(lines) // 10))
    losses = [loss for line in lines[-window:] if (loss := json.loads(line)["loss"]) is not None]
    metrics = {"steps": float(progress.step), "skipped_steps": float(progress.skipped)}
    if losses:
        metrics["loss"] = sum(losses) / len(losses)
    if lines and (measured := json.loads(lines[-1]).get("eval_loss")) is not None:
        metrics["eval_loss"] = measured
    return metrics
