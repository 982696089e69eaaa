"""Small models of several families, in float64 where exactness is compared."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def build(name: str, tied: bool = True, implementation: str = "sdpa"):
    torch.manual_seed(1)
    extra = {"tie_word_embeddings": tied, "attn_implementation": implementation, "initializer_range": 0.2}
    if name == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, **extra))
    elif name == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **extra))
    elif name == "mistral":  # a sliding window of 3 tokens
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=3, **extra))
    elif name == "gemma2":  # soft-capped logits, and alternating windows
        sizes = SIZES | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}
        model = Gemma2ForCausalLM(Gemma2Config(**sizes, **extra | {"attn_implementation": "eager"}))
    elif name == "mamba":
        model = MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=2))
    else:
        config = GPT2Config(
            vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=None, **extra
        )
        model = GPT2LMHeadModel(config)
    return model.eval()
