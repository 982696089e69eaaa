"""The rollout stage, its table, and the progress it keeps."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from tiny_alignment import folder_bytes, make_checkpoint, make_tokenizer, prompt_rows

from stages.contract import Refused, Stopped
from stages.modeling.checkpoint import load_model
from stages.modeling.logprobs import token_logprobs
from stages.rollout.config import Config
from stages.rollout.stage import run
from stages.sampling import records
from stages.sampling.batches import completion_batch

SETTINGS = {
    "reward_funcs": ["tiny_rewards:right", "tiny_rewards:ended"],
    "reward_weights": [1.0, 0.5],
    "num_generations": 3,
    "max_completion_length": 6,
    "prompts_per_block": 2,
}


@pytest.fixture
def prompts(dataset, checkpoint):
    return dataset(prompt_rows(7), checkpoint, format="prompt")


def test_every_prompt_has_its_completions_with_logprobs_rewards_and_columns(attempt, checkpoint, prompts):
    one = attempt(Config(**SETTINGS), {"model": checkpoint, "prompts": prompts})
    run(one.context)
    rows = pq.read_table(one.output / "rollouts.parquet").to_pylist()
    assert len(rows) == 21
    assert [row["step"] for row in rows] == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 3
    source = pq.read_table(prompts / "train.parquet").to_pylist()
    assert [row["id"] for row in rows] == [row["id"] for row in source for _ in range(3)]
    model = load_model(checkpoint).eval()
    tokenizer = make_tokenizer()
    for row in rows:
        answer = json.loads(row["columns"])["answer"]
        assert row["reward/right"] == float(row["completion"] == answer)
        assert row["reward"] == row["reward/right"] + 0.5 * row["finished"]
        assert row["finished"] == (row["completion_ids"][-1] == 1)
        assert row["completion"] == tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
        batch = completion_batch([(row["prompt_ids"], row["completion_ids"])])
        with torch.no_grad():
            expected = token_logprobs(model, batch["input_ids"], batch["target_mask"])[batch["target_mask"]]
        assert row["logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
    assert one.context.final_metrics["completions"] == 21


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(attempt, checkpoint, prompts):
    inputs = {"model": checkpoint, "prompts": prompts}
    whole = attempt(Config(**SETTINGS), inputs, key="cd" * 32)
    run(whole.context)
    first = attempt(Config(**SETTINGS), inputs, stop_when=lambda events: len(events) > 0)
    with pytest.raises(Stopped, match="saved after block 2 of 4"):
        run(first.context)
    second = attempt(Config(**SETTINGS), inputs)
    run(second.context)
    assert {"type": "resumed", "at": 2} in second.events
    assert folder_bytes(second.output) == folder_bytes(whole.output)


def test_the_table_does_not_show_where_a_run_was_resumed(tmp_path, attempt, checkpoint, prompts):
    one = attempt(Config(**SETTINGS), {"model": checkpoint, "prompts": prompts})
    run(one.context)
    table = records.read(one.output)
    pieces = [table.slice(0, 5), table.slice(5, 9), table.slice(14)]
    once = records.from_bytes(records.to_bytes(pieces[:2]))
    (tmp_path / "joined").mkdir()
    records.write([once, records.from_bytes(records.to_bytes(pieces[2:]))], tmp_path / "joined")
    assert folder_bytes(tmp_path / "joined") == folder_bytes(one.output)


def test_limit_takes_the_first_prompts(attempt, checkpoint, prompts):
    one = attempt(Config(**SETTINGS, limit=2), {"model": checkpoint, "prompts": prompts})
    run(one.context)
    assert pq.read_metadata(one.output / "rollouts.parquet").num_rows == 6


def test_prompts_longer_than_the_model_are_refused(attempt, checkpoint, prompts):
    config = Config(**SETTINGS | {"max_completion_length": 90})
    with pytest.raises(Refused, match="more than the model's 96 positions"):
        run(attempt(config, {"model": checkpoint, "prompts": prompts}).context)


def test_prompts_of_another_tokenizer_are_refused(tmp_path, attempt, prompts):
    other = make_checkpoint(tmp_path / "other", tokenizer=make_tokenizer(extra=["<|odd|>"]))
    with pytest.raises(Refused, match="input prompts was tokenized with another vocabulary"):
        run(attempt(Config(**SETTINGS), {"model": other, "prompts": prompts}).context)


def test_equal_completions_at_temperature_zero_are_refused_by_the_config():
    with pytest.raises(ValueError, match="num_generations above 1 at temperature 0"):
        Config(**SETTINGS, temperature=0)
    with pytest.raises(ValueError, match="reward_weights has 3 values"):
        Config(**SETTINGS | {"reward_weights": [1, 1, 1]})
