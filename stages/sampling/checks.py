"""Checks made before anything is sampled or trained: that a model can read and end the rows of a dataset.

Each raises `contract.Refused` with one sentence that says what does not fit and how to mend it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from stages.contract import Refused
from stages.modeling.checkpoint import end_of_turn_ids, token_ids
from stages.modeling.packing import evaluating
from stages.sampling.generate import generate

# Mean difference of log-probabilities with and without a cache: float32 1e-6, bfloat16 1e-2, a lost state 1.
DISAGREEMENT = 0.2


def check_sequences(model: Any, sequences: Iterable[tuple[str, int, int]], *, completion: int = 0) -> None:
    """Refuse rows that the model cannot read: too long for its positions, or with ids beyond its vocabulary.

    Args:
        model: a transformers causal language model.
        sequences: (what to call the row, its length in tokens, its greatest token id).
        completion: how many tokens are going to be added to each row.
    """
    config = model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for name, length, greatest in sequences:
        if length == 0:
            raise Refused(f"{name} has no tokens")
        if positions is not None and length + completion > positions:
            added = f" and {completion} new ones" if completion else ""
            raise Refused(
                f"{name} has {length} tokens{added}, more than the model's {positions} positions. Shorten it or drop"
                f" long rows in the tokenize step"
            )
        if greatest >= vocabulary:
            raise Refused(
                f"{name} has token id {greatest}, and the model's vocabulary ends at {vocabulary - 1}: the dataset was"
                f" made with another tokenizer"
            )


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion: those of the generation config and the tokenizer's end of turn, in rising
    order.

    Raises:
        Refused: there are none.
    """
    named = getattr(model.generation_config, "eos_token_id", None)
    found = sorted({*token_ids(named), *end_of_turn_ids(tokenizer)})
    if not found:
        raise Refused("the model has no end-of-turn token: set eos_token_id in its generation_config.json")
    return found


def pad_token_id(tokenizer: Any, eos_ids: list[int]) -> int:
    """A token to fill rows with; its value never reaches a result."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos_ids[0]


def check_sampling(model: Any) -> None:
    """Refuse a model that says something else token by token, with what it keeps of earlier ones, than in one pass.

    Two prompts of unlike length are gone on with by three tokens, and read again without a cache.

    Args:
        model: a transformers causal language model.

    Raises:
        Refused: it does, or it cannot be run token by token at all.
    """
    kind = model.config.model_type
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 8
    new, longest = 3, min(8, positions) - 3
    if longest < 1:
        return
    vocabulary = model.get_input_embeddings().weight.shape[0]
    prompts = [[token % vocabulary for token in range(1, length + 1)] for length in {1, longest}]
    try:
        sampled = generate(model, prompts, max_new_tokens=new, temperature=0)
    except Exception as error:  # whatever an architecture with a cache of its own does with ours
        text = " ".join(str(error).split())
        raise Refused(
            f"the model ({kind}) cannot be sampled from here: {type(error).__name__}: {text[:200]}"
        ) from error
    differences = []
    for prompt, completion in zip(prompts, sampled, strict=True):
        row = torch.tensor([[*prompt, *completion.tokens]], device=model.device)
        with evaluating(model):
            logprobs = model(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1).cpu()
        for place, (token, value) in enumerate(zip(completion.tokens, completion.logprobs, strict=True), len(prompt)):
            differences.append(abs(float(logprobs[place - 1, token]) - value))
    mean = sum(differences) / len(differences)
    if not mean <= DISAGREEMENT:
        raise Refused(
            f"the model ({kind}) cannot be sampled from here: token by token it gives other probabilities than in one"
            f" pass (a difference of {mean:.2f} on average), for it does not keep what it has read in the way that"
            " models with attention do"
        )
