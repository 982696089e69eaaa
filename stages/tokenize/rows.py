"""Turns the columns of a raw row into an example: a text, a chat, a pair of completions, or a prompt.

The formats are TRL's: `messages`, or `prompt` and `completion`; `prompt`, `chosen` and `rejected` with an explicit or
an implicit prompt; each as strings or as lists of messages. Templates rename and join columns.

Invariants:
- The `key` of an example is a hash of its whole content and of nothing else, so equal examples are duplicates, and an
  example keeps its id and its split whatever stands around it.
- A row that does not fit raises `BadRow` with the field's name.
"""

from __future__ import annotations

import hashlib
import json
import string
from dataclasses import asdict, dataclass
from typing import Any

from stages.tokenize.chat import Message, check_messages
from stages.tokenize.config import Config, template_fields
from stages.tokenize.readers import BadRow, all_strings, clean_text

# What TRL never hands to a reward as a column, for it is there in another form.
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
_SHOWN_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Text:
    """A document."""

    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat whose assistant turns from message number `first_trained` on are trained."""

    messages: list[Message]
    first_trained: int = 0
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """Plain text of which the second part is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two completions of one prompt: strings for plain text, else lists of messages."""

    prompt: str | list[Message]
    chosen: str | list[Message]
    rejected: str | list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to complete, and the columns that rewards get."""

    prompt: str | list[Message]
    columns: dict[str, Any]
    tools: list[Any] | None = None


Example = Text | Chat | Completion | Pair | Question


def plain_text(example: Example) -> str:
    """What of an example is encoded as plain text; "" where it is a chat."""
    if isinstance(example, Text):
        return example.text
    if isinstance(example, Completion):
        return example.prompt + example.completion
    if isinstance(example, Pair | Question) and isinstance(example.prompt, str):
        return example.prompt
    return ""


def key(example: Example) -> bytes:
    """A hash of the whole example (32 bytes)."""
    return _hash(asdict(example))


def split_key(example: Example) -> bytes:
    """A hash of what may not be on both sides of a split: of the prompt alone, where there is one to answer."""
    return _hash(example.prompt) if isinstance(example, Pair | Question) else key(example)


def parse(config: Config, columns: dict[str, Any]) -> Example:
    """Make an example of a row.

    Raises:
        BadRow: the row does not fit the format.
    """
    if config.format == "text":
        return Text(_string(fill(config.text_template, columns), config.text_template))
    if config.format == "chat":
        return _chat(config, columns)
    if config.format == "preference":
        return _pair(config, columns)
    return _question(config, columns)


def fill(template: str, columns: dict[str, Any]) -> Any:
    """Put columns into a template; a template that is one column and nothing else gives its value as it is.

    Raises:
        BadRow: a column is missing, or is not text or a number where it is joined with other text.
    """
    names = template_fields(template)
    for name in names:
        _present(columns, name)
    if template == "{" + names[0] + "}":
        return columns[names[0]]
    for name in names:
        if isinstance(columns[name], bool) or not isinstance(columns[name], str | int | float):
            kind = type(columns[name]).__name__
            raise BadRow("wrong_type", f'"{name}" must be text or a number to be put into {template!r}, not {kind}')
    return string.Formatter().vformat(template, (), columns)


def _chat(config: Config, columns: dict[str, Any]) -> Example:
    if _uses_messages(config, columns):
        messages = check_messages(_present(columns, config.messages_field), config.messages_field)
        if not any(message["role"] == "assistant" for message in messages):
            raise _no_assistant(f'"{config.messages_field}"', messages)
        return Chat(_with_system(config, messages), tools=_tools(columns))
    prompt = _turns(config, fill(config.prompt_template, columns), config.prompt_template, "user")
    completion = _turns(config, fill(config.completion_template, columns), config.completion_template, "assistant")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(prompt, completion)
    before = _with_system(config, _as_messages(prompt, "user"))
    after = _as_messages(completion, "assistant")
    if not any(message["role"] == "assistant" for message in after):
        raise _no_assistant("the completion", after)
    return Chat([*before, *after], first_trained=len(before), tools=_tools(columns))


def _no_assistant(what: str, messages: list[Message]) -> BadRow:
    roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
    return BadRow("no_target", f"{what} holds no turn of the assistant; its roles are {roles}")


def _pair(config: Config, columns: dict[str, Any]) -> Pair:
    chosen = _turns(config, fill(config.chosen_template, columns), config.chosen_template, "assistant")
    rejected = _turns(config, fill(config.rejected_template, columns), config.rejected_template, "assistant")
    explicit = any(columns.get(name) is not None for name in template_fields(config.prompt_template))
    whole = all(isinstance(turns, list) and turns[0]["role"] != "assistant" for turns in (chosen, rejected))
    if config.prompt_template == "{prompt}" and isinstance(columns.get("prompt"), str) and whole:
        prompt, chosen, rejected = _implicit_prompt(config, columns, chosen, rejected)
        if str(prompt[-1].get("content")).strip() != columns["prompt"].strip():
            raise BadRow("wrong_type", '"prompt" is not what the two chats have last in common; leave it out')
    elif explicit or config.prompt_template != "{prompt}":
        prompt = _turns(config, fill(config.prompt_template, columns), config.prompt_template, "user")
    else:
        prompt, chosen, rejected = _implicit_prompt(config, columns, chosen, rejected)
    if not (isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str)):
        prompt = _with_system(config, _as_messages(prompt, "user"))
        chosen, rejected = _as_messages(chosen, "assistant"), _as_messages(rejected, "assistant")
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(turns, list) and turns[0]["role"] != "assistant":
            raise BadRow("wrong_type", f"the {name} completion starts with a turn of {turns[0]['role']}, not assistant")
    if chosen == rejected:
        raise BadRow("equal_completions", "the chosen and the rejected completion are equal")
    return Pair(prompt, chosen, rejected, tools=_tools(columns))


def _implicit_prompt(
    config: Config, columns: dict[str, Any], chosen: str | list[Message], rejected: str | list[Message]
) -> tuple[Any, Any, Any]:
    """What two completions begin with in common is their prompt, as `extract_prompt` of TRL has it."""
    texts = [columns.get(template_fields(t)[0]) for t in (config.chosen_template, config.rejected_template)]
    if config.apply_chat_template and all(isinstance(text, str) for text in texts):
        raise _missing(columns, "prompt")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise BadRow("wrong_type", "one completion is a string and the other a list of messages")
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1  # the space belongs to the word after it
    if same == 0:
        raise BadRow("missing_field", '"prompt" is missing, and the two completions have no beginning in common')
    if same == len(chosen) or same == len(rejected):
        raise BadRow("empty", "one completion is the beginning of the other, so it answers nothing")
    return chosen[:same], chosen[same:], rejected[same:]


def _question(config: Config, columns: dict[str, Any]) -> Question:
    if _uses_messages(config, columns) and columns.get(config.messages_field) is not None:
        prompt: str | list[Message] = check_messages(columns[config.messages_field], config.messages_field)
    else:
        prompt = _turns(config, fill(config.prompt_template, columns), config.prompt_template, "user")
    if isinstance(prompt, list):
        prompt = _with_system(config, prompt)
        if prompt[-1]["role"] == "assistant":
            raise BadRow("wrong_type", "a prompt ends with the assistant's own turn; leave its answer out")
    rest = {name: value for name, value in columns.items() if name not in (*_NOT_COLUMNS, config.messages_field)}
    for name, value in rest.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadRow("wrong_type", f'"{name}" cannot go to a reward, for it is not plain JSON: {error}') from None
        for text in all_strings(value):
            clean_text(text)
    return Question(prompt, rest, tools=_tools(columns))


def _uses_messages(config: Config, columns: dict[str, Any]) -> bool:
    """Whether the row is taken as `messages`: unless the recipe names a prompt, or the row has nothing but a prompt."""
    if config.prompt_template != "{prompt}":
        return False
    return columns.get(config.messages_field) is not None or columns.get("prompt") is None


def _present(columns: dict[str, Any], name: str) -> Any:
    if columns.get(name) is None:
        raise _missing(columns, name)
    return columns[name]


def _missing(columns: dict[str, Any], name: str) -> BadRow:
    if name in columns:
        return BadRow("missing_field", f'"{name}" is null')
    there = ", ".join(f'"{column}"' for column in list(columns)[:_SHOWN_COLUMNS])
    more = ", ..." if len(columns) > _SHOWN_COLUMNS else ""
    return BadRow("missing_field", f'"{name}" is missing; the row has ' + (f"{there}{more}" or "no columns"))


def _turns(config: Config, value: Any, template: str, role: str) -> str | list[Message]:
    """A string or messages; a string becomes one turn where the chat template is applied to strings."""
    if isinstance(value, list):
        return check_messages(value, template_fields(template)[0])
    text = _string(value, template)
    return [{"role": role, "content": text}] if config.apply_chat_template else text


def _as_messages(value: str | list[Message], role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _with_system(config: Config, messages: list[Message]) -> list[Message]:
    if config.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _string(value: Any, template: str) -> str:
    name = " ".join(template_fields(template))
    if not isinstance(value, str):
        raise BadRow("wrong_type", f'"{name}" must be a string, not {type(value).__name__}')
    if not value.strip():
        raise BadRow("empty", f'"{name}" is empty')
    return clean_text(value)


def _tools(columns: dict[str, Any]) -> list[Any] | None:
    """The tools of a chat. A string is JSON: so they are kept in tables, whose columns have one type."""
    tools = columns.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise BadRow("wrong_type", f'"tools" is a string that is not JSON: {error}') from None
    if tools is not None and not isinstance(tools, list):
        raise BadRow("wrong_type", f'"tools" must be a list of JSON schemas, not {type(tools).__name__}')
    return tools or None


def _hash(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)  # Parquet has dates
    return hashlib.sha256(text.encode()).digest()
