"""`python -m stages sample FOLDER PROMPT`: prints a model's answer to one prompt as it is sampled."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stages.contract import Refused


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0, or 2 for a request that cannot be met."""
    parser = argparse.ArgumentParser(prog="python -m stages sample", description="Print a model's answer to a prompt.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkpoint: a plain Hugging Face folder")
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask; - reads it from standard input")
    parser.add_argument("--max-new-tokens", type=int, default=None, help="longest answer (default: 256, or what fits)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (default: 1, off)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    arguments = parser.parse_args(argv)
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    try:
        for piece in answer(
            arguments.folder,
            prompt,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            seed=arguments.seed,
            raw=arguments.raw,
        ):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except (Refused, ValueError) as error:
        print(f"sample: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; Python would complain of it once more at exit
        return 0
    sys.stdout.write("\n")
    return 0


def answer(
    folder: Path,
    prompt: str,
    *,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    raw: bool = False,
) -> Iterator[str]:
    """Yield the answer of a checkpoint piece by piece.

    Args:
        folder: the checkpoint.
        prompt: one user turn, or with `raw` (and for tokenizers without a chat template) the text to continue.
        max_new_tokens: the longest answer; when None, 256 or as many as the model's positions leave.

    Raises:
        Refused: the folder is not a checkpoint, or its model cannot be sampled from.
        ValueError: the prompt is empty or too long, or a setting is out of range.
    """
    # Imported here so that `--help` and wrong arguments answer at once.
    from stages.modeling.checkpoint import load_model, load_tokenizer
    from stages.sampling.checks import check_sampling, eos_token_ids
    from stages.sampling.generate import seeded_generator, stream

    if not folder.is_dir():
        raise Refused(f"{folder} is not a folder")
    tokenizer: Any = load_tokenizer(folder)
    model: Any = load_model(folder)
    check_sampling(model)
    if not prompt:
        raise ValueError("the prompt is empty")
    if raw or not getattr(tokenizer, "chat_template", None):
        ids = text_ids(tokenizer, prompt)
    else:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError("the prompt has no tokens")
    if max_new_tokens is None:
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        max_new_tokens = 256 if positions is None else max(1, min(256, positions - len(ids)))
    tokens = stream(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        eos_ids=eos_token_ids(model, tokenizer),
        generator=seeded_generator(seed, "sample") if temperature > 0 else None,
    )
    yield from text_pieces(tokenizer, tokens)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text that is to be gone on with: with what the tokenizer begins texts with, and no end of text.

    Some tokenizers put an end of text behind whatever they encode, after which a model begins something else.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = tokenizer.bos_token_id
    begins = start is not None and tokenizer("a")["input_ids"][:1] == [start]
    return [start, *ids] if begins and ids[:1] != [start] else ids


def text_pieces(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Turn tokens into text as soon as it is certain: a character of several tokens waits for its last one."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            if len(text) > len(shown):
                yield text[len(shown) :]
            shown = text
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if len(text) > len(shown) and text.startswith(shown):
        yield text[len(shown) :]
