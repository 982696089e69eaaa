"""The real loop, objective and export on a model of 16 dimensions; and troubles."""

from __future__ import annotations

import os
import signal
import time

import torch

from stages.contract import Refused
from stages.modeling.checkpoint import load_tokenizer, save_checkpoint
from stages.modeling.scratch import new_model
from stages.tokenize.dataset import read_packed, tokenizer_folder
from stages.training.causal_lm import CausalLM
from stages.training.device import prepare
from stages.training.distributed import rank
from stages.training.loop import MicroBatch, train


class Troubled(CausalLM):
    """Does to its own rank what the config says."""

    def micro_batches(self, step):
        self.step = step
        time.sleep(self.config.pause)
        return super().micro_batches(step)

    def loss(self, model, batch):
        loss, figures = super().loss(model, batch)
        config = self.config
        if rank() == config.trouble_rank and self.step + 1 >= config.trouble_step and config.trouble:
            if config.trouble == "nan":
                loss = loss * float("nan")
            elif config.trouble == "refuse":
                raise Refused("row 7 cannot be used; mend it")
            elif config.trouble == "raise":
                raise ZeroDivisionError("no way")
            elif config.trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif config.trouble == "hang":
                time.sleep(600)
        return loss, figures


class Given(CausalLM):
    """Losses that are multiples of one weight which starts at 1."""

    def micro_batches(self, step):
        return [MicroBatch({"factor": torch.tensor(factor)}, weight) for weight, factor in self.config.batches]

    def loss(self, model, batch):
        ids = torch.zeros(1, 2, dtype=torch.int64)
        rest = model(input_ids=ids, use_cache=False).logits.sum() * 0
        return model.model.norm.weight.sum() / 16 * batch.tensors["factor"] + rest, {"hits": batch.tensors["factor"]}


def run(context):
    config = context.config
    device = prepare(context.resources, config.seed, config.device)
    data = context.inputs["data"]
    tokenizer = load_tokenizer(tokenizer_folder(data))
    model = new_model(
        "qwen3",
        tokenizer,
        vocab_size=260,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
        initializer_range=0.2,
        seed=config.seed,
    ).to(device)
    model.config.attention_dropout = config.dropout
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = config.dropout
    rows = read_packed(data)
    kind = Given if config.batches else Troubled
    objective = kind(rows.input_ids, rows.segment_ids, rows.loss_mask, config)
    steps = config.total_steps(len(rows.input_ids))
    context.summary(**train(context, config, model, tokenizer, objective, total_steps=steps))
    save_checkpoint(model, tokenizer, context.output)
