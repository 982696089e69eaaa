"""The rollout stage: samples completions of prompts from a checkpoint and scores them.

Invariant: a block of prompts is a pure function of (seed, number of the block), so a run that was cut short goes on
with the next block and ends with the same bytes.
"""

from __future__ import annotations

import time

import torch

from stages.contract import StageContext
from stages.modeling.checkpoint import load_model, load_tokenizer
from stages.rollout.config import Config
from stages.sampling import records
from stages.sampling.generate import seeded_generator
from stages.sampling.groups import Sampler, check_prompt_columns, score_sampled
from stages.sampling.parts import Parts
from stages.sampling.rewards import load_rewards
from stages.tokenize.dataset import read_prompts, tokenizer_folder
from stages.training.device import prepare
from stages.training.preflight import check_same_tokenizer


def run(context: StageContext[Config]) -> None:
    """Sample, score and write the rollouts."""
    config, inputs = context.config, context.inputs
    device = prepare(context.resources, seed=0)
    check_same_tokenizer(inputs["model"], tokenizer_folder(inputs["prompts"]), "input prompts")
    prompts = read_prompts(inputs["prompts"], config.split)[: config.limit]
    rewards = load_rewards(config.reward_funcs, config.reward_weights)
    model = load_model(inputs["model"], dtype=getattr(torch, config.dtype), device=device).eval()
    sampler = Sampler(
        model,
        load_tokenizer(inputs["model"]),
        config.max_completion_length,
        config.temperature,
        config.top_p,
        config.generation_batch_size,
    )
    sampler.check(prompts)
    check_prompt_columns(rewards, prompts)

    size = config.prompts_per_block
    blocks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    parts = Parts(context, len(blocks), unit="block", save_seconds=config.save_seconds)
    begin, tokens = time.monotonic(), 0
    for number in range(len(parts.done), len(blocks)):
        generator = seeded_generator(config.seed, "rollout", number) if config.temperature > 0 else None
        sampled = sampler.sample(blocks[number], config.num_generations, generator)
        scores = score_sampled(rewards, sampled)
        parts.add(records.to_bytes([records.table(number, sampled, scores)]))
        tokens += sum(len(completion.tokens) for completion in sampled.completions)
        context.progress(
            min((number + 1) * size, len(prompts)),
            len(prompts),
            unit="prompt",
            reward=sum(scores.total) / len(scores.total),
            tokens_per_second=tokens / max(time.monotonic() - begin, 1e-9),
        )

    tables = [records.from_bytes(part) for part in parts.done]
    rows = records.write(tables, context.output)
    total = records.read(context.output)
    context.summary(
        completions=rows,
        prompts=len(prompts),
        reward=sum(total["reward"].to_pylist()) / rows,
        finished=sum(total["finished"].to_pylist()) / rows,
    )
