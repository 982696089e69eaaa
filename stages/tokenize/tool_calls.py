"""The arguments of a call of a tool, in the form that a chat template writes as JSON.

OpenAI's messages have them as a string of JSON, transformers' as an object. Most templates take an object; given a
string, some write it as a string in a string, with every quote escaped. A few take a string; given an object, those
fail, or write what Python calls it. What a template takes is found by trying.

Invariant: arguments are rendered alike in either form (a template that takes strings gets those of the data as they
are).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from stages.tokenize.readers import BadRow

Form = Literal["object", "string"]

_ARGUMENTS = {"qz": "qz"}
_CALL = {"id": "callqz001", "type": "function"}  # of nine characters, as some templates want it


def form_taken(render: Callable[[list[dict[str, Any]]], str]) -> Form | None:
    """The form of arguments that a template writes as they are; None where it takes no calls, or not such short chats.

    Args:
        render: renders messages; it raises `BadRow` for those that the template does not take.
    """
    forms: tuple[tuple[Form, Any, str], ...] = (
        ("object", _ARGUMENTS, repr(_ARGUMENTS)),
        ("string", json.dumps(_ARGUMENTS), json.dumps(json.dumps(_ARGUMENTS))),
    )
    for form, arguments, wrong in forms:
        call = _CALL | {"function": {"name": "qz", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            text = render([{"role": "user", "content": "q"}, answer])
        except BadRow:
            continue
        if wrong not in text:
            return form
    return None


def in_form(messages: list[dict[str, Any]], form: Form | None) -> list[dict[str, Any]]:
    """`messages` with the arguments of all calls in this form; themselves where they are.

    Raises:
        BadRow: arguments are to become an object, and are a string that is none.
    """
    if form is None or not any(message.get("tool_calls") for message in messages):
        return messages
    return [_message(message, form, number) for number, message in enumerate(messages, 1)]


def _message(message: dict[str, Any], form: Form, number: int) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_call(call, form, number) for call in calls]}


def _call(call: Any, form: Form, number: int) -> Any:
    """A call with its arguments in this form; they stand in it, or in its `function`."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _call(call["function"], form, number)}
    arguments = call.get("arguments")
    if form == "object" and isinstance(arguments, str):
        return call | {"arguments": _object(arguments, number)}
    if form == "string" and isinstance(arguments, dict):
        return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    return call


def _object(text: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise BadRow(
            "wrong_type", f"message {number} calls a tool with arguments that are a string and not JSON: {error}"
        ) from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise BadRow(
            "wrong_type", f"message {number} calls a tool with arguments that are no JSON object, but a {kind}"
        )
    return value
