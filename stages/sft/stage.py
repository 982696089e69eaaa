"""Supervised fine-tuning: the pretraining loss on the assistant's turns of chats.

The tokenizer that is saved is the dataset's: it has the chat template that the chats were rendered with, and is
otherwise the model's own, which is checked.
"""

from __future__ import annotations

from stages.contract import StageContext
from stages.modeling.checkpoint import load_model, load_tokenizer
from stages.sft.config import Config
from stages.tokenize.dataset import tokenizer_folder
from stages.training.causal_lm import train_on_packed
from stages.training.device import prepare
from stages.training.preflight import check_same_tokenizer


def run(context: StageContext[Config]) -> None:
    """Train and save the checkpoint.

    Raises:
        Refused: data, tokenizer or model do not fit together.
    """
    config = context.config
    device = prepare(context.resources, config.seed, config.device)
    data = context.inputs["data"]
    check_same_tokenizer(context.inputs["model"], tokenizer_folder(data), "input data", new_special_tokens=True)
    tokenizer = load_tokenizer(tokenizer_folder(data))
    model = load_model(context.inputs["model"], device=device)
    train_on_packed(context, config, model, tokenizer, data)
