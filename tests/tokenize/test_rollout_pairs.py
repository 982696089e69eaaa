from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.contract import Refused
from stages.tokenize.dataset import read_info, read_preferences
from stages.tokenize.tokenizer import TextTokenizer


def write_rollouts(
    path: Path, tokenizer: TextTokenizer, rows: list[tuple[str, str, float, bool]], without: tuple[str, ...] = ()
) -> Path:
    """A table of rollouts: (prompt, completion, reward, finished) a row."""
    path.mkdir()
    prompt_ids = [
        tokenizer.hf.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt, *_ in rows
    ]
    ids = [
        [*tokenizer.backend.encode(text, add_special_tokens=False).ids, *([tokenizer.eos_id] if finished else [])]
        for _, text, _, finished in rows
    ]
    table = {
        "step": [0] * len(rows),
        "id": [prompt for prompt, *_ in rows],
        "prompt": [prompt for prompt, *_ in rows],
        "prompt_ids": pa.array(prompt_ids, pa.list_(pa.int32())),
        "completion": [text for _, text, *_ in rows],
        "completion_ids": pa.array(ids, pa.list_(pa.int32())),
        "reward": [reward for *_, reward, _ in rows],
        "finished": [finished for *_, finished in rows],
    }
    kept = {name: values for name, values in table.items() if name not in without}
    pq.write_table(pa.table(kept), path / "rollouts.parquet")
    return path


ROWS = [
    ("one", "good", 1.0, True),
    ("one", "bad", 0.0, True),
    ("one", "bad", 0.0, True),  # sampled twice
    ("one", "worse", -1.0, False),
    ("one", "fine", 0.5, True),
    ("two", "right", 1.0, True),
    ("two", "also right", 1.0, True),
    ("three", "right but cut", 1.0, False),
    ("three", "wrong", 0.0, True),
]


def pairs_of(tokenize: Any, path: Path, tokenizer_path: Path, **settings: Any) -> list[tuple[str, str, str]]:
    result = tokenize({"format": "preference", **settings}, data=path, tokenizer=tokenizer_path)
    return [(pair.prompt, pair.chosen, pair.rejected) for pair in read_preferences(result.folder)]


def test_a_prompt_gives_its_best_and_its_worst_completion(
    tokenize: Any, tmp_path: Path, small_tokenizer: TextTokenizer, tokenizer_path: Path
) -> None:
    path = write_rollouts(tmp_path / "rollouts", small_tokenizer, ROWS)
    # Of "two" all rewards are equal, and the better one of "three" has no end.
    assert pairs_of(tokenize, path, tokenizer_path) == [("one", "good", "worse")]


def test_more_pairs_of_a_prompt_join_the_next_best_with_the_next_worst(
    tokenize: Any, tmp_path: Path, small_tokenizer: TextTokenizer, tokenizer_path: Path
) -> None:
    path = write_rollouts(tmp_path / "rollouts", small_tokenizer, ROWS)
    expected = [("one", "good", "worse"), ("one", "fine", "bad")]
    assert pairs_of(tokenize, path, tokenizer_path, pairs_per_prompt=4) == expected
    assert pairs_of(tokenize, path, tokenizer_path, pairs_per_prompt=4, min_reward_gap=0.5) == expected[:1]
    assert pairs_of(tokenize, path, tokenizer_path, pairs_per_prompt=4, limit=1) == expected[:1]


def test_the_ids_of_pairs_are_those_that_were_sampled(
    tokenize: Any, tmp_path: Path, small_tokenizer: TextTokenizer, tokenizer_path: Path
) -> None:
    path = write_rollouts(tmp_path / "rollouts", small_tokenizer, ROWS)
    result = tokenize({"format": "preference"}, data=path, tokenizer=tokenizer_path)
    (pair,) = read_preferences(result.folder)
    table = pq.read_table(path / "rollouts.parquet").to_pylist()
    assert pair.prompt_ids == table[0]["prompt_ids"]
    assert pair.chosen_ids == table[0]["completion_ids"]
    assert pair.rejected_ids == table[3]["completion_ids"]
    assert read_info(result.folder).dropped == {"no_pair": 2}


def test_rollouts_of_another_tokenizer_are_refused(
    tokenize: Any, tmp_path: Path, small_tokenizer: TextTokenizer, tokenizer_path: Path
) -> None:
    path = write_rollouts(tmp_path / "rollouts", small_tokenizer, ROWS)
    table = pq.read_table(path / "rollouts.parquet")
    other = [[index + 3 for index in ids] for ids in table["completion_ids"].to_pylist()]
    position = table.schema.get_field_index("completion_ids")
    for ids, message in ((other, "sampled with another tokenizer"), ([[10_000]] * len(ROWS), "token id 10000")):
        changed = table.set_column(position, "completion_ids", pa.array(ids, pa.list_(pa.int32())))
        pq.write_table(changed, path / "rollouts.parquet")
        with pytest.raises(Refused, match=message):
            pairs_of(tokenize, path, tokenizer_path)


def test_rollouts_without_a_pair_are_refused(
    tokenize: Any, tmp_path: Path, small_tokenizer: TextTokenizer, tokenizer_path: Path
) -> None:
    path = write_rollouts(tmp_path / "rollouts", small_tokenizer, ROWS[5:7])
    with pytest.raises(Refused, match=r"no row is left .*no_pair 1"):
        pairs_of(tokenize, path, tokenizer_path)


def test_a_table_that_is_not_of_rollouts_is_refused(
    tokenize: Any, tmp_path: Path, small_tokenizer: TextTokenizer, tokenizer_path: Path
) -> None:
    path = write_rollouts(tmp_path / "rollouts", small_tokenizer, ROWS, without=("reward",))
    with pytest.raises(Refused, match="has no column 'reward'"):
        pairs_of(tokenize, path, tokenizer_path)
    with pytest.raises(Refused, match="set format: preference"):
        tokenize({"format": "prompt"}, data=path, tokenizer=tokenizer_path)
    (path / "rollouts.parquet").write_bytes(b"PAR1")
    with pytest.raises(Refused, match=r"rollouts\.parquet cannot be read"):
        pairs_of(tokenize, path, tokenizer_path)
