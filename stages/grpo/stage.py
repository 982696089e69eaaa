"""The grpo stage: trains a model on its own completions, scored by reward functions, and keeps every rollout."""

from __future__ import annotations

import json

from stages.contract import Refused, StageContext
from stages.grpo.config import Config
from stages.grpo.objective import GroupObjective
from stages.modeling.checkpoint import load_model, load_tokenizer
from stages.modeling.dropout import disable_dropout
from stages.modeling.lora import add_adapter
from stages.sampling import records
from stages.sampling.groups import Sampler, check_prompt_columns
from stages.sampling.rewards import load_rewards
from stages.tokenize.dataset import read_prompts, tokenizer_folder
from stages.training.device import prepare
from stages.training.finish import finish, kept_when_halted
from stages.training.loop import RECORDS, train
from stages.training.preflight import check_same_tokenizer


def run(context: StageContext[Config]) -> None:
    """Check the inputs, train, and save the checkpoint and the rollouts."""
    config, inputs = context.config, context.inputs
    device = prepare(context.resources, config.seed, config.device)
    check_same_tokenizer(inputs["model"], tokenizer_folder(inputs["prompts"]), "input prompts")
    prompts = read_prompts(inputs["prompts"], "train")
    rewards = load_rewards(config.reward_funcs, config.reward_weights)
    model, tokenizer = load_model(inputs["model"], device=device), load_tokenizer(inputs["model"])
    if config.disable_dropout:
        disable_dropout(model)
    adapted = add_adapter(model, config.lora, config.seed)
    sampler = Sampler(
        model,
        tokenizer,
        config.max_completion_length,
        config.temperature,
        config.top_p,
        config.generation_batch_size,
    )
    sampler.check(prompts)
    check_prompt_columns(rewards, prompts)
    if config.prompts_per_batch() > len(prompts):
        raise Refused(
            f"a step takes {config.prompts_per_batch()} prompts (train_batch_size {config.train_batch_size} /"
            f" num_generations {config.num_generations}), and input prompts has {len(prompts)}; lower train_batch_size"
        )
    reference = None
    if config.beta:
        reference = load_model(inputs["model"], device=device).eval().requires_grad_(False)

    def warn(text: str) -> None:
        context.log(text, "warning")

    objective = GroupObjective(config, model, reference, sampler, prompts, rewards, warn)
    with kept_when_halted(context, model, tokenizer, adapted):
        metrics = train(context, config, model, tokenizer, objective, total_steps=config.total_steps(len(prompts)))
    records.write(objective.tables, context.side_output("rollouts"))
    last = json.loads((context.output / RECORDS).read_text(encoding="utf-8").splitlines()[-1])
    finish(context, model, tokenizer, adapted)
    context.summary(**metrics, **{name: last[name] for name in ("reward", "entropy") if last.get(name) is not None})
