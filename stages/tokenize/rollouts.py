"""Makes preference pairs out of a `rollouts` artifact: of one prompt's completions, a better and a worse one.

Model: the different completions of a prompt are ranked by reward, in the order they were sampled where rewards are
equal. Pair number k joins the k-th best with the k-th worst, as long as their rewards differ by more than the gap asked
for. A chosen completion has a proper end, for DPO raises the probability of all of its tokens.

Invariants: the ids of prompt and completions are those that were sampled, not encoded anew; the pairs are a function of
the table and the settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.contract import Refused
from stages.tokenize.config import Config
from stages.tokenize.encode import EncodedPair
from stages.tokenize.tokenizer import TextTokenizer

FILE = "rollouts.parquet"
_COLUMNS = ("id", "prompt", "prompt_ids", "completion", "completion_ids", "reward", "finished")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion: its text, ids and reward, whether it came to an end by itself, and its line in the table
    (from 1)."""

    text: str
    ids: tuple[int, ...]
    reward: float
    finished: bool
    line: int


@dataclass
class PromptRollouts:
    """All completions of one prompt, in the order they were sampled, without repeats."""

    id: str
    prompt: str
    prompt_ids: list[int]
    completions: dict[tuple[int, ...], Completion]


def read_rollouts(path: Path) -> list[PromptRollouts]:
    """Read `rollouts.parquet`, by prompt in the order they were first sampled.

    Raises:
        Refused: the file is not a table of rollouts.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts: dict[str, PromptRollouts] = {}
    line = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096, columns=list(_COLUMNS)):
                missing = [name for name in _COLUMNS if name not in batch.schema.names]
                if missing:
                    raise Refused(f"{path.name} has no column {missing[0]!r}; it must be the output of a rollout step")
                for row in batch.to_pylist():
                    line += 1
                    prompt = prompts.setdefault(
                        row["id"], PromptRollouts(row["id"], row["prompt"], row["prompt_ids"], {})
                    )
                    ids = tuple(row["completion_ids"])
                    completion = Completion(row["completion"], ids, row["reward"], row["finished"], line)
                    prompt.completions.setdefault(ids, completion)
    except (pa.ArrowException, OSError) as error:
        raise Refused(f"{path.name} cannot be read: {str(error).splitlines()[0]}") from error
    return list(prompts.values())


def pairs(rollouts: PromptRollouts, config: Config) -> Iterator[tuple[Completion, Completion]]:
    """The (chosen, rejected) pairs of one prompt, at most `pairs_per_prompt`, the widest apart first."""
    completions = [item for item in rollouts.completions.values() if item.ids]
    best = sorted((item for item in completions if item.finished), key=lambda item: -item.reward)
    worst = sorted(completions, key=lambda item: item.reward)
    for chosen, rejected in zip(best[: config.pairs_per_prompt], worst, strict=False):
        if not chosen.reward - rejected.reward > config.min_reward_gap:
            return
        yield chosen, rejected


def encoded_pairs(
    rollouts: PromptRollouts, config: Config, tokenizer: TextTokenizer
) -> Iterator[tuple[bytes, EncodedPair, tuple[int, int]]]:
    """The pairs of one prompt with the hash (32 bytes) that each is known by, and the lines of both completions.

    Raises:
        Refused: the rollouts were sampled with another tokenizer.
    """
    for chosen, rejected in pairs(rollouts, config):
        for ids in (rollouts.prompt_ids, chosen.ids, rejected.ids):
            _check_ids(rollouts, ids, tokenizer)
        pair = EncodedPair(
            list(rollouts.prompt_ids),
            list(chosen.ids),
            list(rejected.ids),
            rollouts.prompt,
            chosen.text,
            rejected.text,
        )
        text = repr((pair.prompt_ids, pair.chosen_ids, pair.rejected_ids))
        yield hashlib.sha256(text.encode()).digest(), pair, (chosen.line, rejected.line)


def check_tokenizer(rollouts: list[PromptRollouts], tokenizer: TextTokenizer, sample: int = 20) -> None:
    """Check on some completions that the tokenizer is the one that they were sampled with.

    Raises:
        Refused: none of them decodes to its text.
    """
    completions = [item for prompt in rollouts[:sample] for item in list(prompt.completions.values())[:1] if item.ids]
    for prompt in rollouts[:sample]:
        for item in list(prompt.completions.values())[:1]:
            _check_ids(prompt, item.ids, tokenizer)
    texts = [tokenizer.backend.decode(list(item.ids), skip_special_tokens=True) for item in completions]
    if completions and not any(a.strip() == b.text.strip() for a, b in zip(texts, completions, strict=True)):
        raise Refused(
            "the rollouts were sampled with another tokenizer: "
            f"the ids of {completions[0].text[:40]!r} decode to {texts[0][:40]!r}; "
            "give the model that sampled them as the input `tokenizer`"
        )


def _check_ids(rollouts: PromptRollouts, ids: list[int] | tuple[int, ...], tokenizer: TextTokenizer) -> None:
    if ids and (max(ids) >= tokenizer.vocab_size or min(ids) < 0):
        raise Refused(
            f"prompt {rollouts.id} of the rollouts has token id {max(ids)}, and the tokenizer ends at "
            f"{tokenizer.vocab_size - 1}; give the model that sampled them as the input `tokenizer`"
        )
