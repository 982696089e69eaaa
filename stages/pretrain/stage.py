"""Pretraining: next-token prediction on packed rows, from random weights or from a checkpoint."""

from __future__ import annotations

from typing import Any

from stages.contract import Refused, StageContext
from stages.modeling.checkpoint import load_model, load_tokenizer
from stages.modeling.scratch import new_model
from stages.pretrain.config import Config
from stages.tokenize.dataset import read_info, tokenizer_folder
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
    tokenizer = load_tokenizer(tokenizer_folder(data))
    if (folder := context.inputs.get("model")) is not None:
        check_same_tokenizer(folder, tokenizer_folder(data), "input data", new_special_tokens=True)
        model: Any = load_model(folder)
    else:
        if config.lora is not None:
            raise Refused("lora trains adapters of a model that is there; give the step an input model, or remove lora")
        info = read_info(data)
        row_length = info.row_length or 0
        model = new_model(
            config.architecture,
            tokenizer,
            vocab_size=max(len(tokenizer), info.vocab_size),
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.key_value_heads,
            head_dim=config.head_size,
            intermediate_size=config.intermediate_size or 3 * config.hidden_size,
            max_position_embeddings=config.max_position_embeddings or row_length,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_theta=config.rope_theta,
            initializer_range=config.initializer_range,
            seed=config.seed,
        )
    train_on_packed(context, config, model.to(device), tokenizer, data)
