"""GRPO as the training loop sees it: samples completions of a step's prompts, scores them, and gives their loss.

Invariants:
- The completions of a batch depend on the model, (seed, number of the batch) and nothing else, so that a resumed run
  samples what it would have sampled.
- Sampler and trainer must give a token the same probability: with the model as it sampled, their difference is measured
  at every batch, and a run in which they disagree is stopped. With one iteration the ratio's denominator is the
  trainer's own value, so that the first ratio is exactly 1.
- With several ranks each samples the completions of a part of the prompts, rank 0 alone calls the reward functions
  (they may draw or ask elsewhere), and every rank gets all completions and rewards.
- Completions whose advantage is 0 add nothing to loss or gradient when beta is 0: they are counted and not computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from stages.grpo.config import Config
from stages.grpo.loss import clipped_loss, group_advantages, k3_divergence, reduce_loss, step_weight
from stages.modeling.logprobs import token_logprobs
from stages.sampling import records
from stages.sampling.batches import completion_batch
from stages.sampling.generate import Completion, seeded_generator
from stages.sampling.groups import Sampled, Sampler, score_sampled
from stages.sampling.rewards import Reward, Scores
from stages.tokenize.dataset import Prompt
from stages.training.distributed import all_gather, from_main, my_part, my_share, rows_per_pass
from stages.training.loop import Figures, MicroBatch
from stages.training.order import batch_rows
from stages.training.precision import autocast

# Mean difference of log-probabilities between sampler and trainer: float32 1e-6, bfloat16 1e-2, a wrong mask or
# position 1.
DISAGREEMENT = 0.2
WARN_EVERY = 10  # batches in a row in which no group has any spread


class GroupObjective:
    """The objective of a GRPO run; implements `stages.training.loop.Objective`.

    Attributes:
        samples: the loop keeps the weights of `model` whole while micro-batches are made.

    Args:
        config: the settings of the stage.
        model: the model that is trained, which also samples.
        reference: a frozen copy of the initial model, needed when `config.beta` is above 0.
        sampler: samples from `model`.
        prompts: the prompt dataset.
        rewards: the reward functions.
        warn: told when the rewards have no spread for many batches.
    """

    samples = True

    def __init__(
        self,
        config: Config,
        model: Any,
        reference: Any,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        rewards: Sequence[Reward],
        warn: Callable[[str], None],
    ) -> None:
        self.config = config
        self.model = model
        self.reference = reference
        self.sampler = sampler
        self.prompts = prompts
        self.rewards = rewards
        self.warn = warn
        self.limit = None if config.max_steps is not None else config.total_rows(len(prompts))
        self.tables: list[pa.Table] = []
        self.flat_batches = 0  # batches in a row without spread
        self.cut_batches = 0  # batches in a row in which every completion was cut off, and so left out
        self.step = -1
        self._open: list[MicroBatch] = []
        self._figures: dict[str, float] = {}

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """The completions of an optimiser step (from 0): sampled anew every `num_iterations` steps."""
        batch, iteration = divmod(step, self.config.num_iterations)
        self.step = step
        if iteration == 0:
            self._open = self._sample(batch)
        return [MicroBatch(dict(item.tensors), item.weight, item.tokens) for item in self._open]

    def loss(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Figures]:
        """The loss summed as `loss_type` says, and figures over the tokens that were computed."""
        config, tensors = self.config, batch.tensors
        mask = tensors["target_mask"]
        logprobs = self._logprobs(model, tensors)
        old = tensors["old_logprobs"] if "old_logprobs" in tensors else logprobs.detach()
        token_loss = clipped_loss(
            logprobs,
            old,
            tensors["advantages"],
            mask,
            epsilon=config.epsilon,
            epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        )
        losses = token_loss.losses
        tokens = mask.sum()
        low, high = token_loss.clipped_low.sum(), token_loss.clipped_high.sum()
        figures: Figures = {
            "clip_ratio/low_mean": (low, tokens),
            "clip_ratio/high_mean": (high, tokens),
            "clip_ratio/region_mean": (low + high, tokens),
        }
        if config.beta:
            divergence = k3_divergence(logprobs, tensors["ref_logprobs"], mask)
            losses = losses + config.beta * divergence
            figures["kl"] = (divergence.detach().sum(), tokens)
        if self.step % config.num_iterations == 0:
            difference = ((logprobs.detach() - tensors["sampled_logprobs"]).abs() * mask).sum()
            if difference > DISAGREEMENT * tokens:
                raise RuntimeError(
                    f"sampler and trainer disagree at step {self.step + 1}: their log-probabilities of the same tokens"
                    f" differ by {float(difference / tokens):.3f} on average"
                )
            figures["sampling/sampling_logp_difference/mean"] = (difference, tokens)
        return reduce_loss(losses, mask, config.loss_type), figures

    def state(self) -> dict[str, Tensor]:
        """The rollouts so far and, between the iterations of a batch, the batch itself."""
        plain: dict[str, Any] = {
            "step": self.step,
            "flat_batches": self.flat_batches,
            "cut_batches": self.cut_batches,
            "figures": self._figures,
        }
        state: dict[str, Tensor] = {}
        if self.tables:
            state["rollouts"] = _as_tensor(records.to_bytes(self.tables))
        if self._open and (self.step + 1) % self.config.num_iterations:
            plain["open"] = [[batch.weight, batch.tokens] for batch in self._open]
            for number, batch in enumerate(self._open):
                state |= {f"open/{number}/{name}": tensor for name, tensor in batch.tensors.items()}
        state["plain"] = _as_tensor(json.dumps(plain).encode())
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
        plain = json.loads(_as_bytes(state["plain"]))
        self.step, self.flat_batches, self._figures = plain["step"], plain["flat_batches"], plain["figures"]
        self.cut_batches = plain.get("cut_batches", 0)
        self.tables = [records.from_bytes(_as_bytes(state["rollouts"]))] if "rollouts" in state else []
        self._open = []
        for number, (weight, tokens) in enumerate(plain.get("open", [])):
            prefix = f"open/{number}/"
            tensors = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            self._open.append(MicroBatch(tensors, weight, tokens))

    def metrics(self) -> dict[str, float]:
        """Figures of the batch of completions that the step trained on, under TRL's names."""
        return self._figures

    def _sample(self, number: int) -> list[MicroBatch]:
        """Sample, score and record batch `number`, and cut it into forward passes."""
        config = self.config
        indices = batch_rows(len(self.prompts), config.prompts_per_batch(), config.seed, number, self.limit)
        generator = seeded_generator(config.seed, "grpo", number)
        prompts = [self.prompts[index] for index in indices]
        sampled = self.sampler.sample(prompts, config.num_generations, generator, divide=_divide)
        total, by_function = from_main(lambda: _plain(score_sampled(self.rewards, sampled)))
        scores = Scores(total, by_function)
        self.tables.append(records.table(number, sampled, scores))
        advantages = group_advantages(
            torch.tensor(scores.total, dtype=torch.float64), config.num_generations, scale_rewards=config.scale_rewards
        )
        flat = float((advantages.group_std == 0).double().mean())
        self._count_flat(flat, number)
        self._count_cut(sampled, number)
        self._figures = self._batch_figures(sampled, scores, float(advantages.group_std.mean()), flat)
        return self._cut(sampled, advantages.values.float())

    def _cut(self, sampled: Sampled, advantages: Tensor) -> list[MicroBatch]:
        config = self.config
        lengths = [
            0 if config.mask_truncated_completions and not completion.finished else len(completion.tokens)
            for completion in sampled.completions
        ]
        longest = max(len(completion.tokens) for completion in sampled.completions)
        counted = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
        # A step always has a weight and a row, so that one without gradient is counted like any other.
        weight = max(step_weight(counted, config.loss_type, config.max_completion_length), 1.0)
        rows = [row for row, length in enumerate(lengths) if length and (config.beta or float(advantages[row]))] or [0]
        rows.sort(key=lambda row: len(sampled.prompts[row].prompt_ids) + len(sampled.completions[row].tokens))
        size = rows_per_pass(config, len(rows))
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        # Batches that stay open between steps are saved, and so rank 0 needs them whole; others need what they compute.
        mine = {number for number, _, _ in my_share(parts)} if config.num_iterations == 1 else range(len(parts))
        return [
            self._micro_batch(sampled, advantages, lengths, part, weight / len(parts), number in mine)
            for number, part in enumerate(parts)
        ]

    def _micro_batch(
        self,
        sampled: Sampled,
        advantages: Tensor,
        lengths: Sequence[int],
        rows: Sequence[int],
        weight: float,
        compared: bool,
    ) -> MicroBatch:
        """A forward pass of these rows; `compared`: with what other models say of them."""
        tensors = completion_batch(
            [(sampled.prompts[row].prompt_ids, sampled.completions[row].tokens) for row in rows], self.sampler.pad_id
        )
        sampled_logprobs = torch.zeros(tensors["input_ids"].shape)
        for place, row in enumerate(rows):
            sampled_logprobs[place, tensors["target_mask"][place]] = torch.tensor(sampled.completions[row].logprobs)
            if not lengths[row]:
                tensors["target_mask"][place] = False
        tensors["sampled_logprobs"] = sampled_logprobs
        tensors["advantages"] = advantages[list(rows)]
        tensors = {name: tensor.to(self.model.device) for name, tensor in tensors.items()}
        # In the precision of training, or rounding alone would move the ratio away from 1 and the divergence from 0.
        with torch.no_grad(), autocast(self.model.device, self.config.mixed_precision):
            if compared and self.config.num_iterations > 1:
                tensors["old_logprobs"] = self._logprobs(self.model, tensors)
            if compared and self.config.beta:
                tensors["ref_logprobs"] = self._logprobs(self.reference, tensors)
        return MicroBatch(tensors, weight, int(tensors["attention_mask"].sum()))

    def _logprobs(self, model: Any, tensors: dict[str, Tensor]) -> Tensor:
        return token_logprobs(
            model,
            tensors["input_ids"],
            tensors["target_mask"],
            attention_mask=tensors["attention_mask"],
            temperature=self.config.temperature,
        )

    def _count_flat(self, flat: float, number: int) -> None:
        self.flat_batches = self.flat_batches + 1 if flat == 1 else 0
        if self.flat_batches and self.flat_batches % WARN_EVERY == 0:
            self.warn(
                f"{self.flat_batches} batches in a row (up to {number + 1}) in which the completions of each prompt got"
                f" equal rewards: there is nothing to learn from them. The prompts are too easy or too hard for the"
                f" model, or the reward does not tell completions apart"
            )

    def _count_cut(self, sampled: Sampled, number: int) -> None:
        cut = self.config.mask_truncated_completions and not any(item.finished for item in sampled.completions)
        self.cut_batches = self.cut_batches + 1 if cut else 0
        if self.cut_batches and self.cut_batches % WARN_EVERY == 0:
            self.warn(
                f"{self.cut_batches} batches in a row (up to {number + 1}) in which every completion was cut off at"
                f" max_completion_length ({self.config.max_completion_length}), so mask_truncated_completions left all"
                f" of them out: nothing is trained. Raise max_completion_length"
            )

    def _batch_figures(self, sampled: Sampled, scores: Scores, reward_std: float, flat: float) -> dict[str, float]:
        lengths = [len(completion.tokens) for completion in sampled.completions]
        logprobs = np.concatenate([completion.logprobs for completion in sampled.completions])
        figures = {
            "reward": float(np.mean(scores.total)),
            "reward_std": reward_std,
            "frac_reward_zero_std": flat,
            # The mean of -log p over sampled tokens estimates the mean entropy of the distributions they came from.
            "entropy": float(-logprobs.mean()),
            "completions/mean_length": float(np.mean(lengths)),
            "completions/clipped_ratio": float(
                np.mean([not completion.finished for completion in sampled.completions])
            ),
        }
        for name, values in scores.by_function.items():
            known = [value for value in values if value is not None]
            if known:
                figures[f"rewards/{name}/mean"] = float(np.mean(known))
        return figures


def _divide(count: int, complete: Callable[[Sequence[int]], list[Completion]]) -> list[Completion]:
    """Sample this rank's part of `count` completions, and collect all of them on every rank."""
    own: list[Any] = [[item.tokens, item.logprobs, item.finished] for item in complete(my_part(count))]
    return [Completion(*item) for part in all_gather(own) for item in part]


def _plain(scores: Scores) -> tuple[list[float], dict[str, list[float | None]]]:
    return scores.total, scores.by_function


def _as_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
