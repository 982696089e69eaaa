"""Sampling several completions of each prompt and scoring them: what rollout, grpo and evaluate share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.contract import Refused
from stages.sampling.checks import check_sampling, check_sequences, eos_token_ids, pad_token_id
from stages.sampling.generate import Completion, generate
from stages.sampling.rewards import Reward, Scores, check_columns, columns_of, score
from stages.tokenize.dataset import Prompt

Divide = Callable[[int, Callable[[Sequence[int]], list[Completion]]], list[Completion]]


@dataclass(frozen=True)
class Sampled:
    """Completions of prompts, side by side where a prompt has several; every list has one item a completion."""

    prompts: list[Prompt]
    completions: list[Completion]
    texts: list[str]


@dataclass
class Sampler:
    """How a model is sampled: the settings that stay the same from prompt to prompt."""

    model: Any
    tokenizer: Any
    max_completion_length: int
    temperature: float
    top_p: float
    batch_size: int

    def __post_init__(self) -> None:
        self.eos_ids = eos_token_ids(self.model, self.tokenizer)
        self.pad_id = pad_token_id(self.tokenizer, self.eos_ids)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that the model cannot read or complete, and a model that cannot be sampled from.

        Raises:
            Refused: naming the prompt, or what the model does.
        """
        if not prompts:
            raise Refused("the prompt dataset has no rows")
        rows = ((f"prompt {p.id}", len(p.prompt_ids), max(p.prompt_ids, default=0)) for p in prompts)
        check_sequences(self.model, rows, completion=self.max_completion_length)
        check_sampling(self.model)

    def sample(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        generator: torch.Generator | None,
        on_batch: Callable[[int, int], None] | None = None,
        divide: Divide | None = None,
    ) -> Sampled:
        """Sample `num_generations` completions of each prompt.

        Args:
            divide: has each of several processes sample a part: called with the number of completions and a function
                that samples some of them, it returns all.
        """
        repeated = [prompt for prompt in prompts for _ in range(num_generations)]

        def complete(rows: Sequence[int]) -> list[Completion]:
            return generate(
                self.model,
                [list(prompt.prompt_ids) for prompt in repeated],
                max_new_tokens=self.max_completion_length,
                temperature=self.temperature,
                top_p=self.top_p,
                eos_ids=self.eos_ids,
                pad_id=self.pad_id,
                generator=generator,
                batch_size=self.batch_size,
                rows=rows,
                on_batch=on_batch,
            )

        everything = range(len(repeated))
        completions = complete(everything) if divide is None else divide(len(repeated), complete)
        texts = self.tokenizer.batch_decode([completion.tokens for completion in completions], skip_special_tokens=True)
        return Sampled(repeated, completions, texts)


def score_sampled(rewards: Sequence[Reward], sampled: Sampled) -> Scores:
    """Score completions with reward functions; see `rewards.score` for what it raises."""
    return score(
        rewards,
        [prompt.prompt for prompt in sampled.prompts],
        sampled.texts,
        columns_of([prompt.columns for prompt in sampled.prompts]),
        completion_ids=[completion.tokens for completion in sampled.completions],
        finished=[completion.finished for completion in sampled.completions],
        row_names=[
            f"{row} (prompt {prompt.id}, completion {text!r:.80})"
            for row, (prompt, text) in enumerate(zip(sampled.prompts, sampled.texts, strict=True))
        ],
    )


def check_prompt_columns(rewards: Sequence[Reward], prompts: Sequence[Prompt]) -> None:
    """Refuse reward functions that need a column which the prompts do not have."""
    check_columns(rewards, list(columns_of([prompt.columns for prompt in prompts])))
