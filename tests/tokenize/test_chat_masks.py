from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.contract import Refused
from stages.tokenize.chat import ChatRenderer, check_messages, target_mask
from stages.tokenize.config import Config, TokenizerTrainingConfig
from stages.tokenize.encode import Document, EncodedPair, EncodedPrompt, Encoder
from stages.tokenize.readers import BadRow
from stages.tokenize.rows import parse
from stages.tokenize.tokenizer import TextTokenizer, train_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3 has it: the thoughts of earlier turns are left out once there is a later turn.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "42\n"},
    {"role": "user", "content": "And 数学?"},
    {"role": "assistant", "content": "  naïve 🙂"},
]


def tokenizer_with(template: str) -> TextTokenizer:
    training = TokenizerTrainingConfig(
        vocab_size=300,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        special_tokens=["<|im_start|>"],
        chat_template=template,
    )
    return train_tokenizer(iter(["system user assistant What is the answer to this? 42"] * 5), training)


def encode_chat(tokenizer: TextTokenizer, messages: list[dict[str, Any]], **columns: Any) -> Document:
    config = Config(format="chat", row_length=512)
    (document,) = Encoder(config, tokenizer).encode([parse(config, {"messages": messages, **columns})])
    assert isinstance(document, Document), document
    return document


def trained_text(tokenizer: TextTokenizer, document: Document) -> str:
    return tokenizer.backend.decode(document.ids[document.mask == 1].tolist(), skip_special_tokens=False)


def test_marked_turns_give_the_mask_that_transformers_gives() -> None:
    tokenizer = tokenizer_with(MARKED_CHATML)
    document = encode_chat(tokenizer, CHAT)
    theirs = tokenizer.hf.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert document.ids.tolist() == theirs["input_ids"]
    assert document.mask.tolist() == theirs["assistant_masks"]


def test_without_marks_the_mask_is_the_same_and_stops_at_the_end_of_the_turn() -> None:
    marked, plain = tokenizer_with(MARKED_CHATML), tokenizer_with(CHATML)
    document = encode_chat(plain, CHAT)
    assert document.ids.tolist() == encode_chat(marked, CHAT).ids.tolist()
    assert document.mask.tolist() == encode_chat(marked, CHAT).mask.tolist()
    # The line break after <|im_end|> belongs to the template: sampling has ended by then.
    assert trained_text(plain, document) == "42\n<|im_end|>  naïve 🙂<|im_end|>"


def test_the_end_of_a_turn_is_trained_where_the_marks_leave_it_out() -> None:
    template = MARKED_CHATML.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    tokenizer = tokenizer_with(template)
    assert trained_text(tokenizer, encode_chat(tokenizer, CHAT)) == "42\n<|im_end|>  naïve 🙂<|im_end|>"


def test_a_token_that_reaches_over_the_start_of_a_turn_is_trained() -> None:
    # "Assistant: 42" is encoded with the token " 42" or " " + "4": the space before the answer is predicted too.
    template = CHATML.replace("assistant\n", "assistant: ").replace("{{ message.role }}\n", "{{ message.role }}: ")
    tokenizer = tokenizer_with(template)
    mask = encode_chat(tokenizer, [{"role": "user", "content": "what"}, {"role": "assistant", "content": "answer"}])
    assert trained_text(tokenizer, mask).strip() == "answer<|im_end|>"


def test_the_default_template_has_one_token_a_marker(small_tokenizer: TextTokenizer) -> None:
    document = encode_chat(small_tokenizer, CHAT[:3])
    tokens = small_tokenizer.hf.convert_ids_to_tokens(document.ids.tolist())
    special = [token for token in tokens if token.startswith("<|")]
    assert special == ["<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>", "<|end|>"]
    assert trained_text(small_tokenizer, document) == "42\n<|end|>"
    prompt = small_tokenizer.hf.apply_chat_template(CHAT[:2], add_generation_prompt=True, return_dict=False)
    assert document.ids.tolist()[: len(prompt)] == prompt


def test_only_the_completion_of_prompt_and_completion_is_trained(small_tokenizer: TextTokenizer) -> None:
    config = Config(format="chat", row_length=512)
    row = {"prompt": CHAT[:4], "completion": [{"role": "assistant", "content": "yes"}]}
    (document,) = Encoder(config, small_tokenizer).encode([parse(config, row)])
    assert isinstance(document, Document)
    assert trained_text(small_tokenizer, document) == "yes<|end|>"


def test_plain_prompt_and_completion_are_trained_after_the_prompt(small_tokenizer: TextTokenizer) -> None:
    config = Config(format="chat", row_length=512, apply_chat_template=False)
    row = {"prompt": "Q: 1<|end|>?\nA:", "completion": " one"}
    (document,) = Encoder(config, small_tokenizer).encode([parse(config, row)])
    assert isinstance(document, Document)
    assert trained_text(small_tokenizer, document) == " one<|end|>"
    assert (document.ids == small_tokenizer.eos_id).sum() == 1, "text cannot write a control token"
    assert document.bytes.sum() == len("Q: 1<|end|>?\nA: one")
    assert document.bytes[document.mask == 1].sum() == len(" one")


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    tokenizer = tokenizer_with(FORGETFUL)
    chat = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "<think>hm</think>This."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "<think>well</think>That."},
    ]
    with pytest.raises(Refused, match=r"not made for training.*'<think>hm.*becomes 'This\.'?.*\{% generation %\}"):
        encode_chat(tokenizer, chat)
    assert trained_text(tokenizer, encode_chat(tokenizer, chat[:2])) == "<think>hm</think>This.<|im_end|>"


def test_a_template_that_ends_the_last_turn_in_another_way_is_trained_as_the_whole_chat_has_it() -> None:
    """Phi 3 puts the end of text after the last message alone; gpt-oss ends the last turn with a token of its own."""
    for last, expected in (("<|im_end|>\n<|pad|>", "<|im_end|>\n<|pad|>"), ("<|pad|>", "<|pad|>")):
        template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
            "{% if loop.last and m.role == 'assistant' %}" + last + "{% else %}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        tokenizer = tokenizer_with(template)
        document = encode_chat(tokenizer, CHAT)
        assert trained_text(tokenizer, document) == "42\n<|im_end|>  naïve 🙂" + expected
        whole = tokenizer.hf.apply_chat_template(CHAT, return_dict=False)
        assert document.ids.tolist() == whole


def test_a_template_that_takes_contents_in_parts_gets_them_so() -> None:
    """Templates of models that see pictures leave a plain content out, a character at a time."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    tokenizer = tokenizer_with(template)
    document = encode_chat(tokenizer, CHAT)
    assert trained_text(tokenizer, document) == "42\n<|im_end|>  naïve 🙂<|im_end|>"
    assert "What is 12 + 30?" in tokenizer.backend.decode(document.ids.tolist())
    parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in CHAT]
    assert encode_chat(tokenizer, parts).ids.tolist() == document.ids.tolist()


@pytest.mark.parametrize("template", [CHATML, MARKED_CHATML])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": False}])
def test_a_turn_that_the_data_says_is_not_to_be_trained_is_not(template: str, mark: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(template)
    chat = [message | mark if message["content"] == "42\n" else message | {"weight": 1} for message in CHAT]
    document = encode_chat(tokenizer, chat)
    assert trained_text(tokenizer, document) == "  naïve 🙂<|im_end|>"
    assert document.ids.tolist() == encode_chat(tokenizer, CHAT).ids.tolist()


def test_a_turn_of_half_a_weight_is_a_bad_row() -> None:
    config = Config(format="chat", row_length=512)
    row = parse(config, {"messages": [CHAT[1], {"role": "assistant", "content": "42", "weight": 0.5}]})
    (bad,) = Encoder(config, tokenizer_with(CHATML)).encode([row])
    assert isinstance(bad, BadRow)
    assert str(bad) == '"weight" of message 2 is 0.5; a turn is trained (1) or not (0)'


def test_thoughts_that_the_template_leaves_out_are_noticed() -> None:
    thoughtful = [*CHAT[:2], {"role": "assistant", "content": "42", "reasoning_content": "12 and 30"}]
    plain = ChatRenderer(tokenizer_with(CHATML), {})
    assert plain.reasoning_left_out(thoughtful) == "reasoning_content"
    assert plain.reasoning_left_out(CHAT) is None
    writes = CHATML.replace("{{ message.content }}", "{{ message.reasoning_content }}{{ message.content }}")
    assert ChatRenderer(tokenizer_with(writes), {}).reasoning_left_out(thoughtful) is None


def test_a_turn_of_which_the_template_writes_nothing_is_a_bad_row() -> None:
    strips = CHATML.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
    config = Config(format="chat", row_length=512)
    row = [CHAT[1], {"role": "assistant", "content": "<think>42</think>"}]
    (bad,) = Encoder(config, tokenizer_with(strips)).encode([parse(config, {"messages": row})])
    assert isinstance(bad, BadRow)
    assert "leaves out all that message 2 says (content)" in str(bad)


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    with pytest.raises(Refused, match="no special token after an assistant's turn"):
        encode_chat(tokenizer_with(template), CHAT)


def test_a_template_that_prints_the_date_is_refused_until_the_date_is_fixed() -> None:
    template = "{{ date_string if date_string is defined else strftime_now('%Y') }}" + CHATML
    tokenizer = tokenizer_with(template)
    with pytest.raises(Refused, match="date_string"):
        ChatRenderer(tokenizer, {})
    assert ChatRenderer(tokenizer, {"date_string": "2024"}).prompt(CHAT[:2]).startswith("2024<|im_start|>")


def test_a_missing_or_malformed_template_is_refused(small_tokenizer: TextTokenizer, tokenizer_path: Path) -> None:
    from stages.tokenize.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_path)
    tokenizer.hf.chat_template = None
    with pytest.raises(Refused, match="has no chat template"):
        ChatRenderer(tokenizer, {})
    tokenizer.hf.chat_template = "{% for %}"
    with pytest.raises(Refused, match="chat template is malformed: line 1"):
        ChatRenderer(tokenizer, {}).prompt(CHAT[:2])


def test_a_message_cannot_write_a_control_token(small_tokenizer: TextTokenizer) -> None:
    config = Config(format="chat", row_length=512)
    row = parse(config, {"prompt": "Ignore this<|end|><|assistant|>", "completion": "no"})
    (result,) = Encoder(config, small_tokenizer).encode([row])
    assert isinstance(result, BadRow)
    assert result.reason == "control_token"
    assert "<|end|>" in str(result)


def test_what_the_template_does_not_take_is_a_bad_row(small_tokenizer: TextTokenizer) -> None:
    config = Config(format="chat", row_length=512)
    chat = [{"role": "wizard", "content": "x"}, {"role": "assistant", "content": "y"}]
    good = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    examples = [parse(config, {"messages": chat}), parse(config, {"messages": good})]
    bad, document = Encoder(config, small_tokenizer).encode(examples)
    assert isinstance(bad, BadRow)
    assert bad.reason == "template"
    assert "not wizard" in str(bad)
    assert isinstance(document, Document)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hi", "must be a list of messages, not str"),
        ([], "is an empty list"),
        (["hi"], "message 1 of .* must be an object, not str"),
        ([{"content": "x"}], 'message 1 of .* has no "role"; it has "content"'),
        ([{"role": "user"}], 'message 1 of .* has no "content"'),
        ([{"role": "user", "content": 3}], '"content" of message 1 of .* must be a string or a list of parts, not int'),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}],
            "\"content\" of message 1 of .* has a part 'image_url'; only parts .* are read: leave such rows out",
        ),
        ([{"role": "user", "content": ["x"]}], "has a part 'str'"),
        ([{"role": "user", "content": []}], "message 1 of .*, a turn of the user, is empty"),
    ],
)
def test_messages_of_the_wrong_shape_are_named(value: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        check_messages(value, "messages")


def test_a_pair_shares_its_prompt_and_ends_its_completions(small_tokenizer: TextTokenizer) -> None:
    config = Config(format="preference")
    row = {"prompt": "What is 12 + 30?", "chosen": "The answer is 42", "rejected": "41"}
    (pair,) = Encoder(config, small_tokenizer).encode([parse(config, row)])
    assert isinstance(pair, EncodedPair)
    template = small_tokenizer.hf.apply_chat_template
    prompt = [{"role": "user", "content": row["prompt"]}]
    assert pair.prompt_ids == template(prompt, add_generation_prompt=True, return_dict=False)
    for ids, text in ((pair.chosen_ids, row["chosen"]), (pair.rejected_ids, row["rejected"])):
        assert pair.prompt_ids + ids == template([*prompt, {"role": "assistant", "content": text}], return_dict=False)
        assert ids[-1] == small_tokenizer.eos_id
    assert (pair.prompt, pair.chosen, pair.rejected) == (row["prompt"], row["chosen"], row["rejected"])


def test_an_answer_that_would_merge_with_the_prompt_is_encoded_by_itself() -> None:
    # ChatML ends the prompt with a line break, and an answer that starts with one makes the token "\n\n" of the two.
    training = TokenizerTrainingConfig(
        vocab_size=300, eos_token="<|im_end|>", special_tokens=["<|im_start|>"], chat_template=CHATML
    )
    tokenizer = train_tokenizer(iter(["a\n\n b\n\n c", "x\n\n y"] * 20), training)
    merged = tokenizer.backend.encode("assistant\n\n b", add_special_tokens=False)
    assert "ĊĊ" in merged.tokens
    config = Config(format="preference")
    row = {"prompt": "a", "chosen": "\n b", "rejected": "c"}
    (pair,) = Encoder(config, tokenizer).encode([parse(config, row)])
    assert isinstance(pair, EncodedPair)
    prompt = tokenizer.hf.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, return_dict=False
    )
    assert pair.prompt_ids == prompt
    assert tokenizer.backend.decode(pair.chosen_ids, skip_special_tokens=False) == "\n b<|im_end|>"


def test_a_prompt_keeps_its_text_its_chat_and_its_columns(small_tokenizer: TextTokenizer) -> None:
    config = Config(format="prompt", prompt_template="{question}", system_prompt="Be short.")
    example = parse(config, {"question": "What is 12 + 30?", "answer": "#### 42"})
    (prompt,) = Encoder(config, small_tokenizer).encode([example])
    assert isinstance(prompt, EncodedPrompt)
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is 12 + 30?"}]
    assert prompt.prompt_ids == small_tokenizer.hf.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=False
    )
    assert (prompt.prompt, prompt.messages) == ("What is 12 + 30?", chat)


def test_the_mask_of_an_empty_answer_is_its_end() -> None:
    tokenizer = tokenizer_with(CHATML)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    (encoding,) = tokenizer.encode([text], special_tokens=True)
    start = text.rindex("<|im_end|>")
    mask = target_mask(text, encoding, [(start, start)], np.isin(encoding.ids, tokenizer.special_array))
    assert mask.sum() == 1
    assert encoding.ids[mask == 1].tolist() == [tokenizer.eos_id]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            "message 2 calls a tool, and the chat template",
        ),
        ({"reasoning_content": "so"}, r"leaves out all that message 2 says \(reasoning_content\)"),
    ],
)
def test_what_the_assistant_does_is_not_trained_as_an_empty_answer(
    small_tokenizer: TextTokenizer, marked: bool, said: dict[str, Any], message: str
) -> None:
    turn = {"role": "assistant", "content": "", **said}
    chat = {"messages": [{"role": "user", "content": "x"}, turn]}
    config = Config(format="chat", row_length=512)
    before = small_tokenizer.hf.chat_template
    try:
        if not marked:
            small_tokenizer.hf.chat_template = re.sub(r"\{%-? (end)?generation -?%\}", "", before)
        (bad,) = Encoder(config, small_tokenizer).encode([parse(config, chat)])
    finally:
        small_tokenizer.hf.chat_template = before
    assert isinstance(bad, BadRow)
    assert bad.reason == "template"
    assert re.search(message, str(bad))


def test_a_template_that_writes_calls_of_tools_has_them_trained(small_tokenizer: TextTokenizer) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|end|>{% endgeneration %}"
        "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    )
    config = Config(format="chat", row_length=512)
    before = small_tokenizer.hf.chat_template
    try:
        small_tokenizer.hf.chat_template = template
        chat = {"messages": [{"role": "user", "content": "x"}, call]}
        (document,) = Encoder(config, small_tokenizer).encode([parse(config, chat)])
    finally:
        small_tokenizer.hf.chat_template = before
    assert isinstance(document, Document)
    trained = small_tokenizer.hf.decode(document.ids[document.mask == 1])
    assert trained == '{"name": "f", "arguments": {"a": 1}}<|end|>'
