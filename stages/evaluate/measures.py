"""What is measured of one model: bits per byte, answers to prompts, and the ranking of preference pairs.

Every figure that is a mean over independent items comes with its standard error, s / sqrt(n) with the unbiased standard
deviation s of the items' values (0 for one item). Several sampled completions of a prompt are one item: their mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.contract import NonFinite, Refused
from stages.evaluate.config import Config
from stages.modeling.logprobs import token_logprobs
from stages.reference.pairs import pair_logprobs
from stages.sampling.checks import check_sequences
from stages.sampling.generate import seeded_generator
from stages.sampling.groups import Sampled, Sampler, score_sampled
from stages.sampling.rewards import Reward
from stages.tokenize.dataset import Preference, Prompt, read_info, read_packed

Progress = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True)
class Answer:
    """One completion of one prompt; `sample` is -1 for the greedy one."""

    id: str
    prompt: str
    sample: int
    completion: str
    tokens: int
    finished: bool
    score: float
    style: float | None


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of independent values."""
    array = np.asarray(values, dtype=np.float64)
    error = float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else 0.0
    return float(array.mean()), error


def bits_per_byte(model: Any, folder: Path, split: str, batch_size: int, progress: Progress) -> dict[str, float]:
    """Negative log-likelihood of a split's target tokens, in bits per UTF-8 byte that they stand for.

    Unlike perplexity per token it can be compared between tokenizers.

    Raises:
        Refused: the split has no target tokens, or rows that the model cannot read.
    """
    rows = read_packed(folder, split)
    info = read_info(folder).splits[split]
    if info.bytes == 0 or len(rows.input_ids) == 0:
        raise Refused(f"the {split} split of input text has no text to measure")
    length = rows.input_ids.shape[1]
    check_sequences(model, [(f"input text ({split})", length, int(rows.input_ids.max()))])
    total = 0.0
    for start in range(0, len(rows.input_ids), batch_size):
        part = slice(start, start + batch_size)
        with torch.no_grad():
            logprobs = token_logprobs(
                model,
                torch.from_numpy(rows.input_ids[part].astype(np.int64)).to(model.device),
                torch.from_numpy(rows.loss_mask[part].astype(bool)).to(model.device),
                segment_ids=torch.from_numpy(rows.segment_ids[part].astype(np.int64)).to(model.device),
            )
        total -= float(logprobs.double().sum())
        progress("text", min(start + batch_size, len(rows.input_ids)), len(rows.input_ids))
    if not math.isfinite(total):
        raise NonFinite("the model gives a log-probability that is not finite to the text")
    return {"bits_per_byte": total / math.log(2) / info.bytes, "nats_per_token": total / info.target_tokens}


def answer_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    config: Config,
    score: Reward,
    style: Reward | None,
    progress: Progress,
) -> tuple[dict[str, float], list[Answer]]:
    """Answer every prompt greedily, and `config.sampled` times at a temperature, and score the answers."""

    def ask(temperature: float, times: int, what: str) -> list[Answer]:
        sampler = Sampler(
            model,
            tokenizer,
            config.max_new_tokens,
            temperature,
            config.top_p if times else 1.0,
            config.generation_batch_size,
        )
        sampler.check(prompts)
        count = max(times, 1)
        sampled = sampler.sample(
            prompts,
            count,
            seeded_generator(config.seed, "evaluate") if times else None,
            lambda done, _: progress(what, done, len(prompts) * count),
        )
        return _answers(sampled, score, style, count if times else 0)

    greedy = ask(0.0, 0, "greedy answers")
    metrics: dict[str, float] = {}
    metrics["exact_match"], metrics["exact_match_stderr"] = mean_and_error([answer.score for answer in greedy])
    if style is not None:
        metrics["shows_work"], metrics["shows_work_stderr"] = mean_and_error([answer.style or 0.0 for answer in greedy])
    metrics["mean_completion_tokens"] = mean_and_error([float(answer.tokens) for answer in greedy])[0]
    metrics["finished"] = mean_and_error([float(answer.finished) for answer in greedy])[0]
    answers = greedy
    if config.sampled:
        drawn = ask(config.temperature, config.sampled, "sampled answers")
        by_prompt = np.array([answer.score for answer in drawn]).reshape(len(prompts), config.sampled).mean(axis=1)
        metrics["sampled"], metrics["sampled_stderr"] = mean_and_error(by_prompt.tolist())
        if style is not None:
            metrics["sampled_shows_work"] = mean_and_error([answer.style or 0.0 for answer in drawn])[0]
            # Apart from how often a model shows its work: how well it does then.
            if working := [answer.score for answer in drawn if answer.style]:
                metrics["sampled_showing_work"], metrics["sampled_showing_work_stderr"] = mean_and_error(working)
        answers = greedy + drawn
    return metrics, answers


def preference_accuracy(
    model: Any, pairs: Sequence[Preference], batch_size: int, progress: Progress
) -> dict[str, float]:
    """Share of pairs whose chosen completion has the greater summed log-probability (a tie counts half)."""
    wins: list[float] = [0.0] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i].chosen_ids) + len(pairs[i].rejected_ids))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        for index, (chosen, rejected) in zip(indices, pair_logprobs(model, [pairs[i] for i in indices]), strict=True):
            difference = math.fsum(chosen) - math.fsum(rejected)
            if not math.isfinite(difference):
                raise NonFinite(f"pair {pairs[index].id}: the model gives a log-probability that is not finite")
            wins[index] = 0.5 + 0.5 * float(np.sign(difference))
        progress("pairs", min(start + batch_size, len(order)), len(order))
    mean, error = mean_and_error(wins)
    return {"preference_accuracy": mean, "preference_accuracy_stderr": error}


def _answers(sampled: Sampled, score: Reward, style: Reward | None, count: int) -> list[Answer]:
    scores = _shares(score, sampled)
    styles: Sequence[float | None] = _shares(style, sampled) if style is not None else [None] * len(scores)
    return [
        Answer(
            id=prompt.id,
            prompt=prompt.prompt,
            sample=row % count if count else -1,
            completion=text,
            tokens=len(completion.tokens),
            finished=completion.finished,
            score=scores[row],
            style=styles[row],
        )
        for row, (prompt, text, completion) in enumerate(
            zip(sampled.prompts, sampled.texts, sampled.completions, strict=True)
        )
    ]


def _shares(function: Reward, sampled: Sampled) -> list[float]:
    values = score_sampled([function], sampled).total
    for value, prompt in zip(values, sampled.prompts, strict=True):
        if not 0 <= value <= 1:
            raise Refused(f"{function.name} gave {value} for prompt {prompt.id}; a score is between 0 and 1")
    return values
