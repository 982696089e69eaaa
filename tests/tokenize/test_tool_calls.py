"""A call of a tool is trained as the template means it, in whatever form the data has its arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stages.tokenize.config import Config, TokenizerTrainingConfig
from stages.tokenize.encode import Document, Encoder
from stages.tokenize.readers import BadRow
from stages.tokenize.rows import parse
from stages.tokenize.tokenizer import train_tokenizer

OBJECT = {"city": "Zürich", "days": 2}


def template(arguments: str) -> str:
    """A template that writes the arguments of a call `c` as this expression or these statements say."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}"
        "{% for c in m.tool_calls %}{% set c = c.function or c %}{{ c.name }} " + arguments + "{% endfor %}<|end|>"
        "{% endgeneration %}{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    )


TO_JSON = "{{ c.arguments | tojson }}"
EITHER = "{% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}"
IN_BRACES = (
    "{% if c.arguments is string %}{ {{- c.arguments -}} }{% else %}"
    '{{ "{" }}{% for k, v in c.arguments | items %}{{ k | tojson }}: {{ v | tojson }}'
    '{% if not loop.last %}, {% endif %}{% endfor %}{{ "}" }}{% endif %}'
)
PARAMETERS = "{% for k, v in c.arguments | items %}{{ k | tojson }}: {{ v | tojson }};{% endfor %}"
STRING = "{{ c.arguments }}"
JOINED = "{{ '' + c.arguments }}"


def trained(chat_template: str, arguments: Any, *, wrapped: bool = True) -> str | BadRow:
    training = TokenizerTrainingConfig(vocab_size=300, chat_template=chat_template)
    tokenizer = train_tokenizer(iter(["user assistant"]), training)
    call = {"name": "f", "arguments": arguments}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": call} if wrapped else call]}
    config = Config(format="chat", row_length=512)
    row = parse(config, {"messages": [{"role": "user", "content": "q"}, answer]})
    (document,) = Encoder(config, tokenizer).encode([row])
    if isinstance(document, BadRow):
        return document
    assert isinstance(document, Document)
    return tokenizer.backend.decode(document.ids[document.mask == 1].tolist(), skip_special_tokens=True)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("chat_template", [TO_JSON, EITHER, IN_BRACES, STRING, JOINED])
def test_a_string_of_json_and_an_object_are_trained_alike(chat_template: str, wrapped: bool) -> None:
    for arguments in (OBJECT, json.dumps(OBJECT, ensure_ascii=False)):
        assert trained(template(chat_template), arguments, wrapped=wrapped) == 'f {"city": "Zürich", "days": 2}'


def test_a_template_may_write_arguments_in_a_way_of_its_own() -> None:
    for arguments in (OBJECT, json.dumps(OBJECT)):
        assert trained(template(PARAMETERS), arguments) == 'f "city": "Zürich";"days": 2;'
    assert trained(template(TO_JSON), "") == "f {}"


@pytest.mark.parametrize(
    ("arguments", "why"), [("{city: 1}", "a string and not JSON: "), ("[1]", "no JSON object, but a list")]
)
def test_arguments_that_are_no_object_are_a_bad_row(arguments: str, why: str) -> None:
    bad = trained(template(TO_JSON), arguments)
    assert isinstance(bad, BadRow)
    assert bad.reason == "wrong_type"
    assert f"message 2 calls a tool with arguments that are {why}" in str(bad)
