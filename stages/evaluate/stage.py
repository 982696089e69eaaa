"""The evaluate stage: measures every checkpoint on the inputs given, and writes a report.

Invariants:
- Every model sees the same rows, prompts, random numbers and settings.
- A model's measurements are one part of the saved progress.
"""

from __future__ import annotations

from pathlib import Path

import torch

from stages.contract import Refused, StageContext
from stages.evaluate.config import Config
from stages.evaluate.measures import Answer, answer_prompts, bits_per_byte, preference_accuracy
from stages.evaluate.report import COLUMNS, Measured, write_report
from stages.modeling.checkpoint import load_model, load_tokenizer
from stages.reference.pairs import check_pairs
from stages.sampling.groups import check_prompt_columns
from stages.sampling.parts import Parts
from stages.sampling.rewards import load_rewards
from stages.tokenize.dataset import read_info, read_preferences, read_prompts, tokenizer_folder
from stages.training.device import prepare
from stages.training.preflight import check_same_tokenizer


def run(context: StageContext[Config]) -> None:
    """Measure the models and write the report."""
    config, inputs = context.config, context.inputs
    models = context.many("models")
    _check_inputs(context, models)
    device = prepare(context.resources, seed=config.seed)
    text = inputs.get("text")
    prompts = read_prompts(inputs["prompts"], config.prompts_split) if "prompts" in inputs else []
    pairs = read_preferences(inputs["preferences"], config.preferences_split) if "preferences" in inputs else []
    score = load_rewards([config.score])[0] if config.score else None
    style = load_rewards([config.style])[0] if config.style else None
    if "prompts" in inputs:
        if not prompts:
            raise Refused("input prompts has no rows")
        check_prompt_columns([function for function in (score, style) if function is not None], prompts)

    parts = Parts(context, len(models), unit="model", save_seconds=config.save_seconds)
    for number, (label, folder) in enumerate(models.items()):
        if number < len(parts.done):
            continue
        model = load_model(folder, dtype=getattr(torch, config.dtype), device=device).eval()
        metrics: dict[str, float] = {"parameters": model.num_parameters()}
        answers: list[Answer] = []

        def progress(what: str, done: int, total: int, number: int = number, label: str = label) -> None:
            if done == total:
                context.log(f"{label}: {what} done ({total})")
            context.progress(number, len(models), unit="model")

        if text is not None:
            size = config.per_device_eval_batch_size
            metrics |= bits_per_byte(model, text, config.text_split, size, progress)
        if prompts and score is not None:
            found, answers = answer_prompts(model, load_tokenizer(folder), prompts, config, score, style, progress)
            metrics |= found
        if pairs:
            check_pairs(model, pairs)
            metrics |= preference_accuracy(model, pairs, config.per_device_eval_batch_size, progress)
        del model
        parts.add(Measured(label, metrics, answers).to_bytes())
        context.progress(number + 1, len(models), unit="model")
        context.metric(number, **{f"{label}/{name}": value for name, value in metrics.items()})

    counts: dict[str, int] = {}
    if text is not None:
        split = read_info(text).splits[config.text_split]
        counts |= {"text_bytes": split.bytes, "text_tokens": split.target_tokens}
    if prompts:
        counts |= {"prompts": len(prompts), "sampled": config.sampled}
    if pairs:
        counts["pairs"] = len(pairs)
    measured = [Measured.from_bytes(part) for part in parts.done]
    write_report(context.output, measured, counts, config.num_samples_shown)
    headline = [name for name, _, _ in COLUMNS]
    context.summary(
        **{
            f"{model.label}/{name}": model.metrics[name]
            for model in measured
            for name in headline
            if name in model.metrics
        }
    )


def _check_inputs(context: StageContext[Config], models: dict[str, Path]) -> None:
    config, inputs = context.config, context.inputs
    data = [name for name in ("text", "prompts", "preferences") if name in inputs]
    if not models:
        raise Refused("input models is empty: give at least one checkpoint")
    if problem := config.inputs_problem(inputs):
        raise Refused(problem)
    for name in data:
        split, field = config.reads_splits()[name]
        if split not in (known := read_info(inputs[name]).splits):
            raise Refused(
                f"input {name} has no {split} split (it has {', '.join(known)}); set validation_fraction in the step "
                f"that made it, or change {field}"
            )
    for label, folder in models.items():
        for name in data:
            check_same_tokenizer(folder, tokenizer_folder(inputs[name]), f"input {name} (beside model {label})")
