from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stages.contract import Refused, Stopped
from stages.tokenize.config import Config
from stages.tokenize.dataset import (
    read_info,
    read_packed,
    read_preferences,
    read_prompts,
    tokenizer_folder,
)
from stages.tokenize.rows import Text, split_key
from stages.tokenize.selection import split_of
from stages.tokenize.tokenizer import TextTokenizer, load_tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"
BPE = {"vocab_size": 300}


def json_lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def documents_of(folder: Path, split: str = "train") -> list[list[int]]:
    """The pieces of packed rows, by row and segment."""
    rows = read_packed(folder, split)
    pieces = []
    for ids, segments in zip(rows.input_ids, rows.segment_ids, strict=True):
        pieces += [ids[segments == number].tolist() for number in range(1, segments.max() + 1)]
    return pieces


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


TEXT = [
    {"text": f"Document {number} is about {number * 37 % 11} things — naïve ones. " * (number % 5 + 1)}
    for number in range(40)
]


def test_packed_text_holds_every_document_once_and_counts_its_bytes(tokenize: Any, folder: Any) -> None:
    data = folder({"a.jsonl": json_lines(*TEXT[:25]), "deep/b.jsonl": json_lines(*TEXT[25:])})
    config = {"format": "text", "row_length": 512, "train_tokenizer": BPE}
    result = tokenize(config, data=data)
    tokenizer = load_tokenizer(tokenizer_folder(result.folder))
    pieces = documents_of(result.folder)
    texts = [tokenizer.backend.decode(ids[:-1]) for ids in pieces]
    assert Counter(texts) == Counter(row["text"] for row in TEXT)
    assert all(ids[-1] == tokenizer.eos_id for ids in pieces)

    rows = read_packed(result.folder)
    starts = np.diff(rows.segment_ids, axis=1, prepend=0) > 0
    assert (rows.loss_mask == ((rows.segment_ids > 0) & ~starts)).all(), "all but first tokens of documents are trained"
    assert (rows.input_ids[rows.segment_ids == 0] == tokenizer.pad_id).all()

    info = read_info(result.folder)
    assert (info.holds, info.row_length, info.kept, info.dropped) == ("text", 512, 40, {})
    train = info.splits["train"]
    assert train.tokens == (rows.segment_ids > 0).sum()
    assert train.target_tokens == rows.loss_mask.sum() == train.tokens - 40
    # Without its first token, which is not predicted; decoded bytes are those of the text.
    expected = sum(len(row["text"].encode()) for row in TEXT)
    expected -= sum(len(tokenizer.backend.decode(ids[:1]).encode()) for ids in pieces)
    assert train.bytes == expected
    assert result.metrics["tokens"] == train.tokens


def test_long_documents_are_split_into_pieces_that_join_to_the_document(tokenize: Any, folder: Any) -> None:
    text = " ".join(f"word{number}" for number in range(300))
    config = {"format": "text", "row_length": 64, "train_tokenizer": BPE}
    result = tokenize(config, data=folder({"a.txt": text}))
    tokenizer = load_tokenizer(tokenizer_folder(result.folder))
    pieces = [tokenizer.backend.decode(ids) for ids in documents_of(result.folder)]
    position = 0
    while pieces:
        following = next(piece for piece in pieces if text.startswith(piece, position))
        pieces.remove(following)
        position += len(following)
    assert position == len(text)
    rows = read_packed(result.folder)
    assert rows.loss_mask.any(axis=1).all(), "no row without a target"
    starts = np.diff(rows.segment_ids, axis=1, prepend=0) > 0
    assert starts.sum() > 10
    assert (rows.loss_mask == ((rows.segment_ids > 0) & ~starts)).all(), "a piece starts with nothing to predict from"


def test_the_tokenizer_never_sees_the_validation_split(tokenize: Any, folder: Any) -> None:
    config = {"format": "text", "row_length": 512, "train_tokenizer": {"vocab_size": 600}}

    def tokenizer_file(rows: list[Any], **settings: Any) -> bytes:
        output = tokenize({**config, **settings}, data=folder({"a.jsonl": json_lines(*rows)})).folder
        return (tokenizer_folder(output) / "tokenizer.json").read_bytes()

    settings = Config.model_validate({**config, "validation_fraction": 0.3})
    # Every document has a word of its own, said often enough to become a token.
    letters = str.maketrans("0123456789", "ghijklmnop")
    words = [hashlib.sha256(bytes([number])).hexdigest().translate(letters)[:9] for number in range(40)]
    rows = [{"text": f"{word} {word} {word}"} for word in words]
    train = [row for row in rows if split_of(settings, split_key(Text(row["text"]))) == "train"]
    split = tokenizer_file(rows, validation_fraction=0.3)
    assert split == tokenizer_file(train)
    assert split != tokenizer_file(rows)


def test_the_safetensors_file_is_one_for_the_library_too(tokenize: Any, folder: Any) -> None:
    result = tokenize(
        {"format": "text", "row_length": 32, "train_tokenizer": BPE}, data=folder({"a.jsonl": json_lines(*TEXT)})
    )
    theirs, ours = load_file(result.folder / "train.safetensors"), read_packed(result.folder)
    for name in ("input_ids", "segment_ids", "loss_mask"):
        assert theirs[name].dtype == getattr(ours, name).dtype
        assert np.array_equal(theirs[name], getattr(ours, name))
        assert not getattr(ours, name).flags.writeable


@pytest.mark.parametrize("format", ["text", "chat", "preference", "prompt"])
def test_the_same_input_gives_the_same_bytes(tokenize: Any, folder: Any, tokenizer_path: Path, format: str) -> None:
    rows = [
        {"text": f"t {n}", "prompt": f"q {n}", "completion": f"a {n}", "chosen": f"c {n}", "rejected": f"r {n}"}
        for n in range(30)
    ]
    config = {"format": format, "row_length": 64, "validation_fraction": 0.3, "seed": 3}
    data = folder({"a.jsonl": json_lines(*rows)})
    first = tokenize(config, data=data, tokenizer=tokenizer_path)
    second = tokenize(config, data=data, tokenizer=tokenizer_path)
    assert digest(first.folder) == digest(second.folder)


def test_the_order_of_rows_depends_on_the_seed_and_their_content_does_not(tokenize: Any, folder: Any) -> None:
    data = folder({"a.jsonl": json_lines(*TEXT)})
    one, two = (
        tokenize({"format": "text", "row_length": 64, "train_tokenizer": BPE, "seed": seed}, data=data).folder
        for seed in (1, 2)
    )
    rows = [[row.tobytes() for row in read_packed(path).input_ids] for path in (one, two)]
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1])


def test_without_packing_a_document_has_a_row_of_its_own(tokenize: Any, folder: Any) -> None:
    result = tokenize(
        {"format": "text", "row_length": 256, "pack": False, "train_tokenizer": BPE},
        data=folder({"a.jsonl": json_lines(*TEXT)}),
    )
    assert read_packed(result.folder).segment_ids.max() == 1
    assert read_info(result.folder).splits["train"].rows == 40


def test_a_document_keeps_its_split_when_others_come_and_when_the_seed_changes(tokenize: Any, folder: Any) -> None:
    def validation(rows: list[Any], seed: int) -> set[str]:
        config = {
            "format": "text",
            "row_length": 512,
            "validation_fraction": 0.3,
            "train_tokenizer": BPE,
            "add_eos_token": False,
            "seed": seed,
        }
        output = tokenize(config, data=folder({"a.jsonl": json_lines(*rows)})).folder
        decode = load_tokenizer(tokenizer_folder(output)).backend.decode
        parts = {split: set(map(decode, documents_of(output, split))) for split in ("train", "validation")}
        assert not parts["train"] & parts["validation"]
        assert parts["train"] | parts["validation"] == {row["text"] for row in rows}
        return parts["validation"]

    few, many = validation(TEXT[:20], 0), validation(TEXT, 1)
    assert few == many & {row["text"] for row in TEXT[:20]}
    assert 0.1 < len(many) / 40 < 0.5


def test_exact_duplicates_are_dropped_and_counted(tokenize: Any, folder: Any) -> None:
    data = folder({"a.jsonl": json_lines(*TEXT, *TEXT[:7])})
    config = {"format": "text", "row_length": 256, "train_tokenizer": BPE}
    info = read_info(tokenize(config, data=data).folder)
    assert (info.kept, info.dropped) == (40, {"duplicate": 7})
    assert read_info(tokenize({**config, "deduplicate": False}, data=data).folder).kept == 47


def test_the_first_bad_row_ends_the_step_with_its_line(tokenize: Any, folder: Any) -> None:
    data = folder({"deep/train.jsonl": json_lines(*TEXT[:3]) + "\n" + '{"txt": "a"}\n'})
    expected = r'deep/train\.jsonl line 5: "text" is missing; the row has "txt"\. 3 rows before .* `on_bad_rows: drop`'
    with pytest.raises(Refused, match=expected):
        tokenize({"format": "text", "row_length": 64, "train_tokenizer": BPE}, data=data)


def test_bad_rows_are_dropped_by_reason_where_that_is_asked_for(tokenize: Any, folder: Any) -> None:
    bad = b'{"txt": 1}\n{"text": ""}\n{"text": "\\ud800"}\n{"text": "a\\u0000"}\n[]\n{"text"\n{"text": "\xff"}\n'
    data = folder({"a.jsonl": bad + json_lines(*TEXT).encode(), "empty.jsonl": b""})
    config = {"format": "text", "row_length": 64, "train_tokenizer": BPE, "on_bad_rows": "drop"}
    result = tokenize(config, data=data)
    info = read_info(result.folder)
    assert info.kept == 40
    assert info.dropped == dict.fromkeys(
        ["empty", "empty_file", "lone_surrogate", "missing_field", "not_an_object", "not_json", "not_utf8", "nul"], 1
    )
    assert any('a.jsonl line 1: "text" is missing' in text for text in result.logs("warning"))


def test_nothing_usable_is_refused_with_what_was_dropped(tokenize: Any, folder: Any, tokenizer_path: Path) -> None:
    data = folder({"a.jsonl": '{"x": 1}\n{"x": 2}\n'})
    config = {"format": "text", "row_length": 64, "on_bad_rows": "drop"}
    with pytest.raises(Refused, match=r"no row is left to train on: 2 were read and dropped \(missing_field 2\)"):
        tokenize(config, data=data, tokenizer=tokenizer_path)
    with pytest.raises(Refused, match="there is nothing to read"):
        tokenize(config, tokenizer=tokenizer_path)
    with pytest.raises(Refused, match="no text to train the tokenizer on"):
        tokenize({**config, "train_tokenizer": BPE}, data=data)


def test_an_empty_validation_split_is_refused(tokenize: Any, folder: Any, tokenizer_path: Path) -> None:
    with pytest.raises(Refused, match=r"the validation split is empty: .*raise validation_fraction"):
        tokenize(
            {"format": "text", "row_length": 64, "validation_fraction": 0.001},
            data=folder({"a.jsonl": json_lines(*TEXT)}),
            tokenizer=tokenizer_path,
        )


def test_a_tokenizer_is_given_or_trained_but_not_both(tokenize: Any, folder: Any, tokenizer_path: Path) -> None:
    data = folder({"a.jsonl": json_lines(*TEXT)})
    with pytest.raises(Refused, match="there is no tokenizer"):
        tokenize({"format": "text", "row_length": 64}, data=data)
    with pytest.raises(Refused, match="exclude one another"):
        tokenize({"format": "text", "row_length": 64, "train_tokenizer": BPE}, data=data, tokenizer=tokenizer_path)


def test_the_tokenizer_of_a_dataset_is_taken_over_byte_for_byte(
    tokenize: Any, folder: Any, tokenizer_path: Path
) -> None:
    data = folder({"a.jsonl": json_lines({"prompt": "q", "completion": "a"})})
    first = tokenize({"format": "chat", "row_length": 64}, data=data, tokenizer=tokenizer_path)
    second = tokenize({"format": "chat", "row_length": 64}, data=data, tokenizer=first.folder)
    assert digest(tokenizer_folder(second.folder)) == digest(tokenizer_folder(first.folder)) == digest(tokenizer_path)


@pytest.mark.parametrize(
    ("policy", "kept", "dropped"), [("drop", 1, {"too_long": 1}), ("truncate", 2, {}), ("refuse", None, None)]
)
def test_long_chats_are_handled_as_asked(
    tokenize: Any, folder: Any, tokenizer_path: Path, policy: str, kept: Any, dropped: Any
) -> None:
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a b c d e f g h " * 20}]
    config = {"format": "chat", "row_length": 32, "on_long_rows": policy}
    data = folder({"a.jsonl": json_lines(*rows)})
    if kept is None:
        with pytest.raises(Refused, match=r"a\.jsonl line 2: \d+ tokens, more than row_length 32; .*drop or truncate"):
            tokenize(config, data=data, tokenizer=tokenizer_path)
        return
    info = read_info(tokenize(config, data=data, tokenizer=tokenizer_path).folder)
    assert (info.kept, info.dropped) == (kept, dropped)


def test_chats_without_a_trained_token_are_dropped_even_when_bad_rows_are_refused(
    tokenize: Any, folder: Any, tokenizer_path: Path
) -> None:
    turn = {"role": "user", "content": "q " * 40}
    rows = [
        {"messages": [turn]},
        {"messages": [turn, {"role": "assistant", "content": "a"}]},
        {"prompt": "q", "completion": "a"},
    ]
    config = {"format": "chat", "row_length": 32, "on_long_rows": "truncate"}
    result = tokenize(config, data=folder({"a.jsonl": json_lines(*rows)}), tokenizer=tokenizer_path)
    info = read_info(result.folder)
    assert (info.kept, info.dropped) == (1, {"no_target": 2})
    with pytest.raises(Refused, match=r"no row is left .*no_target 1"):
        tokenize(config, data=folder({"a.jsonl": json_lines(rows[0])}), tokenizer=tokenizer_path)


def test_pairs_and_prompts_are_read_back(
    tokenize: Any, folder: Any, tokenizer_path: Path, small_tokenizer: TextTokenizer
) -> None:
    row = {"prompt": "What is 1 + 2?", "chosen": "3", "rejected": "4", "answer": "3", "level": None}
    data = folder({"a.jsonl": json_lines(row)})
    (pair,) = read_preferences(tokenize({"format": "preference"}, data=data, tokenizer=tokenizer_path).folder)
    assert (pair.prompt, pair.chosen, pair.rejected) == ("What is 1 + 2?", "3", "4")
    assert small_tokenizer.backend.decode(pair.chosen_ids, skip_special_tokens=False) == "3<|end|>"
    result = tokenize({"format": "prompt"}, data=data, tokenizer=tokenizer_path)
    (prompt,) = read_prompts(result.folder)
    assert prompt.prompt_ids == pair.prompt_ids
    assert prompt.columns == {"chosen": "3", "rejected": "4", "answer": "3", "level": None}
    assert prompt.messages == [{"role": "user", "content": "What is 1 + 2?"}]
    assert len(prompt.id) == 16
    with pytest.raises(Refused, match="holds prompt rows where preference rows are needed"):
        read_preferences(result.folder)
    with pytest.raises(Refused, match="has no validation split"):
        read_prompts(result.folder, "validation")


def test_equal_rows_that_are_kept_have_different_ids(tokenize: Any, folder: Any, tokenizer_path: Path) -> None:
    data = folder({"a.jsonl": json_lines({"prompt": "q"}, {"prompt": "q"})})
    result = tokenize({"format": "prompt", "deduplicate": False}, data=data, tokenizer=tokenizer_path)
    first, second = read_prompts(result.folder)
    assert second.id == f"{first.id}-2"


FICKLE = """
import random, time
calls = []
def fixed(seed):
    rng = random.Random(seed)
    for number in range(100):
        yield {"text": f"{number} {rng.random()}", "set": sorted({"b", "a"})}
def unseeded(seed):
    for number in range(100):
        yield {"id": number, "text": f"text {random.random()}"}
def clock(seed):
    for number in range(3):
        yield {"text": "x", "when": {"ns": [time.perf_counter_ns()]}}
def growing(seed):
    calls.append(1)
    for number in range(2 + len(calls)):
        yield {"text": f"text {number}"}
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("fixed", ""),
        ("unseeded", "'text' of row 1 is another one each time"),
        ("clock", "'when' of row 1 is another one each time"),
        ("growing", "row 4 is there one time and not the other"),
    ],
)
def test_a_generator_that_makes_other_rows_each_time_is_refused(
    tokenize: Any, tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, words: str
) -> None:
    (tmp_path / f"fickle_{function}.py").write_text(FICKLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"format": "text", "row_length": 32, "generators": [{"function": f"fickle_{function}:{function}"}]}
    if not words:
        tokenize(config, tokenizer=tokenizer_path)
        return
    with pytest.raises(Refused, match=rf"generator fickle_{function}:{function} makes other rows .*: {words}, so"):
        tokenize(config, tokenizer=tokenizer_path)


def test_limit_keeps_the_first_rows_and_train_only_keeps_a_generator_out_of_validation(
    tokenize: Any, folder: Any, tokenizer_path: Path
) -> None:
    generator = {"function": "stages.examples.arithmetic:prompts", "arguments": {"count": 50}}
    config = {"format": "prompt", "generators": [{**generator, "train_only": True}], "validation_fraction": 0.5}
    data = folder({"a.jsonl": json_lines(*({"prompt": f"q {n}"} for n in range(20)))})
    result = tokenize(config, data=data, tokenizer=tokenizer_path)
    assert all(prompt.prompt.startswith("q ") for prompt in read_prompts(result.folder, "validation"))
    assert result.metrics["rows"] + result.metrics["validation_rows"] == 70
    limited = tokenize({"format": "prompt", "limit": 3}, data=data, tokenizer=tokenizer_path)
    assert [prompt.prompt for prompt in read_prompts(limited.folder)] == ["q 0", "q 1", "q 2"]


def test_a_stop_ends_the_step(tokenize: Callable[..., Any], folder: Any, tokenizer_path: Path) -> None:
    data = folder({"a.jsonl": json_lines(*TEXT)})
    with pytest.raises(Stopped):
        tokenize({"format": "text", "row_length": 64}, data=data, tokenizer=tokenizer_path, stop=True)
    with pytest.raises(Stopped):
        tokenize({"format": "text", "row_length": 64, "train_tokenizer": BPE}, data=data, stop=True)


def test_a_folder_that_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"has no dataset\.json"):
        read_info(tmp_path)
    (tmp_path / "dataset.json").write_text('{"holds": "text"}')
    with pytest.raises(Refused, match="KeyError: 'splits'"):
        read_info(tmp_path)


@pytest.mark.skipif(not (SHARED / "gsm8k-train.jsonl").exists(), reason="the shared data folder is not there")
def test_gsm8k_is_used_as_it_is(tokenize: Any, folder: Any, tokenizer_path: Path) -> None:
    lines = (SHARED / "gsm8k-train.jsonl").read_bytes().splitlines(keepends=True)[:200]
    data = folder({"gsm8k-train.jsonl": b"".join(lines)})
    templates = {"prompt_template": "{question}", "completion_template": "{answer}"}
    chats = tokenize({"format": "chat", "row_length": 2048, **templates}, data=data, tokenizer=tokenizer_path)
    assert read_info(chats.folder).kept == 200
    prompts = tokenize({"format": "prompt", "prompt_template": "{question}"}, data=data, tokenizer=tokenizer_path)
    row = json.loads(lines[0])
    first = read_prompts(prompts.folder)[0]
    assert first.prompt == row["question"]
    assert first.columns["answer"] == row["answer"]


@pytest.mark.parametrize(("unknown", "told"), [("<unk>", True), ("</s>", False), (None, False)])
def test_text_that_the_vocabulary_cannot_write_is_told(
    tokenize: Any, folder: Any, tmp_path: Path, unknown: str | None, told: bool
) -> None:
    """Some tokenizers name their end of text as the unknown token too; counting that would tell nothing."""
    words = {"<unk>": 0, "</s>": 1, "the": 2, "cat": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>", "</s>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unknown, eos_token="</s>").save_pretrained(tmp_path)
    config = {"format": "text", "row_length": 16}
    result = tokenize(config, data=folder({"a.jsonl": json_lines({"text": "the naïve cat sat"})}), tokenizer=tmp_path)
    warnings = result.logs("warning")
    assert any("2 tokens are <unk>, for the vocabulary cannot write" in text for text in warnings) == told


def test_chats_that_someone_wrote_out_as_text_are_told_of(tokenize: Any, folder: Any, tokenizer_path: Path) -> None:
    chats = [{"text": f"<|user|>{number}<|end|><|assistant|>no"} for number in range(3)]
    prose = [{"text": "plain"}, {"text": "more"}, {"text": "ends with <|end|>"}]
    for rows, told in ((chats, True), (prose, False)):
        data = folder({"a.jsonl": json_lines(*rows)})
        result = tokenize({"format": "text", "row_length": 64}, data=data, tokenizer=tokenizer_path)
        assert any("control token" in text for text in result.logs("warning")) == told
    data = folder({"a.jsonl": json_lines({"prompt": "<|user|>q<|assistant|>"})})
    settings = {"format": "prompt", "apply_chat_template": False}
    result = tokenize(settings, data=data, tokenizer=tokenizer_path)
    assert "1 of the first 1 texts hold a control token such as '<|user|>'" in result.logs("warning")[0]
