"""New models with random weights."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config


def new_model(
    architecture: Literal["qwen3", "llama"],
    tokenizer: Any,
    *,
    vocab_size: int,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    head_dim: int,
    intermediate_size: int,
    max_position_embeddings: int,
    tie_word_embeddings: bool,
    rope_theta: float,
    initializer_range: float,
    seed: int,
) -> PreTrainedModel:
    """A causal LM of the given sizes in fp32 on the CPU; equal arguments give equal weights.

    Args:
        architecture: "qwen3" (norms on queries and keys) or "llama".
        tokenizer: gives the ids of padding, start and end of sequence.
        vocab_size: rows of the embedding.
        seed: seeds PyTorch's random stream before the weights are drawn.
    """
    kind = {"qwen3": Qwen3Config, "llama": LlamaConfig}[architecture]
    config = kind(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        initializer_range=initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
