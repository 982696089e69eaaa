"""Batched sampling from a causal language model, with the log-probability of every sampled token.

A prompt that occurs several times in a batch is read once and its cache copied to each of its rows. Rows are padded on
the left, and every row's positions count from its own first token. Rows that have ended leave the batch.

Invariants:
- Every row has its own stream of random numbers, drawn before anything is sampled: the row's completion depends on the
  model, its prompt, the generator and the row's place in `prompts`, and not on `batch_size`, on the other prompts or on
  which rows have ended (up to the rounding of floating-point sums of different shape).
- `Completion.logprobs` is log p(token | prompt, earlier tokens) of the softmax of logits / temperature over the whole
  vocabulary: what `stages.modeling.logprobs.token_logprobs` gives at that temperature. `top_p` narrows what is drawn,
      not
  what is reported. At temperature 0 the log-probabilities are those at temperature 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.sampling.cache import new_cache
from stages.seeds import stream_seed

# Rows that have ended are dropped once this share of the batch is left: copying the cache costs about two steps of it.
KEEP_SHARE = 0.75


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        tokens: token ids, the end-of-turn token included when there is one.
        logprobs: natural-log probability of each token, same length.
        finished: whether the last token ends the turn (False: cut at max_new_tokens).
    """

    tokens: list[int]
    logprobs: list[float]
    finished: bool


def seeded_generator(*names: int | str) -> torch.Generator:
    """A CPU generator whose stream depends on `names` alone, such as (seed, "grpo", step)."""
    return torch.Generator().manual_seed(stream_seed(*names))


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    eos_ids: Sequence[int] = (),
    pad_id: int = 0,
    generator: torch.Generator | None = None,
    batch_size: int = 256,
    rows: Sequence[int] | None = None,
    on_batch: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Sample one completion of every prompt; repeat a prompt for several.

    Args:
        model: a transformers causal language model.
        prompts: token ids of each prompt, none empty.
        max_new_tokens: the longest completion, in tokens.
        temperature: divides the logits; 0 takes the likeliest token (the lowest id among equals).
        top_p: nucleus sampling (Holtzman et al. 2020): draw from the fewest likeliest tokens that hold this much.
        eos_ids: tokens that end a completion.
        pad_id: any valid token id; its value does not matter.
        generator: CPU generator of the random numbers; needed unless temperature is 0.
        batch_size: rows sampled together.
        rows: sample these of the prompts only; each completion is what it would be among all of them.
        on_batch: called with (completions finished, tokens sampled so far) after each batch.

    Returns:
        Completions in the order of `prompts`, or of `rows`.

    Raises:
        ValueError: an empty prompt, a prompt and completion longer than the model's positions, or a bad setting.
    """
    _check(model, prompts, max_new_tokens, temperature, top_p, batch_size, generator)
    uniforms = torch.rand(len(prompts), max_new_tokens, generator=generator) if temperature > 0 else None
    wanted = range(len(prompts)) if rows is None else rows
    order = sorted(wanted, key=lambda index: len(prompts[index]))  # rows of like length pad little
    done: list[Completion | None] = [None] * len(prompts)
    tokens_sampled = 0
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                decoder = _Decoder(model, [prompts[row] for row in batch], max_new_tokens, pad_id)
                draws = None if uniforms is None else uniforms[batch].to(decoder.device)
                for row, completion in zip(batch, decoder.run(temperature, top_p, eos_ids, draws), strict=True):
                    done[row] = completion
                    tokens_sampled += len(completion.tokens)
                if on_batch is not None:
                    on_batch(start + len(batch), tokens_sampled)
    finally:
        model.train(was_training)
    return [found for row in wanted if (found := done[row]) is not None]


def stream(
    model: Any,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    eos_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield the tokens of one completion as they are sampled, the one that ends it included.

    Raises:
        ValueError: as `generate`.
    """
    _check(model, [prompt], max_new_tokens, temperature, top_p, 1, generator)
    uniforms = torch.rand(1, max_new_tokens, generator=generator) if temperature > 0 else None
    was_training = model.training
    model.eval()
    try:
        decoder = _Decoder(model, [prompt], max_new_tokens, pad_id=0)
        for step in range(max_new_tokens):
            draws = None if uniforms is None else uniforms[:, step].to(decoder.device)
            with torch.no_grad():
                token, _ = choose(decoder.logits, temperature, top_p, draws)
            yield int(token)
            if int(token) in eos_ids or step + 1 == max_new_tokens:
                return
            with torch.no_grad():
                decoder.advance(token)
    finally:
        model.train(was_training)


def choose(logits: Tensor, temperature: float, top_p: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniforms`.

    Args:
        logits: [rows, vocabulary], any floating type.
        uniforms: float32 [rows] in [0, 1); not used at temperature 0.

    Returns:
        Token ids int64 [rows] and their log-probabilities float32 [rows] at `temperature` (1 when it is 0).
    """
    logprobs = torch.log_softmax(logits.float() / (temperature if temperature > 0 else 1.0), dim=-1)
    if temperature == 0:
        tokens = logprobs.argmax(dim=-1)
    else:
        assert uniforms is not None
        probabilities = logprobs.exp()
        if top_p < 1:
            ranked, ids = probabilities.sort(dim=-1, descending=True, stable=True)
            before = ranked.cumsum(dim=-1) - ranked
            ranked = ranked.masked_fill(before >= top_p, 0.0)  # the likeliest token always stays: nothing is before it
            tokens = ids.gather(-1, _invert(ranked, uniforms)[:, None])[:, 0]
        else:
            tokens = _invert(probabilities, uniforms)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds uniforms * total, so an index of weight 0 is never taken."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1]
    # The product may round up to the total itself, beyond every index.
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


class _Decoder:
    """The rows of one batch: their cache, masks and the logits of the next token ([rows, vocabulary])."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, pad_id: int) -> None:
        self.model = model
        self.device = model.device
        self.max_new_tokens = max_new_tokens
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed in transformers 5
        unique = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
        place = {prompt: index for index, prompt in enumerate(unique)}
        width = max(len(prompt) for prompt in unique)
        room = width + max_new_tokens
        input_ids = torch.full((len(unique), width), pad_id)
        mask = torch.zeros(len(unique), room, dtype=torch.int64)
        for row, prompt in enumerate(unique):
            input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self.mask = mask.to(self.device)
        self.padded = any(len(prompt) < width for prompt in unique)
        self.length = width
        self.cache = new_cache(model.config, room)
        positions = (self.mask[:, :width].cumsum(dim=-1) - 1).clamp(min=0)
        self.positions = positions[:, -1:] + 1
        with torch.no_grad():
            self.logits = self._forward(input_ids.to(self.device), positions)
            if len(unique) < len(prompts):
                self.select(torch.tensor([place[tuple(prompt)] for prompt in prompts], device=self.device))

    def _forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        output = self.model(
            input_ids=input_ids,
            attention_mask=self.mask[:, : self.length] if self.padded else None,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self.cache},
        )
        return output.logits[:, -1]

    def advance(self, tokens: Tensor) -> None:
        """Append `tokens` (int64 [rows]) and compute the logits that follow them."""
        self.length += 1
        self.logits = self._forward(tokens[:, None], self.positions)
        self.positions = self.positions + 1

    def select(self, rows: Tensor) -> None:
        """Keep these rows (int64), in this order; a row may be taken several times."""
        self.cache.batch_select_indices(rows)
        self.mask, self.positions, self.logits = self.mask[rows], self.positions[rows], self.logits[rows]

    def run(self, temperature: float, top_p: float, eos_ids: Sequence[int], draws: Tensor | None) -> list[Completion]:
        """Sample until every row has ended; `draws` are the uniforms, float32 [rows, max_new_tokens]."""
        count = self.mask.shape[0]
        tokens = torch.zeros(count, self.max_new_tokens, dtype=torch.int64, device=self.device)
        logprobs = torch.zeros(count, self.max_new_tokens, device=self.device)
        lengths = torch.full((count,), self.max_new_tokens, device=self.device)
        finished = torch.zeros(count, dtype=torch.bool, device=self.device)
        ends = torch.tensor(list(eos_ids), dtype=torch.int64, device=self.device)
        rows = torch.arange(count, device=self.device)  # which row of the results each row of the batch is
        for step in range(self.max_new_tokens):
            uniforms = None if draws is None else draws[rows, step]
            chosen, chosen_logprobs = choose(self.logits, temperature, top_p, uniforms)
            tokens[rows, step], logprobs[rows, step] = chosen, chosen_logprobs
            ended = torch.isin(chosen, ends) & ~finished[rows]
            finished[rows] |= ended
            lengths[rows[ended]] = step + 1
            alive = ~finished[rows]
            left = int(alive.sum())
            if left == 0 or step + 1 == self.max_new_tokens:
                break
            if left <= KEEP_SHARE * len(rows):
                keep = alive.nonzero()[:, 0]
                self.select(keep)
                rows, chosen = rows[keep], chosen[keep]
            self.advance(chosen)
        table = zip(tokens.tolist(), logprobs.tolist(), lengths.tolist(), finished.tolist(), strict=True)
        return [Completion(row[:length], values[:length], end) for row, values, length, end in table]


def _check(
    model: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    batch_size: int,
    generator: torch.Generator | None,
) -> None:
    if max_new_tokens < 1 or batch_size < 1:
        raise ValueError(f"max_new_tokens ({max_new_tokens}) and batch_size ({batch_size}) must be at least 1")
    if temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature ({temperature}) must be at least 0 and top_p ({top_p}) in (0, 1]")
    if temperature > 0 and generator is None:
        raise ValueError("sampling at a temperature above 0 needs a generator, so that it can be repeated")
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        if positions is not None and len(prompt) + max_new_tokens > positions:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with {max_new_tokens} new ones that is more than the"
                f" model's {positions} positions"
            )
