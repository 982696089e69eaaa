from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from pydantic import ValidationError

from stages.tokenize.config import Config
from stages.tokenize.readers import BadRow
from stages.tokenize.rows import Chat, Completion, Pair, Question, Text, fill, key, parse, split_key

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
EMPTY = {"role": "assistant", "content": ""}
OTHER = {"role": "assistant", "content": "b"}


def config(format: str, **settings: Any) -> Config:
    return Config.model_validate({"format": format, "row_length": 64, **settings})


def test_templates_rename_and_join_columns() -> None:
    assert fill("{question}", {"question": [USER]}) == [USER]
    assert fill("Q: {q} ({n} {{points}})", {"q": "why", "n": 3}) == "Q: why (3 {points})"
    text = parse(config("text", text_template="{title}\n{body}"), {"title": "A", "body": "b", "more": 1})
    assert text == Text("A\nb")


@pytest.mark.parametrize("template", ["{}", "{a.b}", "{a[0]}", "{a!r}", "{a:>3}", "{0}", "{", "plain", "{a} {"])
def test_templates_hold_plain_column_names_only(template: str) -> None:
    with pytest.raises(ValidationError, match="text_template"):
        config("text", text_template=template)


def test_a_chat_is_messages_or_prompt_and_completion() -> None:
    assert parse(config("chat"), {"messages": [USER, ANSWER]}) == Chat([USER, ANSWER])
    split = Chat([USER, ANSWER], first_trained=1)
    assert parse(config("chat"), {"prompt": "q", "completion": "a"}) == split
    assert parse(config("chat"), {"prompt": [USER], "completion": [ANSWER]}) == split
    gsm = config("chat", prompt_template="{question}", completion_template="{answer}")
    assert parse(gsm, {"question": "q", "answer": "a"}) == split
    plain = config("chat", apply_chat_template=False)
    assert parse(plain, {"prompt": "q", "completion": "a"}) == Completion("q", "a")


def test_a_system_prompt_is_put_before_chats_that_have_none() -> None:
    system = {"role": "system", "content": "Be short."}
    settings = config("chat", system_prompt="Be short.")
    assert parse(settings, {"messages": [USER, ANSWER]}) == Chat([system, USER, ANSWER])
    own = {"role": "system", "content": "Be long."}
    assert parse(settings, {"messages": [own, USER, ANSWER]}) == Chat([own, USER, ANSWER])
    assert parse(settings, {"prompt": "q", "completion": "a"}) == Chat([system, USER, ANSWER], first_trained=2)


def test_a_pair_has_an_explicit_or_an_implicit_prompt() -> None:
    pair = Pair([USER], [ANSWER], [OTHER])
    assert parse(config("preference"), {"prompt": "q", "chosen": "a", "rejected": "b"}) == pair
    assert parse(config("preference"), {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}) == pair
    assert parse(config("preference"), {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}) == pair
    # The example of TRL's documentation of extract_prompt for the standard format.
    texts = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    plain = config("preference", apply_chat_template=False)
    assert parse(plain, texts) == Pair("The sky is", " blue.", " green.")


def test_a_prompt_keeps_the_other_columns() -> None:
    row = {"prompt": "q", "answer": "4", "level": 2, "completion": "x", "tags": None}
    assert parse(config("prompt"), row) == Question([USER], {"answer": "4", "level": 2, "tags": None})
    gsm = parse(config("prompt", prompt_template="{question}"), {"question": "q", "answer": "#### 4"})
    assert gsm == Question([USER], {"question": "q", "answer": "#### 4"})
    assert parse(config("prompt"), {"messages": [USER], "answer": "4"}) == Question([USER], {"answer": "4"})
    assert parse(config("prompt", apply_chat_template=False), {"prompt": "q"}) == Question("q", {})


@pytest.mark.parametrize(
    ("format", "row", "reason", "message"),
    [
        ("text", {}, "missing_field", '"text" is missing'),
        ("text", {"text": None}, "missing_field", '"text" is null'),
        ("text", {"body": "a", "id": 3}, "missing_field", '"text" is missing; the row has "body", "id"'),
        ("text", {"text": 3}, "wrong_type", '"text" must be a string, not int'),
        ("text", {"text": " \n"}, "empty", '"text" is empty'),
        ("text", {"text": "a\0"}, "nul", "NUL"),
        ("text", {"text": "\udc00"}, "lone_surrogate", "surrogate"),
        ("chat", {}, "missing_field", '"messages" is missing'),
        ("chat", {"prompt": "q"}, "missing_field", '"completion" is missing'),
        ("chat", {"messages": [USER]}, "no_target", "no turn of the assistant"),
        ("chat", {"prompt": "q", "completion": " "}, "empty", '"completion" is empty'),
        ("chat", {"messages": [USER, EMPTY]}, "empty", 'message 2 of "messages", a turn of the assistant, is empty'),
        ("chat", {"messages": [USER, EMPTY, USER, ANSWER]}, "empty", "message 2"),
        ("chat", {"prompt": [USER], "completion": [EMPTY]}, "empty", 'message 1 of "completion"'),
        ("chat", {"messages": [{"role": "user", "content": "\n"}, ANSWER]}, "empty", "message 1 .* turn of the user"),
        ("preference", {"prompt": [USER], "chosen": [ANSWER], "rejected": [EMPTY]}, "empty", 'of "rejected"'),
        ("chat", {"messages": {"role": "user"}}, "wrong_type", "must be a list of messages, not dict"),
        ("preference", {"prompt": "q", "chosen": "a"}, "missing_field", '"rejected" is missing'),
        ("preference", {"chosen": "a", "rejected": "b"}, "missing_field", '"prompt" is missing'),
        ("preference", {"prompt": "q", "chosen": "a", "rejected": "a"}, "equal_completions", "are equal"),
        ("preference", {"chosen": [ANSWER], "rejected": [OTHER]}, "missing_field", "no beginning in common"),
        ("preference", {"chosen": [USER, ANSWER], "rejected": [USER]}, "empty", "answers nothing"),
        ("preference", {"prompt": "q", "chosen": [USER], "rejected": "b"}, "wrong_type", "starts with a turn of user"),
        ("chat", {"messages": [USER, ANSWER], "tools": "{}"}, "wrong_type", '"tools" must be a list .* not dict'),
        ("chat", {"messages": [USER, ANSWER], "tools": "[{"}, "wrong_type", '"tools" is a string that is not JSON'),
        ("prompt", {"question": "q"}, "missing_field", '"prompt" is missing'),
        ("prompt", {"prompt": [USER, ANSWER]}, "wrong_type", "ends with the assistant's own turn"),
        ("prompt", {"prompt": "q", "when": datetime.date(2024, 1, 1)}, "wrong_type", '"when" cannot go to a reward'),
        ("prompt", {"prompt": "q", "score": float("nan")}, "wrong_type", '"score" cannot go to a reward'),
        ("prompt", {"prompt": "q", "hint": ["\ud800"]}, "lone_surrogate", "surrogate"),
    ],
)
def test_a_row_that_does_not_fit_names_its_field(format: str, row: dict[str, Any], reason: str, message: str) -> None:
    with pytest.raises(BadRow, match=message) as caught:
        parse(config(format), row)
    assert caught.value.reason == reason


def test_a_turn_that_calls_a_tool_or_is_no_speakers_may_have_no_text() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [{"role": "system", "content": ""}, USER, call, {"role": "tool", "content": ""}, ANSWER]
    assert parse(config("chat"), {"messages": messages}) == Chat(messages)


def test_tools_may_be_a_string_of_json_as_tables_keep_them() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    messages = [USER, ANSWER]
    assert parse(config("chat"), {"messages": messages, "tools": json.dumps([tool])}) == Chat(messages, tools=[tool])
    assert parse(config("chat"), {"messages": messages, "tools": ""}) == Chat(messages)


def test_messages_of_sharegpt_are_read() -> None:
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": USER["content"], "value2": None},
        {"from": "gpt", "value": ANSWER["content"], "weight": 1},
    ]
    chat = parse(config("chat", messages_field="conversations"), {"conversations": turns})
    assert chat == Chat([{"role": "system", "content": "s"}, USER, ANSWER | {"weight": 1}])


def test_contents_in_parts_of_text_are_their_text() -> None:
    halves = [{"type": "text", "text": USER["content"][:2]}, {"type": "text", "text": USER["content"][2:]}]
    answer = [{"type": "text", "text": ANSWER["content"], "image_url": None}]  # None: as Parquet fills it in
    messages = [{"role": "user", "content": halves}, {"role": "assistant", "content": answer}]
    assert parse(config("chat"), {"messages": messages}) == Chat([USER, ANSWER])


def test_joining_needs_text_or_numbers() -> None:
    with pytest.raises(BadRow, match=r'"b" must be text or a number .* not list'):
        fill("{a} {b}", {"a": "x", "b": []})


def test_equal_examples_have_equal_keys_and_pairs_of_a_prompt_share_their_split() -> None:
    settings = config("preference")
    one = parse(settings, {"prompt": "q", "chosen": "a", "rejected": "b"})
    same = parse(settings, {"rejected": "b", "chosen": "a", "prompt": "q", "more": 1})
    other = parse(settings, {"prompt": "q", "chosen": "b", "rejected": "a"})
    assert key(one) == key(same) != key(other)
    assert split_key(one) == split_key(other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "text"}, "format text needs row_length"),
        (
            {"format": "chat", "row_length": 8, "on_long_rows": "split"},
            "split does not suit chat; it takes refuse, drop, truncate",
        ),
        (
            {"format": "prompt", "on_long_rows": "truncate"},
            "truncate does not suit prompt; it takes refuse, drop",
        ),
        ({"format": "prompt", "pack": False}, "prompt rows are never packed"),
        ({"format": "chat", "row_length": 8, "train_tokenizer": {}}, "train_tokenizer needs format text"),
        ({"format": "text", "row_length": 8, "train_tokenizer": {"vocab_size": 260}}, "vocab_size 260 is too small"),
        (
            {"format": "text", "row_length": 8, "train_tokenizer": {"special_tokens": ["<|end|>"]}},
            "special tokens must differ",
        ),
        ({"format": "text", "row_length": 8, "reader": "no colon"}, "not of the form module:function"),
        ({"format": "text", "row_length": 8, "generators": [{"function": "a:b", "arguments": {"x": {1}}}]}, "JSON"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate(settings)


def test_user_code_of_the_settings_joins_the_fingerprint() -> None:
    settings = config(
        "text", reader="my.readers:read", generators=[{"function": "my.generators:make", "arguments": {"count": 1}}]
    )
    assert settings.user_code() == ["my.generators:make", "my.readers:read"]
    assert settings.identity()["generators"][0]["arguments"] == {"count": 1}


def test_a_chat_begins_as_its_template_says() -> None:
    for format in ("chat", "prompt", "preference"):
        with pytest.raises(
            ValidationError, match="add_bos_token is for plain text; a chat begins as its template says"
        ):
            config(format, add_bos_token=True)
        assert config(format, add_bos_token=True, apply_chat_template=False).add_bos_token
        assert config(format, add_bos_token=False).add_bos_token is False
    assert config("text", add_bos_token=True).add_bos_token


def test_a_prompt_beside_whole_chats_is_theirs() -> None:
    """As UltraFeedback has it: the question as a string, and both chats from their beginning."""
    row = {"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    assert parse(config("preference"), row) == Pair([USER], [ANSWER], [OTHER])
    with pytest.raises(BadRow, match='"prompt" is not what the two chats have last in common'):
        parse(config("preference"), row | {"prompt": "another"})


def test_a_chat_without_the_assistant_names_the_roles_it_has() -> None:
    with pytest.raises(BadRow, match='"messages" holds no turn of the assistant; its roles are user, bot'):
        parse(config("chat"), {"messages": [USER, {"role": "bot", "content": "a"}, USER]})
