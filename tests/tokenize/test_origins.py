"""Every row of a dataset leads back to the line it was read from: checked by decoding the row and reading the line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from stages.tokenize.dataset import read_packed, read_preferences, read_prompts
from stages.tokenize.origins import Origin, number_of, read_origins

WORDS = ["river", "lake", "stone", "cloud", "ember", "field", "sand", "moss", "fern", "oak"]


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def text_of(number: int, words: int) -> str:
    return f"{number}: " + " ".join(WORDS[(number * 3 + index) % len(WORDS)] for index in range(words))


@pytest.mark.parametrize("settings", [{}, {"pack": False}, {"row_length": 24}])
def test_each_piece_of_a_packed_row_is_the_text_of_its_line(
    tokenize: Callable[..., Any], folder: Callable[..., Path], tokenizer_path: Path, settings: dict[str, Any]
) -> None:
    rows = [{"text": text_of(number, 3 + number % 11)} for number in range(1, 41)]
    data = folder({"b.jsonl": json_lines(rows[:25]), "a/c.jsonl": json_lines(rows[25:])})
    config = {"format": "text", "row_length": 64, "validation_fraction": 0.2, **settings}
    made = tokenize(config, data=data, tokenizer=tokenizer_path)
    decode = Tokenizer.from_file(str(made.folder / "tokenizer" / "tokenizer.json")).decode
    lines = {path: (data / path).read_text().splitlines() for path in ("b.jsonl", "a/c.jsonl")}
    seen = set()
    for split in ("train", "validation"):
        packed = read_packed(made.folder, split)
        pieces = read_origins(made.origins / f"{split}.parquet")
        covered = 0
        documents: dict[tuple[str, int], list[tuple[int, list[int]]]] = {}
        for piece in pieces:
            ids = packed.input_ids[piece.row, piece.column : piece.column + piece.length].tolist()
            assert len(set(packed.segment_ids[piece.row, piece.column : piece.column + piece.length].tolist())) == 1
            documents.setdefault((piece.origin.path, piece.origin.number), []).append((piece.start, ids))
            covered += piece.length
        assert covered == int((packed.segment_ids > 0).sum())
        for (path, number), parts in documents.items():
            text = decode([token for _, ids in sorted(parts) for token in ids], skip_special_tokens=True)
            assert text == json.loads(lines[path][number - 1])["text"]
            seen.add((path, number))
    assert len(seen) == 40


def test_a_dropped_row_moves_no_number(
    tokenize: Callable[..., Any], folder: Callable[..., Path], tokenizer_path: Path
) -> None:
    rows = [{"prompt": "one"}, {"prompt": "one"}, {"wrong": "x"}, {"prompt": "four"}]
    data = folder({"p.jsonl": json_lines(rows[:2]) + "\n" + json_lines(rows[2:])})  # line 3 is blank
    config = {"format": "prompt", "on_bad_rows": "drop"}
    made = tokenize(config, **{"data.mine": data}, tokenizer=tokenizer_path)
    assert [prompt.prompt for prompt in read_prompts(made.folder)] == ["one", "four"]
    pieces = read_origins(made.origins / "train.parquet")
    assert [piece.origin for piece in pieces] == [Origin("data.mine", "p.jsonl", 1), Origin("data.mine", "p.jsonl", 5)]
    assert read_origins(made.origins / "train.parquet", rows=[1])[0].origin.number == 5


def test_pairs_of_a_file_lead_to_their_lines(
    tokenize: Callable[..., Any], folder: Callable[..., Path], tokenizer_path: Path
) -> None:
    rows = [{"prompt": f"q{n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(6)]
    made = tokenize({"format": "preference"}, data=folder({"d.jsonl": json_lines(rows)}), tokenizer=tokenizer_path)
    pairs, pieces = read_preferences(made.folder), read_origins(made.origins / "train.parquet")
    for piece in pieces:
        assert rows[piece.origin.number - 1]["prompt"] == pairs[piece.row].prompt
        assert piece.origin.other == 0


def test_rows_of_generators_are_numbered(
    tokenize: Callable[..., Any], folder: Callable[..., Path], tokenizer_path: Path
) -> None:
    function = "stages.examples.arithmetic:prompts"
    config = {"format": "prompt", "generators": [{"function": function, "arguments": {"count": 5}}]}
    made = tokenize(config, tokenizer=tokenizer_path)
    origins = [piece.origin for piece in read_origins(made.origins / "train.parquet")]
    assert origins == [Origin(function, "", number) for number in range(1, 6)]


def test_a_renamed_file_changes_the_origins_and_not_the_dataset(
    tokenize: Callable[..., Any], folder: Callable[..., Path], tokenizer_path: Path
) -> None:
    rows = json_lines([{"text": text_of(number, 8)} for number in range(9)])
    made = [
        tokenize({"format": "text", "row_length": 32}, data=folder({name: rows}), tokenizer=tokenizer_path)
        for name in ("before.jsonl", "after.jsonl")
    ]
    one, other = (
        {path.name: path.read_bytes() for path in outcome.folder.rglob("*") if path.is_file()} for outcome in made
    )
    assert one == other
    paths = [set(pq.read_table(outcome.origins / "train.parquet")["path"].to_pylist()) for outcome in made]
    assert paths == [{"before.jsonl"}, {"after.jsonl"}]


def test_the_number_stands_behind_the_files_name() -> None:
    assert number_of("a line 3.jsonl line 3,017", "a line 3.jsonl") == 3017
    assert number_of("notes line 2", "notes line 2") == 0  # a whole file that is called so
    assert number_of("t.parquet row 12", "t.parquet") == 12


def test_a_table_of_many_files_holds_nothing_of_the_memory_that_it_was_made_in(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from stages.tokenize.origins import Origin, OriginWriter
writer = OriginWriter()
for number in range(60):
    writer.add(Origin("data.files", f"part-{number % 20}.txt", number))
writer.write(Path(sys.argv[1]), None)
"""
    made = []
    for filling in ("1", "77"):  # what glibc fills new memory with
        path = tmp_path / filling
        surroundings = os.environ | {"MALLOC_PERTURB_": filling, "ARROW_DEFAULT_MEMORY_POOL": "system"}
        subprocess.run([sys.executable, "-c", script, str(path)], env=surroundings, check=True, timeout=60)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    pieces = read_origins(tmp_path / "1")
    assert [piece.origin.path for piece in pieces] == [f"part-{number % 20}.txt" for number in range(60)]
    assert {piece.origin.source for piece in pieces} == {"data.files"}
