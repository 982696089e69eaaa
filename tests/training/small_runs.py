"""Datasets and contexts small enough to train on in a test, in the formats that real runs use."""

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stages.artifacts import WorkArea, open_store
from stages.contract import Resources, StageContext

KEY = "ab" * 32
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(extra: list[str] = ()) -> PreTrainedTokenizerFast:
    """Byte-level, without merges: 256 bytes and four markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", *extra]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_dataset(
    folder: Path, *, rows: int = 12, length: int = 16, holds: str = "text", tokenizer=None, seed: int = 0
) -> Path:
    """Packed rows of documents of random lengths that count upwards, so that there is something to learn."""
    folder.mkdir(parents=True)
    tokenizer = tokenizer or make_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    generator = random.Random(seed)
    ids = np.zeros((rows, length), np.int32)
    segments = np.zeros((rows, length), np.int32)
    mask = np.zeros((rows, length), np.uint8)
    for row in range(rows):
        at, document = 0, 1
        while at + 2 <= length:
            size = min(generator.randint(2, 7), length - at)
            first = generator.randint(4, 200)
            ids[row, at : at + size] = np.arange(first, first + size)
            segments[row, at : at + size] = document
            mask[row, at + 1 : at + size] = 1
            if holds == "chat":
                mask[row, at + 1] = 0
            at, document = at + size, document + 1
    save_file({"input_ids": ids, "segment_ids": segments, "loss_mask": mask}, folder / "train.safetensors")
    split = {
        "rows": rows,
        "documents": int(segments.max(axis=1).sum()),
        "tokens": int((segments > 0).sum()),
        "target_tokens": int(mask.sum()),
        "bytes": int(mask.sum()),
    }
    info = {
        "holds": holds,
        "row_length": length,
        "splits": {"train": split},
        "vocab_size": len(tokenizer),
        "kept": split["documents"],
        "dropped": {},
    }
    (folder / "dataset.json").write_text(json.dumps(info))
    return folder


class Attempt(SimpleNamespace):
    """One attempt at a stage: `context`, `events`, `output`."""


def make_attempt(base: Path, store: Path, config, inputs, *, key: str = KEY, stop=lambda: False) -> Attempt:
    """An attempt of its own folder `base`; attempts with the same store and key share saved progress, as retries do."""
    events: list[dict] = []
    for name in ("output", "scratch", "restored"):
        (base / name).mkdir(parents=True)
    context = StageContext(
        config=config,
        inputs=inputs,
        output=base / "output",
        work=WorkArea(open_store(store), key, base / "restored"),
        scratch=base / "scratch",
        resources=Resources(threads=1),
        emit=events.append,
        stop=stop,
    )
    return Attempt(context=context, events=events, output=base / "output")


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not os.path.islink(path)
    }


def small_model(tied: bool = True, seed: int = 0):
    """A Qwen3 of 260 tokens, 16 wide, one layer."""
    from stages.modeling.scratch import new_model

    return new_model(
        "qwen3",
        make_tokenizer(),
        vocab_size=260,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        rope_theta=10_000.0,
        initializer_range=0.02,
        seed=seed,
    )
