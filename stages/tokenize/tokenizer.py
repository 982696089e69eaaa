"""Trains, takes over and measures tokenizers.

Invariants:
- A tokenizer is a Hugging Face folder around one `tokenizer.json`; what the folder says is what is used here, and no
  class of a particular model is asked to build it anew. So nothing here needs torch.
- Training gives the same tokenizer for the same texts, whatever the number of threads.
- `byte_lengths` adds up: the tokens of a text stand for exactly its UTF-8 bytes, special tokens for none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stages.contract import Refused
from stages.tokenize.config import TokenizerTrainingConfig

if TYPE_CHECKING:
    import tokenizers
    import transformers

# What transformers notes about how a tokenizer was loaded; it says nothing about the tokenizer.
_LOADING_NOTES = ("is_local", "local_files_only", "name_or_path")
_SPACES = ("\N{LOWER ONE EIGHTH BLOCK}", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}")  # in SentencePiece, in bytes
_ANCHORS = ("\n", ".", ")")  # a text is encoded behind one of these, whichever no token joins with it


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids of one text, the UTF-8 bytes each stands for, and its first and last character; all int32 [n]."""

    ids: NDArray[np.int32]
    bytes: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]


class TextTokenizer:
    """A Hugging Face tokenizer, with what the tokenize stage asks of it.

    Attributes:
        hf: the transformers tokenizer (chat template, special tokens, saving).
        backend: the `tokenizers.Tokenizer` in it (encoding).
        special: strings of the special tokens, longest first.
        special_ids, special_array: their ids, as a set and as int32 [n].
    """

    def __init__(self, hf: transformers.PreTrainedTokenizerFast) -> None:
        self.hf = hf
        self.backend: tokenizers.Tokenizer = hf.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_array = np.array(sorted(self.special_ids), dtype=np.int32)
        strings = [token.content for token in added.values() if token.special and token.content]
        self.special = sorted(strings, key=lambda text: (-len(text), text))
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not vocabulary:
            raise Refused("the tokenizer has an empty vocabulary")
        if self.vocab_size > np.iinfo(np.int32).max:
            raise Refused(f"the tokenizer has token ids up to {self.vocab_size - 1:,}; datasets keep them as int32")

    @property
    def pad_id(self) -> int:
        """The id that fills rows: of the padding token, else of the end-of-text token, else 0. Never a target."""
        for index in (self.hf.pad_token_id, self.hf.eos_token_id):
            if index is not None:
                return int(index)
        return 0

    @property
    def unknown_id(self) -> int | None:
        """The id that stands for text which the vocabulary cannot write; None where an id is no such mark alone."""
        marks = {self.hf.eos_token_id, self.hf.bos_token_id, self.hf.pad_token_id}
        index = self.hf.unk_token_id
        return None if index is None or index in marks else int(index)

    @property
    def eos_id(self) -> int:
        """The id of the end-of-text token.

        Raises:
            Refused: the tokenizer has none.
        """
        if self.hf.eos_token_id is None:
            raise Refused("the tokenizer has no eos_token; set add_eos_token: false, or give another tokenizer")
        return int(self.hf.eos_token_id)

    def bos_id(self, wanted: bool | None) -> int | None:
        """The id to start documents with; None for none. `wanted` None: as the tokenizer does it by itself.

        Raises:
            Refused: it is wanted and the tokenizer has none.
        """
        index = self.hf.bos_token_id
        if wanted is None:
            wanted = index is not None and self.backend.encode("a").ids[:1] == [index]
        if wanted and index is None:
            raise Refused("the tokenizer has no bos_token; set add_bos_token: false, or give another tokenizer")
        return int(index) if wanted else None

    @cached_property
    def byte_level(self) -> NDArray[np.int32] | None:
        """For a byte-level tokenizer the bytes of each token id, int32 [vocab_size]; None for other tokenizers."""
        if "ByteLevel" not in json.dumps(json.loads(self.backend.to_str())["decoder"]):
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        added = self.backend.get_added_tokens_decoder()
        for token, index in self.backend.get_vocab(with_added_tokens=True).items():
            # In the byte alphabet a character is a byte; an added token is plain text.
            lengths[index] = len(token.encode()) if index in added else len(token)
        lengths[self.special_array] = 0
        return lengths

    def encode(self, texts: list[str], *, special_tokens: bool) -> list[Encoding]:
        """Encode texts, adding nothing to them.

        Args:
            special_tokens: whether the string of a special token in a text is that token (in a rendered chat), or
                ordinary text (in a document, which must not be able to write control tokens).
        """
        self.backend.encode_special_tokens = not special_tokens
        table = self.byte_level
        result = []
        for text, encoded in zip(texts, self.backend.encode_batch(texts, add_special_tokens=False), strict=True):
            ids = np.array(encoded.ids, dtype=np.int32)
            offsets = np.array(encoded.offsets, dtype=np.int32).reshape(-1, 2)
            if table is None or not self._adds_up(text, ids, table):
                lengths = _bytes_by_offsets(text, offsets, np.isin(ids, self.special_array))
            else:
                lengths = table[ids]
            result.append(Encoding(ids, lengths, offsets[:, 0], offsets[:, 1]))
        return result

    def _adds_up(self, text: str, ids: NDArray[np.int32], table: NDArray[np.int32]) -> bool:
        """Whether the bytes of byte-level tokens are those of the text: not where it was normalised or a space put
        before it."""
        return int(table[ids].sum()) + int(self._written_bytes[ids].sum()) == len(text.encode())

    @cached_property
    def _written_bytes(self) -> NDArray[np.int32]:
        """The UTF-8 bytes of each special token as it is written in a text, int32 [vocab_size]; 0 for other tokens."""
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for index, token in self.backend.get_added_tokens_decoder().items():
            if token.special:
                lengths[index] = len(token.content.encode())
        return lengths

    def encode_rest(self, text: str, *, special_tokens: bool) -> Encoding:
        """Encode a text that goes on with another one, as if it stood alone, but without the space that some tokenizers
        (SentencePiece's) put before whatever they encode: with it, the text would not go on with the other as written.
        """
        (rest,) = self.encode([text], special_tokens=special_tokens)
        if not self._puts_space_before:
            return rest
        for anchor in _ANCHORS:
            before, both = self.encode([anchor, anchor + text], special_tokens=special_tokens)
            count = len(before.ids)
            if np.array_equal(both.ids[:count], before.ids):
                shift = np.int32(len(anchor))
                return Encoding(
                    both.ids[count:], both.bytes[count:], both.starts[count:] - shift, both.ends[count:] - shift
                )
        return rest

    @cached_property
    def _puts_space_before(self) -> bool:
        """Whether a text that begins with a letter is encoded with a space before it."""
        tokens = self.backend.encode("a", add_special_tokens=False).tokens
        return bool(tokens) and tokens[0][:1] in _SPACES

    def save(self, folder: Path) -> None:
        """Write the tokenizer as a Hugging Face folder; the bytes do not depend on where it was loaded from."""
        self.backend.encode_special_tokens = False
        folder.mkdir(parents=True, exist_ok=True)
        self.hf.save_pretrained(str(folder))
        path = folder / "tokenizer_config.json"
        settings: dict[str, Any] = json.loads(path.read_text())
        for name in _LOADING_NOTES:
            settings.pop(name, None)
        path.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def train_tokenizer(texts: Iterator[str], config: TokenizerTrainingConfig) -> TextTokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2, Radford et al. 2019).

    Raises:
        Refused: there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    seen = 0

    def counted() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            seen += 1
            yield text

    backend = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
        if config.split_digits
        else by_bytes
    )
    backend.decoder = decoders.ByteLevel()
    special = [config.pad_token, *config.special_tokens, config.eos_token]
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(counted(), trainer)
    if not seen:
        raise Refused("there is no text to train the tokenizer on")
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=config.pad_token,
        eos_token=config.eos_token,
        extra_special_tokens=config.special_tokens,
        chat_template=config.chat_template,
        clean_up_tokenization_spaces=False,
    )
    return TextTokenizer(hf)


def load_tokenizer(folder: Path, chat_template: str | None = None) -> TextTokenizer:
    """Load the tokenizer of a dataset's `tokenizer` folder or of a checkpoint.

    Raises:
        Refused: there is none that can be used.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        raise Refused(
            "the tokenizer's folder has no tokenizer.json; make one with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        hf = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the loader raises what its parser happens to raise
        raise Refused(f"the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
    if chat_template is not None:
        hf.chat_template = chat_template
    return TextTokenizer(hf)


def _bytes_by_offsets(text: str, offsets: NDArray[np.int32], special: NDArray[np.bool_]) -> NDArray[np.int32]:
    """UTF-8 bytes of each token of a tokenizer that is not byte-level, int32 [n], by what of the text it covers.

    A character shared by several tokens counts for the first; text between two tokens, such as a dropped space, counts
    for the second. So the sum is the bytes of the whole text up to the last token, without special tokens.
    """
    before = np.zeros(len(text) + 1, dtype=np.int64)
    np.cumsum([len(character.encode()) for character in text], out=before[1:])
    ends = np.maximum.accumulate(offsets[:, 1]) if len(offsets) else np.zeros(0, dtype=np.int32)
    lengths = np.diff(before[ends], prepend=0).astype(np.int32)
    lengths[special] = 0
    return lengths
