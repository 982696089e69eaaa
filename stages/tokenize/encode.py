"""Turns examples into token ids, with the tokens that are trained.

Invariants:
- What a model is trained on is what it meets when it is sampled: a prompt has the same ids here as before sampling.
- The first token of a document is never a target, for there is nothing before it to predict it from.
- Documents cannot hold control tokens: in plain text the string of a special token is ordinary text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.tokenize.chat import ChatRenderer, Message, end_of_turn, target_mask
from stages.tokenize.config import Config
from stages.tokenize.readers import BadRow
from stages.tokenize.rows import Chat, Completion, Example, Pair, Question, Text
from stages.tokenize.tokenizer import Encoding, TextTokenizer


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids int32 [n], which of them are targets uint8 [n], and the UTF-8 bytes they stand for int32 [n]."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]
    bytes: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Token ids of a prompt and of its two completions, and their texts."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of a prompt, its text, and the chat it was rendered from (None for plain text)."""

    prompt_ids: list[int]
    prompt: str
    messages: list[Message] | None


Encoded = Document | EncodedPair | EncodedPrompt


class Encoder:
    """Encodes examples of one format with one tokenizer.

    Raises:
        Refused: on creation, where the tokenizer lacks a token that the settings ask for.
    """

    def __init__(self, config: Config, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.variables = config.chat_template_kwargs
        self.bos = tokenizer.bos_id(config.add_bos_token)
        plain = config.format == "text" or not config.apply_chat_template  # a chat template has its own ends
        self.eos = tokenizer.eos_id if config.add_eos_token and plain and config.format != "prompt" else None
        self._renderer: ChatRenderer | None = None

    @property
    def renderer(self) -> ChatRenderer:
        """The chat template, which must be there once a chat is met."""
        if self._renderer is None:
            self._renderer = ChatRenderer(self.tokenizer, self.variables)
        return self._renderer

    def encode(self, examples: list[Example]) -> list[Encoded | BadRow]:
        """Encode examples of one format; one that cannot be encoded gives a `BadRow` in its place.

        Raises:
            Refused: the chat template cannot be used for training.
        """
        if all(isinstance(example, Text) for example in examples):
            texts = [example.text for example in examples if isinstance(example, Text)]
            return [self._document(item) for item in self.tokenizer.encode(texts, special_tokens=False)]
        if all(isinstance(example, Chat) for example in examples):
            return self._chats([example for example in examples if isinstance(example, Chat)])
        return [self._one(example) for example in examples]

    def _one(self, example: Example) -> Encoded | BadRow:
        try:
            if isinstance(example, Pair):
                return self._pair(example)
            if isinstance(example, Question):
                return self._question(example)
            if isinstance(example, Completion):
                return self._completion(example)
            return self.encode([example])[0]
        except BadRow as error:
            return error

    def _document(self, encoding: Encoding) -> Document:
        return self._with_ends(encoding.ids, np.ones(len(encoding.ids), np.uint8), encoding.bytes, eos=True)

    def _with_ends(
        self, ids: NDArray[np.int32], mask: NDArray[np.uint8], sizes: NDArray[np.int32], *, eos: bool
    ) -> Document:
        before = [] if self.bos is None else [self.bos]
        after = [self.eos] if eos and self.eos is not None else []
        ids = np.concatenate([np.array(before, np.int32), ids, np.array(after, np.int32)])
        mask = np.concatenate([np.zeros(len(before), np.uint8), mask, np.ones(len(after), np.uint8)])
        sizes = np.concatenate([np.zeros(len(before), np.int32), sizes, np.zeros(len(after), np.int32)])
        mask[:1] = 0
        return Document(ids, mask, sizes)

    def _chats(self, chats: list[Chat]) -> list[Encoded | BadRow]:
        results: list[Encoded | BadRow | None] = []
        rendered = []
        for chat in chats:
            try:
                self.renderer.check_content(chat.messages)
                item = self.renderer.chat(chat.messages, first_trained=chat.first_trained, tools=chat.tools)
            except BadRow as error:
                results.append(error)
            else:
                results.append(None)
                rendered.append(item)
        encodings = self.tokenizer.encode([item.text for item in rendered], special_tokens=True)
        done = iter(zip(rendered, encodings, strict=True))
        for index, result in enumerate(results):
            if result is None:
                item, encoding = next(done)
                mask = target_mask(item.text, encoding, item.spans, self._special(encoding.ids))
                mask[:1] = 0
                results[index] = Document(encoding.ids, mask, encoding.bytes)
        return [result for result in results if result is not None]

    def _completion(self, example: Completion) -> Document:
        prompt, completion = self._joint(example.prompt, example.completion, special_tokens=False)
        mask = np.repeat(np.array([0, 1], np.uint8), [len(prompt.ids), len(completion.ids)])
        return self._with_ends(
            np.concatenate([prompt.ids, completion.ids]),
            mask,
            np.concatenate([prompt.bytes, completion.bytes]),
            eos=True,
        )

    def _question(self, example: Question) -> EncodedPrompt:
        text, ids = self._prompt(example.prompt, example.tools)
        if isinstance(example.prompt, str):
            return EncodedPrompt(ids, example.prompt, None)
        shown = example.prompt[-1].get("content")
        return EncodedPrompt(ids, shown if isinstance(shown, str) else text, example.prompt)

    def _pair(self, example: Pair) -> EncodedPair:
        text, prompt_ids = self._prompt(example.prompt, example.tools)
        chosen, chosen_ids = self._answer(example.prompt, example.chosen, text, example.tools)
        rejected, rejected_ids = self._answer(example.prompt, example.rejected, text, example.tools)
        if chosen_ids == rejected_ids:
            raise BadRow("equal_completions", "the chosen and the rejected completion have the same tokens")
        shown = example.prompt if isinstance(example.prompt, str) else example.prompt[-1].get("content", text)
        return EncodedPair(prompt_ids, chosen_ids, rejected_ids, shown, chosen, rejected)

    def _prompt(self, prompt: str | list[Message], tools: list[Any] | None) -> tuple[str, list[int]]:
        if isinstance(prompt, str):
            (encoding,) = self.tokenizer.encode([prompt], special_tokens=False)
            ids = encoding.ids.tolist()
            return prompt, ids if self.bos is None else [self.bos, *ids]
        self.renderer.check_content(prompt)
        text = self.renderer.prompt(prompt, tools)
        (encoding,) = self.tokenizer.encode([text], special_tokens=True)
        return text, encoding.ids.tolist()

    def _answer(
        self, prompt: str | list[Message], answer: str | list[Message], prompt_text: str, tools: list[Any] | None
    ) -> tuple[str, list[int]]:
        """The text of a completion without its markers, and its ids with the end-of-turn token."""
        if isinstance(prompt, str) and isinstance(answer, str):
            _, encoding = self._joint(prompt, answer, special_tokens=False)
            ids: list[int] = encoding.ids.tolist()
            return answer, ids if self.eos is None else [*ids, self.eos]
        if isinstance(prompt, str) or isinstance(answer, str):
            raise BadRow("wrong_type", "prompt and completion must both be strings or both be lists of messages")
        self.renderer.check_content(answer)
        text = self.renderer.completion(prompt_text, [*prompt, *answer], len(prompt), tools)
        _, encoding = self._joint(prompt_text, text, special_tokens=True)
        special = self._special(encoding.ids)
        whole = prompt_text + text
        end = end_of_turn(whole, encoding, special, 0, len(encoding.ids) - 1)
        shown = answer[-1].get("content")
        return shown if isinstance(shown, str) else text, encoding.ids[: end + 1].tolist()

    def _joint(self, prompt: str, completion: str, *, special_tokens: bool) -> tuple[Encoding, Encoding]:
        """Encode a prompt and what follows it such that the prompt's ids are those it has alone.

        Both are encoded in one go, as the text stands. Where a token would reach over the border, which no model that
        is given the prompt can produce, the completion is encoded by itself.
        """
        alone, whole = self.tokenizer.encode([prompt, prompt + completion], special_tokens=special_tokens)
        count = len(alone.ids)
        if not np.array_equal(whole.ids[:count], alone.ids):
            rest = self.tokenizer.encode_rest(completion, special_tokens=special_tokens)
            shift = np.int32(len(prompt))
            return alone, Encoding(rest.ids, rest.bytes, rest.starts + shift, rest.ends + shift)
        return alone, Encoding(whole.ids[count:], whole.bytes[count:], whole.starts[count:], whole.ends[count:])

    def _special(self, ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        return np.isin(ids, self.tokenizer.special_array)
