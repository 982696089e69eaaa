"""Rows of the embedding for tokens that the model has not seen: special tokens that a dataset's tokenizer adds."""

from __future__ import annotations

from typing import Any

import torch


def fit_embeddings(model: Any, tokenizer: Any) -> int:
    """Give the model's embedding, and its head, a row for every token of `tokenizer`.

    New rows are the mean of the old ones, so that a new token starts neither likely nor unlikely (Hewitt, "Initializing
    New Word Embeddings for Pretrained Language Models", 2021). A model that has enough rows is left alone.

    Returns:
        How many rows were added.
    """
    rows, wanted = model.get_input_embeddings().weight.shape[0], len(tokenizer)
    if wanted <= rows:
        return 0
    model.resize_token_embeddings(wanted, mean_resizing=False)
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    with torch.no_grad():
        for tensor in {id(layer.weight): layer.weight for layer in layers if layer is not None}.values():
            tensor[rows:] = tensor[:rows].mean(0)
        bias = getattr(layers[1], "bias", None)
        if bias is not None:
            bias[rows:] = bias[:rows].mean()
    return wanted - rows
