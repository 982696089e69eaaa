"""When a run saves, stops or halts: decided by all ranks together, between two optimiser steps.

Each rank looks at what it alone may see (a signal, the clock, a figure), one MAX-reduction over ranks makes one
decision of these looks, and every rank acts on it at the same step. So no rank waits for one that has left.

Invariants:
- Stops, spent budgets and tripwires save first, and can be gone on from. A tripped run that is started again with the
  same thresholds trips again at once; with other thresholds it goes on and ends with the bytes of a run that had them.
- Thresholds are compared with figures that are equal on all ranks and kept in training.jsonl, so that a resumed run
  decides as one that was not interrupted.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stages.contract import BudgetSpent, NonFinite, StageContext, StageEnd, Stopped, Tripwire
from stages.training import distributed
from stages.training.config import TrainingConfig
from stages.training.resume import Progress

SKIPS_IN_A_ROW = 3
SKIPPED_SHARE = 0.05
MEDIAN_STEPS = 50  # steps whose median loss a spike is measured against
MEDIAN_FROM = 10  # a median of fewer steps says nothing yet


@dataclass(frozen=True)
class Decision:
    """What all ranks do before the next step: `save`, and then raise `ending` where there is one."""

    save: bool
    ending: StageEnd | None


class Control:
    """Watches one run.

    Args:
        context: asked whether to stop.
        config: budget and thresholds.
        total_steps: length of the run.
    """

    def __init__(self, context: StageContext[Any], config: TrainingConfig, total_steps: int) -> None:
        self.context, self.config, self.total_steps = context, config, total_steps
        self.losses: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self.tripped: str | None = None

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take in the records of the steps that an earlier attempt has done, oldest first."""
        for record in records:
            self.note(record)

    def note(self, record: Mapping[str, Any]) -> None:
        """Take in a step's line of training.jsonl. Only the latest step can trip."""
        self.tripped = self._crossed(record)
        if record.get("loss") is not None and not record.get("skipped"):
            self.losses.append(record["loss"])

    def _crossed(self, record: Mapping[str, Any]) -> str | None:
        """The threshold that a step has crossed, in words."""
        config, step = self.config, record["step"]
        loss, norm, entropy = record.get("loss"), record.get("grad_norm"), record.get("entropy")
        if config.tripwire_loss_ratio is not None and loss is not None and len(self.losses) >= MEDIAN_FROM:
            median = statistics.median(self.losses)
            if loss > config.tripwire_loss_ratio * median:
                return (
                    f"the loss of step {step} is {loss:.4g}, more than tripwire_loss_ratio "
                    f"({config.tripwire_loss_ratio:g}) times {median:.4g}, the median of the {len(self.losses)} steps "
                    "before; lower learning_rate, or look at the data of that step"
                )
        if config.tripwire_grad_norm is not None and norm is not None and norm > config.tripwire_grad_norm:
            return (
                f"the gradient norm of step {step} is {norm:.4g}, over tripwire_grad_norm "
                f"({config.tripwire_grad_norm:g}); lower learning_rate, or lengthen the warmup"
            )
        if config.tripwire_entropy is not None and entropy is not None and entropy < config.tripwire_entropy:
            return (
                f"the entropy of step {step} is {entropy:.4g}, under tripwire_entropy ({config.tripwire_entropy:g}): "
                "the samples are growing alike; raise temperature or beta, or lower learning_rate"
            )
        return None

    def decide(self, progress: Progress, save_due: bool) -> Decision:
        """What to do now that `progress.step` steps are done. All ranks call it at every step.

        Args:
            progress: where the run is.
            save_due: whether this rank finds that it is time to save.
        """
        config, step, more = self.config, progress.step, progress.step < self.total_steps
        halted = too_many_skips(progress, self.total_steps)
        spent = more and config.max_seconds is not None and progress.seconds >= config.max_seconds
        halt, trip, stop, budget, save = distributed.maximum(
            [halted is not None, self.tripped is not None, more and self.context.stop_requested, spent, save_due]
        )
        place = f"step {step} of {self.total_steps}"
        ending: StageEnd | None = None
        if halt:
            return Decision(False, NonFinite(halted or f"another rank halted at {place}"))
        if trip:
            why = self.tripped or "another rank crossed a threshold"
            ending = Tripwire(f"{why}; progress is saved at {place}, and with another threshold the run goes on there")
        elif stop:
            ending = Stopped(f"saved at {place}")
        elif budget:
            ending = BudgetSpent(
                f"max_seconds ({config.max_seconds:g}) is spent at {place}; progress is saved, and a larger "
                "max_seconds goes on from there"
            )
        return Decision(save or ending is not None, ending)


def too_many_skips(progress: Progress, total_steps: int) -> str | None:
    """Why the run must halt because of skipped steps, if it must: 3 in a row, or over 5% of the steps."""
    if progress.skipped_in_a_row >= SKIPS_IN_A_ROW:
        why = f"{progress.skipped_in_a_row} steps in a row (up to step {progress.step})"
    elif progress.skipped > max(SKIPS_IN_A_ROW - 1, SKIPPED_SHARE * total_steps):
        why = f"{progress.skipped} of {total_steps} steps (up to step {progress.step})"
    else:
        return None
    return (
        f"the loss or its gradient was not finite in {why}; lower learning_rate, lengthen the warmup, or check the data"
    )
