"""A prompt and its completion read as they are written, whatever a tokenizer puts before a text."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stages.tokenize.config import Config
from stages.tokenize.encode import EncodedPair, Encoder
from stages.tokenize.rows import parse
from stages.tokenize.tokenizer import TextTokenizer

BAR = "\N{LOWER ONE EIGHTH BLOCK}"
WORDS = [("h", "e"), (BAR, "he"), ("l", "l"), ("he", "ll"), ("hell", "o"), (BAR, "hello"), (BAR + "he", "llo")]
WORDS += [("ll", "o"), (BAR, "w"), (BAR, BAR)]


def sentencepiece(kind: str) -> TextTokenizer:
    """A BPE with byte fallback that puts a space before a text: as Llama 2 is written ("prepend"), or by Metaspace."""
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), BAR, *"helowrd.", *(a + b for a, b in WORDS)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=WORDS, byte_fallback=True, fuse_unk=True))
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(BAR), normalizers.Replace(" ", BAR)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=BAR, prepend_scheme=kind, split=False)
    first = [] if kind == "never" else [decoders.Strip(" ", 1, 0)]
    replace = decoders.Replace(BAR, " ")
    backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *first])
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def byte_level(**settings: Any) -> TextTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "w"), ("Ġ", "o")]
    vocabulary = {token: index for index, token in enumerate(["</s>", *alphabet, "Ġw", "Ġo"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=settings.get("prefix", False))
    if "normalizer" in settings:
        backend.normalizer = settings["normalizer"]
    backend.decoder = decoders.ByteLevel()
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


@pytest.mark.parametrize("kind", ["prepend", "always", "first", "never", "bytes"])
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("hello ", "world"),
        ("he", "llo world"),
        ("hello", " world"),
        ("hello ", " world"),
        ("hello", "é"),
        ("he\n", "l"),
    ],
)
def test_a_completion_goes_on_with_its_prompt_as_it_is_written(kind: str, prompt: str, completion: str) -> None:
    tokenizer = byte_level(prefix=True) if kind == "bytes" else sentencepiece(kind)
    settings = {"apply_chat_template": False, "add_eos_token": False, "add_bos_token": False}
    config = Config(format="preference", **settings)
    row = {"prompt": prompt, "chosen": completion, "rejected": "lol"}
    (pair,) = Encoder(config, tokenizer).encode([parse(config, row)])
    assert isinstance(pair, EncodedPair)
    (alone,) = tokenizer.encode([prompt], special_tokens=False)
    assert pair.prompt_ids == alone.ids.tolist()
    decoded = tokenizer.backend.decode(pair.prompt_ids + pair.chosen_ids)
    assert decoded.removeprefix(" ") == prompt + completion


def test_bytes_of_tokens_are_those_of_the_text_and_not_of_what_the_tokenizer_makes_of_it() -> None:
    texts = ["hello world", " hello", "e\u0301te\u0301 ÀB", "数学 "]
    for tokenizer in (
        byte_level(prefix=True),
        byte_level(normalizer=normalizers.NFC()),
        byte_level(normalizer=normalizers.Lowercase()),
    ):
        for text, encoding in zip(texts, tokenizer.encode(texts, special_tokens=False), strict=True):
            assert encoding.bytes.sum() == len(text.encode())
    (chat,) = byte_level(prefix=True).encode(["hello</s>"], special_tokens=True)
    assert chat.bytes.sum() == len("hello")
