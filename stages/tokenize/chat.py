"""Renders chats with a tokenizer's chat template and finds what in them the assistant says.

Model: a chat is rendered to one text, and the text is encoded once. A trained span is a range of its characters: what
`{% generation %}` marks in the template, or else what rendering the chat up to and with an assistant's turn adds to
rendering it up to the generation prompt. A token is trained when it overlaps such a span.

Invariants:
- The end-of-turn token after an assistant's turn is trained (a model must learn to stop), white space after it is not.
- A template for which the text so far is not a prefix of the text later on, or which prints the date, is refused: what
  the model is trained on would not be what it meets.
- No message can write a control token.
- A turn that the data says is not to be trained is not.
- A call of a tool is written alike whether its arguments are an object or a string of JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.contract import Refused
from stages.tokenize.readers import BadRow, all_strings, clean_text
from stages.tokenize.tokenizer import Encoding, TextTokenizer
from stages.tokenize.tool_calls import Form, form_taken, in_form

_SPEAKERS = ("user", "assistant")  # who must say something in each turn
_REASONING = ("reasoning_content", "reasoning", "thinking")  # what thoughts beside a content are called
_SHAREGPT = {"human": "user", "gpt": "assistant"}  # the names of its speakers; others are the same

Message = dict[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text, and the character ranges of the turns that are trained, in order."""

    text: str
    spans: list[Span]


def check_messages(value: Any, name: str) -> list[Message]:
    """Return `value` as a list of messages, without keys that are None (as Parquet fills them in).

    Messages with "from" and "value" are those of ShareGPT, and become messages with "role" and "content". A content in
    parts of text becomes their text.

    A turn of the user or the assistant must say something: text that is not blank, or else a call of a tool, reasoning
    or the like. A prompt and a completion that are strings must too. A system message or a tool's answer may be empty.

    Raises:
        BadRow: it is not a list of messages with a role and a text, or a turn is empty.
    """
    if not isinstance(value, list):
        raise BadRow("wrong_type", f'"{name}" must be a list of messages, not {type(value).__name__}')
    if not value:
        raise BadRow("empty", f'"{name}" is an empty list')
    messages = []
    for number, item in enumerate(value, 1):
        if not isinstance(item, dict):
            raise BadRow("wrong_type", f'message {number} of "{name}" must be an object, not {type(item).__name__}')
        message = {key: part for key, part in item.items() if part is not None}
        if "role" not in message and isinstance(speaker := message.get("from"), str):
            parts = {key: part for key, part in message.items() if key not in ("from", "value")}
            message = {"role": _SHAREGPT.get(speaker, speaker), "content": message.get("value"), **parts}
        role = message.get("role")
        if not isinstance(role, str) or not role:
            keys = ", ".join(f'"{key}"' for key in message) or "nothing"
            raise BadRow("missing_field", f'message {number} of "{name}" has no "role"; it has {keys}')
        place = f'"content" of message {number} of "{name}"'
        if isinstance(message.get("content"), list):
            message["content"] = _text_of_parts(message["content"], place)
        content = message.get("content")
        if content is None and "tool_calls" not in message:
            raise BadRow("missing_field", f'message {number} of "{name}" has no "content"')
        if content is not None and not isinstance(content, str):
            raise BadRow("wrong_type", f"{place} must be a string or a list of parts, not {type(content).__name__}")
        if role in _SPEAKERS and not any(_says_something(part) for key, part in message.items() if key != "role"):
            raise BadRow("empty", f'message {number} of "{name}", a turn of the {role}, is empty')
        messages.append(message)
    return messages


def _text_of_parts(parts: list[Any], place: str) -> str:
    """The text of a content in parts, as transformers' templates put them together: with nothing in between.

    Raises:
        BadRow: a part is not `{"type": "text", "text": ...}`.
    """
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            known = '{"type": "text", "text": ...}'
            raise BadRow("wrong_type", f"{place} has a part {kind!r}; only parts {known} are read: leave such rows out")
        texts.append(text)
    return "".join(texts)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _with_parts(messages: list[Message]) -> list[Message]:
    return [
        message | {"content": _parts(message["content"])} if isinstance(message.get("content"), str) else message
        for message in messages
    ]


def _says_something(part: Any) -> bool:
    return bool(part.strip()) if isinstance(part, str) else bool(part)


class ChatRenderer:
    """The chat template of a tokenizer, checked.

    Raises:
        Refused: on creation, where there is no template or it prints the date.
    """

    def __init__(self, tokenizer: TextTokenizer, variables: dict[str, Any]) -> None:
        template = tokenizer.hf.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise Refused(
                "the tokenizer has no chat template; set chat_template, or apply_chat_template: false for plain prompts"
            )
        if "strftime_now" in template and "date_string" not in variables:
            raise Refused(
                "the chat template prints today's date, so tomorrow's data would differ; "
                'set chat_template_kwargs: {date_string: "26 Jul 2024"} (or another fixed date)'
            )
        self.template: str = template
        self.variables = {**tokenizer.hf.special_tokens_map, **variables}
        self._calls = "tool_calls" in template
        self.marked = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None
        self._special = re.compile("|".join(map(re.escape, tokenizer.special))) if tokenizer.special else None

    def check_content(self, messages: list[Message]) -> None:
        """Check that all strings in the messages are text without control tokens, and that no call of a tool is lost.

        Raises:
            BadRow: one is not, or the template would leave the call out.
        """
        if not self._calls:
            for number, message in enumerate(messages, 1):
                if message.get("tool_calls"):
                    raise BadRow(
                        "template",
                        f"message {number} calls a tool, and the chat template has no place for tool_calls, so the call"
                        " would not be trained; give a template that has, with chat_template",
                    )
        for text in all_strings(messages):
            clean_text(text)
            if self._special is not None and (found := self._special.search(text)):
                raise BadRow("control_token", f"a message holds the control token {found.group()!r} as text")

    def reasoning_left_out(self, messages: list[Message]) -> str | None:
        """The field with the assistant's thoughts that the template has no place for; None where none is lost."""
        for message in messages:
            for name in _REASONING:
                if message["role"] == "assistant" and message.get(name) and name not in self.template:
                    return name
        return None

    def prompt(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        """Render a chat up to the start of the assistant's turn.

        Raises:
            BadRow: the template does not take these messages.
        """
        return self._render(messages, tools, add_generation_prompt=True)

    def chat(self, messages: list[Message], *, first_trained: int = 0, tools: list[Any] | None = None) -> Rendered:
        """Render a whole chat; assistant turns from message number `first_trained` (from 0) on are trained.

        Raises:
            BadRow: the template does not take these messages.
            Refused: the template breaks the rule of prefixes.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        chosen = {turn for turn in turns if turn >= first_trained and _is_trained(messages[turn], turn + 1)}
        if self.marked:
            text, spans = self._render_marked(messages, tools)
            if len(spans) == len(turns):
                trained = [(span, turn) for span, turn in zip(spans, turns, strict=True) if turn in chosen]
                self._check_said(messages, text, trained)
                return Rendered(text, [span for span, _ in trained])
        text = self._render(messages, tools)
        spans = []
        for turn in turns:
            if turn not in chosen:
                continue
            if turn == 0:
                raise BadRow("no_prompt", "the chat starts with the assistant, so there is nothing it answers to")
            before = self._render(messages[:turn], tools, add_generation_prompt=True)
            after = self._render(messages[: turn + 1], tools)
            end = self._kept(after, text)
            if not after.startswith(before) or end is None or end < len(before):
                raise Refused(_prefix_error(text, before, after, turn))
            spans.append((len(before), end))
        trained = list(zip(spans, sorted(chosen), strict=True))
        self._check_said(messages, text, trained)
        return Rendered(text, spans)

    def _kept(self, after: str, text: str) -> int | None:
        """How much of a chat up to a turn (`after`) stands in the whole chat; None where words of it do not.

        Some templates put a control token after the last message alone, or another one than after earlier ones.
        """
        if text.startswith(after):
            return len(after)
        same = _common(after, text)
        if self._special is None:
            return None
        for token in self._special.finditer(after):
            if token.start() < same < token.end():
                same = token.start()
        return None if self._special.sub("", after[same:]).strip() else same

    def _check_said(self, messages: list[Message], text: str, trained: list[tuple[Span, int]]) -> None:
        """Check that no turn is rendered as an empty answer.

        Raises:
            BadRow: one is, so that a model would learn to say nothing.
        """
        for (start, end), turn in trained:
            said = text[start:end] if self._special is None else self._special.sub("", text[start:end])
            if not said.strip() and any(_says_something(part) for key, part in messages[turn].items() if key != "role"):
                keys = ", ".join(key for key, part in messages[turn].items() if key != "role" and _says_something(part))
                raise BadRow(
                    "template",
                    f"the chat template leaves out all that message {turn + 1} says ({keys}); give a template that "
                    "writes it, with chat_template",
                )

    def completion(self, prompt: str, messages: list[Message], length: int, tools: list[Any] | None = None) -> str:
        """Render the chat and return what it adds to `prompt`, which is its first `length` messages rendered.

        Raises:
            BadRow: the template does not take these messages.
            Refused: the template breaks the rule of prefixes.
        """
        text = self._render(messages, tools)
        if not text.startswith(prompt):
            raise Refused(_prefix_error(text, prompt, text, length))
        return text[len(prompt) :]

    @cached_property
    def _arguments(self) -> Form | None:
        return form_taken(lambda messages: self._rendered(messages, None, False, marked=False)[0])

    @cached_property
    def _in_parts(self) -> bool:
        """Whether the template writes a content in parts, as those of models that see pictures, and no plain one."""

        def written(content: Callable[[str], Any]) -> bool:
            chat = [{"role": "user", "content": content("qzask")}, {"role": "assistant", "content": content("qzreply")}]
            try:
                text = self._rendered(chat, None, False, marked=False)[0]
            except BadRow:
                return False
            return "qzask" in text and "qzreply" in text

        return not written(str) and written(_parts)

    def _render(self, messages: list[Message], tools: list[Any] | None, *, add_generation_prompt: bool = False) -> str:
        return self._call(messages, tools, add_generation_prompt, marked=False)[0]

    def _render_marked(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Span]]:
        return self._call(messages, tools, False, marked=True)

    def _call(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool, *, marked: bool
    ) -> tuple[str, list[Span]]:
        if any(message.get("tool_calls") for message in messages):
            messages = in_form(messages, self._arguments)
        if self._in_parts:
            messages = _with_parts(messages)
        return self._rendered(messages, tools, add_generation_prompt, marked=marked)

    def _rendered(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool, *, marked: bool
    ) -> tuple[str, list[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except jinja2.TemplateSyntaxError as error:
            raise Refused(f"the chat template is malformed: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRow("template", f"the chat template does not take these messages: {error}") from error
        return texts[0], spans[0] if marked else []


def target_mask(text: str, encoding: Encoding, spans: list[Span], special: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Which tokens of a rendered chat are trained: uint8 [n].

    Args:
        text: the rendered chat.
        special: bool [n], which of its tokens are special.

    Raises:
        Refused: no special token ends a turn.
    """
    mask = np.zeros(len(encoding.ids), dtype=np.uint8)
    for start, end in spans:
        inside = np.flatnonzero((encoding.ends > start) & (encoding.starts < end))
        first, last = (int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1)
        if first < 0:  # an empty turn without marks of its own: what follows it may still end it
            first = int(np.searchsorted(encoding.starts, start))
            last = first - 1
        mask[first : end_of_turn(text, encoding, special, first, last) + 1] = 1
    return mask


def end_of_turn(text: str, encoding: Encoding, special: NDArray[np.bool_], first: int, last: int) -> int:
    """The index of the special token that ends the turn of tokens `first` to `last`, in it or right after it.

    Raises:
        Refused: there is none.
    """
    for index in range(last, first - 1, -1):
        if special[index]:
            return index
        if text[encoding.starts[index] : encoding.ends[index]].strip():
            break
    for index in range(last + 1, len(special)):
        if special[index]:
            return index
        if text[encoding.starts[index] : encoding.ends[index]].strip():
            break
    raise Refused(
        "the chat template puts no special token after an assistant's turn, so a model would never learn to stop; "
        "give one with chat_template"
    )


def _is_trained(message: Message, number: int) -> bool:
    """Whether the assistant's turn is to be trained: not where it has "weight": 0, or "train" or "training": false.

    Raises:
        BadRow: a weight is neither 0 nor 1.
    """
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise BadRow("wrong_type", f'"weight" of message {number} is {weight!r}; a turn is trained (1) or not (0)')
    return bool(weight) and message.get("train") is not False and message.get("training") is not False


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _prefix_error(text: str, before: str, after: str, turn: int) -> str:
    other = before if not after.startswith(before) else after
    longer = after if other is before else text
    same = _common(other, longer)
    return (
        f"the chat template is not made for training: with message {turn + 1} added, it renders the text before it "
        f"differently ({other[same : same + 30]!r} becomes {longer[same : same + 30]!r}). Mark the assistant's turns "
        "with {% generation %} in chat_template, or choose a template that keeps earlier turns as they are"
    )
