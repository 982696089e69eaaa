"""The dpo stage: trains a model on preference pairs against stored reference log-probabilities."""

from __future__ import annotations

from stages.contract import StageContext
from stages.dpo.config import Config
from stages.dpo.objective import CHECKED_PAIRS, PairObjective, check_start, match_reference
from stages.modeling.checkpoint import load_model, load_tokenizer
from stages.modeling.dropout import disable_dropout
from stages.modeling.lora import add_adapter
from stages.reference.logprobs import read_logprobs
from stages.reference.pairs import check_pairs, weights_hash
from stages.tokenize.dataset import read_preferences, tokenizer_folder
from stages.training.device import prepare
from stages.training.finish import finish, kept_when_halted
from stages.training.loop import train
from stages.training.order import batch_rows
from stages.training.preflight import check_rows, check_same_tokenizer


def run(context: StageContext[Config]) -> None:
    """Check the inputs against each other, train, and save the checkpoint."""
    config, inputs = context.config, context.inputs
    device = prepare(context.resources, config.seed, config.device)
    check_same_tokenizer(inputs["model"], tokenizer_folder(inputs["data"]), "input data")
    pairs = read_preferences(inputs["data"], "train")
    rows, info = read_logprobs(inputs["reference"])
    reference = match_reference(pairs, rows)
    model, tokenizer = load_model(inputs["model"], device=device), load_tokenizer(inputs["model"])
    check_pairs(model, pairs)
    check_rows(len(pairs), sum(len(pair.chosen_ids) for pair in pairs), config, "input data")

    if info.weights == weights_hash(inputs["model"]):
        first = batch_rows(len(pairs), config.train_batch_size, config.seed, 0)[:CHECKED_PAIRS].tolist()
        model.eval()
        worst = check_start(model, [pairs[i] for i in first], [reference[i] for i in first], info.dtype)
        context.log(f"the reference is this model's own: first margin 0, loss ln 2 (greatest difference {worst:.1e})")
    else:
        context.log("the reference is of another model than the one trained, so the first loss is not ln 2", "warning")

    if config.disable_dropout:
        disable_dropout(model)
    adapted = add_adapter(model, config.lora, config.seed)
    objective = PairObjective(config, pairs, reference)
    with kept_when_halted(context, model, tokenizer, adapted):
        metrics = train(context, config, model, tokenizer, objective, total_steps=config.total_steps(len(pairs)))
    finish(context, model, tokenizer, adapted)
    context.summary(**metrics)
